"""Table and plot of a run under load."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdec.files import writing
from specdec.measure import stats
from specdec.measure.report.figure import log_axis, pyplot
from specdec.measure.report.table import median_and_p99, number


def load_table(summary: dict[str, Any], title: str) -> Table:
    """A line per phase of the request rate, and one for all."""
    grid = Table(title=title, title_justify="left", header_style="bold", caption_justify="left", caption_style="dim")
    grid.add_column("phase", no_wrap=True)
    for name in (
        "requests",
        "came /s",
        "served /s",
        "tokens/s",
        "first token, s",
        "between, ms",
        "per token, ms",
        "whole, s",
        "batch",
        "MAL",
        "wasted",
    ):
        grid.add_column(name, justify="right", no_wrap=True)
    lines = [*summary["phases"].items(), ("all", summary["overall"])]
    for place, (name, n) in enumerate(lines):
        grid.add_row(
            name,
            str(n["num_requests"]),
            number(n["offered_requests_per_s"]),
            number(n["requests_per_s"]),
            number(n["output_tokens_per_s"], 1),
            median_and_p99(n["time_to_first_token_s"]),
            median_and_p99(n["inter_token_s"], 1e3, 1),
            median_and_p99(n["time_per_output_token_s"], 1e3, 1),
            median_and_p99(n["end_to_end_s"]),
            number(n["mean_batch_size"]),
            number(n["mean_acceptance_length"]),
            "-" if n["wasted_share"] is None else f"{n['wasted_share']:.0%}",
            end_section=place == len(lines) - 2,
            style="bold" if name == "all" else None,
        )
    grid.caption = (
        "a / b: median / 99th percentile. came, served: requests per second. Everything is measured from when a request was "
        "due, waiting included. between: from a request's tokens to its next ones, which come in pieces, one per step; per "
        "token: of each request, over its tokens. A phase has the requests that arrived in it, and the tokens and requests "
        "that came out meanwhile. batch: mean rows of a step; MAL: mean acceptance length; wasted: drafted tokens that did "
        "not stand."
    )
    return grid


def plot_load(
    served: list[stats.RequestTiming], turns: Iterable[dict[str, Any]], edges: list[float], title: str, path: Path
) -> Path:
    """Four panels over the run: latencies by arrival, requests waiting and running, gaps between tokens, share of steps by
    batch size. edges: where the request rate changes."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(13, 8), constrained_layout=True)
    figure.suptitle(title)

    axis = axes[0, 0]
    at = [one.arrival_s for one in served]
    axis.scatter(at, [one.end_to_end for one in served], s=14, color="C0", label="whole answer")
    axis.scatter(at, [one.time_to_first_token for one in served], s=14, color="C1", label="first token")
    log_axis(axis, "y")
    axis.set_ylabel("seconds")
    axis.set_xlabel("arrival, s")
    axis.set_title("Latency from arrival")
    axis.legend(fontsize=8)

    axis = axes[0, 1]
    lines = list(turns)
    if lines:
        time_at = [0.0, *(line["at_s"] for line in lines)]
        axis.step(time_at, [0, *(line["waiting"] for line in lines)], where="post", color="C3", label="waiting", linewidth=1)
        axis.step(time_at, [0, *(line["running"] for line in lines)], where="post", color="C2", label="running", linewidth=1)
        axis.legend(fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds")
    axis.set_title("Requests in the engine")
    for axis in axes[0]:
        axis.set_xlim(0, 1.02 * max(one.finished_s for one in served))
        for edge in edges:
            axis.axvline(edge, color="black", linewidth=0.8, linestyle=":")

    axis = axes[1, 0]
    gaps = np.sort([1e3 * gap for one in served for gap in one.stats.wall_s])
    per_token = np.sort([1e3 * t for one in served if (t := one.time_per_output_token) is not None])
    for values, label, colour in ((gaps, "between pieces, one per step", "C4"), (per_token, "per token, of a request", "C5")):
        if len(values):
            axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=label, color=colour)
    if len(gaps):
        log_axis(axis, "x")
        axis.legend(fontsize=8)
    axis.set_xlabel("milliseconds")
    axis.set_ylabel("share that is faster")
    axis.set_ylim(0, 1.02)
    axis.set_title("Time between tokens")

    axis = axes[1, 1]
    share = stats.batch_size_share([one.stats for one in served])
    axis.bar(list(share), list(share.values()), color="C2")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("rows decoded together")
    axis.set_title("Share of steps by batch size")

    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
