"""Draft trees of the methods that look up: n-gram's against its rule, and what `propose` of both makes of limits and settings.

Those of the suffix tree itself are in test_suffix.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specdec import method, sampling
from specdec.core import Context, Draft, Proposer, Request
from specdec.method.ngram import Ngram, draft_tree, draft_tree_reference, find_match
from specdec.method.suffix import Suffix
from specdec.params import SamplingParams
from support.methods import context, tiny

Tree = list[tuple[int, int]]  # (token, parent) of each node


def test_ngram_tree_is_the_reference() -> None:
    """Random texts of few tokens, every limit; best first; with one place, the chain."""
    rng = np.random.default_rng(0)
    num_branched = 0
    num_single = 0
    for _ in range(2000):
        tokens = rng.integers(0, rng.integers(1, 6), rng.integers(1, 60))
        low = int(rng.integers(1, 4))
        high = low + int(rng.integers(0, 4))
        latest = bool(rng.integers(2))
        num_nodes, max_depth, topk = (int(rng.choice(values)) for values in ([0, 1, 4, 12, 40], [0, 1, 3, 40], [1, 2, 3, 9]))
        settings = (low, high, latest, num_nodes, max_depth, topk)
        *fields, n = draft_tree(tokens, *settings)
        *expected, expected_n = draft_tree_reference(tokens, *settings)
        assert n == expected_n
        assert [x.tolist() for x in fields] == [x.tolist() for x in expected], (tokens, settings)
        token_K, parent_K, count_K, total_K = fields
        assert_best_first(parent_K, count_K / total_K, topk, max_depth)
        num_branched += len(set(parent_K.tolist())) < len(parent_K)
        after = find_match(tokens, low, high, latest)
        assert (n == 0) == (after == len(tokens)), "a tree has a match where a chain has one"
        if n and after == find_match(tokens, low, high, not latest):  # the only place
            num_single += 1
            assert token_K.tolist() == tokens[after : after + min(num_nodes, max_depth)].tolist()
            assert parent_K.tolist() == list(range(-1, len(token_K) - 1))
    assert num_branched > 200
    assert num_single > 100


def assert_best_first(parent_K: np.ndarray, share_K: np.ndarray, topk: int, max_depth: int) -> None:
    """Ordered by (-probability, depth, parent), parents first, within the limits."""
    keys: list[tuple[float, int, int]] = []
    for node, (parent, share) in enumerate(zip(parent_K.tolist(), share_K.tolist(), strict=True)):
        assert -1 <= parent < node
        minus_prob, depth, _ = keys[parent] if parent >= 0 else (-1.0, 0, 0)
        keys.append((minus_prob * share, depth + 1, parent))
    assert keys == sorted(keys)
    assert max((depth for _, depth, _ in keys), default=0) <= max_depth
    assert np.bincount(parent_K + 1).max(initial=0) <= topk


@pytest.mark.parametrize("draft", [draft_tree, draft_tree_reference])
def test_an_ngram_tree(draft: Callable[..., Any]) -> None:
    """After 1 2 came 3 4, 5 and 3 6; at the fourth place it is the match itself."""
    tokens = np.array([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 6, 1, 2])

    def tree(latest: bool, *limits: int) -> Tree:
        token_K, parent_K, *_, n = draft(tokens, 1, 2, latest, *limits)
        assert n == 2
        return list(zip(token_K.tolist(), parent_K.tolist(), strict=True))

    # 3 has two thirds, everything else one; depth by depth, of equal ones the first in the text or the last
    assert tree(False, 6, 3, 9) == [(3, -1), (5, -1), (4, 0), (6, 0), (1, 1), (1, 2)]
    assert tree(True, 6, 3, 9) == [(3, -1), (5, -1), (6, 0), (4, 0), (1, 1), (1, 2)]
    assert tree(False, 6, 2, 9) == [(3, -1), (5, -1), (4, 0), (6, 0), (1, 1)]
    assert tree(False, 6, 3, 1) == [(3, -1), (4, 0), (1, 1)]
    assert tree(False, 2, 3, 9) == [(3, -1), (5, -1)]
    assert draft(np.array([1, 2, 3]), 1, 2, False, 4, 4, 4)[-1] == 0


# ------------------------------------------------------------------------------------------------- propose


def trees(draft: Draft) -> list[Tree]:
    assert draft.parent_BK is not None
    assert draft.parent_BK.dtype == torch.int64
    assert draft.parent_BK.shape == draft.token_BK.shape
    draft.check_tree("a lookup")
    rows = []
    for token_K, parent_K, n in zip(draft.token_BK, draft.parent_BK, draft.length_B.tolist(), strict=True):
        rows.append(list(zip(token_K[:n].tolist(), parent_K[:n].tolist(), strict=True)))
        assert (parent_K[n:] == -1).all()
    return rows


def start(proposer: Proposer, texts: dict[int, list[int]]) -> Context:
    for row, tokens in texts.items():
        proposer.on_start(row, Request(str(row), tokens, SamplingParams(max_tokens=8)))
    return context(proposer, texts, return_confidence=True)


# after 1 2 came 3 twice, 4 and 5 once; the second row has no match
TEXTS = {0: [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 8, 1, 2, 5, 7, 1, 2], 3: [6, 5, 4]}
BUILD: dict[str, Callable[..., Any]] = {
    "ngram": lambda **settings: Ngram(prompt_lookup_min=2, prompt_lookup_max=2, **settings),
    "suffix": lambda **settings: Suffix(suffix_decoding_max_spec_factor=9.0, suffix_decoding_min_token_prob=0.0, **settings),
}
ROOTS = [(3, -1), (4, -1), (5, -1)]


@pytest.mark.parametrize("name", BUILD)
def test_limits_of_trees(name: str) -> None:
    """Nodes by K and max_draft_B; depth by tree_depth and max_depth_B, which need not agree; children by tree_topk."""

    def tree(
        max_draft: int | None = None, max_depth: int | None = None, num_speculative_tokens: int = 99, **settings: int
    ) -> Tree:
        proposer = BUILD[name](**{"tree_topk": 9, "num_speculative_tokens": num_speculative_tokens} | settings)
        assert proposer.drafts_trees
        rows = start(proposer, TEXTS)
        if max_draft is not None:
            rows.max_draft_B[:] = max_draft
        if max_depth is not None:
            rows.max_depth_B = np.full(2, max_depth)
        first, second = trees(proposer.propose(rows))
        assert second == []
        return first

    def depth(nodes: Tree) -> int:
        depths: list[int] = []
        for _, parent in nodes:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return max(depths)

    assert depth(tree()) > 4
    assert tree(max_depth=1) == tree(tree_depth=1) == ROOTS
    assert depth(tree(max_depth=2)) == depth(tree(tree_depth=2)) == depth(tree(tree_depth=3, max_depth=2)) == 2
    assert tree(max_draft=4) == tree(num_speculative_tokens=4) == tree()[:4]
    assert tree(max_draft=3, max_depth=0) == []
    assert tree(tree_topk=2, max_depth=1) == ROOTS[:2]
    assert [parent for _, parent in tree(tree_topk=1, max_draft=4)] == [-1, 0, 1, 2]


@pytest.mark.parametrize("name", BUILD)
def test_confidence_of_nodes(name: str) -> None:
    """3 came at two of the four places; 9 at one of the two where 3 came, after 4 always."""
    proposer = BUILD[name](tree_topk=9, num_speculative_tokens=99, tree_depth=2)
    draft = proposer.propose(start(proposer, TEXTS))
    nodes = trees(draft)[0]
    assert draft.confidence_BKF is not None
    assert not draft.confidence_BKF[1].count_nonzero()
    # the counts of the suffix tree have the match at the text's end too, which nothing follows
    places = {"ngram": 4, "suffix": 5}[name]
    for node, count, total in (((3, -1), 2, places), ((4, -1), 1, places), ((9, 0), 1, 2), ((9, 1), 1, 1)):
        want = sampling.share_log_odds(np.array(count), np.array(total))
        assert draft.confidence_BKF[0, nodes.index(node), 0] == torch.tensor(want)
    assert (draft.confidence_BKF[0, : len(nodes), 1] == {"ngram": -1.0, "suffix": float(np.float32(np.log(2 / 4)))}[name]).all()


@pytest.mark.parametrize("name", BUILD)
def test_chains_have_no_parents(name: str) -> None:
    proposer = BUILD[name](num_speculative_tokens=4)
    assert not proposer.drafts_trees
    assert proposer.propose(start(proposer, TEXTS)).parent_BK is None


def test_the_tree_of_responses_competes() -> None:
    """By the sum of probabilities, which the least score is held against too."""
    settings: dict[str, Any] = {"num_speculative_tokens": 8, "tree_topk": 2, "tree_depth": 1}
    others = {0: [7, 1, 2, 3], 1: [7, 1, 2, 4]}
    text = [1, 2, 5, 1, 2]  # 5 after one of two
    for min_score, want in ((0.0, [(3, -1), (4, -1)]), (1.0, [(3, -1), (4, -1)]), (1.01, [])):
        proposer = Suffix(min_score=min_score, **settings)
        for row, tokens in others.items():
            proposer.on_start(row, Request(str(row), tokens[:1], SamplingParams(max_tokens=8)))
        proposer.on_start(2, Request("2", text, SamplingParams(max_tokens=8)))
        assert trees(proposer.propose(context(proposer, others | {2: text})))[2] == want
    proposer = Suffix(suffix_decoding_max_cached_requests=0, **settings)
    assert trees(proposer.propose(start(proposer, {0: text}))) == [[(5, -1)]]


def test_a_hybrid_holds_its_chains_to_the_depth() -> None:
    """Its first component drafts trees of the row with a long match, its second chains of the other one."""
    proposers = [
        {"method": "ngram", "prompt_lookup_min": 2, "tree_topk": 9},
        {"method": "ngram", "prompt_lookup_min": 1},
    ]
    proposer: Any = method.build("hybrid", tiny(), num_speculative_tokens=6, proposers=proposers)
    assert proposer.drafts_trees
    rows = start(proposer, {0: TEXTS[0], 1: [1, 2, 3, 4, 5, 6, 7, 1]})
    draft = proposer.propose(replace(rows, max_depth_B=np.array([1, 3])))
    assert trees(draft) == [ROOTS, [(2, -1), (3, 0), (4, 1)]]


def test_rows_of_a_context_keep_their_depths() -> None:
    rows = context(Ngram(4), {0: [1], 1: [1], 2: [1]})
    assert rows.select_rows(np.array([1])).max_depth_B is None
    rows.max_depth_B = np.array([5, 6, 7])
    chosen = rows.select_rows(np.array([0, 2])).max_depth_B
    assert chosen is not None
    assert chosen.tolist() == [5, 7]
