"""Greedy decoding in float32 gives Hugging Face's tokens, whatever drafts, however many rows: every file in conf/method."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from specdec import hub
from specdec.core import Request
from specdec.engine import Engine
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from support.all_pairs import all_pairs
from support.methods import MAX_TOKENS, METHODS, decode, settings, tiny_prompts
from support.reference import smollm2_prompts, smollm2_reference, tiny_reference
from support.targets import loaded


def build(name: str, target: CausalLM, **more: Any):
    return SpeculativeConfig(**settings(name, target, **more)).resolve().build(target)


@pytest.mark.parametrize(
    ("method", "architecture", "batch_size", "scheme"),
    all_pairs(METHODS, hub.TINY, [1, 3, 8], ["standard", "block", "match", "gumbel"]),
)
def test_tiny(method: str, architecture: str, batch_size: int, scheme: str) -> None:
    target = loaded(f"tiny-{architecture}")
    proposer, verifier = build(method, target, rejection_sample_method=scheme)
    engine = Engine(target, proposer, verifier, max_batch_size=batch_size, prefill_chunk_size=64)
    assert decode(engine, tiny_prompts(), MAX_TOKENS) == tiny_reference(target.name)


@pytest.mark.embedded
@pytest.mark.parametrize("method", ["ngram", "suffix", "hybrid", "eagle3", "token_recycling"])
def test_smollm2(method: str) -> None:
    """Real prompts, one of them a second turn, one longer than a prefill chunk, for those that look up and one that reads
    states; eval/prove.py has all methods."""
    target = loaded(hub.DEFAULT)
    prompts = smollm2_prompts(target)
    max_tokens = [24, 16, 24, 8]
    engine = Engine(target, *build(method, target), max_batch_size=3, prefill_chunk_size=64)
    assert decode(engine, prompts, max_tokens) == smollm2_reference(tuple(max_tokens))


@pytest.mark.embedded
@pytest.mark.parametrize("method", ["ngram", "eagle3", "draft_model"])
def test_match_is_plain_sampling_on_smollm2(method: str) -> None:
    """At temperature 0.8, token for token, though the forwards have other shapes: rows do not depend on their company. One that
    looks up, one that reads states, one with a model of its own (test_engine.py: every method on a tiny model)."""
    more = {"draft_sample_method": "probabilistic"} if method == "draft_model" else {}
    assert sampled(method, "match", **more) == plainly_sampled()


def sampled(method: str, scheme: str, **more: Any) -> dict[str, list[int]]:
    target = loaded(hub.DEFAULT)
    engine = Engine(target, *build(method, target, rejection_sample_method=scheme, **more), max_batch_size=3)
    requests = [
        Request(str(i), ids, SamplingParams(temperature=0.8, max_tokens=24), seed=i)
        for i, ids in enumerate(smollm2_prompts(target))
    ]
    return {request.id: request.output_token_ids for request in engine.run(requests)}


@cache
def plainly_sampled() -> dict[str, list[int]]:
    return sampled("none", "standard")
