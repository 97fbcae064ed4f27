"""DSpark: the Markov head, that training and drafting compute the same, and the confidence."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import rejection
from specdec.checkpoint import native
from specdec.drafter.base import DraftSampler, Init
from specdec.method.dspark import DSpark, MarkovHead, Objective
from specdec.policy.calibration import ConfidenceRecorder
from specdec.training.evaluate import acceptance, calibrated
from specdec.training.features import OnlineFeatures
from support.drafters import REDUCED, SAMPLES, close, decodes_as_plain, prompts, shaken
from support.methods import context, tiny

VECTOR = json.loads((Path(__file__).parents[1] / "vectors" / "block_drafters.json").read_text())["markov_block"]
FROZEN = Init(train_lm_head=False)
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "rnn": {"markov_head_type": "rnn", "layer_type": "llama"},
    "fill-in": {"sample_from_anchor": False, "block_size": 5, "markov_head_type": "rnn"},
}
EVERY = pytest.mark.parametrize("name", VARIANTS)


def drafter(name: str, num_speculative_tokens: int = 3, is_reduced: bool = False, **settings: Any) -> DSpark:
    architecture = {"block_size": 4, "num_hidden_layers": 2, "num_aux_hidden_states": 2, "markov_rank": 8} | VARIANTS[name]
    return shaken(DSpark, tiny(), architecture, REDUCED if is_reduced else None, num_speculative_tokens, **settings)


def test_the_distribution_of_a_block_is_the_vectors() -> None:
    head = MarkovHead("vanilla", 3, 3, 2, 4).double()
    with torch.no_grad():
        head.markov_w1.weight.copy_(torch.tensor(VECTOR["W1"]))
        head.markov_w2.weight.copy_(torch.tensor(VECTOR["W2"]).T)
    base_KV = torch.tensor(VECTOR["U"], dtype=torch.float64)

    def distribution(k: int, prev: int) -> Tensor:
        """[V] of token k, after this one."""
        with torch.no_grad():
            return (base_KV[k] + head.markov_w2(head(torch.zeros(1, 4), torch.tensor([prev]), None)[0])[0]).softmax(-1)

    for block in itertools.product(range(3), repeat=3):
        before = (VECTOR["anchor"], *block[:2])
        joint = np.prod([distribution(k, before[k])[block[k]].item() for k in range(3)])
        assert joint == pytest.approx(VECTOR["joint_q"][",".join(map(str, block))], rel=1e-5)
    path = [VECTOR["anchor"]]
    for k in range(3):
        path.append(int(distribution(k, path[-1]).argmax()))
    assert path[1:] == VECTOR["greedy"]
    target_V = torch.tensor(VECTOR["p"][0][VECTOR["anchor"]], dtype=torch.float64)
    overlap = torch.minimum(distribution(0, VECTOR["anchor"]), target_V).sum().item()
    assert overlap == pytest.approx(VECTOR["confidence_target_position0"], rel=1e-4)


@EVERY
@pytest.mark.parametrize("is_reduced", [False, True], ids=["", "reduced"])
def test_what_is_trained_is_what_drafts(name: str, is_reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block: given the data's tokens, the logits and the confidence of drafting are those of training."""
    trained = drafter(name, 1, is_reduced)
    trained.for_training(Objective(), FROZEN)
    batch = OnlineFeatures(tiny(), trained.hidden_layers)(SAMPLES)
    most = trained.num_steps(0.0)
    plan = trained.plan(batch, most, 0)
    (head_VF,) = trained.heads()
    assert head_VF is not None
    with torch.no_grad():
        states = trained.unrolled(batch, plan)
    drafting = drafter(name, most, is_reduced)
    drafting.reserve(1, 400)
    seen: list[tuple[Tensor, Tensor]] = []
    forced: list[int] = []

    def sample(self: DraftSampler, logits_BV: Tensor, log_odds_B: Tensor | None = None) -> Tensor:
        assert log_odds_B is not None
        seen.append((logits_BV[0], log_odds_B[0]))
        return torch.tensor([forced[len(seen) - 1]])

    monkeypatch.setattr(DraftSampler, "sample", sample)
    monkeypatch.setattr(DraftSampler, "draft", lambda self, draft_B: None)
    checked = 0
    for place in plan.steps[0].rows[::5]:
        first = plan.first_N[place]
        tokens = batch.token_N[first : place + 1].tolist()
        forced[:] = batch.token_N[place + 1 : place + 1 + most].tolist() + [0] * most
        seen.clear()
        drafting.wipe()
        hidden = [batch.hidden(drafting.hidden_layers)[first:place]]
        drafting.propose(replace(context(drafting, {0: tokens}, [most]), hidden=hidden, return_confidence=True))
        for k, step in enumerate(plan.steps):
            row = np.flatnonzero(step.rows == place)
            if len(row):
                state_F = states[k][row[0]]
                logits_V, log_odds = seen[k]
                close(logits_V, state_F @ head_VF.T, 5e-5)
                prev = batch.token_N[place + k : place + k + 1]
                want = trained.confidence(state_F[None, : trained.width], prev)
                assert want is not None
                assert log_odds.item() == pytest.approx(want.item(), rel=5e-5, abs=5e-6)
                checked += 1
    assert checked > 10


def test_confidence_learns_acceptance() -> None:
    """Its gradient is that of the cross-entropy with the overlap, and reaches the block."""
    trained = drafter("vanilla", 1)
    trained.for_training(Objective(), FROZEN)
    batch = OnlineFeatures(tiny(), trained.hidden_layers)(SAMPLES[:3])
    grads = []
    for confidence in (0.0, 1.0):
        trained.objective = Objective(confidence=confidence, loss={"tv": 1.0})
        trained.zero_grad()
        loss, sums = trained(batch)
        loss.backward()
        assert trained.confidence_head is not None
        grad = trained.confidence_head.proj.bias.grad
        grads.append(0.0 if grad is None else grad.item())
    assert grads[0] == 0.0
    # at the bias, the slope is the sum of confidence less overlap
    plan = trained.plan(batch, trained.num_steps(0.0), 0)
    slope = 0.0
    weights = trained.objective.weights(len(plan.steps))
    with torch.no_grad():
        for k, (step, state_AF) in enumerate(zip(plan.steps, trained.unrolled(batch, plan), strict=True)):
            prev = batch.token_N[torch.from_numpy(step.rows[step.supervised] + k)]
            log_odds = trained.confidence(state_AF[step.supervised, : trained.width], prev)
            assert log_odds is not None
            slope += weights[k] * log_odds.sigmoid().sum().item()
    overlap = sum(weight * total for weight, total in zip(weights, sums.overlap_K.tolist(), strict=True))
    assert grads[1] == pytest.approx(slope - overlap, rel=1e-4)


@EVERY
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_output_is_plain_decodings(name: str, batch_size: int) -> None:
    decodes_as_plain(partial(drafter, name), batch_size)


def test_the_confidence_of_a_draft_is_divided_by_temperatures() -> None:
    """Beyond their end the last one holds; without asking, or in a tree, there is no calibrated confidence."""
    new = drafter("vanilla", 3)
    new.reserve(1, 64)
    asking = replace(context(new, {0: prompts(9)[0]}, [3]), return_confidence=True)
    plain_K = new.propose(asking).confidence_BKF[0, :, 0]
    new.calibrate([2.0, 0.5])
    torch.testing.assert_close(new.propose(asking).confidence_BKF[0, :, 0], plain_K / torch.tensor([2.0, 0.5, 0.5]))
    assert new.predicts_acceptance
    assert not drafter("vanilla", 3, tree_topk=2).predicts_acceptance
    assert not DSpark(tiny(), DSpark.init_checkpoint(tiny(), {"enable_confidence_head": False}, FROZEN), 3).predicts_acceptance


def test_temperatures_are_saved_with_the_drafter(tmp_path: Path, one_line: Any) -> None:
    """After an evaluation; a checkpoint that was altered is one line."""
    new = drafter("vanilla", 3)
    native.save(tmp_path, new.to_checkpoint(), {}, "")
    recorder = ConfidenceRecorder()
    acceptance(tiny(), new, rejection.build("standard"), prompts(5, 9, 30), 24, policy=recorder)
    quality = calibrated(recorder, tmp_path)
    assert 0 <= quality["confidence_calibration_error"] < 1
    loaded = DSpark(tiny(), str(tmp_path), 3)
    assert len(loaded.temperatures) == 3
    assert loaded.temperatures == native.load(tmp_path).config["confidence_temperatures"]
    for wrong in (0.0, [1.0, -1.0], ["x"], [float("inf")]):
        native.add_to_config(tmp_path, confidence_temperatures=wrong)
        one_line(lambda: DSpark(tiny(), str(tmp_path), 3), "confidence_temperatures", "positive")


def test_confidence_without_acceptance_is_refused(one_line: Any) -> None:
    one_line(lambda: Objective(loss={"nll": 1.0}), "confidence=1.0", "confidence=0", "tv")
    assert Objective(loss={"nll": 1.0}, confidence=0).confidence == 0
