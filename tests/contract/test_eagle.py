"""EAGLE-1 and EAGLE-3: what is trained is what drafts, the loss, the shapes that they can have, and their checkpoints."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec import method
from specdec.checkpoint import native
from specdec.checkpoint.native import Checkpoint
from specdec.core import Context, Draft
from specdec.drafter import losses, unroll
from specdec.drafter.autoregressive import PREFILL_CHUNK, AutoregressiveDrafter, Geometry
from specdec.drafter.base import Init, UnrolledObjective
from specdec.drafter.batch import Batch, Sample
from specdec.method import eagle
from specdec.method.eagle import Eagle
from specdec.method.eagle3 import Architecture, Eagle3
from specdec.model.target import CausalLM
from specdec.training.features import OnlineFeatures
from support.drafters import REDUCED, ROWS, SAMPLES, VOCAB, InWords, close, decode, gradients, plain, prompts, sample
from support.table import Restless
from support.targets import loaded


@dataclass(frozen=True)
class Variant:
    """A drafter: its method, what it is built of, how it begins, and the tokens that it can draft (None: all)."""

    kind: type[AutoregressiveDrafter] = Eagle3
    architecture: dict[str, Any] = field(default_factory=dict)
    init: Init = field(default_factory=Init)
    reduced: bool = False
    target: str = "tiny"

    @property
    def vocab_ids(self) -> np.ndarray | None:
        return REDUCED if self.reduced else None


VARIANTS = {
    "eagle": Variant(Eagle),
    "eagle-frozen-head": Variant(Eagle, init=Init(train_lm_head=False)),
    "eagle-gemma2": Variant(Eagle, target="tiny-gemma2", init=Init(train_lm_head=False)),
    "eagle-qwen3-reduced": Variant(Eagle, target="tiny-qwen3", reduced=True),
    "eagle3": Variant(),
    "eagle3-reduced": Variant(reduced=True),
    "eagle3-qwen3-style": Variant(architecture={"layer_type": "qwen3", "norm_before_residual": True}, reduced=True),
    "eagle3-norm-before-fc": Variant(architecture={"norm_before_fc": True}, init=Init(lm_head="random")),
    "eagle3-fc-norm": Variant(architecture={"fc_norm": True, "norm_output": True}, reduced=True),
    "eagle3-frozen-head": Variant(init=Init(train_lm_head=False), reduced=True),
    "eagle3-target-head": Variant(init=Init(train_lm_head=False)),
    "eagle3-layers": Variant(architecture={"eagle_aux_hidden_state_layer_ids": [0, 3, 4]}, init=Init(scale_features=False)),
    "eagle3-gemma2": Variant(target="tiny-gemma2", reduced=True),
    "eagle3-qwen3": Variant(target="tiny-qwen3", architecture={"layer_type": "qwen3", "norm_output": True}),
}
FEW = ["eagle", "eagle3-reduced", "eagle3-gemma2"]


@cache
def grown(variant: str) -> Checkpoint:
    """A fresh drafter whose weights were moved as if by training: wide, and norms that are not 1."""
    spec = VARIANTS[variant]
    fresh = spec.kind.init_checkpoint(loaded(spec.target), spec.architecture, spec.init, spec.vocab_ids)
    noise = torch.Generator().manual_seed(4)
    assert fresh.tensors is not None
    for name, tensor in sorted(fresh.tensors.items()):
        if tensor.is_floating_point() and not (name == "lm_head.weight" and not spec.init.train_lm_head):
            tensor += 0.15 * torch.randn(tensor.shape, generator=noise)
    return fresh


def drafter(variant: str, num_draft: int = 4, **more: Any) -> Any:
    """One for drafting."""
    spec = VARIANTS[variant]
    return spec.kind(loaded(spec.target), copy.deepcopy(grown(variant)), num_draft, **more)


def features(trained: AutoregressiveDrafter, samples: list[Sample]) -> Batch:
    return OnlineFeatures(trained.target, trained.hidden_layers)(samples)


@cache
def statistics(target: str, layers: tuple[int, ...]) -> Tensor:
    return OnlineFeatures(loaded(target), layers)(SAMPLES).hidden(layers)


def trainable(variant: str, num_steps: int = 3, **objective: Any) -> Any:
    """One for training, which scales features where its variant does."""
    spec = VARIANTS[variant]
    trained = drafter(variant, 1)
    settings = objective if spec.kind is Eagle else {"ttt_steps": num_steps, "loss": {"ce": 0.5, "tv": 0.5}} | objective
    trained.for_training(spec.kind.objective_type(**settings), spec.init, statistics(spec.target, trained.hidden_layers))
    return trained


# --------------------------------------------------------------------------- training and drafting agree


@dataclass
class Proposed:
    """One row of one call of `propose`: the committed tokens, what was drafted, and the states and logits of every step."""

    tokens: list[int]
    drafted: list[int]
    states: list[Tensor]
    logits: list[Tensor]


def watched(proposer: AutoregressiveDrafter) -> list[Proposed]:
    """Make a drafter write down what happens while it proposes."""
    proposals: list[Proposed] = []
    steps: list[tuple[Tensor, Tensor]] = []
    logits_of = proposer.draft_logits
    propose = proposer.propose

    def draft_logits(state_BD: Tensor) -> Tensor:
        logits_BV = logits_of(state_BD)
        steps.append((state_BD.clone(), logits_BV.clone()))
        return logits_BV

    def watching(context: Context) -> Draft:
        steps.clear()
        draft = propose(context)
        for b, length in enumerate(draft.length_B.tolist()):
            row_steps = [(states[b], logits[b]) for states, logits in steps[:length]]
            proposals.append(
                Proposed(
                    context.tokens(b).tolist(),
                    draft.token_BK[b, :length].tolist(),
                    [s for s, _ in row_steps],
                    [x for _, x in row_steps],
                )
            )
        return draft

    proposer.draft_logits, proposer.propose = draft_logits, watching  # type: ignore[method-assign]
    return proposals


@pytest.mark.parametrize("restless", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_trained_is_what_drafts(variant: str, restless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft of a decoding in a batch, against the unrolled steps over (committed tokens, draft) as a document: the row
    before the last committed token is at step k where draft k is made. States that no row may read are random. Restless: rows
    sit steps out, some for so long that the drafter has to take in their states."""
    monkeypatch.setattr("specdec.engine.MAX_PENDING_STATES", 2)
    trained = trainable(variant, 4)
    spec = VARIANTS[variant]
    proposer = spec.kind(loaded(spec.target), trained.to_checkpoint(), 4)
    proposals = watched(proposer)
    lengths = (3, 130, 20, 2, 9)
    policy = Restless(4) if restless else None
    assert decode(loaded(spec.target), proposer, prompts(*lengths), policy=policy) == plain(spec.target, lengths)
    proposals = [one for one in proposals if one.drafted]
    assert len(proposals) > (20 if restless else 40)
    assert {len(one.drafted) for one in proposals} == {1, 2, 3, 4}

    documents = []
    for i, one in enumerate(proposals):
        tokens = np.array([*one.tokens, *one.drafted])
        documents.append(Sample(str(i), tokens, np.arange(len(tokens)) >= len(one.tokens)))
    batch = features(trained, documents)
    first_B = np.cumsum(batch.length_B) - batch.length_B
    row_B = first_B + np.array([len(one.tokens) - 2 for one in proposals])
    for first, row, length in zip(first_B, row_B, batch.length_B, strict=True):
        batch.hidden_NTD[row + 1 : first + length] = 9.0
    with torch.no_grad():
        # EAGLE-1's feature noise is for training
        steps = unroll.plan(batch.length_B, batch.mask_N, 4)
        states = trained.eval().unrolled(batch, steps)
        compared = 0
        for k, (step, state_AD) in enumerate(zip(steps.steps, states, strict=True)):
            here = [(row, one) for row, one in zip(row_B.tolist(), proposals, strict=True) if len(one.drafted) > k]
            place = torch.from_numpy(np.searchsorted(step.rows, [row for row, _ in here]))
            assert step.rows[place.numpy()].tolist() == [row for row, _ in here]
            close(state_AD[place], torch.stack([one.states[k] for _, one in here]), 1e-4, f"states of step {k}")
            logits_AV = trained.draft_logits(state_AD[place])
            close(logits_AV, torch.stack([one.logits[k] for _, one in here]), 1e-4, f"logits of step {k}")
            ids = torch.arange(VOCAB) if trained.vocab_ids is None else trained.vocab_ids
            agreed = [int(ids[best]) == one.drafted[k] for best, (_, one) in zip(logits_AV.argmax(-1), here, strict=True)]
            assert np.mean(agreed) > 0.99, "but for ties"
            compared += len(here)
    assert compared > (40 if restless else 100)


def test_drafts_go_on_from_a_long_prompt() -> None:
    """The prompt's pairs come in pieces; so do the states, from a prefill in chunks."""
    target = loaded()
    lengths = (PREFILL_CHUNK + 1, PREFILL_CHUNK + 2, 2 * PREFILL_CHUNK + 40)
    for length in lengths:
        proposer = drafter("eagle3-reduced")
        proposals = watched(proposer)
        assert decode(target, proposer, prompts(length), 6) == plain("tiny", (length,), 6)
        one = proposals[0]
        trained = drafter("eagle3-reduced")
        document = Sample("", np.array([*one.tokens, *one.drafted]), np.arange(length + 1 + len(one.drafted)) > length)
        batch = features(trained, [document])
        plan = unroll.plan(batch.length_B, batch.mask_N, len(one.drafted))
        with torch.no_grad():
            states = trained.unrolled(batch, plan)
        for k, step in enumerate(plan.steps):
            close(states[k][step.rows.tolist().index(length - 1)], one.states[k], 1e-4, f"step {k}")


# ------------------------------------------------------------------------------------------- the formulas


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_is_its_formula(variant: str) -> None:
    spec = VARIANTS[variant]
    words = InWords(grown(variant))
    trained = drafter(variant)
    batch = features(trained, [SAMPLES[0]])
    hidden_NTD = batch.hidden(trained.hidden_layers)[:-1]
    count = len(batch.token_N) - 1
    embedding = trained.target.embedding(batch.token_N[1:])
    with torch.no_grad():
        if spec.kind is Eagle3:
            want = words.eagle3(embedding, hidden_NTD)
        else:
            want = words.eagle(embedding, trained.target.final_norm(hidden_NTD[:, -1]))
        plan = unroll.plan(np.array([count]), np.ones(count, dtype=bool), 1)
        attention = unroll.UnrolledAttention(plan, unroll.attention_reference)
        states = trained.step(trained.embed(batch.token_N[1:]), trained.fuse(hidden_NTD), torch.arange(count), attention)
        close(states, want, 1e-4)
        head = words.tensors.get("lm_head.weight", trained.target.head_rows()[0])
        close(trained.draft_logits(states[0]), want[0] @ head.t(), 1e-4)


# --------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_the_readable_one(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value, sums and the gradient of every parameter."""
    # the slope of tv jumps where p and q meet, which they do for one of the numbers that this variant comes to
    trained = trainable(variant, loss={"ce": 0.5, "kl": 0.5}) if variant == "eagle3-target-head" else trainable(variant)
    batch = features(trained, SAMPLES)
    batch.weight_B = np.array([1.0, 0.5, 1.0, 2.0])
    ours = gradients(trained, batch)
    monkeypatch.setattr(losses, "distill", losses.distill_reference)
    monkeypatch.setattr(trained, "unrolled", partial(trained.unrolled, kernel=unroll.attention_reference))
    close(ours, gradients(trained, batch), 1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_trainable_parameter_learns(variant: str) -> None:
    trained = trainable(variant)
    spec = VARIANTS[variant]
    _, sums, grads = gradients(trained, features(trained, SAMPLES))
    assert all(grad.abs().sum() > 0 for grad in grads.values()), [name for name, g in grads.items() if not g.abs().sum()]
    assert all(parameter.dtype == torch.float32 for parameter in trained.parameters())
    frozen = {name for name, parameter in trained.named_parameters() if not parameter.requires_grad}
    has_head = trained.lm_head is not None
    assert has_head == (spec.init.train_lm_head or spec.reduced)
    assert frozen == ({"lm_head.weight"} if has_head and not spec.init.train_lm_head else set())
    steps = 1 if spec.kind is Eagle else 3
    assert sums.shape == (steps, 7)
    supervised = [sum(int(s.mask_n[2 + k :].sum()) for s in SAMPLES) for k in range(steps)]
    assert sums[:, ROWS].tolist() == supervised


@pytest.mark.parametrize("variant", FEW)
def test_a_batch_is_the_sum_of_its_samples(variant: str) -> None:
    trained = trainable(variant)
    batched = gradients(trained, features(trained, SAMPLES), seed=5)
    alone = [gradients(trained, features(trained, [one]), seed=5) for one in SAMPLES]
    loss = sum(one[0] for one in alone)
    sums = sum(one[1] for one in alone)
    close(batched[0], loss, 1e-5, "loss")
    close(batched[1], sums, 1e-5, "sums")
    close(batched[2], {name: sum(one[2][name] for one in alone) for name in batched[2]}, 1e-5)


@pytest.mark.parametrize("variant", FEW)
def test_samples_weigh_what_they_are_told(variant: str) -> None:
    """In the loss, the metric and the gradient; counts of hits and rows stay counts."""
    trained = trainable(variant)
    weight_B = np.array([2.0, 0.25, 3.0, 0.0])
    batch = features(trained, SAMPLES)
    batch.weight_B = weight_B
    loss, sums, grads = gradients(trained, batch)
    alone = [gradients(trained, features(trained, [one])) for one in SAMPLES]
    close(loss, sum(w * one[0] for w, one in zip(weight_B.tolist(), alone, strict=True)), 1e-5)
    close(sums[:, 0], sum(w * one[1][:, 0] for w, one in zip(weight_B.tolist(), alone, strict=True)), 1e-5)
    close(sums[:, 1:], sum(one[1][:, 1:] for one in alone), 1e-5)
    for name, grad in grads.items():
        close(grad, sum(w * one[2][name] for w, one in zip(weight_B.tolist(), alone, strict=True)), 1e-5, name)


@pytest.mark.parametrize("variant", ["eagle3-reduced", "eagle3-gemma2", "eagle"])
def test_padding_changes_nothing(variant: str) -> None:
    """Tokens that teach nothing, after a sample."""
    trained = trainable(variant, **({"feature_noise": 0.0} if VARIANTS[variant].kind is Eagle else {}))
    want = gradients(trained, features(trained, SAMPLES))
    padded = [
        replace(one, token_n=np.r_[one.token_n, np.full(n, 258)], mask_n=np.r_[one.mask_n, np.zeros(n, dtype=bool)])
        for one, n in zip(SAMPLES, (1, 7, 0, 30), strict=True)
    ]
    close(gradients(trained, features(trained, padded)), want, 1e-5)


@pytest.mark.parametrize("variant", FEW)
def test_a_batch_without_supervision_teaches_nothing(variant: str) -> None:
    trained = trainable(variant)
    for samples in ([SAMPLES[2]], [sample("short", 2, [(0, 2)]), sample("one", 1, [(0, 1)])]):
        loss, sums, grads = gradients(trained, features(trained, samples))
        assert loss == 0
        assert not sums.any()
        assert all((grad == 0).all() for grad in grads.values())


@pytest.mark.parametrize("variant", FEW)
def test_documents_that_end_before_the_steps_do(variant: str) -> None:
    """Three to five tokens: the last of seven steps have no rows, and count nothing."""
    trained = trainable(variant, 7)
    short = [sample(f"short {n}", n, [(0, n)]) for n in (3, 5, 4)]
    loss, sums, grads = gradients(trained, features(trained, short))
    assert loss > 0
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert sums[:, ROWS].tolist() == [6, 3, 1, 0, 0, 0, 0][: len(sums)]
    again = gradients(trainable(variant, 3), features(trained, short))
    close([loss, sums[:3], grads], again, 1e-5)


@pytest.mark.parametrize("variant", ["eagle", "eagle3-reduced", "eagle3-fc-norm", "eagle3-qwen3"])
def test_a_row_sees_neither_the_future_nor_other_documents(variant: str) -> None:
    """The row of position p has seen, at step k, tokens up to p + 1 + k and the target's states up to p of its document."""
    trained = trainable(variant).eval()
    batch = features(trained, [SAMPLES[0], SAMPLES[1], SAMPLES[0]])
    plan = unroll.plan(batch.length_B, np.ones_like(batch.mask_N), 3)

    def rows_that_change(other: Batch) -> list[Tensor]:
        with torch.no_grad():
            states = trained.unrolled(other, plan)
        return [(a != b).any(1) for a, b in zip(states, want, strict=True)]

    with torch.no_grad():
        want = trained.unrolled(batch, plan)
    first_N = torch.from_numpy(plan.first_N)
    for place in (0, 1, 23, 39, 40, 41, 50, 56, 57, 60):
        token_N = batch.token_N.clone()
        hidden_NTD = batch.hidden_NTD.clone()
        token_N[place] = (token_N[place] + 1) % VOCAB
        hidden_NTD[place] += 3.0
        for k, changed in enumerate(rows_that_change(replace(batch, token_N=token_N))):
            row_A = torch.from_numpy(plan.steps[k].rows)
            # the first token of a document is in no pair, since the target's state is what tells of it
            sees = (row_A + 1 + k >= place) & (first_N[row_A] == first_N[place]) & bool(place != first_N[place])
            assert changed.tolist() == sees.tolist(), (place, k)
        for k, changed in enumerate(rows_that_change(replace(batch, hidden_NTD=hidden_NTD))):
            row_A = torch.from_numpy(plan.steps[k].rows)
            sees = (row_A >= place) & (first_N[row_A] == first_N[place])
            assert changed.tolist() == sees.tolist(), (place, k)


def test_warmup_unrolls_one_step() -> None:
    trained = trainable("eagle3-reduced", 5, ttt_warmup=0.25)
    batch = features(trained, SAMPLES)
    unrolled = trained.loss(batch, progress=0.25)[1].table()
    one = trained.loss(batch, progress=0.2)[1].table()
    assert (len(unrolled), len(one)) == (5, 1)
    close(one[0], unrolled[0])


def test_rows_outside_the_draft_vocabulary_add_nothing() -> None:
    """They count as rows, and what they would add to the loss goes."""
    masked = trainable("eagle3-reduced")
    open_ = trainable("eagle3-reduced", mask_outside_vocab=False)
    batch = features(masked, SAMPLES)
    plan = unroll.plan(batch.length_B, batch.mask_N, 3)
    outside = ~torch.isin(batch.argmax_N[torch.from_numpy(plan.labelled)], torch.from_numpy(REDUCED))
    assert 0 < outside.sum() < len(outside)
    assert torch.equal(masked.teacher(batch, plan).weight_Q == 0, outside)
    assert (open_.teacher(batch, plan).weight_Q == 1).all()
    (less, sums) = masked.loss(batch)
    (more, all_sums) = open_.loss(batch)
    assert less < more
    close(sums.table()[:, 1:], all_sums.table()[:, 1:])


def test_the_teacher_is_the_target() -> None:
    """Its distribution at a labelled position is that of the model's own logits, for targets that cap them too."""
    for variant in ("eagle3-reduced", "eagle3-gemma2", "eagle3-qwen3"):
        trained = trainable(variant)
        batch = features(trained, SAMPLES[:1])
        plan = unroll.plan(batch.length_B, batch.mask_N, 3)
        teacher = trained.teacher(batch, plan)
        store = trained.target.new_cache()
        store.reserve(1, 40)
        out = trained.target.forward(store, batch.token_N, np.array([0]), np.array([40]))
        logits_QV = out.logits[torch.from_numpy(plan.labelled)]
        ids = trained.vocab_ids
        target_logits = logits_QV if ids is None else logits_QV[:, ids]
        close(trained.target.scale_logits(teacher.state_QD @ teacher.weight_VD.t()), target_logits, 1e-4, variant)
        close(teacher.logsumexp_Q, logits_QV.logsumexp(-1), 1e-4, variant)
        best = logits_QV.argmax(-1).tolist()
        index = {token: i for i, token in enumerate(range(VOCAB) if ids is None else ids.tolist())}
        assert teacher.label_Q.tolist() == [index.get(token, -1) for token in best]


def test_chains_are_counted() -> None:
    """JOINT, REACHED and CHAINS by brute force: hits in a row from the first step on."""
    trained = trainable("eagle3-reduced")
    lengths = np.array([12, 7])
    mask_N = np.random.default_rng(1).random(19) < 0.7
    plan = unroll.plan(lengths, mask_N, 3)
    rng = np.random.default_rng(2)
    hits = [rng.random(len(step.supervised)) < 0.7 for step in plan.steps]
    by_row = [dict(zip(s.rows[s.supervised].tolist(), h.tolist(), strict=True)) for s, h in zip(plan.steps, hits, strict=True)]
    for k, counted in enumerate(torch.stack(trained._chain_sums([torch.from_numpy(h) for h in hits], plan), 1).tolist()):
        complete = [row for row in by_row[k] if all(row in step for step in by_row[:k])]
        reached = [row for row in complete if all(step[row] for step in by_row[:k])]
        assert counted == [sum(by_row[k][row] for row in reached), len(reached), len(complete)], k


def test_a_step_of_training_leaves_the_target_alone() -> None:
    """Bit for bit, and nothing of the target is among the parameters or what is saved."""
    for variant in ("eagle-frozen-head", "eagle3-target-head", "eagle3-reduced"):
        trained = trainable(variant)
        spec = {id(p) for p in trained.parameters()}
        assert not spec & {id(p) for p in trained.target.model.parameters()}
        head = trained.target.head_rows()[0]
        before = {name: x.clone() for name, x in trained.target.model.state_dict().items()} | {"head": head.clone()}
        optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=0.1)
        weights = {name: p.detach().clone() for name, p in trained.named_parameters()}
        trained.loss(features(trained, SAMPLES))[0].backward()
        optimizer.step()
        after = trained.target.model.state_dict() | {"head": trained.target.head_rows()[0]}
        for name, x in before.items():
            assert torch.equal(x, after[name]), name
        assert all(torch.equal(weights[name], p) != p.requires_grad for name, p in trained.named_parameters())


# ----------------------------------------------------------------------------------------- EAGLE-1's own


def test_noise_is_the_samples_own() -> None:
    trained = trainable("eagle")
    together = features(trained, SAMPLES)
    fused = trained.fuse(together.hidden(trained.hidden_layers))
    noise = trained.add_feature_noise(fused, together, 7) - fused
    parts = noise.split(together.length_B.tolist())
    for one, part in zip(SAMPLES, parts, strict=True):
        alone = features(trained, [one])
        spec = trained.fuse(alone.hidden(trained.hidden_layers))
        torch.testing.assert_close(trained.add_feature_noise(spec, alone, 7) - spec, part, rtol=0, atol=1e-5)
        width = 0.2 * 512 / len(one.token_n)
        assert 0.4 * width < part.abs().max() <= 0.5 * width + 1e-5
    assert not torch.equal(parts[0][:9], parts[2]), "samples differ"
    assert not torch.equal(trained.add_feature_noise(fused, together, 8) - fused, noise)
    assert torch.equal(trained.add_feature_noise(fused, together, 7) - fused, noise)
    assert torch.equal(trained.eval().add_feature_noise(fused, together, 7), fused)
    without_noise = trainable("eagle", feature_noise=0.0)
    assert torch.equal(without_noise.add_feature_noise(fused, together, 7), fused)


def test_noise_reaches_the_loss() -> None:
    trained = trainable("eagle")
    batch = features(trained, SAMPLES)
    losses_of = [trained.loss(batch, seed=seed)[0].item() for seed in (1, 1, 2)]
    assert losses_of[0] == losses_of[1] != losses_of[2]
    trained.eval()
    assert trained.loss(batch, seed=1)[0] == trained.loss(batch, seed=2)[0]


@pytest.mark.parametrize("seed", [0, 2**31, 2**53 - 1])
def test_noise_takes_every_seed_that_a_run_may_have(seed: int) -> None:
    trained = trainable("eagle")
    batch = features(trained, SAMPLES[:1])
    assert torch.isfinite(trained.loss(batch, seed=seed)[0])


def test_regression_is_smooth_l1_on_the_targets_state() -> None:
    """In words: the mean over the width, summed over rows, beside the soft cross-entropy."""
    trained = trainable("eagle", smooth_l1=0.7, loss={"ce": 0.1}, feature_noise=0.0)
    batch = features(trained, SAMPLES)
    plan = unroll.plan(batch.length_B, batch.mask_N, 1)
    with torch.no_grad():
        state_AD = trained.unrolled(batch, plan)[0]
        normed_ND = trained.target.final_norm(batch.hidden_NTD[:, -1])
        gap_AD = (state_AD - normed_ND[torch.from_numpy(plan.steps[0].rows + 1)]).abs()
        regression = torch.where(gap_AD < 1, 0.5 * gap_AD**2, gap_AD - 0.5).mean(-1).sum()
        distribution = trained.target.logits_of(batch.hidden_NTD[torch.from_numpy(plan.steps[0].rows + 1), -1]).softmax(-1)
        entropy = -(distribution * trained.draft_logits(state_AD).log_softmax(-1)).sum()
        close(trained.loss(batch)[0], 0.7 * regression + 0.1 * entropy, 1e-5)


# ------------------------------------------------------------------------------------------------ scaling


@pytest.mark.parametrize("variant", ["eagle3-reduced", "eagle3-target-head", "eagle3-gemma2", "eagle3-fc-norm", "eagle"])
def test_scaling_is_folded_in_when_a_drafter_is_saved(variant: str) -> None:
    """The to_checkpoint drafter fuses as the one in training. Where a norm comes first there is nothing to scale."""
    trained = trainable(variant)
    spec = VARIANTS[variant]
    scales = variant not in ("eagle3-fc-norm", "eagle")
    assert (trained.feature_scale is not None) == scales
    assert ("feature_scale" in trained.state_dict()) == scales
    checkpoint = trained.to_checkpoint()
    assert checkpoint.tensors is not None
    assert "feature_scale" not in checkpoint.tensors
    before = {name: x.clone() for name, x in trained.state_dict().items()}
    saved = spec.kind(loaded(spec.target), checkpoint, 3)
    hidden_NTD = statistics(spec.target, trained.hidden_layers)
    with torch.no_grad():
        close(saved.fuse(hidden_NTD), trained.fuse(hidden_NTD), 1e-4)
    assert all(torch.equal(x, trained.state_dict()[name]) for name, x in before.items()), "training goes on"
    if scales:
        assert not torch.equal(checkpoint.tensors["fc.weight"], before["fc.weight"])
        parts = trained.fuse(hidden_NTD), hidden_NTD.flatten(1) * trained.feature_scale
        torch.testing.assert_close(parts[1].pow(2).mean(0).sqrt(), torch.ones(parts[1].shape[1]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("variant", ["eagle3-reduced", "eagle3-gemma2"])
def test_scaling_a_trained_drafter_leaves_its_function(variant: str) -> None:
    spec = VARIANTS[variant]
    scaled = drafter(variant)
    plain_one = drafter(variant)
    hidden_NTD = statistics(spec.target, scaled.hidden_layers)
    scaled.for_training(UnrolledObjective(), Init(), hidden_NTD, warm_start=True)
    assert scaled.feature_scale is not None
    with torch.no_grad():
        close(scaled.fuse(hidden_NTD), plain_one.fuse(hidden_NTD), 1e-4)
    close(scaled.to_checkpoint().tensors, plain_one.to_checkpoint().tensors, 1e-4)
    cold = drafter(variant)
    cold.for_training(UnrolledObjective(), Init(), hidden_NTD)
    assert torch.equal(cold.fc.weight, plain_one.fc.weight)


# ------------------------------------------------------------------------------------------- architecture


def test_tapped_layers() -> None:
    """vLLM's 2, n/2 and n-3; for models with fewer layers, whatever there is."""
    assert [Architecture().layers(n) for n in (32, 30, 16)] == [(2, 16, 29), (2, 15, 27), (2, 8, 13)]
    for num_layers in range(1, 40):
        for wanted in (1, 2, 3, 4, 7):
            ids = Architecture(num_aux_hidden_states=wanted).layers(num_layers)
            assert 1 <= len(ids) <= wanted
            assert list(ids) == sorted(set(ids))
            assert 0 <= ids[0] <= ids[-1] <= num_layers
            if num_layers >= wanted + 4:
                assert len(ids) == wanted
    assert Architecture(eagle_aux_hidden_state_layer_ids=[9, 0, 4, 12]).layers(12) == (0, 4, 9, 12)


@pytest.mark.parametrize("ids", [[1, 5], [-1, 2], [0, 99]])
def test_tapped_layers_that_are_not_there(ids: list[int], one_line: Any) -> None:
    architecture = {"eagle_aux_hidden_state_layer_ids": ids}
    one_line(lambda: Eagle3.init_checkpoint(loaded(), architecture, Init()), "eagle_aux_hidden_state_layer_ids", "0..4")


def test_no_tapped_layers_is_an_error(one_line: Any) -> None:
    architecture = {"eagle_aux_hidden_state_layer_ids": []}
    one_line(lambda: Eagle3.init_checkpoint(loaded(), architecture, Init()), "eagle_aux_hidden_state_layer_ids")


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ({"draft_vocab_size": 0}, ("draft_vocab_size=0", "greater than or equal to 1")),
        ({"num_aux_hidden_states": 0}, ("num_aux_hidden_states=0",)),
        ({"layer_type": "mamba"}, ("layer_type='mamba'", "llama")),
        ({"norm_befor_fc": True}, ("norm_befor_fc", "did you mean 'norm_before_fc'")),
        (
            {"geometry": {"num_attention_heads": 6, "num_key_value_heads": 4}},
            ("num_attention_heads=6", "num_key_value_heads=4"),
        ),
        ({"geometry": {"num_attention_heads": 6, "num_key_value_heads": 2}}, ("num_attention_heads=6", "64")),
        ({"geometry": {"heads": 6}}, ("train.drafter.geometry key", "heads")),
        ({"geometry": {"head_dim": 15}}, ("head_dim",)),
    ],
)
def test_architecture_errors(architecture: dict[str, Any], words: tuple[str, ...], one_line: Any) -> None:
    one_line(lambda: Eagle3.init_checkpoint(loaded(), architecture, Init()), *words)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (UnrolledObjective, {"ttt_steps": 0}, ("ttt_steps=0",)),
        (UnrolledObjective, {"ttt_step_loss_decay": 0.0}, ("ttt_step_loss_decay",)),
        (UnrolledObjective, {"loss": {"mse": 1.0}}, ("'mse'", "ce, kl, tv")),
        (UnrolledObjective, {"smooth_l1": 1.0}, ("smooth_l1", "train.objective key")),
        (eagle.Objective, {"loss": {"ce": -1.0}}, ("-1.0",)),
        (eagle.Objective, {"feature_noise": -0.1}, ("feature_noise=-0.1",)),
        (Init, {"lm_head": "zeros"}, ("lm_head='zeros'",)),
    ],
)
def test_settings_errors(kind: Any, settings: dict[str, Any], words: tuple[str, ...], one_line: Any) -> None:
    one_line(lambda: kind(**settings), *words)


@pytest.mark.parametrize("name", ["tiny", "tiny-gemma2", "tiny-qwen3"])
def test_the_shape_is_the_targets_unless_given(name: str) -> None:
    target = loaded(name)
    shape = Geometry().of(target)
    assert (shape.hidden_size, shape.vocab_size) == (target.hidden_size, VOCAB)
    assert shape.num_attention_heads == target.config.num_attention_heads
    assert shape.num_key_value_heads == target.config.num_key_value_heads
    assert shape.head_dim == (getattr(target.config, "head_dim", None) or 64 // target.config.num_attention_heads)
    assert shape.intermediate_size == target.config.intermediate_size
    assert shape.rms_norm_eps == target.config.rms_norm_eps
    assert shape.max_position_embeddings == target.max_model_len
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 40, "rms_norm_eps": 1e-3}
    other = Geometry(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 77.0}).of(target)
    assert {key: getattr(other, key) for key in sizes} == sizes
    assert other.rope_parameters["rope_theta"] == 77.0
    for kind in (Eagle, Eagle3):
        fresh = kind.init_checkpoint(target, {"geometry": sizes}, Init())
        assert fresh.config["geometry"] == Geometry(**sizes).filled(target)
        layer = kind(target, fresh, 2).layers[0].self_attn
        assert list(layer.q_proj.weight.shape) == [80, 64 * (2 if kind is Eagle3 else 1)]
        assert layer.k_proj.weight.shape[0] == 20


def test_a_fresh_drafter_takes_what_it_is_told() -> None:
    """Rows of the target's head for its tokens, or random ones; no head at all where the target's serves."""
    target = loaded()
    ids = torch.from_numpy(REDUCED)
    for init, reduced in ((Init(), True), (Init(train_lm_head=False), True), (Init(), False)):
        checkpoint = Eagle3.init_checkpoint(target, {}, init, REDUCED if reduced else None)
        assert checkpoint.tensors is not None
        assert torch.equal(checkpoint.tensors["lm_head.weight"], target.head_rows(ids if reduced else None)[0])
        assert checkpoint.config["draft_vocab_size"] == (len(REDUCED) if reduced else VOCAB)
        assert ("d2t" in checkpoint.tensors) == reduced
        if reduced:
            assert torch.equal(checkpoint.tensors["d2t"] + torch.arange(len(REDUCED)), ids)
            assert torch.equal(Eagle3(target, checkpoint, 2).vocab_ids, ids)
    random = Eagle3.init_checkpoint(target, {}, Init(lm_head="random"), REDUCED)
    assert random.tensors is not None
    assert 0.015 < random.tensors["lm_head.weight"].std() < 0.025
    shared = Eagle3.init_checkpoint(target, {}, Init(train_lm_head=False))
    assert shared.tensors is not None
    assert not {"lm_head.weight", "d2t"} & set(shared.tensors)
    again = Eagle3.init_checkpoint(target, {}, Init(), seed=0)
    other = Eagle3.init_checkpoint(target, {}, Init(), seed=1)
    assert again.tensors is not None
    assert other.tensors is not None
    assert torch.equal(again.tensors["fc.weight"], Eagle3.init_checkpoint(target, {}, Init()).tensors["fc.weight"])  # type: ignore[index]
    assert not torch.equal(again.tensors["fc.weight"], other.tensors["fc.weight"])


def test_drafter_settings_errors(one_line: Any) -> None:
    checkpoint = grown("eagle3-reduced")
    one_line(lambda: Eagle3(loaded(), checkpoint, 0), "num_speculative_tokens=0", "at least 1")
    one_line(lambda: Eagle3(loaded(), checkpoint, 2, draft_sample_method="best"), "draft_sample_method='best'", "probabilistic")
    for most in (1, 4097):
        one_line(lambda most=most: Eagle3(loaded(), checkpoint, 2, max_model_len=most), f"max_model_len={most}", "2..4096")


# -------------------------------------------------------------------------------------------- checkpoints


def saved(directory: Path, variant: str = "eagle3-reduced") -> Path:
    directory.mkdir(parents=True)
    native.save(directory, grown(variant), {"seed": 1}, "# a card\n")
    return directory


def rewrite(directory: Path, change: Any) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_comes_back_as_it_was(variant: str, tmp_path: Path) -> None:
    spec = VARIANTS[variant]
    checkpoint = grown(variant)
    directory = saved(tmp_path / "drafter", variant)
    back = native.load(directory)
    assert checkpoint.tensors is not None
    assert back.tensors is not None
    assert (back.method, back.config, back.target) == (
        checkpoint.method,
        json.loads(json.dumps(checkpoint.config)),
        checkpoint.target,
    )
    assert back.tensors.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert back.tensors[name].numpy().tobytes() == tensor.numpy().tobytes(), name
    assert {path.name for path in directory.iterdir()} == {"config.json", "model.safetensors", "provenance.json", "README.md"}

    target = loaded(spec.target)
    again = tmp_path / "again"
    again.mkdir()
    native.save(again, spec.kind(target, str(directory), 3).to_checkpoint(), {}, "")
    assert (again / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    proposals = []
    for model in (checkpoint, str(again)):
        proposer = spec.kind(target, model, 3)
        proposals.append(watched(proposer))
        decode(target, proposer, prompts(20, 7), 8)
    assert [one.drafted for one in proposals[0]] == [one.drafted for one in proposals[1]]


def test_tensors_that_do_not_fit(tmp_path: Path, one_line: Any) -> None:
    """One renamed, one of another shape, one missing, one too many."""
    bad = "layers.0.self_attn.q_prj.weight"
    key = "layers.0.self_attn.q_proj.weight"
    changes: dict[str, tuple[Any, tuple[str, ...]]] = {
        "renamed": (lambda x: x.update({bad: x.pop(key)}), (bad, f"did you mean '{key}'")),
        "shape": (lambda x: x.update({key: x[key][:-1].contiguous()}), (key, "[63, 128]", "[64, 128]")),
        "missing": (lambda x: x.pop("norm.weight"), ("lack", "norm.weight")),
        "more": (lambda x: x.update({"t2d": torch.zeros(3)}), ("unknown tensor 't2d'",)),
        "transposed": (lambda x: x.update({"fc.weight": x["fc.weight"].t().contiguous()}), ("fc.weight",)),
    }
    for name, (change, words) in changes.items():
        directory = saved(tmp_path / name)
        rewrite(directory, change)
        one_line(lambda directory=directory: Eagle3(loaded(), str(directory), 3), str(directory), *words)


@pytest.mark.parametrize("change", ["beyond", "below", "twice"])
def test_a_draft_vocabulary_that_is_none(change: str, tmp_path: Path, one_line: Any) -> None:
    """Ids outside the vocabulary would be an error of an index while drafting (on a GPU, of the device); the same id twice
    would make distributions that do not sum to 1, so outputs that are not the target's."""
    directory = saved(tmp_path / "drafter")
    shift = {"beyond": 1000, "below": -1000, "twice": -2}[change]  # the ids begin 10, 12, 14, ...
    rewrite(directory, lambda x: x["d2t"][3:4].add_(shift))
    one_line(lambda: Eagle3(loaded(), str(directory), 3), str(directory), "d2t")


def test_what_is_no_checkpoint(tmp_path: Path, one_line: Any) -> None:
    config = {"format": "specdec-drafter", "format_version": 1}
    good_config = json.loads((saved(tmp_path / "whole") / "config.json").read_text())
    cases: dict[str, tuple[Any, tuple[str, ...]]] = {
        "format": (good_config | {"format": "speculators"}, ("no native drafter checkpoint",)),
        "version": (good_config | {"format_version": 2}, ("format_version 2", "is not 1")),
        "list": ([1, 2], ("no native drafter checkpoint",)),
        "llama": ({"model_type": "llama"}, ("no native drafter checkpoint", "'llama'")),
        "bare": (config, ("config.json",)),
        "no-method": ({key: x for key, x in good_config.items() if key != "method"}, ("config.json", "method")),
        "no-target": (good_config | {"target": None}, ("config.json", "target")),
        "no-drafter": (good_config | {"drafter": "eagle3"}, ("config.json", "drafter")),
    }
    for name, (value, words) in cases.items():
        directory = saved(tmp_path / name)
        (directory / "config.json").write_text(json.dumps(value))
        read = native.load if "no native drafter checkpoint" in words else lambda path: Eagle3(loaded(), str(path), 3)
        one_line(lambda directory=directory, read=read: read(directory), str(directory), *words)
    directory = saved(tmp_path / "json")
    (directory / "config.json").write_text("{")
    one_line(lambda: native.load(directory), str(directory), "config.json cannot be read")
    one_line(lambda: native.load(loaded().path), "no native drafter checkpoint", "'llama'")


@pytest.mark.parametrize("key", ["geometry", "norm_output", "own_lm_head", "draft_vocab_size"])
@pytest.mark.parametrize("variant", ["eagle-frozen-head", "eagle3-fc-norm"])
def test_a_config_without_a_key_is_never_a_crash(variant: str, key: str, tmp_path: Path) -> None:
    """A drafter of the same function where the key's default is the value, else one line."""
    directory = saved(tmp_path / "drafter", variant)
    config = json.loads((directory / "config.json").read_text())
    config["drafter"].pop(key, None)
    (directory / "config.json").write_text(json.dumps(config))
    message = ""
    try:
        VARIANTS[variant].kind(loaded(), str(directory), 3)
    except ValueError as error:
        message = str(error)
    assert "\n" not in message


def test_weights_that_cannot_be_read(tmp_path: Path, one_line: Any) -> None:
    """Cut off, empty, missing, no safetensors at all. A pickle is refused, and not unpickled."""
    good_bytes = (saved(tmp_path / "whole") / "model.safetensors").read_bytes()
    mark = tmp_path / "unpickled"
    contents = {
        "cut": good_bytes[:-100],
        "header": good_bytes[:20],
        "empty": b"",
        "text": b"not weights",
        "pickle": pickle.dumps(Touch(mark)),
    }
    for name, content in contents.items():
        directory = saved(tmp_path / name)
        (directory / "model.safetensors").write_bytes(content)
        one_line(lambda directory=directory: native.load(directory), str(directory), "model.safetensors cannot be read")
    torch.save({"fc.weight": Touch(mark)}, directory / "model.safetensors")
    one_line(lambda: native.load(directory), "model.safetensors cannot be read")
    (directory / "model.safetensors").unlink()
    one_line(lambda: native.load(directory), "model.safetensors cannot be read")
    assert not mark.exists()


class Touch:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_else_in_the_directory_is_read(tmp_path: Path) -> None:
    """Neither code nor pickles nor other weights; a card and a provenance that are no text do no harm."""
    directory = saved(tmp_path / "drafter")
    mark = tmp_path / "executed"
    want = native.load(directory)
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        (directory / name).write_bytes(pickle.dumps(Touch(mark)))
    for name in ("__init__.py", "modeling.py", "config.py"):
        (directory / name).write_text(f"open({str(mark)!r}, 'w')\n")
    save_file({"fc.weight": torch.zeros(3)}, directory / "model-00002.safetensors")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../../elsewhere.safetensors"}}')
    for name in ("README.md", "provenance.json"):
        (directory / name).write_bytes(b"\xff\xfe{")
    checkpoint = native.load(directory)
    assert (checkpoint.config, checkpoint.target) == (want.config, want.target)
    assert checkpoint.tensors is not None
    assert want.tensors is not None
    assert all(torch.equal(checkpoint.tensors[name], tensor) for name, tensor in want.tensors.items())
    Eagle3(loaded(), str(directory), 3)
    assert not mark.exists()


def test_a_drafter_of_another_target(one_line: Any) -> None:
    """Another width, vocabulary, depth or architecture: the message names both."""
    checkpoint = grown("eagle3-reduced")
    one_line(lambda: Eagle3(loaded("tiny-gemma2"), checkpoint, 3), "tiny (", "tiny-gemma2", "model_type", "llama", "gemma2")
    for key, value in (("hidden_size", 128), ("vocab_size", 1000), ("num_hidden_layers", 9)):
        other = replace(checkpoint, target=checkpoint.target | {key: value, "name": "org/other"}, name="runs/x")
        one_line(lambda other=other: Eagle3(loaded(), other, 3), "runs/x", "org/other", "tiny", f"{key} {value}")
    Eagle3(loaded(), replace(checkpoint, target=checkpoint.target | {"name": "/a/copy/of/tiny"}), 3)  # the same model elsewhere


def test_a_drafter_of_another_method(tmp_path: Path, one_line: Any) -> None:
    directory = saved(tmp_path / "drafter")
    one_line(lambda: Eagle(loaded(), str(directory), 3), str(directory), "'eagle3'", "not 'eagle'", "method=eagle3")
    one_line(lambda: Eagle3(loaded(), grown("eagle"), 3), "'eagle'", "not 'eagle3'")


def test_a_run_is_found_by_its_best_checkpoint_then_its_last(tmp_path: Path, one_line: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    one_line(lambda: native.find(run), str(run), "neither a checkpoint")
    last = saved(run / "last")
    assert native.find(run) == last
    best = saved(run / "best", "eagle3")
    assert native.find(run) == native.find(str(run)) == best
    assert native.find(last) == last
    assert native.load(run).config == grown("eagle3").config
    one_line(lambda: native.find(tmp_path / "absent"), "absent", "no such directory")
    one_line(lambda: native.find("absent"), "absent", "no such directory")
    one_line(lambda: native.find("./absent/drafter"), "absent", "no such directory")


# ----------------------------------------------------------------------------------------------- drafting


@pytest.mark.parametrize("how", ["greedy", "probabilistic"])
@pytest.mark.parametrize("variant", ["eagle", "eagle3-reduced"])
def test_beyond_its_context_a_row_is_not_drafted_for(variant: str, how: str) -> None:
    """Output stays as it is, in a batch of rows within and beyond. The last of n drafts needs pair length + n - 3."""
    lengths = (10, 28, 2, 45, 33, 20)
    proposer = drafter(variant, max_model_len=32, draft_sample_method=how)
    proposals = watched(proposer)
    assert decode(loaded(), proposer, prompts(*lengths)) == plain("tiny", lengths)
    for one in proposals:
        assert len(one.drafted) <= max(32 + 2 - len(one.tokens), 0)
        assert one.drafted or len(one.tokens) >= 34 or len(one.tokens) in {n + 13 for n in lengths}, "or at its budget's end"
    assert {len(one.tokens) for one in proposals if one.drafted} & {32, 33}
    assert any(len(one.tokens) > 40 for one in proposals)


@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3-reduced", "eagle3-target-head", "eagle-gemma2"])
def test_probs_are_over_the_draft_vocabulary(variant: str) -> None:
    spec = VARIANTS[variant]
    proposer = drafter(variant, draft_sample_method="probabilistic")
    assert proposer.needs_uniforms
    propose = proposer.propose
    calls = []

    def watching(context: Context) -> Draft:
        draft = propose(context)
        if draft.q_BKV is None:
            assert not draft.length_B.any(), "who draws nothing needs no distribution"
            return draft
        assert draft.q_BKV.shape == (*draft.token_BK.shape, VOCAB)
        for b, length in enumerate(draft.length_B.tolist()):
            q_KV = draft.q_BKV[b, :length]
            token_K = draft.token_BK[b, :length]
            torch.testing.assert_close(q_KV.double().sum(-1), torch.ones(length, dtype=torch.float64), rtol=0, atol=1e-5)
            if spec.reduced:
                assert not q_KV[:, np.setdiff1d(np.arange(VOCAB), REDUCED)].any()
            calls.extend(q_KV.gather(1, token_K.unsqueeze(1)).flatten().tolist())
        return draft

    proposer.propose = watching
    decode(loaded(spec.target), proposer, prompts(5, 30, 12), temperature=0.9)
    assert len(calls) > 50
    assert min(calls) > 0
    assert min(calls) < 0.9, "not all were certain"


def test_drafts_are_target_tokens_of_the_draft_vocabulary() -> None:
    proposer = drafter("eagle3-reduced")
    proposals = watched(proposer)
    decode(loaded(), proposer, prompts(5, 30, 12))
    drafted = {token for one in proposals for token in one.drafted}
    assert len(drafted) > 3
    assert drafted <= set(REDUCED.tolist())


def test_training_is_over_when_a_drafter_is_reserved() -> None:
    """Its weights take the target's type, and get no gradients; its own rows of the cache are counted."""
    target = CausalLM("tiny", "bfloat16", "cpu")
    checkpoint = Eagle3.init_checkpoint(target, {}, Init(), REDUCED)
    proposer = Eagle3(target, checkpoint, 3)
    assert proposer.bytes_to_grow(2, 100) > 0
    proposer.reserve(2, 100)
    assert proposer.bytes_to_grow(2, 100) == 0
    assert all(parameter.dtype == torch.bfloat16 and not parameter.requires_grad for parameter in proposer.parameters())
    assert decode(target, proposer, prompts(12, 5), 8) == decode(target, method.build("none", target), prompts(12, 5), 8)
