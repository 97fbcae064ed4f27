"""What drafting and verifying cost on this machine, as a table, and what it predicts.

A table holds the seconds of the engine's two phases, framework overhead included: V(rows, tokens), the verification of a step,
and D(rows, k), the drafting of k tokens for each of so many rows. `specdec.policy.profiling` measures it; policies read it.
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
from specdec.files import read_json_object, write_atomically
from specdec.model.target import CausalLM

FORMAT = "specdec-cost"


@dataclass(frozen=True)
class CostTable:
    """Seconds by rows and tokens; linear between the entries and beyond them.

    batch_sizes: ascending numbers of rows.
    draft_lengths: ascending draft tokens of each row, from 0 on.
    verify_s: [i][j] seconds of a step that verifies draft_lengths[j] + 1 tokens in each of batch_sizes[i] rows.
    draft_s: [i][j] seconds of drafting draft_lengths[j] tokens for each of batch_sizes[i] rows.
    about: what was measured, and where.
    schedule: a proposal for num_speculative_tokens_per_batch_size, if one was made.
    """

    batch_sizes: list[int]
    draft_lengths: list[int]
    verify_s: list[list[float]]
    draft_s: list[list[float]]
    about: dict[str, Any]
    schedule: list[list[int]] | None = None

    def verify(self, rows: int, tokens: Any) -> Any:
        """Seconds of a step of that many rows; tokens: of all of them together (a number or an array)."""
        draft_per_row = np.asarray(tokens, dtype=float) / rows - 1
        by_size = [interpolate(draft_per_row, self.draft_lengths, seconds) for seconds in self.verify_s]
        return interpolate_batch(rows, self.batch_sizes, by_size)

    def draft(self, lengths_B: Any) -> float:
        """Seconds of drafting so many tokens for each row. Rows that need fewer leave earlier."""
        lengths_B = np.asarray(lengths_B)
        rows_K = [(lengths_B >= k).sum() for k in range(1, int(lengths_B.max(initial=0)) + 1)]
        return float(sum(self.draft_round(k, rows) for k, rows in enumerate(rows_K, 1)))

    def draft_round(self, k: int, rows: Any) -> Any:
        """Seconds that the k-th token of a draft adds (k from 1 on), for that many rows (a number or an array, 0 allowed)."""
        by_size = [
            interpolate(k, self.draft_lengths, seconds) - (interpolate(k - 1, self.draft_lengths, seconds) if k > 1 else 0.0)
            for seconds in self.draft_s
        ]
        seconds = interpolate(np.maximum(rows, 1), self.batch_sizes, by_size) if len(by_size) > 1 else by_size[0]
        return np.where(np.asarray(rows) > 0, np.maximum(seconds, 0.0), 0.0)

    def step(self, step: Step) -> float:
        """Seconds of a step that was decoded."""
        rows = len(step.verified_B)
        model_drafted_B = step.drafted_B if step.num_model_drafted_B is None else step.num_model_drafted_B
        return self.draft(model_drafted_B) + float(self.verify(rows, rows + step.verified_B.sum()))

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps({"format": FORMAT, "format_version": 1, **asdict(self)}, indent=1) + "\n")


class _CostFile(Checked):
    """The keys of a cost table's file."""

    model_config = ConfigDict(allow_inf_nan=True)  # checked with the shapes
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
        values = read_json_object(path)
        if values.pop("format", None) != FORMAT or str(values.pop("format_version", None)) != "1":
            raise ValueError("not a file of eval/profile_cost.py")
        table = CostTable(**_CostFile(**values).model_dump())
        for name, axis in (("batch_sizes", table.batch_sizes), ("draft_lengths", table.draft_lengths)):
            if not axis or sorted(set(axis)) != axis:
                raise ValueError(f"{name} must be ascending numbers")
        num_sizes = len(table.batch_sizes)
        num_lengths = len(table.draft_lengths)
        for name, seconds in (("verify_s", table.verify_s), ("draft_s", table.draft_s)):
            has_shape = len(seconds) == num_sizes and {len(row) for row in seconds} == {num_lengths}
            if not has_shape or not np.isfinite(seconds).all() or np.min(seconds) < 0:
                raise ValueError(f"{name} must be {num_sizes} x {num_lengths} seconds")
        if np.min(table.verify_s) <= 0:
            raise ValueError("verify_s has a step that takes no time")
        if table.batch_sizes[0] < 1 or table.draft_lengths[0] != 0:
            raise ValueError("batch_sizes begin at 1 or more, draft_lengths at 0")
    except ValueError as error:
        raise ValueError(f"cost table {path}: {error}; make one with eval/profile_cost.py") from None
    return table


def identity(target: CausalLM, proposer: Proposer) -> dict[str, Any]:
    """What the costs of a target and a proposer depend on."""
    return {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "method": type(proposer).__module__.rpartition(".")[2],
        "drafts": "trees" if proposer.drafts_trees else "chains",
    }


def check_fits(table: CostTable, target: CausalLM, proposer: Proposer) -> None:
    """Raise ValueError if the table was measured with another target, dtype, device or method."""
    for key, here in identity(target, proposer).items():
        if (there := table.about.get(key, here)) != here:
            raise ValueError(
                f"the cost table is of {key}={there}, and here it is {here}; make one for this with eval/profile_cost.py"
            )


def interpolate(x: Any, known: Sequence[float], values: Any) -> Any:
    """Linear interpolation; beyond the ends the last slope goes on, and no value is below 0. values: at `known`, of any
    further shape."""
    values = np.asarray(values, dtype=float)
    x = np.asarray(x, dtype=float)
    if len(known) == 1:
        return values[0] + np.zeros_like(x)
    place = np.clip(np.searchsorted(known, x) - 1, 0, len(known) - 2)
    at = np.asarray(known, dtype=float)
    share = (x - at[place]) / (at[place + 1] - at[place])
    return np.maximum(values[place] * (1 - share) + values[place + 1] * share, 0.0)


def interpolate_batch(rows: int, sizes: Sequence[int], by_size: list[Any]) -> Any:
    """Interpolation between the two neighbours of a batch size. Beyond the largest size no less than at it; below the
    smallest no less than a share of it in proportion to the rows."""
    if len(sizes) == 1:
        return by_size[0] * rows / sizes[0]
    place = int(np.clip(np.searchsorted(sizes, rows) - 1, 0, len(sizes) - 2))
    share = (rows - sizes[place]) / (sizes[place + 1] - sizes[place])
    lower_bound = by_size[-1] if rows > sizes[-1] else by_size[0] * min(rows / sizes[0], 1.0)
    value = by_size[place] * (1 - share) + by_size[place + 1] * share
    return np.maximum(value, lower_bound * (share < 0 or share > 1))


def share_verification(tables: dict[str, CostTable]) -> dict[str, CostTable]:
    """The same tables with one set of verification costs, since these are the target's and no drafter's: the median over all
    tables that measured the length. They were measured one after the other, and a slow moment of the machine is in one only."""
    shared = {}
    for name, table in tables.items():
        verify_s = []
        for rows in table.batch_sizes:
            by_length = []
            for k in table.draft_lengths:
                measured = [float(t.verify(rows, rows * (k + 1))) for t in tables.values() if t.draft_lengths[-1] >= k]
                by_length.append(float(np.median(measured)))
            verify_s.append(by_length)
        shared[name] = replace(table, verify_s=verify_s)
    return shared


# ---------------------------------------------------------------- predicting


def predicted_seconds(steps: Iterable[Step], table: CostTable) -> float:
    """Seconds that the steps take by the table."""
    return sum(table.step(step) for step in steps)


def tokens_per_s(
    table: CostTable, survival: Sequence[float], num_speculative_tokens: int, draft_share: Sequence[float] | None = None
) -> np.ndarray:
    """[rows, k] tokens per second of steps of 1, 2, ... rows that draft up to k = 0, 1, ... tokens each.

    survival: P(a step has i draft tokens and all of them are accepted) for i = 1 ..., of drafts that nothing cut short; beyond
        its end, no token is accepted.
    num_speculative_tokens: the largest k.
    draft_share: P(a step has i draft tokens), for drafters that find no draft in some steps; without it all steps draft k.
    """
    max_draft = min(num_speculative_tokens, len(survival))
    draft_share_K = np.ones(max_draft) if draft_share is None else np.asarray(draft_share, dtype=float)[:max_draft]
    expected_tokens = 1 + np.concatenate([[0.0], np.cumsum(survival[:max_draft])])
    expected_draft = np.concatenate([[0.0], np.cumsum(draft_share_K)])
    rates = []
    for rows in range(1, table.batch_sizes[-1] + 1):
        round_s = [share * float(table.draft_round(k, rows)) for k, share in enumerate(draft_share_K, 1)]
        seconds = table.verify(rows, rows * (1 + expected_draft)) + np.concatenate([[0.0], np.cumsum(round_s)])
        rates.append(rows * expected_tokens / seconds)
    return np.array(rates)


def best_schedule(
    table: CostTable, survival: Sequence[float], num_speculative_tokens: int, draft_share: Sequence[float] | None = None
) -> list[list[int]]:
    """[[first batch size, last, K], ...] with the K of most tokens per second by the table; arguments as of `tokens_per_s`."""
    schedule: list[list[int]] = []
    for rows, rates in enumerate(tokens_per_s(table, survival, num_speculative_tokens, draft_share), 1):
        best = int(np.argmax(rates))
        if schedule and schedule[-1][2] == best:
            schedule[-1][1] = rows
        else:
            schedule.append([rows, rows, best])
    return schedule
