"""Trees as arrays of parents, the shapes that settings give them, and which nodes are the best."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specdec import tree
from specdec.drafter import tree as growing
from specdec.speculative_config import SpeculativeConfig

PARENT_K = [-1, -1, 0, 0, 1, 2, 5]
DEPTH_K = [0, 0, 1, 1, 1, 2, 3]


def random_parents(rng: np.random.Generator, num_nodes: int) -> list[int]:
    return [int(rng.integers(-1, k)) for k in range(num_nodes)]


def path(parents: list[int], node: int) -> list[int]:
    return [*path(parents, parents[node]), node] if node >= 0 else []


def test_depths_and_paths() -> None:
    parent_BK = np.array([PARENT_K, tree.chain(1, 7)[0]])
    assert tree.depths(parent_BK).tolist() == [DEPTH_K, list(range(7))]
    assert tree.height(parent_BK, np.array([7, 3])).tolist() == [4, 3]
    assert tree.height(parent_BK, np.array([0, 0])).tolist() == [0, 0]
    assert [tree.height_of(PARENT_K[:n]) for n in range(8)] == tree.height(parent_BK[[0] * 8], np.arange(8)).tolist()
    assert tree.is_first_child(parent_BK)[0].tolist() == [True, False, True, False, True, True, True]
    on_path_BKK = tree.on_path(parent_BK)
    for node in range(7):
        assert np.flatnonzero(on_path_BKK[0, node]).tolist() == path(PARENT_K, node)


def test_the_path_of_first_children_comes_first_in_a_cache() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        parents = random_parents(rng, 9)
        length = int(rng.integers(0, 10))
        (slot_K,) = tree.slots(np.array([parents]), np.array([length])).tolist()
        assert sorted(slot_K) == list(range(9))
        node, first_path = -1, []
        while children := [k for k in range(length) if parents[k] == node]:
            node = children[0]
            first_path.append(node)
        assert [slot_K[k] for k in first_path] == list(range(len(first_path)))
        # K and V of an accepted node are never moved to a later slot
        assert all(slot_K[k] >= len(path(parents, k)) - 1 for k in range(length))


def test_a_walk_goes_to_the_first_child_that_may_be() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        parents = random_parents(rng, 8)
        accept_K = rng.random(8) < 0.5
        node, want = -1, []
        while children := [k for k in range(8) if parents[k] == node and accept_K[k]]:
            node = children[0]
            want.append(node)
        parent_BK = torch.tensor([parents])
        count_B, last_B, path_BK = tree.walk(parent_BK, torch.from_numpy(accept_K)[None])
        assert path_BK[0, : int(count_B)].tolist() == want
        assert int(last_B) == node
        count_B, path_BK = tree.path_to(parent_BK, last_B)
        assert path_BK[0, : int(count_B)].tolist() == want


def test_a_graft_has_the_paths_of_both() -> None:
    """Those of the first nodes of both in turn; and any first n nodes are a tree."""
    rng = np.random.default_rng(2)

    def spelled(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[node] for node in path(parents, k)) for k in range(len(tokens))]

    for _ in range(100):
        sizes = rng.integers(0, 8, 2)
        trees = [(rng.integers(0, 3, n).tolist(), random_parents(rng, n)) for n in sizes]
        want: list[tuple[int, ...]] = []
        texts = [spelled(*each) for each in trees]
        for one, other in itertools.zip_longest(*texts):
            for text in (one, other):
                if text is not None and text not in want:
                    want.append(text)
        limit = int(rng.integers(0, 16))
        arrays = [np.array(x, dtype=np.int64) for each in trees for x in each]
        tokens, parents, first, second = (x.tolist() for x in tree.graft(*arrays, limit))
        got = spelled(tokens, parents)
        assert len(set(got)) == len(got) <= limit
        assert set(got) <= set(want)
        if limit >= len(want):
            assert got == want
        assert all(parent < k for k, parent in enumerate(parents))
        for k, origins in enumerate(zip(first, second, strict=True)):
            assert max(origins) >= 0
            for which, origin in enumerate(origins):
                assert origin < 0 or texts[which][origin] == got[k]


def test_best_first_has_the_likeliest_prefixes() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        logprob_DC = -np.sort(rng.exponential(size=(3, 4)), axis=1)
        scores = {
            ranks: sum(logprob_DC[d, r] for d, r in enumerate(ranks))
            for depth in (1, 2, 3)
            for ranks in itertools.product(range(4), repeat=depth)
        }
        want = sorted(scores, key=lambda ranks: -scores[ranks])[:12]
        depth_K, rank_K, parent_K = growing.best_first(logprob_DC, 12)
        got = [tuple(int(rank_K[node]) for node in path(parent_K.tolist(), k)) for k in range(12)]
        assert got == want
        assert depth_K.tolist() == [len(ranks) - 1 for ranks in got]


def test_equal_scores_leave_a_tree() -> None:
    """A drafter that is sure gives a child its parent's score exactly."""
    kept_BK, length_B = growing.best(np.zeros((1, 4)), np.array([[0, 1, 1, 2]]), np.array([2]))
    assert (kept_BK.tolist(), length_B.tolist()) == ([[0, 1]], [2])
    depth_K, _, parent_K = growing.best_first(np.array([[0.0, -np.inf]] * 3), 3)
    assert depth_K.tolist() == [0, 1, 2]
    assert parent_K.tolist() == [-1, 0, 1]


@pytest.mark.parametrize(("num_nodes", "depth", "topk"), [(1, 5, 4), (16, 5, 4), (60, 6, 10), (7, 1, 8), (20, 9, 1)])
def test_the_shape_of_a_static_tree_is_closed(num_nodes: int, depth: int, topk: int) -> None:
    shape = growing.default_shape(num_nodes, depth, topk)
    most = sum(topk**d for d in range(1, depth + 1))
    assert len(shape) == len(set(shape)) == min(num_nodes, most)
    for place, ranks in enumerate(shape):
        assert len(ranks) <= depth
        assert max(ranks) < topk
        assert len(ranks) == 1 or ranks[:-1] in shape[:place]
        assert ranks[-1] == 0 or (*ranks[:-1], ranks[-1] - 1) in shape[:place]


def test_a_tree_of_vllms() -> None:
    text = "[(0,), (0, 0), (1,), (0, 1), (0, 0, 0)]"
    plan = growing.plan(5, None, None, None, text, "beam", False)
    assert plan is not None
    assert set(plan.shape) == {(0,), (0, 0), (1,), (0, 1), (0, 0, 0)}
    assert (plan.depth, plan.topk, plan.builder) == (3, 2, "static")
    assert growing.plan(5, None, None, None, [[0], [0, 0], [1], [0, 1], [0, 0, 0]], "beam", False) == plan


EAGLE = {"method": "eagle3", "model": "tiny", "num_speculative_tokens": 4}
BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"tree_topk": 0}, ("tree_topk=0", "at least 1")),
    ({"tree_topk": 2, "tree_depth": 0}, ("tree_depth=0", "at least 1")),
    ({"tree_depth": 3}, ("tree_depth=3", "tree_topk is not set")),
    ({"tree_builder": "static"}, ("tree_builder=static", "tree_topk is not set")),
    ({"tree_topk": 2, "tree_builder": "best"}, ("tree_builder='best'", "beam and static")),
    ({"tree_topk": 2, "tree_builder": "beam", "draft_sample_method": "probabilistic"}, ("tree_builder=beam", "static")),
    ({"speculative_token_tree": "[(0,), (1,)]"}, ("num_speculative_tokens=4", "2 nodes", "num_speculative_tokens=2")),
    ({"speculative_token_tree": "[(0,), (0, 0), (2,), (1,), (0, 2)]"}, ("(0, 2)", "not (0, 1)", "add it")),
    ({"speculative_token_tree": "[(1, 0), (0,), (0, 0), (1, 1)]"}, ("(1, 0)", "not (1,)", "add it")),
    ({"speculative_token_tree": "[(0,), (0,), (1,), (2,)]"}, ("twice",)),
    ({"speculative_token_tree": "[(0,), (-1,)]"}, ("(-1,) is no path", "ranks from 0 on")),
    ({"speculative_token_tree": "[]"}, ("'[]' has no paths",)),
    ({"speculative_token_tree": "[0, 1]"}, ("no list of paths",)),
    ({"speculative_token_tree": "open('x')"}, ("no list of paths",)),
    ({"speculative_token_tree": "[(0,)]", "tree_topk": 2}, ("tree_topk=2", "give one")),
]


@pytest.mark.parametrize(("settings", "words"), BAD)
def test_settings_that_cannot_be(settings: dict[str, Any], words: tuple[str, ...], one_line: Callable[..., str]) -> None:
    """Said before a target is loaded."""
    one_line(lambda: SpeculativeConfig(**(EAGLE | settings)).resolve(), *words)


def test_methods_without_trees_refuse_their_settings(one_line: Callable[..., str]) -> None:
    config = {"method": "ngram_gpu", "num_speculative_tokens": 4, "tree_topk": 2}
    one_line(lambda: SpeculativeConfig(**config).resolve(), "ngram_gpu", "tree_topk")
