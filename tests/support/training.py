"""Short trainings with `fit` and what is compared about them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec import method
from specdec.checkpoint.native import Checkpoint
from specdec.drafter.base import Init
from specdec.drafter.batch import Sample
from specdec.training.features import OnlineFeatures
from specdec.training.loop import fit
from specdec.training.settings import Settings
from support.drafters import REDUCED
from support.targets import loaded


def sample(name: str, length: int, begin: int) -> Sample:
    rng = np.random.default_rng([length, *name.encode()])
    return Sample(name, rng.integers(0, 320, length), np.arange(length) >= begin)


SAMPLES = [sample(f"s{i}", 10 + 5 * (i % 6), 4 + i % 3) for i in range(14)]


@cache
def fresh(kind: str) -> Checkpoint:
    return method.find(kind).init_checkpoint(loaded(), {}, Init(), REDUCED if kind == "eagle3" else None)


@cache
def statistics(kind: str) -> Tensor:
    layers = method.find(kind)(loaded(), fresh(kind), 1).hidden_layers
    return OnlineFeatures(loaded(), layers)(SAMPLES).hidden(layers)


def trainable(kind: str = "eagle3", **objective: Any) -> Any:
    """A drafter ready to be trained."""
    drafter = method.find(kind)(loaded(), fresh(kind), 1)
    defaults = {} if kind == "eagle" else {"ttt_steps": 3}
    drafter.for_training(drafter.objective_type(**defaults | objective), Init(), statistics(kind))
    return drafter


@dataclass
class Trained:
    """What a call of `fit` leaves: its result, the rows of metrics, the weights and the directory."""

    result: dict[str, Any]
    rows: list[dict[str, Any]]
    weights: dict[str, Tensor]
    out_dir: Path


@cache
def online(kind: str) -> OnlineFeatures:
    return OnlineFeatures(loaded(), method.find(kind)(loaded(), fresh(kind), 1).hidden_layers, 1 << 28)


def train(
    out_dir: Path,
    kind: str = "eagle3",
    *,
    drafter: Any = None,
    source: Any = None,
    samples: Sequence[Sample] = SAMPLES,
    held_out: Sequence[Sample] = (),
    log: Callable[[dict[str, Any]], None] = lambda row: None,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> Trained:
    """`fit` with small settings. more: other arguments of `fit`."""
    drafter = drafter or trainable(kind)
    rows = []

    def kept(row: dict[str, Any]) -> None:
        rows.append(row)
        log(row)

    defaults = {"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 2, "lr": 1e-3, "mixed_precision": "no"}
    often = {"log_every": 1, "eval_every": 100, "save_every": 100}
    run_settings = Settings(**defaults | often | settings)
    result = fit(drafter, source or online(kind), samples, held_out, run_settings, out_dir, log=kept, **more or {})
    return Trained(result, rows, {key: value.detach().clone() for key, value in drafter.state_dict().items()}, out_dir)


def same(one: dict[str, Tensor], other: dict[str, Tensor], gap: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=gap, msg=lambda message, name=name: f"{name}: {message}")


def state_of(directory: Path) -> dict[str, Tensor]:
    """Weights, moments and step counters of a checkpoint."""
    return load_file(directory / "training" / "state.safetensors")


CLOCKS = {"tokens_per_s", "features_share", "outside_share"}


def same_rows(one: list[dict[str, Any]], other: list[dict[str, Any]], gap: float = 1e-5) -> None:
    """Rows of metrics agree, but for what a clock says."""
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for a_row, b_row in zip(one, other, strict=True):
        assert a_row.keys() == b_row.keys(), f"step {a_row['step']}"
        for key in sorted(a_row.keys() - CLOCKS):
            pairs = [(a_row[key], b_row[key])]
            if isinstance(a_row[key], list):
                pairs = list(zip(a_row[key], b_row[key], strict=True))
            for a, b in pairs:  # a rate with nothing behind it is None
                assert a is b is None or a == pytest.approx(b, rel=gap, abs=gap), f"step {a_row['step']}: {key}"


def stop_at(step: int, number: int) -> Callable[[int], None]:
    """For `advance`: sends this process a signal after a step."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if done == step:
            os.kill(os.getpid(), number)

    return advance


WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "ran", "to", "see", "big", "red", "dogs", "in", "my", "old", "town"]


def conversations(path: Path, count: int = 24, answers: bool = True) -> Path:
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(count):
        turns = [{"role": "user", "content": " ".join(rng.choice(WORDS, 3))}]
        if answers:
            turns.append({"role": "assistant", "content": " ".join(rng.choice(WORDS, 6))})
        lines.append(json.dumps({"messages": turns}) + "\n")
    path.write_text("".join(lines))
    return path


WORKER = """
import json, os, runpy, signal, sys
import torch
from specdec.training import loop
fit, rank = loop.fit, int(os.environ["RANK"])

def stopping(*given, advance, **more):
    def counted(count):
        global steps
        advance(count)
        steps += count
        if stop and rank == 1 and steps == 10:  # one of them gets it, and not the one that writes
            os.kill(os.getpid(), signal.SIGTERM)
    return fit(*given, advance=counted, **more)

loop.fit = stopping
script = sys.argv[1]
for number, (stop, *arguments) in enumerate(json.loads(sys.argv[2])):
    steps, sys.argv = 0, [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        print(f"rank {rank}, job {number}: {ended.code}", flush=True)
"""
