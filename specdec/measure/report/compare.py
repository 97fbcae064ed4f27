"""Several runs in one table and one plot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from specdec.files import writing
from specdec.measure.report.figure import pyplot
from specdec.measure.report.table import number


def compare_table(runs: dict[str, dict[str, Any]]) -> Table:
    """One line per run. by position: share of drafts whose n-th token was accepted; draft: seconds of drafting over those of
    verifying; 95 %: interval of the speedup over requests; by CPU time: the speedup by the process's CPU time."""
    grid = Table(title="runs", title_justify="left", header_style="bold")
    grid.add_column("run", no_wrap=True)
    grid.add_column("method")
    names = ["K", "mean acceptance length", "by position", "tokens/step", "tokens/s", "draft", "speedup", "95 %"]
    names += ["by CPU time", "model", "efficiency"]
    several = len({summary["rejection"] for summary in runs.values()}) > 1
    for name in (*names, *(["rejection"] if several else []), "lossless"):
        grid.add_column(name, justify="right")
    for name, summary in runs.items():
        n = summary["overall"]
        by_position = " ".join(f"{rate:.2f}" for rate in n["acceptance_rate_per_position"] or [])
        draft_s, verify_s = n["draft_s_per_step"], n["verify_s_per_step"]
        interval = n["speedup_interval"]
        cells = (
            str(summary["num_speculative_tokens"]),
            number(n["mean_acceptance_length"]),
            by_position or "-",
            number(n["tokens_per_step"]),
            number(n["decode_tokens_per_s"], 1),
            number(draft_s / verify_s if draft_s is not None and verify_s else None),
            number(n["speedup"], 2, "x"),
            f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "-",
            number(n["speedup_cpu"], 2, "x"),
            number(n["speedup_model"], 2, "x"),
            number(n["efficiency"]),
        )
        scheme = [summary["rejection"]] if several else []
        grid.add_row(name, summary["method"], *cells, *scheme, summary["lossless_short"])
    return grid


def category_table(runs: dict[str, dict[str, Any]]) -> Table:
    """Mean acceptance length and tokens per step of every category, a line per run."""
    grid = Table(title="mean acceptance length | tokens/step", title_justify="left", header_style="bold")
    grid.add_column("run", no_wrap=True)
    names = list(dict.fromkeys(c for summary in runs.values() for c in summary["categories"]))
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    for label, summary in runs.items():
        own = [summary["categories"].get(name) for name in names]
        keys = ("mean_acceptance_length", "tokens_per_step")
        grid.add_row(label, *("-" if n is None else " | ".join(number(n[key]) for key in keys) for n in own))
    return grid


def plot_compare(runs: dict[str, dict[str, Any]], path: Path) -> Path:
    """Tokens per step and speedup, by category, a bar per run."""
    plt = pyplot()
    names = [*dict.fromkeys(c for summary in runs.values() for c in summary["categories"]), "all"]
    figure, axes = plt.subplots(2, 1, figsize=(max(9, 1.4 * len(names)), 8), constrained_layout=True)
    place, width = np.arange(len(names)), 0.8 / len(runs)
    for axis, key, title in (
        (axes[0], "tokens_per_step", "Tokens per step (pooled)"),
        (axes[1], "speedup", "Speedup over decoding without speculation, same run"),
    ):
        for k, (label, summary) in enumerate(runs.items()):
            parts = {**summary["categories"], "all": summary["overall"]}
            heights = [parts[n][key] if n in parts and parts[n][key] is not None else np.nan for n in names]
            axis.bar(place + (k - (len(runs) - 1) / 2) * width, heights, width, label=label)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(place, names, rotation=20, ha="right")
        axis.set_title(title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=min(len(runs), 5), fontsize=9)
    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Directory -> the least of its path that tells it from the others."""
    names = list(names)
    for parts in range(1, 10):
        short = {name: "/".join(Path(name).parts[-parts:]) for name in names}
        if len(set(short.values())) == len(names):
            return short
    return {name: name for name in names}
