"""Token Recycling: its matrix and its trees against readable references, and runs whose matrix is known by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec import rejection
from specdec.core import Draft, Proposer, Request
from specdec.drafter.tree import Ranks, default_shape
from specdec.engine import Engine
from specdec.method.token_recycling import TokenRecycling
from specdec.params import SamplingParams
from specdec.speculative_config import SpeculativeConfig
from support.methods import MAX_TOKENS, context, decode, tiny, tiny_prompts
from support.table import TableLM

Tree = list[tuple[int, int]]  # (token, parent) of each node


def successors_reference(forwards: Iterable[tuple[Tensor, Tensor]], topk: int) -> dict[int, list[int]]:
    """The matrix in words: of every token, the likeliest ones after it in the last forward that processed it, where this first
    did."""
    successors: dict[int, list[int]] = {}
    for token_N, logits_NV in forwards:
        of_forward: dict[int, list[int]] = {}
        for token, logits_V in zip(token_N.tolist(), logits_NV, strict=True):
            of_forward.setdefault(token, logits_V.argsort(descending=True)[:topk].tolist())
        successors |= of_forward
    return successors


def tree_reference(
    successors: dict[int, list[int]], token: int, shape: list[Ranks], num_nodes: int, max_depth: int, stops: set[int]
) -> Tree:
    """The filling in words: node after node of the shape, a token and where its parent is."""
    tokens: dict[Ranks, int] = {(): token}
    drafted: list[Ranks] = []
    for path in shape:
        above = path[:-1]
        ends = above not in tokens or (above and tokens[above] in stops)
        if ends or len(path) > max_depth or len(drafted) == num_nodes:
            continue
        line = successors.get(tokens[above], [])
        if path[-1] < len(line):
            tokens[path] = line[path[-1]]
            drafted.append(path)
    return [(tokens[path], drafted.index(path[:-1]) if len(path) > 1 else -1) for path in drafted]


def build(vocab_size: int, num_speculative_tokens: int, **settings: Any) -> TokenRecycling:
    target: Any = SimpleNamespace(vocab_size=vocab_size)
    return TokenRecycling(target, num_speculative_tokens, **settings)


def trees(draft: Draft) -> list[Tree]:
    parent_BK = draft.parents()
    lengths = draft.length_B.tolist()
    return [
        list(zip(token_K[:n].tolist(), parent_K[:n].tolist(), strict=True))
        for token_K, parent_K, n in zip(draft.token_BK, parent_BK, lengths, strict=True)
    ]


def test_matrix_and_trees_are_the_references() -> None:
    """Forwards of a few tokens, some several times; ragged limits; fewer tokens in the vocabulary than successors."""
    rng = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    num_nodes = 0
    num_cut = 0
    for _ in range(200):
        vocab_size = int(rng.integers(2, 20))
        k = int(rng.integers(1, 30))
        topk = int(rng.integers(1, 10))
        depth = int(rng.integers(1, 6))
        proposer = build(vocab_size, k, tree_topk=topk, tree_depth=depth)
        forwards = []
        for _ in range(rng.integers(12)):
            token_N = torch.from_numpy(rng.integers(vocab_size, size=rng.integers(1, 9)))
            forwards.append((token_N, torch.rand(len(token_N), vocab_size, generator=generator)))
            proposer.on_forward(*forwards[-1])
        rows = context(proposer, {row: rng.integers(vocab_size, size=3).tolist() for row in (0, 1, 3)})
        stop_BV = rng.random((3, vocab_size)) < 0.2
        max_depth_B = rng.integers(0, depth + 1, 3)
        rows = replace(rows, max_draft_B=rng.integers(0, k + 1, 3), max_depth_B=max_depth_B, stop_BV=stop_BV)
        successors = successors_reference(forwards, topk)
        shape = default_shape(k, min(depth, k), topk)
        got = trees(proposer.propose(rows))
        for b, tree in enumerate(got):
            stops = set(np.flatnonzero(stop_BV[b]).tolist())
            limits = (int(rows.max_draft_B[b]), int(max_depth_B[b]))
            last = int(rows.tokens(b)[-1])
            assert tree == tree_reference(successors, last, shape, *limits, stops)
            num_nodes += len(tree)
            num_cut += len(tree) < len(tree_reference(successors, last, shape, k, depth, set()))
    assert num_nodes > 500
    assert num_cut > 100


def logits_of(*lines: list[int]) -> Tensor:
    """[N, 6] whose likeliest tokens are these, in order."""
    logits_NV = torch.zeros(len(lines), 6)
    for logits_V, line in zip(logits_NV, lines, strict=True):
        logits_V[line] = torch.arange(len(line), 0, -1, dtype=torch.float32)
    return logits_NV


def test_a_tree_by_hand() -> None:
    proposer = build(6, 5, speculative_token_tree="[(0,), (1,), (0, 0), (0, 1), (1, 0)]")

    def tree(**more: Any) -> Tree:
        (only,) = trees(proposer.propose(replace(context(proposer, {0: [5, 1]}), **more)))
        return only

    assert tree() == []
    proposer.on_forward(torch.tensor([1, 2, 1]), logits_of([2, 3], [4, 0], [0, 0]))  # 1 has two places
    assert tree() == [(2, -1), (4, 0), (3, -1), (0, 0)], "3 is not known"
    proposer.on_forward(torch.tensor([3, 2]), logits_of([1, 5], [3, 5]))
    assert tree() == [(2, -1), (3, 0), (3, -1), (5, 0), (1, 2)]
    assert tree(max_depth_B=np.array([1])) == [(2, -1), (3, -1)]
    assert tree(max_draft_B=np.array([3])) == [(2, -1), (3, 0), (3, -1)]
    assert tree(stop_BV=np.array([[False, True, True, False, False, False]])) == [(2, -1), (3, -1), (1, 1)]
    proposer.reset()
    assert tree() == []


def test_chains_have_no_parents() -> None:
    proposer = build(6, 8, tree_topk=1)
    proposer.on_forward(torch.arange(6), logits_of([1], [2], [3], [4], [5], [0]))
    draft = proposer.propose(context(proposer, {0: [2]}))
    assert not proposer.drafts_trees
    assert draft.parent_BK is None
    assert draft.token_BK.tolist() == [[3, 4, 5, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens=0", "at least 1"]),
        ({"num_speculative_tokens": 3, "tree_topk": 0}, ["tree_topk=0", "at least 1"]),
        ({"num_speculative_tokens": 3, "tree_depth": 0}, ["tree_depth=0", "at least 1"]),
        ({"num_speculative_tokens": 3, "speculative_token_tree": "[(0,)]"}, ["num_speculative_tokens=1"]),
        ({"num_speculative_tokens": 1, "speculative_token_tree": "[(0,)]", "tree_topk": 2}, ["tree_topk=2", "give one"]),
    ],
)
def test_mistakes(settings: dict[str, Any], words: list[str], one_line: Any) -> None:
    one_line(lambda: build(6, **settings), *words)


# ------------------------------------------------------------------------------------------------- in the engine


def repeating() -> TableLM:
    """After token t comes t again; the second likeliest is t + 1."""
    logits_VV = 2 * torch.eye(5) + torch.eye(5).roll(1, 1)
    return TableLM(logits_VV.expand(6, 5, 5).numpy())


def run(proposer: Proposer, target: TableLM, prompt: list[int], **more: Any) -> Request:
    engine = Engine(target, proposer, rejection.build("standard"), prefill_chunk_size=2)
    (request,) = engine.run([Request("only", prompt, SamplingParams(temperature=0, max_tokens=8, **more))])
    return request


def test_the_matrix_learns_from_rejected_nodes() -> None:
    """1 is never emitted; that it follows itself is known after the step that drafts it."""
    target = repeating()
    proposer = TokenRecycling(target, 3, speculative_token_tree="[(0,), (1,), (1, 0)]")
    request = run(proposer, target, [0])
    assert request.output_token_ids == [0] * 8
    assert request.stats.draft_token_ids == [[0, 1], [0, 1, 1], [0, 1, 1], []]
    assert request.stats.draft_parents == [[-1, -1], [-1, -1, 1], [-1, -1, 1], []]
    assert request.stats.emitted == [2, 2, 2, 1]


def test_of_a_prompt_what_has_logits() -> None:
    """Without prompt_logprobs, the last token of each chunk."""
    target = repeating()
    for more, known in (({}, {3, 4}), ({"prompt_logprobs": 0}, {2, 3, 4})):
        proposer = TokenRecycling(target, 1, tree_topk=1)
        run(proposer, target, [2, 3, 4], **more)
        assert set(np.flatnonzero(proposer.successor_VC[:, 0] >= 0).tolist()) == known


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "token_recycling"},
        {"method": "custom_class", "model": "specdec.method.token_recycling.TokenRecycling"},
        {"method": "hybrid", "proposers": [{"method": "token_recycling"}]},
    ],
    ids=lambda settings: settings["method"],
)
def test_wrapped_it_learns_too(settings: dict[str, Any]) -> None:
    target = repeating()
    proposer, _ = SpeculativeConfig(num_speculative_tokens=2, **settings).resolve().build(target)
    stats = run(proposer, target, [0]).stats
    assert stats.draft_token_ids == [[0, 0], [0, 0], []]
    assert stats.emitted == [3, 3, 1]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("settings", [{"tree_topk": 1}, {"tree_topk": 3, "tree_depth": 3}, {}], ids=str)
def test_greedy_output_is_that_of_plain_decoding(settings: dict[str, int], batch_size: int) -> None:
    """Cold and warm: the second time the prompts' answers are known."""
    target = tiny()
    max_tokens = [2 * most for most in MAX_TOKENS]  # answers long enough that a cold matrix helps
    plain = Engine(target, *SpeculativeConfig(method="none").resolve().build(target), max_batch_size=batch_size)
    want = decode(plain, tiny_prompts(), max_tokens)
    engine = Engine(target, TokenRecycling(target, 12, **settings), rejection.build("standard"), batch_size)
    num_forwards = []
    for _ in range(2):
        requests = [
            Request(str(i), ids, SamplingParams(temperature=0, max_tokens=most))
            for i, (ids, most) in enumerate(zip(tiny_prompts(), max_tokens, strict=True))
        ]
        done = {request.id: request for request in engine.run(requests)}
        assert [done[str(i)].output_token_ids for i in range(len(want))] == want
        num_forwards.append(sum(len(request.stats.emitted) for request in requests))
    assert num_forwards[1] < num_forwards[0] < sum(max_tokens) - len(want)
