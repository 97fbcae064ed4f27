"""The training loop and `train/eagle.py`: what a step is, what survives an interruption, which checkpoint is the best, what is
refused.

Most of it calls `fit`, or the script within this process; processes are started where they are the point.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specdec import config, method, rejection
from specdec.checkpoint import native
from specdec.checkpoint.native import Checkpoint
from specdec.core import Request
from specdec.drafter import unroll
from specdec.drafter.base import Init
from specdec.drafter.batch import Batch, Sample
from specdec.drafter.losses import LossSums
from specdec.engine import Engine
from specdec.measure import stats
from specdec.model import packed_linear
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.training import data, loop, state
from specdec.training.evaluate import acceptance, prompts_of
from specdec.training.features import OnlineFeatures
from specdec.training.loop import fit
from specdec.training.samples import batch_indices, split_validation
from specdec.training.settings import Settings
from specdec.training.state import mixed_precision
from support.cli import EVAL, TRAIN, Cli, Done, call, contents, rows_of
from support.drafters import REDUCED
from support.processes import ended, fork, fork_ranks, start
from support.targets import loaded
from support.training import (
    SAMPLES,
    WORKER,
    Trained,
    conversations,
    online,
    same,
    same_rows,
    sample,
    state_of,
    stop_at,
    train,
    trainable,
)
from support.wandb_offline import offline_history

KINDS = ["eagle", "eagle3"]
BOTH = pytest.mark.parametrize("kind", KINDS)


HELD_OUT = [sample(f"h{i}", 14 + 3 * i, 5) for i in range(3)]


@dataclass
class Watched:
    """Features as training gets them, and the ids of every micro-batch. spoilt: says whether a sample's states are NaN."""

    inner: OnlineFeatures
    spoilt: Callable[[str], bool] = lambda name: False
    seen: list[list[str]] = field(default_factory=list)

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        self.seen.append([entry.id for entry in samples])
        batch = self.inner(samples)
        for place, entry in enumerate(samples):
            if self.spoilt(entry.id):
                first = int(batch.length_B[:place].sum())
                batch.hidden_NTD[first : first + len(entry.token_n)] = math.nan
        return batch


def steps_in(out_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in out_dir.glob("checkpoints/step-*"))


def step_dir(out_dir: Path, step: int) -> Path:
    return out_dir / "checkpoints" / f"step-{step:08d}"


# ------------------------------------------------------------------------------------------ what a step is


@BOTH
def test_micro_batches_and_their_order_do_not_matter(kind: str, tmp_path: Path) -> None:
    """Accumulated over 1, 2 or 8 samples at a time, or over the samples in another order, a step is the same step."""
    how = {"max_steps": 3, "global_batch_size": 8, "lr": 1e-4}
    at_once = train(tmp_path / "8", kind, micro_batch_size=8, **how)
    for size in (1, 2):
        parts = train(tmp_path / str(size), kind, micro_batch_size=size, **how)
        same(parts.weights, at_once.weights)
        same_rows(parts.rows, at_once.rows)

    def reversed_source(micro: Sequence[Sample]) -> Batch:
        return online(kind)(micro[::-1])

    turned = train(tmp_path / "turned", kind, micro_batch_size=8, source=reversed_source, **how)
    same(turned.weights, at_once.weights)
    same_rows(turned.rows, at_once.rows)


@BOTH
def test_the_loss_is_the_mean_over_tokens_or_over_samples(kind: str, tmp_path: Path) -> None:
    objective = {"feature_noise": 0.0} if kind == "eagle" else {}
    how: dict[str, Any] = {"max_steps": 1, "global_batch_size": 5}
    drafter = trainable(kind, **objective)
    picked = [SAMPLES[i] for i in batch_indices(0, len(SAMPLES), 5, 0)]
    losses = [drafter.loss(online(kind)([entry]))[0].item() for entry in picked]
    counts = [int(entry.mask_n[2:].sum()) for entry in picked]
    assert len(set(counts)) > 1
    tokens = train(tmp_path / "tokens", drafter=trainable(kind, **objective), kind=kind, **how)
    samples = train(tmp_path / "samples", drafter=trainable(kind, **objective), kind=kind, loss_normalization="samples", **how)
    assert tokens.rows[0]["loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-5)
    assert samples.rows[0]["loss"] == pytest.approx(np.mean(np.divide(losses, counts)), rel=1e-5)
    assert tokens.rows[0]["loss"] != pytest.approx(samples.rows[0]["loss"], rel=1e-4)
    assert tokens.rows[0]["grad_norm"] != pytest.approx(samples.rows[0]["grad_norm"], rel=1e-4)
    assert tokens.rows[0]["supervised_tokens"] == samples.rows[0]["supervised_tokens"] == sum(counts)


def test_an_epoch_sees_every_sample_once(tmp_path: Path) -> None:
    source = Watched(online("eagle3"))
    done = train(tmp_path, source=source, max_steps=None, num_epochs=2, global_batch_size=7, micro_batch_size=3)
    assert done.result["num_steps"] == 4
    assert [len(micro) for micro in source.seen] == [3, 3, 1] * 4
    by_step = [[name for micro in source.seen[3 * i : 3 * i + 3] for name in micro] for i in range(4)]
    for epoch in (by_step[:2], by_step[2:]):
        assert sorted(name for step in epoch for name in step) == sorted(entry.id for entry in SAMPLES)
    assert by_step[:2] != by_step[2:], "every epoch has an order of its own"
    assert [row["epoch"] for row in done.rows] == [0.5, 1.0, 1.5, 2.0]
    for step, ids in enumerate(by_step):
        assert sorted(ids) == sorted(SAMPLES[i].id for i in batch_indices(step, len(SAMPLES), 7, 0))


def test_noise_is_another_in_every_step_and_run(tmp_path: Path) -> None:
    """All samples in every step, and nothing learnt between them: the loss moves by the feature noise alone."""
    how: dict[str, Any] = {"max_steps": 2, "global_batch_size": len(SAMPLES), "micro_batch_size": 14, "lr": 1e-12}
    losses: dict[tuple[float, int], list[float]] = {}
    for noise, seed in ((0.0, 0), (0.2, 0), (0.2, 1)):
        out_dir = tmp_path / f"{noise}-{seed}"
        drafter = trainable("eagle", feature_noise=noise)
        done = train(out_dir, "eagle", drafter=drafter, more={"seed": seed}, **how)
        losses[noise, seed] = [row["loss"] for row in done.rows]
    assert losses[0.0, 0][0] == pytest.approx(losses[0.0, 0][1], rel=1e-5)
    noisy = [*losses[0.2, 0], *losses[0.2, 1]]
    assert min(abs(a - b) for i, a in enumerate(noisy) for b in noisy[:i]) > 1e-5 * noisy[0], noisy


def by_formula(step: int, kind: str, warmup: int, total: int, lr: float, floor: float) -> float:
    if step < warmup:
        return lr * (step + 1) / warmup
    share = (step - warmup) / (total - warmup)
    return {
        "constant": lr,
        "linear": lr * floor + (lr - lr * floor) * (1 - share),
        "cosine": lr * floor + (lr - lr * floor) * (1 + math.cos(math.pi * share)) / 2,
    }[kind]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_learning_rates(kind: Any, floor: float) -> None:
    for warmup_ratio, total in ((0.0, 10), (0.2, 10), (0.03, 100), (1.0, 5)):
        settings = Settings(max_steps=total, lr=2e-3, lr_scheduler=kind, warmup_ratio=warmup_ratio, min_lr_ratio=floor)
        rates = [settings.lr_at(step, total) for step in range(total)]
        warmup = round(warmup_ratio * total)
        assert rates == pytest.approx([by_formula(step, kind, warmup, total, 2e-3, floor) for step in range(total)])
        assert max(rates) <= 2e-3 * (1 + 1e-12)
        assert min(rates) >= 0


def test_a_row_has_the_rate_that_was_applied(tmp_path: Path) -> None:
    """By the first step of Adam, which moves a weight by the learning rate where its gradient is not tiny."""
    begin = trainable().state_dict()
    done = train(tmp_path, max_steps=10, lr=1e-2, warmup_ratio=0.4, min_lr_ratio=0.5)
    rates = [by_formula(step, "cosine", 4, 10, 1e-2, 0.5) for step in range(10)]
    assert [row["lr"] for row in done.rows] == pytest.approx(rates)
    one = train(tmp_path / "one", max_steps=1, lr=1e-2, warmup_ratio=1.0)
    moved = (one.weights["fc.weight"] - begin["fc.weight"]).abs().max().item()
    assert moved == pytest.approx(one.rows[0]["lr"], rel=1e-2)


def test_gradients_are_clipped(tmp_path: Path) -> None:
    """The norm in the metrics is that before clipping; what Adam remembers is that after."""
    done = train(tmp_path, max_steps=1, max_grad_norm=0.01, adam_beta1=0.5)
    assert done.rows[0]["grad_norm"] > 0.1
    first = [value for key, value in state_of(tmp_path / "last").items() if key.startswith("exp_avg:")]
    assert math.sqrt(sum(float(value.square().sum()) for value in first)) == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_bf16_keeps_float32_weights(tmp_path: Path) -> None:
    exact = train(tmp_path / "no", max_steps=2)
    mixed = train(tmp_path / "bf16", max_steps=2, mixed_precision="bf16")
    assert {value.dtype for value in state_of(tmp_path / "bf16" / "last").values()} <= {torch.float32, torch.int64}
    assert mixed.rows[-1]["loss"] == pytest.approx(exact.rows[-1]["loss"], rel=2e-2)
    assert mixed.rows[-1]["loss"] != exact.rows[-1]["loss"]


@pytest.mark.parametrize("has_instructions", [True, False])
def test_mixed_precision_is_what_is_fast_here(has_instructions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has to imitate bfloat16 takes ten times as long for a step; what is given is taken everywhere."""
    monkeypatch.setattr(packed_linear, "has_bfloat16_instructions", lambda: has_instructions)
    cpu = torch.device("cpu")
    assert mixed_precision(Settings(max_steps=1), cpu) == ("bf16" if has_instructions else "no")
    assert mixed_precision(Settings(max_steps=1), torch.device("cuda")) == "bf16"
    assert mixed_precision(Settings(max_steps=1, mixed_precision="bf16"), cpu) == "bf16"


def test_a_frozen_random_output_layer_is_refused() -> None:
    """It would stay random."""
    with pytest.raises(ValueError, match=r"lm_head=random and train_lm_head=false"):
        Init(lm_head="random", train_lm_head=False)
    Init(lm_head="random")
    Init(train_lm_head=False)


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["all", "reduced"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_a_head_of_the_target_comes_with_its_norm(vocab_ids: np.ndarray | None, trained: bool) -> None:
    """A quarter of it, whether the layer is the target's own, frozen, or a copy; with a random head it is ones."""
    target = CausalLM("tiny", "float32", "cpu")
    kind: Any = method.find("eagle3")
    target.final_norm.load_state_dict({"weight": torch.linspace(0.5, 3.0, target.hidden_size)})
    checkpoint = kind.init_checkpoint(target, {}, Init(train_lm_head=trained), vocab_ids)
    assert checkpoint.config["own_lm_head"] == (trained or vocab_ids is not None)
    torch.testing.assert_close(checkpoint.tensors["norm.weight"], 0.25 * torch.linspace(0.5, 3.0, target.hidden_size))
    checkpoint = kind.init_checkpoint(target, {}, Init(lm_head="random"), vocab_ids)
    assert (checkpoint.tensors["norm.weight"] == 1).all()


# -------------------------------------------------------------------------------------------- what is measured


def by_hand(drafter: Any, samples: Sequence[Sample]) -> dict[str, list[float]]:
    """The metrics of each step, counted token by token."""
    batch = online("eagle3")(samples)
    steps = drafter.objective.ttt_steps
    plan = unroll.plan(batch.length_B, batch.mask_N, steps)
    with torch.no_grad():
        states = drafter.unrolled(batch, plan)
        picked = [drafter.vocab_ids[drafter.draft_logits(state).argmax(-1)].tolist() for state in states]
    hit: dict[tuple[int, int], bool] = {}
    for k, step in enumerate(plan.steps):
        for place in step.supervised.tolist():
            row = int(step.rows[place])
            hit[row, k] = picked[k][place] == int(batch.argmax_N[row + 1 + k])
    first_N = np.repeat(np.cumsum(batch.length_B) - batch.length_B, batch.length_B)
    for row, k in hit:  # supervised exactly where the target generated token row + 2 + k of the same document
        assert batch.mask_N[row + 2 + k]
        assert first_N[row] == first_N[row + 2 + k]
    accuracies: dict[str, list[float]] = {"accuracy": [], "joint_accuracy": [], "conditional_accuracy": []}
    for k in range(steps):
        rows = [row for row, step in hit if step == k]
        chains = [row for row in rows if all((row, earlier) in hit for earlier in range(k))]
        reached = [row for row in chains if all(hit[row, earlier] for earlier in range(k))]
        joint = sum(hit[row, k] for row in reached)
        accuracies["accuracy"].append(sum(hit[row, k] for row in rows) / len(rows))
        accuracies["joint_accuracy"].append(joint / len(chains))
        accuracies["conditional_accuracy"].append(joint / len(reached) if reached else 0.0)
    return accuracies


@pytest.fixture(scope="module")
def fitted() -> Any:
    """A drafter that has learnt the training samples well enough to be right now and then."""
    import tempfile

    drafter = trainable()
    with tempfile.TemporaryDirectory() as out_dir:
        train(Path(out_dir), drafter=drafter, samples=SAMPLES[:6], max_steps=60, lr=3e-3, log_every=50, lr_scheduler="constant")
    return drafter


def test_accuracies_are_those_counted_by_hand(fitted: Any, tmp_path: Path) -> None:
    """Marginal, joint and conditional, over the micro-batches and steps of a row."""
    samples = SAMPLES[:4]
    expected = by_hand(fitted, samples)
    assert 0 < expected["conditional_accuracy"][2] < 1, "the test needs hits and misses"
    done = train(tmp_path, drafter=fitted, samples=samples, max_steps=3, lr=1e-12, log_every=3)
    (row,) = done.rows
    for key, values in expected.items():
        assert row[key] == pytest.approx(values), key
    assert row["accuracy"][0] == row["joint_accuracy"][0] == row["conditional_accuracy"][0]
    for k in range(3):
        assert row["joint_accuracy"][k] <= row["accuracy"][k] + 1e-9
        assert 0 <= row["one_minus_tv"][k] <= 1
    weighed = [row["step_loss"][k] * 0.8**k for k in range(3)]
    rows_of_step = [sum(int(entry.mask_n[2 + k :].sum()) for entry in samples) for k in range(3)]
    assert row["loss"] == pytest.approx(sum(np.multiply(weighed, rows_of_step)) / rows_of_step[0], rel=1e-5)


def test_the_validation_loss_is_that_of_all_steps(fitted: Any, tmp_path: Path) -> None:
    """Over all held-out tokens, however they are batched, also while training unrolls one step."""
    fitted.objective = fitted.objective.model_copy(update={"ttt_warmup": 1.0})
    held_out = SAMPLES[:4]
    values = []
    for size in (1, 3):
        done = train(
            tmp_path / str(size), drafter=fitted, held_out=held_out, max_steps=1, lr=1e-12, eval_every=1, micro_batch_size=size
        )
        values.append(done.rows[0])
    fitted.objective = fitted.objective.model_copy(update={"ttt_warmup": 0.0})
    loss, _ = fitted.loss(online("eagle3")(held_out))
    count = sum(int(entry.mask_n[2:].sum()) for entry in held_out)
    for row in values:
        assert row["val_loss"] == pytest.approx(loss.item() / count, rel=1e-4)
        assert row["val_joint_accuracy"] == pytest.approx(by_hand(fitted, held_out)["joint_accuracy"])
        assert len(row["accuracy"]) == 1
        assert len(row["val_accuracy"]) == 3


def test_warmup_unrolls_one_step_before_its_share_only(tmp_path: Path) -> None:
    done = train(tmp_path, drafter=trainable(ttt_warmup=0.5), max_steps=8)
    assert [len(row["accuracy"]) for row in done.rows] == [1] * 4 + [3] * 4
    assert [len(row["joint_accuracy"]) for row in done.rows] == [1] * 4 + [3] * 4
    pooled = train(tmp_path / "pooled", drafter=trainable(ttt_warmup=0.5), max_steps=8, log_every=8)
    late = [row["accuracy"][2] for row in done.rows[4:]]
    assert min(late) - 1e-9 <= pooled.rows[0]["accuracy"][2] <= max(late) + 1e-9, "of the steps that had a third"


def test_a_row_is_the_steps_since_the_row_before(tmp_path: Path) -> None:
    fine = train(tmp_path / "1", max_steps=7)
    coarse = train(tmp_path / "3", max_steps=7, log_every=3)
    assert [row["step"] for row in coarse.rows] == [3, 6, 7]
    first = 0
    for row in coarse.rows:
        part = fine.rows[first : row["step"]]
        tokens = [metrics["supervised_tokens"] for metrics in part]
        assert row["supervised_tokens"] == sum(tokens)
        assert row["loss"] == pytest.approx(
            sum(np.multiply([metrics["loss"] for metrics in part], tokens)) / sum(tokens), rel=1e-5
        )
        first = row["step"]


# --------------------------------------------------------------------------------------- losses that are not finite


def test_a_step_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    """Weights and Adam's state stay, the step is counted, and metrics are those of the other steps."""
    picked = [{SAMPLES[i].id for i in batch_indices(step, len(SAMPLES), 4, 0)} for step in range(3)]
    bad = sorted(picked[1] - picked[0] - picked[2])[0]
    source = Watched(online("eagle3"), lambda name: name == bad)
    done = train(tmp_path, source=source, max_steps=3, save_every=1, keep=10)
    assert (done.result["skipped_steps"], done.result["step"], done.result["interrupted"]) == (1, 3, False)
    assert [row["skipped_steps"] for row in done.rows] == [0, 1, 1]
    assert done.rows[1]["loss"] is None
    assert done.rows[1]["grad_norm"] is None
    before, after, later = (state_of(step_dir(tmp_path, step)) for step in (1, 2, 3))
    same(before, after, 0)
    assert {float(value) for key, value in after.items() if key.startswith("step:")} == {1.0}
    assert {float(value) for key, value in later.items() if key.startswith("step:")} == {2.0}
    assert all(bool(value.isfinite().all()) for value in later.values())
    with_nan = train(tmp_path / "whole", source=Watched(online("eagle3"), lambda name: name == bad), max_steps=3, log_every=3)
    (row,) = with_nan.rows
    losses, tokens = [[done.rows[i][key] for i in (0, 2)] for key in ("loss", "supervised_tokens")]
    assert row["loss"] == pytest.approx(sum(np.multiply(losses, tokens)) / sum(tokens), rel=1e-5)
    assert row["supervised_tokens"] == sum(tokens)


def test_too_many_steps_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    """One line that names samples; checkpoints from before are whole, and signals are as they were."""
    steps = 0
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def advance(count: int) -> None:
        nonlocal steps
        steps += count

    source = Watched(online("eagle3"), lambda name: steps >= 3)
    with pytest.raises(ValueError, match="not finite in 2 steps in a row") as raised:
        train(tmp_path, source=source, max_steps=20, save_every=1, keep=10, max_nonfinite=2, more={"advance": advance})
    assert len(str(raised.value).splitlines()) == 1
    assert all(SAMPLES[i].id in str(raised.value) for i in batch_indices(4, len(SAMPLES), 4, 0))
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    for step in steps_in(tmp_path):
        tensors = native.load(step_dir(tmp_path, step)).tensors
        assert tensors is not None
        assert all(bool(value.isfinite().all()) for value in tensors.values() if value.is_floating_point())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_steps_that_are_not_finite_now_and_then_do_not(tmp_path: Path) -> None:
    steps = 0

    def advance(count: int) -> None:
        nonlocal steps
        steps += count

    source = Watched(online("eagle3"), lambda name: steps % 3 != 2)
    done = train(tmp_path, source=source, max_steps=9, max_nonfinite=3, more={"advance": advance})
    assert done.result["skipped_steps"] == 6


# ---------------------------------------------------------------------------------------- stopped and gone on with


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Signals are as before after every test, whatever it found."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("kind", "number"), [("eagle", signal.SIGINT), ("eagle3", signal.SIGTERM)])
def test_stopped_and_resumed_equals_straight(kind: str, number: int, tmp_path: Path) -> None:
    """Loss, learning rate, weights and Adam's moments and step counter; feature noise and warm-up depend on the step."""
    objective = {"feature_noise": 0.2} if kind == "eagle" else {"ttt_warmup": 0.7}
    how: dict[str, Any] = {"max_steps": 20, "held_out": HELD_OUT, "eval_every": 4, "save_every": 7, "warmup_ratio": 0.2}
    value = {4: 1.1, 8: 1.5, 12: 1.2, 16: 1.3, 20: 1.4}
    steps: list[int] = []

    def evaluate(checkpoint: Checkpoint) -> dict[str, Any]:
        steps.append(4 * (len(steps) + 1))
        return {"mean_acceptance_length": value[steps[-1]]}

    straight = train(tmp_path / "straight", kind, drafter=trainable(kind, **objective), more={"evaluate": evaluate}, **how)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    steps.clear()
    out_dir = tmp_path / "parts"
    more = {"evaluate": evaluate, "advance": stop_at(10, number)}
    first = train(out_dir, kind, drafter=trainable(kind, **objective), more=more, **how)
    assert first.result["interrupted"]
    assert (first.result["step"], first.result["num_steps"]) == (10, 20)
    assert Path(first.result["last"]) == step_dir(out_dir, 10)
    assert (out_dir / "last").resolve() == step_dir(out_dir, 10).resolve()
    assert first.result["best"] == {"step": 8, "mean_acceptance_length": 1.5}
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    native.load(out_dir / "last")

    advanced: list[int] = []
    more = {"evaluate": evaluate, "advance": advanced.append, "resume": True}
    second = train(out_dir, kind, drafter=trainable(kind, **objective), more=more, **how)
    assert advanced == [10] + [1] * 10
    assert not second.result["interrupted"]
    assert second.result["best"] == straight.result["best"] == {"step": 8, "mean_acceptance_length": 1.5}
    assert (out_dir / "best").resolve() == step_dir(out_dir, 8).resolve()
    same(second.weights, straight.weights, 1e-7)
    same(state_of(out_dir / "last"), state_of(tmp_path / "straight" / "last"), 1e-7)
    counters = [value for key, value in state_of(out_dir / "last").items() if key.startswith("step:")]
    assert {float(value) for value in counters} == {20.0}
    same_rows(first.rows + second.rows, straight.rows)


def test_a_signal_while_a_row_is_written_loses_nothing(tmp_path: Path) -> None:
    """Whenever it comes, there is a checkpoint of the step that the run says it ended with."""

    def log(row: dict[str, Any]) -> None:
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    done = train(tmp_path, max_steps=9, log=log)
    assert done.result["interrupted"]
    assert steps_in(tmp_path) == [done.result["step"]]
    assert Path(done.result["last"]).is_dir()
    rest = train(tmp_path, max_steps=9, more={"resume": True})
    assert rest.rows[0]["step"] == done.result["step"] + 1


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def advance(count: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, max_steps=9, more={"advance": advance})
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_finished_run_is_resumed_to_no_effect(tmp_path: Path) -> None:
    train(tmp_path, max_steps=3)
    before = contents(tmp_path)
    again = train(tmp_path, max_steps=3, more={"resume": True})
    assert again.rows == []
    assert (again.result["step"], again.result["interrupted"]) == (3, False)
    assert contents(tmp_path) == before


def test_a_checkpoint_that_cannot_be_resumed_is_named(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    (step_dir(tmp_path, 2) / "training" / "state.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="step-00000002") as raised:
        train(tmp_path, max_steps=4, more={"resume": True})
    assert len(str(raised.value).splitlines()) == 1


# -------------------------------------------------------------------------------------------- which checkpoints stay


def scripted_values(values: dict[int, float]) -> Callable[[Path], dict[str, Any]]:
    """For `evaluate`: the value of the checkpoint's step."""
    return lambda checkpoint: {"mean_acceptance_length": values[int(checkpoint.name.removeprefix("step-"))]}


def test_the_best_is_what_was_measured(tmp_path: Path) -> None:
    """Not what the loss says; the last few and the best are kept, and rows say what was measured where it was."""
    values = {2: 1.2, 4: 1.9, 6: 1.4, 8: 1.9, 10: 1.3}
    done = train(tmp_path, max_steps=10, eval_every=2, save_every=3, keep=2, more={"evaluate": scripted_values(values)})
    assert done.result["best"] == {"step": 4, "mean_acceptance_length": 1.9}, "of equals, the first"
    assert (tmp_path / "best").resolve() == step_dir(tmp_path, 4).resolve()
    assert (tmp_path / "last").resolve() == step_dir(tmp_path, 10).resolve()
    assert steps_in(tmp_path) == [4, 9, 10]
    assert {row["step"]: row["mean_acceptance_length"] for row in done.rows if "mean_acceptance_length" in row} == values
    assert native.find(tmp_path) == tmp_path / "best"
    assert list(tmp_path.glob("checkpoints/.*")) == []
    assert not (tmp_path / "best").readlink().is_absolute(), "a run can be moved"


def test_the_best_is_remembered_when_resumed(tmp_path: Path) -> None:
    how: dict[str, Any] = {"max_steps": 8, "eval_every": 2, "keep": 1}
    more = {"evaluate": scripted_values({2: 1.8, 4: 1.2}), "advance": stop_at(5, signal.SIGTERM)}
    first = train(tmp_path, more=more, **how)
    assert (first.result["best"]["step"], steps_in(tmp_path)) == (2, [2, 5])
    second = train(tmp_path, more={"evaluate": scripted_values({6: 1.7, 8: 1.6}), "resume": True}, **how)
    assert second.result["best"] == {"step": 2, "mean_acceptance_length": 1.8}
    assert (tmp_path / "best").resolve() == step_dir(tmp_path, 2).resolve()
    assert steps_in(tmp_path) == [2, 8]


def test_a_best_checkpoint_that_was_removed_is_measured_anew(tmp_path: Path) -> None:
    """Somebody made room: the run goes on, and the best is that of what is there."""
    how: dict[str, Any] = {"max_steps": 8, "eval_every": 2, "keep": 1}
    more = {"evaluate": scripted_values({2: 1.8, 4: 1.2}), "advance": stop_at(5, signal.SIGTERM)}
    assert train(tmp_path, more=more, **how).result["best"]["step"] == 2
    shutil.rmtree(step_dir(tmp_path, 2))
    second = train(tmp_path, more={"evaluate": scripted_values({6: 1.3, 8: 1.4}), "resume": True}, **how)
    assert second.result["best"] == {"step": 8, "mean_acceptance_length": 1.4}
    assert (tmp_path / "best").resolve() == step_dir(tmp_path, 8).resolve()
    assert native.find(tmp_path) == tmp_path / "best"
    native.load(tmp_path)
    shutil.rmtree(step_dir(tmp_path, 8))
    with pytest.raises(ValueError, match=r"no checkpoint|neither a checkpoint|no such") as raised:
        native.load(tmp_path)
    assert len(str(raised.value).splitlines()) == 1


def test_a_best_checkpoint_that_was_removed_before_the_end(tmp_path: Path) -> None:
    """Nothing is measured any more: there is no best, and the last one is decoded with."""
    how: dict[str, Any] = {"max_steps": 4, "eval_every": 2, "keep": 1}
    train(tmp_path, more={"evaluate": scripted_values({2: 1.8}), "advance": stop_at(3, signal.SIGTERM)}, **how)
    shutil.rmtree(step_dir(tmp_path, 2))
    done = train(tmp_path, more={"resume": True}, **how)
    assert done.result["best"] is None
    assert native.find(tmp_path) == tmp_path / "last"


def test_other_names_beside_the_checkpoints_are_left_alone(tmp_path: Path) -> None:
    """A copy that somebody made is neither resumed nor removed."""
    straight = train(tmp_path / "straight", max_steps=4)
    out_dir = tmp_path / "run"
    train(out_dir, max_steps=4, save_every=1, keep=1, more={"advance": stop_at(2, signal.SIGTERM)})
    kept = {}
    for name in ("step-backup", "step-00000009-old", "step-9"):
        (out_dir / "checkpoints" / name).mkdir()
        (out_dir / "checkpoints" / name / "note").write_text(name)
        kept[name] = contents(out_dir / "checkpoints" / name)
    done = train(out_dir, max_steps=4, save_every=1, keep=1, more={"resume": True})
    assert [row["step"] for row in done.rows] == [3, 4]
    same(done.weights, straight.weights, 1e-7)
    assert {path.name for path in (out_dir / "checkpoints").iterdir()} == {*kept, "step-00000004"}
    assert {name: contents(out_dir / "checkpoints" / name) for name in kept} == kept
    assert (out_dir / "last").resolve() == step_dir(out_dir, 4).resolve()


class KilledHere(BaseException):
    """Ends the run at one place without any tidying up, as a kill would."""


def kill_at(patch: pytest.MonkeyPatch, place: int) -> list[str]:
    """Let operation number `place` on the disk not happen, nor anything after. Returns the operations, as they come."""
    done: list[str] = []

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def operation(*args: Any, **more: Any) -> Any:
            done.append(name)
            if len(done) == place:
                if name == "save_file":
                    Path(args[1]).write_bytes(b"half a file")
                raise KilledHere
            return original(*args, **more)

        patch.setattr(owner, name, operation)

    for owner, names in (
        (Path, ("mkdir", "rename", "replace", "write_text", "symlink_to")),
        (shutil, ("rmtree",)),
        (state, ("save_file",)),
        (native, ("save_file",)),
    ):
        for name in names:
            counted(owner, name)
    patch.setattr(native, "provenance", lambda **more: more)
    return done


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Between any two operations on the disk: what has a final name is whole, `best` leads somewhere, and the run can be
    resumed to what it would have been: weights, rows, and the best."""
    how: dict[str, Any] = {"max_steps": 4, "global_batch_size": 2, "eval_every": 1, "save_every": 2, "keep": 1}
    values = {1: 1.3, 2: 1.5, 3: 1.2, 4: 1.1}
    logged: dict[int, dict[str, Any]] = {}

    def go(out_dir: Path, place: int, resume: bool = False) -> tuple[Trained | None, list[str]]:
        more = {"evaluate": scripted_values(values), "resume": resume}
        with pytest.MonkeyPatch.context() as patch:
            operations = kill_at(patch, place)
            try:
                return train(out_dir, more=more, log=lambda row: logged.update({row["step"]: row}), **how), operations
            except KilledHere:
                return None, operations

    straight, operations = go(tmp_path / "straight", 0)
    assert straight is not None
    assert {"mkdir", "rename", "replace", "write_text", "symlink_to", "rmtree", "save_file"} == set(operations)
    wrong = []
    for place in range(1, len(operations) + 1):
        out_dir = tmp_path / str(place)
        logged.clear()
        killed, _ = go(out_dir, place)
        assert killed is None
        for step in steps_in(out_dir):
            native.load(step_dir(out_dir, step))
        if steps_in(out_dir) and (out_dir / "last").is_symlink():
            native.load(out_dir)
        rest, _ = go(out_dir, 0, resume=True)
        assert rest is not None
        same(rest.weights, straight.weights, 1e-7)
        same_rows(list(logged.values()), straight.rows)
        assert rest.result["best"] == straight.result["best"], f"after operation {place} ({operations[place - 1]})"
        assert steps_in(out_dir) == steps_in(straight.out_dir)
        if rest.rows:  # unless it had ended
            assert list(out_dir.glob("checkpoints/.*")) == [], f"something is left behind after operation {place}"
        best = rest.result["best"]
        if best and (out_dir / "best").resolve() != step_dir(out_dir, best["step"]).resolve():
            wrong.append(f"{place} ({operations[place - 1]}): best is step {best['step']}, and its link is another")
        if not (out_dir / "best" / "config.json").exists() and best:
            wrong.append(f"{place} ({operations[place - 1]}): the link of the best leads nowhere")
    assert not wrong, "; ".join(wrong)


EVALUATIONS = {"max_steps": 8, "held_out": HELD_OUT, "log_every": 3, "eval_every": 2, "save_every": 4, "keep": 1}
VALUES = {2: 1.9, 4: 1.2, 6: 1.5, 8: 1.4}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("straight"), more={"evaluate": scripted_values(VALUES)}, **EVALUATIONS)


def as_if_never_stopped(done: Trained, rows: list[dict[str, Any]], straight: Trained) -> None:
    """Rows (of equal steps, the last), weights, best, and what is there."""
    same_rows([row for _, row in sorted({row["step"]: row for row in rows}.items())], straight.rows)
    same(done.weights, straight.weights, 1e-7)
    assert done.result["best"] == straight.result["best"] == {"step": 2, "mean_acceptance_length": 1.9}
    assert (done.out_dir / "best").resolve() == step_dir(done.out_dir, 2).resolve()
    assert (done.out_dir / "last").resolve() == step_dir(done.out_dir, 8).resolve()
    assert steps_in(done.out_dir) == steps_in(straight.out_dir) == [2, 8]
    assert (done.result["interrupted"], done.result["stopped_by"]) == (False, None)


def test_killed_while_evaluating_and_again_while_that_is_made_good(straight: Trained, tmp_path: Path) -> None:
    """The checkpoint of step 2, the best, is judged by the third process."""
    rows: list[dict[str, Any]] = []

    def killed(checkpoint: Path) -> dict[str, Any]:
        raise KilledHere

    for resume in (False, True):
        with pytest.raises(KilledHere):
            train(tmp_path, more={"evaluate": killed, "resume": resume}, log=rows.append, **EVALUATIONS)
        assert (rows, steps_in(tmp_path)) == ([], [2])
    done = train(tmp_path, more={"evaluate": scripted_values(VALUES), "resume": True}, log=rows.append, **EVALUATIONS)
    assert [row["step"] for row in rows] == [2, 3, 4, 6, 8], "every row once"
    as_if_never_stopped(done, rows, straight)


def test_killed_before_its_row_is_written(straight: Trained, tmp_path: Path) -> None:
    """What was evaluated is not evaluated again, and a row that was written may be written twice."""
    rows: list[dict[str, Any]] = []
    evaluated: list[str] = []

    def evaluate(checkpoint: Path) -> dict[str, Any]:
        evaluated.append(checkpoint.name)
        return scripted_values(VALUES)(checkpoint)

    def killed(row: dict[str, Any]) -> None:
        if row["step"] == 2 and len(evaluated) == 1:
            raise KilledHere

    with pytest.raises(KilledHere):
        train(tmp_path, more={"evaluate": evaluate}, log=killed, **EVALUATIONS)
    done = train(tmp_path, more={"evaluate": evaluate, "resume": True}, log=rows.append, **EVALUATIONS)
    assert evaluated == [f"step-{step:08d}" for step in VALUES]
    as_if_never_stopped(done, rows, straight)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8], ids="at step {}".format)
def test_stopped_at_any_step_and_resumed_is_never_stopped(step: int, straight: Trained, tmp_path: Path) -> None:
    """Where an evaluation is due (2, 8) it is made good; where no row is due (1, 5) there is none, and the next one counts all
    steps since the row before."""
    rows: list[dict[str, Any]] = []
    more = {"evaluate": scripted_values(VALUES), "advance": stop_at(step, signal.SIGINT)}
    first = train(tmp_path, more=more, log=rows.append, **EVALUATIONS)
    assert (first.result["step"], first.result["interrupted"], first.result["stopped_by"]) == (step, True, signal.SIGINT)
    assert [row["step"] for row in rows] == {1: [], 2: [], 3: [2, 3], 5: [2, 3, 4], 8: [2, 3, 4, 6]}[step]
    done = train(tmp_path, more={"evaluate": scripted_values(VALUES), "resume": True}, log=rows.append, **EVALUATIONS)
    as_if_never_stopped(done, rows, straight)


def test_steps_that_are_not_finite_count_on(tmp_path: Path) -> None:
    """Two before a stop and one after it are three in a row."""
    spoilt = partial(Watched, online("eagle3"), lambda name: True)
    how: dict[str, Any] = {"max_steps": 9, "max_nonfinite": 3}
    train(tmp_path, source=spoilt(), more={"advance": stop_at(2, signal.SIGTERM)}, **how)
    with pytest.raises(ValueError, match="not finite in 3 steps in a row, up to step 3"):
        train(tmp_path, source=spoilt(), more={"resume": True}, **how)


def test_half_a_checkpoint_is_cleaned_up(tmp_path: Path) -> None:
    """What a kill left under a temporary name goes, even if the resumed run saves at other steps."""
    with pytest.MonkeyPatch.context() as patch:
        operations = kill_at(patch, 0)
        train(tmp_path / "straight", max_steps=1, save_every=1)
        place = len(operations) + operations.index("save_file") + 1
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, place)
        with pytest.raises(KilledHere):
            train(tmp_path / "run", max_steps=4, save_every=1)
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-00000001", ".step-00000002.tmp"}
    train(tmp_path / "run", max_steps=4, save_every=4, more={"resume": True})
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-00000001", "step-00000004"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("IoError: No space left")])
@pytest.mark.parametrize("module", [state, native], ids=["state", "weights"])
def test_a_full_disk(module: Any, error: Exception, tmp_path: Path) -> None:
    """One line; nothing half under a final name; what was there loads, and goes on once there is room."""

    def full(tensors: dict[str, Tensor], path: Any, metadata: Any = None) -> None:
        if "step-00000004" in str(path):
            Path(path).write_bytes(b"half")
            raise error
        save_file(tensors, path, metadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "save_file", full)
        with pytest.raises(OSError, match="step 4 could not be written") as raised:
            train(tmp_path, max_steps=6, save_every=2)
    assert len(str(raised.value).splitlines()) == 1
    assert "No space left" in str(raised.value)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000002"}
    assert (tmp_path / "last").resolve() == step_dir(tmp_path, 2).resolve()
    native.load(tmp_path / "last")
    done = train(tmp_path, max_steps=6, save_every=2, more={"resume": True})
    same(done.weights, train(tmp_path / "straight", max_steps=6).weights, 1e-7)


# ----------------------------------------------------------------------------------------------------- the script


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = conversations(tmp_path_factory.mktemp("data") / "tiny.jsonl")
    return [
        "model=tiny", "model.dtype=float32", "model.device=cpu", "data=jsonl", f"data.path={path}", "data.held_out=4",
        "train.max_steps=20", "train.global_batch_size=4", "train.micro_batch_size=2", "train.mixed_precision=no",
        "train.log_every=1", "train.eval_every=4", "train.save_every=5", "eval.num_prompts=2", "eval.max_tokens=8",
    ]  # fmt: skip


EAGLE3 = ("train.drafter.draft_vocab_size=100", "train.objective.ttt_warmup=0.5")
Fitted = tuple[Path, Done, Path]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return partial(call, "eagle", cwd=tmp_path, folder=TRAIN)


@pytest.fixture(scope="module")
def trained(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """A run of 20 steps, called from a directory of its own."""
    out_dir = tmp_path_factory.mktemp("trained") / "run"
    cwd = tmp_path_factory.mktemp("elsewhere")
    done = call("eagle", *arguments, *EAGLE3, f"out_dir={out_dir}", cwd=cwd, folder=TRAIN)
    assert done.code == 0, done.err
    return out_dir, done, cwd


@pytest.fixture(scope="module")
def trained_eagle(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("trained") / "eagle"
    what = ("method=eagle", "train.max_steps=4", f"out_dir={out_dir}")
    done = call("eagle", *arguments, *what, cwd=out_dir.parent, folder=TRAIN)
    assert done.code == 0, done.err
    return out_dir


def test_a_run_writes_its_files_and_nothing_else(trained: Fitted) -> None:
    out_dir, done, cwd = trained
    names = {"metrics.jsonl", "checkpoints", "best", "last", "config.yaml", "summary.json", "run.json", "train.png"}
    names |= {"report.html"}
    assert {path.name for path in out_dir.iterdir()} == names
    assert list(cwd.iterdir()) == []
    assert (out_dir / "train.png").read_bytes().startswith(b"\x89PNG")
    text = (out_dir / "config.yaml").read_text()
    assert "${" not in text
    saved = yaml.safe_load(text)
    assert (saved["train"]["max_steps"], saved["method"]["name"]) == (20, "eagle3")
    assert saved["out_dir"] == str(out_dir)
    assert "best: step" in done.out
    assert f"checkpoint={out_dir}" in done.out.replace("\n", "")


def test_rows_and_summary(trained: Fitted) -> None:
    out_dir = trained[0]
    rows = rows_of(out_dir / "metrics.jsonl")
    summary = json.loads((out_dir / "summary.json").read_text())
    assert [row["step"] for row in rows] == list(range(1, 21))
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "accuracy", "one_minus_tv", "joint_accuracy"}
    for row in rows:
        assert keys | {"conditional_accuracy", "skipped_steps", "supervised_tokens"} <= set(row)
        steps = 1 if row["step"] <= 10 else 3
        assert {len(row[key]) for key in ("accuracy", "one_minus_tv", "joint_accuracy", "conditional_accuracy")} == {steps}
        assert row["tokens_per_s"] > 0
        assert ("mean_acceptance_length" in row) == ("val_loss" in row) == (row["step"] % 4 == 0)
        if "val_loss" in row:
            assert len(row["acceptance_rate_per_position"]) == 3
    assert rows[-1]["loss"] < rows[10]["loss"], "it learns"
    assert summary["last_metrics"] == rows[-1]
    assert (summary["step"], summary["num_steps"], summary["interrupted"]) == (20, 20, False)
    measured = {row["step"]: row["mean_acceptance_length"] for row in rows if "mean_acceptance_length" in row}
    assert summary["best"]["mean_acceptance_length"] == max(measured.values()) == measured[summary["best"]["step"]]
    assert (out_dir / "best").resolve().name == f"step-{summary['best']['step']:08d}"
    assert summary["target"] == "tiny-llama"
    provenance = json.loads((out_dir / "best" / "provenance.json").read_text())
    assert provenance["identity"]["data"] == summary["data"]
    assert provenance["command"][0] == "eagle.py"


def test_acceptance_is_that_of_an_engine(trained: Fitted, arguments: list[str]) -> None:
    """What a row says was measured is what decoding with that checkpoint gives."""
    out_dir = trained[0]
    target = loaded()
    rows = rows_of(out_dir / "metrics.jsonl")
    path = next(word for word in arguments if word.startswith("data.path=")).partition("=")[2]
    read = data.load(path, target.tokenizer, target.vocab_size, 2048, None, "train")
    prompts = prompts_of(split_validation(read.samples, 4)[1], 2)
    for prompt, entry in zip(prompts, split_validation(read.samples, 4)[1], strict=False):
        assert prompt == entry.token_n[: len(prompt)].tolist()
        assert entry.mask_n[len(prompt)]
        assert not entry.mask_n[: len(prompt)].any()
    checkpoint = native.load(step_dir(out_dir, 20))
    proposer: Any = method.build("eagle3", target, model=checkpoint, num_speculative_tokens=3)
    engine = Engine(target, proposer, rejection.build("standard"), 8)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    done = engine.run([Request(f"r{i}", ids, params) for i, ids in enumerate(prompts)])
    pooled = stats.pool([request.stats for request in done])
    proposer = method.build("eagle3", target, model=checkpoint, num_speculative_tokens=3)
    measured = acceptance(target, proposer, rejection.build("standard"), prompts, 8)
    assert {"mean_acceptance_length", "tokens_per_step", "acceptance_rate_per_position"} <= set(measured)
    for key, value in measured.items():
        assert value == pooled[key]
        assert rows[-1][key] == pytest.approx(value)


def test_the_same_seed_gives_the_same_weights(arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    short = (*arguments, *EAGLE3, "train.max_steps=3")
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        done = cli(*short, f"seed={seed}", f"out_dir={tmp_path / name}")
        assert done.code == 0, done.err
    one, two, other = (native.load(tmp_path / name).tensors for name in ("one", "two", "other"))
    assert one is not None
    assert two is not None
    assert other is not None
    same(one, two, 0)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_a_sweep_has_a_directory_per_job(arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "train.lr=1e-4,3e-4", *arguments, *EAGLE3, "train.max_steps=2", f"out_dir={tmp_path / 'sweep'}")
    assert done.code == 0, done.err
    jobs = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    assert [path.name.partition("-")[0] for path in jobs] == ["0", "1"]
    assert [config.read(path / "config.yaml")["train"]["lr"] for path in jobs] == [1e-4, 3e-4]
    assert [native.load(path).method for path in jobs] == ["eagle3", "eagle3"]
    assert {path.name for path in tmp_path.iterdir()} == {"sweep"}


# ------------------------------------------------------------------------------------------- what is refused


def test_mistakes_are_one_line(arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """And nothing is written."""
    unanswered = conversations(tmp_path / "silent.jsonl", 4, answers=False)
    out_dir = tmp_path / "run"
    before = contents(tmp_path)
    cases: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        (("train.lrr=1e-4",), ("'train.lrr'", "'train.lr'")),
        (("train.objective.ttt_step=2",), ("'train.objective.ttt_step'", "'train.objective.ttt_steps'")),
        (("method=ngram", "train=eagle3_demo"), ("method=ngram", "nothing to train", "eagle3")),
        (("train.drafter.draft_vocab_size=-1",), ("draft_vocab_size=-1", "1")),
        (("train.drafter.eagle_aux_hidden_state_layer_ids=[1,9]",), ("9", "0..4")),
        ((f"data.path={unanswered}",), ("silent.jsonl", "assistant")),
        (("data.path=/nowhere/none.jsonl",), ("/nowhere/none.jsonl",)),
        (("resume=true",), ("resume=true", "holds no run")),
        (("data.held_out=24",), ("data.held_out=24", "24 samples; lower it")),
        (("data.held_out=8", "data.limit=6"), ("data.held_out=8", "lower it, or raise data.limit=6")),
        (("train.num_epochs=2",), ("train.max_steps", "train.num_epochs")),
        (("train.max_steps=null",), ("train.max_steps", "train.num_epochs")),
        (("train.objective.loss.ce=-1",), ("ce", "-1")),
        (("train.objective.loss.ce=0",), ("positive",)),
        (("train.objective.loss.cee=1",), ("cee", "'train.objective.loss.ce'")),
        (("train.lr_scheduler=cosin",), ("lr_scheduler", "cosin", "'cosine'")),
        (("train.lr=0",), ("lr", "0")),
        (("train.max_steps=0",), ("max_steps", "0")),
        (("num_threads=0",), ("num_threads=0",)),
        (("checkpoint=/nowhere",), ("/nowhere", "no such directory")),
    ]
    for case, words in cases:
        done = cli(*arguments, *EAGLE3, *case, f"out_dir={out_dir}")
        assert done.code == 1, f"{case}: {done.out}"
        assert all(word in done.error for word in words), f"{case}: {done.error}"
        assert contents(tmp_path) == before, case


def test_mistakes_are_found_before_a_directory_is_taken(arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """Also those in what is only used later: decoding while training, the order of the samples."""
    cases: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        (("eval.max_tokens=0",), ("max_tokens=0",)),
        (("eval.max_batch_size=0",), ("max_batch_size=0",)),
        (("eval.num_prompts=-1",), ("num_prompts=-1",)),
        (("method.draft_sample_method=greed",), ("draft_sample_method", "greed")),
        (("method.max_model_len=1",), ("max_model_len=1",)),
        (("data.held_out=-1",), ("held_out=-1",)),
        (("seed=-1",), ("seed=-1",)),
    ]
    wrong = []
    for number, (case, words) in enumerate(cases):
        out_dir = tmp_path / str(number)
        done = cli(*arguments, *EAGLE3, "train.max_steps=4", *case, f"out_dir={out_dir}")
        if done.code != 1 or not all(word in done.err for word in words) or out_dir.exists():
            wrong.append(f"{case[0]}: code {done.code}, {'a' if out_dir.exists() else 'no'} directory, {done.err[-80:]!r}")
    assert not wrong, "; ".join(wrong)


def test_keys_that_hold_a_mapping(arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """Written as the message about them says."""
    few = (*arguments, "train.max_steps=1", *EAGLE3)
    overrides = ("train.drafter.geometry={intermediate_size: 96}", "data.template_kwargs={enable_thinking: false}")
    done = cli(*few, *overrides, f"out_dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert native.load(tmp_path / "run").config["geometry"]["intermediate_size"] == 96
    for value, words in (
        ("{num_attention_heads: 3}", ("num_attention_heads=3", "num_key_value_heads=2")),
        ("{intermediate_sise: 96}", ("intermediate_sise", "'intermediate_size'")),
    ):
        error = cli(*few, f"train.drafter.geometry={value}", f"out_dir={tmp_path / 'other'}").error
        assert all(word in error for word in words), error
        assert not (tmp_path / "other").exists()


def test_part_of_an_epoch(arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """20 samples for training, 4 at a time."""
    out_dir = tmp_path / "run"
    done = cli(*arguments, *EAGLE3, "train.max_steps=null", "train.num_epochs=0.6", f"out_dir={out_dir}")
    assert done.code == 0, done.err
    (*_, row) = rows_of(out_dir / "metrics.jsonl")
    assert (row["step"], row["epoch"]) == (3, 0.6)


def test_a_sample_longer_than_the_target_can_see_is_cut(arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """With data.max_length=null, or one beyond the target's; what is supervised behind the cut alone leaves the row out."""
    path = conversations(tmp_path / "long.jsonl", 3)
    ids = np.random.default_rng(0).integers(0, 256, 4200).tolist()
    with path.open("a") as file:
        for first in (4000, 4150):
            file.write(json.dumps({"input_ids": ids, "loss_mask": [int(i >= first) for i in range(4200)]}) + "\n")
    what = (*arguments, *EAGLE3, f"data.path={path}", "data.held_out=0", "train.max_steps=1", "train.objective.ttt_steps=1")
    for length in ("null", "5000"):
        out_dir = tmp_path / length
        done = cli(*what, f"data.max_length={length}", f"out_dir={out_dir}")
        assert done.code == 0, done.err
        (row,) = rows_of(out_dir / "metrics.jsonl")
        assert row["supervised_tokens"] > 96, "the long one is among the four of the step"
        assert "1 rows were left out: 1 nothing supervised within max_length=4096" in done.out


def test_without_held_out_samples(arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """Nothing is measured, there is no best, and the last checkpoint is the one to decode with."""
    out_dir = tmp_path / "run"
    done = cli(*arguments, *EAGLE3, "train.max_steps=4", "data.held_out=0", f"out_dir={out_dir}")
    assert done.code == 0, done.err
    assert not (out_dir / "best").is_symlink()
    assert native.find(out_dir) == out_dir / "last"
    assert not any("val_loss" in row or "mean_acceptance_length" in row for row in rows_of(out_dir / "metrics.jsonl"))


def test_a_mistake_is_an_exit_code(arguments: list[str], tmp_path: Path) -> None:
    """As a process of its own."""
    done = ended(start(TRAIN / "eagle.py", *arguments, "train.lrr=1", cwd=tmp_path))
    assert (done.code, done.error) == (1, "error: unknown key 'train.lrr'; did you mean 'train.lr'?")
    assert list(tmp_path.iterdir()) == []


def test_losses_that_are_not_finite_end_the_script(arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    error = cli(*arguments, *EAGLE3, "train.lr=1e30", "train.warmup_ratio=0", f"out_dir={tmp_path / 'run'}").err
    messages = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1
    assert "not finite in 3 steps in a row" in messages[0]
    assert "Traceback" not in error
    assert [row["loss"] is None for row in rows_of(tmp_path / "run" / "metrics.jsonl")] == [False, True, True]


def test_a_run_is_not_overwritten_nor_resumed_as_another(trained: Fitted, arguments: list[str], cli: Cli) -> None:
    out_dir = trained[0]
    before = contents(out_dir)
    where = (*arguments, *EAGLE3, f"out_dir={out_dir}")
    assert "already holds a run" in cli(*where).error
    for change, key in (
        ("train.lr=5e-4", "train"),
        ("train.global_batch_size=8", "train"),
        ("train.objective.ttt_steps=2", "objective"),
        ("train.drafter.norm_output=true", "drafter"),
        ("seed=1", "seed"),
        ("data.limit=20", "data"),
        ("model.architecture=qwen3", "target"),
        ("model.dtype=bfloat16", "dtype"),
    ):
        error = cli(*where, "resume=true", change).error
        assert "resume=true, but" in error, change
        assert key in error, f"{change}: {error}"
    assert contents(out_dir) == before


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "model.safetensors", "checkpoints"])
def test_the_files_of_others_are_left_alone(name: str, arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """A directory without run.json that holds what a run would write is somebody's: one line, and all is as it was."""
    out_dir = tmp_path / "mine"
    out_dir.mkdir()
    (out_dir / "notes.txt").write_text("mine")
    if name == "checkpoints":
        (out_dir / name).mkdir()
        (out_dir / name / "step-00000001").write_text("mine")
    else:
        (out_dir / name).write_text('{"mine": true}\nno row of a run\n')
    before = contents(out_dir)
    where = (*arguments, *EAGLE3, "train.max_steps=1", f"out_dir={out_dir}")
    assert f"holds {name}, which is of no run of ours; give another out_dir=" in cli(*where).error
    assert "holds no run" in cli(*where, "resume=true").error
    assert contents(out_dir) == before


def test_a_marker_that_cannot_be_read_is_named(arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for text in ("", "mine", "[1]"):
        (tmp_path / "run" / "run.json").write_text(text)
        error = cli(*arguments, *EAGLE3, f"out_dir={tmp_path / 'run'}", "resume=true").error
        assert "run.json: cannot be read" in error
        assert contents(tmp_path / "run") == {"run.json": text.encode()}


def test_a_finished_script_is_resumed_further(trained: Fitted, arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """To no effect, and then for more steps, with a note that the learning rate is another."""
    out_dir = tmp_path / "copy"
    shutil.copytree(trained[0], out_dir, symlinks=True)
    where = (*arguments, *EAGLE3, f"out_dir={out_dir}", "resume=true")
    assert cli(*where).code == 0
    assert (out_dir / "metrics.jsonl").read_bytes() == (trained[0] / "metrics.jsonl").read_bytes()
    same(state_of(out_dir / "last"), state_of(trained[0] / "last"), 0)
    done = cli(*where, "train.max_steps=22", "train.micro_batch_size=4", "train.sharding=fsdp", "train.keep=3")
    assert done.code == 0, done.err
    assert "20 steps" in done.err
    assert [row["step"] for row in rows_of(out_dir / "metrics.jsonl")] == list(range(1, 23))


def test_resumed_without_a_row(trained: Fitted, arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """As if killed between the last checkpoint and the first row of metrics, which come at the same step in a short run."""
    out_dir = tmp_path / "copy"
    shutil.copytree(trained[0], out_dir, symlinks=True)
    (out_dir / "metrics.jsonl").write_text("")
    done = cli(*arguments, *EAGLE3, f"out_dir={out_dir}", "resume=true")
    assert done.code == 0, done.err


def test_a_warm_start(trained: Fitted, trained_eagle: Path, arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """Goes on where the drafter was; one of another target or method is refused."""
    out_dir = tmp_path / "run"
    warm_start = (*arguments, *EAGLE3, "train.max_steps=1", f"checkpoint={trained[0] / 'last'}", f"out_dir={out_dir}")
    for case, words in (
        (("model.architecture=gemma2",), ("trained for tiny-llama", "tiny-gemma2")),
        ((f"checkpoint={trained_eagle}",), ("'eagle'", "method=eagle")),
    ):
        error = cli(*warm_start, *case).error
        assert all(word in error for word in words), error
        assert not out_dir.exists()
    done = cli(*warm_start, "train.objective.ttt_warmup=0", "train.warmup_ratio=0", "train.lr=1e-9")
    assert done.code == 0, done.err
    before = native.load(trained[0] / "last").tensors
    after = native.load(out_dir / "last").tensors
    assert before is not None
    assert after is not None
    same(before, after, 1e-5)
    (row,) = rows_of(out_dir / "metrics.jsonl")
    assert row["val_loss"] == pytest.approx(rows_of(trained[0] / "metrics.jsonl")[-1]["val_loss"], rel=1e-4)


def test_a_warm_start_passes_nothing_over(trained: Fitted, arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """A key of train.drafter that the checkpoint has otherwise is named, with both values; no directory is taken."""
    out_dir = tmp_path / "run"
    warm_start = (*arguments, *EAGLE3, "train.max_steps=1", f"checkpoint={trained[0] / 'last'}", f"out_dir={out_dir}")
    for case, words in (
        ("norm_output=true", ("norm_output is true", "norm_output=false")),
        ("norm_before_residual=true", ("norm_before_residual is true",)),
        ("fc_norm=true", ("fc_norm is true",)),
        ("layer_type=qwen3", ("layer_type is qwen3", "layer_type=llama")),
        ("draft_vocab_size=50", ("draft_vocab_size is 50", "draft_vocab_size=100")),
        ("draft_vocab_size=320", ("draft_vocab_size is 320", "draft_vocab_size=100")),
        ("eagle_aux_hidden_state_layer_ids=[0,4]", ("eagle_aux_hidden_state_layer_ids is [0, 4]",)),
        ("geometry={intermediate_size: 96}", ("geometry", "intermediate_size", "96")),
    ):
        error = cli(*warm_start, f"train.drafter.{case}").error
        assert f"train.drafter.{case.partition('=')[0]} is " in error
        assert all(word in error for word in words), f"{case}: {error}"
        assert not out_dir.exists()


# ------------------------------------------------------------------------------------------ processes that end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_script_says_how_to_go_on(
    number: int, trained: Fitted, arguments: list[str], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then goes on to the weights and the rows of the run that nothing happened to."""
    out_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop = stop_at(10, number)

        def stopping(*args: Any, advance: Callable[[int], None], **more: Any) -> dict[str, Any]:
            def both(count: int) -> None:
                advance(count)
                stop(count)

            return fit(*args, advance=both, **more)

        patch.setattr(loop, "fit", stopping)
        done = cli(*arguments, *EAGLE3, f"out_dir={out_dir}")
    assert done.code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], done.err
    assert "stopped after step 10 of 20" in done.out
    assert f"resume=true out_dir={out_dir}" in done.out.replace("\n", "")
    assert json.loads((out_dir / "summary.json").read_text())["interrupted"] is True
    done = cli(*arguments, *EAGLE3, f"out_dir={out_dir}", "resume=true")
    assert done.code == 0, done.err
    same(state_of(out_dir / "last"), state_of(trained[0] / "last"), 1e-7)
    same_rows(rows_of(out_dir / "metrics.jsonl"), rows_of(trained[0] / "metrics.jsonl"))


KILL = """
import os, runpy, sys
from pathlib import Path
from specdec.checkpoint import native
save, calls = native.save, []
def killed(directory, *given):
    calls.append(directory)
    save(directory, *given)
    if len(calls) == 3:
        path = Path(directory) / "model.safetensors"
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), 9)
native.save = killed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_kill_in_the_middle_of_a_save(trained: Fitted, arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "kill.py").write_text(KILL)
    out_dir = tmp_path / "run"
    where = (*arguments, *EAGLE3, f"out_dir={out_dir}")
    done = ended(fork(tmp_path / "kill.py", TRAIN / "eagle.py", *where, cwd=tmp_path))
    assert done.code == -signal.SIGKILL, done.err
    assert steps_in(out_dir) == [4, 5], "step 8 is not there"
    assert (out_dir / "last").resolve() == step_dir(out_dir, 5).resolve()
    native.load(out_dir / "last")
    done = cli(*where, "resume=true")
    assert done.code == 0, done.err
    assert list(out_dir.glob("checkpoints/.*")) == []
    same(state_of(out_dir / "last"), state_of(trained[0] / "last"), 1e-7)
    same_rows(rows_of(out_dir / "metrics.jsonl"), rows_of(trained[0] / "metrics.jsonl"))


def test_two_processes_are_one(trained: Fitted, arguments: list[str], cli: Cli, tmp_path: Path) -> None:
    """Loss, gradient norm and weights of DDP and FSDP are those of one process at the same global batch; a run that two
    processes began can be ended by one, or by two with other sharding; a batch that does not divide is refused."""
    (tmp_path / "worker.py").write_text(WORKER)
    names = ("ddp", "fsdp", "stopped", "crossed", "refused")
    ddp, fsdp, stopped, crossed, refused = ([*arguments, *EAGLE3, f"out_dir={tmp_path / name}"] for name in names)
    fsdp += ["train.sharding=fsdp"]
    jobs = [
        ["", *ddp],
        ["", *fsdp],
        ["stop", *stopped, "train.sharding=fsdp"],
        ["stop", *crossed],
        ["", *crossed, "resume=true", "train.sharding=fsdp"],
        ["", *refused, "train.global_batch_size=3"],
    ]
    done = fork_ranks(tmp_path / "worker.py", TRAIN / "eagle.py", json.dumps(jobs), cwd=tmp_path)
    assert done.code == 0, done.err
    rows = rows_of(trained[0] / "metrics.jsonl")
    for name in ("ddp", "fsdp", "crossed"):
        same_rows(rows_of(tmp_path / name / "metrics.jsonl"), rows)
        same(state_of(tmp_path / name / "last"), state_of(trained[0] / "last"))
        assert steps_in(tmp_path / name) == steps_in(trained[0])
    assert done.out.count("best: step") == 5, "one process speaks"

    assert done.out.count("stopped after step 10 of 20") == 2
    assert steps_in(tmp_path / "stopped")[-1] == 10
    rest = cli(*stopped, "resume=true")
    assert rest.code == 0, rest.err
    same(state_of(tmp_path / "stopped" / "last"), state_of(trained[0] / "last"))
    same_rows(rows_of(tmp_path / "stopped" / "metrics.jsonl"), rows)

    exits = [line.partition(": ")[::2] for line in done.out.splitlines() if line.startswith("rank ")]
    assert sorted(name for name, code in exits if code == "143") == [f"rank {r}, job {j}" for r in (0, 1) for j in (2, 3)]
    exit_codes = [code for _, code in exits if code != "143"]
    assert len(exit_codes) == 2, done.out
    assert len(set(exit_codes)) == 1
    assert exit_codes[0].startswith("error: ")
    assert "train.global_batch_size=3" in exit_codes[0]
    assert "multiple of 2" in exit_codes[0]
    assert not (tmp_path / "refused").exists(), "a mistake takes no directory"


# ----------------------------------------------------------------------------------------- W&B, and decoding with it


def test_wandb_offline_holds_the_metrics(
    arguments: list[str], trained: Fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir = os.environ.get("SPECDEC_CACHE") or str(Path.home() / ".cache" / "specdec")
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    (tmp_path / "home").mkdir()
    (tmp_path / "cwd").mkdir()
    out_dir = tmp_path / "run"
    what = (*arguments, *EAGLE3, "train.max_steps=4", "logger=wandb", f"out_dir={out_dir}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPECDEC_CACHE", cache_dir)
    done = call("eagle", *what, cwd=tmp_path / "cwd", folder=TRAIN)
    assert done.code == 0, done.err
    assert "wandb: offline" in done.out
    assert list((tmp_path / "cwd").iterdir()) == []
    (path,) = out_dir.glob("wandb/offline-run-*/*.wandb")
    history = offline_history(path)
    rows = rows_of(out_dir / "metrics.jsonl")
    by_step = {int(metrics["_step"]): metrics for metrics in history if "train/loss" in metrics}
    assert sorted(by_step) == [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        metrics = {key: json.loads(value) for key, value in by_step[row["step"]].items()}
        for key in ("loss", "lr", "grad_norm", "tokens_per_s"):
            assert metrics[f"train/{key}"] == pytest.approx(row[key], rel=1e-6), key
        for key in ("accuracy", "one_minus_tv"):
            assert metrics[f"train/{key}/1"] == pytest.approx(row[key][0], rel=1e-6)
    last = {key: json.loads(value) for key, value in by_step[4].items()}
    assert last["eval/mean_acceptance_length"] == pytest.approx(rows[-1]["mean_acceptance_length"])
    assert last["val/loss"] == pytest.approx(rows[-1]["val_loss"])
    assert last["eval/acceptance_rate_per_position/1"] == pytest.approx(rows[-1]["acceptance_rate_per_position"][0])


DECODE = ("model=tiny", "model.dtype=float32", "limit=2", "sampling.max_tokens=8")


@BOTH
def test_decoding_with_a_trained_drafter_loses_nothing(kind: str, trained: Fitted, trained_eagle: Path, tmp_path: Path) -> None:
    checkpoint = trained_eagle if kind == "eagle" else trained[0]
    what = (*DECODE, f"method={kind}", f"checkpoint={checkpoint}", f"out_dir={tmp_path / 'run'}")
    done = call("run", *what, cwd=tmp_path, folder=EVAL)
    assert done.code == 0, done.err
    assert "lossless: yes, 4 of 4 outputs equal plain decoding" in done.out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["method"] == kind


def test_checkpoints_that_do_not_fit(trained: Fitted, tmp_path: Path) -> None:
    """One line, and no directory is taken."""
    for case, words in (
        (("method=eagle", f"checkpoint={trained[0]}"), ("'eagle3'", "method=eagle3")),
        (("method=eagle3", f"checkpoint={trained[0]}", "model.architecture=gemma2"), ("tiny-llama", "tiny-gemma2")),
        (("method=ngram", f"checkpoint={trained[0]}"), ("checkpoint", "ngram")),
        (("method=eagle3", "checkpoint=/nowhere/run"), ("/nowhere/run", "no such directory")),
        (("method=eagle3", f"checkpoint={tmp_path}"), ("neither a checkpoint",)),
    ):
        done = call("run", *DECODE, *case, f"out_dir={tmp_path / 'run'}", cwd=tmp_path, folder=EVAL)
        assert all(word in done.error for word in words), f"{case}: {done.error}"
        assert not (tmp_path / "run").exists()


def test_what_nobody_asked_for_is_none_in_the_metrics() -> None:
    """Training on the data's tokens alone makes no distribution of the target: NaN is no JSON."""
    row = LossSums.from_table(torch.tensor([[2.0, 1.0, float("nan"), 4.0, 1.0, 4.0, 4.0]])).metrics()
    assert row["one_minus_tv"] == [None]
    assert (row["step_loss"], row["accuracy"]) == ([0.5], [0.25])
    json.dumps(row, allow_nan=False)
