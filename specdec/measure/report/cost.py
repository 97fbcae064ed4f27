"""Tables and plot of measured costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from specdec.measure.report.figure import integer_ticks, saved_figure
from specdec.measure.report.table import new_table, number
from specdec.policy.cost_table import CostTable


def cost_tables(costs: CostTable) -> list[Table]:
    """Milliseconds of verifying, by tokens of each row, and of drafting, by length, for every batch size."""
    about = costs.about
    where = f"{about['target']}, {about['dtype']}, {about['device']}, context {about['context']}"
    tables = []
    for title, seconds, offset in (
        (f"verifying, ms, by tokens of each row ({where})", costs.verify_s, 1),
        (f"drafting, ms, by draft tokens of each row ({about['method']})", costs.draft_s, 0),
    ):
        table = new_table(title, [], ["batch size", *(str(k + offset) for k in costs.draft_lengths)])
        for rows, line in zip(costs.batch_sizes, seconds, strict=True):
            table.add_row(str(rows), *(number(1e3 * s, 1) for s in line))
        tables.append(table)
    return tables


def schedule_table(costs: CostTable, rates: np.ndarray) -> Table:
    """rates: [rows, k] predicted tokens per second (`cost_table.tokens_per_s`); the best of a line is marked."""
    title = "predicted tokens/s, all rows together, by draft tokens (* best)"
    table = new_table(title, [], ["batch size", *map(str, range(rates.shape[1]))])
    for rows in costs.batch_sizes:
        rate_K = rates[rows - 1]
        table.add_row(str(rows), *(f"{rate:.1f}{'*' if k == rate_K.argmax() else ' '}" for k, rate in enumerate(rate_K)))
    return table


def plot_cost(costs: CostTable, title: str, path: Path) -> Path:
    """Verify seconds against tokens, and draft seconds against k, a line per batch size."""
    from matplotlib import colormaps

    lengths = np.array(costs.draft_lengths)
    num_sizes = len(costs.batch_sizes)
    with saved_figure(path, title, 1, 2, (12, 4.5)) as (_, axes):
        colours = [colormaps["viridis"](i / max(num_sizes, 2)) for i in range(num_sizes)]
        for axis, seconds, x, label, panel in (
            (axes[0], costs.verify_s, lengths + 1, "tokens of each row", "Verifying a step"),
            (axes[1], costs.draft_s, lengths, "draft tokens of each row", "Drafting for a step"),
        ):
            for rows, line, colour in zip(costs.batch_sizes, seconds, colours, strict=True):
                axis.plot(x, 1e3 * np.array(line), marker="o", markersize=4, color=colour, label=f"batch size {rows}")
            axis.set(xlabel=label, ylabel="milliseconds", title=panel)
            axis.set_ylim(bottom=0)
            integer_ticks(axis)
            axis.legend(fontsize=8)
    return path
