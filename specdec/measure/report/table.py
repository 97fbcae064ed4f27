"""Parts of tables: the frame, and numbers as the cells show them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

PADDING = 3  # around a column


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


def fitted(table: Table, console: Console) -> list[Any]:
    """The table; or, where it is wider than the console, its columns in several tables, each of which begins with the columns
    that name a row: those aligned to the left, before the first that is not. Heads and names are wrapped between words; numbers
    are never cut. Then the caption, as wide as the console."""
    caption = [] if table.caption is None else [Text(str(table.caption), style="dim")]
    table.caption = None
    if Measurement.get(console, console.options.update_width(10_000), table).maximum <= console.width:
        return [table, *caption]
    num_names = max(1, len(list(itertools.takewhile(lambda column: column.justify == "left", table.columns))))
    names = table.columns[:num_names]
    others = table.columns[num_names:]
    room = console.width - len(names) * PADDING - max(map(_width, others), default=0)
    name_widths = _narrowed(names, room)
    taken = sum(name_widths) + len(names) * PADDING
    pieces: list[list[Column]] = [[]]
    for column in others:
        if pieces[-1] and taken + sum(map(_width, [*pieces[-1], column])) > console.width:
            pieces.append([])
        pieces[-1].append(column)
    tables = [_with_columns([*names, *piece], [*name_widths, *map(_inner_width, piece)], table) for piece in pieces]
    tables[0].title = table.title
    return [*tables, *caption]


def _width(column: Column) -> int:
    """Of a column with its padding, if its head is wrapped between words."""
    return _inner_width(column) + PADDING


def _narrowed(columns: Sequence[Column], room: int) -> list[int]:
    """Widths of the columns that sum to no more than room, if no word has to be cut for it: lines are wrapped between words."""
    widths = [_inner_width(column) for column in columns]
    longest_word = [
        _longest(word for cell in (column.header, *column.cells) for word in str(cell).split()) for column in columns
    ]
    while sum(widths) > max(room, sum(longest_word)):
        spare = [width - least for width, least in zip(widths, longest_word, strict=True)]
        widths[spare.index(max(spare))] -= 1
    return widths


def _inner_width(column: Column) -> int:
    return _longest([*str(column.header).split(), *map(str, column.cells)])


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _with_columns(columns: Sequence[Column], widths: Sequence[int], table: Table) -> Table:
    """A table of these columns, so wide, without a title."""
    piece = new_table("", (), ())
    piece.title = None
    for column, width in zip(columns, widths, strict=True):
        piece.add_column(column.header, justify=column.justify, width=width)
    lines = zip(*(column.cells for column in columns), strict=True)
    for row, line in zip(table.rows, lines, strict=True):
        piece.add_row(*line, style=row.style, end_section=row.end_section)
    return piece


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


def draft_length(run: Mapping[str, Any]) -> str:
    """How many tokens are drafted: a number, or the longest draft and what chooses. Of trees, their nodes.

    run: a summary's `num_speculative_tokens`, `speculative_config`, and `overall`, which tells trees where the settings leave
        them to the method.
    """
    longest = run["num_speculative_tokens"]
    config = run.get("speculative_config", {})
    if not longest:
        return "-"
    if config.get("num_speculative_tokens") == "auto":
        length = f"auto up to {longest}"
    elif config.get("num_speculative_tokens_per_batch_size") is not None:
        length = f"up to {longest} by batch size"
    else:
        length = str(longest)
    is_tree = (config.get("tree_topk") or 1) > 1 or config.get("speculative_token_tree")
    if is_tree or "nodes_per_draft" in run.get("overall", {}):
        length += " nodes"
    return f"{length}, adaptive" if config.get("enable_adaptive_verification") else length


def method_words(run: Mapping[str, Any]) -> str:
    """`eagle3 (K=3, standard)`; of plain decoding `none`. run: a summary."""
    return f"{run['method']} (K={draft_length(run)}, {run['rejection']})" if run["num_speculative_tokens"] else run["method"]
