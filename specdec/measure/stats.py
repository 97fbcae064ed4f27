"""Counting. The engine appends to lists; every ratio in the project is derived here and nowhere else.

A *step* is one target forward of a request after prefill. Names follow decoding practice: `mean_acceptance_length` has
vLLM's formula (bonus token counted, steps without a draft not counted); `tokens_per_step` counts every step and is the one
that predicts speed.

Its value is vLLM's but for a request's last steps. vLLM drafts K tokens there too, and counts those that are accepted beyond
`max_tokens` or a stop. Here a draft is no longer than what may still be emitted, less the bonus token, and what lies beyond a
stop is neither emitted nor counted as accepted. So where n tokens of the answer are still to come, and `max_tokens` would allow
m, a step that vLLM counts as (drafted, accepted) is (d, a) here: d = min(drafted, m - 1), a = min(accepted, d, n).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.core import Request, RequestStats
from specdec.params import PLAIN


def acceptance_metrics(histogram: np.ndarray, num_emitted: int) -> dict[str, Any]:
    """Every acceptance number that follows from a histogram [draft length, accepted] and the emitted tokens.

    `acceptance_rate_per_position[i]` is unconditional: of all drafts, how many had token i accepted;
    `conditional_acceptance_per_position[i]`: of the drafts that hold a token i and had the i before it accepted.
    A rate without any count behind it is None.
    """
    drafts = histogram[1:]
    num_steps, num_drafts = int(histogram.sum()), int(drafts.sum())
    lengths = np.arange(histogram.shape[0])
    num_draft_tokens = int((histogram.sum(1) * lengths).sum())
    num_accepted = int((histogram.sum(0) * lengths).sum())
    accepted_at = [int(drafts[:, i + 1 :].sum()) for i in range(len(lengths) - 1)]
    reached_at = [int(histogram[i + 1 :, i:].sum()) for i in range(len(lengths) - 1)]
    return {
        "num_steps": num_steps,
        "num_drafts": num_drafts,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": num_accepted,
        "num_emitted_tokens": num_emitted,
        "mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else 1.0,
        "tokens_per_step": num_emitted / num_steps if num_steps else None,
        "draft_acceptance_rate": num_accepted / num_draft_tokens if num_draft_tokens else None,
        "acceptance_rate_per_position": [count / num_drafts for count in accepted_at] if num_drafts else [],
        "conditional_acceptance_per_position": [
            count / reached if reached else None for count, reached in zip(accepted_at, reached_at, strict=True)
        ],
        "num_accepted_per_position": accepted_at,
        "num_reached_per_position": reached_at,
        "acceptance_histogram": histogram.tolist(),
    }


@dataclass
class SpecDecodeMetrics:
    """The per-request numbers of vLLM's `spec_decode_metrics`, under its names: steps without a draft are not counted. The last
    steps are counted as the module's docstring says."""

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
        metrics = acceptance_metrics(stats.histogram(num_speculative_tokens + 1), sum(stats.emitted))
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
    """One number, with the name and the labels that vLLM's `LLM.get_metrics` has for it; a subclass says what it is."""

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
    """Sums over finished requests under the names of vLLM's counters, for what there is of them here."""

    def __init__(self, model_name: str, num_speculative_tokens: int) -> None:
        self.labels = {"model_name": model_name, "engine": "0"}
        self.num_speculative_tokens = num_speculative_tokens
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.num_finished = {"stop": 0, "length": 0}
        self.histogram = np.zeros((num_speculative_tokens + 1, num_speculative_tokens + 1), dtype=np.int64)

    def add(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.num_prompt_tokens += len(request.prompt_token_ids)
        self.num_output_tokens += len(request.output_token_ids)
        self.num_finished[request.finish_reason] += 1
        self.histogram += request.stats.histogram(len(self.histogram))

    def metrics(self) -> list[Metric]:
        found: list[Metric] = [
            Counter("vllm:prompt_tokens", dict(self.labels), self.num_prompt_tokens),
            Counter("vllm:generation_tokens", dict(self.labels), self.num_output_tokens),
        ]
        for reason, count in self.num_finished.items():
            found.append(Counter("vllm:request_success", {**self.labels, "finished_reason": reason}, count))
        if self.num_speculative_tokens:
            derived = acceptance_metrics(self.histogram, 0)
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                found.append(Counter(f"vllm:spec_decode_{name}", dict(self.labels), derived[name]))
            per_position = derived["num_accepted_per_position"]
            found.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", dict(self.labels), per_position))
        return found


def request_metrics(stats: RequestStats) -> dict[str, Any]:
    """The derived numbers of one request."""
    metrics = acceptance_metrics(stats.histogram(), sum(stats.emitted))
    metrics["num_output_tokens"] = metrics["num_emitted_tokens"] + 1
    metrics["decode_tokens_per_s"] = sum(stats.emitted) / stats.decode_s if stats.decode_s > 0 else None
    return metrics


def pool(all_stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Token-weighted numbers of many requests, as if they were one."""
    width = max((max(stats.drafted, default=0) for stats in all_stats), default=0) + 1
    histogram = sum((stats.histogram(width) for stats in all_stats), np.zeros((width, width), dtype=np.int64))
    metrics = acceptance_metrics(histogram, sum(sum(stats.emitted) for stats in all_stats))
    metrics["num_requests"] = len(all_stats)
    metrics["num_output_tokens"] = metrics["num_emitted_tokens"] + len(all_stats)
    return metrics


def by_proposer(all_stats: Sequence[RequestStats]) -> dict[str, dict[str, Any]]:
    """Of a composed method: the numbers of each part over the steps whose draft it made, in the order of first appearance, and
    under `none` those of the steps in which nobody drafted. `output_share`: of all emitted tokens. Empty if not composed."""
    own: dict[str, RequestStats] = {}
    for stats in all_stats:
        for step in zip(stats.proposer, stats.drafted, stats.accepted, stats.emitted, strict=bool(stats.proposer)):
            part = own.setdefault(step[0] or PLAIN, RequestStats())
            for numbers, value in zip((part.drafted, part.accepted, part.emitted), step[1:], strict=True):
                numbers.append(value)
    total = sum(sum(part.emitted) for part in own.values())
    return {
        name: acceptance_metrics(part.histogram(), sum(part.emitted))
        | {"output_share": sum(part.emitted) / total if total else None}
        for name, part in own.items()
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


def row_share_seconds(all_stats: Sequence[RequestStats], key: str) -> float:
    """Seconds of `draft_s`, `verify_s` or `cpu_s` that the requests account for: a step's time is divided among its rows."""
    return sum(_row_share(s, getattr(s, key)) for s in all_stats)


def decode_tokens_per_s(all_stats: Sequence[RequestStats]) -> float | None:
    """Tokens emitted by steps over the time of those steps, each step's time divided among its rows (prefill apart)."""
    seconds = row_share_seconds(all_stats, "draft_s") + row_share_seconds(all_stats, "verify_s")
    return sum(sum(s.emitted) for s in all_stats) / seconds if seconds > 0 else None


def survival(
    all_stats: Sequence[RequestStats], budgets: Sequence[int], num_speculative_tokens: int
) -> tuple[list[float], list[float], int]:
    """Of steps whose draft nothing cut short: P(the step has i draft tokens and all stand), P(it has i draft tokens), for
    i = 1 .. K, and how many such steps there are.

    budgets: most tokens that each request could emit; a draft that its end cut, or of which a part was not verified, is left
    out. A step in which the drafter found nothing to offer counts, with no tokens.
    """
    drafted, accepted = [], []
    for stats, budget in zip(all_stats, budgets, strict=True):
        left = budget - 1
        for made, stood, emitted, trimmed in zip(stats.drafted, stats.accepted, stats.emitted, stats.trimmed, strict=True):
            # a token beyond a stop is not counted as accepted, which says nothing of the drafter
            stopped = emitted <= stood
            if left - 1 >= num_speculative_tokens and not trimmed and not stopped:
                drafted.append(made)
                accepted.append(stood)
            left -= emitted
    places = np.arange(1, num_speculative_tokens + 1)
    if not drafted:
        return [], [], 0
    stood_K = (np.array(accepted)[:, None] >= places).mean(0)
    reach_K = (np.array(drafted)[:, None] >= places).mean(0)
    return stood_K.tolist(), reach_K.tolist(), len(drafted)


def expected_tokens(survival: Sequence[float]) -> float:
    """E[tokens of a step] = 1 + sum of P(the first i draft tokens all stand)."""
    return 1 + float(sum(survival))


def ideal_speedup(
    survival: Sequence[float], verify_cost: float = 1.0, draft_cost: float = 0.0, other_cost: float = 0.0
) -> float:
    """Speedup over plain decoding that a cost model predicts: E / (v(K+1) + K c + o).

    survival: unconditional acceptance per position; verify_cost: v, a forward of K + 1 tokens in units of one of 1 token;
    draft_cost: c, one drafted token in the same unit; other_cost: everything else of a step. Leviathan et al. 2211.17192
    has v = 1 and o = 0.
    """
    return expected_tokens(survival) / (verify_cost + len(survival) * draft_cost + other_cost)


def best_length(acceptance: float, draft_cost: float, limit: int = 64) -> int:
    """The number of draft tokens that maximises Leviathan's speedup for an acceptance rate that is the same everywhere."""
    speedups = [ideal_speedup([acceptance**i for i in range(1, k + 1)], 1.0, draft_cost) for k in range(1, limit + 1)]
    return int(np.argmax(speedups)) + 1


def predicted_speedup(all_stats: Sequence[RequestStats], verify_cost: Callable[[int], float], step_s: float) -> float | None:
    """The cost model on what was drafted: tokens per step over the mean of (v(drafted + 1) + draft time).

    verify_cost: v(n), measured in this run; step_s: seconds of a plain step (v = 1) at the same batch size. None: no steps.
    """
    drafted = np.array([d for s in all_stats for d in s.drafted])
    if not len(drafted):
        return None
    verify = np.mean([verify_cost(int(d) + 1) for d in drafted])
    draft = np.mean([t for s in all_stats for t in s.draft_s]) / step_s
    emitted = np.mean([e for s in all_stats for e in s.emitted])
    return float(emitted / (verify + draft))


# ---------------------------------------------------------------- under load


@dataclass
class RequestTiming:
    """A finished request of a run under load, in seconds from its start. arrival_s: when the request was due; added_s: when the
    engine was given it, which is later if it was in the middle of a step. Everything is measured from arrival_s."""

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
        """Waiting for a step's end, for a row, and the prefill."""
        return self.first_token_s - self.arrival_s

    @property
    def end_to_end(self) -> float:
        return self.finished_s - self.arrival_s

    @property
    def time_per_output_token(self) -> float | None:
        """Of the tokens after the first; None if there are none."""
        emitted = sum(self.stats.emitted)
        return self.stats.decode_s / emitted if emitted else None

    def tokens_between(self, begin_s: float, end_s: float) -> int:
        """Output tokens that came in [begin_s, end_s)."""
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
    """Share of steps by their rows. A step of n rows stands in the lists of n requests, and counts 1/n in each."""
    steps: dict[int, float] = {}
    for stats in all_stats:
        for rows in stats.batch_size:
            steps[rows] = steps.get(rows, 0.0) + 1 / rows
    total = sum(steps.values())
    return {rows: steps[rows] / total for rows in sorted(steps)}


def wasted_share(all_stats: Sequence[RequestStats]) -> float | None:
    """Of the tokens that were drafted, verified or not, how many came to nothing. None if none was drafted."""
    made = sum(sum(s.drafted) + sum(s.trimmed) for s in all_stats)
    return 1 - sum(sum(s.accepted) for s in all_stats) / made if made else None


def serving_metrics(served: Sequence[RequestTiming], begin_s: float = 0.0, end_s: float | None = None) -> dict[str, Any]:
    """Numbers of the requests that arrived in [begin_s, end_s), and what came out of the engine in that time, of whichever
    request. end_s None: up to the last token.

    inter_token_s has the gaps between the tokens of a request as they come: in pieces, one per step (as vLLM's ITL);
    time_per_output_token_s is per request, over its tokens (TPOT).
    """
    last = max((one.finished_s for one in served), default=begin_s)
    until = last if end_s is None else end_s
    own = [one for one in served if begin_s <= one.arrival_s and (end_s is None or one.arrival_s < end_s)]
    seconds = until - begin_s
    # the last token of all belongs to the time that it ends
    inside = np.nextafter(until, np.inf) if end_s is None else until
    tokens = sum(one.tokens_between(begin_s, inside) for one in served)
    finished = sum(begin_s <= one.finished_s < inside for one in served)
    own_stats = [one.stats for one in own]
    came = max((one.arrival_s for one in own), default=begin_s) - begin_s if end_s is None else seconds
    share = batch_size_share(own_stats)
    return {
        "begin_s": begin_s,
        "end_s": until,
        "offered_requests_per_s": len(own) / came if came > 0 else None,
        "requests_per_s": finished / seconds if seconds > 0 else None,
        "output_tokens_per_s": tokens / seconds if seconds > 0 else None,
        "time_to_first_token_s": percentiles([one.time_to_first_token for one in own]),
        "inter_token_s": percentiles([gap for stats in own_stats for gap in stats.wall_s]),
        "time_per_output_token_s": percentiles([t for one in own if (t := one.time_per_output_token) is not None]),
        "end_to_end_s": percentiles([one.end_to_end for one in own]),
        "waiting_s": percentiles([one.admitted_s - one.arrival_s for one in own]),
        "batch_size_share": share,
        "mean_batch_size": sum(rows * part for rows, part in share.items()) if share else None,
        "wasted_share": wasted_share(own_stats),
        **pool(own_stats),
    }


def by_phase(served: Sequence[RequestTiming], phases: Sequence[tuple[float, float]], cut: bool) -> dict[str, dict[str, Any]]:
    """`serving_metrics` for each of the (seconds, requests per second). cut: the requests ended before the phases did, so the last
    phase ends with the last token, and those after it never were; else a phase lasts although nobody comes any more."""
    last = max((one.finished_s for one in served), default=0.0)
    found, begin_s = {}, 0.0
    for seconds, rate in phases:
        end_s = begin_s + seconds
        if cut and begin_s >= last:
            break
        ends = cut and last < end_s
        own = serving_metrics(served, begin_s, None if ends else end_s)
        found[f"{begin_s:g} to {round(last, 3) if ends else end_s:g} s at {rate:g}/s"] = own
        begin_s = end_s
    return found


# ---------------------------------------------------------------- comparing times


MIN_REQUESTS = 8  # an interval over fewer says nothing
BUSY = 1.25  # a process whose wall time is beyond this many times its CPU time had to share the machine


def ratio_of_sums(base: Sequence[float], own: Sequence[float], seed: int = 0) -> dict[str, float]:
    """sum(base) / sum(own) of paired numbers, such as seconds of the same requests, with a 95 % bootstrap interval over pairs
    (2000 resamples, seeded)."""
    return ratio_of_rates(np.ones(len(base)), base, np.ones(len(own)), own, seed)


def ratio_of_rates(
    base_amount: Sequence[float] | np.ndarray,
    base_s: Sequence[float] | np.ndarray,
    amount: Sequence[float] | np.ndarray,
    seconds: Sequence[float] | np.ndarray,
    seed: int = 0,
) -> dict[str, float]:
    """How many times as fast as the baseline: (sum amount / sum seconds) over the same of the baseline, with a 95 % bootstrap
    interval over the entries, which are paired (2000 resamples, seeded).

    base_amount, amount: [n] what was done, such as tokens, of each request; base_s, seconds: [n] the time it took.
    """
    values = np.array([base_s, seconds, amount, base_amount], dtype=np.float64)
    pick = np.random.default_rng(seed).integers(values.shape[1], size=(2000, values.shape[1]))
    whole, resampled = values.sum(1), values[:, pick].sum(2)
    with np.errstate(divide="ignore", invalid="ignore"):  # requests of a single token have no decoding time
        low, high = np.nanquantile(resampled[0] / resampled[1] * (resampled[2] / resampled[3]), [0.025, 0.975])
    ratio = whole[0] / whole[1] * (whole[2] / whole[3])
    return {"ratio": float(ratio), "low": float(low), "high": float(high)}


def speedup(own: Sequence[RequestStats], base: Sequence[RequestStats]) -> dict[str, float | None] | None:
    """Tokens per second of decoding (prefill apart) over those of the baseline, which had the same prompts in the same order.

    ratio: by wall time; low, high: its 95 % interval, None for fewer than MIN_REQUESTS; cpu_ratio: by CPU time. None in all
    where there is no time to compare.
    """
    emitted = [[sum(s.emitted) for s in side] for side in (base, own)]
    wall_s = [[_row_share(s, s.draft_s) + _row_share(s, s.verify_s) for s in side] for side in (base, own)]
    cpu_s = [[_row_share(s, s.cpu_s) for s in side] for side in (base, own)]
    if min(map(sum, wall_s), default=0.0) <= 0 or min(map(sum, cpu_s)) <= 0:
        return None
    by_wall, by_cpu = (ratio_of_rates(emitted[0], seconds[0], emitted[1], seconds[1]) for seconds in (wall_s, cpu_s))
    enough = len(own) >= MIN_REQUESTS
    return {
        "ratio": by_wall["ratio"],
        "low": by_wall["low"] if enough else None,
        "high": by_wall["high"] if enough else None,
        "cpu_ratio": by_cpu["ratio"],
    }


def _row_share(stats: RequestStats, seconds: Sequence[float]) -> float:
    """What a request accounts for of its steps' seconds."""
    return sum(t / n for t, n in zip(seconds, stats.batch_size, strict=True))


def engine_seconds(stats: RequestStats) -> float:
    """Time of the engine that a request accounts for: its prefill, and its share of every step."""
    return stats.prefill_s + _row_share(stats, stats.draft_s) + _row_share(stats, stats.verify_s)


def engine_cpu_seconds(stats: RequestStats) -> float:
    """`engine_seconds` in CPU time."""
    return stats.prefill_cpu_s + _row_share(stats, stats.cpu_s)


def wall_over_cpu(all_stats: Sequence[RequestStats]) -> float | None:
    """Wall time of the steps over the process's CPU time in them; with several threads it may be below 1. None: no steps."""
    cpu_s = row_share_seconds(all_stats, "cpu_s")
    return (row_share_seconds(all_stats, "draft_s") + row_share_seconds(all_stats, "verify_s")) / cpu_s if cpu_s > 0 else None


def busy_reasons(speedups: Mapping[str, tuple[float | None, float | None]], shares: Mapping[str, float | None]) -> list[str]:
    """Why measured times are not to be trusted, in words; empty if nothing speaks against them.

    speedups: (measured, ideal) of each part of the work, where ideal has drafts and verification for nothing; 5 % above it may
    come of batches that empty at different moments. shares: `wall_over_cpu` of each side that was timed. A side that waited
    for the machine more than a quarter of its CPU time, or a quarter more than another side, says that others used it.
    """
    reasons = [
        f"speedup {measured:.2f} of {name} is above the ideal {ideal:.2f}"
        for name, (measured, ideal) in speedups.items()
        if measured is not None and ideal is not None and measured > 1.05 * ideal
    ]
    known = {name: share for name, share in shares.items() if share is not None}
    if known and (max(known.values()) > BUSY or max(known.values()) > BUSY * min(known.values())):
        reasons.append("wall / CPU time is " + ", ".join(f"{share:.2f} of {name}" for name, share in known.items()))
    return reasons


def fastest(
    seconds: Mapping[str, Sequence[float]], amounts: Mapping[str, Sequence[float]], plain: str, candidates: Sequence[str]
) -> tuple[str | None, list[str]]:
    """Who is faster than plain decoding beyond the noise, and whom else the noise does not tell from it.

    seconds, amounts: [n] time and work of each of the same n requests, by run; candidates: runs that may win.
    Returns (the fastest candidate, or None if its 95 % interval over plain decoding reaches down to 1 or there are fewer than
    MIN_REQUESTS requests; runs of which it is neither faster nor slower beyond the noise).
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
