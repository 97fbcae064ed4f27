"""A run of eval/run.py: summary, tables and plot. The numbers come from `stats`; this file arranges them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdec.measure import stats
from specdec.measure.report.figure import integer_ticks, method_color, saved_figure, say_if_empty
from specdec.measure.report.table import new_table, number, percent
from specdec.measure.stats import RequestStats
from specdec.params import PLAIN
from specdec.rejection import Verifier

NUM_POSITIONS = 4  # whose acceptance the table shows


def summarize(
    run: dict[str, RequestStats],
    plain: dict[str, RequestStats],
    category_of: dict[str, str],
    verify_s: Callable[[float], float] | None,
) -> dict[str, Any]:
    """Numbers of the whole run, whose steps are pooled, of every category, and means over categories, each of which counts
    alike (`mean_over_categories`); of a composed method, of its components too (`proposers`).

    run: statistics by request id.
    plain: the same of decoding without speculation; may be empty.
    category_of: category by request id.
    verify_s: measured seconds of a forward of n tokens per row.
    """
    by_category: dict[str, list[str]] = defaultdict(list)
    for request_id in run:
        by_category[category_of[request_id]].append(request_id)

    def numbers(ids: list[str]) -> dict[str, Any]:
        return _numbers([run[i] for i in ids], [plain[i] for i in ids if i in plain], verify_s)

    categories = {name: numbers(ids) for name, ids in by_category.items()}
    means = {key: stats.mean_over_categories(categories.values(), key) for key in ("mean_acceptance_length", "tokens_per_step")}
    return {"overall": numbers(list(run)), "categories": categories, "mean_over_categories": means}


def _numbers(
    all_stats: list[RequestStats], plain_stats: list[RequestStats], verify_s: Callable[[float], float] | None
) -> dict[str, Any]:
    result = stats.pool(all_stats)
    if components := stats.by_proposer(all_stats):
        result["proposers"] = components
    result["mean_acceptance_length_over_requests"] = stats.mean_over_requests(all_stats, "mean_acceptance_length")
    result["tokens_per_step_over_requests"] = stats.mean_over_requests(all_stats, "tokens_per_step")
    result["decode_tokens_per_s"] = stats.decode_tokens_per_s(all_stats)
    result["time_to_first_token_s"] = float(np.mean([s.time_to_first_token_s for s in all_stats]))
    steps = result["num_steps"]
    result["draft_s_per_step"] = stats.row_share_seconds(all_stats, "draft_s") / steps if steps else None
    result["verify_s_per_step"] = stats.row_share_seconds(all_stats, "verify_s") / steps if steps else None
    result["speedup_ideal"] = result["tokens_per_step"]
    has_baseline = len(plain_stats) == len(all_stats)
    baseline = stats.decode_tokens_per_s(plain_stats) if has_baseline else None
    result["baseline_tokens_per_s"] = baseline
    speedup = stats.speedup(all_stats, plain_stats) if baseline else None
    result["speedup"] = speedup["ratio"] if speedup else None
    result["speedup_interval"] = [speedup["low"], speedup["high"]] if speedup and speedup["low"] is not None else None
    result["speedup_cpu"] = speedup["cpu_ratio"] if speedup else None
    result["wall_over_cpu"] = stats.wall_over_cpu(all_stats)
    result["baseline_wall_over_cpu"] = stats.wall_over_cpu(plain_stats)
    result["speedup_model"] = None
    result["efficiency"] = None
    if verify_s is not None:
        # where there is a baseline, its steps were timed in turn with the method's own
        plain_step_s = float(np.mean([t for s in plain_stats for t in s.verify_s])) if baseline else verify_s(1)
        model = stats.predicted_speedup(all_stats, lambda n: verify_s(n) / verify_s(1), plain_step_s)
        result["speedup_model"] = model
        result["efficiency"] = stats.efficiency(result["speedup"], model)
    return result


def busy_reasons(summary: dict[str, Any], name: str, timed_on_cpu: bool) -> list[str]:
    """Why the times of a summary cannot be trusted, a phrase for each reason; empty if they can.

    name: of the method.
    timed_on_cpu: the work was done by this process's CPU time, and not by a device or by other processes.
    """
    overall = summary["overall"]
    numbers = {**summary["categories"], "all": overall}
    speedups = {category: (n["speedup"], n["speedup_ideal"]) for category, n in numbers.items()}
    shares = {name: overall["wall_over_cpu"], PLAIN: overall["baseline_wall_over_cpu"]} if timed_on_cpu else {}
    return stats.busy_reasons(speedups, shares)


def busy_note(reasons: list[str], cpu_ratio: float | None) -> str:
    """A line with these reasons, and with the speedup by CPU time."""
    by_cpu = "" if cpu_ratio is None else f"; by CPU time the speedup is {cpu_ratio:.2f}"
    return f"note: the machine was busy with other work ({'; '.join(reasons)}), so wall times mislead{by_cpu}"


def speedup_line(overall: dict[str, Any]) -> str | None:
    """The speedup with its interval, in a line; None where nothing was compared."""
    if overall["speedup"] is None:
        return None
    interval = "too few requests for an interval"
    if overall["speedup_interval"]:
        interval = "95 % interval {:.2f} to {:.2f} over requests".format(*overall["speedup_interval"])
    return f"speedup {overall['speedup']:.2f} ({interval}), by CPU time {overall['speedup_cpu']:.2f}"


def lossless_verdict(
    verifier: Verifier, greedy: bool, answered: dict[str, list[int]], plain: dict[str, list[int]] | None
) -> tuple[str, str]:
    """Whether the output is the target's: in a few characters, and in a line. Where the tokens must be those of plain decoding,
    they are compared: when greedy, and where uniforms are keyed by position.

    verifier: the rejection scheme.
    greedy: temperature 0.
    answered: output tokens by request id.
    plain: the same of decoding without speculation, if there is one.
    """
    if not verifier.lossless:
        return "NO", f"NO, {verifier.name} does not preserve the target's distribution"
    if not (greedy or verifier.keyed_by == "position"):
        return "in distribution", f"yes, in distribution ({verifier.name})"
    if plain is None:
        return "not compared", f"yes ({verifier.name}); not compared with plain decoding"
    num_equal = sum(answered[name] == plain[name] for name in answered)
    verdict = "yes" if num_equal == len(answered) else "NOT TOKEN FOR TOKEN"
    return f"{num_equal}/{len(answered)}", f"{verdict}, {num_equal} of {len(answered)} outputs equal plain decoding"


def tables(summary: dict[str, Any], title: str) -> list[Table]:
    """Acceptance and speed, a line per category and one for all; of a composed method, its components too."""
    components = [_proposer_table(summary)] if "proposers" in summary["overall"] else []
    return [_acceptance_table(summary, title), _speed_table(summary), *components]


def _acceptance_table(summary: dict[str, Any], title: str) -> Table:
    caption = (
        "mean acceptance length: steps with a draft, bonus token included; tokens/step: every step. all: all steps together; "
        "means: every category, or request, counts alike. Per position: of all drafts, shorter ones too."
    )
    if "nodes_per_draft" in (n := summary["overall"]):
        caption += (
            f" Trees of {n['nodes_per_draft']:.1f} nodes, {n['depth_per_draft']:.1f} deep; positions are depths; "
            f"{n['num_accepted_off_first_path']} of {n['num_accepted_tokens']} accepted tokens are not of the first path."
        )
    table = new_table(title, ["category"], ["requests", "mean acceptance length", "tokens/step"], caption)
    table.add_column("acceptance per position", no_wrap=True)
    table.add_column("steps with draft", justify="right")
    for name, n in _by_category(summary, table):
        rates = n["acceptance_rate_per_position"]
        shown = " ".join(f"{rate:.2f}" for rate in rates[:NUM_POSITIONS]) + (" ..." if len(rates) > NUM_POSITIONS else "")
        table.add_row(
            name,
            str(n["num_requests"]),
            number(n["mean_acceptance_length"]),
            number(n["tokens_per_step"]),
            shown or "-",
            percent(n["num_drafts"] / n["num_steps"] if n["num_steps"] else None),
            style="bold" if name == "all" else None,
        )
    overall = summary["overall"]
    means = summary.get("mean_over_categories")  # runs of earlier versions lack it
    if means is not None and len(summary["categories"]) > 1:
        lengths = [number(means["mean_acceptance_length"]), number(means["tokens_per_step"])]
        table.add_row("mean of categories", "-", *lengths, "-", "-")
    by_request = [overall[f"{key}_over_requests"] for key in ("mean_acceptance_length", "tokens_per_step")]
    table.add_row("mean of requests", "-", *(number(mean["mean"] if mean else None) for mean in by_request), "-", "-")
    return table


def _speed_table(summary: dict[str, Any]) -> Table:
    caption = (
        f"prefill excluded; {PLAIN}: without speculation, in turn with the method. model: what acceptance and measured forward "
        "times predict; efficiency: speedup / model."
    )
    by_cpu = ["by CPU time"] if summary["busy"] else []
    heads = ["tokens/s", PLAIN, "speedup", *by_cpu, "model", "efficiency"]
    table = new_table("speed", ["category"], heads, caption)
    for name, n in _by_category(summary, table):
        table.add_row(
            name,
            number(n["decode_tokens_per_s"], 1),
            number(n["baseline_tokens_per_s"], 1),
            number(n["speedup"], 2, "x"),
            *([number(n["speedup_cpu"], 2, "x")] if summary["busy"] else []),
            number(n["speedup_model"], 2, "x"),
            number(n["efficiency"]),
            style="bold" if name == "all" else None,
        )
    return table


def _by_category(summary: dict[str, Any], table: Table) -> Iterator[tuple[str, dict[str, Any]]]:
    """(category, numbers) of each line; the last one, for all, has a section of the table."""
    yield from summary["categories"].items()
    table.add_section()
    yield "all", summary["overall"]


def _proposer_table(summary: dict[str, Any]) -> Table:
    """Of a composed method: how often each component drafted, and how much of it was accepted."""
    heads = ["steps", "drafts", "mean acceptance length", "accepted / drafted", "share of output"]
    table = new_table("by proposer, all categories", ["proposer"], heads)
    for name, n in summary["overall"]["proposers"].items():
        table.add_row(
            name,
            str(n["num_steps"]),
            str(n["num_drafts"]),
            number(n["mean_acceptance_length"]),
            f"{n['num_accepted_tokens']} / {n['num_draft_tokens']}",
            percent(n["output_share"]),
        )
    return table


def plot_run(summary: dict[str, Any], title: str, path: Path) -> Path:
    """Four panels: tokens per step, acceptance per position, draft tokens accepted per step, speedup and its predictions."""
    numbers = {**summary["categories"], "all": summary["overall"]}
    with saved_figure(path, title, 2, 2, (12, 8)) as (_, axes):
        color = method_color(summary["method"])
        _plot_tokens_per_step(axes[0, 0], numbers, color)
        _plot_acceptance(axes[0, 1], numbers)
        _plot_accepted(axes[1, 0], np.array(summary["overall"]["acceptance_histogram"]), color)
        _plot_speedup(axes[1, 1], numbers, color)
    return path


def _plot_tokens_per_step(axis: Any, numbers: dict[str, dict[str, Any]], color: str) -> None:
    heights = [_or_nan(n["tokens_per_step"]) for n in numbers.values()]
    axis.bar(np.arange(len(numbers)), heights, color=color, label="all steps together, as in the table")
    for x, (name, n) in enumerate(numbers.items()):
        mean = n["tokens_per_step_over_requests"]
        if mean and mean["num_requests"] >= stats.MIN_REQUESTS:
            bounds = [[mean["mean"] - mean["low"]], [mean["high"] - mean["mean"]]]
            label = "mean over requests, 95 %" if name == "all" else None
            axis.errorbar(x, mean["mean"], yerr=bounds, fmt="o", color="black", capsize=3, markersize=4, label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(np.arange(len(numbers)), numbers, rotation=30, ha="right")
    axis.set_ylim(top=1.25 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper left")
    axis.set(ylabel="tokens", title="Tokens per step")
    say_if_empty(axis, heights, "no step was needed")


def _plot_acceptance(axis: Any, numbers: dict[str, dict[str, Any]]) -> None:
    for name, n in numbers.items():
        if rates := n["acceptance_rate_per_position"]:
            style = {"color": "black", "linewidth": 2.5} if name == "all" else {"linewidth": 1.2}
            axis.plot(np.arange(1, len(rates) + 1), rates, marker="o", markersize=3, label=name, **style)
    axis.set_ylim(0, 1.02)
    integer_ticks(axis)
    axis.set(xlabel="draft position", ylabel="share of drafts")
    axis.set_title("Share of all drafts accepted up to a position")
    say_if_empty(axis, axis.lines, "no drafts")
    if axis.lines:
        axis.legend(fontsize=8)


def _plot_accepted(axis: Any, histogram: np.ndarray, color: str) -> None:
    no_draft = histogram[0].sum()
    accepted = histogram[1:].sum(0)
    total = max(histogram.sum(), 1)
    axis.bar(["no draft", *map(str, range(len(accepted)))], np.array([no_draft, *accepted]) / total, color=color)
    if len(accepted) > 12:
        axis.tick_params(axis="x", labelsize=7)
    axis.set(xlabel="draft tokens accepted", ylabel="share of steps", title="Share of steps, all categories")
    say_if_empty(axis, [] if not histogram.sum() else [1.0], "no step was needed")


def _plot_speedup(axis: Any, numbers: dict[str, dict[str, Any]], color: str) -> None:
    place = np.arange(len(numbers))
    bars = (
        ("speedup", "measured", color),
        ("speedup_model", "model", "#9a9a9a"),
        ("speedup_ideal", "ideal: drafts and verification free", "#cfcfcf"),
    )
    for k, (key, label, shade) in enumerate(bars):
        axis.bar(place + (k - 1) * 0.27, [_or_nan(n[key]) for n in numbers.values()], 0.27, label=label, color=shade)
    for x, (name, n) in enumerate(numbers.items()):
        if interval := n["speedup_interval"]:
            # an interval of few requests may leave out their own ratio
            bounds = [[max(n["speedup"] - interval[0], 0)], [max(interval[1] - n["speedup"], 0)]]
            shown = "95 % over requests" if name == "all" else None
            axis.errorbar([x - 0.27], [n["speedup"]], yerr=bounds, color="black", capsize=3, label=shown)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(place, numbers, rotation=30, ha="right")
    axis.set(ylabel="times as fast", title="Speedup over decoding without speculation")
    say_if_empty(axis, [_or_nan(n["speedup"]) for n in numbers.values()], "not measured")
    axis.set_ylim(top=1.2 * axis.get_ylim()[1])
    axis.legend(fontsize=8, loc="upper left", ncols=2)


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value
