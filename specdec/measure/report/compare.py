"""Several runs of eval/run.py in one table and one plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdec.measure.report import run as run_report
from specdec.measure.report.figure import run_colors, saved_figure
from specdec.measure.report.table import draft_length, interval, new_table, number

MUST_AGREE = ("target", "dtype", "prompts", "sampling", "seed", "rejection")  # else the numbers of two runs do not compare
SPEED_DEPENDS_ON = ("max_batch_size", "max_model_len", "prefill_chunk_size")


def differences(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why these runs do not compare, a line for each run and key. runs: summaries by name, as in all functions here."""
    (first, reference), *others = runs.items()
    return [
        _difference(key, reference[key], summary[key], first, name)
        for name, summary in others
        for key in MUST_AGREE
        if summary[key] != reference[key]
    ]


def _difference(key: str, value: Any, other_value: Any, name: str, other: str) -> str:
    """The values of a key in two runs; of two mappings, only the entries that differ."""
    if key == "prompts":  # whose value is a hash
        return f"{name} and {other} decoded different prompts (task, file or limit)"
    if isinstance(value, dict) and isinstance(other_value, dict):
        entries = [k for k in {**value, **other_value} if value.get(k) != other_value.get(k)]
        value, other_value = ({k: side.get(k) for k in entries} for side in (value, other_value))
    return f"{name} has {key}={value!r} and {other} has {other_value!r}"


def notes(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What to know when speeds of these runs are compared, a line each."""
    (first, reference), *others = runs.items()
    lines = []
    for name, summary in others:
        for key in (*SPEED_DEPENDS_ON, "enforce_eager"):
            there, here = (run.get(key, True) for run in (reference, summary))  # older runs lack enforce_eager
            if here != there:
                lines.append(f"note: {key} is {there} in {first} and {here} in {name}; speeds depend on it")
        if summary["environment"] != reference["environment"]:
            lines.append(f"note: {first} and {name} ran in different environments; compare their speedups, not their tokens/s")
    for name, summary in runs.items():
        if summary["busy"]:
            lines.append(f"{name}: {run_report.busy_note(summary['busy'], summary['overall']['speedup_cpu'])}")
    return lines


def compare_tables(runs: dict[str, dict[str, Any]]) -> list[Table]:
    """Acceptance and speed, a line per run; and both lengths by category."""
    return [_acceptance_table(runs), _speed_table(runs), _category_table(runs)]


def verdicts(runs: dict[str, dict[str, Any]]) -> list[str]:
    """A line per run: how much faster than plain decoding, and whether the outputs are the same."""
    lines = []
    for name, summary in runs.items():
        speedup = summary["overall"]["speedup"]
        gain = "no baseline" if speedup is None else f"{speedup:.2f}x the speed of plain decoding"
        lines.append(f"{name}: {gain}; lossless: {summary['lossless_said']}")
    return lines


def _acceptance_table(runs: dict[str, dict[str, Any]]) -> Table:
    several_schemes = len({summary["rejection"] for summary in runs.values()}) > 1
    heads = ["MAL", "tokens/step", *(["rejection"] if several_schemes else []), "lossless"]
    caption = "by position: share of drafts whose n-th token was accepted; MAL: mean acceptance length"
    table = new_table("runs", ["run", "method"], ["K"], caption)
    table.add_column("by position")
    for head in heads:
        table.add_column(head, justify="right")
    for name, summary in runs.items():
        overall = summary["overall"]
        table.add_row(
            name,
            summary["method"],
            draft_length(summary),
            " ".join(f"{rate:.2f}" for rate in overall["acceptance_rate_per_position"] or []) or "-",
            number(overall["mean_acceptance_length"]),
            number(overall["tokens_per_step"]),
            *([summary["rejection"]] if several_schemes else []),
            summary["lossless_short"],
        )
    return table


def _speed_table(runs: dict[str, dict[str, Any]]) -> Table:
    caption = (
        "draft / verify: seconds of drafting over those of verifying; 95 %: interval of the speedup over requests; by CPU "
        "time: the speedup by the process's CPU time; model: what acceptance and measured forward times predict; efficiency: "
        "speedup / model."
    )
    heads = ["tokens/s", "draft / verify", "speedup", "95 %", "by CPU time", "model", "efficiency"]
    table = new_table("speed", ["run"], heads, caption)
    for name, summary in runs.items():
        overall = summary["overall"]
        draft_s = overall["draft_s_per_step"]
        verify_s = overall["verify_s_per_step"]
        table.add_row(
            name,
            number(overall["decode_tokens_per_s"], 1),
            number(draft_s / verify_s if draft_s is not None and verify_s else None),
            number(overall["speedup"], 2, "x"),
            interval(overall["speedup_interval"]),
            number(overall["speedup_cpu"], 2, "x"),
            number(overall["speedup_model"], 2, "x"),
            number(overall["efficiency"]),
        )
    return table


def _category_table(runs: dict[str, dict[str, Any]]) -> Table:
    """Mean acceptance length and tokens per step of every category, a line per run."""
    categories = _categories(runs)
    table = new_table("mean acceptance length | tokens/step", ["run"], categories)
    keys = ("mean_acceptance_length", "tokens_per_step")
    for label, summary in runs.items():
        numbers = [summary["categories"].get(category) for category in categories]
        table.add_row(label, *("-" if n is None else " | ".join(number(n[key]) for key in keys) for n in numbers))
    return table


def plot_compare(runs: dict[str, dict[str, Any]], path: Path) -> Path:
    """Tokens per step and speedup, by category, a bar per run."""
    names = [*_categories(runs), "all"]
    place = np.arange(len(names))
    width = 0.8 / len(runs)
    colors = run_colors({label: summary["method"] for label, summary in runs.items()})
    with saved_figure(path, None, 2, 1, (max(9, 1.4 * len(names)), 8)) as (figure, axes):
        for axis, key, unit, title in (
            (axes[0], "tokens_per_step", "tokens", "Tokens per step (pooled)"),
            (axes[1], "speedup", "times as fast", "Speedup over decoding without speculation, same run"),
        ):
            for k, (label, summary) in enumerate(runs.items()):
                numbers = {**summary["categories"], "all": summary["overall"]}
                heights = [numbers[n][key] if n in numbers and numbers[n][key] is not None else np.nan for n in names]
                axis.bar(place + (k - (len(runs) - 1) / 2) * width, heights, width, label=label, color=colors[label])
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_xticks(place, names, rotation=20, ha="right")
            axis.set(ylabel=unit, title=title)
        handles = axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=min(len(runs), 5), fontsize=9)
    return path


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Directory -> the shortest end of its path that differs from all others'."""
    names = list(names)
    for num_parts in range(1, 10):
        short = {name: "/".join(Path(name).parts[-num_parts:]) for name in names}
        if len(set(short.values())) == len(names):
            return short
    return {name: name for name in names}


def _categories(runs: dict[str, dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(category for summary in runs.values() for category in summary["categories"]))
