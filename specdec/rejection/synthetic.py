"""Synthetic acceptance, for load tests with a chosen acceptance profile (vLLM's scheme of this name). Not lossless.

`synthetic_acceptance_rates[i]` is P(draft tokens 0..i are accepted), so the rates do not rise; token i is accepted with the
conditional rate r_i / r_{i-1}, whatever the target's probabilities are, at temperature 0 too. The extra token is the residual
sample of `standard`, which at temperature 0 is the target's argmax. Of a tree, the nodes of its longest path (the first of
several) are accepted with the rate of their depth, and the others are not: the rates are those of a chain. The extra token is
not the node that was rejected, whatever q was. Drafts that are shorter than the rates go lower them: `reached`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec import tree
from specdec.core import Draft, Verdict
from specdec.rejection.standard import is_drafted, verdict_of, verdict_of_tree

lossless = False
keyed_by = "step"
fixed_length = True
EXAMPLE = {"synthetic_acceptance_length": 2.0}


def check(
    num_speculative_tokens: int,
    synthetic_acceptance_rates: list[float] | None = None,
    synthetic_acceptance_length: float | None = None,
) -> dict[str, list[float]]:
    """Exactly one of the two must be given. A mean acceptance length becomes the profile of least variance."""
    rates = synthetic_acceptance_rates
    length = synthetic_acceptance_length
    if (rates is None) == (length is None):
        raise ValueError(
            "rejection_sample_method='synthetic' needs exactly one of synthetic_acceptance_rates and "
            f"synthetic_acceptance_length, got {'both' if rates is not None else 'neither'}"
        )
    if rates is None:
        assert length is not None
        rates = rates_of_length(length, num_speculative_tokens)
    if len(rates) != num_speculative_tokens:
        raise ValueError(
            f"synthetic_acceptance_rates has {len(rates)} entries and num_speculative_tokens={num_speculative_tokens}; "
            "give one for each"
        )
    for i, rate in enumerate(rates):
        if not 0 <= rate <= 1:
            raise ValueError(f"synthetic_acceptance_rates[{i}]={rate} is outside [0, 1]")
        if i and rate > rates[i - 1]:
            raise ValueError(
                f"synthetic_acceptance_rates rise from {rates[i - 1]} to {rate} at position {i}; "
                "they are P(tokens 0..i are all accepted) and cannot rise"
            )
    return {"synthetic_acceptance_rates": [float(rate) for rate in rates]}


def rates_of_length(length: float, num_speculative_tokens: int) -> list[float]:
    """The unconditional rates of least variance whose mean acceptance length (bonus token counted) is `length`."""
    if not 1 <= length <= num_speculative_tokens + 1:
        raise ValueError(
            f"synthetic_acceptance_length={length} is outside [1, num_speculative_tokens + 1 = {num_speculative_tokens + 1}]"
        )
    return [min(max(length - 1 - i, 0.0), 1.0) for i in range(num_speculative_tokens)]


def reached(rates: list[float], drafts_of_length_D: list[int]) -> float:
    """The mean acceptance length that drafts can have, at least one token long. drafts_of_length_D: how many there are of each
    length, of trees their depth, from 0 on."""
    num_drafts = sum(drafts_of_length_D[1:])
    shares = [sum(drafts_of_length_D[i + 1 :]) / num_drafts for i in range(len(drafts_of_length_D) - 1)]
    return 1 + sum(rate * share for rate, share in zip(rates, shares, strict=False))


def conditional(rates: list[float]) -> list[float]:
    """P(token i is accepted, given that those before it are)."""
    before = [1.0, *rates[:-1]]
    return [rate / prior if prior > 0 else 0.0 for rate, prior in zip(rates, before, strict=True)]


def verify(draft: Draft, p_BJV: Tensor, u_BJ: Tensor, synthetic_acceptance_rates: list[float]) -> Verdict:
    """Lossy.

    draft: token_BK.
    p_BJV: target probabilities, J = K + 1.
    u_BJ: uniforms, float64.
    synthetic_acceptance_rates: of the method's K; a row near its length limit drafts fewer tokens.
    """
    num_draft = p_BJV.shape[1] - 1
    rates = conditional(synthetic_acceptance_rates)[:num_draft]
    rate_K = torch.tensor(rates, dtype=torch.float64, device=p_BJV.device)
    if draft.parent_BK is not None and num_draft:
        return _verify_tree(draft, p_BJV, u_BJ, rate_K)
    return verdict_of(draft, p_BJV, u_BJ, is_drafted(draft, p_BJV) & (u_BJ[:, :num_draft] < rate_K))


def _verify_tree(draft: Draft, p_BJV: Tensor, u_BJ: Tensor, rate_K: Tensor) -> Verdict:
    parent_BK = draft.parents()
    depth_BK = tree.depths(parent_BK)
    is_node_BK = np.arange(parent_BK.shape[1]) < draft.length_B.numpy()[:, None]
    deepest_B = np.where(is_node_BK, depth_BK, -1).argmax(1)
    is_on_path_BK = torch.from_numpy(tree.on_path(parent_BK)[np.arange(len(parent_BK)), deepest_B]).to(p_BJV.device)
    judged_BK = is_drafted(draft, p_BJV) & is_on_path_BK
    rate_BK = rate_K[torch.from_numpy(depth_BK).to(p_BJV.device)]
    return verdict_of_tree(draft, p_BJV, u_BJ, judged_BK & (u_BJ[:, : len(rate_K)] < rate_BK), judged_BK)
