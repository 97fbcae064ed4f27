"""Forwards of few fixed shapes: the tokens of eager decoding, whatever is padded, and what a graph needs to be replayed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.core import Request
from specdec.engine import Engine
from specdec.model import fixed_shapes
from specdec.model.fixed_shapes import FixedShapes, Graph
from specdec.model.kv import ForwardBatch
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from support.methods import MAX_TOKENS, METHODS, TREE_METHODS, decode, settings, tiny_prompts, tree_settings
from support.reference import tiny_reference
from support.targets import loaded

TARGET = "tiny-llama"


def engine(values: dict[str, Any], max_batch_size: int = 3, enforce_eager: bool = False) -> Engine:
    target = loaded(TARGET)
    built = SpeculativeConfig(**values).resolve().build(target)
    # chunks so short that most steps have rows beside them whose prompt is not through
    return Engine(target, *built, max_batch_size=max_batch_size, prefill_chunk_size=8, enforce_eager=enforce_eager)


@pytest.mark.parametrize("method", METHODS)
def test_chains(method: str) -> None:
    assert decode(engine(settings(method, loaded(TARGET))), tiny_prompts(), MAX_TOKENS) == tiny_reference(TARGET)


@pytest.mark.parametrize("method", TREE_METHODS)
def test_trees(method: str) -> None:
    assert decode(engine(tree_settings(method, loaded(TARGET))), tiny_prompts(), MAX_TOKENS) == tiny_reference(TARGET)


@pytest.mark.parametrize("scheme", ["standard", "block", "match", "gumbel"])
@pytest.mark.parametrize("method", ["ngram", "eagle3", "draft_model"])
@pytest.mark.parametrize("max_batch_size", [1, 3, 8])
def test_sampled(method: str, scheme: str, max_batch_size: int) -> None:
    """Rows do not depend on their company, padding included, so that sampled tokens are the same ones."""
    values = settings(method, loaded(TARGET)) | {"rejection_sample_method": scheme}
    if method != "ngram":
        values["draft_sample_method"] = "probabilistic"
    answers = []
    for enforce_eager in (True, False):
        params = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True)
        requests = [Request(str(i), ids, params, seed=i) for i, ids in enumerate(tiny_prompts())]
        done = engine(values, max_batch_size, enforce_eager).run(requests)
        answers.append({request.id: request.output_token_ids for request in done})
    assert answers[0] == answers[1]


def test_shapes_are_few() -> None:
    few = engine(settings("ngram", loaded(TARGET)) | {"num_speculative_tokens": 6}, 8)
    decode(few, tiny_prompts(), MAX_TOKENS)
    assert few.fixed_shapes is not None
    keys = list(few.fixed_shapes._graphs)
    assert 1 < len(keys) <= 16
    assert {key[0] for key in keys} <= {1, 2, 4, few.cache.rows}
    assert {key[1] for key in keys} <= {1, 2, 4, 7}
    assert {key[2] for key in keys} <= {128, 256, few.cache.slots}


def test_what_padding_must_not_overwrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row beside the batch has its prompt in the cache: padding behind slot 0 would destroy it."""
    forward = FixedShapes.forward

    def mutated(self: FixedShapes, *args: Any, stored_R: np.ndarray, **more: Any) -> Any:
        start_B, length_B = args[2:4]
        wrong_R = np.zeros_like(stored_R)
        wrong_R[: len(start_B)] = np.where(length_B > 0, start_B, 0)
        return forward(self, *args, stored_R=wrong_R, **more)

    monkeypatch.setattr(FixedShapes, "forward", mutated)
    assert decode(engine(settings("ngram", loaded(TARGET))), tiny_prompts(), MAX_TOKENS) != tiny_reference(TARGET)


def shapes_and_cache(target: CausalLM) -> tuple[FixedShapes, Any]:
    cache = target.new_cache()
    cache.reserve(4, 100)
    return FixedShapes(target, 4), cache


def test_an_output_outlives_the_next_forward() -> None:
    target = loaded(TARGET)
    shapes, cache = shapes_and_cache(target)
    stored = np.zeros(4, dtype=np.int64)
    forward = lambda tokens: shapes.forward(cache, torch.tensor(tokens), stored[:1], np.array([2]), (1,), stored_R=stored)
    first = forward([3, 4])
    assert first.hidden_NTD is not None
    kept = first.logits.clone(), first.hidden_NTD.clone()
    again = forward([5, 6])
    assert shapes.num_graphs == 1
    assert not torch.equal(again.logits, kept[0])
    assert torch.equal(first.logits, kept[0])
    assert torch.equal(first.hidden_NTD, kept[1])


def test_buffers_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph reads and writes has the same address in every replay; a cache that has grown needs new graphs."""
    target = loaded(TARGET)
    shapes, cache = shapes_and_cache(target)
    addresses = []
    replay = Graph.replay

    def recorded(self: Graph, token_N: torch.Tensor, batch: ForwardBatch) -> Any:
        output = replay(self, token_N, batch)
        addresses.append((self.token_N.data_ptr(), batch.index.data_ptr(), output.logits.data_ptr()))
        return output

    monkeypatch.setattr(Graph, "replay", recorded)
    stored = np.array([5, 9, 0, 0])
    for length in (3, 4, 3):
        shapes.forward(cache, torch.arange(length), stored[:1], np.array([length]), stored_R=stored)
    assert len(set(addresses)) == shapes.num_graphs == 1
    cache.reserve(4, 300)
    shapes.forward(cache, torch.arange(3), stored[:1], np.array([3]), stored_R=stored)
    assert shapes.num_graphs == 1
    assert len(set(addresses)) == 2


def test_padding_has_a_position_that_there_is() -> None:
    cache = loaded(TARGET).new_cache()
    cache.reserve(1, 300)
    batch = ForwardBatch(cache, 0, np.array([125]), np.array([8]), num_slots=256, max_position=127)
    assert batch.position_N.tolist() == [125, 126, 127, 127, 127, 127, 127, 127]
    assert batch.num_slots == 256


def test_buckets() -> None:
    assert [fixed_shapes.bucket(n, 6) for n in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]
