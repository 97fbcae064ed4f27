"""Greedy decoding in float32 gives Hugging Face's tokens, whatever drafts, however many rows: every file in conf/method."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import hub
from specdec.core import Request
from specdec.engine import Engine
from specdec.measure import tasks
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from support.all_pairs import all_pairs
from support.methods import MAX_TOKENS, METHODS, decode, settings, tiny_prompts
from support.targets import loaded


def build(name: str, target: CausalLM, **more: Any):
    return SpeculativeConfig(**settings(name, target, **more)).resolve().build(target)


@cache
def reference_model(path: Path):
    # eager: in transformers 5.17 the sdpa path leaves out the soft cap of Gemma 2
    return hub.load_model(path, dtype=torch.float32, attn_implementation="eager").eval()


def generate(target: CausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = reference_model(target.path).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@cache
def tiny_reference(name: str) -> list[list[int]]:
    target = loaded(name)
    return [generate(target, ids, most) for ids, most in zip(tiny_prompts(), MAX_TOKENS, strict=True)]


@pytest.mark.parametrize(
    ("method", "architecture", "batch_size", "scheme"),
    all_pairs(METHODS, hub.TINY, [1, 3, 8], ["standard", "block", "match"]),
)
def test_tiny(method: str, architecture: str, batch_size: int, scheme: str) -> None:
    target = loaded(f"tiny-{architecture}")
    proposer, verifier = build(method, target, rejection_sample_method=scheme)
    engine = Engine(target, proposer, verifier, max_batch_size=batch_size, prefill_chunk_size=64)
    assert decode(engine, tiny_prompts(), MAX_TOKENS) == tiny_reference(target.name)


@pytest.mark.embedded
@pytest.mark.parametrize("batch_size", [3, pytest.param(1, marks=pytest.mark.prove)])
@pytest.mark.parametrize("method", METHODS)
def test_smollm2(method: str, batch_size: int) -> None:
    """Real prompts, one of them a second turn, one longer than a prefill chunk."""
    target = loaded(hub.DEFAULT)
    prompts = smollm2_prompts(target)
    max_tokens = [24, 16, 24, 8]
    engine = Engine(target, *build(method, target), max_batch_size=batch_size, prefill_chunk_size=64)
    assert decode(engine, prompts, max_tokens) == smollm2_reference(tuple(max_tokens))


def smollm2_prompts(target: CausalLM) -> list[list[int]]:
    chosen = {task.id: task for task in tasks.load(tasks.DEMO)}
    first = [tasks.prompt_ids(target.tokenizer, [chosen[i].turns[0]], []) for i in ("chat-02", "code-03", "extraction-01")]
    two_turns = next(task for task in chosen.values() if len(task.turns) > 1)
    return [*first, tasks.prompt_ids(target.tokenizer, list(two_turns.turns[:2]), ["Of course. Speak to them kindly."])]


@cache
def smollm2_reference(max_tokens: tuple[int, ...]) -> list[list[int]]:
    target = loaded(hub.DEFAULT)
    return [generate(target, ids, most) for ids, most in zip(smollm2_prompts(target), max_tokens, strict=True)]


def real_prompts_matched() -> list[Any]:
    """One that looks up, one that reads states, one with a model of its own; the others in the long proof (and every one under
    `match` on a tiny model: test_engine.py)."""
    chosen = ("ngram", "eagle3", "draft_model")
    return [pytest.param(m, marks=[] if m in chosen else pytest.mark.prove) for m in METHODS if m != "none"]


@pytest.mark.embedded
@pytest.mark.parametrize("method", real_prompts_matched())
def test_match_is_plain_sampling_on_smollm2(method: str) -> None:
    """At temperature 0.8, token for token, though the forwards have other shapes: rows do not depend on their company."""
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
