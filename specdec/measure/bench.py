"""Timing our engine against Hugging Face's on the same prompts, and batches by themselves (`eval/bench.py`, `eval/gpu.py`).

Comparisons are ratios of times taken in turn: every contender decodes the same prompt, one after the other, so that a slow
moment of the machine hits them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec import hub, method, rejection
from specdec.core import Request
from specdec.engine import Engine
from specdec.model.arena import Arena
from specdec.model.target import CausalLM
from specdec.params import SamplingParams

Decode = Callable[[list[int]], int]  # prompt ids -> number of tokens generated


@dataclass
class Timing:
    """Seconds, CPU seconds of the process and tokens of each prompt, prefill included."""

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
    """Time every contender on every prompt, in turn. The first prompt is decoded once beforehand, as a warm-up."""
    timings = {name: Timing() for name in contenders}
    for decode in contenders.values():
        decode(prompts[0])
    for prompt in prompts:
        for name, decode in contenders.items():
            begin = time.perf_counter()
            begin_cpu = time.process_time()
            count = decode(prompt)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            timings[name].seconds.append(time.perf_counter() - begin)
            timings[name].cpu_s.append(time.process_time() - begin_cpu)
            timings[name].tokens.append(count)
    return timings


def ratios(ours: Timing, baseline: Timing) -> dict[str, Any]:
    """ours / baseline in tokens/s: median over prompts, 10th and 90th percentile, and median by CPU time; and the ratio of all
    prompts together."""
    by_wall = ours.rates / baseline.rates
    return {
        "ratio": float(np.median(by_wall)),
        "ratio_range": np.quantile(by_wall, [0.1, 0.9]).tolist(),
        "cpu_ratio": float(np.median(ours.cpu_rates / baseline.cpu_rates)),
        "pooled_ratio": ours.tokens_per_s / baseline.tokens_per_s,
        "wall_over_cpu": [ours.wall_over_cpu, baseline.wall_over_cpu],
    }


def compare(contenders: dict[str, Decode], pairs: Sequence[tuple[str, str]], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Time all contenders, and compare each pair (ours, theirs) of them: lines of `speed` in bench.json."""
    timings = run_side_by_side(contenders, prompts)
    return [
        {
            "ours": ours,
            "theirs": peer,
            "ours_tokens_per_s": timings[ours].tokens_per_s,
            "theirs_tokens_per_s": timings[peer].tokens_per_s,
            **ratios(timings[ours], timings[peer]),
        }
        for ours, peer in pairs
    ]


MOST_READ = 1 << 30  # bytes: far more than caches hold


class MemoryRead:
    """A plain sum over so many bytes, by torch's threads: the least time in which weights of that size are read here, now.
    Of more than MOST_READ, so much is summed, and its time is multiplied."""

    def __init__(self, num_bytes: int):
        num_read = min(num_bytes, MOST_READ)
        self.num_bytes = num_bytes
        self.factor = num_bytes / num_read
        self.numbers = Arena(num_read).take((num_read // 4,), torch.float32)
        self.numbers.fill_(1)  # pages that were never written are all the same one

    def seconds(self) -> float:
        """Of one sum."""
        begin = time.perf_counter()
        self.numbers.sum()
        return self.factor * (time.perf_counter() - begin)


def weight_bytes(target: CausalLM) -> int:
    """Bytes of all weights that a plain step multiplies by: but for input embeddings that are not the output layer's, and
    experts that are not chosen, which count here."""
    num_weights = target.num_parameters
    if not target.config.tie_word_embeddings:
        num_weights -= target.vocab_size * target.hidden_size
    return num_weights * target.dtype.itemsize


def busiest(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The contender with the most wall time per CPU time, by a name with its dtype and threads."""
    shares = {
        f"{name} ({line['dtype']}, {line['threads']} threads)": share
        for line in lines
        for name, share in zip((line["ours"], line["theirs"]), line["wall_over_cpu"], strict=True)
    }
    worst = max(shares, key=lambda name: shares[name])
    return {worst: shares[worst]}


def make_engine(target: CausalLM, name: str, max_batch_size: int = 1, **settings: Any) -> Engine:
    """An engine with a method under standard rejection. settings: of the method."""
    return Engine(target, method.build(name, target, **settings), rejection.build("standard"), max_batch_size)


def load_hugging_face(path: Path, target: CausalLM, num_assistant_tokens: int) -> Any:
    """A model in the target's dtype and on its device, to `generate` with; assisted, it drafts a constant number of tokens."""
    model = hub.load_model(path, dtype=target.dtype).to(target.device).eval()
    model.generation_config.update(
        num_assistant_tokens=num_assistant_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    return model


def ours(engine: Engine, max_tokens: int) -> Decode:
    """Greedy decoding of one prompt by the engine."""

    def decode(prompt: list[int]) -> int:
        engine.proposer.reset()  # a memory of responses would have this answer from the warm-up or another round
        request = Request("0", prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
        return sum(len(done.output_token_ids) for done in engine.run([request]))

    return decode


def hugging_face(model: Any, max_tokens: int, **options: Any) -> Decode:
    """Greedy `generate` of one prompt; options: prompt lookup, or an assistant."""

    def decode(prompt: list[int]) -> int:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0, **options
        )
        return out.shape[1] - len(prompt)

    return decode


@dataclass
class BatchSpeed:
    """Keys of `batch` in bench.json.

    tokens_per_s: prefill included.
    outside_forwards: share of the time outside of target and draft forwards.
    ms_per_step, gb_per_s: of decoding alone; the rate is that of the target's weights, read once a step.
    sum_gb_per_s: of a plain sum over as many bytes, before and after: what memory gives here, now. On a CPU.
    """

    tokens_per_s: float
    outside_forwards: float
    ms_per_step: float
    gb_per_s: float
    sum_gb_per_s: float | None


def batch_speed(engine: Engine, requests: list[Request]) -> BatchSpeed:
    """Decode requests together.

    engine: whose target was made with `timers`; a draft model that it loads is timed too.
    """
    timers = engine.target.timers
    assert timers is not None
    is_cpu = engine.target.device.type == "cpu"
    num_bytes = weight_bytes(engine.target)
    memory = MemoryRead(num_bytes) if is_cpu else None
    sums_s = [memory.seconds() for _ in range(3)] if memory else []
    engine.prepare(*requests)  # memory is reserved once, not per step
    timers.clear()
    engine.add(*requests)
    count = 0
    steps_s = []
    begin = time.perf_counter()
    while engine.waiting or engine.num_running:
        count += sum(len(done.output_token_ids) for done in engine.step())
        if (step := engine.last_step) is not None:
            steps_s.append(step.draft_s + step.verify_s)
    if not is_cpu:
        torch.cuda.synchronize()
    total_s = time.perf_counter() - begin
    sums_s += [memory.seconds() for _ in range(3)] if memory else []
    step_s = float(np.median(steps_s))
    return BatchSpeed(
        tokens_per_s=count / total_s,
        outside_forwards=1 - sum(timer.seconds()[0] for timer in timers) / total_s,
        ms_per_step=1e3 * step_s,
        gb_per_s=num_bytes / step_s / 1e9,
        sum_gb_per_s=num_bytes / float(np.median(sums_s)) / 1e9 if sums_s else None,
    )
