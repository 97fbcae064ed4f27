"""The plot of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.measure.report.figure import integer_ticks, saved_figure, say_if_empty

Rows = list[dict[str, Any]]  # of metrics.jsonl


def plot_training(rows: Rows, title: str, path: Path) -> Path:
    """Four panels over the optimiser steps: losses, accuracy by unrolled step, measured acceptance, learning rate and
    gradient."""
    with saved_figure(path, title, 2, 2, (12, 8)) as (_, axes):
        _plot_by_unrolled_step(axes[0, 0], rows, "step_loss", "Loss per supervised token, by unrolled step")
        _plot_by_unrolled_step(axes[0, 1], rows, "accuracy", "Accuracy by unrolled step, teacher-forced")
        _plot_acceptance(axes[1, 0], rows)
        _plot_optimiser(axes[1, 1], rows)
        for axis in axes.flat:
            axis.set_xlabel("optimiser step")
            integer_ticks(axis)
    return path


def best_line(best: dict[str, Any]) -> str:
    """The best checkpoint, as a line. best: its step, and its mean acceptance length."""
    return f"best: step {best['step']}, mean acceptance length {best['mean_acceptance_length']:.3f} on held-out prompts"


def _line(axis: Any, rows: Rows, key: str, label: str, index: int | None = None, **style: Any) -> None:
    """A number of the rows that have it; index: its place in a list."""
    points = [
        (row["step"], row[key] if index is None else row[key][index])
        for row in rows
        if row.get(key) and (index is None or len(row[key]) > index)
    ]
    if len(points) == 1:
        style["marker"] = "o"  # a line of one point cannot be seen
    if points:
        axis.plot(*zip(*points, strict=True), label=label, **style)


def _legend(axis: Any, loc: str = "best", ncols: int = 1) -> None:
    if axis.lines:
        axis.legend(fontsize=8, loc=loc, ncols=ncols, framealpha=0.6)


def _plot_by_unrolled_step(axis: Any, rows: Rows, key: str, title: str) -> None:
    num_steps = max((len(row.get(name) or []) for row in rows for name in ("accuracy", "val_accuracy")), default=0)
    for k in range(num_steps):
        _line(axis, rows, f"val_{key}", f"step {k + 1}, held out", k, marker="o", color=f"C{k}")
        _line(axis, rows, key, f"step {k + 1}, training", k, linewidth=1, color=f"C{k}", alpha=0.5)
    axis.set_title(title)
    axis.set_ylim(0, 1.1 * max([0.1, *(y for line in axis.lines for y in line.get_ydata())]))
    axis.set_ylabel("nats" if key == "step_loss" else "share of supervised tokens")
    _legend(axis, ncols=2)


def _plot_acceptance(axis: Any, rows: Rows) -> None:
    _line(axis, rows, "mean_acceptance_length", "mean acceptance length", marker="o", color="black")
    axis.set_title("Decoding held-out prompts with the engine")
    axis.set_ylabel("mean acceptance length")
    if measured := [row for row in rows if row.get("acceptance_rate_per_position")]:
        axis.set_ylim(1, max(2.0, 1.1 * max(row["mean_acceptance_length"] for row in measured)))
        right = axis.twinx()
        for k in range(len(measured[0]["acceptance_rate_per_position"])):
            label = f"accepted at position {k + 1}"
            _line(right, rows, "acceptance_rate_per_position", label, k, linestyle="--", color=f"C{k}")
        right.set_ylim(0, 1)
        right.set_ylabel("share of drafts (dashed)")
        _legend(right, "upper right")
    say_if_empty(axis, axis.lines, "no evaluation")
    _legend(axis, "upper left")


def _plot_optimiser(axis: Any, rows: Rows) -> None:
    _line(axis, rows, "lr", "learning rate", color="C0")
    axis.set_title("Learning rate; gradient norm before clipping")
    axis.set_ylabel("learning rate")
    axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    right = axis.twinx()
    _line(right, rows, "grad_norm", "gradient norm", color="C1", linewidth=0.8)
    right.set_ylabel("gradient norm")
    if right.lines:
        right.set_ylim(bottom=0)
    _legend(right, "upper right")
    _legend(axis, "lower left")
