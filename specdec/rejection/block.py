"""Block verification (Sun et al. 2403.10444): draft tokens are verified jointly, so more are accepted than under `standard`.

P_0 = 1 and P_i = min(P_{i-1} p_i(x_i) / q_i(x_i), 1). With R_i = sum_y max(P_i p(y | x_<=i) - q(y | x_<=i), 0),
h_i = R_i / (R_i + 1 - P_i) inside the draft (0/0 counts as 1) and h = P at its last position. The accepted length is the
*last* i with u_i < h_i, and the residual after it is max(P_i p - q, 0).

For deterministic drafts acceptance has the same distribution as under `standard`: it pays only with
`draft_sample_method="probabilistic"` at a temperature above 0.

A sampled tree is verified from its leaves to its root (traversal verification, Weng et al. 2505.12398), which on a chain is the
same. A node v has what is left of its own p and q and a ratio a, 1 at the root. In order, each child x gets the ratio
min(a p(x) / q(x), 1), and is decided after its own children: accepted with the ratio that these left it. If it is rejected,
R = sum_y max(a p(y) - q(y), 0) turns a into R / (R + 1 - a), p into max(a p - q, 0) / R, and q loses x.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec import tree
from specdec.core import Draft, Verdict
from specdec.rejection import standard
from specdec.rejection.standard import draft_q, is_drafted, parents, residual, target_p, tokens, without
from specdec.sampling import inverse_cdf

lossless = True
keyed_by = "step"


def verify(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Lossless.

    draft: token_BK, and q_BKV or None.
    p_BJV: target probabilities, J = K + 1.
    u_BJ: uniforms, float64.
    """
    if draft.parent_BK is not None:
        return standard.verify(draft, p_BJV, u_BJ) if draft.q_BKV is None else _verify_tree(draft, p_BJV, u_BJ)
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


def _verify_tree(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Traversal of a sampled tree, all rows side by side: each node is entered, then its children, then it is left."""
    assert draft.q_BKV is not None
    device = p_BJV.device
    parent_BK = parents(draft, p_BJV)
    row_B = torch.arange(len(parent_BK), device=device)
    token_BK = tokens(draft, p_BJV)
    left_BJV = p_BJV.double().clone()
    ratio_BJ = torch.ones_like(u_BJ)
    is_rejected_BK = torch.zeros_like(parent_BK, dtype=torch.bool)
    last_B = torch.full_like(row_B, -1)
    is_open_B = torch.ones_like(row_B, dtype=torch.bool)  # nothing is accepted yet
    for event_B in torch.from_numpy(_traversal(draft)).to(device):
        node_B = (event_B.abs() - 1).clamp(min=0)
        place_B = parent_BK[row_B, node_B] + 1
        token_B = token_BK[row_B, node_B]
        ratio_B = ratio_BJ[row_B, place_B]
        # entered
        node_q_BK = draft.q_BKV[row_B, node_B].gather(1, token_BK).double()  # of all nodes' tokens, under this node's q
        is_before_BK = is_rejected_BK & (parent_BK == place_B.unsqueeze(1) - 1)
        left_B = 1 - torch.where(is_before_BK, node_q_BK, 0.0).sum(1)
        q_B = node_q_BK[row_B, node_B] / left_B.clamp(min=torch.finfo(torch.float64).tiny)
        p_B = ratio_B * left_BJV[row_B, place_B, token_B]
        entered_B = torch.where(q_B > 0, (p_B / q_B).clamp(max=1.0), (p_B > 0).double())
        ratio_BJ[row_B, node_B + 1] = torch.where(event_B > 0, entered_B, ratio_BJ[row_B, node_B + 1])
        # left: accepted, or what remains goes to its siblings and its parent
        leaves_B = (event_B < 0) & is_open_B
        accept_B = leaves_B & (u_BJ[row_B, node_B] < ratio_BJ[row_B, node_B + 1])
        last_B = torch.where(accept_B, node_B, last_B)
        is_open_B = is_open_B & ~accept_B
        reject_B = leaves_B & ~accept_B
        is_rejected_BK[row_B, node_B] |= reject_B
        if standard.is_known_empty(reject_B):
            continue
        taken_BV = standard.has_token(token_BK, is_before_BK, p_BJV.shape[2])
        q_BV = without(draft.q_BKV[row_B, node_B], taken_BV)
        left_BV = left_BJV[row_B, place_B]
        rest_BV = (ratio_B.unsqueeze(1) * left_BV - q_BV).clamp(min=0)
        mass_B = rest_BV.sum(1)
        total_B = mass_B + 1 - ratio_B
        left_BJV[row_B, place_B] = torch.where(reject_B.unsqueeze(1), standard.normalised(rest_BV, left_BV), left_BV)
        ratio_BJ[row_B, place_B] = torch.where(reject_B, torch.where(total_B > 0, mass_B / total_B, 1.0), ratio_B)
    num_accepted_B, path_BK = tree.path_to(parent_BK, last_B)
    return Verdict(num_accepted_B, inverse_cdf(left_BJV[row_B, last_B + 1], u_BJ[:, -1]), path_BK)


def _traversal(draft: Draft) -> np.ndarray:
    """[2 K, B] in which order the nodes of each row are entered (node + 1) and left (-1 - node); 0: nothing."""
    num_rows, num_nodes = draft.token_BK.shape
    events = np.zeros((2 * num_nodes, num_rows), dtype=np.int64)
    parent_BK = draft.parents()
    for b, length in enumerate(draft.length_B.tolist()):
        children: list[list[int]] = [[] for _ in range(length + 1)]
        for k in reversed(range(length)):
            children[parent_BK[b, k] + 1].append(k)
        open_events = [node + 1 for node in children[0]]
        for place in range(2 * length):
            event = open_events.pop()
            events[place, b] = event
            if event > 0:
                open_events += [-event, *(node + 1 for node in children[event])]
    return events
