"""Tables and plot of measured costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from specdec.measure.report.figure import integer_ticks, saved_figure
from specdec.measure.report.table import new_table, number
from specdec.measure.stats import expected_tokens
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


def schedule_table(costs: CostTable, survival: Sequence[float], rates: np.ndarray) -> Table:
    """What a draft of k tokens, or a tree of k nodes, would give, for the k that were measured and the best of each batch size.

    survival: P(a step has i draft tokens and all, or of a tree the i-th, are accepted).
    rates: [rows, k] predicted tokens per second (`cost_table.tokens_per_s`).
    """
    best = {rows: int(rates[rows - 1].argmax()) for rows in costs.batch_sizes}
    kind = "nodes" if costs.about.get("drafts") == "trees" else "draft tokens"
    title = "predicted tokens/s, all rows together (* best)"
    table = new_table(title, [], [kind, "tokens/step", *(f"batch size {rows}" for rows in costs.batch_sizes)])
    for k in sorted({k for k in costs.draft_lengths if k < rates.shape[1]} | {*best.values()}):
        cells = (f"{rates[rows - 1, k]:.1f}{'*' if k == best[rows] else ' '}" for rows in costs.batch_sizes)
        table.add_row(str(k), number(expected_tokens(survival[:k]), 2), *cells)
    return table


def plot_cost(
    costs: CostTable, title: str, path: Path, survival: Sequence[float] | None = None, rates: np.ndarray | None = None
) -> Path:
    """Verify seconds against tokens, and draft seconds against k, a line per batch size; where the acceptance is known, tokens
    per step against k, with the best k of each batch size marked. survival, rates: as in `schedule_table`."""
    from matplotlib import colormaps

    lengths = np.array(costs.draft_lengths)
    num_sizes = len(costs.batch_sizes)
    num_panels = 2 if rates is None else 3
    with saved_figure(path, title, 1, num_panels, (6 * num_panels, 4.5)) as (_, axes):
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
        if rates is not None and survival is not None:
            axis = axes[2]
            tokens_K = np.array([expected_tokens(survival[:k]) for k in range(rates.shape[1])])
            axis.plot(tokens_K, color="black", linewidth=1)
            for rows, colour in zip(costs.batch_sizes, colours, strict=True):
                best = int(rates[rows - 1].argmax())
                axis.plot(best, tokens_K[best], "o", color=colour, label=f"most tokens/s at batch size {rows}: {best}")
            kind = "nodes of a tree" if costs.about.get("drafts") == "trees" else "draft tokens"
            axis.set(xlabel=kind, ylabel="tokens per step", title="What was accepted")
            axis.set_ylim(bottom=0)
            integer_ticks(axis)
            axis.legend(fontsize=8)
    return path
