"""What a draft law should be like: the target's, measured by soft cross-entropy, KL, total variation, the likelihood of what
the target said, or a weighted mix.

With p the target's law over the draft vocabulary (renormalised), q the draft's, and x the token that the data goes on with:
    ce = -sum p log q        kl = sum p log(p / q)        tv = 1 - sum min(p, q)        nll = -log q(x)
`distill` makes the output layer, the losses and their gradients in blocks, so that logits of a whole batch never exist at once
in float32, and the target's law is made once for all unrolled steps; `distill_reference` says the same in plain autograd.

Shape letters: Q labelled positions, M supervised rows of a step, V draft vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator
from torch import Tensor

TERMS = ("ce", "kl", "tv", "nll")
BLOCK = 1 << 24  # logits of one matrix product
STRIP = 1 << 18  # logits that are worked on at once: what a cache holds

LOSS, HITS, OVERLAP, ROWS = range(4)  # columns of the sums that are reported per step


@dataclass
class Teacher:
    """The target on the labelled positions.

    state_QD: its states, after the final norm; weight_VD, bias_V: its output layer over the draft vocabulary; cap: what the
    architecture does to logits; logsumexp_Q: of its logits over the whole vocabulary; label_Q: its likeliest token as an index
    into the draft vocabulary, -1 if it is not in there; token_Q: the token that the data goes on with, likewise; count_Q: what
    a row weighs, 0 for one that teaches nothing. Without a target (state_QD is None) there are tokens only, and label_Q is
    token_Q.
    """

    state_QD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None
    scale_logits: Any
    logsumexp_Q: Tensor | None
    label_Q: Tensor
    token_Q: Tensor
    count_Q: Tensor

    def __post_init__(self) -> None:
        assert (self.state_QD is None) == (self.weight_VD is None) == (self.logsumexp_Q is None)


def needs_target_probs(terms: dict[str, float]) -> bool:
    """Whether the mix looks at the target's law, or at tokens only."""
    return any(weight for name, weight in terms.items() if name != "nll")


def check_terms(terms: dict[str, float]) -> dict[str, float]:
    """The mix itself; ValueError if it is not one of known terms with weights that are not negative, some positive."""
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
    cap: ScaleLogits | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Sum over steps and rows of step_weight x loss; [K, 4] sums per step (loss, hits, overlap, rows); [M] hits of every step.

    hidden: per step, [M, D] states that the draft's output layer weight_VD reads; labelled: per step, [M] ascending places among
    the labelled positions; cap: what the drafter's architecture does to its logits, and the slope of that. A hit is a row whose
    likeliest draft token is the target's; overlap is sum min(p, q) with p over the whole vocabulary: the chance that rejection
    sampling accepts. It is NaN where nobody asked for the target's law: a mix of nll alone makes it only without gradients.
    """
    loss, sums, *hits = _Distill.apply(weight_VD, teacher, list(labelled), list(step_weight), terms, cap, *hidden)
    return loss, sums, hits


ScaleLogits = Callable[[Tensor], tuple[Tensor, Tensor | float]]


class _Distill(torch.autograd.Function):
    """Forms the gradients along with the loss, since both need the same logits; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, teacher: Teacher, labelled: Any, step_weight: Any, terms: Any, cap: Any, *hidden: Tensor
    ) -> Any:
        device, steps = weight.device, len(hidden)
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
        exact = torch.promote_types(dtype, torch.float32)
        num_taught, num_draft = len(teacher.label_Q), weight.shape[0]
        train_weight = ctx.needs_input_grad[0]
        lawful = teacher.state_QD is not None and (needs_target_probs(terms) or not any(ctx.needs_input_grad))
        sums = torch.zeros(steps, 4, dtype=exact, device=device)
        hits = [torch.zeros(len(h), dtype=torch.bool, device=device) for h in hidden]
        grad_hidden = [torch.zeros(h.shape, dtype=exact, device=device) for h in hidden]
        grad_weight = torch.zeros(weight.shape, dtype=exact, device=device) if train_weight else None
        with torch.autocast(device.type, enabled=False):
            w, state = weight.detach().to(dtype), [h.detach().to(dtype) for h in hidden]
            if lawful:
                assert teacher.state_QD is not None
                assert teacher.weight_VD is not None
                taught_states, taught_weight = teacher.state_QD.to(dtype), teacher.weight_VD.to(dtype)
            block = max(BLOCK // num_draft // (steps + 1), 1)
            for first in range(0, num_taught, block):
                last = min(first + block, num_taught)
                logits_p = torch.matmul(taught_states[first:last], taught_weight.t()) if lawful else None
                spans = [tuple(np.searchsorted(places, (first, last)).tolist()) for places in labelled]
                x = torch.cat([s[a:b] for s, (a, b) in zip(state, spans, strict=True)])
                logits_q = torch.matmul(x, w.t())
                start = np.cumsum([0, *(b - a for a, b in spans)]).tolist()
                for a in range(first, last, strip := max(STRIP // num_draft, 1)):
                    b = min(a + strip, last)
                    law = None if logits_p is None else _law(teacher, logits_p[a - first : b - first], a, b, exact)
                    label, token, counts = teacher.label_Q[a:b], teacher.token_Q[a:b], teacher.count_Q[a:b].to(exact)
                    for k, places in enumerate(labelled):
                        c, d = np.searchsorted(places, (a, b)).tolist()
                        if c == d:
                            continue
                        rows = slice(c - spans[k][0] + start[k], d - spans[k][0] + start[k])
                        own: Any = slice(None)
                        if d - c < b - a:
                            own = torch.from_numpy(places[c:d] - a).to(device)
                        logits, inner = logits_q[rows].to(exact), 1.0
                        if cap is not None:
                            logits, inner = cap(logits)
                        of_rows = None if law is None else tuple(x[own] for x in law)
                        slope, loss, hit, overlap = _compare(logits, of_rows, label[own], token[own], terms)
                        slope = slope if cap is None else slope * inner
                        loss = loss * counts[own]
                        sums[k] += torch.stack([loss.sum(), hit.sum(), overlap.sum(), torch.full_like(loss.sum(), d - c)])
                        hits[k][c:d] = hit
                        logits_q[rows] = (slope * (counts[own] * step_weight[k]).unsqueeze(1)).to(dtype)
                grad_x = torch.matmul(logits_q, w)
                for k, (a, b) in enumerate(spans):
                    grad_hidden[k][a:b] = grad_x[start[k] : start[k + 1]]
                if grad_weight is not None:
                    grad_weight += torch.matmul(logits_q.t(), x)
        total = (sums[:, LOSS] * torch.tensor(step_weight, dtype=exact, device=device)).sum()
        ctx.grads = grad_weight, grad_hidden
        ctx.types = weight.dtype, [h.dtype for h in hidden]
        ctx.mark_non_differentiable(sums, *hits)
        return total, sums, *hits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        grad_weight, grad_hidden = ctx.grads
        weight_type, hidden_types = ctx.types
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(weight_type)
        return (
            grad_weight,
            None,
            None,
            None,
            None,
            None,
            *((g * grad).to(t) for g, t in zip(grad_hidden, hidden_types, strict=True)),
        )


def _law(teacher: Teacher, logits: Tensor, a: int, b: int, exact: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Of labelled positions a .. b: p over the draft vocabulary, its logarithm, and its mass in the whole vocabulary."""
    assert teacher.logsumexp_Q is not None
    if teacher.bias_V is not None:
        logits = logits + teacher.bias_V
    logits = teacher.scale_logits(logits.to(exact))
    lse = logits.logsumexp(-1, keepdim=True)
    log_p = logits - lse
    scale = (lse.squeeze(1) - teacher.logsumexp_Q[a:b]).exp().clamp(max=1)
    return log_p.exp(), log_p, scale


def _compare(
    logits_q: Tensor, law: tuple[Tensor, ...] | None, label: Tensor, token: Tensor, terms: dict[str, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[M, V] d loss / d logits, [M] loss, hit, and overlap with p over the whole vocabulary. law: p, log p and p's mass."""
    log_q = logits_q.sub_(logits_q.logsumexp(-1, keepdim=True))
    q = log_q.exp()
    hit = log_q.max(-1).indices == label
    loss = torch.zeros_like(q[:, 0])
    overlap = torch.full_like(loss, math.nan)
    linear, variation = terms.get("ce", 0.0) + terms.get("kl", 0.0), terms.get("tv", 0.0)
    slope = torch.zeros_like(q)
    if law is not None:
        p, log_p, scale = law
        overlap = torch.minimum(p * scale.unsqueeze(1), q).sum(-1)
        if linear:
            slope = (q - p).mul_(linear)
            loss = loss - linear * (p * log_q).sum(-1)
        if kl := terms.get("kl"):
            loss = loss + kl * torch.where(p > 0, p * log_p, 0).sum(-1)
        if variation:
            loss = loss + variation * (1 - torch.minimum(p, q).sum(-1))
            inside = torch.where(q < p, q, 0)  # where a little more q is a little more overlap
            slope += variation * (q * inside.sum(-1, keepdim=True) - inside)
    if nll := terms.get("nll"):
        known, place = (token >= 0).to(q.dtype) * nll, token.clamp(min=0).unsqueeze(1)
        loss = loss - known * log_q.gather(1, place).squeeze(1)
        slope += q * known.unsqueeze(1)
        slope.scatter_add_(1, place, -known.unsqueeze(1))
    return slope, loss, hit, overlap


def distill_reference(
    hidden: Sequence[Tensor],
    labelled: Sequence[np.ndarray],
    weight_VD: Tensor,
    teacher: Teacher,
    step_weight: Sequence[float],
    terms: dict[str, float],
    cap: ScaleLogits | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`distill` with all logits at once; the target's law is made whether it is needed or not."""
    assert teacher.state_QD is not None
    assert teacher.weight_VD is not None
    assert teacher.logsumexp_Q is not None
    logits = teacher.state_QD @ teacher.weight_VD.t()
    logits_QV = teacher.scale_logits(logits if teacher.bias_V is None else logits + teacher.bias_V)
    p_QV = logits_QV.softmax(-1)
    whole_QV = (logits_QV - teacher.logsumexp_Q.unsqueeze(1)).exp()
    total, sums, hits = torch.zeros(()), [], []
    for h, places, of_step in zip(hidden, labelled, step_weight, strict=True):
        own = torch.from_numpy(places)
        logits = h @ weight_VD.t() if cap is None else cap(h @ weight_VD.t())[0]
        p, log_q, token = p_QV[own], logits.log_softmax(-1), teacher.token_Q[own]
        q = log_q.exp()
        losses = {
            "ce": -(p * log_q).sum(-1),
            "kl": torch.where(p > 0, p * (p.log() - log_q), 0).sum(-1),
            "tv": 1 - torch.minimum(p, q).sum(-1),
            "nll": torch.where(token >= 0, -log_q.gather(1, token.clamp(min=0).unsqueeze(1)).squeeze(1), 0),
        }
        loss = sum(factor * losses[name] for name, factor in terms.items()) * teacher.count_Q[own]
        hits.append(log_q.argmax(-1) == teacher.label_Q[own])
        overlap = torch.minimum(whole_QV[own], q).sum()
        sums.append(torch.stack([loss.sum(), hits[-1].sum(), overlap, torch.tensor(float(len(own)))]).detach())
        total = total + of_step * loss.sum()
    return total, torch.stack(sums), hits
