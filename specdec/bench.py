"""Timing our engine against Hugging Face's on the same prompts, and against itself; `eval/bench.py` and `eval/gpu.py` call it.

Comparisons are ratios of times taken side by side: within a round every contender decodes the same prompt, one after the other,
so a slow moment of the machine hits them alike.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specdec.core import Request, SamplingParams
from specdec.engine import Clock, Engine
from specdec.target import CausalLM

Decode = Callable[[list[int]], int]  # prompt ids -> number of tokens generated


@dataclass
class Timing:
    """Seconds and tokens per prompt, prefill included (both sides pay it)."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def rates(self) -> np.ndarray:
        return np.array(self.tokens) / np.array(self.seconds)


def side_by_side(contenders: dict[str, Decode], prompts: list[list[int]]) -> dict[str, Timing]:
    """Time every contender on every prompt, in turn. The first prompt is decoded once more beforehand, as a warm-up."""
    timings = {name: Timing() for name in contenders}
    for decode in contenders.values():
        decode(prompts[0])
    for prompt in prompts:
        for name, decode in contenders.items():
            began = time.perf_counter()
            count = decode(prompt)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            timings[name].seconds.append(time.perf_counter() - began)
            timings[name].tokens.append(count)
    return timings


def median_ratio(ours: Timing, theirs: Timing) -> float:
    """Median over prompts of the ratio of tokens/s."""
    return float(np.median(ours.rates / theirs.rates))


def ours(engine: Engine, max_tokens: int) -> Decode:
    """Greedy decoding of one prompt by the engine."""

    reset = getattr(engine.proposer, "reset", lambda: None)

    def decode(prompt: list[int]) -> int:
        reset()  # a memory of responses would know this very answer from the warm-up, or from another round
        request = Request("0", prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
        return sum(len(done.output_token_ids) for done in engine.run([request]))

    return decode


def hugging_face(model: Any, max_tokens: int, **options: Any) -> Decode:
    """Greedy `generate` of one prompt; options choose prompt lookup or an assistant."""

    def decode(prompt: list[int]) -> int:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0, **options
        )
        return out.shape[1] - len(prompt)

    return decode


@contextlib.contextmanager
def forwards_timed() -> Iterator[Callable[[], float]]:
    """Within the block, forwards of every CausalLM are timed; yields a function that returns their seconds so far."""
    plain, clocks = CausalLM.forward, []

    def timed(self: CausalLM, *args: Any, **kwargs: Any) -> Any:
        clock = Clock(self.device)
        out = plain(self, *args, **kwargs)
        clock.mark()
        clocks.append(clock)
        return out

    CausalLM.forward = timed  # type: ignore[method-assign]
    try:
        yield lambda: sum(clock.seconds()[0] for clock in clocks)
    finally:
        CausalLM.forward = plain  # type: ignore[method-assign]


def share_outside_forwards(engine: Engine, requests: list[Request]) -> tuple[float, float]:
    """(share of the time that the engine spends outside target and draft forwards, tokens/s), prefill included."""
    engine.prepare(*requests)  # setting memory aside happens once, not per step
    with forwards_timed() as forward_s:
        began = time.perf_counter()
        count = sum(len(done.output_token_ids) for done in engine.run(requests))
        if engine.target.device.type == "cuda":
            torch.cuda.synchronize()
        total = time.perf_counter() - began
    return 1 - forward_s() / total, count / total
