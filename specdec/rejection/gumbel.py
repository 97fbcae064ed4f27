"""Shared noise: target and drafter both take argmax(log-probability + g) with the same Gumbel noise g[position, token].

Plain sampling under this scheme does so too, and what a draft holds changes nothing: with the same seed the output equals
plain sampling token for token, as under `match`, and every pruning, ranking and cutting of drafts is allowed. But a draft that
is drawn with the same noise agrees as often as the distributions overlap, sum_x 1 / sum_y max(p_y / p_x, q_y / q_x) per
position (Daliri et al. 2408.07978): nearly `standard`'s acceptance, and with two candidates of a tree mostly more. Lookups and
greedy drafts are accepted as under `match`.
"""

from __future__ import annotations

from torch import Tensor

from specdec import gumbel
from specdec.core import Draft, Verdict
from specdec.rejection import match

lossless = True
keyed_by = "position"
shares_noise = True


def verify(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Lossless.

    draft: token_BK, and parent_BK or None.
    p_BJV: target probabilities, J = K + 1.
    u_BJ: uniforms by place in the output, float64: the noise of a position is a function of its uniform and the token.
    """
    y_N = gumbel.first(p_BJV.flatten(0, 1), u_BJ.flatten())
    return match.compare(draft, y_N.view(u_BJ.shape))
