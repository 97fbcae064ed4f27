"""Measuring what drafting and verifying cost on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from specdec import rejection
from specdec.core import Context, Draft, FixedLengthPolicy, Proposer, Request, StatelessProposer, Step
from specdec.engine import Engine
from specdec.model.device import Timer
from specdec.model.fixed_shapes import FixedShapes
from specdec.model.target import CausalLM, Output
from specdec.params import SamplingParams
from specdec.policy.cost_table import CostTable, identity

VERIFY_POINTS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 25, 33, 49, 65)  # tokens of a row in one forward
DRAFT_POINTS = (0, 1, 2, 3, 5, 8, 12, 16, 24)  # lengths of drafts; the drafter's longest is added


def sizes_up_to(max_batch_size: int) -> list[int]:
    """Batch sizes that are measured: 1, 2, 4, ... and the largest."""
    return sorted({2**i for i in range(max_batch_size.bit_length()) if 2**i <= max_batch_size} | {max_batch_size})


def lengths_up_to(max_draft: int) -> list[int]:
    """Lengths of drafts that are measured."""
    return sorted({k for k in DRAFT_POINTS if k < max_draft} | {0, max_draft})


def num_steps(max_batch_size: int, max_draft: int, repeats: int) -> int:
    """Steps that `measure` runs for these sizes."""
    return len(sizes_up_to(max_batch_size)) * (repeats + 1) * len(lengths_up_to(max_draft))


def verify_seconds(
    target: CausalLM,
    num_rows: int,
    num_tokens: int,
    context: int = 256,
    repeats: int = 7,
    enforce_eager: bool = True,
) -> Callable[[float], float]:
    """Seconds of one forward of n tokens in each of num_rows rows with `context` tokens before them, n up to num_tokens;
    enforce_eager as of the engine.

    The minimum of the repeats, since other work on the machine can only add to it. Sizes alternate within each repeat, so that
    a slow moment hits all of them. More tokens cost no less than fewer (`isotonic`); linear in between.
    """
    sizes = sorted({n for n in VERIFY_POINTS if n <= num_tokens} | {1, num_tokens})
    context = max(min(context, target.max_model_len - num_tokens), 1)
    cache = target.new_cache()
    cache.reserve(num_rows, context + num_tokens)
    start_B = np.full(num_rows, context)
    forward: Callable[..., Output] = target.forward
    if not enforce_eager:
        forward = partial(FixedShapes(target, num_tokens).forward, stored_R=start_B)
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for repeat in range(repeats + 1):
        for n in sizes:
            tokens = torch.arange(num_rows * n, device=target.device) % target.vocab_size
            timer = Timer(target.device)
            forward(cache, tokens, start_B, np.full(num_rows, n))
            timer.mark()
            if repeat:  # the first round warms up
                times[n] += timer.seconds()
    seconds = isotonic([min(times[n]) for n in sizes])
    return lambda n: float(np.interp(n, sizes, seconds))


class PaddedProposer(StatelessProposer):
    """Another proposer with its drafts padded to the length that the policy chose, so that this length is verified."""

    def __init__(self, inner: Proposer, max_draft: int):
        self.inner = inner
        self.name = inner.name
        self.num_speculative_tokens = max_draft
        self.hidden_layers = inner.hidden_layers
        self.needs_logits = inner.needs_logits
        self.needs_uniforms = inner.needs_uniforms
        self.drafts_trees = inner.drafts_trees

    def propose(self, context: Context) -> Draft:
        length_B = context.max_draft_B
        parent_BK = None
        token_BK = context.last_token_B.unsqueeze(1).repeat(1, int(length_B.max()))
        if inner_limit := self.inner.num_speculative_tokens:
            draft = self.inner.propose(replace(context, max_draft_B=np.minimum(length_B, inner_limit)))
            token_BK[:, : draft.token_BK.shape[1]] = draft.token_BK
            if draft.parent_BK is not None:  # what is added are children of the last committed token
                parent_BK = torch.full(token_BK.shape, -1)
                parent_BK[:, : draft.token_BK.shape[1]] = draft.parent_BK
        return Draft(token_BK, torch.from_numpy(length_B), parent_BK=parent_BK)

    def on_start(self, row: int, request: Request) -> None:
        self.inner.on_start(row, request)

    def on_finish(self, row: int, hidden: Sequence[torch.Tensor] = ()) -> None:
        self.inner.on_finish(row, hidden)

    def on_forward(self, token_N: torch.Tensor, logits_NV: torch.Tensor) -> None:
        self.inner.on_forward(token_N, logits_NV)

    def catch_up(self, context: Context) -> bool:
        return self.inner.catch_up(context)

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return self.inner.bytes_to_grow(rows, slots)

    def reserve(self, rows: int, slots: int) -> None:
        self.inner.reserve(rows, slots)

    def wipe(self) -> None:
        self.inner.wipe()


class FixedLength(FixedLengthPolicy):
    """A policy that drafts `length` tokens for every row."""

    length = 0

    def draft_lengths(self, rows: np.ndarray, max_draft_B: np.ndarray) -> np.ndarray:
        return np.minimum(max_draft_B, self.length)


def measure(
    target: CausalLM,
    proposer: Proposer,
    batch_sizes: Sequence[int],
    max_draft: int | None = None,
    context: int = 256,
    repeats: int = 5,
    params: SamplingParams | None = None,
    advance: Callable[[], object] = lambda: None,
) -> CostTable:
    """Run the engine with drafts of every length in turn, batch size by batch size.

    A cost is the mean of the faster half of its times, since other work on the machine can only add to them; a longer draft
    costs no less than a shorter one (`isotonic`). Lengths alternate, so that a slow moment hits all of them. The first round of
    a batch size warms up.

    batch_sizes: ascending numbers of rows.
    max_draft: the longest draft, at least (default: the proposer's K).
    context: made-up tokens of each row.
    repeats: rounds that are measured.
    params: sampling of the requests (default: greedy).
    advance: called after every step.
    """
    max_draft = max(max_draft or 0, proposer.num_speculative_tokens)
    lengths = lengths_up_to(max_draft)
    policy = FixedLength()
    room = (repeats + 1) * sum(k + 1 for k in lengths) + 2
    # beyond a drafter's own limit there would be nothing to measure
    limit = min(target.max_model_len, proposer.max_model_len or target.max_model_len)
    context = max(min(context, limit - room), 2)
    if context + room > limit:
        raise ValueError(
            f"measuring costs of drafts of up to {max_draft} tokens takes {room + 2} tokens of a row, and max_model_len is "
            f"{limit}; draft fewer tokens (max_draft), repeat less, or give a cost_table"
        )
    params = params or SamplingParams(temperature=0)
    params = params.model_copy(update={"max_tokens": room, "ignore_eos": True, "stop": [], "min_tokens": 0})
    verifier = rejection.build("standard")
    rng = np.random.default_rng(0)
    cache = target.new_cache()
    verify_s: list[list[float]] = []
    draft_s: list[list[float]] = []
    for rows in batch_sizes:
        # of a composed proposer, the component that takes time: whether a lookup matches made-up tokens says nothing
        padded = PaddedProposer(proposer.cost_proposer or proposer, max_draft)
        engine = Engine(target, padded, verifier, rows, context + room, cache=cache, policy=policy)
        prompts = rng.integers(0, target.vocab_size, (rows, context)).tolist()
        engine.add(*(Request(f"{i}", ids, params, i) for i, ids in enumerate(prompts)))
        steps: dict[int, list[Step]] = {length: [] for length in lengths}
        for repeat in range(repeats + 1):
            for policy.length in lengths:
                engine.step()
                advance()
                if repeat and engine.last_step is not None:
                    steps[policy.length].append(engine.last_step)
        verify_s.append(isotonic([trimmed_mean([step.verify_s for step in steps[length]]) for length in lengths]))
        draft_s.append(isotonic([trimmed_mean([step.draft_s for step in steps[length]]) for length in lengths]))
        engine.abort_all()
    proposer.reset()  # a memory of responses would know what was made up here
    about = identity(target, proposer) | {
        "context": context,
        "repeats": repeats,
        "num_threads": torch.get_num_threads(),
    }
    return CostTable(list(batch_sizes), lengths, _isotonic_in_rows(verify_s), _isotonic_in_rows(draft_s), about)


def trimmed_mean(seconds: list[float]) -> float:
    """Mean of the faster half."""
    return float(np.mean(sorted(seconds)[: (len(seconds) + 1) // 2]))


def isotonic(values: Sequence[float]) -> list[float]:
    """The nearest sequence (least squares) that does not fall: neighbours that do are replaced by their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean = float(value)
        count = 1
        while blocks and blocks[-1][0] > mean:
            last_mean, last_count = blocks.pop()
            mean = (last_mean * last_count + mean * count) / (last_count + count)
            count += last_count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def _isotonic_in_rows(seconds: list[list[float]]) -> list[list[float]]:
    """[rows, lengths]: more rows cost no less than fewer."""
    by_length = [isotonic(column) for column in zip(*seconds, strict=True)]
    return [list(row) for row in zip(*by_length, strict=True)]
