"""Block verification (Sun et al. 2403.10444): draft tokens are verified jointly, so more are accepted than under `standard`.

P_0 = 1 and P_i = min(P_{i-1} p_i(x_i) / q_i(x_i), 1). With R_i = sum_y max(P_i p(y | x_<=i) - q(y | x_<=i), 0),
h_i = R_i / (R_i + 1 - P_i) inside the draft (0/0 counts as 1) and h = P at its last position. The accepted length is the
*last* i with u_i < h_i, and the residual after it is max(P_i p - q, 0).

For deterministic drafts acceptance has the same distribution as under `standard`: it pays only with
`draft_sample_method="probabilistic"` at a temperature above 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core import Draft, Verdict, require_chain
from specdec.rejection.standard import draft_q, is_drafted, residual, target_p
from specdec.sampling import inverse_cdf

lossless = True
keyed_by = "step"


def verify(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Lossless.

    draft: token_BK, and q_BKV or None.
    p_BJV: target probabilities, J = K + 1.
    u_BJ: uniforms, float64.
    """
    require_chain(draft, "rejection scheme block")
    num_rows = p_BJV.shape[0]
    num_draft = p_BJV.shape[1] - 1
    length_B = draft.length_B.to(p_BJV.device)
    p_BK = target_p(draft, p_BJV)
    q_BK = draft_q(draft, p_BJV)
    is_drafted_BK = is_drafted(draft, p_BJV)
    ratio_BK = torch.where(q_BK > 0, p_BK / q_BK, torch.where(p_BK > 0, torch.inf, 0.0))

    prefix_B = torch.ones(num_rows, dtype=torch.float64, device=p_BJV.device)  # P_i
    num_accepted_B = torch.zeros(num_rows, dtype=torch.int64, device=p_BJV.device)
    scale_B = prefix_B.clone()  # P at the accepted length
    for i in range(1, num_draft + 1):
        step_B = torch.where(prefix_B > 0, prefix_B * ratio_BK[:, i - 1], 0.0)
        prefix_B = step_B.clamp(max=1.0)
        threshold_B = prefix_B
        if i < num_draft:
            mass_B = _residual_mass(draft, p_BJV, p_BK, prefix_B, i)
            total_B = mass_B + 1 - prefix_B
            inside_B = torch.where(total_B > 0, mass_B / total_B, 1.0)
            threshold_B = torch.where(i < length_B, inside_B, prefix_B)
        accept_B = is_drafted_BK[:, i - 1] & (u_BJ[:, i - 1] < threshold_B)
        num_accepted_B = torch.where(accept_B, i, num_accepted_B)
        scale_B = torch.where(accept_B, prefix_B, scale_B)
    return Verdict(num_accepted_B, inverse_cdf(residual(draft, p_BJV, num_accepted_B, scale_B), u_BJ[:, -1]))


def _residual_mass(draft: Draft, p_BJV: Tensor, p_BK: Tensor, prefix_B: Tensor, i: int) -> Tensor:
    """R_i: what the target has left over the drafter at the next position, given that the first i tokens count P_i."""
    if draft.q_BKV is None:
        return prefix_B * (1 - p_BK[:, i])
    return (prefix_B.unsqueeze(-1) * p_BJV[:, i].double() - draft.q_BKV[:, i].double()).clamp(min=0).sum(-1)
