"""Standard rejection sampling (Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318).

Token x_i is accepted iff u_i < min(1, p_i(x_i) / q_i(x_i)); the first rejection stops, and the extra token comes from
norm(max(p - q, 0)) there, or from p if all were accepted. A deterministic draft has a one-hot q: accept with p(x), and the
residual is p without x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core import Draft, Verdict, require_chain
from specdec.sampling import inverse_cdf

lossless = True
keyed_by = "step"


def verify(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Lossless.

    draft: token_BK, and q_BKV or None.
    p_BJV: target probabilities, J = K + 1.
    u_BJ: uniforms, float64.
    """
    require_chain(draft, "rejection scheme standard")
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
