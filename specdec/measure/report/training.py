"""The plot of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.files import writing
from specdec.measure.report.figure import pyplot


def plot_training(rows: list[dict[str, Any]], title: str, path: Path) -> Path:
    """Four panels over the optimiser steps: losses, accuracy by unrolled step, measured acceptance, learning rate and
    gradient."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    figure.suptitle(title)

    def line(axis: Any, key: str, label: str, index: int | None = None, **style: Any) -> None:
        found = [(row["step"], row[key] if index is None else row[key][index]) for row in rows if row.get(key)
                 and (index is None or len(row[key]) > index)]  # fmt: skip
        if found:
            axis.plot(*zip(*found, strict=True), label=label, **style)

    depth = max((len(row["val_accuracy"]) for row in rows if row.get("val_accuracy")), default=0)
    for axis, key, title in (
        (axes[0, 0], "step_loss", "Loss per supervised token, by unrolled step"),
        (axes[0, 1], "accuracy", "Accuracy by unrolled step, teacher-forced"),
    ):
        for k in range(depth):
            line(axis, f"val_{key}", f"step {k + 1}, held out", k, marker="o", color=f"C{k}")
            line(axis, key, f"step {k + 1}, training", k, linewidth=1, color=f"C{k}", alpha=0.5)
        axis.set_title(title)
        axis.set_ylim(bottom=0)
    axis = axes[1, 0]
    line(axis, "mean_acceptance_length", "mean acceptance length", marker="o", color="black")
    measured = [row for row in rows if row.get("acceptance_rate_per_position")]
    axis.set_title("Decoding held-out prompts with the engine")
    axis.set_ylabel("mean acceptance length")
    if measured:
        axis.set_ylim(1, max(2.0, 1.1 * max(row["mean_acceptance_length"] for row in measured)))
        other = axis.twinx()
        for k in range(len(measured[0]["acceptance_rate_per_position"])):
            line(other, "acceptance_rate_per_position", f"accepted at position {k + 1}", k, linestyle="--", color=f"C{k}")
        other.set_ylim(0, 1)
        other.set_ylabel("share of drafts (dashed)")
        other.legend(fontsize=8, loc="upper right")
    axis = axes[1, 1]
    line(axis, "lr", "learning rate", color="C0")
    axis.set_title("Learning rate; gradient norm before clipping")
    axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    other = axis.twinx()
    line(other, "grad_norm", "gradient norm", color="C1", linewidth=0.8)
    if other.lines:
        other.set_ylim(bottom=0)
        other.legend(fontsize=8, loc="upper right")
    for axis in axes.flat:
        axis.set_xlabel("optimiser step")
        if axis.lines:
            loc = {0: "upper right", 1: "upper left", 2: "upper left", 3: "lower left"}[list(axes.flat).index(axis)]
            axis.legend(fontsize=8, loc=loc, ncols=2 if axis in axes[0] else 1)
    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
