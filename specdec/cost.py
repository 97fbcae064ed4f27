"""What a forward costs on this machine: v(n), the time to process n tokens per row, in the very process that decodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specdec.engine import Clock
from specdec.target import CausalLM

POINTS = (1, 2, 3, 4, 5, 6, 8, 11, 16, 25, 33, 49, 65)


def verify_seconds(
    target: CausalLM, num_rows: int, num_tokens: int, context: int = 256, repeats: int = 7
) -> Callable[[float], float]:
    """Seconds of one forward of n tokens in each of num_rows rows with `context` tokens before them, n up to num_tokens.

    The least of the repeats, since other work can only add to it; the sizes in turn within each repeat, so that a slow moment
    hits all of them; linear in between.
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
    least = [min(times[n]) for n in sizes]
    return lambda n: float(np.interp(n, sizes, least))
