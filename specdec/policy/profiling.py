"""Measuring what drafting and verifying cost on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specdec import rejection
from specdec.core import Context, Draft, FixedLengthPolicy, Proposer, Request, StatelessProposer, Step, require_chain
from specdec.engine import Engine
from specdec.model.device import Timer
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.policy.cost_table import CostTable, identity

POINTS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 25, 33, 49, 65)


LENGTHS = (0, 1, 2, 3, 5, 8, 12, 16, 24)  # of drafts; the longest that a drafter can make is added


def sizes_up_to(max_batch_size: int) -> list[int]:
    """1, 2, 4, ... and the batch size itself."""
    return sorted({2**i for i in range(max_batch_size.bit_length()) if 2**i <= max_batch_size} | {max_batch_size})


def lengths_up_to(longest: int) -> list[int]:
    """Lengths of drafts that are measured."""
    return sorted({k for k in LENGTHS if k < longest} | {0, longest})


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
            timer = Timer(target.device)
            target.forward(cache, tokens, start_B, np.full(num_rows, n))
            timer.mark()
            if repeat:  # the first round warms up
                times[n] += timer.seconds()
    least = isotonic([min(times[n]) for n in sizes])
    return lambda n: float(np.interp(n, sizes, least))


class PaddedProposer(StatelessProposer):
    """Another proposer, whose drafts are filled up to num_speculative_tokens, so that each length can be measured."""

    def __init__(self, inner: Proposer, num_speculative_tokens: int):
        self.inner = inner
        self.name = inner.name
        self.num_speculative_tokens = num_speculative_tokens
        self.hidden_layers = inner.hidden_layers
        self.needs_logits = inner.needs_logits
        self.needs_uniforms = inner.needs_uniforms

    def on_start(self, row: int, request: Request) -> None:
        self.inner.on_start(row, request)

    def on_finish(self, row: int, hidden: Sequence[Tensor] = ()) -> None:
        self.inner.on_finish(row, hidden)

    def catch_up(self, context: Context) -> bool:
        return self.inner.catch_up(context)

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return self.inner.bytes_to_grow(rows, slots)

    def reserve(self, rows: int, slots: int) -> None:
        self.inner.reserve(rows, slots)

    def wipe(self) -> None:
        self.inner.wipe()

    def propose(self, context: Context) -> Draft:
        length_B = context.max_draft_B
        max_draft = self.inner.num_speculative_tokens
        token_BK = context.last_token_B.unsqueeze(1).repeat(1, int(length_B.max()))
        if max_draft:
            draft = self.inner.propose(replace(context, max_draft_B=np.minimum(length_B, max_draft)))
            require_chain(draft, "measuring costs")
            token_BK[:, : draft.token_BK.shape[1]] = draft.token_BK
        return Draft(token_BK, torch.from_numpy(length_B))


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
    limit = min(target.max_model_len, proposer.max_model_len or target.max_model_len)
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
        timed = PaddedProposer(proposer.cost_proposer or proposer, longest)
        engine = Engine(target, timed, verifier, rows, context + room, cache=cache, policy=forced)
        prompts = noise.integers(0, target.vocab_size, (rows, context)).tolist()
        engine.add(*(Request(f"{i}", ids, own, i) for i, ids in enumerate(prompts)))
        steps: dict[int, list[Step]] = {length: [] for length in lengths}
        for repeat in range(repeats + 1):
            for forced.length in lengths:
                engine.step()
                advance()
                if repeat and engine.last_step is not None:
                    steps[forced.length].append(engine.last_step)
        verify.append(isotonic([trimmed_mean([step.verify_s for step in steps[length]]) for length in lengths]))
        draft.append(isotonic([trimmed_mean([step.draft_s for step in steps[length]]) for length in lengths]))
        engine.abort_all()
    proposer.reset()  # a memory of responses would know what was made up here
    verify, draft = ([list(row) for row in zip(*map(isotonic, zip(*of, strict=True)), strict=True)] for of in (verify, draft))
    about = identity(target, proposer) | {
        "context": context,
        "repeats": repeats,
        "num_threads": torch.get_num_threads(),
    }
    return CostTable(list(batch_sizes), lengths, verify, draft, about)


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
