"""How well a drafter says what will be accepted, and temperatures with which it says so better.

A drafter may predict that token k of a draft is accepted if all before it are (the confidence head of DSpark, 2607.05147). The
product over a draft's first tokens is their survival, which adaptive verification weighs against costs, so it should be right
on average. Sequential temperature scaling, of that paper, divides the log-odds at each position by a temperature: from the
first position on, the one whose survival has the smallest calibration error, given the temperatures before it.

Letters: N drafts, K positions.
"""

from __future__ import annotations

import numpy as np

from specdec.core import Draft, FixedLengthPolicy

NUM_BINS = 15
TEMPERATURES = np.geomspace(0.2, 5.0, 65)


class ConfidenceRecorder(FixedLengthPolicy):
    """Verifies all drafts, and keeps what was said of their tokens and what became of them."""

    needs_confidence = True

    def __init__(self) -> None:
        self.log_odds: list[np.ndarray] = []  # of every draft, [its length]
        self.num_accepted: list[int] = []

    def observe(self, rows: np.ndarray, draft: Draft, accepted_B: np.ndarray, path_BK: np.ndarray | None = None) -> None:
        if draft.confidence_BKF is None:
            return  # nothing was drafted in this step
        for log_odds_K, length, accepted in zip(
            draft.confidence_BKF[:, :, 0].cpu().numpy(), draft.length_B.tolist(), accepted_B.tolist(), strict=True
        ):
            self.log_odds.append(log_odds_K[:length])
            self.num_accepted.append(accepted)

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """[N, K] log-odds, nan beyond the end of a draft; [N, K] whether a token and all before it were accepted."""
        width = max(map(len, self.log_odds), default=0)
        log_odds_NK = np.full((len(self.log_odds), width), np.nan)
        for row, log_odds_K in zip(log_odds_NK, self.log_odds, strict=True):
            row[: len(log_odds_K)] = log_odds_K
        return log_odds_NK, np.arange(width) < np.array(self.num_accepted, dtype=np.int64)[:, None]


def survival(log_odds_NK: np.ndarray, temperature_K: np.ndarray) -> np.ndarray:
    """[N, K] the predicted probability that a token and all before it are accepted."""
    return (1 / (1 + np.exp(-log_odds_NK / temperature_K))).cumprod(1)


def fit_temperatures(log_odds_NK: np.ndarray, survived_NK: np.ndarray) -> np.ndarray:
    """[K] temperatures; 1 where no draft has that position.

    log_odds_NK, survived_NK: as in `ConfidenceRecorder.table`.
    """
    temperature_K = np.ones(log_odds_NK.shape[1])
    for k in range(len(temperature_K)):
        drafted_N = ~np.isnan(log_odds_NK[:, k])
        if not drafted_N.any():
            continue
        errors = []
        for temperature in TEMPERATURES:
            temperature_K[k] = temperature
            survival_N = survival(log_odds_NK[drafted_N, : k + 1], temperature_K[: k + 1])[:, k]
            errors.append(calibration_error(survival_N, survived_NK[drafted_N, k]))
        temperature_K[k] = TEMPERATURES[int(np.argmin(errors))]
    return temperature_K


def calibration_error(probability_N: np.ndarray, happened_N: np.ndarray) -> float:
    """The expected calibration error: |mean probability - share that happened| in bins of equal width, weighted by their
    numbers."""
    bin_N = np.minimum((probability_N * NUM_BINS).astype(int), NUM_BINS - 1)
    gap_B = np.bincount(bin_N, probability_N - happened_N, NUM_BINS)
    return float(np.abs(gap_B).sum() / len(probability_N))


def area_under_curve(probability_N: np.ndarray, happened_N: np.ndarray) -> float:
    """The chance that what happened was thought likelier than what did not (ROC AUC); nan if all or none happened."""
    _, place_N, count_V = np.unique(probability_N, return_inverse=True, return_counts=True)
    rank_V = np.cumsum(count_V) - (count_V - 1) / 2  # ties share their mean rank
    num_happened = int(happened_N.sum())
    num_others = len(happened_N) - num_happened
    if not num_happened or not num_others:
        return float("nan")
    rank_sum = rank_V[place_N][happened_N].sum()
    return float((rank_sum - num_happened * (num_happened + 1) / 2) / (num_happened * num_others))


def quality(log_odds_NK: np.ndarray, survived_NK: np.ndarray, temperature_K: np.ndarray) -> dict[str, float]:
    """Of the survival of all drafted tokens together."""
    drafted_NK = ~np.isnan(log_odds_NK)
    probability_M = survival(log_odds_NK, temperature_K)[drafted_NK]
    survived_M = survived_NK[drafted_NK]
    return {
        "confidence_calibration_error": calibration_error(probability_M, survived_M),
        "confidence_auc": area_under_curve(probability_M, survived_M),
    }
