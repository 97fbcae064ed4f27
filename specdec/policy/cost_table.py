"""What drafting and verifying cost on this machine, as a table, and what it predicts.

A table holds the seconds of the engine's two phases, framework and all: V(rows, tokens), the verification of a step, and
D(rows, k), the drafting of k tokens for each of so many rows. Whoever chooses how much to draft reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import ConfigDict

from specdec.checked import Checked
from specdec.core import Proposer, Step
from specdec.files import read_json_object
from specdec.model.target import CausalLM

FORMAT = "specdec-cost"


@dataclass(frozen=True)
class CostTable:
    """Seconds by rows and tokens; linear in between and beyond.

    batch_sizes: ascending rows; draft_lengths: ascending k from 0 on; verify_s[i][j]: a step that verifies draft_lengths[j] + 1
    tokens in each of batch_sizes[i] rows; draft_s[i][j]: drafting draft_lengths[j] tokens for each of them. about: what was
    measured, and where. schedule: a proposal for num_speculative_tokens_per_batch_size, if one was made.
    """

    batch_sizes: list[int]
    draft_lengths: list[int]
    verify_s: list[list[float]]
    draft_s: list[list[float]]
    about: dict[str, Any]
    schedule: list[list[int]] | None = None

    def verify(self, rows: int, tokens: Any) -> Any:
        """Seconds of a step of that many rows and, all of them together, tokens (a number or an array)."""
        per_row = np.asarray(tokens, dtype=float) / rows - 1
        of_size = [interpolate(per_row, self.draft_lengths, seconds) for seconds in self.verify_s]
        return interpolate_batch(rows, self.batch_sizes, of_size)

    def draft(self, lengths_B: Any) -> float:
        """Seconds of drafting so many tokens for each row. Rows that need fewer leave earlier."""
        lengths_B = np.asarray(lengths_B)
        rounds = [(lengths_B >= k).sum() for k in range(1, int(lengths_B.max(initial=0)) + 1)]
        return float(sum(self.draft_round(k, rows) for k, rows in enumerate(rounds, 1)))

    def draft_round(self, k: int, rows: Any) -> Any:
        """Seconds that the k-th token of a draft adds (k from 1 on), for that many rows (a number or an array, 0 allowed)."""
        of_size = [
            interpolate(k, self.draft_lengths, seconds) - (interpolate(k - 1, self.draft_lengths, seconds) if k > 1 else 0.0)
            for seconds in self.draft_s
        ]
        seconds = interpolate(np.maximum(rows, 1), self.batch_sizes, of_size) if len(of_size) > 1 else of_size[0]
        return np.where(np.asarray(rows) > 0, np.maximum(seconds, 0.0), 0.0)

    def step(self, step: Step) -> float:
        """Seconds of a step as it was."""
        rows, num_model_drafted_B = (
            len(step.drafted_B),
            step.made_B if step.num_model_drafted_B is None else step.num_model_drafted_B,
        )
        return self.draft(num_model_drafted_B) + float(self.verify(rows, rows + step.drafted_B.sum()))

    def save(self, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps({"format": FORMAT, "format_version": 1, **asdict(self)}, indent=1) + "\n")
        temporary.replace(path)


class _Written(Checked):
    """A CostTable as its file has it."""

    model_config = ConfigDict(allow_inf_nan=True)  # looked at with the shapes
    what: ClassVar[str] = "cost table key"

    batch_sizes: list[int]
    draft_lengths: list[int]
    verify_s: list[list[float]]
    draft_s: list[list[float]]
    about: dict[str, Any]
    schedule: list[list[int]] | None = None


def load(path: str | Path) -> CostTable:
    """A table that `save` wrote. ValueError, one line, for anything else."""
    path = Path(path).expanduser()
    try:
        told = read_json_object(path)
        if told.pop("format", None) != FORMAT or str(told.pop("format_version", None)) != "1":
            raise ValueError("not a file of eval/profile_cost.py")
        table = CostTable(**_Written(**told).model_dump())
        shape = len(table.batch_sizes), len(table.draft_lengths)
        for name, axis in (("batch_sizes", table.batch_sizes), ("draft_lengths", table.draft_lengths)):
            if not axis or sorted(set(axis)) != axis:
                raise ValueError(f"{name} must be ascending numbers")
        for name, seconds in (("verify_s", table.verify_s), ("draft_s", table.draft_s)):
            ragged = (len(seconds), *{len(row) for row in seconds}) != shape
            if ragged or not np.isfinite(seconds).all() or np.min(seconds) < 0:
                raise ValueError(f"{name} must be {shape[0]} x {shape[1]} seconds")
        if np.min(table.verify_s) <= 0:
            raise ValueError("verify_s has a step that takes no time")
        if table.batch_sizes[0] < 1 or table.draft_lengths[0] != 0:
            raise ValueError("batch_sizes begin at 1 or more, draft_lengths at 0")
    except ValueError as error:
        raise ValueError(f"cost table {path}: {error}; make one with eval/profile_cost.py") from None
    return table


def identity(target: CausalLM, proposer: Proposer) -> dict[str, Any]:
    """What a table is of."""
    return {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "method": type(proposer).__module__.rpartition(".")[2],
    }


def check_fits(table: CostTable, target: CausalLM, proposer: Proposer) -> None:
    """Raise ValueError if the table is of something else."""
    for key, here in identity(target, proposer).items():
        if (there := table.about.get(key, here)) != here:
            raise ValueError(f"the cost table is of {key} {there!r}, and this is {here!r}; make one with eval/profile_cost.py")


def interpolate(x: Any, known: Sequence[float], values: Any) -> Any:
    """Linear interpolation; beyond the ends the last slope goes on, and nothing falls below 0. values: by `known`, of any
    further shape."""
    values = np.asarray(values, dtype=float)
    if len(known) == 1:
        return values[0] + np.zeros_like(np.asarray(x, dtype=float))
    x = np.asarray(x, dtype=float)
    place = np.clip(np.searchsorted(known, x) - 1, 0, len(known) - 2)
    low, high = np.asarray(known, dtype=float)[place], np.asarray(known, dtype=float)[place + 1]
    share = (x - low) / (high - low)
    return np.maximum(values[place] * (1 - share) + values[place + 1] * share, 0.0)


def interpolate_batch(rows: int, sizes: Sequence[int], of_size: list[Any]) -> Any:
    """The two neighbours of a batch size, mixed; beyond the ends no less than at the last size, and no less than its share of
    the first."""
    if len(sizes) == 1:
        return of_size[0] * rows / sizes[0]
    place = int(np.clip(np.searchsorted(sizes, rows) - 1, 0, len(sizes) - 2))
    share = (rows - sizes[place]) / (sizes[place + 1] - sizes[place])
    least = of_size[-1] if rows > sizes[-1] else of_size[0] * min(rows / sizes[0], 1.0)
    return np.maximum(of_size[place] * (1 - share) + of_size[place + 1] * share, least * (share < 0 or share > 1))


def share_verification(tables: dict[str, CostTable]) -> dict[str, CostTable]:
    """The same tables with one opinion about verifying, which is the target's and no drafter's: the median of all that went so
    far. They were measured one after the other, and a slow moment of the machine is in one of them only."""
    shared = {}
    for name, table in tables.items():
        verify = []
        for rows in table.batch_sizes:
            of_length = []
            for k in table.draft_lengths:
                seen = [float(t.verify(rows, rows * (k + 1))) for t in tables.values() if t.draft_lengths[-1] >= k]
                of_length.append(float(np.median(seen)))
            verify.append(of_length)
        shared[name] = replace(table, verify_s=verify)
    return shared


def predicted_seconds(steps: Iterable[Step], table: CostTable) -> float:
    """What the steps should have taken."""
    return sum(table.step(step) for step in steps)


def tokens_per_s(
    table: CostTable, survival: Sequence[float], num_speculative_tokens: int, reach: Sequence[float] | None = None
) -> np.ndarray:
    """[rows, k] tokens per second of steps of 1, 2, ... rows that draft up to k = 0, 1, ... tokens each.

    survival: P(a step has i draft tokens and all of them stand) for i = 1 ..., of drafts that are not cut short; beyond its
    end, nothing. reach: P(a step has i draft tokens), for drafters that find nothing in some steps; without it all draft k.
    """
    most = min(num_speculative_tokens, len(survival))
    reach_K = np.ones(most) if reach is None else np.asarray(reach, dtype=float)[:most]
    expected = 1 + np.concatenate([[0.0], np.cumsum(survival[:most])])
    drafted = np.concatenate([[0.0], np.cumsum(reach_K)])
    rates = []
    for rows in range(1, table.batch_sizes[-1] + 1):
        rounds = [share * float(table.draft_round(k, rows)) for k, share in enumerate(reach_K, 1)]
        seconds = table.verify(rows, rows * (1 + drafted)) + np.concatenate([[0.0], np.cumsum(rounds)])
        rates.append(rows * expected / seconds)
    return np.array(rates)


def best_schedule(
    table: CostTable, survival: Sequence[float], num_speculative_tokens: int, reach: Sequence[float] | None = None
) -> list[list[int]]:
    """[[first batch size, last, K], ...] with the K that makes most tokens per second by the table; see `tokens_per_s`."""
    found: list[list[int]] = []
    for rows, rates in enumerate(tokens_per_s(table, survival, num_speculative_tokens, reach), 1):
        best = int(np.argmax(rates))
        if found and found[-1][2] == best:
            found[-1][1] = rows
        else:
            found.append([rows, rows, best])
    return found
