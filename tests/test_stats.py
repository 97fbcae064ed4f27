"""Counting: every ratio by hand on small histograms, and the cost model against its vectors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specdec import stats
from specdec.core import RequestStats

VECTORS = Path(__file__).parent / "vectors" / "verification.json"
SPEEDUP_CASES = json.loads(VECTORS.read_text())["speedup_cases"]


def request(
    drafted: list[int],
    accepted: list[int],
    emitted: list[int] | None = None,
    draft_s: float = 1.0,
    verify_s: float = 2.0,
    batch_size: int = 1,
) -> RequestStats:
    """A request's lists; unless told, a step emits what it accepted and one token more."""
    own = RequestStats(decode_s=10.0)
    for d, a, e in zip(drafted, accepted, emitted or [a + 1 for a in accepted], strict=True):
        own.add(d, a, e, draft_s, verify_s, batch_size)
    return own


# Ragged drafts and steps without any: lengths 0, 3, 0, 2, 3, 1; accepted 0, 3, 0, 1, 0, 1.
RAGGED = request([0, 3, 0, 2, 3, 1], [0, 3, 0, 1, 0, 1])


# ------------------------------------------------------------------------------------------------- derive


def test_histogram_is_length_by_accepted() -> None:
    want = np.zeros((4, 4), dtype=np.int64)
    want[0, 0], want[3, 3], want[2, 1], want[3, 0], want[1, 1] = 2, 1, 1, 1, 1
    assert (RAGGED.histogram() == want).all()
    wide = RAGGED.histogram(6)
    assert wide.shape == (6, 6)
    assert (wide[:4, :4] == want).all()
    assert wide.sum() == want.sum()


def test_every_number_of_a_ragged_request_by_hand() -> None:
    got = stats.request_metrics(RAGGED)
    assert got["num_steps"] == 6
    assert got["num_drafts"] == 4, "steps without a draft are steps, not drafts"
    assert got["num_draft_tokens"] == 0 + 3 + 0 + 2 + 3 + 1
    assert got["num_accepted_tokens"] == 3 + 1 + 0 + 1
    assert got["num_emitted_tokens"] == 5 + 6
    assert got["num_output_tokens"] == 5 + 6 + 1, "prefill yields a token that belongs to no step"
    assert got["mean_acceptance_length"] == 1 + 5 / 4
    assert got["tokens_per_step"] == 11 / 6
    assert got["draft_acceptance_rate"] == 5 / 9
    assert got["decode_tokens_per_s"] == 11 / 10.0
    assert got["acceptance_histogram"] == RAGGED.histogram().tolist()


def test_unconditional_and_conditional_rates_have_counts_of_their_own() -> None:
    """Position 1, the second: two drafts got there with a token to judge (lengths 3 and 2), one was accepted.
    The draft of length 1 never had a second token: it counts against the unconditional rate only."""
    got = stats.derive(RAGGED.histogram(), 11)
    assert got["num_accepted_per_position"] == [3, 1, 1]
    assert got["num_reached_per_position"] == [4, 2, 1]
    assert got["acceptance_rate_per_position"] == [3 / 4, 1 / 4, 1 / 4]
    assert got["conditional_acceptance_per_position"] == [3 / 4, 1 / 2, 1.0]


def test_with_full_drafts_conditional_rates_are_ratios_of_unconditional_ones() -> None:
    got = stats.derive(request([3] * 8, [0, 1, 1, 2, 2, 2, 3, 3]).histogram(), 22)
    rates = got["acceptance_rate_per_position"]
    assert rates == [7 / 8, 5 / 8, 2 / 8]
    ratios = [rate / before for rate, before in zip(rates, [1.0, *rates], strict=False)]
    assert got["conditional_acceptance_per_position"] == pytest.approx(ratios)
    # E of a step is 1 + the sum of the unconditional rates, and that is vLLM's mean acceptance length
    assert stats.expected_tokens(rates) == pytest.approx(got["mean_acceptance_length"])


def test_a_rate_without_a_count_is_none() -> None:
    never_second = stats.derive(request([2, 2], [0, 0]).histogram(), 2)
    assert never_second["conditional_acceptance_per_position"] == [0.0, None]
    assert never_second["acceptance_rate_per_position"] == [0.0, 0.0]

    no_drafts = stats.derive(request([0, 0], [0, 0]).histogram(), 2)
    assert no_drafts["draft_acceptance_rate"] is None
    assert no_drafts["acceptance_rate_per_position"] == []
    assert no_drafts["mean_acceptance_length"] == 1.0
    assert no_drafts["tokens_per_step"] == 1.0

    no_steps = stats.request_metrics(RequestStats())
    assert no_steps["num_steps"] == 0
    assert no_steps["tokens_per_step"] is None
    assert no_steps["decode_tokens_per_s"] is None
    assert no_steps["num_output_tokens"] == 1


def test_a_stop_inside_a_draft_emits_less_than_accepted_plus_one() -> None:
    """The second of three accepted tokens was the eos: two count as accepted, two are emitted, no bonus."""
    got = stats.request_metrics(request([4, 3], [1, 2], emitted=[2, 2]))
    assert got["num_accepted_tokens"] == 3
    assert got["num_emitted_tokens"] == 4
    assert got["tokens_per_step"] == 2.0
    assert got["mean_acceptance_length"] == 1 + 3 / 2


# ------------------------------------------------------------------------------------------ many requests


def random_requests(count: int, seed: int) -> list[RequestStats]:
    rng = np.random.default_rng(seed)
    many = []
    for _ in range(count):
        drafted = rng.integers(0, 6, rng.integers(1, 9))
        many.append(request(drafted.tolist(), [int(rng.integers(0, d + 1)) for d in drafted]))
    return many


def test_pooled_numbers_are_those_of_the_requests_laid_end_to_end() -> None:
    many = random_requests(7, seed=1)
    lists = ("drafted", "accepted", "emitted")
    joined = request(*([x for own in many for x in getattr(own, key)] for key in lists))
    pooled, want = stats.pool(many), stats.request_metrics(joined)
    assert pooled["num_requests"] == 7
    assert pooled["num_output_tokens"] == want["num_emitted_tokens"] + 7, "one token of prefill for each"
    for key in want:
        if key not in ("num_output_tokens", "decode_tokens_per_s"):
            assert pooled[key] == want[key], key


def test_pooling_requests_of_different_draft_lengths() -> None:
    pooled = stats.pool([request([1, 1], [1, 0]), request([4], [3]), request([0], [0])])
    assert pooled["num_accepted_per_position"] == [2, 1, 1, 0]
    assert pooled["acceptance_rate_per_position"] == [2 / 3, 1 / 3, 1 / 3, 0.0]
    assert pooled["mean_acceptance_length"] == 1 + 4 / 3
    assert stats.pool([])["num_requests"] == 0


def test_pooling_weighs_tokens_and_the_mean_weighs_requests() -> None:
    many = [request([2], [2]), request([2] * 9, [0] * 9)]
    assert stats.pool(many)["tokens_per_step"] == (3 + 9) / 10
    mean = stats.mean_over_requests(many, "tokens_per_step")
    assert mean is not None
    assert mean["mean"] == (3 + 1) / 2


def test_bootstrap_interval() -> None:
    many = random_requests(30, seed=2)
    own = stats.mean_over_requests(many, "tokens_per_step")
    values = [stats.request_metrics(s)["tokens_per_step"] for s in many]
    assert own is not None
    assert own["mean"] == pytest.approx(np.mean(values))
    assert own["num_requests"] == 30
    assert min(values) <= own["low"] < own["mean"] < own["high"] <= max(values)
    # 1.96 standard errors either way, roughly
    half = 1.96 * np.std(values) / np.sqrt(30)
    assert own["high"] - own["low"] == pytest.approx(2 * half, rel=0.1)
    assert stats.mean_over_requests(many, "tokens_per_step") == own, "seeded: the same every time"
    four_times = stats.mean_over_requests(many * 4, "tokens_per_step")
    assert four_times is not None
    assert (own["high"] - own["low"]) / (four_times["high"] - four_times["low"]) == pytest.approx(2, rel=0.1)


def test_bootstrap_leaves_out_requests_without_the_number() -> None:
    many = [request([2], [1]), request([0], [0])]
    own = stats.mean_over_requests(many, "draft_acceptance_rate")
    assert own == {"mean": 0.5, "low": 0.5, "high": 0.5, "num_requests": 1}
    assert stats.mean_over_requests([many[1]], "draft_acceptance_rate") is None
    assert stats.mean_over_requests([], "tokens_per_step") is None


# --------------------------------------------------------------------------------------------------- time


def test_busy_seconds_divide_a_step_among_its_rows() -> None:
    """Two rows decode one step of 3 s together, then one of them another of 3 s alone: 6 s in all, not 9."""
    together = [RequestStats(), RequestStats()]
    for own in together:
        own.add(2, 1, 2, 1.0, 2.0, batch_size=2)
    together[0].add(2, 0, 1, 1.0, 2.0, batch_size=1)
    assert stats.busy_seconds(together, "draft_s") == 2.0
    assert stats.busy_seconds(together, "verify_s") == 4.0
    assert stats.decode_tokens_per_s(together) == (2 + 2 + 1) / 6.0
    assert stats.decode_tokens_per_s([RequestStats()]) is None


# ------------------------------------------------------------------------------------------- vLLM's names


def test_metrics_of_one_answer_have_vllms_names_and_formulas() -> None:
    got = stats.SpecDecodeMetrics.of(RAGGED, 4)
    histogram = [1, 2, 0, 1, 0]  # of the drafts: one had none accepted, two had one, one had three
    assert got.acceptance_histogram == histogram
    assert got.num_spec_tokens == 4
    assert got.num_spec_steps == sum(histogram) == 4
    assert got.num_accepted_draft_tokens == sum(j * n for j, n in enumerate(histogram))
    assert got.num_draft_tokens == 9
    assert got.mean_acceptance_length == 1 + 5 / 4
    assert got.draft_acceptance_rate == 5 / 9
    assert got.per_step_drafted == [3, 2, 3, 1]
    assert got.per_step_accepted == [3, 1, 0, 1]


def test_metrics_where_nothing_was_drafted() -> None:
    """vLLM: an all-zero histogram, length 1.0 and rate 0.0."""
    got = stats.SpecDecodeMetrics.of(request([0, 0], [0, 0]), 3)
    assert got.acceptance_histogram == [0, 0, 0, 0]
    assert (got.num_spec_steps, got.mean_acceptance_length, got.draft_acceptance_rate) == (0, 1.0, 0.0)
    assert got.per_step_drafted == got.per_step_accepted == []


# ----------------------------------------------------------------------------------------- the cost model


@pytest.mark.parametrize("case", SPEEDUP_CASES, ids=lambda case: f"a{case['alpha']}-c{case['c']}")
def test_ideal_speedup_and_best_length_against_the_vectors(case: dict) -> None:
    def survival(k: int) -> list[float]:
        return [case["alpha"] ** i for i in range(1, k + 1)]

    best = stats.best_length(case["alpha"], case["c"])
    assert best == case["gamma_opt"]
    optimum = {"e_tokens": case["e_tokens_opt"], "speedup": case["speedup_opt"]}
    for k, want in {**case["by_gamma"], best: optimum}.items():
        rates = survival(int(k))
        assert stats.expected_tokens(rates) == pytest.approx(want["e_tokens"], rel=1e-12)
        assert stats.ideal_speedup(rates, 1.0, case["c"]) == pytest.approx(want["speedup"], rel=1e-12)


def test_ideal_speedup_pays_for_verification_and_the_rest() -> None:
    assert stats.ideal_speedup([0.5, 0.25], verify_cost=1.2, draft_cost=0.1, other_cost=0.1) == 1.75 / 1.5
    assert stats.ideal_speedup([]) == 1.0


def test_predicted_speedup_by_hand() -> None:
    """Steps draft 0 and 2 tokens, 0.1 s each, where a plain step takes 0.5 s; v(1) = 1 and v(3) = 1.4:
    2 tokens a step (1 and 3) over 1.2 + 0.2."""
    own = request([0, 2], [0, 2], draft_s=0.1)
    predicted = stats.predicted_speedup([own], lambda n: {1: 1.0, 3: 1.4}[n], step_s=0.5)
    assert predicted == pytest.approx(2 / (1.2 + 0.2))
    assert stats.predicted_speedup([RequestStats()], lambda n: 1.0, 0.5) is None


def test_predicted_speedup_is_the_ideal_one_for_full_drafts_at_its_costs() -> None:
    own = request([3] * 4, [0, 1, 3, 3], draft_s=3 * 0.05)
    survival = stats.request_metrics(own)["acceptance_rate_per_position"]
    want = stats.ideal_speedup(survival, verify_cost=1.3, draft_cost=0.05)
    assert stats.predicted_speedup([own], lambda n: 1.3 if n == 4 else 1.0, step_s=1.0) == pytest.approx(want)


def test_a_step_time_shared_by_rows_is_not_divided_in_the_prediction() -> None:
    """v and the plain step are of the whole batch, so the draft time of a step is too."""
    own = [request([2], [2], draft_s=0.2, batch_size=2) for _ in range(2)]
    assert stats.predicted_speedup(own, lambda n: 1.0, step_s=1.0) == pytest.approx(3 / 1.2)
