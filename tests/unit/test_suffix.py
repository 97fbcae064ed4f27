"""Suffix decoding: vectors, the fast tree against the readable one, memory and speed, and the proposer."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.core import Context, Request
from specdec.drafter import suffix_tree
from specdec.drafter.suffix_tree import NONE, ROOT, SuffixTree, SuffixTreeReference, warm_up
from specdec.method import suffix
from specdec.method.suffix import Suffix, measure
from specdec.params import SamplingParams

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "drafters.json").read_text())["suffix_path"]
ARCTIC = json.loads((Path(__file__).parents[1] / "vectors" / "suffix_arctic.json").read_text())  # what the real one answered
KERNEL_NAMES = ("_extend", "_remove", "_move", "_rehash", "_speculate", "_speculate_tree", "_counts")
KERNELS = tuple(getattr(suffix_tree, name) for name in KERNEL_NAMES)
TREES = (SuffixTreeReference, SuffixTree)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm_up()


def in_words(speculation: suffix_tree.Speculation) -> tuple[list[int], list[float], float, int]:
    tokens, probs, score, match_len = speculation
    assert tokens.dtype == np.int64
    assert probs.dtype == np.float32
    assert len(tokens) == len(probs)
    return tokens.tolist(), probs.tolist(), score, match_len


@pytest.mark.parametrize("tree_class", TREES)
@pytest.mark.parametrize("case", VECTORS)
def test_vectors(case: dict, tree_class: type) -> None:
    tree = tree_class(case["max_depth"])
    for key, tokens in enumerate(case["sequences"]):
        tree.start(key, len(tokens))
        tree.extend(key, tokens)
    names = ("max_spec_tokens", "max_spec_factor", "max_spec_offset", "min_token_prob")
    speculation = tree.speculate(case["context"], **{name: case[name] for name in names})
    draft, probs, score, match_len = in_words(speculation)
    assert (draft, match_len) == (case["draft"], case["match_len"])
    assert probs == pytest.approx(case["probs"], abs=1e-6)
    assert score == pytest.approx(case["score"], abs=1e-6)


@pytest.mark.parametrize("tree_class", TREES)
@pytest.mark.parametrize(
    ("text", "draft"),
    [
        # 2 rose from a count of which it was not the first, so it comes behind 0, which has that count
        ([0, 0, 0, 1, 0, 2, 1, 0, 2, 0], [0]),
        # matches of 4 and 5 tokens: equal in float32, and so the longer one counts
        ([0, 1, 0, 1, 0, 1, 0, 1, 0], [1, 0, 1, 0]),
    ],
)
def test_ties_fall_as_in_arctic(text: list[int], draft: list[int], tree_class: type) -> None:
    tree = tree_class(24)
    tree.start("a", len(text))
    tree.extend("a", text)
    assert in_words(tree.speculate(text, 24, 1.0, 0.0, 0.1))[0] == draft


@pytest.mark.parametrize("tree_class", TREES)
@pytest.mark.parametrize("case", ARCTIC["trees"])
def test_trees_are_arctics(case: dict, tree_class: type) -> None:
    """Several sequences that grow in turn, evictions, every setting; as many cases as were recorded with a draft."""
    tree = tree_class(case["depth"])
    known = set()
    for call, *arguments in case["calls"]:
        if call == "speculate":
            context, settings, tokens, score, match_len = arguments
            draft, _, our_score, our_match_len = in_words(tree.speculate(context, *settings))
            assert (draft, our_match_len) == (tokens, match_len)
            assert our_score == pytest.approx(score, abs=1e-5)
        elif call == "remove":
            tree.remove(arguments[0])
        else:
            key, tokens = arguments
            if key not in known:
                tree.start(key, len(tokens))
            known.add(key)
            tree.extend(key, tokens)


# ------------------------------------------------------------------------------------- fast tree == reference


class Both:
    """The same random calls for both trees."""

    def __init__(self, depth: int, vocab: int, rng: random.Random) -> None:
        self.vocab = vocab
        self.rng = rng
        self.reference = SuffixTreeReference(depth)
        self.fast = SuffixTree(depth)
        self.num_started = 0

    def call(self, method: str, *arguments: object) -> None:
        for tree in (self.reference, self.fast):
            getattr(tree, method)(*arguments)

    def text(self, length: int) -> list[int]:
        """A passage of what is in the trees, often, so that long matches occur; or else random tokens."""
        sources = [tokens for tokens in self.reference.sequences.values() if tokens]
        if sources and self.rng.random() < 0.6:
            source = self.rng.choice(sources)
            first = self.rng.randrange(len(source))
            return source[first : first + length]
        return [self.rng.randrange(self.vocab) for _ in range(length)]

    def act(self) -> None:
        rng = self.rng
        keys = list(self.reference.sequences)
        action = rng.choices(["start", "extend", "finish", "remove"], [2, 12, 2, 2])[0] if keys else "start"
        if action == "start":
            self.call("start", self.num_started, rng.choice([0, 1, 5, 50]))
            self.num_started += 1
        elif action == "extend":
            self.call("extend", rng.choice(keys), self.text(rng.choice([1, 1, 1, 2, 8, 30])))
        else:
            self.call(action, rng.choice(keys))

    def compare(self) -> None:
        context = self.text(self.rng.randrange(30)) + self.text(self.rng.randrange(5))
        limit = self.rng.choice([0, 1, 4, 100])
        factor = self.rng.choice([0.0, 1.0, 2.5])
        offset = self.rng.choice([-1.0, 0.0, 3.0])
        floor = self.rng.choice([0.0, 0.1, 0.3])
        expected = in_words(self.reference.speculate(context, limit, factor, offset, floor))
        assert in_words(self.fast.speculate(context, limit, factor, offset, floor)) == expected
        draft, probs, _, match_len = expected
        if draft:
            count_K, of_K = self.fast.counts(context, match_len, draft)
            want_K, want_of_K = self.reference.counts(context[-self.fast.depth :], match_len, draft)
            assert count_K.tolist() == want_K.tolist()
            assert of_K.tolist() == want_of_K.tolist()
            assert np.cumprod(count_K / of_K) == pytest.approx(probs)


Path = tuple[int, ...]


def paths(node: SuffixTreeReference.Node, prefix: Path = ()) -> dict[Path, int]:
    """The counts of a reference tree by path, siblings in their order."""
    counts = {}
    assert set(node.order) == set(node.children)
    for token in node.order:
        child = node.children[token]
        counts[(*prefix, token)] = child.count
        counts |= paths(child, (*prefix, token))
    return counts


def unfolded_paths(tree: SuffixTree, v: int = ROOT, prefix: Path = ()) -> dict[Path, int]:
    """The counts of a fast tree by path, siblings in their order; checks its bookkeeping on the way."""
    node_X, group_G, slot_H, token_P, link_P, _ = tree._trie
    children = []
    ends = []
    counts = {}
    child = node_X[v]["first"]
    start = node_X[v]["ends"]
    while child != NONE:
        children.append(child)
        child = node_X[child]["next"]
    while start != NONE:
        assert link_P[start]["locus"] == v
        ends.append(start)
        start = link_P[start]["next"]
    if v != ROOT:
        assert node_X[v]["count"] == len(ends) + node_X[children]["count"].sum()
        assert len(children) != 1 or ends, "a unary path is not folded"
    if len(children) == 1:
        assert node_X[children[0]]["group"] == NONE
    else:
        count_C = node_X[children]["count"]
        group_C = node_X[children]["group"]
        assert (np.diff(count_C) <= 0).all()
        assert ((np.diff(count_C) == 0) == (np.diff(group_C) == 0)).all()
        for group in set(group_C.tolist()):
            members = [child for child, child_group in zip(children, group_C, strict=True) if child_group == group]
            assert group_G[group].tolist() == [members[0], members[-1]]
    assert node_X[children]["prev"].tolist() == children[-1:] + children[:-1]
    for child in children:
        assert node_X[child]["parent"] == v
        assert (child in slot_H) == (len(children) > 1)
        first = node_X[child]["ref"] - node_X[v]["depth"]
        live = any(first in range(s.base, s.base + s.length) for s in tree._segments.values())
        assert live, "a label is read from a removed sequence"
        label = token_P[first : first + node_X[child]["depth"]].tolist()
        path = tuple(label[: label.index(NONE)] if NONE in label else label)
        assert path[: len(prefix) + 1] == (*prefix, node_X[child]["token"])
        counts |= {path[:i]: int(node_X[child]["count"]) for i in range(len(prefix) + 1, len(path) + 1)}
        counts |= unfolded_paths(tree, child, path)
    return counts


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 6, 12, 24])
def test_fast_tree_is_the_reference(depth: int) -> None:
    """Drafts, probabilities, scores and match lengths are equal to the last bit, after evictions too."""
    for seed in range(20):
        rng = random.Random(1000 * depth + seed)
        both = Both(depth, rng.choice([1, 2, 3, 5, 20]), rng)
        for _ in range(120):
            both.act()
            both.compare()
            both.compare()
        assert list(unfolded_paths(both.fast).items()) == list(paths(both.reference.root).items())
        assert both.fast.num_tokens == sum(map(len, both.reference.sequences.values()))
        for key in list(both.reference.sequences):
            both.call("remove", key)
            both.compare()
        assert not both.reference.root.children
        assert_empty(both.fast)


def tree_in_words(speculation: suffix_tree.TreeSpeculation) -> tuple[list[Any], ...]:
    assert [len(x) for x in speculation[:5]] == [len(speculation.token_K)] * 5
    assert speculation.token_K.dtype == speculation.parent_K.dtype == np.int64
    assert speculation.prob_K.dtype == np.float32
    return tuple(x.tolist() for x in speculation[:5]) + speculation[5:]


def likeliest_prefixes(node: SuffixTreeReference.Node, max_depth: int, topk: int, prob: float = 1.0) -> list[float]:
    """Probabilities of all nodes below this one."""
    probs = []
    for token in node.order[:topk] if max_depth else ():
        child = node.children[token]
        child_prob = prob * child.count / node.count
        probs += [child_prob, *likeliest_prefixes(child, max_depth - 1, topk, child_prob)]
    return sorted(probs, reverse=True)


@pytest.mark.parametrize("depth", [1, 2, 4, 12, 24])
def test_fast_draft_trees_are_the_reference(depth: int) -> None:
    """Equal to the last bit, after evictions too; of one child per node, the chain; and no better tree of as many nodes."""
    num_branched = 0
    num_evicted = 0
    for seed in range(12):
        rng = random.Random(1000 * depth + seed)
        both = Both(depth, rng.choice([1, 2, 3, 5, 20]), rng)
        for _ in range(80):
            both.act()
            context = both.text(rng.randrange(30)) + both.text(rng.randrange(5))
            num_nodes = rng.choice([0, 1, 5, 16, 100])
            max_depth = rng.choice([0, 1, 3, 100])
            topk = rng.choice([1, 2, 3, 100])
            settings = (rng.choice([0.0, 1.0, 2.5]), rng.choice([-1.0, 0.0, 3.0]), rng.choice([0.0, 0.1, 0.3]))
            fast = both.fast.speculate_tree(context, num_nodes, max_depth, topk, *settings)
            expected = tree_in_words(both.reference.speculate_tree(context, num_nodes, max_depth, topk, *settings))
            assert tree_in_words(fast) == expected
            assert_best_first(fast)
            if topk == 1:
                chain = both.fast.speculate(context, min(num_nodes, max_depth), *settings)
                assert in_words(chain) == (fast.token_K.tolist(), fast.prob_K.tolist(), fast.score, fast.match_len)
                assert fast.parent_K.tolist() == list(range(-1, len(fast.token_K) - 1))
            elif len(fast.token_K):
                match = both.reference.find(context[len(context) - fast.match_len :])
                budget = int(min(max_depth, fast.match_len * settings[0] + settings[1]))
                probs = likeliest_prefixes(match, budget, topk)[:num_nodes]
                n = len(fast.token_K)
                assert fast.prob_K.tolist() == pytest.approx(probs[:n])
                assert all(prob < settings[2] + 1e-6 for prob in probs[n:])
            num_branched += len(np.unique(fast.parent_K)) < len(fast.parent_K)
            num_evicted += both.num_started > len(both.reference.sequences)
    assert num_branched >= 50 * (depth > 1)
    assert num_evicted > 500


def assert_best_first(tree: suffix_tree.TreeSpeculation) -> None:
    """Ordered by (-probability, depth, creation), parents first, no token twice below one parent."""
    depth_K: list[int] = []
    for node, parent in enumerate(tree.parent_K.tolist()):
        assert -1 <= parent < node
        depth_K.append(1 + (depth_K[parent] if parent >= 0 else 0))
    keys = list(zip((-tree.prob_K).tolist(), depth_K, tree.parent_K.tolist(), strict=True))
    assert keys == sorted(keys)
    children = list(zip(tree.parent_K.tolist(), tree.token_K.tolist(), strict=True))
    assert len(set(children)) == len(children)


@pytest.mark.parametrize("tree_class", TREES)
def test_a_draft_tree(tree_class: type) -> None:
    """After 1 2 came 3 twice, 6 and 8 once."""
    tree = tree_class(24)
    for key, tokens in enumerate([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 2, 8]]):
        tree.start(key, 4)
        tree.extend(key, tokens)

    def draft(*settings: float) -> list[tuple[int, int]]:
        tokens, parents, *_ = tree_in_words(tree.speculate_tree([0, 1, 2], *settings))
        return list(zip(tokens, parents, strict=True))

    # one half, then quarters: the shallower come first, then those of the earlier parent, then as they are among siblings
    best = [(3, -1), (6, -1), (8, -1), (4, 0), (5, 0), (7, 1)]
    assert draft(9, 9, 9, 9.0, 0.0, 0.1) == best
    assert draft(4, 9, 9, 9.0, 0.0, 0.1) == best[:4], "of four nodes"
    assert draft(9, 1, 9, 9.0, 0.0, 0.1) == best[:3], "of depth 1"
    assert draft(9, 9, 9, 0.5, 0.0, 0.1) == best[:3], "a match of two, at half"
    assert draft(9, 9, 2, 9.0, 0.0, 0.1) == [(3, -1), (6, -1), (4, 0), (5, 0), (7, 1)], "of two children"
    assert draft(9, 9, 1, 9.0, 0.0, 0.1) == [(3, -1), (4, 0)], "of one child: the chain"
    assert draft(9, 9, 9, 9.0, 0.0, 0.3) == best[:1], "of .3 and more"


def assert_empty(tree: SuffixTree) -> None:
    """No node, group, table entry, token or pool position is left behind."""
    assert tree.num_nodes == tree.num_tokens == 0
    assert tree._trie.tally[suffix_tree.HASHED] == tree._trie.tally[suffix_tree.GROUPS] == 0
    assert (tree._trie.slot_H == NONE).all()
    assert tree._holes == [(0, len(tree._trie.token_P))]


# ------------------------------------------------------------------------------------------- memory and speed


def test_removing_everything_leaves_an_empty_tree() -> None:
    tree = SuffixTree(24)
    text_BL = suffix._text(20, 500, np.random.default_rng(0))
    for key, token_L in enumerate(text_BL):
        tree.start(key, 10)  # outgrown several times
        for i in range(0, 500, 50):
            tree.extend(key, token_L[i : i + 50])
    num_bytes = tree.num_bytes
    for key in np.random.default_rng(1).permutation(20).tolist():
        tree.finish(key)
        tree.remove(key)
    assert_empty(tree)
    for key, token_L in enumerate(text_BL):
        tree.start(key, 500)
        for i in range(0, 500, 50):
            tree.extend(key, token_L[i : i + 50])
    assert tree.num_bytes == num_bytes  # the rows and positions are used again


def test_short_responses_of_large_capacity_lie_close() -> None:
    """Finished beside a running one, a response leaves a stretch too small for the next one's capacity."""
    tree = SuffixTree(8)
    for key in range(1, 200):
        tree.start(key, 10_000)
        tree.extend(key, [key, 2, 3])
        if key > 1:
            tree.finish(key - 1)
    assert len(tree._trie.token_P) < 50_000
    assert in_words(tree.speculate([5, 100, 2], 1)) == ([3], [1.0], 1.0, 2)


def test_start_refuses_a_key_that_is_taken() -> None:
    tree = SuffixTree(4)
    tree.start("a")
    with pytest.raises(ValueError, match="key='a' is in the tree already; remove it"):
        tree.start("a")


@pytest.mark.parametrize("copies", [1, 2])
def test_measured_cost(copies: int) -> None:
    """The measured values are a tenth of these bounds and less; the memory is a third."""
    cost = measure(200_000, copies=copies)
    assert cost["bytes_per_token"] < 300
    assert cost["update_us"] < 100
    assert cost["propose_us"] < 200
    assert cost["fill_us"] < 50
    assert cost["evict_us"] < 50


# --------------------------------------------------------------------------------------------------- proposer


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("num_speculative_tokens", 0, "at least 1"),
        ("suffix_decoding_max_tree_depth", 0, "at least 1"),
        ("suffix_decoding_max_cached_requests", -1, "at least 0"),
        ("suffix_decoding_max_spec_factor", -0.5, "at least 0"),
        ("suffix_decoding_max_spec_factor", float("nan"), "at least 0"),
        ("suffix_decoding_min_token_prob", 1.5, "in [0, 1]"),
        ("min_score", -1.0, "at least 0"),
    ],
)
def test_settings_beyond_their_limits(name: str, value: float, limit: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value} must be {limit}; ")) as error:
        Suffix(**{name: value})
    assert "\n" not in str(error.value)


def make_request(prompt: list[int], max_tokens: int | None = 8) -> Request:
    return Request("", prompt, SamplingParams(max_tokens=max_tokens))


def make_context(texts: dict[int, list[int]], max_draft: int = 100, return_confidence: bool = False) -> Context:
    """The context of these rows; all that a proposer must not write is read-only."""
    token_RL = np.zeros((max(texts) + 1, max(map(len, texts.values()))), dtype=np.int64)
    for row, tokens in texts.items():
        token_RL[row, : len(tokens)] = tokens
    token_RL.flags.writeable = False
    return Context(
        rows=np.array(list(texts)),
        requests=[make_request(tokens[:1]) for tokens in texts.values()],
        token_RL=token_RL,
        length_B=np.array([len(tokens) for tokens in texts.values()]),
        max_draft_B=np.full(len(texts), max_draft),
        last_token_B=torch.tensor([tokens[-1] for tokens in texts.values()]),
        uniform_BK=torch.zeros(len(texts), 1, dtype=torch.float64),
        return_confidence=return_confidence,
    )


def propose(proposer: Suffix, texts: dict[int, list[int]], max_draft: int = 100) -> list[list[int]]:
    draft = proposer.propose(make_context(texts, max_draft))
    assert draft.q_BKV is None
    assert draft.token_BK.dtype == draft.length_B.dtype == torch.int64
    return [draft.token_BK[b, : draft.length_B[b]].tolist() for b in range(len(texts))]


def test_a_draft_below_the_least_score_is_not_made() -> None:
    text = {0: [1, 2, 3, 1, 2, 4, 1, 2]}  # 3 came after one of three
    for least, want in ((0.0, [3]), (0.33, [3]), (0.34, [])):
        proposer = Suffix(num_speculative_tokens=1, min_score=least)
        proposer.on_start(0, make_request(text[0]))
        assert propose(proposer, text) == [want]


def test_confidence_is_from_the_tree_that_drafts() -> None:
    proposer = Suffix(num_speculative_tokens=3)
    proposer.on_start(0, make_request([1, 2, 3, 1, 2, 4, 1, 2]))
    proposer.on_start(1, make_request([7]))
    draft = proposer.propose(make_context({0: [1, 2, 3, 1, 2, 4, 1, 2], 1: [7]}, return_confidence=True))
    assert draft.length_B.tolist() == [2, 0]
    assert draft.confidence_BKF is not None
    want = torch.log(torch.tensor([[1.5 / 2.5, 2 / 4], [1.5 / 0.5, 2 / 4]]))  # 1 of 3, then 1 of 1, after a match of 2
    torch.testing.assert_close(draft.confidence_BKF[0], want)
    assert not draft.confidence_BKF[1].count_nonzero()


def test_drafts_from_the_prompt_and_from_other_responses() -> None:
    proposer = Suffix(num_speculative_tokens=3)
    proposer.on_start(0, make_request([1, 2, 3, 4, 5, 9]))
    assert propose(proposer, {0: [1, 2, 3, 4, 5, 9, 1, 2]}) == [[3, 4]]  # twice the match: 2 tokens
    assert propose(proposer, {0: [1, 2, 3, 4, 5, 9, 1, 2, 3, 4]}) == [[5, 9, 1]]  # K
    assert propose(proposer, {0: [1, 2, 3, 4, 5, 9, 1, 2, 3, 4]}, max_draft=1) == [[5]]  # the row's budget
    assert propose(proposer, {0: [1, 2, 3, 4, 5, 9, 1, 2, 3, 4]}, max_draft=0) == [[]]
    proposer.on_start(1, make_request([7, 8]))
    # the other's response, still running, has 1 2 3 4; its prompt, which goes on to 5, is its own affair
    assert propose(proposer, {0: [1, 2, 3, 4, 5, 9, 1, 2, 3, 4], 1: [7, 8, 1, 2]}) == [[5, 9, 1], [3, 4]]
    assert propose(proposer, {1: [7, 8, 1, 2, 3, 4]}) == [[]]


def test_end_caches_the_response_to_its_last_token() -> None:
    proposer = Suffix()
    request = make_request([7, 8])
    proposer.on_start(0, request)
    propose(proposer, {0: [7, 8, 1, 2]})
    request.output_token_ids = [1, 2, 3, 4]  # as the engine does before it calls end
    proposer.on_finish(0)
    assert proposer.responses.num_tokens == 4
    proposer.on_start(0, make_request([9]))
    assert propose(proposer, {0: [9, 1, 2]}) == [[3, 4]]
    proposer.on_finish(0)  # an engine that fills in nothing: what was seen stays
    assert proposer.responses.num_tokens == 6


def test_reset_makes_the_cache_cold() -> None:
    proposer = Suffix()
    for row, response in ((0, [1, 2, 3]), (1, [1, 2, 4])):
        proposer.on_start(row, make_request([9]))
        propose(proposer, {row: [9, *response]})
    proposer.on_finish(0)
    proposer.reset()
    proposer.on_start(0, make_request([8]))
    assert propose(proposer, {0: [8, 1, 2]}) == [[]]
    assert propose(proposer, {1: [9, 1, 2, 4, 5]}) == [[]]  # runs on
    for row in (0, 1):
        proposer.on_finish(row)
    assert proposer.responses.num_tokens == 3


def test_without_cached_requests_there_is_no_tree_of_responses() -> None:
    proposer = Suffix(suffix_decoding_max_cached_requests=0)
    assert proposer.responses is None
    assert proposer.num_speculative_tokens == 24
    for prompt in ([9, 1, 2, 3], [8]):
        proposer.on_start(0, make_request(prompt))
        assert propose(proposer, {0: [*prompt, 1, 2]}) == [[3, 1] if len(prompt) > 1 else []]
        proposer.on_finish(0)
        proposer.reset()


def test_a_running_request_has_one_of_the_cached_places() -> None:
    proposer = Suffix(suffix_decoding_max_cached_requests=1)
    proposer.on_start(0, make_request([5]))
    propose(proposer, {0: [5, 7, 8, 9]})
    proposer.on_start(1, make_request([6]))  # takes the place of the response 7 8 9, though that goes on
    assert propose(proposer, {1: [6, 7, 8]}) == [[]]
    assert propose(proposer, {0: [5, 7, 8, 9, 7, 8]}) == [[9, 7]]  # its own tree is still there
    for row in (0, 1):
        proposer.on_finish(row)
    assert proposer.responses.num_tokens == 2
    proposer.on_start(0, make_request([5]))
    assert proposer.responses.num_tokens == 0


@pytest.mark.parametrize("case", ARCTIC["streams"])
def test_proposer_is_arctics(case: dict) -> None:
    """Three rows whose requests come and go, beside a cache of as many responses as the case says."""
    proposer = Suffix(
        suffix_decoding_max_tree_depth=case["depth"],
        suffix_decoding_max_cached_requests=case["cached"],
        suffix_decoding_max_spec_factor=case["factor"],
    )
    texts: dict[int, list[int]] = {}
    for step in case["steps"]:
        for row in step["end"]:
            del texts[row]
            proposer.on_finish(row)
        for row, prompt in step["begin"].items():
            texts[int(row)] = list(prompt)
            proposer.on_start(int(row), make_request(prompt))
        for row, tokens in step["tokens"].items():
            texts[int(row)] += tokens
        if texts:
            assert propose(proposer, dict(sorted(texts.items()))) == list(step["drafts"].values())


def test_proposer_against_reference_trees() -> None:
    """Three rows with requests that come and go, tokens in bursts, a cache of two responses, fewer than run at times."""
    rng = random.Random(0)
    depth = 8
    k = 5
    proposer = Suffix(k, suffix_decoding_max_tree_depth=depth, suffix_decoding_max_cached_requests=2)
    responses = SuffixTreeReference(depth)
    cached = []
    num_drafted = 0
    num_started = 0
    running: dict[int, tuple[int, int, list[int], SuffixTreeReference]] = {}  # key, length seen, tokens, tree
    for _ in range(300):
        for row in range(3):
            if row not in running and rng.random() < 0.5:
                prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 20))]
                proposer.on_start(row, make_request(prompt, max_tokens=rng.choice([None, 4, 40])))
                num_started += 1
                responses.start(num_started)
                cached.append(num_started)
                if len(cached) > 2:
                    responses.remove(cached.pop(0))
                tree = SuffixTreeReference(depth)
                tree.start(0)
                tree.extend(0, prompt)
                running[row] = (num_started, len(prompt), prompt, tree)
            elif row in running and rng.random() < 0.1:
                del running[row]
                proposer.on_finish(row)
        expected = []
        texts = {}
        for row, (key, seen, tokens, tree) in running.items():
            tokens = tokens + [rng.randrange(4) for _ in range(rng.randrange(1, 5))]
            tree.extend(0, tokens[seen:])
            if key in cached:
                responses.extend(key, tokens[seen:])
            running[row] = (key, len(tokens), tokens, tree)
            texts[row] = tokens
            local, others = (t.speculate(tokens[-depth:], k) for t in (tree, responses))
            expected.append((others if others[2] > local[2] else local)[0].tolist())
        if texts:
            assert propose(proposer, texts) == expected
            num_drafted += sum(map(len, expected))
    assert num_drafted > 500
    assert proposer.responses.num_tokens == sum(map(len, responses.sequences.values()))


def test_kernels_are_compiled_once() -> None:
    """No call above, whatever its arrays, made numba compile a second version amid the measurements."""
    assert [len(kernel.signatures) for kernel in KERNELS] == [1] * len(KERNELS)
