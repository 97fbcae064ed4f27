"""Counting: every ratio by hand on small histograms, and the cost model against its vectors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.core import RequestStats
from specdec.measure import bench, records, stats
from specdec.measure.report import run as run_report
from specdec.model.device import Timer
from specdec.model.target import CausalLM
from specdec.policy import profiling

VECTORS = Path(__file__).parents[1] / "vectors" / "verification.json"
SPEEDUP_CASES = json.loads(VECTORS.read_text())["speedup_cases"]


def request(
    drafted: list[int],
    accepted: list[int],
    emitted: list[int] | None = None,
    draft_s: float = 1.0,
    verify_s: float = 2.0,
    batch_size: int = 1,
) -> RequestStats:
    """A request's lists; by default a step emits what it accepted and one token more."""
    request_stats = RequestStats(decode_s=10.0)
    for d, a, e in zip(drafted, accepted, emitted or [a + 1 for a in accepted], strict=True):
        request_stats.add(d, a, e, draft_s, verify_s, batch_size)
    return request_stats


# Ragged drafts and steps without any: lengths 0, 3, 0, 2, 3, 1; accepted 0, 3, 0, 1, 0, 1.
RAGGED = request([0, 3, 0, 2, 3, 1], [0, 3, 0, 1, 0, 1])


# ------------------------------------------------------------------------------------------------- derive


def test_histogram_is_length_by_accepted() -> None:
    want = np.zeros((4, 4), dtype=np.int64)
    want[0, 0] = 2
    want[3, 3] = 1
    want[2, 1] = 1
    want[3, 0] = 1
    want[1, 1] = 1
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
    """Position 1, the second: two drafts got there with a token to verify (lengths 3 and 2), one was accepted.
    The draft of length 1 never had a second token: it counts against the unconditional rate only."""
    got = stats.acceptance_metrics(RAGGED.histogram(), 11)
    assert got["num_accepted_per_position"] == [3, 1, 1]
    assert got["num_reached_per_position"] == [4, 2, 1]
    assert got["acceptance_rate_per_position"] == [3 / 4, 1 / 4, 1 / 4]
    assert got["conditional_acceptance_per_position"] == [3 / 4, 1 / 2, 1.0]


def test_with_full_drafts_conditional_rates_are_ratios_of_unconditional_ones() -> None:
    got = stats.acceptance_metrics(request([3] * 8, [0, 1, 1, 2, 2, 2, 3, 3]).histogram(), 22)
    rates = got["acceptance_rate_per_position"]
    assert rates == [7 / 8, 5 / 8, 2 / 8]
    ratios = [rate / before for rate, before in zip(rates, [1.0, *rates], strict=False)]
    assert got["conditional_acceptance_per_position"] == pytest.approx(ratios)
    # E of a step is 1 + the sum of the unconditional rates, and that is vLLM's mean acceptance length
    assert stats.expected_tokens(rates) == pytest.approx(got["mean_acceptance_length"])


def test_a_rate_without_a_count_is_none() -> None:
    never_second = stats.acceptance_metrics(request([2, 2], [0, 0]).histogram(), 2)
    assert never_second["conditional_acceptance_per_position"] == [0.0, None]
    assert never_second["acceptance_rate_per_position"] == [0.0, 0.0]

    no_drafts = stats.acceptance_metrics(request([0, 0], [0, 0]).histogram(), 2)
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
    joined = request(*([x for request_stats in many for x in getattr(request_stats, key)] for key in lists))
    pooled = stats.pool(many)
    want = stats.request_metrics(joined)
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
    estimate = stats.mean_over_requests(many, "tokens_per_step")
    values = [stats.request_metrics(s)["tokens_per_step"] for s in many]
    assert estimate is not None
    assert estimate["mean"] == pytest.approx(np.mean(values))
    assert estimate["num_requests"] == 30
    assert min(values) <= estimate["low"] < estimate["mean"] < estimate["high"] <= max(values)
    # 1.96 standard errors either way, roughly
    half = 1.96 * np.std(values) / np.sqrt(30)
    assert estimate["high"] - estimate["low"] == pytest.approx(2 * half, rel=0.1)
    assert stats.mean_over_requests(many, "tokens_per_step") == estimate, "seeded: the same every time"
    four_times = stats.mean_over_requests(many * 4, "tokens_per_step")
    assert four_times is not None
    assert (estimate["high"] - estimate["low"]) / (four_times["high"] - four_times["low"]) == pytest.approx(2, rel=0.1)


def test_bootstrap_leaves_out_requests_without_the_number() -> None:
    many = [request([2], [1]), request([0], [0])]
    estimate = stats.mean_over_requests(many, "draft_acceptance_rate")
    assert estimate == {"mean": 0.5, "low": 0.5, "high": 0.5, "num_requests": 1}
    assert stats.mean_over_requests([many[1]], "draft_acceptance_rate") is None
    assert stats.mean_over_requests([], "tokens_per_step") is None


# --------------------------------------------------------------------------------------------------- time


def test_row_share_seconds_divide_a_step_by_its_rows() -> None:
    """Two rows decode one step of 3 s together, then one of them another of 3 s alone: 6 s in all, not 9."""
    together = [RequestStats(), RequestStats()]
    for request_stats in together:
        request_stats.add(2, 1, 2, 1.0, 2.0, batch_size=2)
    together[0].add(2, 0, 1, 1.0, 2.0, batch_size=1)
    assert stats.row_share_seconds(together, "draft_s") == 2.0
    assert stats.row_share_seconds(together, "verify_s") == 4.0
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


# --------------------------------------------------------------------------------------------------- trees

# node 0 has the children 1 and 3, node 1 the child 4; node 2 is a leaf beside node 0
PARENTS = [-1, 0, -1, 0, 1]


def tree_request(*accepted_nodes: list[int], parents: list[int] = PARENTS) -> RequestStats:
    request_stats = RequestStats()
    for nodes in accepted_nodes:
        request_stats.add(len(parents), len(nodes), len(nodes) + 1, 1.0, 2.0, 1, draft_parents=parents, accepted_nodes=nodes)
    return request_stats


def test_conditional_rates_of_trees_count_where_there_was_a_child() -> None:
    """Of four trees three get to depth 1; one of them is at node 2, after which nothing was drafted. Of the two at depth 2 one
    is at node 3, a leaf, while the tree is deeper elsewhere."""
    got = stats.request_metrics(tree_request([], [2], [0, 3], [0, 1, 4]))
    assert got["num_accepted_per_position"] == [3, 2, 1]
    assert got["num_reached_per_position"] == [4, 2, 1]
    assert got["conditional_acceptance_per_position"] == [3 / 4, 1.0, 1.0]
    assert got["acceptance_rate_per_position"] == [3 / 4, 2 / 4, 1 / 4]


def test_survival_of_a_tree_is_by_node() -> None:
    """1 + the sum over the first n nodes is the tokens per step that trees of these n nodes would have had."""
    accepted = ([], [2], [0, 3], [0, 1, 4])
    survival_K, draft_share_K, num_steps = stats.survival([tree_request(*accepted)], [100], 5)
    assert num_steps == 4
    assert draft_share_K == [1.0] * 5
    for num_nodes in range(1, 6):
        within = [sum(node < num_nodes for node in nodes) for nodes in accepted]  # paths go through lower numbers first
        assert stats.expected_tokens(survival_K[:num_nodes]) == 1 + sum(within) / 4


def test_survival_of_trees_leaves_out_those_that_the_end_cut() -> None:
    """They are 3 deep: with fewer than 3 tokens and the bonus token to come, a path may have been cut."""
    *_, num_steps = stats.survival([tree_request([0, 1, 4], [0, 1, 4], [])], [10], 5)
    assert num_steps == 2


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
    request_stats = request([0, 2], [0, 2], draft_s=0.1)
    predicted = stats.predicted_speedup([request_stats], lambda n: {1: 1.0, 3: 1.4}[n], step_s=0.5)
    assert predicted == pytest.approx(2 / (1.2 + 0.2))
    assert stats.predicted_speedup([RequestStats()], lambda n: 1.0, 0.5) is None


def test_predicted_speedup_is_the_ideal_one_for_full_drafts_at_its_costs() -> None:
    request_stats = request([3] * 4, [0, 1, 3, 3], draft_s=3 * 0.05)
    survival = stats.request_metrics(request_stats)["acceptance_rate_per_position"]
    want = stats.ideal_speedup(survival, verify_cost=1.3, draft_cost=0.05)
    assert stats.predicted_speedup([request_stats], lambda n: 1.3 if n == 4 else 1.0, step_s=1.0) == pytest.approx(want)


def test_a_step_time_shared_by_rows_is_not_divided_in_the_prediction() -> None:
    """v and the plain step are of the whole batch, so the draft time of a step is too."""
    requests = [request([2], [2], draft_s=0.2, batch_size=2) for _ in range(2)]
    assert stats.predicted_speedup(requests, lambda n: 1.0, step_s=1.0) == pytest.approx(3 / 1.2)


def test_the_model_at_batch_size_two_takes_draft_and_plain_step_from_whole_steps() -> None:
    """Plain steps of 2 rows take 1 s, a draft 0.2 s, and three tokens come of each step: 3 / 1.2 whatever the batch size."""
    requests = {str(i): request([2], [2], draft_s=0.2, verify_s=1.0, batch_size=2) for i in range(2)}
    plain = {str(i): request([0] * 3, [0] * 3, draft_s=0.0, verify_s=1.0, batch_size=2) for i in range(2)}
    overall = run_report.summarize(requests, plain, dict.fromkeys(requests, "all"), lambda n: 1.0)["overall"]
    assert overall["speedup_model"] == pytest.approx(3 / 1.2)
    assert overall["speedup"] == pytest.approx(3 / 1.2)
    assert overall["efficiency"] == pytest.approx(1.0)


# ----------------------------------------------------------------------------------------- times on a busy machine


def timed(tokens: int, wall_s: float, cpu_s: float, drafted: int = 0) -> RequestStats:
    """A request of one step."""
    request_stats = RequestStats()
    request_stats.add(drafted, tokens - 1, tokens, 0.0, wall_s, 1, cpu_s=cpu_s)
    return request_stats


def test_a_row_that_lacks_any_statistic_is_refused_by_name(tmp_path: Path) -> None:
    """As one of a run by an older version; what is written of the statistics is what is looked for."""
    statistics = {field.name: [] if field.default_factory is list else 0.0 for field in dataclasses.fields(RequestStats)}
    row = {"id": "a", "category": "b", "num_prompt_tokens": 1, "output_token_ids": [1], "sampling": {}} | statistics
    records.check_rows([row], tmp_path / "requests.jsonl")
    assert records.stats_of(row) == RequestStats()
    later = {"draft_token_ids", "draft_parents", "accepted_nodes"}
    old = {key: value for key, value in row.items() if key not in later}
    records.check_rows([old], tmp_path / "requests.jsonl")
    assert records.stats_of(old) == RequestStats(), "rows of a version that did not record the drafts are read"
    for key in statistics.keys() - later:
        with pytest.raises(ValueError, match=rf"requests.jsonl, line 1: {key}.*move the file away"):
            records.check_rows([{k: v for k, v in row.items() if k != key}], tmp_path / "requests.jsonl")


def test_speedup_by_wall_and_cpu_time_with_an_interval() -> None:
    plain = [timed(1, 2.0, 1.0) for _ in range(8)]
    requests = [timed(2, 1.0, 1.0) for _ in range(8)]
    assert stats.speedup(requests, plain) == {"ratio": 4.0, "low": 4.0, "high": 4.0, "cpu_ratio": 2.0}
    few = stats.speedup(requests[:7], plain[:7])
    assert few is not None
    assert few["ratio"] == 4.0
    assert few["low"] is few["high"] is None, "seven requests are too few for an interval"
    mixed = stats.speedup([timed(2, 1.0, 1.0), timed(1, 2.0, 2.0)] * 8, [timed(1, 1.0, 1.0)] * 16)
    assert mixed is not None
    assert mixed["ratio"] == 1.0
    assert mixed["low"] is not None
    assert mixed["high"] is not None
    assert mixed["low"] < 0.9 < 1.15 < mixed["high"]
    assert stats.speedup([], []) is None
    assert stats.speedup([RequestStats()], [RequestStats()]) is None


def test_a_ratio_of_rates_is_of_paired_requests() -> None:
    """Requests of very different length: the pairs agree, so there is no doubt about the ratio."""
    amount = np.array([1.0, 10.0, 100.0] * 4)
    seconds = np.array([1.0, 10.0, 100.0] * 4)
    got = stats.ratio_of_rates(amount, seconds, amount, seconds / 2)
    assert got["ratio"] == pytest.approx(2.0)
    assert (got["low"], got["high"]) == pytest.approx((2.0, 2.0))


def test_what_says_that_the_machine_was_busy() -> None:
    calm = {"ngram": 1.02, "none": 1.01}
    assert stats.busy_reasons({"all": (1.2, 1.24)}, calm) == []
    assert stats.busy_reasons({"all": (None, None)}, {"ngram": None}) == []
    assert stats.busy_reasons({"all": (6.4, 1.24)}, calm) == ["speedup 6.40 of all is above the ideal 1.24"]
    assert stats.busy_reasons({}, {"ngram": 1.3, "none": 1.3}) == ["wall / CPU time is 1.30 of ngram, 1.30 of none"]
    # two threads: CPU time is more than wall time, and one side waited for the machine
    assert stats.busy_reasons({}, {"ngram": 0.55, "none": 0.8})
    assert not stats.busy_reasons({}, {"ngram": 0.55, "none": 0.6})


def test_a_busy_run_says_so_and_shows_the_ratio_by_cpu_time() -> None:
    """As reported: a plain pass that another process held up, and a category with a speedup no drafter can have."""
    requests = {str(i): timed(2, 1.0, 1.0, drafted=2) for i in range(9)}
    plain = {str(i): timed(1, 3.2 if i < 3 else 0.55, 0.5) for i in range(9)}
    summary = run_report.summarize(requests, plain, {i: "chat" if int(i) < 3 else "code" for i in requests}, lambda n: 1.0)
    assert summary["categories"]["chat"]["speedup"] == pytest.approx(6.4)
    reasons = run_report.busy_reasons(summary, "ngram", True)
    assert any(reason.startswith("speedup 6.40 of chat is above the ideal 2.00") for reason in reasons)
    assert any(reason.startswith("wall / CPU time is 1.00 of ngram, 2.87 of none") for reason in reasons)
    assert run_report.busy_note(reasons, summary["overall"]["speedup_cpu"]).endswith("by CPU time the speedup is 1.00")
    assert not any("CPU" in reason for reason in run_report.busy_reasons(summary, "ngram", False))
    _, speed = run_report.tables(summary | {"busy": reasons}, "title")
    assert [column.header for column in speed.columns].count("by CPU time") == 1
    assert not [
        column for column in run_report.tables(summary | {"busy": []}, "title")[1].columns if column.header == "by CPU time"
    ]


def test_a_prediction_is_never_above_the_ideal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a forward of more tokens may be measured to take less time; it is held to take no less."""
    target = CausalLM("tiny-llama", "float32", "cpu")
    forward = target.forward
    lengths = []

    class Falling(Timer):
        def seconds(self) -> list[float]:
            return [1.0 / lengths[-1]]

    def counted(cache: Any, tokens: Any, start_B: np.ndarray, length_B: np.ndarray) -> Any:
        lengths.append(int(length_B[0]))
        return forward(cache, tokens, start_B, length_B)

    monkeypatch.setattr(profiling, "Timer", Falling)
    monkeypatch.setattr(target, "forward", counted)
    verify_s = profiling.verify_seconds(target, 1, 4, context=8, repeats=1)
    assert [verify_s(n) for n in (1, 2, 3, 4)] == sorted(verify_s(n) for n in (1, 2, 3, 4))
    request_stats = request([3] * 4, [0, 1, 3, 3], draft_s=0.0)
    model = stats.predicted_speedup([request_stats], lambda n: verify_s(n) / verify_s(1), step_s=1.0)
    assert model is not None
    assert model <= stats.request_metrics(request_stats)["tokens_per_step"]


def test_of_many_weights_a_part_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MOST_READ", 4096)
    monkeypatch.setattr(bench.time, "perf_counter", iter([10.0, 10.5, 20.0, 20.5]).__next__)
    for num_bytes, seconds in ((1024, 0.5), (3 * 4096, 1.5)):
        memory = bench.MemoryRead(num_bytes)
        assert memory.numbers.nbytes == min(num_bytes, 4096)
        assert (memory.num_bytes, memory.seconds()) == (num_bytes, seconds)


def test_nobody_is_fastest_inside_the_noise() -> None:
    ones = [1.0] * 16
    plain = ones
    seconds = {
        "none": plain,
        "noisy": [0.4, 1.5] * 8,  # faster in the mean, and by as much slower as faster
        "clear": [0.5, 0.52] * 8,
        "close": [0.49, 0.54] * 8,
    }
    amounts = dict.fromkeys(seconds, ones)
    assert stats.fastest(seconds, amounts, "none", ["noisy"]) == (None, [])
    assert stats.fastest(seconds, amounts, "none", ["noisy", "clear", "close"]) == ("clear", ["close"])
    assert stats.fastest(seconds, amounts, "none", []) == (None, []), "who drafted nothing is no candidate"
    faster = {**seconds, "close": [0.3, 0.31] * 8}
    assert stats.fastest(faster, amounts, "none", ["clear"]) == ("clear", []), "close is faster beyond the noise"
    few = {name: values[:7] for name, values in seconds.items()}
    assert stats.fastest(few, dict.fromkeys(few, ones[:7]), "none", ["clear"]) == (None, [])


def test_means_over_categories_and_over_requests_are_not_the_pooled_one() -> None:
    """Pooled: (3 + 1) / 5 drafts; by category: 1 + 3 and 1 + 1 / 4, each once; by request: 1 + 3, 1 + 1 / 2 and 1 twice."""
    run = {"a": request([3], [3]), "b": request([1, 1], [1, 0]), "c": request([1, 1], [0, 0])}
    summary = run_report.summarize(run, {}, {"a": "x", "b": "y", "c": "y"}, None)
    assert summary["overall"]["mean_acceptance_length"] == pytest.approx(1 + 4 / 5)
    assert summary["mean_over_categories"] == pytest.approx(
        {"mean_acceptance_length": (4 + 1.25) / 2, "tokens_per_step": 2.625}
    )
    assert summary["overall"]["mean_acceptance_length_over_requests"]["mean"] == pytest.approx((4 + 1.5 + 1) / 3)
    table = run_report.tables(summary | {"busy": []}, "title")[0]
    cells = dict(zip(table.columns[0].cells, table.columns[2].cells, strict=True))
    assert (cells["all"], cells["mean of categories"], cells["mean of requests"]) == ("1.80", "2.62", "2.17")


def test_running_rates_are_those_of_the_pooled_requests() -> None:
    rates = stats.RunningRates()
    assert str(rates) == ""
    requests = [RequestStats(), RequestStats()]
    requests[0].add(3, 2, 3, 0.1, 0.4, 1)
    requests[0].add(0, 0, 1, 0.0, 0.5, 1)
    requests[1].add(3, 0, 1, 0.1, 0.9, 2)
    for each in requests:
        rates.add(each)
    length = stats.pool(requests)["mean_acceptance_length"]
    assert str(rates) == f"mean acceptance length {length:.2f}, {stats.decode_tokens_per_s(requests):.3g} tokens/s"
