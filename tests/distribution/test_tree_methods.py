"""Trees of every method that drafts some, through the engine: T = 0 gives Hugging Face's tokens, `match` and `gumbel` those of
plain sampling, whatever is drafted, however many rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from specdec import hub
from specdec.core import Context, Draft, Request, StatelessProposer
from specdec.engine import Engine
from specdec.measure.stats import pool
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from support.methods import MAX_TOKENS, TREE_METHODS, decode, tiny_prompts, tree_settings
from support.table import scheme
from support.targets import loaded

from .test_exact import smollm2_prompts, smollm2_reference, tiny_reference

STATIC = {"speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]", "tree_topk": None, "tree_depth": None}
SAMPLED = {"draft_sample_method": "probabilistic"}
TRAINED = [name for name in TREE_METHODS if "speculative_token_tree" in SpeculativeConfig.model_fields and name not in ("ngram", "suffix")]


def build(name: str, target: CausalLM, **more: Any):
    return SpeculativeConfig(**tree_settings(name, target, **more)).resolve().build(target)


def cells() -> list[Any]:
    """Each method on two architectures, full attention and sliding windows; the others in the long proof."""
    return [
        pytest.param(architecture, method, marks=[] if architecture in ("llama", "gemma3") else pytest.mark.prove)
        for architecture in hub.TINY
        for method in TREE_METHODS
    ]


@pytest.mark.parametrize(("architecture", "method"), cells())
def test_greedy_trees_on_tiny(architecture: str, method: str) -> None:
    target = loaded(f"tiny-{architecture}")
    proposer = build(method, target)
    for batch_size in (1, 3, 8):
        engine = Engine(target, *proposer, max_batch_size=batch_size, prefill_chunk_size=64)
        engine.proposer.reset()
        assert decode(engine, tiny_prompts(), MAX_TOKENS) == tiny_reference(target.name), f"batch size {batch_size}"


@pytest.mark.parametrize("name", ["block", "match", "gumbel", "synthetic"])
@pytest.mark.parametrize("more", [{}, STATIC, SAMPLED], ids=["grown", "static", "sampled"])
@pytest.mark.parametrize("method", TRAINED)
def test_greedy_trees_under_other_schemes(method: str, more: dict[str, Any], name: str) -> None:
    if name == "synthetic":
        pytest.skip("lossy: its tokens are not the target's") if False else None
    target = loaded("tiny-llama")
    proposer, _ = build(method, target, **more)
    engine = Engine(target, proposer, scheme(name, 7), max_batch_size=3)
    assert decode(engine, tiny_prompts()[:4], MAX_TOKENS[:4]) == tiny_reference(target.name)[:4]
