"""Tables and plot of the method selection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdec.files import writing
from specdec.measure.report.figure import log_axis, pyplot
from specdec.measure.report.table import median_and_p99, number


def choose_cells(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the method-selection table. Two numbers in a cell are of the lowest and the highest rate; those of
    times are medians."""
    low, high = summary["levels"][0], summary["levels"][-1]

    def both(own: dict[str, Any], number: Callable[[dict[str, Any]], str]) -> str:
        return f"{number(own['at'][low])} | {number(own['at'][high])}"

    def median(key: str, scale: float, digits: int) -> Callable[[dict[str, Any]], str]:
        return lambda n: "-" if n[key] is None else number(scale * n[key]["median"], digits)

    header = [
        "run",
        "K",
        "gain, low",
        "gain, high",
        "tokens/s",
        "decoding",
        "predicted",
        "ratio",
        "decoding gain (predicted)",
        "first token, s",
        "between, ms",
        "MAL",
        "wasted",
        "outputs",
    ]
    lines = []
    for name, own in summary["runs"].items():
        gains = ["{ratio:.2f} ({low:.2f} to {high:.2f})".format(**own[key]) for key in ("gain_low", "gain_high")]
        lines.append(
            [
                name,
                str(own["num_speculative_tokens_said"]),
                *(gains if name != summary["plain"] else ("1", "1")),
                both(own, lambda n: number(n["output_tokens_per_s"], 1)),
                both(own, lambda n: number(n["decode_tokens_per_s"], 1)),
                both(own, lambda n: number(n["predicted_tokens_per_s"], 1)),
                both(own, lambda n: number(n["measured_over_predicted"])),
                " | ".join(
                    f"{number(decoding_gain(summary, name, level, 'decode'))} "
                    f"({number(decoding_gain(summary, name, level, 'predicted'))})"
                    for level in (low, high)
                )
                if name != summary["plain"]
                else "1",
                both(own, median("time_to_first_token_s", 1, 2)),
                both(own, median("inter_token_s", 1e3, 0)),
                both(own, lambda n: number(n["mean_acceptance_length"])),
                both(own, lambda n: "-" if n["wasted_share"] is None else f"{n['wasted_share']:.0%}"),
                own["outputs"],
            ]
        )
    return header, lines


def decoding_gain(summary: dict[str, Any], name: str, level: str, which: str) -> float | None:
    """Tokens/s of decode steps over those of plain decoding, as measured (`decode`) or `predicted`."""
    own, plain = (summary["runs"][run]["at"][level][f"{which}_tokens_per_s"] for run in (name, summary["plain"]))
    return own / plain if own and plain else None


def describe_rate(level: str, summary: dict[str, Any]) -> str:
    """A rate in words."""
    if level == "one":
        return "one request at a time"
    if level == "all":
        return f"all at once, {summary['max_batch_size']} rows"
    return f"{level} of plain capacity ({float(level) * summary['plain_requests_per_s']:.2f}/s)"


def choose_caption(summary: dict[str, Any]) -> str:
    low, high = (describe_rate(summary["levels"][place], summary) for place in (0, -1))
    plain = summary["plain"]
    return (
        f"low: {low}; high: {high}. gain, low: mean time from arrival to last token of {plain} over the run's own (95 % "
        f"bootstrap interval over requests); gain, high: output tokens per second of the engine's time over those of {plain}, "
        "likewise. tokens/s: of all time, prefill included; decoding: of the steps after it alone, as measured; predicted: "
        "of the same steps by the measured costs; ratio: measured over predicted. What all runs have in common in it is "
        "the machine, faster or "
        "slower than while costs were measured; it cancels in the gain of decoding, low | high. first token: from "
        "arrival; between: from a request's tokens to its next, which come in pieces. MAL: mean acceptance length. "
        f"wasted: drafted tokens that did not stand. outputs: requests whose tokens equal those of {plain}, or by what "
        "right they are the target's."
    )


_GAINS = ("run", "K", "gain, low", "gain, high", "decoding gain (predicted)", "outputs")


def choose_tables(summary: dict[str, Any], title: str) -> list[Table]:
    """The gains, a line per run; and what they come from, a line per rate and run."""
    gains = Table(title=title, title_justify="left", header_style="bold")
    header, lines = choose_cells(summary)
    shown = [place for place, name in enumerate(header) if name in _GAINS]
    for place in shown:
        gains.add_column(header[place], justify="left" if place == 0 else "right", no_wrap=True)
    for line in lines:
        gains.add_row(*(line[place] for place in shown))
    grid = Table(title="by rate", title_justify="left", header_style="bold", caption_justify="left", caption_style="dim")
    grid.add_column("rate", no_wrap=True)
    grid.add_column("run", no_wrap=True)
    for name in (
        "tokens/s",
        "decoding",
        "predicted",
        "ratio",
        "first token, s",
        "between, ms",
        "whole, s",
        "batch",
        "MAL",
        "tokens/step",
        "wasted",
    ):
        grid.add_column(name, justify="right")
    for level in summary["levels"]:
        for place, (name, own) in enumerate(summary["runs"].items()):
            n = own["at"][level]
            grid.add_row(
                level if place == 0 else "",
                name,
                number(n["output_tokens_per_s"], 1),
                number(n["decode_tokens_per_s"], 1),
                number(n["predicted_tokens_per_s"], 1),
                number(n["measured_over_predicted"]),
                median_and_p99(n["time_to_first_token_s"]),
                median_and_p99(n["inter_token_s"], 1e3, 0),
                median_and_p99(n["end_to_end_s"]),
                number(n["mean_batch_size"], 1),
                number(n["mean_acceptance_length"]),
                number(n["tokens_per_step"]),
                "-" if n["wasted_share"] is None else f"{n['wasted_share']:.0%}",
                end_section=place == len(summary["runs"]) - 1,
            )
    grid.caption = f"a / b: median / 99th percentile. {choose_caption(summary)}"
    return [gains, grid]


def plot_choose(summary: dict[str, Any], title: str, path: Path) -> Path:
    """Latency and time per token against the rate, a line per run; gains at the lowest and the highest rate."""
    plt = pyplot()
    runs, levels = summary["runs"], summary["levels"]
    palette = plt.get_cmap("tab10" if len(runs) <= 11 else "tab20")
    speculating = [name for name in runs if name != summary["plain"]]
    colour = {name: palette(i % palette.N) for i, name in enumerate(speculating)} | {summary["plain"]: "black"}
    marks = dict(zip(runs, "os^vD<>P*Xhp" * (1 + len(runs) // 12), strict=False))
    figure, axes = plt.subplots(1, 3, figsize=(16, 5.2), constrained_layout=True, width_ratios=[1, 1, 1.15])
    figure.suptitle(title)
    place = np.arange(len(levels))
    said = {"one": "one at\na time", "all": "all at\nonce"}
    for axis, key, what, scale, unit in (
        (axes[0], "end_to_end_s", "From arrival to last token, mean", 1.0, "seconds"),
        (axes[1], "time_per_output_token_s", "Per output token after the first, mean", 1e3, "milliseconds"),
    ):
        for name, own in runs.items():
            values = [np.nan if (n := own["at"][level][key]) is None else scale * n["mean"] for level in levels]
            width = 2.5 if name == summary["plain"] else 1.4
            axis.plot(place, values, marker=marks[name], markersize=5, color=colour[name], linewidth=width, label=name)
        log_axis(axis, "y")
        axis.set_xticks(place, [said.get(level, f"{level} x plain\ncapacity") for level in levels])
        axis.set_xlabel("request rate")
        axis.set_ylabel(unit)
        axis.set_title(what)
    axis = axes[2]
    place = np.arange(len(speculating))
    for offset, key, label, hatch in (
        (-0.2, "gain_low", "low rate: latency", None),
        (0.2, "gain_high", "high rate: tokens/s", "//"),
    ):
        heights = [runs[name][key]["ratio"] for name in speculating]
        bars = axis.bar(place + offset, heights, 0.38, color=[colour[n] for n in speculating], hatch=hatch, edgecolor="white")
        # an interval of few requests may leave out their own ratio
        below = [max(runs[name][key]["ratio"] - runs[name][key]["low"], 0) for name in speculating]
        above = [max(runs[name][key]["high"] - runs[name][key]["ratio"], 0) for name in speculating]
        axis.errorbar(place + offset, heights, yerr=[below, above], fmt="none", color="black", capsize=2, linewidth=0.8)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        axis.bar_label(bars, [f"{height:.2f}" for height in heights], label_type="center", fontsize=7, bbox=box)
        axis.bar([0], [0], color="grey", hatch=hatch, edgecolor="white", label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(place, speculating, rotation=35, ha="right")
    axis.set_ylim(top=1.2 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper left", ncols=2)
    axis.set_title(f"Gain over {summary['plain']}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(runs), 8), fontsize=9)
    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
