"""The blocked losses against their readable twin, their gradients, and what they must never hold in memory."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.drafter import losses
from specdec.drafter.losses import RowSums, Teacher

# columns of a table of sums
LOSS, HITS, OVERLAP, ROWS = map(RowSums._fields.index, ("loss_K", "hits_K", "overlap_K", "rows_K"))
NUM_LABELLED = 40
VOCAB = 29
DRAFT = 17
WIDTH = 12
MIXES = [
    {"ce": 1.0},
    {"kl": 1.0},
    {"tv": 1.0},
    {"ce": 0.3, "kl": 0.2, "tv": 0.5},
    {"kl": 0.0, "tv": 2.0},
    {"ce": 1.0, "kl": 1.5},
    {"ce": 0.5, "nll": 0.5},
    {"tv": 0.5, "nll": 2.0},
    {"nla": 1.0},
    {"lk_hybrid": 1.0},
    {"ce": 0.1, "kl": 0.2, "tv": 0.3, "nla": 0.4, "lk_hybrid": 0.5, "nll": 0.6},
]
CAPS = {
    "plain": lambda logits: logits,
    "capped": lambda logits: torch.tanh(logits / 2) * 2,
    "scaled": lambda logits: 0.5 * logits,
}


class Case:
    """Random states of a target and of the unrolled steps of a draft, whose vocabulary is part of the target's."""

    def __init__(
        self, cap: str = "plain", bias: bool = True, num_draft: int = DRAFT, num_labelled: int = NUM_LABELLED, seed: int = 0
    ):
        rng = np.random.default_rng(seed)
        noise = torch.Generator().manual_seed(seed)
        self.ids = torch.from_numpy(np.sort(rng.choice(VOCAB, num_draft, replace=False)))
        state_QD = torch.randn(num_labelled, WIDTH, generator=noise)
        self.full_VD = torch.randn(VOCAB, WIDTH, generator=noise)
        self.bias_V = torch.randn(VOCAB, generator=noise) if bias else torch.zeros(VOCAB)
        self.logits_QV = CAPS[cap](state_QD @ self.full_VD.t() + self.bias_V)
        index = torch.full((VOCAB,), -1)
        index[self.ids] = torch.arange(num_draft)
        label_Q = index[self.logits_QV.argmax(-1)]
        # as in training: 0 where the likeliest token can't be drafted, and samples that weigh less
        weight_Q = (label_Q >= 0) * torch.from_numpy(rng.choice([0.0, 0.25, 1.0], num_labelled)).float()
        self.teacher = Teacher(
            state_QD, self.full_VD[self.ids], self.bias_V[self.ids] if bias else None, CAPS[cap],
            self.logits_QV.logsumexp(-1), label_Q, index[torch.from_numpy(rng.integers(0, VOCAB, num_labelled))], weight_Q,
        )  # fmt: skip
        shares = (1.0, 0.7, 0.4, 0.0)  # rows of every step; the last has none
        self.labelled = [np.flatnonzero(rng.random(num_labelled) < share) for share in shares]
        self.hidden = [torch.randn(len(places), WIDTH, generator=noise) for places in self.labelled]
        self.weight_VD = torch.randn(num_draft, WIDTH, generator=noise)
        self.step_weight = [0.8**k for k in range(len(shares))]

    def run(
        self,
        function: Any,
        terms: dict[str, float],
        frozen: bool = False,
        scale: float = 1.0,
        cap: Any = None,
        row_weights: list[Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """The loss, its sums, what was found of the rows, and the gradients of `scale` x loss by name."""
        weight = self.weight_VD.clone().requires_grad_(not frozen)
        hidden = [h.clone().requires_grad_() for h in self.hidden]
        loss, sums, rows = function(hidden, self.labelled, weight, self.teacher, self.step_weight, terms, cap, row_weights)
        (scale * loss).backward()
        hits, overlaps, token_probs = (torch.cat(of_field) for of_field in zip(*rows, strict=True))
        result = {"loss": loss.detach(), "sums": torch.stack(sums, 1), "hits": hits, "token_probs": token_probs}
        if losses.needs_target_probs(terms):
            result["overlaps"] = overlaps
        result |= {f"gradient of step {k}": torch.zeros_like(h) if h.grad is None else h.grad for k, h in enumerate(hidden)}
        assert (weight.grad is None) == frozen
        return result if weight.grad is None else result | {"gradient of the head": weight.grad}


def agree(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert torch.isfinite(got[name]).all(), name
        assert got[name].shape == want.shape
        if not want.numel():
            continue
        scale = max(want.double().abs().max().item(), 1.0)
        gap = (got[name].double() - want.double()).abs().max().item()
        assert gap <= tolerance * scale, (name, gap, scale)


def distribution(logits: Tensor) -> list[float]:
    return logits.double().softmax(-1).tolist()


# ------------------------------------------------------------------------------------ the readable twin


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("terms", MIXES, ids=str)
def test_distill_is_the_readable_one(terms: dict[str, float], cap: str, bias: bool) -> None:
    case = Case(cap, bias)
    agree(case.run(losses.distill, terms), case.run(losses.distill_reference, terms))


def tanh_cap(logits: Tensor) -> tuple[Tensor, Tensor]:
    tanh_logits = torch.tanh(logits / 3) * 3
    return tanh_logits, 1 - (tanh_logits / 3) ** 2


@pytest.mark.parametrize("terms", MIXES, ids=str)
def test_what_the_drafter_does_to_its_logits_has_a_slope(terms: dict[str, float]) -> None:
    case = Case()
    agree(case.run(losses.distill, terms, cap=tanh_cap), case.run(losses.distill_reference, terms, cap=tanh_cap))


def test_the_data_alone_train_without_the_target() -> None:
    """nll: the same loss, hits and gradients, with the target's distribution left out or never there; overlap is unknown."""
    case = Case()
    terms = {"nll": 1.0}
    want = case.run(losses.distill_reference, terms)
    assert not losses.needs_target_probs(terms)
    with_target = case.teacher
    for teacher in (with_target, dataclasses.replace(with_target, state_QD=None, weight_VD=None, logsumexp_Q=None)):
        case.teacher = teacher
        got = case.run(losses.distill, terms)
        labelled = [len(places) > 0 for places in case.labelled]
        assert got["sums"][labelled, OVERLAP].isnan().all()
        agree(
            got | {"sums": got["sums"][:, [LOSS, HITS, ROWS]]},
            want | {"sums": want["sums"][:, [LOSS, HITS, ROWS]]},
        )
    case.teacher = with_target
    trained = [h.clone().requires_grad_() for h in case.hidden]
    with torch.no_grad():  # as when it is validated, or weighed
        sums = losses.distill(trained, case.labelled, case.weight_VD, with_target, case.step_weight, terms)[1]
    torch.testing.assert_close(torch.stack(sums, 1), want["sums"])


@pytest.mark.parametrize(("block", "strip"), [(1, 1), (300, 40), (300, 10**6), (1000, 60), (10**6, 100)])
def test_blocks_and_strips_do_not_matter(block: int, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row and of several, that hold no row of some step; strips smaller and larger than a block."""
    case = Case("capped")
    want = case.run(losses.distill_reference, MIXES[3])
    monkeypatch.setattr(losses, "BLOCK", block)
    monkeypatch.setattr(losses, "STRIP", strip)
    agree(case.run(losses.distill, MIXES[3]), want)


def test_the_whole_vocabulary_can_be_drafted() -> None:
    case = Case(num_draft=VOCAB)
    agree(case.run(losses.distill, MIXES[3]), case.run(losses.distill_reference, MIXES[3]))


@pytest.mark.parametrize("terms", MIXES, ids=str)
def test_rows_may_weigh_differently(terms: dict[str, float]) -> None:
    """Loss and gradients; the sums, which are reported, know nothing of it."""
    case = Case("capped")
    weights = [torch.rand(len(places), generator=torch.Generator().manual_seed(5)) for places in case.labelled]
    got = case.run(losses.distill, terms, row_weights=weights)
    agree(got, case.run(losses.distill_reference, terms, row_weights=weights))
    agree({"sums": got["sums"]}, {"sums": case.run(losses.distill, terms)["sums"]})


def test_a_frozen_head_gets_no_gradient() -> None:
    case = Case()
    want = case.run(losses.distill, MIXES[3])
    del want["gradient of the head"]
    agree(case.run(losses.distill, MIXES[3], frozen=True), want, tolerance=0)


def test_the_gradient_follows_what_comes_after_the_loss() -> None:
    case = Case()
    terms = MIXES[3]
    once = case.run(losses.distill, terms)
    thrice = case.run(losses.distill, terms, scale=3.0)
    for name in once:
        if name.startswith("gradient"):
            torch.testing.assert_close(thrice[name], 3 * once[name])


def test_no_rows_at_all() -> None:
    case = Case(num_labelled=0)
    result = case.run(losses.distill, MIXES[0])
    assert result["loss"] == 0
    assert (result["sums"] == 0).all()
    assert (result["gradient of the head"] == 0).all()


@pytest.mark.parametrize("terms", MIXES, ids=str)
def test_under_autocast_it_is_close(terms: dict[str, float]) -> None:
    """Products in bfloat16, everything else in float32. Gradients as a whole: the slope of tv jumps where p and q meet."""
    case = Case()
    want = case.run(losses.distill_reference, terms)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = case.run(losses.distill, terms)
    for name, exact in want.items():
        if name == "hits":
            assert (result[name] == exact).float().mean() > 0.95, "two tokens may be as good as equal"
            continue
        assert result[name].dtype == torch.float32
        if name == "sums":
            torch.testing.assert_close(
                result[name][:, [LOSS, OVERLAP, ROWS]], exact[:, [LOSS, OVERLAP, ROWS]], rtol=1e-2, atol=0
            )
        else:
            has_smooth = terms.get("ce") or terms.get("kl")
            tolerance = 0.01 if name == "loss" else 0.02 if has_smooth or name == "token_probs" else 0.25
            assert (result[name] - exact).norm() <= tolerance * exact.norm(), name


# ----------------------------------------------------------------------------------------- in words


@pytest.mark.parametrize("terms", MIXES, ids=str)
def test_the_loss_in_words(terms: dict[str, float]) -> None:
    """Row by row and token by token, in float64."""
    case = Case("capped")
    result = case.run(losses.distill, terms)
    total = 0.0
    for k, places in enumerate(case.labelled):
        sums = np.zeros(4)
        for row, place in enumerate(places.tolist()):
            p = distribution(case.logits_QV[place, case.ids])
            target_probs = distribution(case.logits_QV[place])
            q = distribution(case.hidden[k][row] @ case.weight_VD.t())
            ce = -sum(a * np.log(b) for a, b in zip(p, q, strict=True))
            kl = sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))
            tv = 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))
            label = int(case.teacher.token_Q[place])
            nll = -np.log(q[label]) if label >= 0 else 0.0
            nla = -np.log(1 - tv + 1e-5)
            share = np.exp(-3 * (1 - tv))
            hybrid = share * kl + (1 - share) * tv
            loss = sum(
                terms.get(name, 0) * x
                for name, x in zip(("ce", "kl", "tv", "nla", "lk_hybrid", "nll"), (ce, kl, tv, nla, hybrid, nll), strict=True)
            )
            # what rejection sampling accepts: a token that can't be drafted has q = 0
            overlap = sum(min(target_probs[token], b) for token, b in zip(case.ids.tolist(), q, strict=True))
            hit = case.ids[int(np.argmax(q))] == case.logits_QV[place].argmax()
            sums += np.array([loss * case.teacher.weight_Q[place].item(), float(hit), overlap, 1.0])
        np.testing.assert_allclose(result["sums"][k].numpy(), sums, rtol=1e-5, atol=1e-5)
        total += case.step_weight[k] * sums[LOSS]
    assert result["loss"].item() == pytest.approx(total, rel=1e-5)
    assert result["sums"][:, ROWS].tolist() == [len(places) for places in case.labelled]
    assert result["sums"][0, HITS] > 0
    assert result["sums"][0, OVERLAP] > 0


def test_a_draft_that_is_the_target_loses_nothing() -> None:
    """Where all tokens can be drafted: no kl, no tv, no slope, all hits, and everything is accepted."""
    case = Case(bias=False, num_draft=VOCAB)
    case.weight_VD = case.full_VD
    case.hidden = [case.teacher.state_QD[torch.from_numpy(places)] for places in case.labelled]
    result = case.run(losses.distill, {"kl": 1.0, "tv": 1.0})
    assert abs(result["loss"].item()) < 1e-4
    assert result["gradient of the head"].abs().max() < 1e-4
    assert result["hits"].all()
    torch.testing.assert_close(result["sums"][:, OVERLAP], result["sums"][:, ROWS])


@pytest.mark.parametrize("terms", MIXES, ids=str)
def test_tokens_that_the_target_never_says_make_no_nan(terms: dict[str, float]) -> None:
    """A logit of -inf, and probabilities that underflow to 0, are as if the token were not there for the target."""
    case = Case()
    for low in (float("-inf"), -300.0):
        bias = case.teacher.bias_V.clone()
        bias[[0, 3]] = low
        case.teacher = replace(case.teacher, bias_V=bias)
        results = []
        for function in (losses.distill, losses.distill_reference):
            result = case.run(function, terms)
            assert all(torch.isfinite(x).all() for x in result.values()), function.__name__
            results.append(result)
        agree(*results)


def test_a_row_that_teaches_nothing_leaves_no_gradient() -> None:
    case = Case()
    result = case.run(losses.distill, MIXES[3])
    for k, places in enumerate(case.labelled):
        unlabelled = (case.teacher.weight_Q[torch.from_numpy(places)] == 0).numpy()
        assert (result[f"gradient of step {k}"].abs().sum(-1) == 0).numpy().tolist() == unlabelled.tolist()


# -------------------------------------------------------------------------- what a row is worth to its draft


def rows_of(values: list[list[float]]) -> list[losses.Rows]:
    """Steps whose overlap and probability of the data's token are these."""
    return [losses.Rows(torch.zeros(len(x)), *[torch.tensor(x, dtype=torch.float64)] * 2) for x in values]


def test_d_pace_is_the_vectors() -> None:
    vector = json.loads((Path(__file__).parents[1] / "vectors" / "block_drafters.json").read_text())["loss_weights"]
    assert vector["dpace_alpha"] == losses.D_PACE_FLOOR
    probs = np.exp(-np.array(vector["ce"]))
    links = [np.array([-1])] + [np.array([0])] * (len(probs) - 1)
    got = losses.chain_weights("d_pace", rows_of([[p] for p in probs]), links)
    np.testing.assert_allclose([w.item() for w in got], vector["dpace"], rtol=1e-12)


def test_e2e_tv_has_the_gradient_of_the_expected_length() -> None:
    """Of ragged chains, some of which begin late, and with certain rejections."""
    noise = np.random.default_rng(2)
    links = [np.full(5, -1), np.array([0, 2, -1, 4]), np.array([1, -1, 3]), np.array([2, 0])]
    overlaps = [torch.from_numpy(noise.random(len(x))) for x in links]
    overlaps[1][1] = 0.0
    overlaps[0][4] = 0.0
    variables = [x.clone().requires_grad_() for x in overlaps]
    chains = [torch.zeros(0)]
    expected = torch.zeros(())
    for k, link in enumerate(links):
        before = [chains[-1][i] if i >= 0 else torch.ones((), dtype=torch.float64) for i in link]
        chains.append(torch.stack(before) * variables[k])
        expected = expected + chains[-1].sum()
    want = torch.autograd.grad(expected, variables)
    got = losses.chain_weights("e2e_tv", rows_of([x.tolist() for x in overlaps]), links)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


# -------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"mse": 1.0}, ("'mse'", "ce, kl, tv")),
        ({"ce": 1.0, "kl": -0.1}, ("'kl'", "-0.1", "negative")),
        ({"ce": float("nan")}, ("'ce'", "nan")),
        ({"ce": 0.0, "tv": 0.0}, ("no term", "positive")),
        ({}, ("no term", "positive")),
    ],
)
def test_terms_that_are_refused(terms: dict[str, float], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        losses.check_terms(terms)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_terms_that_are_taken() -> None:
    for terms in MIXES:
        losses.check_terms(terms)


# ---------------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """The most elements that any tensor had which was made meanwhile, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.numel: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.numel[x.dtype] = max(self.numel.get(x.dtype, 0), x.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_all_rows_never_exist_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worked on in float32 is a strip, and what a matrix product makes is a block."""
    num_rows = 512
    num_draft = 20000
    width = 8
    block = 1 << 20
    strip = 1 << 18
    monkeypatch.setattr(losses, "BLOCK", block)
    monkeypatch.setattr(losses, "STRIP", strip)
    noise = torch.Generator().manual_seed(0)
    state_QD = torch.randn(num_rows, width, generator=noise)
    head_VD = torch.randn(num_draft, width, generator=noise)
    label_Q = torch.zeros(num_rows, dtype=torch.int64)
    teacher = Teacher(
        state_QD, head_VD, None, lambda x: x, torch.full((num_rows,), 20.0), label_Q, label_Q, torch.ones(num_rows)
    )
    labelled = [np.arange(num_rows - k) for k in range(3)]
    hidden = [state_QD[: len(places)].clone().requires_grad_() for places in labelled]
    weight = head_VD.clone().requires_grad_()
    with Largest() as largest, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss, *_ = losses.distill(hidden, labelled, weight, teacher, [1.0, 0.8, 0.6], {"ce": 1.0, "tv": 1.0})
        loss.backward()
    limit = strip if dtype == torch.bfloat16 else block
    assert num_draft * width < limit < num_draft * num_rows / 8, "the figures of this test can tell"
    assert largest.numel[torch.float32] <= limit
    assert largest.numel[dtype] <= block
