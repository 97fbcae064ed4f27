"""Parts of tables: numbers as the cells show them."""

from __future__ import annotations


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def median_and_p99(numbers: dict[str, float] | None, scale: float = 1.0, digits: int = 2) -> str:
    """median / 99th percentile."""
    if numbers is None:
        return "-"
    values = scale * numbers["median"], scale * numbers["p99"]
    return " / ".join(f"{value:.{digits if value < 100 else 0}f}" for value in values)
