"""Requests for a small table model, and the decode loop in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec.core import Request
from specdec.engine import BONUS_COLUMN
from specdec.params import SamplingParams
from specdec.sampling import VERIFY, uniforms
from support.table import TableLM, next_probs_reference

V = 6


TABLE = TableLM.random(V, seed=3, scale=1.0, max_model_len=128)


def prompts(count: int, vocab: int = V, longest: int = 9, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, int(rng.integers(1, longest + 1))).tolist() for _ in range(count)]


def make(prompt: Sequence[int], number: int = 0, **params: Any) -> Request:
    """A request whose seed is 100 + number."""
    return Request(str(number), list(prompt), SamplingParams(**params), seed=100 + number)


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


def decode_reference(
    logits_after: Callable[[list[int]], Sequence[float]],
    request: Request,
    eos: Sequence[int] = (),
    max_model_len: int = 10**9,
) -> tuple[list[int], str]:
    """Token for token, each with the uniform that the engine has for it. Returns tokens and why they end."""
    params = request.params
    prompt = request.prompt_token_ids
    output = []
    bad_words = request.bad_words_token_ids  # as the engine has read them
    stop_ids = [*(() if params.ignore_eos else eos), *params.stop_token_ids]
    budget = min(params.max_tokens or 10**9, max_model_len - len(prompt))
    while len(output) < budget:
        distribution = next_probs_reference(logits_after([*prompt, *output]), params, prompt, output, stop_ids, bad_words)
        u = float(uniforms(np.array(request.seed), VERIFY, np.array(len(output)), BONUS_COLUMN))
        cumulative = list(itertools.accumulate(distribution))
        output.append(next(token for token, mass in enumerate(cumulative) if mass > u * cumulative[-1]))
        if output[-1] in stop_ids:
            return output, "stop"
    return output, "length"
