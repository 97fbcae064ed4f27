"""Standard rejection sampling (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318).

Token x_i is accepted iff u_i < min(1, p_i(x_i) / q_i(x_i)); the first rejection stops, and the extra token comes from
norm(max(p - q, 0)) there, or from p if all were accepted. A deterministic draft has a one-hot q: accept with p(x), and the
residual is p without x.

Of a tree, the children of a node are judged one after the other, in order. Each that is rejected leaves r = norm(max(r - q, 0))
to the next one, beginning with r = p; and as they were drawn without replacement, q loses its token (SpecInfer 2305.09781; RSD
2402.14160). A walk goes to the first child that is accepted; where none is, the extra token comes from r. Children of a
deterministic tree are each accepted with r(x), which then loses its token (EAGLE-2 2406.16858).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import tree
from specdec.core import Draft, Verdict
from specdec.sampling import inverse_cdf

lossless = True
keyed_by = "step"


def verify(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Lossless.

    draft: token_BK, and q_BKV or None. Children of a sampled tree are in the order in which they were drawn, and q_BKV is what
        the first of them was drawn from.
    p_BJV: target probabilities, J = K + 1.
    u_BJ: uniforms, float64.
    """
    if draft.parent_BK is not None:
        return _verify_deterministic_tree(draft, p_BJV, u_BJ) if draft.q_BKV is None else _verify_tree(draft, p_BJV, u_BJ)
    num_positions = p_BJV.shape[1] - 1
    accept_BK = is_drafted(draft, p_BJV) & (u_BJ[:, :num_positions] * draft_q(draft, p_BJV) < target_p(draft, p_BJV))
    return verdict_of(draft, p_BJV, u_BJ, accept_BK)


def verdict_of(draft: Draft, p_BJV: Tensor, u_BJ: Tensor, accept_BK: Tensor) -> Verdict:
    """Count the accepted prefix and sample the extra token after it."""
    num_accepted_B = accept_BK.long().cumprod(-1).sum(-1)
    return Verdict(num_accepted_B, inverse_cdf(residual(draft, p_BJV, num_accepted_B), u_BJ[:, -1]))


def is_drafted(draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, K] which draft positions hold a token of the row's own draft."""
    position = torch.arange(p_BJV.shape[1] - 1, device=p_BJV.device)
    return position < draft.length_B.to(p_BJV.device).unsqueeze(-1)


def tokens(draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, K] the draft, with 0 for padding, which may be no token at all."""
    return draft.token_BK.masked_fill(~is_drafted(draft, p_BJV), 0)


def parents(draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, K] the parents of a tree's nodes, with -1 for padding, which may hold anything."""
    assert draft.parent_BK is not None
    return draft.parent_BK.to(p_BJV.device).masked_fill(~is_drafted(draft, p_BJV), -1)


def target_p(draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, K] p_i(x_i), float64."""
    return p_BJV[:, :-1].gather(-1, tokens(draft, p_BJV).unsqueeze(-1)).squeeze(-1).double()


def draft_q(draft: Draft, p_BJV: Tensor) -> Tensor:
    """[B, K] q_i(x_i), float64; 1 for a deterministic draft."""
    if draft.q_BKV is None:
        return torch.ones_like(draft.token_BK, dtype=torch.float64)
    return draft.q_BKV.gather(-1, tokens(draft, p_BJV).unsqueeze(-1)).squeeze(-1).double()


def residual(draft: Draft, p_BJV: Tensor, num_accepted_B: Tensor, scale_B: Tensor | None = None) -> Tensor:
    """[B, V] unnormalised distribution of the extra token: max(scale * p - q, 0) after a rejection, p when all were accepted.

    Where rounding leaves no mass at all (p equals q), p itself is returned.
    """
    num_rows, num_positions, _ = p_BJV.shape
    row = torch.arange(num_rows, device=p_BJV.device)
    p_BV = p_BJV[row, num_accepted_B].double()
    if num_positions == 1:
        return p_BV
    rejected_B = num_accepted_B < draft.length_B.to(p_BJV.device)
    at_B = num_accepted_B.clamp(max=num_positions - 2)
    if draft.q_BKV is None:
        left_BV = p_BV.scatter(-1, tokens(draft, p_BJV)[row, at_B].unsqueeze(-1), 0.0)
    else:
        scaled_BV = p_BV if scale_B is None else p_BV * scale_B.unsqueeze(-1)
        left_BV = (scaled_BV - draft.q_BKV[row, at_B].double()).clamp(min=0)
    use_B = rejected_B & (left_BV.sum(-1) > 0)
    return torch.where(use_B.unsqueeze(-1), left_BV, p_BV)


def _verify_deterministic_tree(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Of r, the probabilities of the children suffice, and the sum of what is left."""
    parent_BK = parents(draft, p_BJV)
    row_B = torch.arange(len(parent_BK), device=p_BJV.device)
    token_BK = tokens(draft, p_BJV)
    p_BK = p_BJV[row_B.unsqueeze(1), parent_BK + 1, token_BK].double()
    accept_BK = torch.zeros_like(p_BK, dtype=torch.bool)
    rejected_BJ = torch.zeros_like(u_BJ)  # the probability of the children that were rejected, by parent
    same_BKK = (parent_BK.unsqueeze(2) == parent_BK.unsqueeze(1)) & (token_BK.unsqueeze(2) == token_BK.unsqueeze(1))
    may_BK = is_drafted(draft, p_BJV) & ~same_BKK.tril(-1).any(2)  # the second of two equal siblings is none
    for k in range(parent_BK.shape[1]):
        place_B1 = parent_BK[:, k : k + 1] + 1
        left_B = 1 - rejected_BJ.gather(1, place_B1).squeeze(1)
        accept_BK[:, k] = may_BK[:, k] & (u_BJ[:, k] * left_B < p_BK[:, k])
        rejected_BJ.scatter_add_(1, place_B1, (p_BK[:, k] * may_BK[:, k]).unsqueeze(1))
    return verdict_of_tree(draft, p_BJV, u_BJ, accept_BK, may_BK)


def verdict_of_tree(draft: Draft, p_BJV: Tensor, u_BJ: Tensor, accept_BK: Tensor, judged_BK: Tensor) -> Verdict:
    """Walk along the accepted nodes of a deterministic tree, and sample the extra token at the end, which is not one of the
    children there that were judged."""
    parent_BK = parents(draft, p_BJV)
    num_accepted_B, last_B, path_BK = tree.walk(parent_BK, accept_BK)
    p_BV = p_BJV[torch.arange(len(last_B), device=last_B.device), last_B + 1].double()
    is_rejected_BK = judged_BK & (parent_BK == last_B.unsqueeze(1))
    left_BV = p_BV.masked_fill(has_token(tokens(draft, p_BJV), is_rejected_BK, p_BV.shape[1]), 0.0)
    left_BV = torch.where(left_BV.sum(1, keepdim=True) > 0, left_BV, p_BV)
    return Verdict(num_accepted_B, inverse_cdf(left_BV, u_BJ[:, -1]), path_BK)


def _verify_tree(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Of a sampled tree."""
    assert draft.q_BKV is not None
    parent_BK = parents(draft, p_BJV)
    token_BK = tokens(draft, p_BJV)
    is_drafted_BK = is_drafted(draft, p_BJV)
    at_B = parent_BK.new_full(parent_BK.shape[:1], -1)
    left_BV = p_BJV[:, 0].double()
    accept_BK = torch.zeros_like(is_drafted_BK)
    for k in range(parent_BK.shape[1]):
        is_child_BK = is_drafted_BK & (parent_BK == at_B.unsqueeze(1))
        is_here_B = is_child_BK[:, k]
        if is_known_empty(is_here_B):
            continue
        token_B1 = token_BK[:, k : k + 1]
        taken_BV = has_token(token_BK[:, :k], is_child_BK[:, :k], left_BV.shape[1])  # those before it were rejected
        q_BV = without(draft.q_BKV[:, k], taken_BV)
        accept_B = is_here_B & (u_BJ[:, k] * q_BV.gather(1, token_B1).squeeze(1) < left_BV.gather(1, token_B1).squeeze(1))
        is_rejected_B1 = (is_here_B & ~accept_B).unsqueeze(1)
        accept_B1 = accept_B.unsqueeze(1)
        left_BV = torch.where(is_rejected_B1, normalised((left_BV - q_BV).clamp(min=0), left_BV), left_BV)
        left_BV = torch.where(accept_B1, p_BJV[:, k + 1].double(), left_BV)
        at_B = torch.where(accept_B, k, at_B)
        accept_BK[:, k] = accept_B
    num_accepted_B, _, path_BK = tree.walk(parent_BK, accept_BK)
    return Verdict(num_accepted_B, inverse_cdf(left_BV, u_BJ[:, -1]), path_BK)


def has_token(token_BK: Tensor, which_BK: Tensor, vocab_size: int) -> Tensor:
    """[B, V] whether one of these nodes has the token."""
    count_BV = torch.zeros(len(token_BK), vocab_size, device=token_BK.device)
    return count_BV.scatter_add(1, token_BK, which_BK.to(count_BV)) > 0


def is_known_empty(which_B: Tensor) -> bool:
    """Whether no row is meant, where it costs nothing to know: to look would wait for a device."""
    return which_B.device.type == "cpu" and not which_B.any()


def without(q_BV: Tensor, taken_BV: Tensor) -> Tensor:
    """[B, V] float64, the distribution of the next draw without replacement. taken_BV: which tokens were drawn before."""
    left_BV = q_BV.double().masked_fill(taken_BV, 0.0)
    return normalised(left_BV, left_BV)


def normalised(weight_BV: Tensor, otherwise_BV: Tensor) -> Tensor:
    """[B, V] weights as a distribution; where rounding leaves none, the other values."""
    sum_B1 = weight_BV.sum(-1, keepdim=True)
    return torch.where(sum_B1 > 0, weight_BV / sum_B1.clamp(min=torch.finfo(torch.float64).tiny), otherwise_BV)
