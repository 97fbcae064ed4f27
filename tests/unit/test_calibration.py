"""What a drafter says of its own acceptance: measures, temperatures, and that its word is what verification goes by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.core import Draft
from specdec.policy import calibration
from specdec.policy.adaptive import Adaptive, causal_count
from specdec.policy.calibration import ConfidenceRecorder
from specdec.policy.cost_table import CostTable

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "block_drafters.json").read_text())


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def simulated(temperature_K: list[float], num_drafts: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Log-odds that are wrong by these factors, and what happened."""
    rng = np.random.default_rng(0)
    log_odds_NK = rng.normal(1.0, 1.5, (num_drafts, len(temperature_K)))
    happened_NK = rng.random(log_odds_NK.shape) < sigmoid(log_odds_NK / np.array(temperature_K))
    log_odds_NK[: num_drafts // 4, -1] = np.nan  # shorter drafts
    return log_odds_NK, happened_NK.cumprod(1).astype(bool)


def test_temperatures_are_found_again() -> None:
    true_K = [2.0, 0.5, 1.0]
    table = simulated(true_K)
    fitted_K = calibration.fit_temperatures(*table)
    np.testing.assert_allclose(fitted_K, true_K, rtol=0.2)
    before = calibration.quality(*table, np.ones(3))
    after = calibration.quality(*table, fitted_K)
    assert after["confidence_calibration_error"] < 0.015 < 0.035 < before["confidence_calibration_error"]
    assert after["confidence_auc"] > 0.7


def test_a_position_that_nobody_drafted_is_left_alone() -> None:
    log_odds_NK, survived_NK = simulated([2.0, 1.0])
    log_odds_NK[:, 1] = np.nan
    assert calibration.fit_temperatures(log_odds_NK, survived_NK)[1] == 1


def test_the_measures_in_words() -> None:
    rng = np.random.default_rng(3)
    p_N = rng.integers(0, 12, 300) / 11  # with ties
    happened_N = rng.random(300) < p_N
    pairs = [(a > b) + (a == b) / 2 for a in p_N[happened_N] for b in p_N[~happened_N]]
    assert calibration.area_under_curve(p_N, happened_N) == pytest.approx(np.mean(pairs))
    error = 0.0
    for low in np.arange(15) / 15:
        inside = (p_N >= low) & ((p_N < low + 1 / 15) | (low == 14 / 15))
        if inside.any():
            error += inside.mean() * abs(p_N[inside].mean() - happened_N[inside].mean())
    assert calibration.calibration_error(p_N, happened_N) == pytest.approx(error)
    assert np.isnan(calibration.area_under_curve(p_N, np.ones(300, dtype=bool)))


def test_a_recorder_keeps_drafts_of_every_length() -> None:
    recorder = ConfidenceRecorder()
    confidence = torch.arange(6.0).view(2, 3, 1)
    draft = Draft(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 1]), confidence_BKF=confidence)
    assert recorder.verify_lengths(np.arange(2), draft).tolist() == [3, 1]
    recorder.observe(np.arange(2), draft, np.array([2, 0]))
    log_odds_NK, survived_NK = recorder.table()
    np.testing.assert_array_equal(log_odds_NK, [[0, 1, 2], [3, np.nan, np.nan]])
    assert survived_NK.tolist() == [[True, True, False], [False, False, False]]


@pytest.mark.parametrize("case", VECTORS["confidence_scheduler"]["cases"])
def test_lengths_follow_the_drafters_own_word(case: str) -> None:
    """The vector's three requests: without learning anything, what is verified is the best of all lengths at these speeds; and
    for sampled drafts the rule that never looks past a token."""
    vector = VECTORS["confidence_scheduler"]
    speeds = {int(n): speed for n, speed in vector["cases"][case]["steps_per_second"].items()}
    seconds_N = np.array([1 / speeds[n] for n in sorted(speeds)])
    confidence = np.array(vector["confidence"])
    log_odds = torch.from_numpy(np.log(confidence / (1 - confidence))).float().unsqueeze(-1)
    free = CostTable([3], [0, 4], [[1.0, 1.0]], [[0.0, 0.0]], {})
    policy = Adaptive(free, 4, 3, auto=False, prunes=True, num_confidence_features=1, predicts_acceptance=True)
    for row in range(3):
        policy.on_start(row)
    policy.verify_s[3] = seconds_N
    lengths, rate = vector["cases"][case]["brute_force"]
    policy.output[3] = [rate * 1000, 1000.0]  # what it makes in the long run
    draft = Draft(torch.zeros(3, 4, dtype=torch.int64), torch.full((3,), 4), confidence_BKF=log_odds)
    assert policy.verify_lengths(np.arange(3), draft).tolist() == lengths
    sampled = Draft(draft.token_BK, draft.length_B, torch.full((3, 4, 2), 0.5), confidence_BKF=log_odds)
    survival = np.sort(confidence.cumprod(1).ravel())[::-1]
    price = rate * np.diff(seconds_N)
    got = policy.verify_lengths(np.arange(3), sampled)
    if case == "smooth":  # convex costs: the hull is the costs
        assert got.sum() == causal_count(survival, price)
        assert got.tolist() == lengths


def test_deciding_after_the_draw_would_bias_the_output() -> None:
    """The vector: a token that is kept or dropped for what it is. `causal_count` is given nothing that could do that."""
    vector = VECTORS["retrospective_truncation"]
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()

    def output(is_verified: np.ndarray) -> np.ndarray:
        """Of a sampled token that is verified or dropped."""
        total = np.zeros(2)
        for token in range(2):
            accept = min(1.0, p[token] / q[token])
            verified = accept * np.eye(2)[token] + (1 - accept) * residual
            total += q[token] * (verified if is_verified[token] else p)
        return total

    np.testing.assert_allclose(output(np.array([True, False])), [17 / 20, 3 / 20])
    assert vector["output"] == ["17/20", "3/20"]
    for decision in (True, False):
        np.testing.assert_allclose(output(np.array([decision, decision])), p)
