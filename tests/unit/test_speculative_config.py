"""What `SpeculativeConfig.resolve` decides, and how often it reads what it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec import checkpoint, method, rejection
from specdec.policy.cost_table import CostTable
from specdec.speculative_config import SpeculativeConfig
from support.methods import example_settings, tiny

NGRAM = {"method": "ngram", "prompt_lookup_min": 2}


@pytest.fixture(scope="module")
def drafter() -> str:
    """The directory of an untrained EAGLE-3 drafter."""
    directory: str = example_settings("eagle3", tiny())["model"]
    return directory


def test_a_plan_of_several_proposers(drafter: str) -> None:
    config = SpeculativeConfig(method="hybrid", num_speculative_tokens=4, model=drafter, proposers=[NGRAM, {"method": None}])
    plan = config.resolve()
    assert [component.method for component in plan.components] == ["ngram", "eagle3"]
    assert plan.settings["proposers"] == [NGRAM, {"method": "eagle3", "model": drafter}]
    assert "model" not in plan.settings, "it is the second proposer's"
    assert plan.drafters == [drafter]
    assert plan.config is config


def test_a_checkpoint_is_read_once_for_a_plan(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing parses again: one object for the config and one for each proposer, one look at the checkpoint."""
    counts = {"objects": 0, "checkpoints": 0}
    construct = SpeculativeConfig.__init__
    method_of = checkpoint.method_of

    def counted_construct(self: SpeculativeConfig, **values: Any) -> None:
        counts["objects"] += 1
        construct(self, **values)

    def counted_method_of(*arguments: Any) -> str:
        counts["checkpoints"] += 1
        return method_of(*arguments)

    monkeypatch.setattr(SpeculativeConfig, "__init__", counted_construct)
    monkeypatch.setattr(checkpoint, "method_of", counted_method_of)
    plan = SpeculativeConfig(method="hybrid", num_speculative_tokens=2, proposers=[NGRAM, {"model": drafter}]).resolve()
    plan.build(tiny())
    plan.policy.build(tiny(), plan.build(tiny())[0], 1)
    assert counts == {"objects": 3, "checkpoints": 1}


def test_a_policy_has_its_table_and_schedule(tmp_path: Path) -> None:
    table = CostTable([1, 8], [0, 2], [[1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0], [0.0, 2.0]], {}, schedule=[[1, 8, 2]])
    table.save(tmp_path / "cost.json")
    path = str(tmp_path / "cost.json")
    adaptive = SpeculativeConfig(**NGRAM, num_speculative_tokens="auto", cost_table=path).resolve().policy
    assert (adaptive.auto, adaptive.needs_costs, adaptive.cost_table) == (True, True, table)
    scheduled = SpeculativeConfig(**NGRAM, num_speculative_tokens=3, num_speculative_tokens_per_batch_size=path).resolve()
    assert (scheduled.policy.schedule, scheduled.policy.needs_costs) == ([[1, 8, 2]], False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "ngram", "num_speculative_tokens": 2, "min_score": 1.0}, ["'ngram' takes no setting 'min_score'"]),
        ({"method": "suffix", "rejection_sample_method": "standrad"}, ["unknown rejection_sample_method", "'standard'"]),
        ({"method": "extract_hidden_states", "num_speculative_tokens": 1}, ["needs shared_storage_path"]),
        ({"method": "suffix", "use_heterogeneous_vocab": True}, ["is for draft_model, pard, not for 'suffix'"]),
        ({"method": "ngram", "num_speculative_tokens": 2, "cost_table": "no/such.json"}, ["cost_table is for"]),
    ],
)
def test_mistakes_that_no_target_is_needed_for(config: dict[str, Any], words: list[str], one_line: Any) -> None:
    one_line(SpeculativeConfig(**config).resolve, *words)


@pytest.mark.parametrize("name", method.names())
def test_a_method_with_its_examples_has_a_plan(name: str) -> None:
    examples = example_settings(name, tiny())
    length = {} if name in ("none", "suffix") else {"num_speculative_tokens": 1}
    if method.facts(name).composes:
        examples["proposers"] = [NGRAM, {"method": None}]
    if name == "custom_class":
        examples["model"] = "support.table.Ragged"
    assert SpeculativeConfig(method=name, **length, **examples).resolve().method == name


@pytest.mark.parametrize("name", rejection.names())
def test_a_scheme_with_its_examples_is_what_the_plan_names(name: str) -> None:
    """So its settings are keys of the config, and none of the method's."""
    examples = getattr(rejection.find(name), "EXAMPLE", {})
    plan = SpeculativeConfig(method="ngram", num_speculative_tokens=3, rejection_sample_method=name, **examples).resolve()
    assert plan.scheme == name
    assert plan.scheme_params == examples
