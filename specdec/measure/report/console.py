"""Text for people: progress on stderr, as bars or, in a log file, as lines; and tables and notes on stdout."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from specdec import fold
from specdec.measure.report.table import fitted

SPEED_PERIOD = 180.0  # seconds of which the time that is left is estimated: a training step may take ten
LOG_EVERY = 30.0  # seconds between two lines of progress in a log file
COMMAND = "python "  # begins a line that is to be copied, and so is not folded
FILE_WIDTH = 160  # of output that is no terminal, unless COLUMNS says another


class Bars(Progress):
    """Bars on stderr with rich's markup before and after them. Where that is no terminal, a line every LOG_EVERY seconds, and
    one at the end."""

    def __init__(self, before: str | None, after: str | None, visible: bool = True):
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        # a terminal too narrow for all of it wraps the note, and cuts no number
        note = TextColumn(after or "", table_column=Column(no_wrap=False))
        columns = [*([TextColumn(before)] if before else []), *bar, *([note] if after else [])]
        is_hidden = not visible or not console.is_terminal
        super().__init__(*columns, console=console, disable=is_hidden, speed_estimate_period=SPEED_PERIOD)
        self.logs = visible and not console.is_terminal
        self.logged_at = time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        task = self.tasks[task_id]
        if self.logs and (task.finished or time.monotonic() - self.logged_at >= LOG_EVERY):
            self.logged_at = time.monotonic()
            self.console.print(progress_line(task))


def progress_line(task: Task) -> str:
    """`requests 12/48, 0:01:20, 0:04:00 left`, and the note behind it."""
    total = "" if task.total is None else f"/{task.total:.0f}"
    left = None if task.time_remaining is None else timedelta(seconds=int(task.time_remaining))
    parts = [f"{task.completed:.0f}{total}", str(timedelta(seconds=int(task.elapsed or 0)))]
    parts += [] if left is None else [f"{left} left"]
    parts += [note] if (note := task.fields.get("note", "")) else []
    return " ".join(word for word in (task.description, ", ".join(parts)) if word)


@contextlib.contextmanager
def progress(total: int, visible: bool = True, **done: int) -> Iterator[Callable[..., None]]:
    """A bar for each name, of which `done` of `total` are done; yields a function (name, note="", num_done=None) that sets the
    note behind the bar of a name, and advances it by one, or to where `num_done` more than at first are done."""
    with Bars("{task.description:>12}", "{task.fields[note]}", visible) as bars:
        tasks = {name: bars.add_task(name, total=total, completed=count, note="") for name, count in done.items()}

        def advance(name: str, note: str = "", num_done: int | None = None) -> None:
            bars.update(tasks[name], note=note)
            more = 1 if num_done is None else done[name] + num_done - bars.tasks[tasks[name]].completed
            if more:
                bars.advance(tasks[name], more)

        yield advance


@contextlib.contextmanager
def one_bar(label: str, total: int | None, visible: bool = True) -> Iterator[Callable[..., None]]:
    """A bar; yields a function (count=1, note=None) that advances it and sets the note behind it. total: None if unknown."""
    with Bars("{task.description}", "{task.fields[note]}", visible) as bars:
        task = bars.add_task(label, total=total, note="")

        def advance(count: int = 1, note: str | None = None) -> None:
            if note is not None:
                bars.update(task, note=note)
            bars.advance(task, count)

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
    with Bars(None, "{task.fields[note]}", visible) as bars:
        task = bars.add_task("steps", total=total, note="")
        latest: dict[str, str] = {}

        def show_row(row: dict[str, Any]) -> None:
            numbers = {
                # of the first unrolled step: the sum, which is what is minimised, grows with every step more
                "loss": next(iter(row.get("step_loss") or []), None),
                "held out": next(iter(row.get("val_step_loss") or []), None),
                "mean acceptance length": row.get("mean_acceptance_length"),
            }
            for label, value in numbers.items():
                if value is not None:
                    latest[label] = f"{label} {value:.3f}"
            bars.update(task, note="  ".join(latest.values()))

        yield lambda count: bars.advance(task, count), show_row


def show(*parts: Any) -> None:
    """Print tables and lines."""
    console = Console(highlight=False, markup=False)  # a user's words may look like markup
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = FILE_WIDTH
    for part in parts:
        for piece in fitted(part, console) if isinstance(part, Table) else [part]:
            if isinstance(piece, str) and console.is_terminal and not piece.startswith(COMMAND):
                piece = fold.docstring(piece, console.width)
            console.print(piece, soft_wrap=isinstance(piece, str))
