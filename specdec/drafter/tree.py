"""Trees that a drafter grows: which nodes they have, and in which order.

Three builders. `beam` expands the likeliest nodes of each level and keeps the best of all (EAGLE-2 2406.16858): for drafters
that go from token to token. `best_first` takes the likeliest prefixes under distributions that depend on the position alone
(DDTree 2604.12989): for drafters that draft in one pass. `static` has the same shape in every step, given by ranks: node
(0, 2, 1) is the second likeliest child of the third likeliest child of the likeliest first token. Sampled trees are static,
since a choice that looks at what was drawn would bias the output; their ranks are the order of drawing, without replacement.

Nodes are ordered by score, then depth, then creation. A child's score is at most its parent's, so every first n nodes are a
tree, and the best one of n nodes.

Letters: X nodes that were expanded, C children of a node, W nodes of a level.
"""

from __future__ import annotations

import ast
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import gumbel, sampling
from specdec.core import Context, Draft
from specdec.model.kv import Tree
from specdec.params import GREEDY_BELOW
from specdec.tree import check_settings

DEPTH = 5  # unless tree_depth says otherwise
RANK_SHARE = 0.35  # of a static tree without a shape of its own: how much less likely each next child is accepted
CHILD_SHARE = 0.75  # and the first child, given its parent

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class TreePlan:
    """The settings of tree drafts.

    num_nodes: most nodes of a tree.
    depth: most nodes of a path.
    topk: most children of a node, and nodes of a level that are expanded.
    builder: beam, best_first or static.
    shape: of a static tree, its nodes by ranks, in order.
    """

    num_nodes: int
    depth: int
    topk: int
    builder: str
    shape: list[Ranks] = field(default_factory=list)

    @property
    def num_expanded(self) -> int:
        """Most nodes whose children are drafted."""
        return len(self.shape) if self.shape else self.topk * (self.depth - 1)

    @property
    def parents(self) -> list[int]:
        """Of a static tree, the place of each node's parent."""
        place = {ranks: k for k, ranks in enumerate(self.shape)} | {(): -1}
        return [place[ranks[:-1]] for ranks in self.shape]


def plan(
    num_speculative_tokens: int,
    tree_topk: int | None,
    tree_depth: int | None,
    tree_builder: str | None,
    speculative_token_tree: str | Sequence[Sequence[int]] | None,
    builder: str,
    is_sampled: bool,
    max_depth: int | None = None,
) -> TreePlan | None:
    """What the settings mean; None: chains. Raises ValueError, one line, for settings that do not go together.

    num_speculative_tokens: nodes.
    builder: of this drafter, unless one is given.
    max_depth: tokens that the drafter can draft one after the other; None: no limit.
    """
    if tree_topk is None and speculative_token_tree is None:
        if tree_builder is not None:
            raise ValueError(
                f"tree_builder={tree_builder} is for trees, and tree_topk is not set; set it, or leave tree_builder out"
            )
        check_settings(tree_topk, tree_depth)
        return None
    if tree_topk is not None:
        check_settings(tree_topk, tree_depth)
    builders = (builder, "static")
    if tree_builder not in (None, *builders):
        raise ValueError(f"tree_builder={tree_builder!r}: this method has {' and '.join(builders)}")
    if speculative_token_tree is not None:
        for key, value in (("tree_topk", tree_topk), ("tree_depth", tree_depth)):
            if value is not None:
                raise ValueError(f"speculative_token_tree and {key}={value} both give the shape of the tree; give one")
        shape = read_shape(speculative_token_tree)
        if len(shape) != num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}, and speculative_token_tree has {len(shape)} nodes; "
                f"give num_speculative_tokens={len(shape)}"
            )
        depth = max(map(len, shape))
        topk = 1 + max(max(ranks) for ranks in shape)
    else:
        assert tree_topk is not None
        topk = min(tree_topk, num_speculative_tokens)  # more of a level would not be among the best
        depth = min(tree_depth or min(DEPTH, max_depth or DEPTH), num_speculative_tokens)
        shape = []
    if max_depth is not None and depth > max_depth:
        fix = f"lower tree_depth to {max_depth}" if not shape else f"leave out paths of more than {max_depth} ranks"
        raise ValueError(f"the tree is {depth} deep, and this drafter drafts {max_depth} tokens; {fix}")
    if shape or is_sampled or tree_builder == "static":
        if is_sampled and tree_builder not in (None, "static"):
            raise ValueError(
                f"tree_builder={tree_builder} looks at the drafted tokens, which draft_sample_method=probabilistic forbids; "
                "use tree_builder=static"
            )
        shape = shape or default_shape(num_speculative_tokens, depth, topk)
        return TreePlan(len(shape), depth, topk, "static", shape)
    return TreePlan(num_speculative_tokens, depth, topk, builder)


def read_shape(text: str | Sequence[Sequence[int]]) -> list[Ranks]:
    """vLLM's `speculative_token_tree`: a list of paths of ranks, such as "[(0,), (1,), (0, 0)]", in the order of a draft.
    Raises ValueError, one line."""
    key = "speculative_token_tree"
    try:
        paths = ast.literal_eval(text) if isinstance(text, str) else text
        shape = [tuple(path) for path in paths]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f'{key}={str(text)[:60]!r} is no list of paths, such as "[(0,), (1,), (0, 0)]"') from None
    if not shape:
        raise ValueError(f'{key}={str(text)[:60]!r} has no paths; give some, such as "[(0,), (1,), (0, 0)]"')
    for place, path in enumerate(shape):
        if not path or any(type(rank) is not int or rank < 0 for rank in path):
            raise ValueError(f"{key}: {str(path)[:60]} is no path of one or more ranks from 0 on, such as (0, 1)")
        if path in shape[:place]:
            raise ValueError(f"{key} has the path {str(path)[:60]} twice; leave one out")
    for path in shape:
        for missing in (path[:-1], (*path[:-1], path[-1] - 1)):
            if missing and missing[-1] >= 0 and missing not in shape:
                raise ValueError(f"{key} has {path} and not {missing}, which comes before it; add it")
    # shorter paths first where scores are equal, as they are here: a parent comes before its children
    return sorted(shape, key=lambda path: (sum(path), len(path), path))


def default_shape(num_nodes: int, depth: int, topk: int) -> list[Ranks]:
    """The likeliest nodes if every first child is accepted with CHILD_SHARE, and each next one RANK_SHARE as often."""
    heap: list[tuple[float, int, Ranks]] = [(-CHILD_SHARE, 1, (0,))]
    shape: list[Ranks] = []
    while heap and len(shape) < num_nodes:
        score, length, path = heapq.heappop(heap)
        shape.append(path)
        if path[-1] + 1 < topk:
            heapq.heappush(heap, (score * RANK_SHARE, length, (*path[:-1], path[-1] + 1)))
        if length < depth:
            heapq.heappush(heap, (score * CHILD_SHARE, length + 1, (*path, 0)))
    return shape


# ------------------------------------------------------------------------------------------- growing, level by level


@dataclass
class Level:
    """Nodes that are expanded together.

    depth: of them, from 0.
    token_BW: their tokens, int64 on the host; entries at or beyond a row's count are padding.
    count_B: how many each row has.
    place_BW: place of each node's parent in the level before; 0 in the first level.
    parent_BX: parents of all nodes expanded so far, those of this level last; places are among them.
    """

    depth: int
    token_BW: np.ndarray
    count_B: np.ndarray
    place_BW: np.ndarray
    parent_BX: np.ndarray

    @property
    def num_stored(self) -> int:
        """Nodes of the levels before, which a cache has in the slots behind the committed tokens."""
        return self.parent_BX.shape[1] - self.token_BW.shape[1]

    @property
    def row_N(self) -> np.ndarray:
        """Row of each node, rows end to end."""
        return np.repeat(np.arange(len(self.count_B)), self.count_B)

    @property
    def token_N(self) -> np.ndarray:
        """Their tokens, rows end to end."""
        return self._packed(self.token_BW)

    def parent_place(self, count_before_B: np.ndarray) -> np.ndarray:
        """[N] place of each node's parent among the nodes of the level before, rows end to end.

        count_before_B: nodes of each row in that level.
        """
        first_B = np.cumsum(count_before_B) - count_before_B
        return self._packed(first_B[:, None] + self.place_BW)

    def visibility(self, place_B: np.ndarray, num_rows: int) -> Tree:
        """What the nodes see. place_B: of the rows among those of the forward, which are num_rows."""
        num_nodes = self.num_stored + int(self.count_B.max())
        parent_RX = np.full((num_rows, num_nodes), -1)
        parent_RX[place_B] = self.parent_BX[:, :num_nodes]
        return Tree(parent_RX, self.num_stored)

    def _packed(self, x_BW: np.ndarray) -> np.ndarray:
        return x_BW[np.arange(x_BW.shape[1]) < self.count_B[:, None]]


Expand = Callable[[Level], Tensor]  # [N, draft vocabulary] logits after each of the level's nodes, rows end to end


class Grower:
    """Grows the trees of a step.

    plan: settings.
    context: of the step.
    depth_B: most nodes of a path of each row; a row with 0 drafts nothing.
    is_sampled: nodes are drawn, and their distributions are reported.
    to_target_vocab: maps tokens and distributions over a draft vocabulary to the target's.
    """

    def __init__(
        self, plan: TreePlan, context: Context, depth_B: np.ndarray, is_sampled: bool, to_target_vocab: Callable[..., Any]
    ):
        self.plan = plan
        self.context = context
        self.depth_B = np.minimum(depth_B, plan.depth)
        self.is_sampled = is_sampled
        self.to_target_vocab = to_target_vocab
        self.temperature_B = context.temperature_B
        self.finite_B = np.ones(len(depth_B), dtype=bool)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.context.last_token_B.device, non_blocking=True)

    def grow(self, logits_BV: Tensor, expand: Expand) -> Draft:
        """The draft. logits_BV: after the last committed token, of all rows. expand: called for the nodes of level after
        level; where it does not depend on the nodes but for their depth, the builder may be best_first."""
        if self.plan.shape:
            return self._static(logits_BV, expand)
        return self._beam(logits_BV, expand) if self.plan.builder == "beam" else self._best_first(logits_BV, expand)

    def _children(
        self, logits_NV: Tensor, row_N: np.ndarray, count: int, uniform_N: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray, Tensor | None]:
        """Tokens [N, C] of the nodes' children and the logarithms of their probabilities, on the host; -1 where there are no
        more. And the distribution that they were drawn from, [N, V], if they are.

        logits_NV: after each node.
        row_N: rows of the nodes.
        """
        count = min(count, logits_NV.shape[1])
        logprob_NV = logits_NV.float().log_softmax(-1)
        logprob_NC, token_NC = logprob_NV.topk(count, -1)
        q_NV = None
        if self.is_sampled:
            temperature_N = self.temperature_B[self._on_device(row_N)]
            q_NV = sampling.draft_distribution(logits_NV, temperature_N, token_NC[:, 0])
        flat_N, q_NV = self.to_target_vocab(token_NC.flatten(), q_NV)
        token_NC = flat_N.view(token_NC.shape)
        if q_NV is not None:
            assert uniform_N is not None
            is_greedy_N1 = (temperature_N < GREEDY_BELOW).unsqueeze(1)  # at temperature 0 all that is likely will do
            token_NC = torch.where(is_greedy_N1, token_NC, gumbel.first(q_NV, uniform_N, count))
            confidence_NC = sampling.log_odds(logits_NV, temperature_N).unsqueeze(1).expand_as(logprob_NC)
        else:
            confidence_NC = logprob_NC
        host = torch.cat([token_NC.double(), confidence_NC.double()], 1).cpu().numpy()  # one read
        logprob = host[:, count:]
        np.logical_and.at(self.finite_B, row_N, np.isfinite(logprob[:, 0]))
        return host[:, :count].astype(np.int64), np.where(np.isnan(logprob), -np.inf, logprob), q_NV

    def _may_go_on(self, row_N: np.ndarray, token_NC: np.ndarray) -> np.ndarray:
        """Whether the tokens do not end their rows' requests."""
        return (
            ~self.context.stop_BV[row_N[:, None], token_NC]
            if self.context.stop_BV is not None
            else np.ones_like(token_NC, bool)
        )

    # ------------------------------------------------------------------------------------------- beam

    def _beam(self, logits_BV: Tensor, expand: Expand) -> Draft:
        """All candidates of a row lie in one line, level after level: the children of each expanded node, likeliest first."""
        num_rows = len(self.depth_B)
        is_drafted_B1 = (self.depth_B > 0)[:, None]
        row_N = np.flatnonzero(self.depth_B)
        token_NC, logprob_NC, _ = self._children(logits_BV[self._on_device(row_N)], row_N, self.plan.topk)
        width = token_NC.shape[1]
        # of all candidates so far
        token_BP = _spread(token_NC, is_drafted_B1, 0)
        logprob_BP = _spread(logprob_NC, is_drafted_B1, -np.inf)  # the logarithm of its probability after its parent
        score_BP = logprob_BP
        parent_BP = np.full_like(token_BP, -1)  # the place of its parent among the candidates
        depth_BP = np.zeros_like(token_BP)
        goes_on_BP = _spread(self._may_go_on(row_N, token_NC), is_drafted_B1, False)
        stored_BP = np.full_like(token_BP, -1)  # its place among those that were expanded
        parent_BX = np.zeros((num_rows, 0), dtype=np.int64)  # of these, among themselves
        first = 0  # the last level begins here
        for depth in range(int(self.depth_B.max(initial=0)) - 1):
            score_BW = np.where(goes_on_BP[:, first:] & (self.depth_B > depth + 1)[:, None], score_BP[:, first:], -np.inf)
            best_BW = np.argsort(-score_BW, axis=1, kind="stable")[:, :width]
            count_B = np.isfinite(np.take_along_axis(score_BW, best_BW, 1)).sum(1)
            # a kept child is outranked by those above it, and by the nodes that are expanded before its parent
            count_B = np.minimum(count_B, np.maximum(self.context.max_draft_B - 1 - depth, 0))
            if not count_B.any():
                break
            place_BW = first + best_BW
            above_BW = np.take_along_axis(parent_BP, place_BW, 1)
            stored_BW = np.where(above_BW < 0, -1, np.take_along_axis(stored_BP, above_BW.clip(0), 1))
            num_stored = parent_BX.shape[1]
            np.put_along_axis(stored_BP, place_BW, np.broadcast_to(num_stored + np.arange(width), place_BW.shape), 1)
            parent_BX = np.concatenate([parent_BX, stored_BW], 1)
            place_in_level_BW = (stored_BW - (num_stored - width)).clip(0) if depth else np.zeros_like(stored_BW)
            level = Level(depth, np.take_along_axis(token_BP, place_BW, 1), count_B, place_in_level_BW, parent_BX)
            token_NC, logprob_NC, _ = self._children(expand(level), level.row_N, width)
            is_node_BW = np.arange(width) < count_B[:, None]
            num_children = token_NC.shape[1]
            logprob_BC = _spread(logprob_NC, is_node_BW, -np.inf)
            score_BC = np.repeat(np.take_along_axis(score_BP, place_BW, 1), num_children, 1) + logprob_BC
            first = token_BP.shape[1]
            token_BP = np.concatenate([token_BP, _spread(token_NC, is_node_BW, 0)], 1)
            logprob_BP = np.concatenate([logprob_BP, logprob_BC], 1)
            score_BP = np.concatenate([score_BP, score_BC], 1)
            parent_BP = np.concatenate([parent_BP, np.repeat(place_BW, num_children, 1)], 1)
            depth_BP = np.concatenate([depth_BP, np.full(logprob_BC.shape, depth + 1)], 1)
            goes_on_BP = np.concatenate([goes_on_BP, _spread(self._may_go_on(level.row_N, token_NC), is_node_BW, False)], 1)
            stored_BP = np.concatenate([stored_BP, np.full(logprob_BC.shape, -1)], 1)
        kept_BK, length_B = best(score_BP, depth_BP, self.context.max_draft_B)
        return self._draft(token_BP, parent_BP, logprob_BP, kept_BK, length_B)

    # ------------------------------------------------------------------------------------------- best first

    def _best_first(self, logits_BV: Tensor, expand: Expand) -> Draft:
        """Candidates are the likeliest prefixes, which `best_first` has in order."""
        num_rows = len(self.depth_B)
        num_depths = int(self.depth_B.max(initial=0))
        shape = (num_rows, num_depths, min(self.plan.topk, logits_BV.shape[1]))
        token_BDC = np.zeros(shape, dtype=np.int64)
        logprob_BDC = np.full(shape, -np.inf)
        for depth in range(num_depths):
            row_N = np.flatnonzero(self.depth_B > depth)
            count_B = (self.depth_B > depth).astype(np.int64)
            zeros_B1 = np.zeros((num_rows, 1), dtype=np.int64)
            level = Level(depth - 1, zeros_B1, count_B, zeros_B1, np.zeros((num_rows, depth), dtype=np.int64))
            logits_NV = expand(level) if depth else logits_BV[self._on_device(row_N)]
            token_BDC[row_N, depth], logprob_BDC[row_N, depth], _ = self._children(logits_NV, row_N, self.plan.topk)
        num_nodes = int(self.context.max_draft_B.max(initial=0))
        place_BK = np.tile(np.arange(num_nodes), (num_rows, 1))
        token_BK = np.zeros_like(place_BK)
        logprob_BK = np.full(place_BK.shape, -np.inf)
        parent_BK = np.full_like(place_BK, -1)
        length_B = np.zeros(num_rows, dtype=np.int64)
        for b, limit in enumerate(self.context.max_draft_B):
            ends_DC = ~self._may_go_on(np.full(num_depths, b), token_BDC[b])
            depth_k, rank_k, parent_k = best_first(logprob_BDC[b, : self.depth_B[b]], int(limit), ends_DC)
            length_B[b] = len(depth_k)
            token_BK[b, : length_B[b]] = token_BDC[b, depth_k, rank_k]
            logprob_BK[b, : length_B[b]] = logprob_BDC[b, depth_k, rank_k]
            parent_BK[b, : length_B[b]] = parent_k
        width = int(length_B.max(initial=0))
        return self._draft(token_BK, parent_BK, logprob_BK, place_BK[:, :width], length_B)

    # ------------------------------------------------------------------------------------------- static

    def _static(self, logits_BV: Tensor, expand: Expand) -> Draft:
        """Candidates are the nodes of the shape."""
        num_rows = len(self.depth_B)
        num_nodes = len(self.plan.shape)
        parent_K = np.array(self.plan.parents)
        rank_K = np.array([path[-1] for path in self.plan.shape])
        depth_K = np.array([len(path) - 1 for path in self.plan.shape])
        # what is expanded: the last committed token, then the nodes that have children, level by level
        has_children_K = np.isin(np.arange(num_nodes), parent_K)
        levels = [np.array([-1])]
        levels += [np.flatnonzero(has_children_K & (depth_K == depth)) for depth in range(self.plan.depth - 1)]
        place = {int(k): i for i, k in enumerate(np.concatenate(levels))}
        parent_place_K = np.array([place[int(parent)] for parent in parent_K])

        token_BK = np.zeros((num_rows, num_nodes), dtype=np.int64)
        logprob_BK = np.full((num_rows, num_nodes), -np.inf)
        is_node_BK = np.zeros((num_rows, num_nodes), dtype=bool)
        goes_on_BK = np.zeros((num_rows, num_nodes), dtype=bool)
        q_of_levels: list[Tensor] = []  # of what is expanded, [B, W, V]
        count_B = (self.depth_B > 0).astype(np.int64)
        row_N = np.flatnonzero(count_B)
        logits_NV = logits_BV[self._on_device(row_N)]
        first = 0  # place of the level
        for depth, level_W in enumerate(levels):
            is_expanded_BW = np.arange(len(level_W)) < count_B[:, None]
            token_NC, logprob_NC, q_NV = self._children(
                logits_NV, row_N, self.plan.topk, self._uniforms(level_W, depth, is_expanded_BW)
            )
            if q_NV is not None:
                q_AV = q_NV.new_zeros(is_expanded_BW.size, q_NV.shape[1])
                q_AV.index_copy_(0, self._on_device(np.flatnonzero(is_expanded_BW)), q_NV)
                q_of_levels.append(q_AV.unflatten(0, is_expanded_BW.shape))
            shape = (*is_expanded_BW.shape, -1)
            node_k = np.flatnonzero((depth_K == depth) & (rank_K < token_NC.shape[1]))
            at = (parent_place_K[node_k] - first, rank_K[node_k])
            token_BK[:, node_k] = _spread(token_NC, is_expanded_BW, -1).reshape(shape)[:, *at]
            logprob_BK[:, node_k] = _spread(logprob_NC, is_expanded_BW, -np.inf).reshape(shape)[:, *at]
            parent_k = parent_K[node_k]
            is_node_BK[:, node_k] = (token_BK[:, node_k] >= 0) & ((parent_k < 0) | (is_node_BK & goes_on_BK)[:, parent_k])
            goes_on_BK[:, node_k] = self._may_go_on(np.arange(num_rows), token_BK[:, node_k])
            if depth + 1 == len(levels):
                break
            following_W = levels[depth + 1]
            count_B = np.where(self.depth_B > depth + 1, len(following_W), 0)
            if not count_B.any():
                break
            parent_place_W = parent_place_K[following_W]
            parent_X = parent_place_K[np.concatenate(levels[1 : depth + 2])] - 1
            level = Level(
                depth,
                token_BK[:, following_W].clip(0),
                count_B,
                np.tile(parent_place_W - first, (num_rows, 1)),
                np.tile(parent_X, (num_rows, 1)),
            )
            logits_NV = expand(level)
            row_N = level.row_N
            first += len(level_W)
        place_BK = np.tile(np.arange(num_nodes), (num_rows, 1))
        kept_BK, length_B = best(np.where(is_node_BK, -place_BK, -np.inf), np.zeros_like(place_BK), self.context.max_draft_B)
        draft = self._draft(token_BK, np.tile(parent_K, (num_rows, 1)), logprob_BK, kept_BK, length_B)
        if self.is_sampled:
            q_BXV = torch.cat(q_of_levels, 1)
            at_BK = self._on_device(parent_place_K[kept_BK].clip(max=q_BXV.shape[1] - 1))
            draft.q_BKV = q_BXV[torch.arange(num_rows, device=q_BXV.device).unsqueeze(1), at_BK]
        return draft

    def _uniforms(self, level_W: np.ndarray, depth: int, is_expanded_BW: np.ndarray) -> Tensor | None:
        """[N] what the children of the nodes of a level are drawn with: under shared noise the same for all of them."""
        if not self.is_sampled:
            return None
        assert self.context.uniform_BK is not None
        column_W = np.full_like(level_W, depth) if self.context.shares_noise else level_W + 1
        row_N, place_N = np.nonzero(is_expanded_BW)
        return self.context.uniform_BK[self._on_device(row_N), self._on_device(column_W[place_N])]

    # ------------------------------------------------------------------------------------------- what they have in common

    def _draft(
        self, token_BP: np.ndarray, parent_BP: np.ndarray, logprob_BP: np.ndarray, kept_BK: np.ndarray, length_B: np.ndarray
    ) -> Draft:
        """The draft of the candidates that are kept, in their order; beyond a row's length is padding."""
        place_BP = np.full(token_BP.shape, -1)  # of the candidates in the draft
        np.put_along_axis(place_BP, kept_BK, np.broadcast_to(np.arange(kept_BK.shape[1]), kept_BK.shape), 1)
        parent_BK = np.take_along_axis(parent_BP, kept_BK, 1)
        parent_BK = np.where(parent_BK < 0, -1, np.take_along_axis(place_BP, parent_BK.clip(0), 1))
        is_node_BK = np.arange(kept_BK.shape[1]) < length_B[:, None]
        token_BK = np.where(is_node_BK, np.take_along_axis(token_BP, kept_BK, 1), 0)
        confidence_BKF = None
        if self.context.return_confidence:
            logprob_BK = np.where(is_node_BK, np.take_along_axis(logprob_BP, kept_BK, 1), 0.0)
            if not self.is_sampled:
                logprob_BK = logprob_BK - np.log1p(-np.exp(logprob_BK).clip(max=1 - 2**-24))
            confidence_BKF = self._on_device(logprob_BK.clip(-40, 40).astype(np.float32)).unsqueeze(-1)
        return Draft(
            self._on_device(token_BK),
            torch.from_numpy(length_B),
            parent_BK=torch.from_numpy(np.where(is_node_BK, parent_BK, -1)),
            confidence_BKF=confidence_BKF,
            finite_BK=self._on_device(np.broadcast_to(self.finite_B[:, None], token_BK.shape).copy()),
        )


def _spread(x_NC: np.ndarray, is_node_BW: np.ndarray, fill: Any) -> np.ndarray:
    """[B, W * C] the entries of nodes, rows end to end, in their places."""
    x_BWC = np.full((*is_node_BW.shape, x_NC.shape[1]), fill, dtype=x_NC.dtype)
    x_BWC[is_node_BW] = x_NC
    return x_BWC.reshape(len(x_BWC), -1)


def best(score_BP: np.ndarray, depth_BP: np.ndarray, max_nodes_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of the best candidates of each row, in order, and how many there are: by score, then depth, then place. A score of
    -inf is no candidate."""
    order_BP = np.lexsort((np.broadcast_to(np.arange(score_BP.shape[1]), score_BP.shape), depth_BP, -score_BP), axis=1)
    length_B = np.minimum(np.isfinite(score_BP).sum(1), max_nodes_B)
    return order_BP[:, : int(length_B.max(initial=0))], length_B


# ------------------------------------------------------------------------------------------- distributions by position


def best_first(
    logprob_DC: np.ndarray, num_nodes: int, ends_DC: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The likeliest prefixes under independent positions: (depth, rank, parent) of each node.

    logprob_DC: logarithms of the probabilities of the likeliest tokens of each position, in descending order.
    ends_DC: tokens that get no children.
    """
    num_depths, width = logprob_DC.shape
    heap: list[tuple[float, int, int, int, int]] = []  # minus score, depth, creation, rank, parent
    created = 0

    def push(score: float, depth: int, rank: int, parent: int) -> None:
        nonlocal created
        if depth < num_depths and rank < width and logprob_DC[depth, rank] > -np.inf:
            heapq.heappush(heap, (-score - logprob_DC[depth, rank], depth, created, rank, parent))
            created += 1

    push(0.0, 0, 0, -1)
    nodes: list[tuple[int, int, int]] = []
    scores: list[float] = []
    while heap and len(nodes) < num_nodes:
        minus_score, depth, _, rank, parent = heapq.heappop(heap)
        above = scores[parent] if parent >= 0 else 0.0
        nodes.append((depth, rank, parent))
        scores.append(-minus_score)
        push(above, depth, rank + 1, parent)
        if ends_DC is None or not ends_DC[depth, rank]:
            push(-minus_score, depth + 1, 0, len(nodes) - 1)
    depth_K, rank_K, parent_K = np.array(nodes, dtype=np.int64).reshape(-1, 3).T
    return depth_K, rank_K, parent_K
