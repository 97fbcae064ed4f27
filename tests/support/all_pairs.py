"""Parameters of a test along several axes, of which the ordinary run takes a part, and the long proof the rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest


def all_pairs(rows: Sequence[Any], columns: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """pytest parameters, one value of each axis. In the ordinary run every pair of values of any two axes comes at least once;
    the rest of the product is in the long proof. Values may be pytest parameters, which have ids."""
    axes = [[value if hasattr(value, "marks") else pytest.param(value) for value in axis] for axis in (rows, columns, *others)]
    # a step without a common divisor reaches every value of an axis
    steps = [next(n for n in itertools.count(first) if math.gcd(n, len(axis)) == 1) for first, axis in enumerate(others, 1)]
    chosen = {
        (i, j, *((i + step * j) % len(axis) for step, axis in zip(steps, others, strict=True)))
        for i, j in itertools.product(range(len(rows)), range(len(columns)))
    }
    for a, b in itertools.combinations(range(len(axes)), 2):
        pairs = set(itertools.product(range(len(axes[a])), range(len(axes[b]))))
        assert {(place[a], place[b]) for place in chosen} == pairs, "the first two axes must have more values"
    return [
        pytest.param(
            *(value for axis, i in zip(axes, place, strict=True) for value in axis[i].values),
            id="-".join(name_of(axis[i]) for axis, i in zip(axes, place, strict=True)),
            marks=[] if place in chosen else pytest.mark.prove,
        )
        for place in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def name_of(param: Any) -> str:
    """The id of a pytest parameter, or its first value."""
    return str(param.id or param.values[0])


def some_with_all(rows: Sequence[Any], columns: Sequence[Any], some: Sequence[str]) -> list[Any]:
    """pytest parameters (row, column). In the ordinary run every row comes with the first column, and some rows, by their ids,
    with every column."""
    rows, columns = ([value if hasattr(value, "marks") else pytest.param(value) for value in axis] for axis in (rows, columns))
    assert set(some) <= {name_of(row) for row in rows}
    return [
        pytest.param(
            *row.values,
            *column.values,
            id=f"{name_of(row)}-{name_of(column)}",
            marks=[] if place == 0 or name_of(row) in some else pytest.mark.prove,
        )
        for row in rows
        for place, column in enumerate(columns)
    ]
