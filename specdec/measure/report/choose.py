"""Tables and plot of the method selection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdec.measure.report.figure import log_scale, run_colors, saved_figure
from specdec.measure.report.run import busy_note
from specdec.measure.report.table import draft_length, median_and_p99, new_table, number, percent

Numbers = dict[str, Any]  # of a run at a rate, or of a run
_MARKERS = "os^vD<>P*Xhp"


def describe_rate(level: str, summary: dict[str, Any]) -> str:
    """A request rate for people."""
    if level == "one":
        return "one request at a time"
    if level == "all":
        return f"all at once, {summary['max_batch_size']} rows"
    return f"{level} of plain capacity ({float(level) * summary['plain_requests_per_s']:.2f}/s)"


def choose_tables(summary: dict[str, Any], title: str) -> list[Table]:
    """Gains, a line per run; throughput and latency, a line per rate and run."""
    return [_gain_table(summary, title), _throughput_table(summary), _latency_table(summary)]


def _gain_table(summary: dict[str, Any], title: str) -> Table:
    low = describe_rate(summary["levels"][0], summary)
    high = describe_rate(summary["levels"][-1], summary)
    plain = summary["plain"]
    caption = (
        f"low: {low}; high: {high}. gain, low: mean end-to-end latency of {plain} over that of the run; gain, high: output "
        f"tokens per second of engine time over those of {plain}; both with a 95 % bootstrap interval over requests. outputs: "
        f"requests whose tokens equal those of {plain}, or in which sense the output is the target's."
    )
    table = new_table(title, ["run"], ["K", "gain, low", "gain, high", "outputs"], caption)
    for name, run in summary["runs"].items():
        gains = ["{ratio:.2f} ({low:.2f} to {high:.2f})".format(**run[key]) for key in ("gain_low", "gain_high")]
        table.add_row(name, draft_length(run), *(["1", "1"] if name == plain else gains), run["outputs"])
    return table


def _throughput_table(summary: dict[str, Any]) -> Table:
    caption = (
        "tokens/s: of all time, prefill included; decoding: of decode steps alone, as measured; predicted: of the same steps "
        "by the measured costs; ratio: measured over predicted. A machine that is faster or slower than while costs were "
        "measured changes the ratio of all runs alike. batch: mean rows of a step."
    )
    heads = ["tokens/s", "decoding", "predicted", "ratio", "tokens/step", "batch"]
    table = new_table("throughput", ["rate", "run"], heads, caption)
    for rate, name, n in _by_rate(summary, table):
        table.add_row(
            rate,
            name,
            number(n["output_tokens_per_s"], 1),
            number(n["decode_tokens_per_s"], 1),
            number(n["predicted_tokens_per_s"], 1),
            number(n["measured_over_predicted"]),
            number(n["tokens_per_step"]),
            number(n["mean_batch_size"], 1),
        )
    return table


def _latency_table(summary: dict[str, Any]) -> Table:
    caption = (
        "median / 99th percentile. TTFT: time to first token, from arrival; ITL: inter-token latency, one gap per step; E2E: "
        "end-to-end latency. MAL: mean acceptance length; wasted: share of the draft tokens that were not accepted."
    )
    heads = ["TTFT, s", "ITL, ms", "E2E, s", "MAL", "wasted"]
    table = new_table("latency and acceptance", ["rate", "run"], heads, caption)
    for rate, name, n in _by_rate(summary, table):
        table.add_row(
            rate,
            name,
            median_and_p99(n["time_to_first_token_s"]),
            median_and_p99(n["inter_token_s"], 1e3, 0),
            median_and_p99(n["end_to_end_s"]),
            number(n["mean_acceptance_length"]),
            percent(n["wasted_share"]),
        )
    return table


def _by_rate(summary: dict[str, Any], table: Table) -> Iterator[tuple[str, str, Numbers]]:
    """(rate, run, numbers) of each line; a section of the table for each rate, which its first line names."""
    for level in summary["levels"]:
        label = level
        for name, run in summary["runs"].items():
            yield label, name, run["at"][level]
            label = ""
        table.add_section()


def verdicts_and_notes(summary: dict[str, Any]) -> list[str]:
    """Which run is the fastest, whether the times can be trusted, and which outputs are not the target's, a line each."""
    lines = list(summary["fastest"].values())
    for level, reasons in summary["busy"].items():
        if reasons:
            gains = {name: run["gain_cpu"][level] for name, run in summary["runs"].items() if name != summary["plain"]}
            by_cpu = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
            lines.append(f"{busy_note(reasons, None)}; gains by CPU time at rate {level}: {by_cpu}")
    for name, run in summary["runs"].items():
        if run["outputs_said"].startswith("NO"):
            lines.append(f"warning: {name}: {run['outputs_said']}")
    return lines


def plot_choose(summary: dict[str, Any], title: str, path: Path) -> Path:
    """Latency and time per token against the rate, a line per run; gains at the lowest and the highest rate."""
    runs = summary["runs"]
    plain = summary["plain"]
    speculating = [name for name in runs if name != plain]
    with saved_figure(path, title, 1, 3, (16, 5.2), width_ratios=[1, 1, 1.15]) as (figure, axes):
        colours = run_colors({name: run["method"] for name, run in runs.items()})
        for axis, key, panel, scale, unit in (
            (axes[0], "end_to_end_s", "End-to-end latency, mean", 1.0, "seconds"),
            (axes[1], "time_per_output_token_s", "Time per output token after the first, mean", 1e3, "milliseconds"),
        ):
            _plot_against_rate(axis, summary, colours, key, scale)
            axis.set(xlabel="request rate", ylabel=unit, title=panel)
        _plot_gains(axes[2], {name: runs[name] for name in speculating}, colours)
        axes[2].set(ylabel="times as fast", title=f"Gain over {plain}")
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=min(len(runs), 8), fontsize=9)
    return path


def _plot_against_rate(axis: Any, summary: dict[str, Any], colours: dict[str, Any], key: str, scale: float) -> None:
    """The mean of a latency, a line per run."""
    levels = summary["levels"]
    place = np.arange(len(levels))
    for i, (name, run) in enumerate(summary["runs"].items()):
        values = [np.nan if (n := run["at"][level][key]) is None else scale * n["mean"] for level in levels]
        width = 2.5 if name == summary["plain"] else 1.4
        marker = _MARKERS[i % len(_MARKERS)]
        axis.plot(place, values, marker=marker, markersize=5, color=colours[name], linewidth=width, label=name)
    log_scale(axis, "y")
    labels = {"one": "one at\na time", "all": "all at\nonce"}
    axis.set_xticks(place, [labels.get(level, f"{level} x plain\ncapacity") for level in levels])


def _plot_gains(axis: Any, runs: dict[str, Numbers], colours: dict[str, Any]) -> None:
    """Two bars per run, with intervals."""
    place = np.arange(len(runs))
    for offset, key, label, hatch in (
        (-0.2, "gain_low", "low rate: latency", None),
        (0.2, "gain_high", "high rate: tokens/s", "//"),
    ):
        gains = [run[key] for run in runs.values()]
        heights = [gain["ratio"] for gain in gains]
        bars = axis.bar(place + offset, heights, 0.38, color=[colours[n] for n in runs], hatch=hatch, edgecolor="white")
        # an interval of few requests may leave out their own ratio
        below = [max(gain["ratio"] - gain["low"], 0) for gain in gains]
        above = [max(gain["high"] - gain["ratio"], 0) for gain in gains]
        axis.errorbar(place + offset, heights, yerr=[below, above], fmt="none", color="black", capsize=2, linewidth=0.8)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        axis.bar_label(bars, [f"{height:.2f}" for height in heights], label_type="center", fontsize=7, bbox=box)
        axis.bar([0], [0], color="grey", hatch=hatch, edgecolor="white", label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(place, runs, rotation=35, ha="right")
    axis.set_ylim(top=1.2 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper left", ncols=2)
