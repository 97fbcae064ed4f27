"""docs/extending.md: its files, written into a scratch directory, are found, train, draft, are shared and verify."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import checkpoint, method, rejection
from specdec.checkpoint import lint
from specdec.config import CONF, read
from specdec.core import Draft
from specdec.drafter.trainable import TrainableDrafter
from specdec.training.features import OnlineFeatures
from support.drafters import SAMPLES, decode, plain, prompts
from support.targets import loaded
from support.tree import ROOT

FILES = {
    path: body
    for _, path, body in re.findall(
        r"```(python|yaml)\n# (\S+\.(?:py|yaml))\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL
    )
}
ROOMS = (method, rejection, checkpoint)


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the page's files, beside those of the tree."""
    root = tmp_path_factory.mktemp("extending")
    for path, body in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(body)
    with pytest.MonkeyPatch.context() as patch:
        for room in ROOMS:
            patch.setattr(room, "__path__", [*room.__path__, str(root / room.__name__.replace(".", "/"))])
        importlib.invalidate_caches()
        checkpoint.formats.cache_clear()
        yield root
    checkpoint.formats.cache_clear()


def drafter(tmp_path: Path, k: int = 3) -> Any:
    settings = method.find("heads").example_settings(loaded("tiny"), tmp_path)
    return method.build("heads", loaded("tiny"), num_speculative_tokens=k, **settings)


def test_a_file_for_every_yaml(scratch: Path) -> None:
    assert len(FILES) == 9
    for group in (method, rejection):
        for name in group.names():
            path = f"conf/{group.__name__.split('.')[1]}/{name}.yaml"
            assert (CONF.parent / path).exists() or path in FILES
    for name in ("repeat", "heads"):
        assert set(read(scratch / "conf" / "method" / f"{name}.yaml")) - {"name"} == set(method.settings(name))


def test_the_recipe_has_the_keys_of_the_method(scratch: Path) -> None:
    heads: Any = method.find("heads")
    recipe: Any = read(scratch / "conf" / "train" / "heads.yaml")
    heads.architecture_type(**recipe["drafter"])
    heads.init_type(**recipe["init"])
    heads.objective_type(**recipe["objective"])
    assert set(recipe["init"]) == set(heads.init_type.model_fields)
    of_every_recipe = read(CONF / "train.yaml")["train"]["objective"]
    assert set(recipe["objective"] | of_every_recipe) == set(heads.objective_type.model_fields)


def test_the_method_and_the_drafter_lose_nothing(tmp_path: Path) -> None:
    repeat = method.build("repeat", loaded("tiny"), num_speculative_tokens=3)
    for proposer in (repeat, drafter(tmp_path)):
        assert decode(loaded("tiny"), proposer, prompts(40, 23)) == plain("tiny", (40, 23))


def test_the_drafter_trains(tmp_path: Path) -> None:
    heads = drafter(tmp_path)
    assert isinstance(heads, TrainableDrafter)
    heads.for_training(method.find("heads").objective_type(), method.find("heads").init_type(train_lm_head=False))
    batch = OnlineFeatures(loaded("tiny"), heads.hidden_layers, 0)(SAMPLES)
    optimizer = torch.optim.Adam([p for p in heads.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss, sums = heads(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert sums.rows_K.shape == (3,)


def test_the_format_is_written_read_and_checked(tmp_path: Path) -> None:
    saved = method.find("heads").init_checkpoint(loaded("tiny"), {}, method.find("heads").init_type(train_lm_head=False))
    checkpoint.write(saved, tmp_path, "vllm")
    assert checkpoint.method_of(tmp_path) == "heads"
    again = checkpoint.load(tmp_path)
    assert again.config == saved.config
    for name, tensor in saved.tensors.items():
        assert torch.equal(again.tensors[name], tensor)
    assert lint.loads(lint.check(tmp_path)) == {"vllm": True, "sglang": False, "speculators": False}


def test_the_serve_command_has_a_name_for_every_method_that_an_engine_loads() -> None:
    for kind in checkpoint.formats().values():
        for name, engines in kind.WRITES.items():
            for engine in engines:
                served_by = "sglang" if engine == "sglang" else "vllm"  # vLLM serves the speculators format too
                assert served_by in method.facts(name).serving, (name, engine)


def test_the_scheme_accepts_what_is_almost_the_likeliest() -> None:
    """Of p = (.6, .4) token 1 is .2 below token 0."""
    p_BJV = torch.tensor([[[0.6, 0.4], [0.5, 0.5]]]).expand(2, 2, 2)
    draft = Draft(torch.tensor([[0], [1]]), torch.tensor([1, 1]))
    u_BJ = torch.full((2, 2), 0.4, dtype=torch.float64)
    verdict = rejection.build("relaxed")(draft, p_BJV, u_BJ)
    assert verdict.num_accepted_B.tolist() == [1, 0]
    assert verdict.token_B.tolist() == [0, 0]
    assert not rejection.build("relaxed").lossless
    assert rejection.build("relaxed", relaxed_delta=0.25)(draft, p_BJV, u_BJ).num_accepted_B.tolist() == [1, 1]
    assert rejection.all_settings()["relaxed_delta"] is float
    with pytest.raises(ValueError, match=r"relaxed_delta=1 must be at least 0"):
        rejection.build("relaxed", relaxed_delta=1)
