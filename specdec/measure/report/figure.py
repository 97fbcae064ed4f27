"""Parts of plots."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """matplotlib without a screen, taking users' words as words ($ is no formula)."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False
    import matplotlib.pyplot as plt

    return plt


def log_axis(axis: Any, which: str) -> None:
    """A logarithmic axis with plain numbers on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    getattr(axis, f"set_{which}scale")("log")
    own = getattr(axis, f"{which}axis")
    own.set_minor_locator(LogLocator(subs=(2, 5)))
    for set_formatter in (own.set_major_formatter, own.set_minor_formatter):
        set_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.tick_params(axis=which, which="minor", labelsize=8)
