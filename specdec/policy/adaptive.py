"""How much to draft and to verify, decided step by step: policies of the engine.

`Scheduled` looks K up by the number of rows, as vLLM's dynamic speculative decoding does. `Adaptive` weighs the value of a
draft token against its cost. Its value is its survival: the probability that it and all draft tokens before it are accepted,
estimated online (`AcceptanceModel`), or by a drafter that predicts it. Costs come from a table (`specdec.policy.cost_table`).
With T(n) the seconds of a step that spends n draft tokens and r the tokens per second that the engine makes at this batch size,
n tokens gain the sum of their survivals less r T(n). The policy takes the n with the largest gain, which maximises the long-run
rate (Dinkelbach 1967; SpecDec++ 2405.19715 and SmartSpec 2406.14066 have rules of this kind).

What keeps this lossless: before drafting, decisions depend on past steps only. After drafting they depend on the drafter's
confidence, which for a sampled token is a function of its distribution and not of the token. The distribution at a later
position was computed after the token was drawn, so a sampled token must be kept or cut without looking at later positions:
`causal_count`. Greedy drafts are functions of the text, and every decision about them is allowed.

Of a tree, the nodes are counted, whose order is such that the first n are the best tree of n nodes. A node's survival is the
probability that it is on the accepted path. Sampled trees are verified as a whole.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from specdec import tree
from specdec.core import Draft, FixedLengthPolicy
from specdec.policy.cost_table import CostTable

AUTO_MAX_DRAFT = 8  # longest draft of num_speculative_tokens=auto, where the drafter has no limit of its own
AUTO_MAX_NODES = 32  # of a tree
FREE_SHARE = 0.03  # of a plain step: where drafting takes less time, the length is decided after it
EXPLORE_STEPS = 32  # a row without a verified draft token for so many steps gets one token
DECAY = 0.8  # per step, of a row's acceptance counts
PRIOR_ACCEPTANCE = 0.6
PRIOR_WEIGHT = 2.0
RATE_DECAY = 0.99


def check_schedule(table: Any) -> list[list[int]]:
    """`num_speculative_tokens_per_batch_size` in order. ValueError where vLLM has one."""
    key = "num_speculative_tokens_per_batch_size"
    if not isinstance(table, list) or not table:
        raise ValueError(f"{key}={table!r} must be a list of [first batch size, last, K], such as [[1, 4, 5], [5, 32, 2]]")
    for entry in table:
        if not isinstance(entry, list | tuple) or len(entry) != 3 or any(type(x) is not int for x in entry):
            raise ValueError(f"{key}: entry {entry!r} must be three whole numbers, [first batch size, last, K]")
        first, last, num_draft = entry
        if first < 1 or last < 1:
            raise ValueError(f"{key}: entry {list(entry)} has a batch size below 1")
        if first > last:
            raise ValueError(f"{key}: entry {list(entry)} begins after its end; swap {first} and {last}")
        if num_draft < 0:
            raise ValueError(f"{key}: entry {list(entry)} has K={num_draft}; 0 drafts nothing, and less is not possible")
    ordered = sorted([list(entry) for entry in table])
    if ordered[0][0] != 1:
        raise ValueError(f"{key}: the first batch size must be 1, and it is {ordered[0][0]}")
    for entry, following in itertools.pairwise(ordered):
        if following[0] <= entry[1]:
            raise ValueError(f"{key}: entries {entry} and {following} overlap; let the second begin at {entry[1] + 1}")
    return ordered


class Scheduled(FixedLengthPolicy):
    """K by the number of rows in the step; batch sizes in a gap or beyond the table have the K of the entry before."""

    def __init__(self, table: list[list[int]], num_speculative_tokens: int):
        self.first = np.array([entry[0] for entry in table])
        self.num_draft = np.minimum([entry[2] for entry in table], num_speculative_tokens)

    def draft_lengths(self, rows: np.ndarray, max_draft_B: np.ndarray) -> np.ndarray:
        return np.minimum(max_draft_B, self.num_draft[np.searchsorted(self.first, len(rows), side="right") - 1])


class AcceptanceModel:
    """P(token k of a draft is accepted | those before it are): a logistic regression, fitted again while decoding.

    Features: the row's recent acceptance (log-odds), the drafter's confidence, and an offset for each position. Neighbouring
    offsets are pulled together, so that a position without data has the offset of the last one with data. The model keeps the
    last WINDOW verified tokens; the fit is Newton's method with a ridge towards the initial weights.
    """

    WINDOW = 2048  # tokens that are kept
    EVERY = 128  # tokens between two fits
    RIDGE = 1.0
    SMOOTH = 4.0
    NEWTON_STEPS = 3

    def __init__(self, num_positions: int, num_confidence_features: int):
        self.num_features = 1 + num_confidence_features
        self.initial_weight = np.zeros(self.num_features + num_positions)
        self.initial_weight[: min(self.num_features, 2)] = 0.5  # as vLLM begins: half of the drafter's own log-odds
        self.weight = self.initial_weight.copy()
        size = len(self.weight)
        self.penalty = np.zeros((size, size))
        np.fill_diagonal(self.penalty[: self.num_features, : self.num_features], self.RIDGE)
        offsets = self.penalty[self.num_features :, self.num_features :]
        np.fill_diagonal(offsets, 0.05)
        for k in range(num_positions - 1):
            offsets[k : k + 2, k : k + 2] += self.SMOOTH * np.array([[1.0, -1.0], [-1.0, 1.0]])
        self.feature_WF = np.zeros((self.WINDOW, self.num_features))
        self.position_W = np.zeros(self.WINDOW, dtype=np.int64)
        self.accepted_W = np.zeros(self.WINDOW)
        self.count = 0
        self.count_at_fit = 0

    def predict(self, feature_BKF: np.ndarray, position_BK: np.ndarray | None = None) -> np.ndarray:
        """[B, K] probabilities, for the first K positions, or for these."""
        position_BK = np.arange(feature_BKF.shape[1])[None] if position_BK is None else position_BK
        return _sigmoid(feature_BKF @ self.weight[: self.num_features] + self.weight[self.num_features :][position_BK])

    def add(self, feature_NF: np.ndarray, position_N: np.ndarray, accepted_N: np.ndarray) -> None:
        """N verified tokens; all draft tokens before each of them were accepted."""
        at = (self.count + np.arange(len(accepted_N))) % self.WINDOW
        self.feature_WF[at] = feature_NF
        self.position_W[at] = position_N
        self.accepted_W[at] = accepted_N
        self.count += len(accepted_N)
        if self.count - self.count_at_fit >= min(self.EVERY, max(self.count_at_fit, 16)):
            self._fit()
            self.count_at_fit = self.count

    def _fit(self) -> None:
        num_kept = min(self.count, self.WINDOW)
        design = np.zeros((num_kept, len(self.weight)))
        design[:, : self.num_features] = self.feature_WF[:num_kept]
        design[np.arange(num_kept), self.num_features + self.position_W[:num_kept]] = 1
        for _ in range(self.NEWTON_STEPS):
            p = _sigmoid(design @ self.weight)
            gradient = design.T @ (self.accepted_W[:num_kept] - p) - self.penalty @ (self.weight - self.initial_weight)
            hessian = (design * (p * (1 - p))[:, None]).T @ design + self.penalty
            self.weight = self.weight + np.linalg.solve(hessian, gradient).clip(-2, 2)


class DrafterAcceptance:
    """The drafter's own word in place of an `AcceptanceModel`, for one that predicts acceptance."""

    num_features = 2  # recent acceptance, which is not read, and the log-odds

    def predict(self, feature_BKF: np.ndarray, position_BK: np.ndarray | None = None) -> np.ndarray:
        """[B, K] probabilities."""
        return _sigmoid(feature_BKF[:, :, 1])

    def add(self, feature_NF: np.ndarray, position_N: np.ndarray, accepted_N: np.ndarray) -> None:
        pass


class Adaptive:
    """Chooses draft and verification lengths by expected tokens and measured costs.

    table: costs of this target and drafter.
    max_draft: the longest draft.
    max_batch_size: rows of the engine.
    auto: choose how much to draft.
    prunes: choose how much of a draft to verify (vLLM's enable_adaptive_verification).
    num_confidence_features: numbers that a draft has for each token (`Draft.confidence_BKF`).
    schedule: limits the length by batch size, beside costs; or nothing.
    drafts_trees, predicts_acceptance: of the proposer.
    """

    def __init__(
        self,
        table: CostTable,
        max_draft: int,
        max_batch_size: int,
        auto: bool,
        prunes: bool,
        num_confidence_features: int = 0,
        schedule: Scheduled | None = None,
        drafts_trees: bool = False,
        predicts_acceptance: bool = False,
    ):
        self.table = table
        self.drafts_trees = drafts_trees
        self.max_draft = max_draft
        self.auto = auto
        self.prunes = prunes
        self.needs_confidence = prunes
        self.schedule = schedule
        # seconds that the k-th token of a draft adds, by k - 1 and rows; of verifying, by rows, then by draft tokens
        rows_R = np.arange(max_batch_size + 1)
        self.draft_round_s_KR = np.array([table.draft_round(k, rows_R) for k in range(1, max_draft + 1)])
        self.verify_s: dict[int, np.ndarray] = {}
        self.hull_slope_s: dict[tuple[int, int], np.ndarray] = {}
        self.pre_draft = AcceptanceModel(max_draft, 0)
        self.post_draft: AcceptanceModel | DrafterAcceptance | None = None  # sees the confidence
        if prunes and predicts_acceptance:
            self.post_draft = DrafterAcceptance()
        elif prunes:
            self.post_draft = AcceptanceModel(max_draft, num_confidence_features)
        self.num_accepted_R: dict[int, float] = {}  # by row, decayed: draft tokens accepted, and draft tokens decided
        self.num_decided_R: dict[int, float] = {}
        self.idle_steps_R: dict[int, int] = {}  # steps since a draft token was decided
        self.num_accepted = PRIOR_ACCEPTANCE * PRIOR_WEIGHT  # of all rows, decayed
        self.num_decided = PRIOR_WEIGHT
        self.output: dict[int, list[float]] = {}  # by rows of a step, decayed: tokens emitted, and seconds by the table
        self.num_model_drafted_B = np.zeros(0, dtype=np.int64)  # tokens of this step that a model drafted
        self.num_rows_model_drafted = 1.0  # decayed: rows with such tokens, and rows with any draft
        self.num_rows_drafted = 1.0
        self.feature_BKF = np.zeros((0, 0, 1))

    def on_start(self, row: int) -> None:
        self.num_accepted_R[row] = 0.0
        self.num_decided_R[row] = 0.0
        self.idle_steps_R[row] = 0

    # ---------------------------------------------------------------- deciding

    def draft_lengths(self, rows: np.ndarray, max_draft_B: np.ndarray) -> np.ndarray:
        max_draft_B = np.minimum(max_draft_B, self.max_draft)
        if self.schedule is not None:
            max_draft_B = self.schedule.draft_lengths(rows, max_draft_B)
        if not self.auto or not max_draft_B.any():
            return max_draft_B
        width = int(max_draft_B.max())
        feature_BK1 = np.repeat(self._recent_log_odds(rows)[:, None, None], width, 1)
        probability_BK = self.pre_draft.predict(feature_BK1)  # of a tree's node, that it is on the accepted path
        survival_BK = np.minimum.accumulate(probability_BK, 1) if self.drafts_trees else probability_BK.cumprod(1)
        return self._explore(rows, self._best(survival_BK, max_draft_B, len(rows), drafting=True), max_draft_B)

    def verify_lengths(self, rows: np.ndarray, draft: Draft) -> np.ndarray:
        drafted_B = draft.length_B.numpy()
        model_drafted_B = draft.num_model_drafted_B
        self.num_model_drafted_B = drafted_B if model_drafted_B is None else model_drafted_B.numpy()
        self.num_rows_model_drafted = RATE_DECAY * self.num_rows_model_drafted + float((self.num_model_drafted_B > 0).sum())
        self.num_rows_drafted = RATE_DECAY * self.num_rows_drafted + float((drafted_B > 0).sum())
        width = draft.token_BK.shape[1]
        num_features = 1 if self.post_draft is None else self.post_draft.num_features
        self.feature_BKF = np.zeros((len(rows), width, num_features))
        self.feature_BKF[:, :, 0] = self._recent_log_odds(rows)[:, None]
        if self.post_draft is None or not width:
            return drafted_B
        if draft.confidence_BKF is not None:
            self.feature_BKF[:, :, 1:] = draft.confidence_BKF.cpu().numpy()  # waits for the device: lengths are decided here
        if draft.parent_BK is not None and draft.q_BKV is not None:
            return drafted_B
        if draft.parent_BK is None:
            survival_BK = self.post_draft.predict(self.feature_BKF).cumprod(1)
        else:
            survival_BK = self._node_survival(draft, self.post_draft)
        # a draft whose confidence is not finite is verified in full, so that the engine sees and reports it
        in_draft_BK = np.arange(width) < drafted_B[:, None]
        broken_B = (~np.isfinite(self.feature_BKF).all(2) & in_draft_BK).any(1)
        verified_B = self._best(survival_BK, drafted_B, len(rows), drafting=False, causal=draft.q_BKV is not None)
        return np.where(broken_B, drafted_B, self._explore(rows, verified_B, drafted_B))

    def _node_survival(self, draft: Draft, model: AcceptanceModel | DrafterAcceptance) -> np.ndarray:
        """[B, K] P(the node and all above it are accepted); not above that of a node before it, so that the first are taken."""
        parent_BK = draft.parents()
        survival_BK = model.predict(self.feature_BKF, tree.depths(parent_BK))
        rows = np.arange(len(parent_BK))
        for k in range(parent_BK.shape[1]):
            survival_BK[:, k] *= np.where(parent_BK[:, k] < 0, 1.0, survival_BK[rows, parent_BK[:, k]])
        return np.minimum.accumulate(survival_BK, 1)

    def _explore(self, rows: np.ndarray, length_B: np.ndarray, max_draft_B: np.ndarray) -> np.ndarray:
        """length_B, but one token for rows without a decided token for long: they would never be learned about again."""
        idle_B = np.array([self.idle_steps_R[row] for row in rows]) >= EXPLORE_STEPS
        return np.where(idle_B & (length_B == 0), np.minimum(max_draft_B, 1), length_B)

    def _best(
        self, survival_BK: np.ndarray, max_draft_B: np.ndarray, num_rows: int, drafting: bool, causal: bool = False
    ) -> np.ndarray:
        """[B] lengths: the candidate tokens are sorted by survival, and the best prefix of that order is taken.

        survival_BK: P(the token and all before it are accepted).
        max_draft_B: tokens that each row may take.
        num_rows: rows of the step.
        drafting: the draft is still to be made and costs time too.
        causal: no token may be kept or cut because of a later position (`causal_count`).
        """
        place_K = np.arange(survival_BK.shape[1])
        row_N, position_N = np.nonzero(place_K < max_draft_B[:, None])
        survival_N = survival_BK[row_N, position_N]
        order = np.lexsort((row_N, position_N, -survival_N))  # ties by position: what a row takes is a prefix of its draft
        row_N = row_N[order]
        position_N = position_N[order]
        survival_N = survival_N[order]
        num_candidates = len(survival_N)
        rate = self._rate(num_rows)
        if causal:
            count = causal_count(survival_N, rate * self._hull_slope(num_rows, num_candidates))
        else:
            seconds_N = self._verify_seconds(num_rows)[: num_candidates + 1]
            if drafting:
                taken_NK = np.zeros((num_candidates + 1, len(place_K)), dtype=np.int64)
                taken_NK[np.arange(1, num_candidates + 1), position_N] = 1
                model_share = self.num_rows_model_drafted / max(self.num_rows_drafted, 1e-9)
                seconds_N = seconds_N + model_share * self.draft_round_s_KR[place_K, taken_NK.cumsum(0)].sum(1)
            count = int(np.argmax(np.concatenate([[0.0], survival_N.cumsum()]) - rate * seconds_N))
        return np.bincount(row_N[:count], minlength=len(max_draft_B))

    def _verify_seconds(self, num_rows: int) -> np.ndarray:
        """[n + 1] seconds of a step of num_rows rows, by the number of draft tokens."""
        if num_rows not in self.verify_s:
            self.verify_s[num_rows] = self.table.verify(num_rows, num_rows + np.arange(num_rows * self.max_draft + 1))
        return self.verify_s[num_rows]

    def _hull_slope(self, num_rows: int, count: int) -> np.ndarray:
        """[count] seconds that each further draft token costs by the convex hull."""
        if (num_rows, count) not in self.hull_slope_s:
            self.hull_slope_s[num_rows, count] = np.diff(convex_hull(self._verify_seconds(num_rows)[: count + 1]))
        return self.hull_slope_s[num_rows, count]

    def _recent_log_odds(self, rows: np.ndarray) -> np.ndarray:
        """[B] log-odds that a draft token of the row is accepted, by its recent steps."""
        share = self.num_accepted / self.num_decided
        accepted_B = np.array([self.num_accepted_R[row] for row in rows]) + PRIOR_WEIGHT * share
        decided_B = np.array([self.num_decided_R[row] for row in rows]) + PRIOR_WEIGHT
        share_B = (accepted_B / decided_B).clip(0.01, 0.99)
        return np.log(share_B / (1 - share_B))

    def _rate(self, num_rows: int) -> float:
        """Tokens per second at this batch size; without experience, those of plain decoding."""
        if num_rows not in self.output:
            self.output[num_rows] = [4.0 * num_rows, 4.0 * float(self._verify_seconds(num_rows)[0])]
        tokens, seconds = self.output[num_rows]
        return tokens / seconds

    # ---------------------------------------------------------------- learning

    def observe(self, rows: np.ndarray, draft: Draft, accepted_B: np.ndarray, path_BK: np.ndarray | None = None) -> None:
        length_B = draft.length_B.numpy()
        num_rows = len(rows)
        self._rate(num_rows)
        rows_K = (self.num_model_drafted_B[:, None] > np.arange(self.max_draft)).sum(0)  # of no row, if nothing was drafted
        draft_s = self.draft_round_s_KR[np.arange(self.max_draft), rows_K].sum()
        seconds = float(draft_s + self._verify_seconds(num_rows)[length_B.sum()])
        output = self.output[num_rows]
        output[0] = RATE_DECAY * output[0] + float(num_rows + accepted_B.sum())
        output[1] = RATE_DECAY * output[1] + seconds

        if draft.parent_BK is not None or self.drafts_trees:
            decided_B = np.minimum(accepted_B + 1, tree.height(draft.parents(), length_B))  # levels, whatever a level's nodes
            self._learn_from_tree(draft, accepted_B, path_BK)
        else:
            decided_B = np.minimum(accepted_B + 1, length_B)  # tokens after the first rejected one say nothing
            row_N, position_N = np.nonzero(np.arange(draft.token_BK.shape[1]) < decided_B[:, None])
            self._learn(row_N, position_N, position_N < accepted_B[row_N], self.pre_draft, self.post_draft)
        for row, accepted, decided in zip(rows.tolist(), np.minimum(accepted_B, length_B), decided_B, strict=True):
            self.num_accepted_R[row] = DECAY * self.num_accepted_R[row] + accepted
            self.num_decided_R[row] = DECAY * self.num_decided_R[row] + decided
            self.idle_steps_R[row] = 0 if decided else self.idle_steps_R[row] + 1
        self.num_accepted = RATE_DECAY * self.num_accepted + float(np.minimum(accepted_B, length_B).sum())
        self.num_decided = RATE_DECAY * self.num_decided + float(decided_B.sum())
        if self.num_decided < PRIOR_WEIGHT:  # nothing was drafted for long
            self.num_accepted += PRIOR_ACCEPTANCE * (PRIOR_WEIGHT - self.num_decided)
            self.num_decided = PRIOR_WEIGHT
        self.num_model_drafted_B = np.zeros(0, dtype=np.int64)

    def _learn_from_tree(self, draft: Draft, accepted_B: np.ndarray, path_BK: np.ndarray | None) -> None:
        """Every node says whether it is on the accepted path; given that its parent is, only those below that path."""
        parent_BK = draft.parents()
        is_node_BK = np.arange(parent_BK.shape[1]) < draft.length_B.numpy()[:, None]
        is_accepted_BK = np.zeros_like(is_node_BK)
        for b, count in enumerate(accepted_B):  # without a path the drafts were chains
            is_accepted_BK[b, slice(count) if path_BK is None else path_BK[b, :count]] = True
        row_N, node_N = np.nonzero(is_node_BK)
        self._learn(row_N, node_N, is_accepted_BK[row_N, node_N], self.pre_draft)
        if self.post_draft is not None:
            rows_B1 = np.arange(len(parent_BK))[:, None]
            is_decided_BK = is_node_BK & ((parent_BK < 0) | is_accepted_BK[rows_B1, parent_BK])
            row_N, node_N = np.nonzero(is_decided_BK)
            depth_N = tree.depths(parent_BK)[row_N, node_N]
            self.post_draft.add(self.feature_BKF[row_N, node_N], depth_N, is_accepted_BK[row_N, node_N])

    def _learn(
        self,
        row_N: np.ndarray,
        position_N: np.ndarray,
        accepted_N: np.ndarray,
        *models: AcceptanceModel | DrafterAcceptance | None,
    ) -> None:
        feature_NF = self.feature_BKF[row_N, position_N]
        for model in models:
            if model is not None and len(row_N):
                model.add(feature_NF[:, : model.num_features], position_N, accepted_N)


def drafts_are_free(table: CostTable, max_draft: int) -> bool:
    """Whether drafting costs next to nothing, as lookups do, so that only verification is to be weighed."""
    return table.draft([max_draft]) < FREE_SHARE * float(table.verify(1, 1))


def causal_count(survival_N: np.ndarray, price_N: np.ndarray) -> int:
    """How many tokens to take without looking past any of them: all before the first whose survival is below its price.

    survival_N: descending, a row's tokens in their order. So whether a token is taken depends on its row's earlier tokens,
        whose draws are settled, and on other rows.
    price_N: must not fall. Prices are those of the convex hull of the costs, which spreads a jump that pays off with further
        tokens over these tokens.
    """
    too_dear_N = survival_N < price_N
    return int(too_dear_N.argmax()) if too_dear_N.any() else len(survival_N)


def convex_hull(y_N: np.ndarray) -> np.ndarray:
    """The largest convex function below the points (0, y[0]), (1, y[1]), ..."""
    corners: list[int] = []
    for n in range(len(y_N)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (y_N[b] - y_N[a]) * (n - b) < (y_N[n] - y_N[b]) * (b - a):
                break
            corners.pop()
        corners.append(n)
    return np.interp(np.arange(len(y_N)), corners, y_N[corners])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.clip(-40, 40)))
