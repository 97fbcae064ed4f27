"""Counting. The engine appends to lists; every ratio in the project is derived here and nowhere else.

A *step* is one target forward of a request after prefill. Names follow decoding practice: `mean_acceptance_length` is
vLLM's number (bonus token counted, steps without a draft not counted); `tokens_per_step` counts every step and is the one
that predicts speed. Tokens beyond a stop are neither emitted nor counted as accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.core import RequestStats


def derive(histogram: np.ndarray, num_emitted: int) -> dict[str, Any]:
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
    """The per-request numbers of vLLM's `spec_decode_metrics`, under its names: steps without a draft are not counted."""

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
        metrics = derive(stats.histogram(num_speculative_tokens + 1), sum(stats.emitted))
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


def request_metrics(stats: RequestStats) -> dict[str, Any]:
    """The derived numbers of one request."""
    metrics = derive(stats.histogram(), sum(stats.emitted))
    metrics["num_output_tokens"] = metrics["num_emitted_tokens"] + 1
    metrics["decode_tokens_per_s"] = sum(stats.emitted) / stats.decode_s if stats.decode_s > 0 else None
    return metrics


def pool(all_stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Token-weighted numbers of many requests, as if they were one."""
    width = max((max(stats.drafted, default=0) for stats in all_stats), default=0) + 1
    histogram = sum((stats.histogram(width) for stats in all_stats), np.zeros((width, width), dtype=np.int64))
    metrics = derive(histogram, sum(sum(stats.emitted) for stats in all_stats))
    metrics["num_requests"] = len(all_stats)
    metrics["num_output_tokens"] = metrics["num_emitted_tokens"] + len(all_stats)
    return metrics


def mean_over_requests(all_stats: Sequence[RequestStats], key: str, seed: int = 0) -> dict[str, float] | None:
    """Mean of a per-request number with a 95 % bootstrap interval over requests (2000 resamples, seeded)."""
    values = np.array([v for s in all_stats if (v := request_metrics(s)[key]) is not None], dtype=np.float64)
    if not len(values):
        return None
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(2000, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high), "num_requests": len(values)}


def busy_seconds(all_stats: Sequence[RequestStats], key: str) -> float:
    """Seconds of `draft_s` or `verify_s` that the requests account for: a step's time is divided among its rows."""
    return sum(t / n for s in all_stats for t, n in zip(getattr(s, key), s.batch_size, strict=True))


def decode_tokens_per_s(all_stats: Sequence[RequestStats]) -> float | None:
    """Tokens emitted by steps over the time of those steps, each step's time divided among its rows (prefill apart)."""
    seconds = busy_seconds(all_stats, "draft_s") + busy_seconds(all_stats, "verify_s")
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
