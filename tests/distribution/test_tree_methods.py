"""Trees of every method that drafts some, through the engine: T = 0 gives Hugging Face's tokens, `match` and `gumbel` those
of plain sampling, whatever is drafted, however many rows. (Distributions: test_trees.py, and the cases of support/table.py.)"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from specdec import hub, method
from specdec.core import Proposer, Request
from specdec.engine import Engine
from specdec.measure.stats import pool
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.rejection import Verifier
from specdec.speculative_config import SpeculativeConfig
from support.all_pairs import all_pairs
from support.methods import MAX_TOKENS, TREE_METHODS, decode, tiny_prompts, tree_settings
from support.reference import smollm2_prompts, smollm2_reference, tiny_reference
from support.targets import loaded

GROWN: dict[str, Any] = {}
STATIC: dict[str, Any] = {
    "speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]",
    "tree_topk": None,
    "tree_depth": None,
}
SAMPLED: dict[str, Any] = {"draft_sample_method": "probabilistic"}
TRAINED = [name for name in TREE_METHODS if "draft_sample_method" in method.settings(name)]


def build(name: str, target: CausalLM, **more: Any) -> tuple[Proposer, Verifier]:
    return SpeculativeConfig(**tree_settings(name, target, **more)).resolve().build(target)


@pytest.mark.parametrize(("name", "architecture", "batch_size"), all_pairs(TREE_METHODS, hub.TINY, [1, 3, 8]))
def test_greedy_on_tiny(name: str, architecture: str, batch_size: int) -> None:
    """Prompts on both sides of a chunk and of a window; and answers end, so that trees become chains, then nothing."""
    target = loaded(f"tiny-{architecture}")
    engine = Engine(target, *build(name, target), max_batch_size=batch_size, prefill_chunk_size=64)
    assert decode(engine, tiny_prompts(), MAX_TOKENS) == tiny_reference(target.name)


@pytest.mark.parametrize("scheme", ["block", "match", "gumbel"])
@pytest.mark.parametrize("more", [STATIC, SAMPLED], ids=["static", "sampled"])
@pytest.mark.parametrize("name", TRAINED)
def test_greedy_under_other_schemes(name: str, more: dict[str, Any], scheme: str) -> None:
    target = loaded("tiny-llama")
    engine = Engine(target, *build(name, target, rejection_sample_method=scheme, **more), max_batch_size=3)
    assert decode(engine, tiny_prompts()[:3], MAX_TOKENS[:3]) == tiny_reference(target.name)[:3]


def sampled(
    target: CausalLM, prompts: list[list[int]], parts: tuple[Proposer, Verifier], rows: int, temperature: float
) -> list[Request]:
    engine = Engine(target, *parts, max_batch_size=rows)
    params = SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
    requests = [Request(str(i), ids, params, seed=i) for i, ids in enumerate(prompts)]
    return sorted(engine.run(requests), key=lambda request: int(request.id))


def tokens(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


@cache
def plain(target_name: str, scheme: str, temperature: float) -> list[list[int]]:
    target = loaded(target_name)
    prompts = smollm2_prompts(target) if target_name == hub.DEFAULT else tiny_prompts()[:4]
    parts = SpeculativeConfig(method="none", rejection_sample_method=scheme).resolve().build(target)
    return tokens(sampled(target, prompts, parts, 1, temperature))


@pytest.mark.parametrize("scheme", ["match", "gumbel"])
@pytest.mark.parametrize("more", [GROWN, SAMPLED], ids=["grown", "sampled"])
@pytest.mark.parametrize("name", TREE_METHODS)
def test_sampling_is_plain_sampling(name: str, more: dict[str, Any], scheme: str) -> None:
    if more and name not in TRAINED:
        pytest.skip("a lookup draws nothing")
    target = loaded("tiny-llama")
    parts = build(name, target, rejection_sample_method=scheme, **more)
    assert tokens(sampled(target, tiny_prompts()[:4], parts, 3, 1.0)) == plain("tiny-llama", scheme, 1.0)


@pytest.mark.embedded
@pytest.mark.prove
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("scheme", ["match", "gumbel"])
def test_mtp_samples_as_plain_sampling_on_smollm2(scheme: str, rows: int, temperature: float) -> None:
    """With one module: eval/prove.py, which has the others, takes several, and these draft no trees."""
    target = loaded(hub.DEFAULT)
    parts = build("mtp", target, rejection_sample_method=scheme, **(GROWN if rows == 3 else SAMPLED))
    assert tokens(sampled(target, smollm2_prompts(target), parts, rows, temperature)) == plain(hub.DEFAULT, scheme, temperature)


@pytest.mark.embedded
@pytest.mark.parametrize("name", ["eagle3", "suffix", pytest.param("mtp", marks=pytest.mark.prove)])
def test_greedy_on_smollm2(name: str) -> None:
    target = loaded(hub.DEFAULT)
    engine = Engine(target, *build(name, target), max_batch_size=3, prefill_chunk_size=64)
    assert decode(engine, smollm2_prompts(target), [24, 16, 24, 8]) == smollm2_reference((24, 16, 24, 8))


def test_a_tree_of_the_target_itself_is_accepted_to_its_leaves() -> None:
    """Sampled with q = p every first child stands; under shared noise, too."""
    target = loaded("tiny-llama")
    for scheme in ("standard", "block", "gumbel"):
        parts = build("draft_model", target, rejection_sample_method=scheme, **SAMPLED)
        metrics = pool([request.stats for request in sampled(target, tiny_prompts()[:4], parts, 3, 1.0)])
        assert metrics["acceptance_rate_per_position"][0] == 1.0, scheme
        assert metrics["mean_acceptance_length"] > 3.5, scheme
        assert metrics["num_accepted_off_first_path"] == 0, scheme
