"""Typical acceptance (Medusa 2401.10774, section 3.3). Lossy.

A draft token x is accepted if p(x) > min(posterior_threshold, posterior_alpha exp(-H(p))), with H the entropy in nats, whatever
its chance was to be drafted. Of a tree, the longest path of accepted tokens is taken, of equal ones the one whose end comes
first. The token after it is drawn from p. At temperature 0, where p is one-hot, this is the target's greedy text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import tree
from specdec.core import Draft, Verdict
from specdec.rejection.standard import is_drafted, parents, tokens
from specdec.sampling import inverse_cdf

lossless = False
keyed_by = "step"


def check(num_speculative_tokens: int, posterior_threshold: float = 0.09, posterior_alpha: float = 0.3) -> dict[str, float]:
    """Both are probabilities."""
    settings = {"posterior_threshold": posterior_threshold, "posterior_alpha": posterior_alpha}
    for name, value in settings.items():
        if not 0 < value < 1:
            raise ValueError(f"{name}={value} must be above 0 and below 1")
    return settings


def verify(draft: Draft, p_BJV: Tensor, u_BJ: Tensor, posterior_threshold: float, posterior_alpha: float) -> Verdict:
    """Lossy.

    draft: token_BK.
    p_BJV: target probabilities, J = K + 1.
    u_BJ: uniforms, float64, of which the last one of a row is used.
    posterior_threshold: what is always likely enough.
    posterior_alpha: times exp(-entropy) it is likely enough where the target is unsure.
    """
    num_rows, num_positions, _ = p_BJV.shape
    row_B = torch.arange(num_rows, device=p_BJV.device)
    chain_BK = torch.arange(num_positions - 1, device=p_BJV.device).expand(num_rows, -1) - 1
    parent_BK = chain_BK if draft.parent_BK is None else parents(draft, p_BJV)
    p_BJV = p_BJV.double()
    entropy_BJ = torch.special.entr(p_BJV).sum(-1)
    threshold_BJ = (posterior_alpha * torch.exp(-entropy_BJ)).clamp(max=posterior_threshold)
    p_BK = p_BJV[row_B.unsqueeze(1), parent_BK + 1, tokens(draft, p_BJV)]
    accept_BK = is_drafted(draft, p_BJV) & (p_BK > threshold_BJ.gather(1, parent_BK + 1))
    depth_BJ = torch.zeros_like(u_BJ, dtype=torch.int64)  # accepted tokens up to a node; -1: one of them is not
    for k in range(num_positions - 1):
        above_B = depth_BJ[row_B, parent_BK[:, k] + 1]
        depth_BJ[:, k + 1] = torch.where(accept_BK[:, k] & (above_B >= 0), above_B + 1, -1)
    num_accepted_B = depth_BJ.amax(1)
    last_B = depth_BJ.argmax(1) - 1  # the first of equal ones
    token_B = inverse_cdf(p_BJV[row_B, last_B + 1], u_BJ[:, -1])
    path_BK = None if draft.parent_BK is None else tree.path_to(parent_BK, last_B)[1]
    return Verdict(num_accepted_B, token_B, path_BK)
