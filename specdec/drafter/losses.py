"""Distillation losses: distances from the target's distribution, the likelihood of the data, or a mix.

With p the target's distribution over the draft vocabulary (renormalised), q the draft's, x the next token of the data, and
a = sum min(p, q) the chance that rejection sampling accepts:
    ce = -sum p log q        kl = sum p log(p / q)        tv = 1 - a        nll = -log q(x)
    nla = -log a             lk_hybrid = s kl + (1 - s) tv, s = exp(-3 a) without a gradient    (both of LK, 2602.23881)
A row may weigh what it is worth to the rows before and after it in its draft (`chain_weights`).
`distill` computes the output layer, the losses and their gradients in blocks, so that the logits of a whole batch never exist
at once in float32, and p is computed once for all unrolled steps. `distill_reference` is the same in plain autograd.

Shape letters: Q labelled positions, M supervised rows of a step, K unrolled steps, V draft vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor

TERMS = ("ce", "kl", "tv", "nla", "lk_hybrid", "nll")
D_PACE_FLOOR = 0.5  # of the confidences of D-PACE
LK_RATE = 3.0  # how fast lk_hybrid goes from kl to tv, as `speculators` has it
OVERLAP_FLOOR = 1e-5  # of nla, likewise
BLOCK = 1 << 24  # logits of one matrix product
STRIP = 1 << 18  # logits that are worked on at once: what a CPU cache holds

# what an architecture does to its logits: the result, and its derivative
ScaleLogits = Callable[[Tensor], tuple[Tensor, Tensor | float]]


@dataclass
class Teacher:
    """The target on the labelled positions. Without target states (nll alone), state_QD, weight_VD and logsumexp_Q are None.

    state_QD: hidden states after the final norm.
    weight_VD, bias_V: the target's output layer over the draft vocabulary.
    scale_logits: what the target's architecture does to its logits.
    logsumexp_Q: of the target's logits over its whole vocabulary.
    label_Q: the likeliest token as a draft id, -1 if it cannot be drafted; without target states, token_Q.
    token_Q: the next token of the data as a draft id, -1 if it cannot be drafted.
    weight_Q: the weight of a row in the loss; 0 leaves it out.
    """

    state_QD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None
    scale_logits: Any
    logsumexp_Q: Tensor | None
    label_Q: Tensor
    token_Q: Tensor
    weight_Q: Tensor

    def __post_init__(self) -> None:
        assert (self.state_QD is None) == (self.weight_VD is None) == (self.logsumexp_Q is None)

    def without_states(self) -> Teacher:
        """The data's tokens alone."""
        return replace(self, state_QD=None, weight_VD=None, logsumexp_Q=None)


class RowSums(NamedTuple):
    """Sums over the supervised rows of each step.

    hits: rows whose likeliest draft token is the target's likeliest.
    overlap: of sum min(p, q), p over the whole vocabulary: the chance that rejection sampling accepts. NaN where p was not
        computed: a mix of nll alone needs it only for metrics, without gradients.
    """

    loss_K: Tensor
    hits_K: Tensor
    overlap_K: Tensor
    rows_K: Tensor


@dataclass
class LossSums:
    """What a loss reports: sums over rows for each unrolled step. The first four are those of `RowSums`.

    joint_hits_K: rows that hit at this step and at all before it.
    reached_K: rows that hit at all steps before this one.
    chains_K: rows that are supervised at this step and at all before it.
    """

    loss_K: Tensor
    hits_K: Tensor
    overlap_K: Tensor
    rows_K: Tensor
    joint_hits_K: Tensor
    reached_K: Tensor
    chains_K: Tensor

    @classmethod
    def zeros(cls, num_steps: int, device: torch.device) -> LossSums:
        return cls.from_table(torch.zeros(num_steps, len(fields(cls)), device=device))

    @classmethod
    def from_table(cls, table_KF: Tensor) -> LossSums:
        """The inverse of `table`."""
        return cls(*table_KF.unbind(1))

    def table(self) -> Tensor:
        """[K, fields in the order of declaration], to send between processes and to save."""
        return torch.stack([getattr(self, field.name) for field in fields(self)], 1)

    def __add__(self, other: LossSums) -> LossSums:
        """Step by step; a warm-up unrolls fewer steps, and those that are missing count 0."""
        short, long = sorted((self.table(), other.table()), key=len)
        return LossSums.from_table(torch.cat([short, torch.zeros_like(long[len(short) :])]) + long)

    def metrics(self) -> dict[str, list[float | None]]:
        """Teacher-forced metrics, one list entry for each unrolled step.

        step_loss: mean loss of a row; accuracy: share of hits; one_minus_tv: mean overlap, None where it is not known;
        joint_accuracy: share of rows that hit here and at all steps before; conditional_accuracy: share of hits among the rows
        that hit at all steps before.
        """

        def ratio(numerator_K: Tensor, denominator_K: Tensor) -> list[float | None]:
            pairs = zip(numerator_K.tolist(), denominator_K.tolist(), strict=True)
            return [None if math.isnan(a) else a / b if b else 0.0 for a, b in pairs]

        return {
            "step_loss": ratio(self.loss_K, self.rows_K),
            "accuracy": ratio(self.hits_K, self.rows_K),
            "one_minus_tv": ratio(self.overlap_K, self.rows_K),
            "joint_accuracy": ratio(self.joint_hits_K, self.chains_K),
            "conditional_accuracy": ratio(self.joint_hits_K, self.reached_K),
        }


class Rows(NamedTuple):
    """[M] each, of the supervised rows of a step.

    hit: whether the likeliest draft token is the target's.
    overlap: as in `RowSums`.
    token_prob: of the data's next token in the draft distribution; 0 if it cannot be drafted.
    """

    hit: Tensor
    overlap: Tensor
    token_prob: Tensor


def needs_target_probs(terms: dict[str, float]) -> bool:
    """Whether the mix reads the target's distribution; nll alone reads tokens only."""
    return any(weight for name, weight in terms.items() if name != "nll")


def check_terms(terms: dict[str, float]) -> dict[str, float]:
    """The mix itself. Raises ValueError for unknown terms, negative weights, or no positive weight."""
    for name, weight in terms.items():
        if name not in TERMS:
            raise ValueError(f"loss {name!r} is not known; use {', '.join(TERMS)}, or a mix such as {{ce: 0.1, tv: 0.9}}")
        if not 0 <= weight < math.inf:
            raise ValueError(f"loss {name!r} has weight {weight}; it must be a number that is not negative")
    if not any(terms.values()):
        raise ValueError(f"loss {terms}: no term has a positive weight")
    return terms


Terms = Annotated[dict[str, float], AfterValidator(check_terms)]  # of a recipe, checked when it is read


def distill(
    hidden: Sequence[Tensor],
    labelled: Sequence[np.ndarray],
    weight_VD: Tensor,
    teacher: Teacher,
    step_weight: Sequence[float],
    terms: dict[str, float],
    scale_logits: ScaleLogits | None = None,
    row_weights: Sequence[Tensor] | None = None,
) -> tuple[Tensor, RowSums, list[Rows]]:
    """The sum over steps and rows of step_weight x row_weight x loss, and what is known of every step's rows; the sums are
    without step_weight and row_weight.

    hidden: per step, [M, D] states that the draft's output layer reads.
    labelled: per step, [M] ascending indices into the labelled positions.
    weight_VD: the draft's output layer.
    step_weight: of every step.
    terms: weights of the losses.
    scale_logits: what the drafter's architecture does to its logits.
    row_weights: per step, [M]; None: 1.
    """
    arguments = teacher, list(labelled), list(step_weight), terms, scale_logits, row_weights, torch.is_grad_enabled()
    loss, sums_KF, *rows = _Distill.apply(weight_VD, *arguments, *hidden)
    by_field = (rows[i : i + len(hidden)] for i in range(0, len(rows), len(hidden)))
    return loss, RowSums(*sums_KF.unbind(1)), [Rows(*of_step) for of_step in zip(*by_field, strict=True)]


class _Distill(torch.autograd.Function):
    """Computes the gradients along with the loss, since both need the same logits; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, teacher: Teacher, labelled: Any, step_weight: Any, terms: Any, scale_logits: Any,
        row_weights: Any, with_grad: bool, *hidden: Tensor,
    ) -> Any:  # fmt: skip
        device = weight.device
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
        exact = torch.promote_types(dtype, torch.float32)
        num_labelled = len(teacher.label_Q)
        num_draft = weight.shape[0]
        with_grad = with_grad and any(ctx.needs_input_grad)
        needs_p = teacher.state_QD is not None and (needs_target_probs(terms) or not with_grad)
        sums = torch.zeros(len(hidden), len(RowSums._fields), dtype=exact, device=device)
        weighted_loss = torch.zeros(len(hidden), dtype=exact, device=device)
        hits = [torch.zeros(len(h), dtype=torch.bool, device=device) for h in hidden]
        overlaps = [torch.zeros(len(h), dtype=exact, device=device) for h in hidden]
        token_probs = [torch.zeros(len(h), dtype=exact, device=device) for h in hidden]
        grad_hidden = [torch.zeros(h.shape, dtype=exact, device=device) for h in hidden]
        grad_weight = torch.zeros(weight.shape, dtype=exact, device=device) if with_grad and ctx.needs_input_grad[0] else None
        with torch.autocast(device.type, enabled=False):
            draft_head = weight.detach().to(dtype)
            states = [h.detach().to(dtype) for h in hidden]
            if needs_p:
                assert teacher.state_QD is not None
                assert teacher.weight_VD is not None
                target_states = teacher.state_QD.to(dtype)
                target_head = teacher.weight_VD.to(dtype)
            block = max(BLOCK // num_draft // (len(hidden) + 1), 1)
            strip = max(STRIP // num_draft, 1)
            for first in range(0, num_labelled, block):
                last = min(first + block, num_labelled)
                logits_p = torch.matmul(target_states[first:last], target_head.t()) if needs_p else None
                # the rows of every step that this block labels, laid end to end
                spans = [tuple(np.searchsorted(places, (first, last)).tolist()) for places in labelled]
                x = torch.cat([state[a:b] for state, (a, b) in zip(states, spans, strict=True)])
                logits_q = torch.matmul(x, draft_head.t())
                start = np.cumsum([0, *(b - a for a, b in spans)]).tolist()
                for a in range(first, last, strip):
                    b = min(a + strip, last)
                    probs = None if logits_p is None else _target_probs(teacher, logits_p[a - first : b - first], a, b, exact)
                    label = teacher.label_Q[a:b]
                    token = teacher.token_Q[a:b]
                    row_weight = teacher.weight_Q[a:b].to(exact)
                    for k, places in enumerate(labelled):
                        c, d = np.searchsorted(places, (a, b)).tolist()
                        if c == d:
                            continue
                        rows = slice(c - spans[k][0] + start[k], d - spans[k][0] + start[k])
                        index: Any = slice(None)
                        if d - c < b - a:
                            index = torch.from_numpy(places[c:d] - a).to(device)
                        logits = logits_q[rows].to(exact)
                        if scale_logits is not None:
                            logits, derivative = scale_logits(logits)
                        row_probs = None if probs is None else tuple(x[index] for x in probs)
                        slope, loss, values = _compare(logits, row_probs, label[index], token[index], terms)
                        if scale_logits is not None:
                            slope = slope * derivative
                        loss = loss * row_weight[index]
                        num_rows = torch.full_like(loss.sum(), d - c)
                        sums[k] += torch.stack([loss.sum(), values.hit.sum(), values.overlap.sum(), num_rows])
                        hits[k][c:d], overlaps[k][c:d], token_probs[k][c:d] = values
                        total_weight = row_weight[index]
                        if row_weights is not None:
                            loss = loss * row_weights[k][c:d].to(exact)
                            total_weight = total_weight * row_weights[k][c:d].to(exact)
                        weighted_loss[k] += loss.sum()
                        logits_q[rows] = (slope * (total_weight * step_weight[k]).unsqueeze(1)).to(dtype)
                if not with_grad:
                    continue
                grad_x = torch.matmul(logits_q, draft_head)
                for k, (a, b) in enumerate(spans):
                    grad_hidden[k][a:b] = grad_x[start[k] : start[k + 1]]
                if grad_weight is not None:
                    grad_weight += torch.matmul(logits_q.t(), x)
        total = (weighted_loss * torch.tensor(step_weight, dtype=exact, device=device)).sum()
        ctx.grads = grad_weight, grad_hidden
        ctx.types = weight.dtype, [h.dtype for h in hidden]
        row_values = *hits, *overlaps, *token_probs
        ctx.mark_non_differentiable(sums, *row_values)
        return total, sums, *row_values

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        grad_weight, grad_hidden = ctx.grads
        weight_type, hidden_types = ctx.types
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(weight_type)
        scaled = ((g * grad).to(dtype) for g, dtype in zip(grad_hidden, hidden_types, strict=True))
        return grad_weight, None, None, None, None, None, None, None, *scaled


def _target_probs(teacher: Teacher, logits: Tensor, a: int, b: int, exact: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of labelled positions a .. b: p over the draft vocabulary, its logarithm, and its mass in the whole vocabulary."""
    assert teacher.logsumexp_Q is not None
    if teacher.bias_V is not None:
        logits = logits + teacher.bias_V
    logits = teacher.scale_logits(logits.to(exact))
    lse = logits.logsumexp(-1, keepdim=True)
    log_p = logits - lse
    mass = (lse.squeeze(1) - teacher.logsumexp_Q[a:b]).exp().clamp(max=1)
    return log_p.exp(), log_p, mass


def _compare(
    logits_q: Tensor, target_probs: tuple[Tensor, ...] | None, label: Tensor, token: Tensor, terms: dict[str, float]
) -> tuple[Tensor, Tensor, Rows]:
    """[M, V] d loss / d logits, [M] loss, and what else is known of the rows. target_probs: p, log p, p's mass."""
    log_q = logits_q.sub_(logits_q.logsumexp(-1, keepdim=True))
    q = log_q.exp()
    hit = log_q.max(-1).indices == label
    loss = torch.zeros_like(q[:, 0])
    overlap = torch.full_like(loss, math.nan)
    slope = torch.zeros_like(q)
    if target_probs is not None:
        p, log_p, mass = target_probs
        overlap = torch.minimum(p * mass.unsqueeze(1), q).sum(-1)
        ce, kl, tv, nla, hybrid = (terms.get(name, 0.0) for name in TERMS[:-1])
        weight_of_ce: Any = ce + kl
        weight_of_entropy: Any = kl
        weight_of_tv: Any = tv
        if tv or nla or hybrid:
            accepted = torch.minimum(p, q).sum(-1)
        if hybrid:
            share = (-LK_RATE * accepted).exp()
            weight_of_ce = weight_of_ce + hybrid * share
            weight_of_entropy = weight_of_entropy + hybrid * share
            weight_of_tv = weight_of_tv + hybrid * (1 - share)
        if ce or kl or hybrid:
            slope = (q - p).mul_(_column(weight_of_ce))
            loss = loss - weight_of_ce * (p * log_q).sum(-1)
        if kl or hybrid:
            loss = loss + weight_of_entropy * torch.where(p > 0, p * log_p, 0).sum(-1)
        if tv or nla or hybrid:
            loss = loss + weight_of_tv * (1 - accepted)
            weight_of_overlap = weight_of_tv
            if nla:
                loss = loss - nla * (accepted + OVERLAP_FLOOR).log()
                weight_of_overlap = weight_of_tv + nla / (accepted + OVERLAP_FLOOR)
            inside = torch.where(q < p, q, 0)  # where a little more q is a little more overlap
            slope += _column(weight_of_overlap) * (q * inside.sum(-1, keepdim=True) - inside)
    is_known = (token >= 0).to(q.dtype)
    place = token.clamp(min=0).unsqueeze(1)
    token_prob = is_known * q.gather(1, place).squeeze(1)
    if nll := terms.get("nll"):
        known = is_known * nll
        loss = loss - known * log_q.gather(1, place).squeeze(1)
        slope += q * known.unsqueeze(1)
        slope.scatter_add_(1, place, -known.unsqueeze(1))
    return slope, loss, Rows(hit, overlap, token_prob)


def _column(weight: Tensor | float) -> Tensor | float:
    """Of rows, for a matrix of them."""
    return weight.unsqueeze(1) if isinstance(weight, Tensor) else weight


def distill_reference(
    hidden: Sequence[Tensor],
    labelled: Sequence[np.ndarray],
    weight_VD: Tensor,
    teacher: Teacher,
    step_weight: Sequence[float],
    terms: dict[str, float],
    scale_logits: ScaleLogits | None = None,
    row_weights: Sequence[Tensor] | None = None,
) -> tuple[Tensor, RowSums, list[Rows]]:
    """`distill` with all logits at once; p is computed whether it is needed or not."""
    assert teacher.state_QD is not None
    assert teacher.weight_VD is not None
    assert teacher.logsumexp_Q is not None
    logits = teacher.state_QD @ teacher.weight_VD.t()
    logits_QV = teacher.scale_logits(logits if teacher.bias_V is None else logits + teacher.bias_V)
    p_QV = logits_QV.softmax(-1)
    full_p_QV = (logits_QV - teacher.logsumexp_Q.unsqueeze(1)).exp()  # its share of the whole vocabulary
    total = torch.zeros(())
    sums = []
    rows = []
    for k, (h, places, weight) in enumerate(zip(hidden, labelled, step_weight, strict=True)):
        index = torch.from_numpy(places)
        logits = h @ weight_VD.t()
        if scale_logits is not None:
            logits = scale_logits(logits)[0]
        p = p_QV[index]
        log_q = logits.log_softmax(-1)
        q = log_q.exp()
        token = teacher.token_Q[index]
        token_prob = torch.where(token >= 0, q.gather(1, token.clamp(min=0).unsqueeze(1)).squeeze(1), 0)
        kl = torch.where(p > 0, p * (p.log() - log_q), 0).sum(-1)
        accepted = torch.minimum(p, q).sum(-1)
        share = (-LK_RATE * accepted.detach()).exp()
        losses = {
            "ce": -(p * log_q).sum(-1),
            "kl": kl,
            "tv": 1 - accepted,
            "nla": -(accepted + OVERLAP_FLOOR).log(),
            "lk_hybrid": share * kl + (1 - share) * (1 - accepted),
            "nll": torch.where(token >= 0, -log_q.gather(1, token.clamp(min=0).unsqueeze(1)).squeeze(1), 0),
        }
        loss = sum(factor * losses[name] for name, factor in terms.items()) * teacher.weight_Q[index]
        overlap = torch.minimum(full_p_QV[index], q).sum(-1)
        rows.append(Rows(log_q.argmax(-1) == teacher.label_Q[index], overlap.detach(), token_prob.detach()))
        num_rows = torch.tensor(float(len(index)))
        sums.append(torch.stack([loss.sum(), rows[-1].hit.sum(), overlap.sum(), num_rows]).detach())
        total = total + weight * (loss if row_weights is None else loss * row_weights[k]).sum()
    return total, RowSums(*torch.stack(sums).unbind(1)), rows


def chain_weights(weighting: str, rows: Sequence[Rows], prev_match: Sequence[np.ndarray]) -> list[Tensor]:
    """[M] per step: what a row weighs by the rows before and after it in its draft, without a gradient.

    With c_k what is thought of token k of a draft, d_pace (2605.18810) is the sum of c_0 ... c_j over all j >= k, where c_k is
    half of the probability of the data's token and a half. e2e_tv (2606.12370) has c_k = sum min(p, q), the chance that token k
    is accepted, and leaves it out of the products: with a loss of tv, the gradient is that of the expected number of accepted
    tokens. What precedes a draft that begins later, since the tokens before are not supervised, counts as certain.

    rows: of every step.
    prev_match: as in `unroll.Step`.
    """
    trusts = []
    befores: list[Tensor] = []  # the product over the steps before
    for k, values in enumerate(rows):
        if weighting == "d_pace":
            trusts.append((1 - D_PACE_FLOOR) * values.token_prob + D_PACE_FLOOR)
        else:
            trusts.append(values.overlap)
        befores.append(torch.ones_like(trusts[k]))
        if k:
            here, place = _links(prev_match[k], trusts[k].device)
            befores[k][here] = (befores[k - 1] * trusts[k - 1])[place]
    weights = []
    after = torch.zeros(0)  # of the step behind: the sum over itself and all behind it, of the products from it on
    for k in reversed(range(len(rows))):
        rest = torch.ones_like(trusts[k])
        if k + 1 < len(rows):
            here, place = _links(prev_match[k + 1], rest.device)
            rest[place] += after[here]
        weights.append(befores[k] * rest * (trusts[k] if weighting == "d_pace" else 1))
        after = trusts[k] * rest
    return weights[::-1]


def _links(prev_match: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows that go on from a row of the step before, and the places of those there."""
    here = np.flatnonzero(prev_match >= 0)
    return torch.from_numpy(here).to(device), torch.from_numpy(prev_match[here]).to(device)
