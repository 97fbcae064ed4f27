"""Parts of plots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.files import writing


@contextlib.contextmanager
def saved_figure(
    path: Path, title: str | None, rows: int, columns: int, size: tuple[float, float], **layout: Any
) -> Iterator[Any]:
    """Yield (pyplot, figure, axes) to draw into, and save the figure as a PNG at the end. size: width and height in inches."""
    import matplotlib

    matplotlib.use("Agg")  # no screen
    matplotlib.rcParams["text.parse_math"] = False  # a $ in a user's words is no formula
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, constrained_layout=True, **layout)
    try:
        if title is not None:
            figure.suptitle(title)
        yield plt, figure, axes
        with writing(path):
            figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)


def log_scale(axis: Any, which: str) -> None:
    """A logarithmic scale with plain numbers on it. which: "x" or "y"."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set(**{f"{which}scale": "log"})
    scale = axis.xaxis if which == "x" else axis.yaxis
    scale.set_minor_locator(LogLocator(subs=(2, 5)))
    for set_formatter in (scale.set_major_formatter, scale.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.tick_params(axis=which, which="minor", labelsize=8)


def integer_ticks(axis: Any) -> None:
    """Ticks of the x axis at whole numbers only."""
    axis.xaxis.get_major_locator().set_params(integer=True)
