"""How much to draft and to verify, decided step by step: policies of the engine.

`Scheduled` looks K up by the number of rows, as vLLM's dynamic speculative decoding does. `Adaptive` weighs what a token is
worth against what it costs: worth is the probability that it and all before it stand, learned while decoding (`AcceptanceModel`);
costs come from a table (`specdec.policy.cost_table`). With T(n) the seconds of a step that spends n draft tokens and r the tokens per
second that the engine makes at this batch size, n tokens gain the sum of their survival probabilities less r T(n): the policy
takes the n with the largest gain, which is the choice that makes the long-run rate best (Dinkelbach 1967; SpecDec++ 2405.19715
and SmartSpec 2406.14066 have rules of this kind).

What keeps this lossless: before drafting, decisions look at past steps only. After drafting they look at the evidence that a
drafter gives, which for a drawn token is its law and not the token; and since the law at a later position was made after the
token, a token of a drawn draft must be let in without looking past it. `causal_count` does that. Greedy drafts are functions of
the text, and every decision about them is allowed.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from specdec.core import Draft, FixedLengthPolicy, require_chain
from specdec.policy.cost_table import CostTable

AUTO_MOST = 8  # longest draft of num_speculative_tokens=auto, where the drafter knows no limit of its own
FREE = 0.03  # of a plain step: drafts that take less time are not worth deciding about before they are there
EXPLORE = 32  # a row of which no draft was judged for so many steps gets one token
DECAY = 0.8  # per step, what a row remembers of its acceptance
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.6, 2.0
RATE_DECAY = 0.99


def check_schedule(table: Any) -> list[list[int]]:
    """`num_speculative_tokens_per_batch_size` in order. ValueError where vLLM has one."""
    what = "num_speculative_tokens_per_batch_size"
    if not isinstance(table, list) or not table:
        raise ValueError(f"{what}={table!r} must be a list of [first batch size, last, K], such as [[1, 4, 5], [5, 32, 2]]")
    for entry in table:
        if not isinstance(entry, list | tuple) or len(entry) != 3 or any(type(x) is not int for x in entry):
            raise ValueError(f"{what}: entry {entry!r} must be three whole numbers, [first batch size, last, K]")
        first, last, num_draft = entry
        if first < 1 or last < 1:
            raise ValueError(f"{what}: entry {list(entry)} has a batch size below 1")
        if first > last:
            raise ValueError(f"{what}: entry {list(entry)} begins after its end; swap {first} and {last}")
        if num_draft < 0:
            raise ValueError(f"{what}: entry {list(entry)} has K={num_draft}; 0 drafts nothing, and less is not possible")
    ordered = sorted([list(entry) for entry in table])
    if ordered[0][0] != 1:
        raise ValueError(f"{what}: the first batch size must be 1, and it is {ordered[0][0]}")
    for before, after in itertools.pairwise(ordered):
        if after[0] <= before[1]:
            raise ValueError(f"{what}: entries {before} and {after} overlap; let the second begin at {before[1] + 1}")
    return ordered


class Scheduled(FixedLengthPolicy):
    """K by the number of rows in the step; gaps and what comes after the table's end have the K before them."""

    def __init__(self, table: list[list[int]], num_speculative_tokens: int):
        self.first = np.array([entry[0] for entry in table])
        self.num_draft = np.minimum([entry[2] for entry in table], num_speculative_tokens)

    def draft_lengths(self, rows: np.ndarray, most_B: np.ndarray) -> np.ndarray:
        return np.minimum(most_B, self.num_draft[np.searchsorted(self.first, len(rows), side="right") - 1])


class AcceptanceModel:
    """P(token k of a draft stands | those before it do): a logistic regression, fitted again while decoding.

    Features: how the row fared of late (log-odds), the evidence of the drafter, and an offset for each position. Offsets of
    neighbouring positions are drawn together, so that one which was never seen is like the last that was. Remembered are the
    last WINDOW judged tokens; the fit is Newton's method with a weak pull to where it began.
    """

    WINDOW, EVERY, RIDGE, SMOOTH, NEWTON = 2048, 128, 1.0, 4.0, 3

    def __init__(self, num_positions: int, num_confidence_features: int):
        self.num_features = 1 + num_confidence_features
        self.begin = np.zeros(self.num_features + num_positions)
        self.begin[: min(self.num_features, 2)] = 0.5  # as vLLM begins: half of what the law says of itself
        self.weight = self.begin.copy()
        size = len(self.begin)
        self.pull = np.zeros((size, size))
        np.fill_diagonal(self.pull[: self.num_features, : self.num_features], self.RIDGE)
        offsets = self.pull[self.num_features :, self.num_features :]
        np.fill_diagonal(offsets, 0.05)
        for k in range(num_positions - 1):
            offsets[k : k + 2, k : k + 2] += self.SMOOTH * np.array([[1.0, -1.0], [-1.0, 1.0]])
        self.feature_WF = np.zeros((self.WINDOW, self.num_features))
        self.position_W = np.zeros(self.WINDOW, dtype=np.int64)
        self.stood_W = np.zeros(self.WINDOW)
        self.count, self.fitted = 0, 0

    def of(self, feature_BKF: np.ndarray) -> np.ndarray:
        """[B, K] probabilities, for the first K positions."""
        offset_K = self.weight[self.num_features :][: feature_BKF.shape[1]]
        return _sigmoid(feature_BKF @ self.weight[: self.num_features] + offset_K)

    def add(self, feature_NF: np.ndarray, position_N: np.ndarray, stood_N: np.ndarray) -> None:
        """Tokens that were judged: all before them had stood."""
        at = (self.count + np.arange(len(stood_N))) % self.WINDOW
        self.feature_WF[at], self.position_W[at], self.stood_W[at] = feature_NF, position_N, stood_N
        self.count += len(stood_N)
        if self.count - self.fitted >= min(self.EVERY, max(self.fitted, 16)):
            self._fit()
            self.fitted = self.count

    def _fit(self) -> None:
        known, num_features = min(self.count, self.WINDOW), self.num_features
        design = np.zeros((known, len(self.weight)))
        design[:, :num_features] = self.feature_WF[:known]
        design[np.arange(known), num_features + self.position_W[:known]] = 1
        for _ in range(self.NEWTON):
            p = _sigmoid(design @ self.weight)
            slope = design.T @ (self.stood_W[:known] - p) - self.pull @ (self.weight - self.begin)
            curve = (design * (p * (1 - p))[:, None]).T @ design + self.pull
            self.weight = self.weight + np.linalg.solve(curve, slope).clip(-2, 2)


class Adaptive:
    """auto: chooses how much to draft; trims: chooses how much of that to verify (vLLM's enable_adaptive_verification).

    most: the longest draft; num_confidence_features: numbers that drafts come with; before: what limits the length otherwise, a
    `Scheduled`, or nothing.
    """

    def __init__(
        self,
        table: CostTable,
        most: int,
        max_batch_size: int,
        auto: bool,
        trims: bool,
        num_confidence_features: int = 0,
        before: Scheduled | None = None,
    ):
        self.table, self.most, self.auto, self.prunes, self.schedule = table, most, auto, trims, before
        self.needs_confidence = trims
        # seconds that the k-th token of a draft adds, by k - 1 and rows; and of verifying, by rows, then by draft tokens
        self.round_KR = np.array([table.draft_round(k, np.arange(max_batch_size + 1)) for k in range(1, most + 1)])
        self.verify_s: dict[int, np.ndarray] = {}
        self.hull_s: dict[tuple[int, int], np.ndarray] = {}
        self.pre_draft = AcceptanceModel(most, 0)  # before there is a draft
        self.post_draft = AcceptanceModel(most, num_confidence_features) if trims else None  # with its evidence
        self.num_accepted_prev_R: dict[int, float] = {}  # by row, of late: tokens that stood, and that were judged
        self.judged_R: dict[int, float] = {}
        self.idle_R: dict[int, int] = {}  # steps without a draft
        self.stood, self.judged = PRIOR_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT  # of all rows
        self.made: dict[int, list[float]] = {}  # by rows of a step: tokens made, and seconds by the table
        self.num_model_drafted_B = np.zeros(0, dtype=np.int64)  # tokens of this step whose drafting took time
        self.paid, self.asked = 1.0, 1.0  # of late: rows with such a draft, and rows with any
        self.feature_BKF = np.zeros((0, 0, 1))

    def on_start(self, row: int) -> None:
        self.num_accepted_prev_R[row] = self.judged_R[row] = 0.0
        self.idle_R[row] = 0

    # ---------------------------------------------------------------- deciding

    def draft_lengths(self, rows: np.ndarray, most_B: np.ndarray) -> np.ndarray:
        most_B = np.minimum(most_B, self.most)
        if self.schedule is not None:
            most_B = self.schedule.draft_lengths(rows, most_B)
        if not self.auto or not most_B.any():
            return most_B
        width = int(most_B.max())
        feature_BK1 = np.repeat(self._recent(rows)[:, None, None], width, 1)
        survival_BK = self.pre_draft.of(feature_BK1).cumprod(1)
        return self._explored(rows, self._best(survival_BK, most_B, len(rows), drafting=True), most_B)

    def verify_lengths(self, rows: np.ndarray, draft: Draft) -> np.ndarray:
        require_chain(draft, "an adaptive policy")
        made_B = draft.length_B.numpy()
        self.num_model_drafted_B = made_B if draft.num_model_drafted_B is None else draft.num_model_drafted_B.numpy()
        self.paid = RATE_DECAY * self.paid + float((self.num_model_drafted_B > 0).sum())
        self.asked = RATE_DECAY * self.asked + float((made_B > 0).sum())
        recent_B, width = self._recent(rows), draft.token_BK.shape[1]
        num_features = 1 if self.post_draft is None else self.post_draft.num_features
        self.feature_BKF = np.zeros((len(rows), width, num_features))
        self.feature_BKF[:, :, 0] = recent_B[:, None]
        if self.post_draft is None or not width:
            return made_B
        if draft.confidence_BKF is not None:
            self.feature_BKF[:, :, 1:] = draft.confidence_BKF.cpu().numpy()  # waits for the device: lengths are decided here
        survival_BK = self.post_draft.of(self.feature_BKF).cumprod(1)
        # a draft whose evidence is not finite is kept whole, so that the engine sees it and says so
        in_draft_BK = np.arange(width) < made_B[:, None]
        broken_B = (~np.isfinite(self.feature_BKF).all(2) & in_draft_BK).any(1)
        kept_B = self._best(survival_BK, made_B, len(rows), drafting=False, causal=draft.q_BKV is not None)
        return np.where(broken_B, made_B, self._explored(rows, kept_B, made_B))

    def _explored(self, rows: np.ndarray, length_B: np.ndarray, most_B: np.ndarray) -> np.ndarray:
        """The same, but for one token where none was judged for long: else nothing would be learned any more."""
        idle_B = np.array([self.idle_R[row] for row in rows]) >= EXPLORE
        return np.where(idle_B & (length_B == 0), np.minimum(most_B, 1), length_B)

    def _best(
        self, survival_BK: np.ndarray, most_B: np.ndarray, num_rows: int, drafting: bool, causal: bool = False
    ) -> np.ndarray:
        """[B] lengths. The tokens that may be taken are lined up by their survival, and the best prefix is taken."""
        place_K = np.arange(survival_BK.shape[1])
        row_N, position_N = np.nonzero(place_K < most_B[:, None])
        worth_N = survival_BK[row_N, position_N]
        order = np.lexsort((row_N, position_N, -worth_N))  # of equals the earlier position: each row's taken ones are a prefix
        row_N, position_N, worth_N = row_N[order], position_N[order], worth_N[order]
        rate = self._rate(num_rows)
        if causal:
            count = causal_count(worth_N, rate * self._hull_slope(num_rows, len(worth_N)))
        else:
            seconds_N = self._verify_seconds(num_rows)[: len(worth_N) + 1]
            if drafting:
                taken_NK = np.zeros((len(worth_N) + 1, len(place_K)), dtype=np.int64)
                taken_NK[np.arange(1, len(worth_N) + 1), position_N] = 1
                share = self.paid / max(self.asked, 1e-9)
                seconds_N = seconds_N + share * self.round_KR[place_K, taken_NK.cumsum(0)].sum(1)
            count = int(np.argmax(np.concatenate([[0.0], worth_N.cumsum()]) - rate * seconds_N))
        return np.bincount(row_N[:count], minlength=len(most_B))

    def _verify_seconds(self, num_rows: int) -> np.ndarray:
        """[n + 1] of steps of so many rows, by the number of draft tokens."""
        if num_rows not in self.verify_s:
            self.verify_s[num_rows] = self.table.verify(num_rows, num_rows + np.arange(num_rows * self.most + 1))
        return self.verify_s[num_rows]

    def _hull_slope(self, num_rows: int, count: int) -> np.ndarray:
        """[count] what each further draft token costs by the convex hull."""
        if (num_rows, count) not in self.hull_s:
            self.hull_s[num_rows, count] = np.diff(convex_hull(self._verify_seconds(num_rows)[: count + 1]))
        return self.hull_s[num_rows, count]

    def _recent(self, rows: np.ndarray) -> np.ndarray:
        """[B] log-odds of a token of the row standing, by what happened of late."""
        share = self.stood / self.judged
        stood_B = np.array([self.num_accepted_prev_R[row] for row in rows]) + PRIOR_WEIGHT * share
        judged_B = np.array([self.judged_R[row] for row in rows]) + PRIOR_WEIGHT
        share_B = (stood_B / judged_B).clip(0.01, 0.99)
        return np.log(share_B / (1 - share_B))

    def _rate(self, num_rows: int) -> float:
        """Tokens per second at this batch size; without experience, those of plain decoding."""
        if num_rows not in self.made:
            self.made[num_rows] = [4.0 * num_rows, 4.0 * float(self._verify_seconds(num_rows)[0])]
        tokens, seconds = self.made[num_rows]
        return tokens / seconds

    # ---------------------------------------------------------------- learning

    def observe(self, rows: np.ndarray, draft: Draft, accepted_B: np.ndarray) -> None:
        length_B, num_rows = draft.length_B.numpy(), len(rows)
        self._rate(num_rows)
        made = self.made[num_rows]
        rows_K = (self.num_model_drafted_B[:, None] > np.arange(self.most)).sum(0)  # of no row, if nothing was drafted
        seconds = float(self.round_KR[np.arange(self.most), rows_K].sum() + self._verify_seconds(num_rows)[length_B.sum()])
        made[0] = RATE_DECAY * made[0] + float(num_rows + accepted_B.sum())
        made[1] = RATE_DECAY * made[1] + seconds

        judged_B = np.minimum(accepted_B + 1, length_B)
        row_N, position_N = np.nonzero(np.arange(draft.token_BK.shape[1]) < judged_B[:, None])
        if len(row_N):
            stood_N = position_N < accepted_B[row_N]
            feature_NF = self.feature_BKF[row_N, position_N]
            self.pre_draft.add(feature_NF[:, :1], position_N, stood_N)
            if self.post_draft is not None:
                self.post_draft.add(feature_NF, position_N, stood_N)
        for row, stood, judged in zip(rows.tolist(), np.minimum(accepted_B, length_B), judged_B, strict=True):
            self.num_accepted_prev_R[row] = DECAY * self.num_accepted_prev_R[row] + stood
            self.judged_R[row] = DECAY * self.judged_R[row] + judged
            self.idle_R[row] = 0 if judged else self.idle_R[row] + 1
        self.stood = RATE_DECAY * self.stood + float(np.minimum(accepted_B, length_B).sum())
        self.judged = RATE_DECAY * self.judged + float(judged_B.sum())
        if self.judged < PRIOR_WEIGHT:  # nothing was drafted for long
            self.stood += PRIOR_ACCEPTANCE * (PRIOR_WEIGHT - self.judged)
            self.judged = PRIOR_WEIGHT
        self.num_model_drafted_B = np.zeros(0, dtype=np.int64)


def drafts_are_free(table: CostTable, most: int) -> bool:
    """Whether drafting costs next to nothing, as looking up does, so that only verification is to be weighed."""
    return table.draft([most]) < FREE * float(table.verify(1, 1))


def causal_count(worth_N: np.ndarray, price_N: np.ndarray) -> int:
    """How many tokens to take without looking past any of them: all before the first that is worth less than its price.

    worth_N: descending, a row's tokens in their order. So whether a token is taken hangs on its row's tokens before it, whose
    draws are settled, and on other rows. price_N must not fall: prices are those of the convex hull of the costs, in which a
    jump that pays with more tokens behind it is paid in parts.
    """
    too_dear_N = worth_N < price_N
    return int(too_dear_N.argmax()) if too_dear_N.any() else len(worth_N)


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
