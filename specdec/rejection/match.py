"""Match: sample y_i from the target at every position, accept while the draft has the same token, then emit the first other.

Of a tree: go to the child that is y at its parent, as long as there is one. No lossless scheme accepts more of a deterministic
tree.

The uniforms are keyed by the seed and the place of the token in the output, so with the same seed the output equals plain
sampling token for token, whatever the drafter: losslessness at a temperature above 0 as an exact test. Acceptance is sum p q
per position for probabilistic drafts (less than `standard`), p(x) for deterministic ones (the same).
"""

from __future__ import annotations

from torch import Tensor

from specdec import tree
from specdec.core import Draft, Verdict
from specdec.sampling import inverse_cdf

lossless = True
keyed_by = "position"


def verify(draft: Draft, p_BJV: Tensor, u_BJ: Tensor) -> Verdict:
    """Lossless.

    draft: token_BK.
    p_BJV: target probabilities, J = K + 1.
    u_BJ: uniforms by place in the output, float64: nodes of one depth have the same.
    """
    return compare(draft, inverse_cdf(p_BJV, u_BJ))


def compare(draft: Draft, y_BJ: Tensor) -> Verdict:
    """Accept what equals the target's own tokens. With y the argmax, this is greedy verification under any lossless scheme."""
    num_draft = y_BJ.shape[1] - 1
    position = y_BJ.new_ones(num_draft).cumsum(0) - 1
    is_drafted_BK = position < draft.length_B.to(y_BJ.device).unsqueeze(-1)
    if draft.parent_BK is not None:
        parent_BK = draft.parent_BK.to(y_BJ.device).masked_fill(~is_drafted_BK, -1)  # padding may hold anything
        same_BK = (draft.token_BK == y_BJ.gather(1, parent_BK + 1)) & is_drafted_BK
        num_accepted_B, last_B, path_BK = tree.walk(parent_BK, same_BK)
        return Verdict(num_accepted_B, y_BJ.gather(1, last_B.unsqueeze(1) + 1).squeeze(1), path_BK)
    same_BK = (draft.token_BK == y_BJ[:, :-1]) & is_drafted_BK
    num_accepted_B = same_BK.long().cumprod(-1).sum(-1)
    return Verdict(num_accepted_B, y_BJ.gather(-1, num_accepted_B.unsqueeze(-1)).squeeze(-1))
