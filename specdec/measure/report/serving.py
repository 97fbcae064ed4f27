"""Tables and plot of a run under load."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdec.measure import stats
from specdec.measure.report.figure import integer_ticks, log_scale, saved_figure
from specdec.measure.report.table import median_and_p99, new_table, number, percent
from specdec.measure.stats import RequestTiming


def load_tables(summary: dict[str, Any], title: str) -> list[Table]:
    """Throughput and latency, a line per phase of the request rate and one for all."""
    throughput_caption = (
        "offered, served: requests per second. A phase has the throughput of all requests in its time. batch: mean rows of a "
        "step; wasted: share of the draft tokens that were not accepted."
    )
    latency_caption = (
        "median / 99th percentile, from when a request was due, waiting included, of the requests that arrived in the phase. "
        "TTFT: time to first token; ITL: inter-token latency, the gaps between the tokens of a request, of which a step may "
        "emit several at once; TPOT: time per output token; E2E: end-to-end latency; MAL: mean acceptance length."
    )
    heads = ["requests", "offered /s", "served /s", "tokens/s", "batch", "wasted"]
    throughput = new_table(title, ["phase"], heads, throughput_caption)
    latency = new_table("latency", ["phase"], ["TTFT, s", "ITL, ms", "TPOT, ms", "E2E, s", "MAL"], latency_caption)
    for name, n in [*summary["phases"].items(), ("all", summary["overall"])]:
        style = "bold" if name == "all" else None
        if name == "all":
            throughput.add_section()
            latency.add_section()
        throughput.add_row(
            name,
            str(n["num_requests"]),
            number(n["offered_requests_per_s"]),
            number(n["requests_per_s"]),
            number(n["output_tokens_per_s"], 1),
            number(n["mean_batch_size"]),
            percent(n["wasted_share"]),
            style=style,
        )
        latency.add_row(
            name,
            median_and_p99(n["time_to_first_token_s"]),
            median_and_p99(n["inter_token_s"], 1e3, 1),
            median_and_p99(n["time_per_output_token_s"], 1e3, 1),
            median_and_p99(n["end_to_end_s"]),
            number(n["mean_acceptance_length"]),
            style=style,
        )
    return [throughput, latency]


def plot_load(
    timings: list[RequestTiming], steps: Iterable[dict[str, Any]], edges: list[float], title: str, path: Path
) -> Path:
    """Four panels over the run: latencies by arrival, requests waiting and running, gaps between tokens, share of steps by
    batch size.

    timings: of the finished requests.
    steps: rows of steps.jsonl.
    edges: seconds at which the request rate changes.
    title, path: of the figure.
    """
    last_s = max(timing.finished_s for timing in timings)
    with saved_figure(path, title, 2, 2, (13, 8)) as (_, axes):
        _plot_latency(axes[0, 0], timings)
        _plot_occupancy(axes[0, 1], list(steps))
        for axis in axes[0]:
            axis.set_xlim(0, 1.02 * last_s)
            for edge in edges:
                axis.axvline(edge, color="black", linewidth=0.8, linestyle=":")
        _plot_token_gaps(axes[1, 0], timings)
        _plot_batch_sizes(axes[1, 1], timings)
    return path


def _plot_latency(axis: Any, timings: list[RequestTiming]) -> None:
    arrival_s = [timing.arrival_s for timing in timings]
    axis.scatter(arrival_s, [timing.end_to_end for timing in timings], s=14, color="C0", label="end to end")
    axis.scatter(arrival_s, [timing.time_to_first_token for timing in timings], s=14, color="C1", label="first token")
    log_scale(axis, "y")
    axis.set(xlabel="arrival, s", ylabel="seconds", title="Latency from arrival")
    axis.legend(fontsize=8)


def _plot_occupancy(axis: Any, steps: list[dict[str, Any]]) -> None:
    if steps:
        at_s = [0.0, *(step["at_s"] for step in steps)]
        for key, colour in (("waiting", "C3"), ("running", "C2")):
            axis.step(at_s, [0, *(step[key] for step in steps)], where="post", color=colour, label=key, linewidth=1)
        axis.legend(fontsize=8)
    axis.set_ylim(bottom=0)
    integer_ticks(axis, "y")
    axis.set(xlabel="seconds", ylabel="requests", title="Requests in the engine")


def _plot_token_gaps(axis: Any, timings: list[RequestTiming]) -> None:
    inter_token_ms = np.sort([1e3 * gap for timing in timings for gap in timing.stats.wall_s])
    per_token_ms = np.sort([1e3 * t for timing in timings if (t := timing.time_per_output_token) is not None])
    for values, label, colour in (
        (inter_token_ms, "inter-token latency, one gap per step", "C4"),
        (per_token_ms, "time per output token, of a request", "C5"),
    ):
        if len(values):
            axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=label, color=colour)
    if len(inter_token_ms):
        log_scale(axis, "x")
        axis.legend(fontsize=8)
    axis.set(xlabel="milliseconds", ylabel="share that is faster", title="Time between tokens")
    axis.set_ylim(0, 1.02)


def _plot_batch_sizes(axis: Any, timings: list[RequestTiming]) -> None:
    share = stats.batch_size_share([timing.stats for timing in timings])
    axis.bar(list(share), list(share.values()), color="C2")
    integer_ticks(axis)
    axis.set(xlabel="rows decoded together", ylabel="share of steps", title="Share of steps by batch size")
