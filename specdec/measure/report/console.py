"""Text for people: progress bars on stderr, and tables and notes on stdout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from specdec.measure.report.table import fitted

FILE_WIDTH = 160  # of output that is no terminal, unless COLUMNS says another


def _progress(before: str | None, after: str | None, visible: bool = True) -> Progress:
    """Bars on stderr with rich's markup before and after them."""
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    columns = [*([TextColumn(before)] if before else []), *bar, *([TextColumn(after)] if after else [])]
    return Progress(*columns, console=Console(stderr=True), disable=not visible)


@contextlib.contextmanager
def progress(total: int, visible: bool = True, **done: int) -> Iterator[Callable[[str], None]]:
    """A bar for each name, of which `done` of `total` are done; yields a function that advances the bar of a name by one."""
    with _progress("{task.description:>12}", None, visible) as bars:
        tasks = {name: bars.add_task(name, total=total, completed=count) for name, count in done.items()}
        yield lambda name: bars.advance(tasks[name])


@contextlib.contextmanager
def one_bar(label: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar; yields a function (count=1, note=None) that advances it and sets the note behind it. total: None if unknown."""
    with _progress("{task.description}", "{task.fields[note]}") as bars:
        task = bars.add_task(label, total=total, note="")

        def advance(count: int = 1, note: str | None = None) -> None:
            bars.advance(task, count)
            if note is not None:
                bars.update(task, note=note)

        try:
            yield advance
        except ValueError:  # the error is one line, without an empty bar above it
            bars.update(task, visible=bool(bars.tasks[0].completed))
            raise


@contextlib.contextmanager
def training_progress(
    total: int, visible: bool = True
) -> Iterator[tuple[Callable[[int], None], Callable[[dict[str, Any]], None]]]:
    """A bar over the optimiser steps; yields a function that advances it, and one that shows a row of metrics behind it."""
    with _progress(None, "{task.description}", visible) as bars:
        task = bars.add_task("", total=total)
        latest: dict[str, str] = {}

        def show_row(row: dict[str, Any]) -> None:
            for key, label in (("loss", "loss"), ("val_loss", "val"), ("mean_acceptance_length", "accepts")):
                if row.get(key) is not None:
                    latest[label] = f"{label} {row[key]:.3f}"
            bars.update(task, description="  ".join(latest.values()))

        yield lambda count: bars.advance(task, count), show_row


def show(*parts: Any) -> None:
    """Print tables and lines."""
    console = Console(highlight=False, markup=False)  # a user's words may look like markup
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = FILE_WIDTH
    for part in parts:
        for piece in fitted(part, console) if isinstance(part, Table) else [part]:
            console.print(piece, soft_wrap=isinstance(piece, str))
