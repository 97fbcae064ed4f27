"""Text for people: progress bars on stderr, and tables and notes on stdout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress(total: int, visible: bool = True, **done: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr for each name, `done` of `total` through; yields a function that advances the named one by one."""
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bars:
        places = {name: bars.add_task(name, total=total, completed=count) for name, count in done.items()}
        yield lambda name: bars.advance(places[name])


@contextlib.contextmanager
def one_bar(label: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar on stderr; yields a function that advances it by one, and says words behind it if some are given. total None: it
    is not known how much there is."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        place = bars.add_task(label, total=total, said="")

        def advance(count: int = 1, said: str | None = None) -> None:
            bars.advance(place, count)
            if said is not None:
                bars.update(place, said=said)

        try:
            yield advance
        except ValueError:  # what could not begin ends with one line, and no empty bar above it
            bars.update(place, visible=bool(bars.tasks[0].completed))
            raise


@contextlib.contextmanager
def steps(total: int, visible: bool = True) -> Iterator[tuple[Callable[[int], None], Callable[[dict[str, Any]], None]]]:
    """A bar on stderr over the optimiser steps; yields a function that advances it, and one that shows a row of metrics."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bars:
        place = bars.add_task("", total=total)
        latest: dict[str, str] = {}

        def show_row(row: dict[str, Any]) -> None:
            for key, label in (("loss", "loss"), ("val_loss", "val"), ("mean_acceptance_length", "accepts")):
                if row.get(key) is not None:
                    latest[label] = f"{label} {row[key]:.3f}"
            bars.update(place, description="  ".join(latest.values()))

        yield lambda count: bars.advance(place, count), show_row


def show(*parts: Any) -> None:
    """Print for people; wide enough for a table when the output is a file."""
    console = Console(highlight=False, markup=False)  # what users wrote may look like markup
    if not console.is_terminal:
        console.width = max(console.width, 160)
    for part in parts:
        console.print(part)


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A table for a README. Bars inside cells become slashes."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)
