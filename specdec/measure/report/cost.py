"""Tables and plot of measured costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from specdec.files import writing
from specdec.measure.report.figure import pyplot
from specdec.measure.report.table import number
from specdec.policy.cost_table import CostTable


def cost_tables(table: CostTable) -> list[Table]:
    """Milliseconds of verifying, by tokens of each row, and of drafting, by length, for every batch size."""
    grids = []
    where = f"{table.about['target']}, {table.about['dtype']}, {table.about['device']}, context {table.about['context']}"
    for title, seconds, offset in (
        (f"verifying, ms, by tokens of each row ({where})", table.verify_s, 1),
        (f"drafting, ms, by draft tokens of each row ({table.about['method']})", table.draft_s, 0),
    ):
        grid = Table(title=title, title_justify="left", header_style="bold")
        grid.add_column("batch size", justify="right")
        for k in table.draft_lengths:
            grid.add_column(str(k + offset), justify="right")
        for rows, line in zip(table.batch_sizes, seconds, strict=True):
            grid.add_row(str(rows), *(number(1e3 * s, 1) for s in line))
        grids.append(grid)
    return grids


def schedule_table(table: CostTable, rates: np.ndarray) -> Table:
    """rates: [rows, k] predicted tokens per second (`cost.tokens_per_s`); the best of a line is marked."""
    title = "predicted tokens/s, all rows together, by draft tokens (* best)"
    grid = Table(title=title, title_justify="left", header_style="bold")
    grid.add_column("batch size", justify="right")
    for k in range(rates.shape[1]):
        grid.add_column(str(k), justify="right")
    for rows in table.batch_sizes:
        own = rates[rows - 1]
        grid.add_row(str(rows), *(f"{rate:.1f}{'*' if k == own.argmax() else ' '}" for k, rate in enumerate(own)))
    return grid


def plot_cost(table: CostTable, title: str, path: Path) -> Path:
    """Verify seconds against tokens, and draft seconds against k, a line per batch size."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    figure.suptitle(title)
    lengths = np.array(table.draft_lengths)
    for axis, seconds, x, label, said in (
        (axes[0], table.verify_s, lengths + 1, "tokens of each row", "Verifying a step"),
        (axes[1], table.draft_s, lengths, "draft tokens of each row", "Drafting for a step"),
    ):
        for place, (rows, line) in enumerate(zip(table.batch_sizes, seconds, strict=True)):
            colour = plt.get_cmap("viridis")(place / max(len(table.batch_sizes), 2))
            axis.plot(x, 1e3 * np.array(line), marker="o", markersize=4, color=colour, label=f"batch size {rows}")
        axis.set_xlabel(label)
        axis.set_ylabel("milliseconds")
        axis.set_title(said)
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=8)
    with writing(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
