"""A run of eval/run.py: summary, tables and plot. The numbers come from `stats`; this file arranges them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdec.files import writing
from specdec.measure import stats
from specdec.measure.report.figure import pyplot
from specdec.measure.report.table import number
from specdec.measure.stats import RequestStats
from specdec.params import PLAIN
from specdec.rejection import Verifier


def summarize(
    run: dict[str, RequestStats],
    plain: dict[str, RequestStats],
    category_of: dict[str, str],
    verify_s: Callable[[float], float] | None,
) -> dict[str, Any]:
    """Numbers of the whole run and of every category; of a composed method, of its parts too (`proposers`).

    run, plain: statistics by request id, of the method and of decoding without speculation (may be empty);
    verify_s: measured seconds of a forward of n tokens per row.
    """

    def numbers(ids: list[str]) -> dict[str, Any]:
        own = [run[i] for i in ids]
        base = [plain[i] for i in ids if i in plain]
        result = stats.pool(own)
        if parts := stats.by_proposer(own):
            result["proposers"] = parts
        result["mean_acceptance_length_over_requests"] = stats.mean_over_requests(own, "mean_acceptance_length")
        result["tokens_per_step_over_requests"] = stats.mean_over_requests(own, "tokens_per_step")
        result["decode_tokens_per_s"] = stats.decode_tokens_per_s(own)
        result["time_to_first_token_s"] = float(np.mean([s.time_to_first_token_s for s in own]))
        steps = result["num_steps"]
        result["draft_s_per_step"] = stats.row_share_seconds(own, "draft_s") / steps if steps else None
        result["verify_s_per_step"] = stats.row_share_seconds(own, "verify_s") / steps if steps else None
        result["speedup_ideal"] = result["tokens_per_step"]
        result["baseline_tokens_per_s"] = baseline = stats.decode_tokens_per_s(base) if len(base) == len(own) else None
        found = stats.speedup(own, base) if baseline else None
        result["speedup"] = found["ratio"] if found else None
        result["speedup_interval"] = [found["low"], found["high"]] if found and found["low"] is not None else None
        result["speedup_cpu"] = found["cpu_ratio"] if found else None
        result["wall_over_cpu"], result["baseline_wall_over_cpu"] = stats.wall_over_cpu(own), stats.wall_over_cpu(base)
        result["speedup_model"] = result["efficiency"] = None
        if verify_s is not None:
            # a plain step as it was in this run, next to the method's own, where there is one
            step_s = float(np.mean([t for s in base for t in s.verify_s])) if baseline else verify_s(1)
            result["speedup_model"] = model = stats.predicted_speedup(own, lambda n: verify_s(n) / verify_s(1), step_s)
            result["efficiency"] = result["speedup"] / model if result["speedup"] and model else None
        return result

    by_category: dict[str, list[str]] = defaultdict(list)
    for name in run:
        by_category[category_of[name]].append(name)
    return {"overall": numbers(list(run)), "categories": {name: numbers(ids) for name, ids in by_category.items()}}


def busy_reasons(summary: dict[str, Any], name: str, has_own_cpu: bool) -> list[str]:
    """Why the times of a summary are not to be trusted, in words; empty if nothing speaks against them.

    name: of the method; has_own_cpu: the work was done by this process's CPU time, and not by a device or by other processes.
    """
    overall = summary["overall"]
    parts = {**summary["categories"], "all": overall}
    speedups = {part: (n["speedup"], n["speedup_ideal"]) for part, n in parts.items()}
    shares = {name: overall["wall_over_cpu"], PLAIN: overall["baseline_wall_over_cpu"]} if has_own_cpu else {}
    return stats.busy_reasons(speedups, shares)


def busy_note(reasons: list[str], cpu_ratio: float | None) -> str:
    """A line that says so, and what CPU time has to say instead."""
    by_cpu = "" if cpu_ratio is None else f"; by CPU time the speedup is {cpu_ratio:.2f}"
    return f"note: the machine was busy with other work ({'; '.join(reasons)}), so wall times mislead{by_cpu}"


def speedup_line(overall: dict[str, Any]) -> str | None:
    """The speedup with what it can be trusted to, in a line; None where nothing was compared."""
    if overall["speedup"] is None:
        return None
    interval = "too few requests for an interval"
    if overall["speedup_interval"]:
        interval = "95 % interval {:.2f} to {:.2f} over requests".format(*overall["speedup_interval"])
    return f"speedup {overall['speedup']:.2f} ({interval}), by CPU time {overall['speedup_cpu']:.2f}"


def lossless_verdict(
    verifier: Verifier, greedy: bool, answered: dict[str, list[int]], plain: dict[str, list[int]] | None
) -> tuple[str, str]:
    """By what right the output is called the target's own: in a few characters, and in words. Checked token for token where
    that can be: when greedy, or under `match`, and decoded plainly too (`plain`)."""
    if not verifier.lossless:
        return "NO", f"NO, {verifier.name} does not keep the target's law"
    if plain is None or not (greedy or verifier.name == "match"):
        return "in law", f"yes, in law ({verifier.name})"
    same = sum(answered[name] == plain[name] for name in answered)
    verdict = "yes" if same == len(answered) else "NOT TOKEN FOR TOKEN"
    return f"{same}/{len(answered)}", f"{verdict}, {same} of {len(answered)} outputs equal plain decoding"


SHOWN_POSITIONS = 4


def table(summary: dict[str, Any], title: str) -> Table:
    """Per category and overall: what a reader compares."""
    grid = Table(title=title, title_justify="left", header_style="bold", caption_justify="left", caption_style="dim")
    grid.add_column("category", no_wrap=True)
    for name in (
        "requests",
        "mean acceptance length",
        "tokens/step",
        "acceptance per position",
        "steps with draft",
        "tokens/s",
        PLAIN,
        "speedup",
        *(["by CPU time"] if summary["busy"] else []),
        "model",
        "efficiency",
    ):
        grid.add_column(name, justify="left" if "position" in name else "right", no_wrap="position" in name)
    lines = [*summary["categories"].items(), ("all", summary["overall"])]
    for place, (name, n) in enumerate(lines):
        rates = n["acceptance_rate_per_position"]
        shown = " ".join(f"{rate:.2f}" for rate in rates[:SHOWN_POSITIONS]) + (" ..." if len(rates) > SHOWN_POSITIONS else "")
        grid.add_row(
            name,
            str(n["num_requests"]),
            number(n["mean_acceptance_length"]),
            number(n["tokens_per_step"]),
            shown or "-",
            f"{n['num_drafts'] / n['num_steps']:.0%}" if n["num_steps"] else "-",
            number(n["decode_tokens_per_s"], 1),
            number(n["baseline_tokens_per_s"], 1),
            number(n["speedup"], 2, "x"),
            *([number(n["speedup_cpu"], 2, "x")] if summary["busy"] else []),
            number(n["speedup_model"], 2, "x"),
            number(n["efficiency"]),
            end_section=place == len(lines) - 2,
            style="bold" if name == "all" else None,
        )
    grid.caption = (
        "mean acceptance length: steps with a draft, bonus token included; tokens/step: every step. Per position: of all "
        "drafts, shorter ones too. tokens/s and speedup: prefill excluded; none: without speculation, in turn with it. model: "
        "what acceptance and measured forward times predict; efficiency: speedup / model."
    )
    return grid


def proposer_table(summary: dict[str, Any]) -> Table:
    """Of a composed method: who drafted how often, how well, and what came of it."""
    grid = Table(title="by proposer, all categories", title_justify="left", header_style="bold")
    grid.add_column("proposer", no_wrap=True)
    for name in ("steps", "drafts", "mean acceptance length", "accepted / drafted", "share of output"):
        grid.add_column(name, justify="right")
    for name, n in summary["overall"]["proposers"].items():
        grid.add_row(
            name,
            str(n["num_steps"]),
            str(n["num_drafts"]),
            number(n["mean_acceptance_length"]),
            f"{n['num_accepted_tokens']} / {n['num_draft_tokens']}",
            "-" if n["output_share"] is None else f"{n['output_share']:.0%}",
        )
    return grid


def plot_run(summary: dict[str, Any], title: str, path: Path) -> Path:
    """Four panels: tokens per step, acceptance per position, tokens emitted per step, speedup against its predictions."""
    plt = pyplot()
    categories = {**summary["categories"], "all": summary["overall"]}
    names = list(categories)
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    figure.suptitle(title)
    place = np.arange(len(names))

    axis = axes[0, 0]
    pooled = [np.nan if categories[n]["tokens_per_step"] is None else categories[n]["tokens_per_step"] for n in names]
    axis.bar(place, pooled, color="tab:blue", label="all steps together, as in the table")
    for x, n in zip(place, names, strict=True):
        mean = categories[n]["tokens_per_step_over_requests"]
        if mean and mean["num_requests"] >= 8:  # the interval of fewer says nothing
            bounds = [[mean["mean"] - mean["low"]], [mean["high"] - mean["mean"]]]
            label = "mean over requests, 95 %" if n == "all" else None
            axis.errorbar(x, mean["mean"], yerr=bounds, fmt="o", color="black", capsize=3, markersize=4, label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(place, names, rotation=30, ha="right")
    axis.set_ylim(top=1.25 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper left")
    axis.set_title("Tokens per step")

    axis = axes[0, 1]
    for name in names:
        rates = categories[name]["acceptance_rate_per_position"]
        if rates:
            style = {"color": "black", "linewidth": 2.5} if name == "all" else {"linewidth": 1.2}
            axis.plot(np.arange(1, len(rates) + 1), rates, marker="o", markersize=3, label=name, **style)
    axis.set_ylim(0, 1.02)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("draft position")
    axis.set_title("Share of all drafts (shorter ones too) accepted up to each position")
    if axis.lines:
        axis.legend(fontsize=8)
    else:
        axis.text(0.5, 0.5, "no drafts", transform=axis.transAxes, ha="center")

    axis = axes[1, 0]
    histogram = np.array(summary["overall"]["acceptance_histogram"])
    no_draft, accepted = histogram[0].sum(), histogram[1:].sum(0)
    total = max(histogram.sum(), 1)
    axis.bar(["no draft", *map(str, range(len(accepted)))], np.array([no_draft, *accepted]) / total, color="tab:green")
    if len(accepted) > 12:
        axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel("draft tokens accepted")
    axis.set_title("Share of steps, all categories")

    axis = axes[1, 1]
    bars = [("speedup", "measured"), ("speedup_model", "model"), ("speedup_ideal", "ideal: drafts and verification free")]
    for k, (key, label) in enumerate(bars):
        heights = [np.nan if categories[n][key] is None else categories[n][key] for n in names]
        axis.bar(place + (k - 1) * 0.27, heights, 0.27, label=label)
    for x, n in zip(place, names, strict=True):
        if interval := categories[n]["speedup_interval"]:
            middle = [x - 0.27], [categories[n]["speedup"]]
            bounds = [[max(middle[1][0] - interval[0], 0)], [max(interval[1] - middle[1][0], 0)]]
            axis.errorbar(*middle, yerr=bounds, color="black", capsize=3, label="95 % over requests" if n == "all" else None)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(place, names, rotation=30, ha="right")
    axis.set_title("Speedup over decoding without speculation")
    axis.set_ylim(top=1.2 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper left", ncols=2)

    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
