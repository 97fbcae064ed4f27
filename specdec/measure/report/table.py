"""Parts of tables: the frame, and numbers as the cells show them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE
from rich.table import Table


def new_table(title: str, left: Iterable[str], right: Iterable[str], caption: str | None = None) -> Table:
    """An empty table that fits a terminal of 80 columns if it can.

    title, caption: above and below it.
    left, right: heads of the columns, by the side to which their cells are aligned. Those on the right may wrap.
    """
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE, pad_edge=False)
    table.caption = caption
    table.caption_justify = "left"
    table.caption_style = "dim"
    for head in left:
        table.add_column(head, no_wrap=True)
    for head in right:
        table.add_column(head, justify="right")
    return table


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def interval(low_and_high: Iterable[float] | None) -> str:
    return "-" if low_and_high is None else "{:.2f} to {:.2f}".format(*low_and_high)


def median_and_p99(percentiles: dict[str, float] | None, scale: float = 1.0, digits: int = 2) -> str:
    """`median / 99th percentile` of what `stats.percentiles` returned. Values from 100 on have no decimals."""
    if percentiles is None:
        return "-"
    values = (scale * percentiles["median"], scale * percentiles["p99"])
    return " / ".join(f"{value:.{digits if value < 100 else 0}f}" for value in values)


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A table for a README. Bars inside cells become slashes."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)
