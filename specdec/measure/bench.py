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

from specdec.core import Request
from specdec.engine import Engine
from specdec.model.device import Timer
from specdec.model.target import CausalLM
from specdec.params import SamplingParams

Decode = Callable[[list[int]], int]  # prompt ids -> number of tokens generated


@dataclass
class Timing:
    """Seconds, CPU seconds of the process and tokens per prompt, prefill included (both sides pay it)."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def rates(self) -> np.ndarray:
        """[n] tokens per second of each prompt."""
        return np.array(self.tokens) / np.array(self.seconds)

    @property
    def cpu_rates(self) -> np.ndarray:
        """[n] tokens per CPU second of each prompt."""
        return np.array(self.tokens) / np.array(self.cpu_s)

    @property
    def wall_over_cpu(self) -> float:
        return sum(self.seconds) / sum(self.cpu_s)


def run_side_by_side(contenders: dict[str, Decode], prompts: list[list[int]]) -> dict[str, Timing]:
    """Time every contender on every prompt, in turn. The first prompt is decoded once more beforehand, as a warm-up."""
    timings = {name: Timing() for name in contenders}
    for decode in contenders.values():
        decode(prompts[0])
    for prompt in prompts:
        for name, decode in contenders.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            count = decode(prompt)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            timings[name].seconds.append(time.perf_counter() - began)
            timings[name].cpu_s.append(time.process_time() - began_cpu)
            timings[name].tokens.append(count)
    return timings


def ratios(ours: Timing, theirs: Timing) -> dict[str, Any]:
    """ours / theirs in tokens/s, over prompts: the median, what lies between the 10th and the 90th percentile, and the median
    by CPU time; and of all prompts together."""
    by_wall = ours.rates / theirs.rates
    return {
        "ratio": float(np.median(by_wall)),
        "ratio_range": np.quantile(by_wall, [0.1, 0.9]).tolist(),
        "cpu_ratio": float(np.median(ours.cpu_rates / theirs.cpu_rates)),
        "pooled_ratio": ours.tokens_per_s / theirs.tokens_per_s,
        "wall_over_cpu": [ours.wall_over_cpu, theirs.wall_over_cpu],
    }


def ours(engine: Engine, max_tokens: int) -> Decode:
    """Greedy decoding of one prompt by the engine."""

    def decode(prompt: list[int]) -> int:
        engine.proposer.reset()  # a memory of responses would know this very answer from the warm-up, or from another round
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
    plain = CausalLM.forward
    timers: list[Timer] = []

    def timed(self: CausalLM, *args: Any, **kwargs: Any) -> Any:
        timer = Timer(self.device)
        out = plain(self, *args, **kwargs)
        timer.mark()
        timers.append(timer)
        return out

    CausalLM.forward = timed  # type: ignore[method-assign]
    try:
        yield lambda: sum(timer.seconds()[0] for timer in timers)
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
