"""Token Recycling: what the target found likeliest after a token when it last processed it, is drafted after that token again.

Paper: arXiv 2408.08696. A matrix has a line for every token of the vocabulary, its successors: the likeliest tokens by the
logits of the last forward that processed it, whether it was accepted or not. A draft is a static tree, where child r of a node
with token t is successor r of t. The paper's tree has 80 nodes, is 6 deep and has up to 8 children of a node; here
`default_shape` gives the shape. Of a prompt the matrix learns only the tokens whose logits are computed: the last one, of each
chunk of the prefill.

The matrix is on the host, since which nodes there are decides shapes. A forward's successors come by a copy that is queued
behind it, so that the loop's one read of the device waits for it too.

Letters: C successors of a token, W nodes of a level, X the last committed token, then the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.core import Context, Draft, StatelessProposer, draft_from_lists
from specdec.drafter.tree import plan
from specdec.model.target import CausalLM

TOPK = 8
DEPTH = 6


class TokenRecycling(StatelessProposer):
    """Drafts are deterministic (q is one-hot). Tokens that the matrix does not know yet have no children.

    All requests share the matrix, so above temperature 0 a request's tokens depend on the others (their distribution does not),
    except under schemes keyed by position. ValueError: a setting is beyond its limit.

    num_speculative_tokens: nodes of a tree at most.
    tree_topk: children of a node, and successors of a token; None: 8. With 1 drafts are chains.
    tree_depth: tokens of a tree's longest path; None: 6, of chains no limit of its own.
    speculative_token_tree: the tree itself, in place of these two.
    """

    name = "token_recycling"

    def __init__(
        self,
        target: CausalLM,
        num_speculative_tokens: int,
        tree_topk: int | None = None,
        tree_depth: int | None = None,
        speculative_token_tree: str | Sequence[Sequence[int]] | None = None,
    ):
        if num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}: at least 1 is needed; method 'none' drafts nothing"
            )
        if speculative_token_tree is None:
            tree_topk = TOPK if tree_topk is None else tree_topk
            tree_depth = (num_speculative_tokens if tree_topk == 1 else DEPTH) if tree_depth is None else tree_depth
        tree = plan(num_speculative_tokens, tree_topk, tree_depth, "static", speculative_token_tree, "static", is_sampled=False)
        assert tree is not None
        self.num_speculative_tokens = num_speculative_tokens
        self.drafts_trees = tree.topk > 1
        self.parent_K = np.array(tree.parents)
        self.rank_K = np.array([path[-1] for path in tree.shape])
        self.depth_K = np.array([len(path) for path in tree.shape])
        # -1: not known. The line behind the last token's, which index -1 means too, is that of no token
        self.successor_VC = np.full((target.vocab_size + 1, int(self.rank_K.max()) + 1), -1, dtype=np.int32)
        self._last_forward: Tensor | None = None  # [N, 1 + C] tokens and their successors, not in the matrix yet

    def on_forward(self, token_N: Tensor, logits_NV: Tensor) -> None:
        self._update()
        top_NC = logits_NV.topk(min(self.successor_VC.shape[1], logits_NV.shape[1])).indices
        self._last_forward = torch.cat([token_N.unsqueeze(1), top_NC], 1).to("cpu", non_blocking=True)

    def _update(self) -> None:
        """Bring the matrix up to date. Of a token's places in one forward the first counts: nodes that are likelier to be
        reached come first."""
        if self._last_forward is not None:
            known = self._last_forward.numpy()
            token_N, first_N = np.unique(known[:, 0], return_index=True)
            self.successor_VC[token_N, : known.shape[1] - 1] = known[first_N, 1:]
            self._last_forward = None

    def reset(self) -> None:
        self.successor_VC.fill(-1)
        self._last_forward = None

    def wipe(self) -> None:
        self.reset()

    def propose(self, context: Context) -> Draft:
        self._update()
        token_BK = self._look_up(context)
        is_node_BK = (token_BK >= 0) & (self.depth_K <= context.path_limit()[:, None])
        is_node_BK &= is_node_BK.cumsum(1) <= context.max_draft_B[:, None]
        place_BK = is_node_BK.cumsum(1) - 1
        drafts = []
        parents = []
        for b in range(len(context.rows)):
            node_K = np.flatnonzero(is_node_BK[b])
            parent_K = self.parent_K[node_K]
            drafts.append(token_BK[b, node_K])
            parents.append(np.where(parent_K < 0, -1, place_BK[b, parent_K]))
        return draft_from_lists(drafts, context.last_token_B.device, parents=parents if self.drafts_trees else None)

    def _look_up(self, context: Context) -> np.ndarray:
        """[B, K] tokens of the static tree's nodes, -1 where there is none."""
        num_rows = len(context.rows)
        token_BX = np.full((num_rows, len(self.parent_K) + 1), -1)
        token_BX[:, 0] = context.token_RL[context.rows, context.length_B - 1]
        for depth in range(1, self.depth_K.max() + 1):
            level_W = np.flatnonzero(self.depth_K == depth)
            above_BW = token_BX[:, 1 + self.parent_K[level_W]]
            if depth > 1 and context.stop_BV is not None:
                ends_BW = (above_BW >= 0) & context.stop_BV[np.arange(num_rows)[:, None], above_BW]
                above_BW = np.where(ends_BW, -1, above_BW)
            token_BX[:, 1 + level_W] = self.successor_VC[above_BW, self.rank_K[level_W]]
        return token_BX[:, 1:]
