"""What drafting and verifying cost on this machine: measured tables, and what they predict.

A table holds the seconds of the engine's two phases, framework and all: V(rows, tokens), the verification of a step, and
D(rows, k), the drafting of k tokens for each of so many rows. Whoever chooses how much to draft reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import ConfigDict

from specdec import rejection
from specdec.checked import Checked
from specdec.core import Context, Draft, FixedLengthPolicy, Proposer, Request, StatelessProposer, Step
from specdec.engine import Clock, Engine
from specdec.files import read_json_object
from specdec.model.target import CausalLM
from specdec.params import SamplingParams

POINTS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 25, 33, 49, 65)
LENGTHS = (0, 1, 2, 3, 5, 8, 12, 16, 24)  # of drafts; the longest that a drafter can make is added
FORMAT = "specdec-cost"


def verify_seconds(
    target: CausalLM, num_rows: int, num_tokens: int, context: int = 256, repeats: int = 7
) -> Callable[[float], float]:
    """Seconds of one forward of n tokens in each of num_rows rows with `context` tokens before them, n up to num_tokens.

    The least of the repeats, since other work can only add to it; the sizes in turn within each repeat, so that a slow moment
    hits all of them; more tokens are held to cost no less than fewer; linear in between.
    """
    sizes = sorted({n for n in POINTS if n <= num_tokens} | {1, num_tokens})
    context = max(min(context, target.max_model_len - num_tokens), 1)
    cache = target.new_cache()
    cache.reserve(num_rows, context + num_tokens)
    start_B = np.full(num_rows, context)
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for repeat in range(repeats + 1):
        for n in sizes:
            tokens = torch.arange(num_rows * n, device=target.device) % target.vocab_size
            clock = Clock(target.device)
            target.forward(cache, tokens, start_B, np.full(num_rows, n))
            clock.mark()
            if repeat:  # the first round warms up
                times[n] += clock.seconds()
    least = isotonic([min(times[n]) for n in sizes])
    return lambda n: float(np.interp(n, sizes, least))


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


# ---------------------------------------------------------------- measuring


class PaddedProposer(StatelessProposer):
    """Another proposer, whose drafts are filled up, so that what is verified has the size that was asked for."""

    def __init__(self, inner: Proposer, most: int):
        self.inner, self.num_speculative_tokens, self.hidden_layers = inner, most, inner.hidden_layers
        self.needs_logits, self.needs_uniforms = inner.needs_logits, inner.needs_uniforms
        self.bytes_to_grow, self.reserve = inner.bytes_to_grow, inner.reserve  # type: ignore[method-assign]
        self.on_start, self.on_finish, self.catch_up = inner.on_start, inner.on_finish, inner.catch_up  # type: ignore[method-assign]

    def propose(self, context: Context) -> Draft:
        asked_B, own = context.max_draft_B, self.inner.num_speculative_tokens
        token_BK = context.last_token_B.unsqueeze(1).repeat(1, int(asked_B.max()))
        if own:
            made = self.inner.propose(replace(context, max_draft_B=np.minimum(asked_B, own)))
            token_BK[:, : made.token_BK.shape[1]] = made.token_BK
        return Draft(token_BK, torch.from_numpy(asked_B))


class FixedLength(FixedLengthPolicy):
    """A policy that drafts as long as it is told."""

    length = 0

    def draft_lengths(self, rows: np.ndarray, most_B: np.ndarray) -> np.ndarray:
        return np.minimum(most_B, self.length)


def measure(
    target: CausalLM,
    proposer: Proposer,
    batch_sizes: Sequence[int],
    most: int | None = None,
    context: int = 256,
    repeats: int = 5,
    params: SamplingParams | None = None,
    advance: Callable[[], object] = lambda: None,
) -> CostTable:
    """Run the engine with drafts of every length in turn, batch size by batch size, and keep the mean of the faster half of
    each phase's times, since other work can only add to them; a longer draft is held to cost no less than a shorter one.

    most: the longest draft, at least (default: the proposer's K); context: tokens of each row, made up; advance: called after
    every step. The first round of a batch size warms up. Lengths come in turn, so that a slow moment of the machine hits them
    alike.
    """
    longest = max(most or 0, proposer.num_speculative_tokens)
    lengths = lengths_up_to(longest)
    forced, room = FixedLength(), (repeats + 1) * sum(k + 1 for k in lengths) + 2
    # beyond a drafter's own limit there would be nothing to measure
    limit = min(target.max_model_len, getattr(proposer, "max_model_len", None) or target.max_model_len)
    context = max(min(context, limit - room), 2)
    if context + room > limit:
        raise ValueError(
            f"measuring costs of drafts of up to {longest} tokens takes {room + 2} tokens of a row, and max_model_len is "
            f"{limit}; draft fewer tokens (max_draft), repeat less, or give a cost_table"
        )
    base = params or SamplingParams(temperature=0)
    own = base.model_copy(update={"max_tokens": room, "ignore_eos": True, "stop": [], "min_tokens": 0})
    verifier = rejection.build("standard")
    verify: list[list[float]] = []
    draft: list[list[float]] = []
    noise = np.random.default_rng(0)
    cache = target.new_cache()
    for rows in batch_sizes:
        # of a composed proposer, the part that takes time: whether a lookup finds something here says nothing
        timed = PaddedProposer(getattr(proposer, "cost_proposer", None) or proposer, longest)
        engine = Engine(target, timed, verifier, rows, context + room, cache=cache, policy=forced)
        prompts = noise.integers(0, target.vocab_size, (rows, context)).tolist()
        engine.add(*(Request(f"{i}", ids, own, i) for i, ids in enumerate(prompts)))
        engine.steps = []
        for repeat in range(repeats + 1):
            for forced.length in lengths:
                engine.step()
                advance()
            if not repeat:
                engine.steps.clear()
        steps = [engine.steps[j :: len(lengths)] for j in range(len(lengths))]
        verify.append(isotonic([trimmed_mean([step.verify_s for step in own]) for own in steps]))
        draft.append(isotonic([trimmed_mean([step.draft_s for step in own]) for own in steps]))
        engine.abort_all()
    getattr(proposer, "reset", lambda: None)()  # a memory of responses would know what was made up here
    verify, draft = ([list(row) for row in zip(*map(isotonic, zip(*of, strict=True)), strict=True)] for of in (verify, draft))
    about = identity(target, proposer) | {
        "context": context,
        "repeats": repeats,
        "num_threads": torch.get_num_threads(),
    }
    return CostTable(list(batch_sizes), lengths, verify, draft, about)


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


def trimmed_mean(seconds: list[float]) -> float:
    return float(np.mean(sorted(seconds)[: (len(seconds) + 1) // 2]))


def isotonic(values: Sequence[float]) -> list[float]:
    """The nearest sequence (least squares) that does not fall: neighbours that do are replaced by their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, more = blocks.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def sizes_up_to(max_batch_size: int) -> list[int]:
    """1, 2, 4, ... and the batch size itself."""
    return sorted({2**i for i in range(max_batch_size.bit_length()) if 2**i <= max_batch_size} | {max_batch_size})


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


def lengths_up_to(longest: int) -> list[int]:
    """Lengths of drafts that are measured."""
    return sorted({k for k in LENGTHS if k < longest} | {0, longest})


# ---------------------------------------------------------------- predicting


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
