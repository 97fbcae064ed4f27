"""Parts of plots."""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec import method
from specdec.params import PLAIN

PLAIN_COLOR = "#444444"
COLORS = (  # of the other methods, in alphabetical order
    "#8c6d31", "#ff7f0e", "#17a2c4", "#1f77b4", "#843c39", "#d62728", "#e377c2", "#9467bd", "#2ca02c", "#7fb539", "#b5a300",
    "#3f4fa8", "#2a9d8f", "#a55194", "#637939", "#b15928", "#5b8ff9", "#c49c94",
)  # fmt: skip


@contextlib.contextmanager
def saved_figure(
    path: Path, title: str | None, rows: int, columns: int, size: tuple[float, float], **layout: Any
) -> Iterator[Any]:
    """Yield (figure, axes) to draw into, and save the figure as a PNG at the end, whole or not at all. It is none of pyplot's,
    whose backend a notebook has chosen. size: width and height in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"text.parse_math": False}):  # a $ in a user's words is no formula
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, **layout)
        if title is not None:
            figure.suptitle(title)
        yield figure, axes
        temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
        try:
            figure.savefig(temporary, dpi=110)
            temporary.replace(path)
        except OSError as error:
            number = error.errno or errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from None
        finally:
            temporary.unlink(missing_ok=True)


def method_color(name: str) -> str:
    """The colour of a method in every plot and page, as #rrggbb. A method that this version lacks has one by its name."""
    if name == PLAIN:
        return PLAIN_COLOR
    known = [other for other in method.names() if other != PLAIN]
    place = known.index(name) if name in known else zlib.crc32(name.encode())
    return COLORS[place % len(COLORS)]


def run_colors(method_of: Mapping[str, str]) -> dict[str, str]:
    """The colour of each run: its method's, lighter for every further run of the same method. method_of: by run."""
    num_runs = Counter(method_of.values())
    num_before: Counter[str] = Counter()
    colors = {}
    for run, name in method_of.items():
        white = 0.6 * num_before[name] / num_runs[name]
        num_before[name] += 1
        channels = (int(method_color(name)[i : i + 2], 16) for i in (1, 3, 5))
        colors[run] = "#" + "".join(f"{round(channel + (255 - channel) * white):02x}" for channel in channels)
    return colors


def say_if_empty(axis: Any, values: Sequence[Any], text: str) -> None:
    """Say why there is nothing to see, if none of the values is a number."""
    if not any(not isinstance(value, float) or value == value for value in values):
        axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center")


def log_scale(axis: Any, which: str) -> None:
    """A logarithmic scale with plain numbers on it. which: "x" or "y"."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set(**{f"{which}scale": "log"})
    scale = axis.xaxis if which == "x" else axis.yaxis
    scale.set_minor_locator(LogLocator(subs=(2, 5)))
    for set_formatter in (scale.set_major_formatter, scale.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.tick_params(axis=which, which="minor", labelsize=8)


def integer_ticks(axis: Any, which: str = "x") -> None:
    """Ticks at whole numbers only, even where there is but one. which: "x" or "y"."""
    getattr(axis, f"{which}axis").get_major_locator().set_params(integer=True, min_n_ticks=1)
