"""Counting. The engine appends to lists; acceptance and speed are derived from them here and nowhere else.

A *step* is one target forward of a request after prefill. Names follow decoding practice: `mean_acceptance_length` has
vLLM's formula (bonus token counted, steps without a draft not counted); `tokens_per_step` counts every step and is the one
that predicts speed.

The two differ from vLLM's in a request's last steps only. vLLM drafts K tokens there too, and counts tokens that are accepted
beyond `max_tokens` or a stop. Here a draft is no longer than what may still be emitted, less the bonus token, and tokens beyond
a stop are neither emitted nor counted as accepted. So where n tokens of the answer are still to come, and `max_tokens` would
allow m, a step that vLLM counts as (drafted, accepted) is (d, a) here: d = min(drafted, m - 1), a = min(accepted, d, n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec import tree
from specdec.core import Request, RequestStats
from specdec.params import PLAIN


def acceptance_metrics(
    histogram: np.ndarray, num_emitted: int, num_draft_tokens: int | None = None, num_at_leaf_K: np.ndarray | None = None
) -> dict[str, Any]:
    """Every acceptance number that follows from a histogram [draft length, accepted] and the emitted tokens. The length of a
    tree is that of its longest path, and its positions are depths.

    num_draft_tokens: of trees, their nodes; None: drafts are chains.
    num_at_leaf_K: of trees, by i, how many had i tokens accepted, the last of them without children, and are deeper elsewhere.

    `acceptance_rate_per_position[i]` is unconditional: the share of all drafts whose token i was accepted;
    `conditional_acceptance_per_position[i]`: the share of the drafts that had i tokens accepted and a token after these.
    A rate of nothing is None.
    """
    drafts = histogram[1:]  # row 0 is of steps without a draft
    num_steps = int(histogram.sum())
    num_drafts = int(drafts.sum())
    lengths = np.arange(histogram.shape[0])
    if num_draft_tokens is None:
        num_draft_tokens = int((histogram.sum(1) * lengths).sum())
    num_accepted = int((histogram.sum(0) * lengths).sum())
    num_accepted_K = [int(drafts[:, i + 1 :].sum()) for i in range(len(lengths) - 1)]
    num_reached_K = [int(histogram[i + 1 :, i:].sum()) for i in range(len(lengths) - 1)]
    if num_at_leaf_K is not None:
        num_reached_K = [reached - int(at_leaf) for reached, at_leaf in zip(num_reached_K, num_at_leaf_K, strict=True)]
    return {
        "num_steps": num_steps,
        "num_drafts": num_drafts,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted,
        "num_emitted_tokens": num_emitted,
        "mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else 1.0,
        "tokens_per_step": num_emitted / num_steps if num_steps else None,
        "draft_acceptance_rate": num_accepted / num_draft_tokens if num_draft_tokens else None,
        "acceptance_rate_per_position": [count / num_drafts for count in num_accepted_K] if num_drafts else [],
        "conditional_acceptance_per_position": [
            count / reached if reached else None for count, reached in zip(num_accepted_K, num_reached_K, strict=True)
        ],
        "num_accepted_per_position": num_accepted_K,
        "num_reached_per_position": num_reached_K,
        "acceptance_histogram": histogram.tolist(),
    }


@dataclass
class SpecDecodeMetrics:
    """The per-request numbers of vLLM's `spec_decode_metrics`, under its names: steps without a draft are not counted. How the
    last steps differ: see the module's docstring."""

    num_spec_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # index j: steps with exactly j draft tokens accepted
    per_step_drafted: list[int]
    per_step_accepted: list[int]

    @classmethod
    def of(cls, stats: RequestStats, num_speculative_tokens: int) -> SpecDecodeMetrics:
        histogram = stats.histogram(num_speculative_tokens + 1)
        metrics = acceptance_metrics(histogram, sum(stats.emitted), sum(stats.drafted))
        drafts = [(d, a) for d, a in zip(stats.drafted, stats.accepted, strict=True) if d]
        return cls(
            num_spec_tokens=num_speculative_tokens,
            num_spec_steps=metrics["num_drafts"],
            num_draft_tokens=metrics["num_draft_tokens"],
            num_accepted_draft_tokens=metrics["num_accepted_tokens"],
            mean_acceptance_length=metrics["mean_acceptance_length"],
            draft_acceptance_rate=metrics["draft_acceptance_rate"] or 0.0,
            acceptance_histogram=np.array(metrics["acceptance_histogram"])[1:].sum(0).tolist(),
            per_step_drafted=[d for d, _ in drafts],
            per_step_accepted=[a for _, a in drafts],
        )


@dataclass
class Metric:
    """The name and the labels of a number of vLLM's `LLM.get_metrics`; subclasses have its value."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A sum that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """A sum per draft position."""

    values: list[int]


class Totals:
    """Sums over finished requests, under the names of those vLLM counters that apply here."""

    def __init__(self, model_name: str, num_speculative_tokens: int) -> None:
        self.labels = {"model_name": model_name, "engine": "0"}
        self.num_speculative_tokens = num_speculative_tokens
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_finished = {"stop": 0, "length": 0}
        self.num_draft_tokens = 0
        self.histogram = np.zeros((num_speculative_tokens + 1, num_speculative_tokens + 1), dtype=np.int64)

    def add(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.num_prompt_tokens += len(request.prompt_token_ids)
        self.num_output_tokens += len(request.output_token_ids)
        self.num_finished[request.finish_reason] += 1
        self.num_draft_tokens += sum(request.stats.drafted)
        self.histogram += request.stats.histogram(len(self.histogram))

    def metrics(self) -> list[Metric]:
        metrics: list[Metric] = [
            Counter("vllm:prompt_tokens", dict(self.labels), self.num_prompt_tokens),
            Counter("vllm:generation_tokens", dict(self.labels), self.num_output_tokens),
        ]
        for reason, count in self.num_finished.items():
            metrics.append(Counter("vllm:request_success", {**self.labels, "finished_reason": reason}, count))
        if self.num_speculative_tokens:
            derived = acceptance_metrics(self.histogram, 0, self.num_draft_tokens)
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                metrics.append(Counter(f"vllm:spec_decode_{name}", dict(self.labels), derived[name]))
            per_position = derived["num_accepted_per_position"]
            metrics.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", dict(self.labels), per_position))
        return metrics


def request_metrics(stats: RequestStats) -> dict[str, Any]:
    """The derived numbers of one request."""
    metrics = _counted([stats])
    metrics["num_output_tokens"] = metrics["num_emitted_tokens"] + 1
    metrics["decode_tokens_per_s"] = sum(stats.emitted) / stats.decode_s if stats.decode_s > 0 else None
    return metrics


def pool(all_stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Token-weighted numbers of many requests, as if they were one."""
    metrics = _counted(all_stats)
    metrics["num_requests"] = len(all_stats)
    metrics["num_output_tokens"] = metrics["num_emitted_tokens"] + len(all_stats)
    return metrics


def _counted(all_stats: Sequence[RequestStats]) -> dict[str, Any]:
    width = max((max(stats.depths, default=0) for stats in all_stats), default=0) + 1
    histogram = sum((stats.histogram(width) for stats in all_stats), np.zeros((width, width), dtype=np.int64))
    num_at_leaf_K = sum((stats.ends_at_leaf(width - 1) for stats in all_stats), np.zeros(width - 1, dtype=np.int64))
    num_emitted = sum(sum(stats.emitted) for stats in all_stats)
    num_draft_tokens = sum(sum(stats.drafted) for stats in all_stats)
    return acceptance_metrics(histogram, num_emitted, num_draft_tokens, num_at_leaf_K) | tree_metrics(all_stats)


def tree_metrics(all_stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Numbers of drafts that are trees; empty if none is.

    nodes_per_draft, depth_per_draft: means over the steps that drafted.
    num_accepted_off_first_path: accepted tokens that are no node of the path that always goes to the first child.
    """
    num_drafts = 0
    num_nodes = 0
    total_depth = 0
    num_off = 0
    for stats in all_stats:
        for parents, accepted, depth in zip(stats.draft_parents, stats.accepted_nodes, stats.depths, strict=False):
            num_drafts += bool(parents)
            num_nodes += len(parents)
            total_depth += depth
            if accepted:
                is_first = tree.is_first_child(np.array([parents]))[0, accepted]
                num_off += len(accepted) - int(is_first.cumprod().sum())
    if not num_drafts:
        return {}
    return {
        "nodes_per_draft": num_nodes / num_drafts,
        "depth_per_draft": total_depth / num_drafts,
        "num_accepted_off_first_path": num_off,
    }


def by_proposer(all_stats: Sequence[RequestStats]) -> dict[str, dict[str, Any]]:
    """The numbers of each component of a composed method over the steps that it drafted, in the order of first appearance;
    under PLAIN those of steps without a draft. `output_share`: of all emitted tokens. Empty if not composed."""
    components: dict[str, RequestStats] = {}
    for stats in all_stats:
        for step, name in enumerate(stats.proposer):
            component = components.setdefault(name or PLAIN, RequestStats())
            component.drafted.append(stats.drafted[step])
            component.accepted.append(stats.accepted[step])
            component.emitted.append(stats.emitted[step])
            component.draft_parents += stats.draft_parents[step : step + 1]
            component.accepted_nodes += stats.accepted_nodes[step : step + 1]
    total = sum(sum(component.emitted) for component in components.values())
    return {
        name: _counted([component]) | {"output_share": sum(component.emitted) / total if total else None}
        for name, component in components.items()
    }


def mean_over_requests(all_stats: Sequence[RequestStats], key: str, seed: int = 0) -> dict[str, float] | None:
    """Mean of a per-request number with a 95 % bootstrap interval over requests (2000 resamples, seeded)."""
    values = np.array([v for s in all_stats if (v := request_metrics(s)[key]) is not None], dtype=np.float64)
    if not len(values):
        return None
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(2000, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high), "num_requests": len(values)}


def mean_over_categories(categories: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """The macro mean of a number: every category counts alike, however many steps it has; None if a category has none."""
    values = [numbers[key] for numbers in categories]
    return float(np.mean(values)) if values and None not in values else None


def row_share_seconds(all_stats: Sequence[RequestStats], key: str) -> float:
    """The requests' share of `draft_s`, `verify_s` or `cpu_s`: a step's time is divided among its rows."""
    return sum(_row_share(s, getattr(s, key)) for s in all_stats)


def step_seconds(all_stats: Sequence[RequestStats]) -> float:
    """The requests' share of the time of their steps, which prefill is no part of."""
    return row_share_seconds(all_stats, "draft_s") + row_share_seconds(all_stats, "verify_s")


def decode_tokens_per_s(all_stats: Sequence[RequestStats]) -> float | None:
    """Tokens emitted by steps over the time of those steps, each step's time divided among its rows (prefill not counted)."""
    seconds = step_seconds(all_stats)
    return sum(sum(s.emitted) for s in all_stats) / seconds if seconds > 0 else None


class RunningRates:
    """Acceptance and speed of the requests that have finished so far, for progress. `str` of it is empty before the first."""

    def __init__(self) -> None:
        self._drafts = self._accepted = self._emitted = 0
        self._seconds = 0.0

    def add(self, stats: RequestStats) -> None:
        self._drafts += sum(drafted > 0 for drafted in stats.drafted)
        self._accepted += sum(stats.accepted)
        self._emitted += sum(stats.emitted)
        self._seconds += step_seconds([stats])

    def __str__(self) -> str:
        parts = [f"mean acceptance length {1 + self._accepted / self._drafts:.2f}"] if self._drafts else []
        parts += [f"{self._emitted / self._seconds:.3g} tokens/s"] if self._seconds else []
        return ", ".join(parts)


def survival(
    all_stats: Sequence[RequestStats], budgets: Sequence[int], num_speculative_tokens: int
) -> tuple[list[float], list[float], int]:
    """Of steps whose draft nothing cut short: P(the step has i draft tokens and all are accepted), P(it has i draft tokens),
    for i = 1 .. K, and the number of such steps. Of trees: P(it has i nodes and the i-th is accepted). Their nodes are ordered
    so that the first n are the tree of n nodes, so that in both cases 1 + the sum up to n is the tokens per step of n.

    A step whose drafter found no draft counts, with 0 tokens. Steps whose draft the request's end or a policy cut are left out.

    all_stats: of the requests.
    budgets: tokens that each request may emit.
    num_speculative_tokens: K.
    """
    num_accepted_K = np.zeros(num_speculative_tokens, dtype=np.int64)
    num_drafted_K = np.zeros(num_speculative_tokens, dtype=np.int64)
    num_steps = 0
    has_trees = any(stats.draft_parents for stats in all_stats)
    longest = max((max(stats.depths, default=0) for stats in all_stats), default=0) if has_trees else num_speculative_tokens
    for stats, budget in zip(all_stats, budgets, strict=True):
        left = budget - 1
        nodes_of_steps = stats.accepted_nodes or [list(range(accepted)) for accepted in stats.accepted]
        steps = zip(stats.drafted, nodes_of_steps, stats.emitted, stats.trimmed, strict=True)
        for drafted, nodes, emitted, pruned in steps:
            # a token beyond a stop is not counted as accepted, which does not mean that the drafter was wrong
            stopped = emitted <= len(nodes)
            if left - 1 >= longest and not pruned and not stopped:
                num_accepted_K[nodes] += 1
                num_drafted_K[:drafted] += 1
                num_steps += 1
            left -= emitted
    if not num_steps:
        return [], [], 0
    return (num_accepted_K / num_steps).tolist(), (num_drafted_K / num_steps).tolist(), num_steps


def expected_tokens(survival: Sequence[float]) -> float:
    """E[tokens of a step] = 1 + sum of P(the first i draft tokens are all accepted)."""
    return 1 + float(sum(survival))


def ideal_speedup(
    survival: Sequence[float], verify_cost: float = 1.0, draft_cost: float = 0.0, other_cost: float = 0.0
) -> float:
    """Speedup over plain decoding that a cost model predicts: E / (v(K+1) + K c + o). Leviathan et al. 2211.17192 has v = 1
    and o = 0.

    survival: unconditional acceptance per position.
    verify_cost: v, a forward of K + 1 tokens in units of one of 1 token.
    draft_cost: c, one drafted token in the same unit.
    other_cost: o, everything else of a step.
    """
    return expected_tokens(survival) / (verify_cost + len(survival) * draft_cost + other_cost)


def best_length(acceptance: float, draft_cost: float, limit: int = 64) -> int:
    """The number of draft tokens that maximises Leviathan's speedup for an acceptance rate that is the same everywhere."""
    speedups = [ideal_speedup([acceptance**i for i in range(1, k + 1)], 1.0, draft_cost) for k in range(1, limit + 1)]
    return int(np.argmax(speedups)) + 1


def predicted_speedup(all_stats: Sequence[RequestStats], verify_cost: Callable[[int], float], step_s: float) -> float | None:
    """The cost model applied to the drafts of a run: tokens per step over the mean of (v(drafted + 1) + draft time).

    verify_cost: v(n), measured in this run; step_s: seconds of a plain step (v = 1) at the same batch size. None: no steps.
    """
    drafted = np.array([d for s in all_stats for d in s.drafted])
    if not len(drafted):
        return None
    verify = np.mean([verify_cost(int(d) + 1) for d in drafted])
    draft = np.mean([t for s in all_stats for t in s.draft_s]) / step_s
    emitted = np.mean([e for s in all_stats for e in s.emitted])
    return float(emitted / (verify + draft))


def efficiency(speedup: float | None, predicted: float | None) -> float | None:
    """The speedup as a share of what the cost model predicts."""
    return speedup / predicted if speedup and predicted else None


# ---------------------------------------------------------------- under load


@dataclass
class RequestTiming:
    """A finished request of a run under load; all latencies are measured from arrival_s.

    arrival_s: when the request was due, in seconds from the start of the run.
    added_s: when it was added to the engine, which is later if a step was running.
    """

    arrival_s: float
    added_s: float
    stats: RequestStats

    @property
    def admitted_s(self) -> float:
        return self.added_s + self.stats.queue_s

    @property
    def first_token_s(self) -> float:
        return self.admitted_s + self.stats.time_to_first_token_s

    @property
    def finished_s(self) -> float:
        return self.first_token_s + self.stats.decode_s

    @property
    def num_output_tokens(self) -> int:
        return 1 + sum(self.stats.emitted)

    @property
    def time_to_first_token(self) -> float:
        """Waiting for the end of a step, waiting for a row, and prefill."""
        return self.first_token_s - self.arrival_s

    @property
    def end_to_end(self) -> float:
        return self.finished_s - self.arrival_s

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first; None if there are none."""
        emitted = sum(self.stats.emitted)
        return self.stats.decode_s / emitted if emitted else None

    def tokens_between(self, begin_s: float, end_s: float) -> int:
        """Output tokens in [begin_s, end_s)."""
        at = self.first_token_s + np.concatenate([[0.0], np.cumsum(self.stats.wall_s)])
        count = np.array([1, *self.stats.emitted])
        return int(count[(at >= begin_s) & (at < end_s)].sum())


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, 90th and 99th percentile (linear between the two nearest), and the largest."""
    if not len(values):
        return None
    median, p90, p99 = np.quantile(np.asarray(values, dtype=float), [0.5, 0.9, 0.99])
    return {
        "mean": float(np.mean(values)),
        "median": float(median),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(np.max(values)),
    }


def batch_size_share(all_stats: Sequence[RequestStats]) -> dict[int, float]:
    """Share of steps by their rows. A step of n rows is in the lists of n requests, and counts 1/n in each."""
    steps: dict[int, float] = {}
    for stats in all_stats:
        for rows in stats.batch_size:
            steps[rows] = steps.get(rows, 0.0) + 1 / rows
    total = sum(steps.values())
    return {rows: steps[rows] / total for rows in sorted(steps)}


def wasted_share(all_stats: Sequence[RequestStats]) -> float | None:
    """Share of the drafted tokens, verified or pruned, that were not accepted. None if none was drafted."""
    drafted = sum(sum(s.drafted) + sum(s.trimmed) for s in all_stats)
    return 1 - sum(sum(s.accepted) for s in all_stats) / drafted if drafted else None


def serving_metrics(timings: Sequence[RequestTiming], begin_s: float = 0.0, end_s: float | None = None) -> dict[str, Any]:
    """Latencies of the requests that arrived in [begin_s, end_s), and the throughput of all requests in that time.

    inter_token_s has the gaps between the tokens of a request as they are emitted: several at once, one gap per step (vLLM's
    ITL); time_per_output_token_s is per request, over its tokens (TPOT).

    timings: of all finished requests.
    begin_s, end_s: seconds from the start of the run; None: up to the last token.
    """
    last_token_s = max((timing.finished_s for timing in timings), default=begin_s)
    until_s = last_token_s if end_s is None else end_s
    seconds = until_s - begin_s
    # the last token of all belongs to the time that it ends
    exclusive_end_s = np.nextafter(until_s, np.inf) if end_s is None else until_s
    num_tokens = sum(timing.tokens_between(begin_s, exclusive_end_s) for timing in timings)
    num_finished = sum(begin_s <= timing.finished_s < exclusive_end_s for timing in timings)
    arrived = [timing for timing in timings if begin_s <= timing.arrival_s and (end_s is None or timing.arrival_s < end_s)]
    arrived_stats = [timing.stats for timing in arrived]
    last_arrival_s = max((timing.arrival_s for timing in arrived), default=begin_s)
    offered_s = last_arrival_s - begin_s if end_s is None else seconds
    share = batch_size_share(arrived_stats)
    return {
        "begin_s": begin_s,
        "end_s": until_s,
        "offered_requests_per_s": len(arrived) / offered_s if offered_s > 0 else None,
        "requests_per_s": num_finished / seconds if seconds > 0 else None,
        "output_tokens_per_s": num_tokens / seconds if seconds > 0 else None,
        "time_to_first_token_s": percentiles([timing.time_to_first_token for timing in arrived]),
        "inter_token_s": percentiles([gap for stats in arrived_stats for gap in stats.wall_s]),
        "time_per_output_token_s": percentiles([t for timing in arrived if (t := timing.time_per_output_token) is not None]),
        "end_to_end_s": percentiles([timing.end_to_end for timing in arrived]),
        "waiting_s": percentiles([timing.admitted_s - timing.arrival_s for timing in arrived]),
        "batch_size_share": share,
        "mean_batch_size": sum(rows * part for rows, part in share.items()) if share else None,
        "wasted_share": wasted_share(arrived_stats),
        **pool(arrived_stats),
    }


def by_phase(timings: Sequence[RequestTiming], phases: Sequence[tuple[float, float]], cut: bool) -> dict[str, dict[str, Any]]:
    """`serving_metrics` of each phase of the request rate, by its name.

    timings: of all finished requests.
    phases: (seconds, requests per second) of each phase.
    cut: requests stopped arriving before the phases ended, so the last phase ends with the last token and later ones are left
        out; else a phase has its full length although no request arrives.
    """
    last_token_s = max((timing.finished_s for timing in timings), default=0.0)
    metrics: dict[str, dict[str, Any]] = {}
    begin_s = 0.0
    for seconds, rate in phases:
        end_s = begin_s + seconds
        if cut and begin_s >= last_token_s:
            break
        ends_early = cut and last_token_s < end_s
        end_text = f"{round(last_token_s, 3) if ends_early else end_s:g}"
        metrics[f"{begin_s:g} to {end_text} s at {rate:g}/s"] = serving_metrics(timings, begin_s, None if ends_early else end_s)
        begin_s = end_s
    return metrics


# ---------------------------------------------------------------- comparing times


MIN_REQUESTS = 8  # an interval over fewer is meaningless
BUSY_RATIO = 1.25  # a process with more wall time than this many times its CPU time shared the machine


def ratio_of_sums(base_s: Sequence[float], seconds: Sequence[float], seed: int = 0) -> dict[str, float]:
    """sum(base_s) / sum(seconds) of paired numbers, such as seconds of the same requests, with a 95 % bootstrap interval over
    pairs (2000 resamples, seeded)."""
    return ratio_of_rates(np.ones(len(base_s)), base_s, np.ones(len(seconds)), seconds, seed)


def ratio_of_rates(
    base_amount: Sequence[float] | np.ndarray,
    base_s: Sequence[float] | np.ndarray,
    amount: Sequence[float] | np.ndarray,
    seconds: Sequence[float] | np.ndarray,
    seed: int = 0,
) -> dict[str, float]:
    """Speedup over the baseline: (sum amount / sum seconds) over the same of the baseline, with a 95 % bootstrap interval over
    the entries, which are paired (2000 resamples, seeded).

    base_amount: [n] work of each request, such as its tokens, of the baseline.
    base_s: [n] seconds of each request, of the baseline.
    amount, seconds: [n] the same of the method.
    seed: of the resamples.
    """
    values = np.array([base_s, seconds, amount, base_amount], dtype=np.float64)
    indices = np.random.default_rng(seed).integers(values.shape[1], size=(2000, values.shape[1]))
    total = values.sum(1)
    resampled = values[:, indices].sum(2)
    with np.errstate(divide="ignore", invalid="ignore"):  # requests of a single token have no decoding time
        low, high = np.nanquantile(resampled[0] / resampled[1] * (resampled[2] / resampled[3]), [0.025, 0.975])
    ratio = total[0] / total[1] * (total[2] / total[3])
    return {"ratio": float(ratio), "low": float(low), "high": float(high)}


def speedup(all_stats: Sequence[RequestStats], base_stats: Sequence[RequestStats]) -> dict[str, float | None] | None:
    """Tokens per second of decoding (prefill not counted) over those of the baseline, of the same prompts in the same order.

    ratio: by wall time; low, high: its 95 % interval, None for fewer than MIN_REQUESTS; cpu_ratio: by CPU time. The result is
    None if there is no time to compare.
    """
    sides = (base_stats, all_stats)
    emitted = [[sum(s.emitted) for s in side] for side in sides]
    wall_s = [[_row_share(s, s.draft_s) + _row_share(s, s.verify_s) for s in side] for side in sides]
    cpu_s = [[_row_share(s, s.cpu_s) for s in side] for side in sides]
    if min(map(sum, wall_s), default=0.0) <= 0 or min(map(sum, cpu_s)) <= 0:
        return None
    by_wall = ratio_of_rates(emitted[0], wall_s[0], emitted[1], wall_s[1])
    by_cpu = ratio_of_rates(emitted[0], cpu_s[0], emitted[1], cpu_s[1])
    enough = len(all_stats) >= MIN_REQUESTS
    return {
        "ratio": by_wall["ratio"],
        "low": by_wall["low"] if enough else None,
        "high": by_wall["high"] if enough else None,
        "cpu_ratio": by_cpu["ratio"],
    }


def _row_share(stats: RequestStats, seconds: Sequence[float]) -> float:
    """A request's share of the seconds of its steps, each divided among the rows of the step."""
    return sum(t / n for t, n in zip(seconds, stats.batch_size, strict=True))


def engine_seconds(stats: RequestStats) -> float:
    """A request's share of the engine's time: its prefill, and its share of every step."""
    return stats.prefill_s + step_seconds([stats])


def engine_cpu_seconds(stats: RequestStats) -> float:
    """`engine_seconds` in CPU time."""
    return stats.prefill_cpu_s + _row_share(stats, stats.cpu_s)


def wall_over_cpu(all_stats: Sequence[RequestStats]) -> float | None:
    """Wall time of the steps over the process's CPU time in them; with several threads it may be below 1. None: no steps."""
    cpu_s = row_share_seconds(all_stats, "cpu_s")
    return step_seconds(all_stats) / cpu_s if cpu_s > 0 else None


def busy_reasons(speedups: Mapping[str, tuple[float | None, float | None]], shares: Mapping[str, float | None]) -> list[str]:
    """Why measured times cannot be trusted, a phrase for each reason; empty if they can.

    speedups: (measured, ideal) of each part of the work. In the ideal, drafts and verification are free; batches that empty at
        different moments can lead to 5 % more.
    shares: `wall_over_cpu` of each side that was timed. More than BUSY_RATIO, or BUSY_RATIO times that of another side, means
        that other processes used the machine.
    """
    reasons = [
        f"speedup {measured:.2f} of {name} is above the ideal {ideal:.2f}"
        for name, (measured, ideal) in speedups.items()
        if measured is not None and ideal is not None and measured > 1.05 * ideal
    ]
    known = {name: share for name, share in shares.items() if share is not None}
    if known and (max(known.values()) > BUSY_RATIO or max(known.values()) > BUSY_RATIO * min(known.values())):
        reasons.append("wall / CPU time is " + ", ".join(f"{share:.2f} of {name}" for name, share in known.items()))
    return reasons


def fastest(
    seconds: Mapping[str, Sequence[float]], amounts: Mapping[str, Sequence[float]], plain: str, candidates: Sequence[str]
) -> tuple[str | None, list[str]]:
    """The fastest run, if it is faster than plain decoding beyond the noise, and runs that the noise does not tell from it.

    seconds, amounts: [n] time and work of each of the same n requests, by run.
    plain: the run without speculation.
    candidates: runs that may be the fastest.
    Returns (the fastest candidate, or None if its 95 % interval over plain decoding reaches down to 1 or there are fewer than
    MIN_REQUESTS requests; runs whose 95 % interval against it includes 1).
    """

    def over(name: str, base: str) -> dict[str, float]:
        return ratio_of_rates(amounts[base], seconds[base], amounts[name], seconds[name])

    if not candidates or len(seconds[plain]) < MIN_REQUESTS:
        return None, []
    best = max(candidates, key=lambda name: over(name, plain)["ratio"])
    if over(best, plain)["low"] <= 1:
        return None, []
    ratios = {name: over(best, name) for name in seconds if name not in (best, plain)}
    return best, [name for name, ratio in ratios.items() if ratio["low"] <= 1 <= ratio["high"]]
