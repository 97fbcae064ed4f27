"""The suffix tree of suffix decoding: counts of all suffixes of some sequences, and drafts by them.

Paper: SuffixDecoding, arXiv 2411.04975. The order of equal counts and the sums in float32 are those of Arctic Inference 0.3,
which vLLM calls. `SuffixTreeReference` states the rules plainly; `SuffixTree` gives the same drafts and probabilities, fast.
Draft trees are not Arctic's: of all continuations of a match they take the likeliest, best first.

How the fast tree works. Each position of a sequence starts a suffix of at most `depth` tokens. The tree is
the trie of all suffixes, with counts, its unary paths folded: a node is a label of one or more tokens with
one count, read from the pool in which each sequence is one segment. So a position costs two nodes at most.
- A suffix that leaves the trie becomes a leaf, whose label runs on to the depth limit through tokens that
  may be yet to come (-1 in the pool). When its sequence grows, nothing has to be done for it.
- A suffix that agrees with others so far ends at a node of its own, which *slides* down a token per append,
  in place, until it deviates, or comes to the end of the label below: then the two nodes merge.
- A node lists the suffixes that end at it (`ends`, `link_P`). So removing a suffix is a walk up from its end,
  and a label that was read from it is read from another one: no label depends on a removed sequence.
- Children with siblings are in one hash table by (parent, token); an only child, the common case, is not.
- Siblings are a list by falling count. Those of one count are a group, with its first and last member, so that a child whose
  count changes finds its place in constant time, however many siblings it has.

Shape suffixes beside those of `core.py`: X nodes (rows of their array), G groups of siblings, H slots of the hash table, P pool
positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from specdec.compiled import compiled

NONE = -1  # no node, no group, no position, or no token yet
ROOT = 0

Array = np.ndarray
Speculation = tuple[Array, Array, float, int]  # tokens, probabilities (float32), score, match length


class TreeSpeculation(NamedTuple):
    """A draft tree. A node's probability is the product of the shares, count / total, on its path.

    token_K: int64, the nodes' tokens, ordered by (-probability, depth, creation): the first n are the best tree of n nodes.
        A node creates its children when its turn in this order comes, in the order of siblings.
    parent_K: int64, the place of each node's parent, before its own; -1: it follows the match.
    prob_K: float32, the nodes' probabilities.
    count_K: how often the node's token comes after the match and the tokens of its path.
    total_K: how often these occur.
    score: the sum of the probabilities.
    match_len: tokens of the match.
    """

    token_K: Array
    parent_K: Array
    prob_K: Array
    count_K: Array
    total_K: Array
    score: float
    match_len: int


class SuffixTreeReference:
    """What suffix decoding computes, plainly; `SuffixTree` has the same methods.

    A trie of all suffixes, cut at `depth` tokens; a node counts the suffixes that pass through or end there.
    """

    @dataclass(eq=False)
    class Node:
        count: int = 0
        children: dict[int, SuffixTreeReference.Node] = field(default_factory=dict)
        order: list[int] = field(default_factory=list)  # the children's tokens by falling count; drafts take the first

        def increment(self, token: int) -> None:
            """One more suffix passes through the child. It moves before the first child of its old count, so that it is the
            last of its new count; if it was that first child itself, it becomes the first of its new count."""
            if token not in self.children:
                self.children[token] = SuffixTreeReference.Node(1)
                self.order.append(token)
                return
            child = self.children[token]
            equals = [other for other in self.order if self.children[other].count == child.count]
            child.count += 1
            self._place(token, child.count if equals[0] == token else child.count - 1)

        def decrement(self, token: int) -> None:
            """One suffix less passes through the child, which becomes the first of its new count."""
            child = self.children[token]
            child.count -= 1
            if child.count:
                self._place(token, child.count)
            else:
                self.order.remove(token)
                del self.children[token]

        def _place(self, token: int, count: int) -> None:
            """Move a child before the others with at most that count."""
            self.order.remove(token)
            larger = [other for other in self.order if self.children[other].count > count]
            self.order.insert(len(larger), token)

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = self.Node()
        self.sequences: dict[Hashable, list[int]] = {}

    def start(self, key: Hashable, capacity: int = 0) -> None:
        self.sequences[key] = []

    def extend(self, key: Hashable, tokens: Sequence[int]) -> None:
        sequence = self.sequences[key]
        for token in tokens:
            sequence.append(int(token))
            for start in range(max(0, len(sequence) - self.depth), len(sequence)):
                parent = self.find(sequence[start:-1])
                assert parent is not None
                parent.increment(sequence[-1])

    def finish(self, key: Hashable) -> None:
        pass

    def remove(self, key: Hashable) -> None:
        sequence = self.sequences.pop(key)
        for start in range(len(sequence)):
            parent = self.root
            for token in sequence[start : start + self.depth]:
                node = parent.children[token]
                parent.decrement(token)
                parent = node

    def find(self, pattern: Sequence[int]) -> SuffixTreeReference.Node | None:
        node: SuffixTreeReference.Node | None = self.root
        for token in pattern:
            node = node.children.get(int(token)) if node else None
        return node

    def speculate(
        self,
        context: Sequence[int],
        max_spec_tokens: int,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> Speculation:
        single = np.float32
        best: Speculation = np.zeros(0, np.int64), np.zeros(0, single), 0.0, 0
        for match_len in range(1, min(self.depth, len(context))):
            node = self.find(context[len(context) - match_len :])
            if node is None:
                break
            allowed = single(match_len) * single(max_spec_factor) + single(max_spec_offset)
            budget = int(min(max_spec_tokens, float(allowed) + 1e-6))
            tokens: list[int] = []
            probs: list[np.float32] = []
            prob = single(1)
            score = single(0)
            while len(tokens) < budget and node.children:
                token = node.order[0]
                child = node.children[token]
                prob = prob * (single(child.count) / single(node.count))
                if prob < single(min_token_prob):
                    break
                tokens.append(token)
                probs.append(prob)
                score = score + prob
                node = child
            if tokens and score >= best[2]:
                best = np.array(tokens), np.array(probs), float(score), match_len
        return best

    def speculate_tree(
        self,
        context: Sequence[int],
        num_nodes: int,
        max_depth: int,
        topk: int,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> TreeSpeculation:
        single = np.float32
        none = np.zeros(0, np.int64)
        best = TreeSpeculation(none, none, np.zeros(0, single), none, none, 0.0, 0)
        for match_len in range(1, min(self.depth, len(context))):
            node = self.find(context[len(context) - match_len :])
            if node is None:
                break
            allowed = single(match_len) * single(max_spec_factor) + single(max_spec_offset)
            budget = min(max_depth, float(allowed) + 1e-6)
            heap: list[tuple[np.float32, int, int, int, int, SuffixTreeReference.Node, int]] = []
            nodes: list[tuple[int, int, np.float32, int, int]] = []
            score = single(0)
            num_created = 0
            parent = -1
            prob = single(1)
            depth = 0
            while len(nodes) < num_nodes:
                for token in node.order[:topk] if depth + 1 <= budget else ():
                    child = node.children[token]
                    child_prob = prob * (single(child.count) / single(node.count))
                    if child_prob >= single(min_token_prob):
                        heappush(heap, (-child_prob, depth + 1, num_created, parent, token, child, node.count))
                        num_created += 1
                if not heap:
                    break
                minus_prob, depth, _, parent_place, token, node, total = heappop(heap)
                prob = -minus_prob
                score = score + prob
                parent = len(nodes)
                nodes.append((token, parent_place, prob, node.count, total))
            if nodes and score >= best.score:
                token_K, parent_K, prob_K, count_K, total_K = map(np.array, zip(*nodes, strict=True))
                best = TreeSpeculation(token_K, parent_K, prob_K, count_K, total_K, float(score), match_len)
        return best

    def counts(self, context: Sequence[int], match_len: int, tokens: Sequence[int]) -> tuple[Array, Array]:
        """[n] each: how often each token comes after the match and the tokens before it, and how often these occur."""
        node = self.find(context[len(context) - match_len :])
        counts = []
        prefix_counts = []
        for token in tokens:
            assert node is not None
            prefix_counts.append(node.count)
            node = node.children[int(token)]
            counts.append(node.count)
        return np.array(counts, np.int64), np.array(prefix_counts, np.int64)


# The fast tree: records and kernels. A node's `depth` is the number of tokens from the root to the end of its
# label, and `ref` is where one of its suffixes has the label's first token. So the label is
# `token_P[ref : ref + depth - the parent's depth]`, up to the first -1. Siblings are a list (`first`, `next`,
# `prev`; the `prev` of the first is the last), and so are the suffixes that end at a node (`ends`, and `next`
# and `prev` of their links). An only child is in no group.

NODE_FIELDS = ["parent", "token", "count", "depth", "ref", "first", "next", "prev", "group", "ends"]
NODE = np.dtype([(name, np.int32) for name in NODE_FIELDS])
HEAD, TAIL = range(2)  # columns of a group: its first and last member; of a freed group, HEAD is the next freed one
LINK = np.dtype([(name, np.int32) for name in ["locus", "next", "prev"]])
# entries of the tally: node rows ever used, first freed one, how many are in use; the same of groups; nodes in the hash table
ROWS, FREE, LIVE, GROUP_ROWS, GROUP_FREE, GROUPS, HASHED = range(7)


class Trie(NamedTuple):
    """The arrays of one tree.

    Kernels take them one by one: given the tuple, numba counts references at every call, five times slower.
    """

    node_X: Array
    group_G: Array
    slot_H: Array
    token_P: Array
    link_P: Array
    tally: Array


@compiled
def _hash_slot(parent: int, token: int, size: int) -> int:
    """The slot of the hash table where the search for (parent, token) begins."""
    key = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) * np.uint64(0xD6E8FEB86659FD93)
    key = (key ^ (key >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return int(np.int64(((key >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)))


@compiled
def _child(node_X: Array, slot_H: Array, parent: int, token: int) -> int:
    first = node_X[parent].first
    if first == NONE or node_X[first].next == NONE:
        return first if first != NONE and node_X[first].token == token else NONE
    at = _hash_slot(parent, token, len(slot_H))
    while slot_H[at] != NONE:
        child = slot_H[at]
        if node_X[child].token == token and node_X[child].parent == parent:
            return child
        at += 1
        if at == len(slot_H):
            at = 0
    return NONE


@compiled
def _find_slot(node_X: Array, slot_H: Array, child: int) -> int:
    at = _hash_slot(node_X[child].parent, node_X[child].token, len(slot_H))
    while slot_H[at] != child and slot_H[at] != NONE:
        at += 1
        if at == len(slot_H):
            at = 0
    return at


@compiled
def _hash_insert(node_X: Array, slot_H: Array, tally: Array, child: int) -> None:
    slot_H[_find_slot(node_X, slot_H, child)] = child
    tally[HASHED] += 1


@compiled
def _hash_remove(node_X: Array, slot_H: Array, tally: Array, child: int) -> None:
    """Empty the child's slot and shift back those behind it that were pushed past it."""
    size = len(slot_H)
    hole = _find_slot(node_X, slot_H, child)
    at = hole
    while True:
        at = (at + 1) % size
        other = slot_H[at]
        if other == NONE:
            break
        home = _hash_slot(node_X[other].parent, node_X[other].token, size)
        if (at - home) % size >= (at - hole) % size:
            slot_H[hole] = other
            hole = at
    slot_H[hole] = NONE
    tally[HASHED] -= 1


@compiled
def _new_node(node_X: Array, tally: Array, token: int, count: int, depth: int, ref: int) -> int:
    if tally[FREE] != NONE:
        v = tally[FREE]
        tally[FREE] = node_X[v].next
    else:
        v = tally[ROWS]
        tally[ROWS] += 1
    tally[LIVE] += 1
    row = node_X[v]
    row.token = token
    row.count = count
    row.depth = depth
    row.ref = ref
    row.first = NONE
    row.group = NONE
    row.ends = NONE
    return v


@compiled
def _free_node(node_X: Array, tally: Array, v: int) -> None:
    node_X[v].next = tally[FREE]
    tally[FREE] = v
    tally[LIVE] -= 1


@compiled
def _open_group(node_X: Array, group_G: Array, tally: Array, child: int) -> None:
    """Put the child, which is in no group, into a new one."""
    if tally[GROUP_FREE] != NONE:
        group = tally[GROUP_FREE]
        tally[GROUP_FREE] = group_G[group, HEAD]
    else:
        group = tally[GROUP_ROWS]
        tally[GROUP_ROWS] += 1
    tally[GROUPS] += 1
    group_G[group, HEAD] = child
    group_G[group, TAIL] = child
    node_X[child].group = group


@compiled
def _leave_group(node_X: Array, group_G: Array, tally: Array, child: int) -> None:
    """Take the child out of its group, before it moves among its siblings."""
    group = node_X[child].group
    head = group_G[group, HEAD]
    tail = group_G[group, TAIL]
    if head == tail:
        group_G[group, HEAD] = tally[GROUP_FREE]
        tally[GROUP_FREE] = group
        tally[GROUPS] -= 1
    elif head == child:
        group_G[group, HEAD] = node_X[child].next
    elif tail == child:
        group_G[group, TAIL] = node_X[child].prev
    node_X[child].group = NONE


@compiled
def _unlink(node_X: Array, child: int) -> None:
    """Take a child out of the list of its siblings, of which there are some."""
    parent = node_X[child].parent
    after = node_X[child].next
    before = node_X[child].prev
    if node_X[parent].first == child:
        node_X[parent].first = after
    else:
        node_X[before].next = after
    node_X[after if after != NONE else node_X[parent].first].prev = before


@compiled
def _link(node_X: Array, child: int, after: int) -> None:
    """Put a child into the list of its siblings, of which there are some, before `after`; NONE: at the end."""
    parent = node_X[child].parent
    first = node_X[parent].first
    before = node_X[after if after != NONE else first].prev
    node_X[child].next = after
    node_X[child].prev = before
    node_X[after if after != NONE else first].prev = child
    if after == first:
        node_X[parent].first = child
    else:
        node_X[before].next = child


@compiled
def _add_child(node_X: Array, group_G: Array, slot_H: Array, tally: Array, parent: int, child: int) -> None:
    """Give a parent a child. If it has siblings its count is 1, and it is the last of them."""
    first = node_X[parent].first
    node_X[child].parent = parent
    if first == NONE:
        node_X[parent].first = child
        node_X[child].next = NONE
        node_X[child].prev = child
        return
    if node_X[first].next == NONE:
        _hash_insert(node_X, slot_H, tally, first)
        _open_group(node_X, group_G, tally, first)
    _hash_insert(node_X, slot_H, tally, child)
    last = node_X[first].prev
    _link(node_X, child, NONE)
    if node_X[last].count == node_X[child].count:
        group = node_X[last].group
        node_X[child].group = group
        group_G[group, TAIL] = child
    else:
        _open_group(node_X, group_G, tally, child)


@compiled
def _remove_child(node_X: Array, group_G: Array, slot_H: Array, tally: Array, child: int) -> None:
    parent = node_X[child].parent
    if node_X[child].group == NONE:
        node_X[parent].first = NONE
        return
    _hash_remove(node_X, slot_H, tally, child)
    _leave_group(node_X, group_G, tally, child)
    _unlink(node_X, child)
    first = node_X[parent].first
    if node_X[first].next == NONE:
        _hash_remove(node_X, slot_H, tally, first)
        _leave_group(node_X, group_G, tally, first)


@compiled
def _replace(node_X: Array, group_G: Array, slot_H: Array, old: int, new: int) -> None:
    """Put `new`, whose label begins with the same token, where `old` is among its parent's children."""
    parent = node_X[old].parent
    after = node_X[old].next
    before = node_X[old].prev
    group = node_X[old].group
    if group != NONE:
        slot_H[_find_slot(node_X, slot_H, old)] = new
        if group_G[group, HEAD] == old:
            group_G[group, HEAD] = new
        if group_G[group, TAIL] == old:
            group_G[group, TAIL] = new
    first = node_X[parent].first
    if first == old:
        first = new
        node_X[parent].first = new
    else:
        node_X[before].next = new
    node_X[new].prev = before if before != old else new
    node_X[after if after != NONE else first].prev = new
    node_X[new].parent = parent
    node_X[new].next = after
    node_X[new].group = group
    node_X[new].token = node_X[old].token


@compiled
def _regroup(node_X: Array, group_G: Array, tally: Array, child: int, after: int, group: int, end: int) -> None:
    """Move a child, whose count has changed, among its siblings and into the group of its new count.

    after: the sibling that it moves before; NONE: to the end; the child itself: it stays in its place.
    group: of the siblings with its count; NONE: there are none.
    end: HEAD or TAIL, the end of the group that the child becomes.
    """
    _leave_group(node_X, group_G, tally, child)
    if after != child:
        _unlink(node_X, child)
        _link(node_X, child, after)
    if group == NONE:
        _open_group(node_X, group_G, tally, child)
    else:
        node_X[child].group = group
        group_G[group, end] = child


@compiled
def _increment(node_X: Array, group_G: Array, tally: Array, child: int) -> None:
    """One more in the child's count, and its new place: as in `SuffixTreeReference.Node.increment`."""
    count = node_X[child].count + 1
    node_X[child].count = count
    group = node_X[child].group
    if group == NONE:
        return
    head = group_G[group, HEAD]
    before = NONE if head == node_X[node_X[child].parent].first else node_X[head].prev
    new_group = node_X[before].group if before != NONE and node_X[before].count == count else NONE
    if new_group == NONE and head == group_G[group, TAIL]:
        return
    if child != head:
        _regroup(node_X, group_G, tally, child, head, new_group, TAIL)
    elif new_group != NONE:
        _regroup(node_X, group_G, tally, child, group_G[new_group, HEAD], new_group, HEAD)
    else:
        _regroup(node_X, group_G, tally, child, child, NONE, HEAD)


@compiled
def _decrement(node_X: Array, group_G: Array, tally: Array, child: int) -> None:
    """One less in the child's count, which is not 0 then, and its new place: as in `SuffixTreeReference.Node.decrement`."""
    count = node_X[child].count - 1
    node_X[child].count = count
    group = node_X[child].group
    if group == NONE:
        return
    tail = group_G[group, TAIL]
    after = node_X[tail].next
    new_group = node_X[after].group if after != NONE and node_X[after].count == count else NONE
    if new_group == NONE and tail == group_G[group, HEAD]:
        return
    _regroup(node_X, group_G, tally, child, child if child == tail else after, new_group, HEAD)


@compiled
def _add_end(node_X: Array, link_P: Array, start: int, v: int) -> None:
    """The suffix that begins at `start` ends at node v for now."""
    head = node_X[v].ends
    link_P[start].locus = v
    link_P[start].next = head
    link_P[start].prev = NONE
    if head != NONE:
        link_P[head].prev = start
    node_X[v].ends = start


@compiled
def _remove_end(node_X: Array, link_P: Array, start: int) -> None:
    """The suffix that begins at `start` no longer ends at its node."""
    after = link_P[start].next
    before = link_P[start].prev
    if after != NONE:
        link_P[after].prev = before
    if before != NONE:
        link_P[before].next = after
    else:
        node_X[link_P[start].locus].ends = after


@compiled
def _merge(node_X: Array, group_G: Array, slot_H: Array, tally: Array, v: int) -> None:
    """Merge v, where no suffix ends any more, into its only child, whose label grows upwards."""
    child = node_X[v].first
    node_X[child].ref -= node_X[v].depth - node_X[node_X[v].parent].depth
    node_X[child].count = node_X[v].count
    _replace(node_X, group_G, slot_H, v, child)
    _free_node(node_X, tally, v)


@compiled
def _advance(
    node_X: Array,
    group_G: Array,
    slot_H: Array,
    token_P: Array,
    link_P: Array,
    tally: Array,
    depth: int,
    start: int,
    at: int,
) -> None:
    """Extend the suffix that begins at `start` by the token at position `at`, the newest of its sequence."""
    token = token_P[at]
    v = ROOT
    if start < at:
        v = link_P[start].locus
        first = node_X[v].first
        if node_X[v].ends == start and link_P[start].next == NONE:  # no other suffix ends here
            if first == NONE:  # nor comes here: an open leaf, as others were removed
                node_X[v].depth = depth
                return
            if node_X[first].next == NONE and node_X[first].token == token:  # all go there: slide
                node_X[v].depth += 1
                node_X[first].ref += 1
                next_token = token_P[node_X[first].ref] if node_X[v].depth < node_X[first].depth else NONE
                node_X[first].token = next_token
                if next_token == NONE:  # v has all there is of the label
                    node_X[first].depth = node_X[v].depth
                    _add_end(node_X, link_P, start, first)
                    _merge(node_X, group_G, slot_H, tally, v)
                return
        _remove_end(node_X, link_P, start)
    child = _child(node_X, slot_H, v, token)
    if child == NONE:
        child = _new_node(node_X, tally, token, 1, depth, at)
        _add_child(node_X, group_G, slot_H, tally, v, child)
    else:
        end = node_X[v].depth + 1
        next_token = token_P[node_X[child].ref + 1] if end < node_X[child].depth else NONE
        if next_token == NONE:
            node_X[child].depth = end  # if the label was open, it no longer is
        else:  # the label's first token becomes a node above the rest
            rest = child
            child = _new_node(node_X, tally, token, node_X[rest].count, end, node_X[rest].ref)
            _replace(node_X, group_G, slot_H, rest, child)
            node_X[rest].ref += 1
            node_X[rest].token = next_token
            node_X[rest].group = NONE
            _add_child(node_X, group_G, slot_H, tally, child, rest)
        _increment(node_X, group_G, tally, child)
    _add_end(node_X, link_P, start, child)


@compiled
def _extend(
    node_X: Array,
    group_G: Array,
    slot_H: Array,
    token_P: Array,
    link_P: Array,
    tally: Array,
    depth: int,
    base: int,
    length: int,
    tokens: Array,
) -> None:
    for at in range(base + length, base + length + len(tokens)):
        token_P[at] = tokens[at - base - length]
        for start in range(max(base, at - depth + 1), at + 1):
            # a node that is deeper than its suffix is an open leaf: its label takes in the token by itself
            if start == at or node_X[link_P[start].locus].depth == at - start:
                _advance(node_X, group_G, slot_H, token_P, link_P, tally, depth, start, at)


@compiled
def _remove(
    node_X: Array,
    group_G: Array,
    slot_H: Array,
    token_P: Array,
    link_P: Array,
    tally: Array,
    base: int,
    length: int,
) -> None:
    for start in range(base, base + length):
        v = link_P[start].locus
        _remove_end(node_X, link_P, start)
        lowest = NONE  # the deepest node that stays
        while v != ROOT:
            parent = node_X[v].parent
            if node_X[v].count == 1:
                _remove_child(node_X, group_G, slot_H, tally, v)
                _free_node(node_X, tally, v)
            else:
                _decrement(node_X, group_G, tally, v)
                if lowest == NONE:
                    lowest = v
                if node_X[v].ref == start + node_X[parent].depth:  # read the label from another suffix
                    if node_X[v].ends != NONE:
                        node_X[v].ref = node_X[v].ends + node_X[parent].depth
                    else:
                        node_X[v].ref = node_X[node_X[v].first].ref - (node_X[v].depth - node_X[parent].depth)
            v = parent
        if lowest != NONE and node_X[lowest].ends == NONE and node_X[node_X[lowest].first].next == NONE:
            _merge(node_X, group_G, slot_H, tally, lowest)


@compiled
def _move(
    node_X: Array,
    group_G: Array,
    slot_H: Array,
    token_P: Array,
    link_P: Array,
    tally: Array,
    base: int,
    length: int,
    target: int,
) -> None:
    """Copy a sequence of a segment to another place in the pool, `target`."""
    for start in range(base, base + length):
        moved = start - base + target
        token_P[moved] = token_P[start]
        link_P[moved] = link_P[start]
        v = link_P[start].locus
        after = link_P[start].next
        before = link_P[start].prev
        if after != NONE:
            link_P[after].prev = moved
        if before != NONE:
            link_P[before].next = moved
        else:
            node_X[v].ends = moved
        while v != ROOT:
            if base <= node_X[v].ref < base + length:
                node_X[v].ref += target - base
            v = node_X[v].parent


@compiled
def _rehash(node_X: Array, group_G: Array, slot_H: Array, token_P: Array, link_P: Array, tally: Array, old_H: Array) -> None:
    """Put the nodes of a smaller hash table into the empty one."""
    for child in old_H:
        if child != NONE:
            slot_H[_find_slot(node_X, slot_H, child)] = child


@compiled
def _locate(node_X: Array, slot_H: Array, token_P: Array, context: Array, match: int) -> int:
    """The node in whose label the last `match` tokens of the context end, or NONE."""
    first = len(context) - match
    v = ROOT
    num_matched = 0
    while num_matched < match:
        v = _child(node_X, slot_H, v, context[first + num_matched])
        if v == NONE:
            return NONE
        start = node_X[v].ref - num_matched
        end = min(match, node_X[v].depth)
        for i in range(num_matched + 1, end):
            if token_P[start + i] != context[first + i]:
                return NONE
        num_matched = end
    return v


@compiled
def _speculate(
    node_X: Array,
    slot_H: Array,
    token_P: Array,
    depth: int,
    context: Array,
    limit: int,
    max_spec_factor: float,
    max_spec_offset: float,
    min_token_prob: float,
    token_2K: Array,
    prob_2K: Array,
) -> tuple[int, int, float, int]:
    """Write the best draft into a row of token_2K and prob_2K; returns (row, length, score, match length). Sums in float32."""
    factor = np.float32(max_spec_factor)
    offset = np.float32(max_spec_offset)
    min_prob = np.float32(min_token_prob)
    spare = 0  # the row that the best draft is not in
    length = 0
    score = np.float32(0)
    match_len = 0
    for match in range(1, min(depth, len(context))):
        v = _locate(node_X, slot_H, token_P, context, match)
        if v == NONE:
            break
        budget = min(float(limit), float(np.float32(match) * factor + offset) + 1e-6)
        n = 0
        prob = np.float32(1)
        total = np.float32(0)
        token = 0
        while n + 1 <= budget:
            if match + n < node_X[v].depth:
                token = token_P[node_X[v].ref + match + n - node_X[node_X[v].parent].depth]
            else:
                child = node_X[v].first
                token = node_X[child].token if child != NONE else NONE
                if child != NONE:
                    prob *= np.float32(node_X[child].count) / np.float32(node_X[v].count)
                    v = child
            if token == NONE or prob < min_prob:
                break
            token_2K[spare, n] = token
            prob_2K[spare, n] = prob
            total += prob
            n += 1
        if n and total >= score:
            length = n
            score = total
            match_len = match
            spare = 1 - spare
        if n == 0 and token == NONE:  # nothing ever followed this match; a longer one is no different
            break
    return 1 - spare, length, float(score), match_len


@compiled
def _first_child(node_X: Array, token_P: Array, v: int, depth: int) -> int:
    """Of a path of `depth` tokens that ends in v's label: the node in whose label its likeliest next token lies, or NONE."""
    if depth == node_X[v].depth:
        return int(np.int64(node_X[v].first))
    return v if token_P[node_X[v].ref + depth - node_X[node_X[v].parent].depth] != NONE else NONE


@compiled
def _speculate_tree(
    node_X: Array,
    slot_H: Array,
    token_P: Array,
    depth: int,
    context: Array,
    num_nodes: int,
    max_depth: int,
    topk: int,
    max_spec_factor: float,
    max_spec_offset: float,
    min_token_prob: float,
) -> tuple[Array, Array, Array, Array, Array, float, int]:
    """The fields of a TreeSpeculation. Probabilities and their sums in float32.

    The heap has, of each node that is taken, the first child that is not: when a child is taken, its next sibling comes in. Its
    entries are (-probability, depth below the match, the parent's place, rank among the siblings, the node in whose label the
    token lies), which sort as the draft does, since nodes are created in the order of their parents and ranks.
    """
    factor = np.float32(max_spec_factor)
    offset = np.float32(max_spec_offset)
    min_prob = np.float32(min_token_prob)
    token_2K = np.empty((2, num_nodes), np.int64)
    parent_2K = np.empty((2, num_nodes), np.int64)
    prob_2K = np.empty((2, num_nodes), np.float32)
    count_2K = np.empty((2, num_nodes), np.int64)
    total_2K = np.empty((2, num_nodes), np.int64)
    spare = 0  # the row that the best tree is not in
    length = 0
    score = np.float32(0)
    match_len = 0
    for match in range(1, min(depth, len(context))):
        v = np.int64(_locate(node_X, slot_H, token_P, context, match))
        # where nothing ever followed a match, a longer one is no different
        if v == NONE or _first_child(node_X, token_P, v, match) == NONE:
            break
        budget = min(float(max_depth), float(np.float32(match) * factor + offset) + 1e-6)
        heap = [(np.float32(0), 0, 0, 0, v)]
        heap.clear()
        prob = np.float32(1)
        total = np.float32(0)
        level = 0  # of the node whose children come into the heap
        n = 0
        while n < num_nodes:
            child = _first_child(node_X, token_P, v, match + level)
            if child != NONE and level + 1 <= budget:
                child_prob = prob * (np.float32(node_X[child].count) / np.float32(node_X[v].count))
                if child_prob >= min_prob:
                    heappush(heap, (-child_prob, level + 1, n - 1, 0, child))
            if len(heap) == 0:
                break
            minus_prob, level, parent, rank, v = heappop(heap)
            prob = -minus_prob
            total += prob
            above = node_X[v].parent
            place_in_label = match + level - 1 - node_X[above].depth
            token_2K[spare, n] = token_P[node_X[v].ref + place_in_label]
            parent_2K[spare, n] = parent
            prob_2K[spare, n] = prob
            count_2K[spare, n] = node_X[v].count
            total_2K[spare, n] = node_X[above if place_in_label == 0 else v].count
            n += 1
            sibling = np.int64(node_X[v].next)
            if place_in_label == 0 and sibling != NONE and rank + 1 < topk:
                parent_prob = prob_2K[spare, parent] if parent >= 0 else np.float32(1)
                sibling_prob = parent_prob * (np.float32(node_X[sibling].count) / np.float32(node_X[above].count))
                if sibling_prob >= min_prob:
                    heappush(heap, (-sibling_prob, level, parent, rank + 1, sibling))
        if n and total >= score:
            length = n
            score = total
            match_len = match
            spare = 1 - spare
    token_K = token_2K[1 - spare, :length].copy()
    parent_K = parent_2K[1 - spare, :length].copy()
    prob_K = prob_2K[1 - spare, :length].copy()
    count_K = count_2K[1 - spare, :length].copy()
    total_K = total_2K[1 - spare, :length].copy()
    return token_K, parent_K, prob_K, count_K, total_K, float(score), match_len


@compiled
def _counts(node_X: Array, slot_H: Array, token_P: Array, context: Array, match: int, draft: Array, count_J: Array) -> None:
    """Fill count_J with the occurrences of the match, then with each further token of the draft."""
    v = _locate(node_X, slot_H, token_P, context, match)
    count_J[0] = node_X[v].count
    for n in range(len(draft)):
        if match + n == node_X[v].depth:
            v = _child(node_X, slot_H, v, draft[n])
        count_J[n + 1] = node_X[v].count


@dataclass(slots=True)
class _Segment:
    """`token_P[base : base + length]` is a sequence; it may grow to `capacity` and a -1 always follows."""

    base: int
    capacity: int
    length: int = 0


class SuffixTree:
    """All suffixes of some sequences, up to `depth` tokens each, with counts: see the module's docstring.

    A sequence is started, extended as its tokens come, finished (it stays, but without room to spare) and
    removed. Tokens are 0 .. 2**31 - 1, and the tree holds up to 2**30 of them.
    """

    GROWTH = 1.5  # of full arrays
    CHUNK = 4096  # tokens per kernel call, which bounds the room to be made for them

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._trie = Trie(
            node_X=np.zeros(64, NODE),
            group_G=np.zeros((64, 2), np.int32),
            slot_H=np.zeros(64, np.int32),
            token_P=np.zeros(0, np.int32),
            link_P=np.zeros(0, LINK),
            tally=np.zeros(7, np.int64),
        )
        self._token_2K = np.zeros((2, depth), np.int64)
        self._prob_2K = np.zeros((2, depth), np.float32)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence; keep the arrays."""
        node_X, _, slot_H, token_P, _, tally = self._trie
        slot_H.fill(NONE)
        node_X[ROOT] = (NONE, NONE, 0, 0, NONE, NONE, NONE, NONE, NONE, NONE)
        tally[:] = (1, NONE, 1, 0, NONE, 0, 0)
        self._segments: dict[Hashable, _Segment] = {}
        self._holes: list[tuple[int, int]] = []  # (start, size) of the pool's free stretches, in order
        self._release(0, len(token_P))

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a sequence of that key."""
        return key in self._segments

    def start(self, key: Hashable, capacity: int = 1024) -> None:
        """Add an empty sequence, with room for `capacity` tokens at first. ValueError: the key is in use."""
        if key in self._segments:
            raise ValueError(f"key={key!r} is in the tree already; remove it or use another one")
        self._segments[key] = _Segment(self._allocate(capacity + 1), capacity)

    def extend(self, key: Hashable, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens to a sequence. KeyError: no such sequence."""
        segment = self._segments[key]
        tokens = np.array(tokens, dtype=np.int64)  # a copy: kernels are compiled for one kind of array
        if segment.length + len(tokens) > segment.capacity:
            self._relocate(segment, max(2 * segment.capacity, segment.length + len(tokens)))
        for i in range(0, len(tokens), self.CHUNK):
            chunk = tokens[i : i + self.CHUNK]
            self._make_room(2 * (len(chunk) + self.depth))  # a suffix makes at most two nodes
            _extend(*self._trie, self.depth, segment.base, segment.length, chunk)
            segment.length += len(chunk)

    def finish(self, key: Hashable) -> None:
        """Free the room that the sequence does not use. KeyError: no such sequence."""
        segment = self._segments[key]
        fit = next((start for start, size in self._holes if size > segment.length), segment.base)
        if fit < segment.base:  # move there: what is too small for any capacity would never be used
            self._relocate(segment, segment.length)
        else:
            self._release(segment.base + segment.length + 1, segment.capacity - segment.length)
            segment.capacity = segment.length

    def remove(self, key: Hashable) -> None:
        """Forget a sequence, finished or not. KeyError: no such sequence."""
        segment = self._segments.pop(key)
        _remove(*self._trie, segment.base, segment.length)
        self._release(segment.base, segment.capacity + 1)

    def speculate(
        self,
        context: Sequence[int] | np.ndarray,
        max_spec_tokens: int,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> Speculation:
        """What may follow the context, of which the last `depth` tokens are read.

        context: token ids.
        max_spec_tokens: most tokens of the draft.
        max_spec_factor, max_spec_offset: a match of m tokens drafts at most `m * max_spec_factor + max_spec_offset`.
        min_token_prob: the draft ends where the product of its tokens' shares falls below this.

        Tries every match length, and drafts along the most frequent children. All in float32. Returns (tokens, int64; their
        probabilities, float32; score, the sum of these; match length) for the match with the highest score, the longer one on
        ties; if nothing is drafted, no tokens, 0.0 and 0.
        """
        context = np.array(context[-self.depth :], dtype=np.int64)
        trie = self._trie
        row, length, score, match_len = _speculate(
            trie.node_X,
            trie.slot_H,
            trie.token_P,
            self.depth,
            context,
            int(max_spec_tokens),
            float(max_spec_factor),
            float(max_spec_offset),
            float(min_token_prob),
            self._token_2K,
            self._prob_2K,
        )
        return self._token_2K[row, :length].copy(), self._prob_2K[row, :length].copy(), score, match_len

    def speculate_tree(
        self,
        context: Sequence[int] | np.ndarray,
        num_nodes: int,
        max_depth: int,
        topk: int,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> TreeSpeculation:
        """As `speculate`, with a tree for each match length: its best nodes by probability.

        num_nodes: most nodes.
        max_depth: most tokens of a path; a match of m tokens has at most `m * max_spec_factor + max_spec_offset` too.
        topk: most children of a node, and of the match.
        min_token_prob: there is no node whose probability falls below this.

        With `topk` 1 the tree is the chain of `speculate`.
        """
        context = np.array(context[-self.depth :], dtype=np.int64)
        trie = self._trie
        fields = _speculate_tree(
            trie.node_X,
            trie.slot_H,
            trie.token_P,
            self.depth,
            context,
            int(num_nodes),
            int(max_depth),
            int(topk),
            float(max_spec_factor),
            float(max_spec_offset),
            float(min_token_prob),
        )
        return TreeSpeculation(*fields)

    def counts(
        self, context: Sequence[int] | np.ndarray, match_len: int, tokens: Sequence[int] | np.ndarray
    ) -> tuple[Array, Array]:
        """[n] each, of a draft that `speculate` returned: how often each token comes after the match and the tokens before it,
        and how often these occur."""
        context = np.array(context[-self.depth :], dtype=np.int64)
        tokens = np.array(tokens, dtype=np.int64)
        count_J = np.zeros(len(tokens) + 1, np.int64)
        trie = self._trie
        _counts(trie.node_X, trie.slot_H, trie.token_P, context, match_len, tokens, count_J)
        return count_J[1:], count_J[:-1]

    @property
    def num_tokens(self) -> int:
        return sum(segment.length for segment in self._segments.values())

    @property
    def num_nodes(self) -> int:
        """Nodes in use, without the root."""
        return int(self._trie.tally[LIVE]) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, room to grow included."""
        return sum(array.nbytes for array in self._trie)

    def _make_room(self, num_nodes: int) -> None:
        """Grow the arrays so that the kernels can add that many nodes."""
        tally = self._trie.tally
        need = tally.item(LIVE) + num_nodes
        size = len(self._trie.node_X)
        if need > size:
            node_X = np.zeros(max(need, int(self.GROWTH * size)), NODE)
            node_X[:size] = self._trie.node_X
            self._trie = self._trie._replace(node_X=node_X)
        num_siblings = 2 * num_nodes  # a second child brings the first into a group and the table
        need = tally.item(GROUPS) + num_siblings
        size = len(self._trie.group_G)
        if need > size:
            group_G = np.zeros((max(need, int(self.GROWTH * size)), 2), np.int32)
            group_G[:size] = self._trie.group_G
            self._trie = self._trie._replace(group_G=group_G)
        need = 2 * (tally.item(HASHED) + num_siblings)
        old_H = self._trie.slot_H
        if need > len(old_H):
            slot_H = np.full(max(need, int(self.GROWTH * len(old_H))), NONE, np.int32)
            self._trie = self._trie._replace(slot_H=slot_H)
            _rehash(*self._trie, old_H)

    def _relocate(self, segment: _Segment, capacity: int) -> None:
        """Move a segment to a hole for `capacity` tokens."""
        base = self._allocate(capacity + 1)
        _move(*self._trie, segment.base, segment.length, base)
        self._release(segment.base, segment.capacity + 1)
        segment.base = base
        segment.capacity = capacity

    def _allocate(self, size: int) -> int:
        """Where the first hole that is large enough starts; it is filled with -1."""
        for i, (start, hole_size) in enumerate(self._holes):
            if hole_size >= size:
                self._holes[i : i + 1] = [(start + size, hole_size - size)] if hole_size > size else []
                self._trie.token_P[start : start + size] = NONE
                return start
        old = len(self._trie.token_P)
        new = max(old + size, int(self.GROWTH * old))
        token_P = np.zeros(new, np.int32)
        link_P = np.zeros(new, LINK)
        token_P[:old] = self._trie.token_P
        link_P[:old] = self._trie.link_P
        self._trie = self._trie._replace(token_P=token_P, link_P=link_P)
        self._release(old, new - old)
        return self._allocate(size)

    def _release(self, start: int, size: int) -> None:
        """Add a hole, joined with those that touch it."""
        if not size:
            return
        i = bisect_left(self._holes, (start,))
        if i < len(self._holes) and self._holes[i][0] == start + size:
            size += self._holes.pop(i)[1]
        before = self._holes[i - 1] if i else (0, -1)
        if before[0] + before[1] == start:
            self._holes[i - 1] = (before[0], before[1] + size)
        else:
            self._holes.insert(i, (start, size))


@cache
def warm_up() -> None:
    """Run every kernel once, so that no measurement meets a compilation (seconds; then cached on disk)."""
    tree = SuffixTree(4)
    tree.start("a", capacity=1)
    tree.extend("a", [1, 2, 3, 1, 2] * 40)
    tree.finish("a")
    tree.speculate([1, 2], 2)
    tree.speculate_tree([1, 2], 2, 2, 2)
    tree.counts([1, 2], 2, [3])
    tree.remove("a")
