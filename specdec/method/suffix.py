"""Suffix decoding: draft what followed the last tokens before, in this request or in earlier responses.

Paper: SuffixDecoding, arXiv 2411.04975. Settings, defaults and limits are those of vLLM's method `suffix`, and so are the
drafts: the order of equal counts, sums in float32 and which responses are cached follow Arctic Inference 0.3, which it calls.
`ReferenceTree` states the rules, plainly; `SuffixTree` gives the same drafts and probabilities, fast.

How the fast tree works. Each position of a sequence starts a suffix of at most `depth` tokens. The tree is
the trie of all suffixes, with counts, its unary paths folded: a node is a label of one or more tokens with
one count, read from the pool in which each sequence is one segment. So a position costs two nodes at most.
- A suffix that falls off the trie becomes a leaf, whose label runs on to the depth limit through tokens that
  may be yet to come (-1 in the pool). When its sequence grows, nothing has to be done for it.
- A suffix that agrees with others so far ends at a node of its own, which *slides* down a token per append,
  in place, until it deviates, or comes to the end of the label below: then the two nodes merge.
- A node lists the suffixes that end at it (`ends`, `link_P`). So removing a suffix is a walk up from its end,
  and a label that was read from it is read from another one: no label depends on a sequence that is gone.
- Children with siblings are in one hash table by (parent, token); an only child, the common case, is not.
- Siblings are a list by falling count. Those of one count are a group, with its first and last member, so that a child whose
  count changes finds its place in constant time, however many siblings it has.

Shape suffixes beside those of `core.py`: X nodes (rows of their array), G groups of siblings, H slots of the hash table, P pool
positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numba import njit

from specdec import sampling
from specdec.core import Context, Draft, Request, StatelessProposer, draft_from_lists
from specdec.params import SamplingParams

NONE = -1  # no node, no group, no position, or no token yet
ROOT = 0

Array = np.ndarray
Speculation = tuple[Array, Array, float, int]  # tokens, probabilities (float32), score, match length


class ReferenceTree:
    """What suffix decoding computes; `SuffixTree` is the fast one, with the same methods.

    A trie of all suffixes, cut at `depth` tokens; a node counts the suffixes that pass through or end there.
    """

    @dataclass(eq=False)
    class Node:
        count: int = 0
        children: dict[int, ReferenceTree.Node] = field(default_factory=dict)
        order: list[int] = field(default_factory=list)  # the children's tokens by falling count; drafts take the first

        def rise(self, token: int) -> None:
            """One more suffix passes through the child. It moves before the first child of its count, so that of its new equals
            it is the last; if it was that first child itself, it moves before them."""
            if token not in self.children:
                self.children[token] = ReferenceTree.Node(1)
                self.order.append(token)
                return
            child = self.children[token]
            equals = [other for other in self.order if self.children[other].count == child.count]
            child.count += 1
            self._place(token, child.count if equals[0] == token else child.count - 1)

        def fall(self, token: int) -> None:
            """One suffix less passes through the child: of its new equals it is the first."""
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
                parent.rise(sequence[-1])

    def finish(self, key: Hashable) -> None:
        pass

    def remove(self, key: Hashable) -> None:
        sequence = self.sequences.pop(key)
        for start in range(len(sequence)):
            parent = self.root
            for token in sequence[start : start + self.depth]:
                node = parent.children[token]
                parent.fall(token)
                parent = node  # with count 0, only this suffix went on from here

    def find(self, pattern: Sequence[int]) -> ReferenceTree.Node | None:
        node: ReferenceTree.Node | None = self.root
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
            prob, score = single(1), single(0)
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

    def counts(self, context: Sequence[int], match_len: int, tokens: Sequence[int]) -> tuple[Array, Array]:
        """[n] each: how often each token came after the match and the tokens before it, and how often these stood there."""
        node = self.find(context[len(context) - match_len :])
        count, of = [], []
        for token in tokens:
            assert node is not None
            of.append(node.count)
            node = node.children[int(token)]
            count.append(node.count)
        return np.array(count, np.int64), np.array(of, np.int64)


# The fast tree: records and kernels. A node's `depth` is the number of tokens from the root to the end of its
# label, and `ref` is where one of its suffixes has the label's first token. So the label is
# `token_P[ref : ref + depth - the parent's depth]`, up to the first -1. Siblings are a list (`first`, `next`,
# `prev`; the `prev` of the first is the last), and so are the suffixes that end at a node (`ends`, and `next`
# and `prev` of their links). An only child is in no group.

NODE_FIELDS = ["parent", "token", "count", "depth", "ref", "first", "next", "prev", "group", "ends"]
NODE = np.dtype([(name, np.int32) for name in NODE_FIELDS])
HEAD, TAIL = range(2)  # of a group, its columns; a freed one has the next freed one as its head
LINK = np.dtype([(name, np.int32) for name in ["locus", "next", "prev"]])
# the tally: rows ever used, first freed row, rows in use; the same of groups; nodes in the hash table
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


@njit(cache=True)
def _home(parent: int, token: int, size: int) -> int:
    """The slot where the search for (parent, token) begins."""
    key = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) * np.uint64(0xD6E8FEB86659FD93)
    key = (key ^ (key >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return int(np.int64(((key >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)))


@njit(cache=True)
def _child(node_X: Array, slot_H: Array, parent: int, token: int) -> int:
    first = node_X[parent].first
    if first == NONE or node_X[first].next == NONE:
        return first if first != NONE and node_X[first].token == token else NONE
    at = _home(parent, token, len(slot_H))
    while slot_H[at] != NONE:
        child = slot_H[at]
        if node_X[child].token == token and node_X[child].parent == parent:
            return child
        at += 1
        if at == len(slot_H):
            at = 0
    return NONE


@njit(cache=True)
def _slot_of(node_X: Array, slot_H: Array, child: int) -> int:
    at = _home(node_X[child].parent, node_X[child].token, len(slot_H))
    while slot_H[at] != child and slot_H[at] != NONE:
        at += 1
        if at == len(slot_H):
            at = 0
    return at


@njit(cache=True)
def _enter(node_X: Array, slot_H: Array, tally: Array, child: int) -> None:
    slot_H[_slot_of(node_X, slot_H, child)] = child
    tally[HASHED] += 1


@njit(cache=True)
def _leave(node_X: Array, slot_H: Array, tally: Array, child: int) -> None:
    """Empty the child's slot and shift back those behind it that were pushed past it."""
    size = len(slot_H)
    hole = at = _slot_of(node_X, slot_H, child)
    while True:
        at = (at + 1) % size
        other = slot_H[at]
        if other == NONE:
            break
        home = _home(node_X[other].parent, node_X[other].token, size)
        if (at - home) % size >= (at - hole) % size:
            slot_H[hole] = other
            hole = at
    slot_H[hole] = NONE
    tally[HASHED] -= 1


@njit(cache=True)
def _new(node_X: Array, tally: Array, token: int, count: int, depth: int, ref: int) -> int:
    if tally[FREE] != NONE:
        v = tally[FREE]
        tally[FREE] = node_X[v].next
    else:
        v = tally[ROWS]
        tally[ROWS] += 1
    tally[LIVE] += 1
    row = node_X[v]
    row.token, row.count, row.depth, row.ref = token, count, depth, ref
    row.first = row.group = row.ends = NONE
    return v


@njit(cache=True)
def _free(node_X: Array, tally: Array, v: int) -> None:
    node_X[v].next = tally[FREE]
    tally[FREE] = v
    tally[LIVE] -= 1


@njit(cache=True)
def _open_group(node_X: Array, group_G: Array, tally: Array, child: int) -> None:
    """Put the child, which is in no group, into one of its own."""
    if tally[GROUP_FREE] != NONE:
        group = tally[GROUP_FREE]
        tally[GROUP_FREE] = group_G[group, HEAD]
    else:
        group = tally[GROUP_ROWS]
        tally[GROUP_ROWS] += 1
    tally[GROUPS] += 1
    group_G[group, HEAD] = group_G[group, TAIL] = child
    node_X[child].group = group


@njit(cache=True)
def _leave_group(node_X: Array, group_G: Array, tally: Array, child: int) -> None:
    """While the child is still in its place among its siblings."""
    group = node_X[child].group
    head, tail = group_G[group, HEAD], group_G[group, TAIL]
    if head == tail:
        group_G[group, HEAD] = tally[GROUP_FREE]
        tally[GROUP_FREE] = group
        tally[GROUPS] -= 1
    elif head == child:
        group_G[group, HEAD] = node_X[child].next
    elif tail == child:
        group_G[group, TAIL] = node_X[child].prev
    node_X[child].group = NONE


@njit(cache=True)
def _unlink(node_X: Array, child: int) -> None:
    """Take a child out of the list of its siblings, of which there are some."""
    parent, after, before = node_X[child].parent, node_X[child].next, node_X[child].prev
    if node_X[parent].first == child:
        node_X[parent].first = after
    else:
        node_X[before].next = after
    node_X[after if after != NONE else node_X[parent].first].prev = before


@njit(cache=True)
def _link(node_X: Array, child: int, after: int) -> None:
    """Put a child into the list of its siblings, of which there are some, before `after`; NONE: at the end."""
    parent = node_X[child].parent
    first = node_X[parent].first
    before = node_X[after if after != NONE else first].prev
    node_X[child].next, node_X[child].prev = after, before
    node_X[after if after != NONE else first].prev = child
    if after == first:
        node_X[parent].first = child
    else:
        node_X[before].next = child


@njit(cache=True)
def _adopt(node_X: Array, group_G: Array, slot_H: Array, tally: Array, parent: int, child: int) -> None:
    """A new child, with count 1 if it has siblings: of the children of that count it is the last."""
    first = node_X[parent].first
    node_X[child].parent = parent
    if first == NONE:
        node_X[parent].first = child
        node_X[child].next, node_X[child].prev = NONE, child
        return
    if node_X[first].next == NONE:
        _enter(node_X, slot_H, tally, first)
        _open_group(node_X, group_G, tally, first)
    _enter(node_X, slot_H, tally, child)
    last = node_X[first].prev
    _link(node_X, child, NONE)
    if node_X[last].count == node_X[child].count:
        group = node_X[child].group = node_X[last].group
        group_G[group, TAIL] = child
    else:
        _open_group(node_X, group_G, tally, child)


@njit(cache=True)
def _disown(node_X: Array, group_G: Array, slot_H: Array, tally: Array, child: int) -> None:
    parent = node_X[child].parent
    if node_X[child].group == NONE:
        node_X[parent].first = NONE
        return
    _leave(node_X, slot_H, tally, child)
    _leave_group(node_X, group_G, tally, child)
    _unlink(node_X, child)
    first = node_X[parent].first
    if node_X[first].next == NONE:
        _leave(node_X, slot_H, tally, first)
        _leave_group(node_X, group_G, tally, first)


@njit(cache=True)
def _replace(node_X: Array, group_G: Array, slot_H: Array, old: int, new: int) -> None:
    """Put `new`, whose label begins with the same token, where `old` is among its parent's children."""
    parent, after, before, group = node_X[old].parent, node_X[old].next, node_X[old].prev, node_X[old].group
    if group != NONE:
        slot_H[_slot_of(node_X, slot_H, old)] = new
        if group_G[group, HEAD] == old:
            group_G[group, HEAD] = new
        if group_G[group, TAIL] == old:
            group_G[group, TAIL] = new
    first = node_X[parent].first
    if first == old:
        first = node_X[parent].first = new
    else:
        node_X[before].next = new
    node_X[new].prev = before if before != old else new
    node_X[after if after != NONE else first].prev = new
    node_X[new].parent, node_X[new].next, node_X[new].group, node_X[new].token = parent, after, group, node_X[old].token


@njit(cache=True)
def _rise(node_X: Array, group_G: Array, tally: Array, child: int) -> None:
    """One more in the child's count, and its new place: as in `ReferenceTree.Node.rise`."""
    count = node_X[child].count + 1
    node_X[child].count = count
    group = node_X[child].group
    if group == NONE:
        return
    head = group_G[group, HEAD]
    alone = head == group_G[group, TAIL]
    above = NONE if head == node_X[node_X[child].parent].first else node_X[head].prev
    equals = node_X[above].group if above != NONE and node_X[above].count == count else NONE
    if alone and equals == NONE:
        return
    was_head = child == head
    if not was_head:
        after = head
    elif equals != NONE:
        after = group_G[equals, HEAD]
    else:
        after = child
    _leave_group(node_X, group_G, tally, child)
    if after != child:
        _unlink(node_X, child)
        _link(node_X, child, after)
    if equals == NONE:
        _open_group(node_X, group_G, tally, child)
    else:
        node_X[child].group = equals
        if was_head:
            group_G[equals, HEAD] = child
        else:
            group_G[equals, TAIL] = child


@njit(cache=True)
def _fall(node_X: Array, group_G: Array, tally: Array, child: int) -> None:
    """One less in the child's count, which is not 0 then, and its new place: as in `ReferenceTree.Node.fall`."""
    count = node_X[child].count - 1
    node_X[child].count = count
    group = node_X[child].group
    if group == NONE:
        return
    tail = group_G[group, TAIL]
    after = node_X[tail].next
    equals = node_X[after].group if after != NONE and node_X[after].count == count else NONE
    if equals == NONE and tail == group_G[group, HEAD]:
        return
    _leave_group(node_X, group_G, tally, child)
    if child != tail:
        _unlink(node_X, child)
        _link(node_X, child, after)
    if equals == NONE:
        _open_group(node_X, group_G, tally, child)
    else:
        node_X[child].group = equals
        group_G[equals, HEAD] = child


@njit(cache=True)
def _settle(node_X: Array, link_P: Array, start: int, v: int) -> None:
    """The suffix that begins at `start` ends at node v for now."""
    head = node_X[v].ends
    link_P[start].locus, link_P[start].next, link_P[start].prev = v, head, NONE
    if head != NONE:
        link_P[head].prev = start
    node_X[v].ends = start


@njit(cache=True)
def _unsettle(node_X: Array, link_P: Array, start: int) -> None:
    after, before = link_P[start].next, link_P[start].prev
    if after != NONE:
        link_P[after].prev = before
    if before != NONE:
        link_P[before].next = after
    else:
        node_X[link_P[start].locus].ends = after


@njit(cache=True)
def _merge(node_X: Array, group_G: Array, slot_H: Array, tally: Array, v: int) -> None:
    """Fold v, where no suffix ends any more, into its only child, whose label grows upwards."""
    child = node_X[v].first
    node_X[child].ref -= node_X[v].depth - node_X[node_X[v].parent].depth
    node_X[child].count = node_X[v].count
    _replace(node_X, group_G, slot_H, v, child)
    _free(node_X, tally, v)


@njit(cache=True)
def _step(
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
    """Lead the suffix that begins at `start` on to position `at`, the newest of its sequence."""
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
                ahead = token_P[node_X[first].ref] if node_X[v].depth < node_X[first].depth else NONE
                node_X[first].token = ahead
                if ahead == NONE:  # v took all there is of the label
                    node_X[first].depth = node_X[v].depth
                    _settle(node_X, link_P, start, first)
                    _merge(node_X, group_G, slot_H, tally, v)
                return
        _unsettle(node_X, link_P, start)
    child = _child(node_X, slot_H, v, token)
    if child == NONE:
        child = _new(node_X, tally, token, 1, depth, at)
        _adopt(node_X, group_G, slot_H, tally, v, child)
    else:
        end = node_X[v].depth + 1
        ahead = token_P[node_X[child].ref + 1] if end < node_X[child].depth else NONE
        if ahead == NONE:
            node_X[child].depth = end  # if the label was open, it no longer is
        else:  # the label's first token becomes a node above the rest
            rest = child
            child = _new(node_X, tally, token, node_X[rest].count, end, node_X[rest].ref)
            _replace(node_X, group_G, slot_H, rest, child)
            node_X[rest].ref += 1
            node_X[rest].token, node_X[rest].group = ahead, NONE
            _adopt(node_X, group_G, slot_H, tally, child, rest)
        _rise(node_X, group_G, tally, child)
    _settle(node_X, link_P, start, child)


@njit(cache=True)
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
                _step(node_X, group_G, slot_H, token_P, link_P, tally, depth, start, at)


@njit(cache=True)
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
        _unsettle(node_X, link_P, start)
        lowest = NONE  # the deepest node that stays
        while v != ROOT:
            parent = node_X[v].parent
            if node_X[v].count == 1:
                _disown(node_X, group_G, slot_H, tally, v)
                _free(node_X, tally, v)
            else:
                _fall(node_X, group_G, tally, v)
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


@njit(cache=True)
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
    """Give a sequence another place in the pool."""
    for start in range(base, base + length):
        moved = start - base + target
        token_P[moved] = token_P[start]
        link_P[moved] = link_P[start]
        v, after, before = link_P[start].locus, link_P[start].next, link_P[start].prev
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


@njit(cache=True)
def _rehash(node_X: Array, group_G: Array, slot_H: Array, token_P: Array, link_P: Array, tally: Array, old_H: Array) -> None:
    for child in old_H:
        if child != NONE:
            slot_H[_slot_of(node_X, slot_H, child)] = child


@njit(cache=True)
def _locate(node_X: Array, slot_H: Array, token_P: Array, context: Array, match: int) -> int:
    """The node in whose label the last `match` tokens of the context end, or NONE."""
    first = len(context) - match
    v, seen = ROOT, 0
    while seen < match:
        v = _child(node_X, slot_H, v, context[first + seen])
        if v == NONE:
            return NONE
        start = node_X[v].ref - seen
        end = min(match, node_X[v].depth)
        for i in range(seen + 1, end):
            if token_P[start + i] != context[first + i]:
                return NONE
        seen = end
    return v


@njit(cache=True)
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
    """Put the best draft into one row of the two; returns which, and its length, score and match length. In float32."""
    factor, offset, floor = np.float32(max_spec_factor), np.float32(max_spec_offset), np.float32(min_token_prob)
    spare, length, score, match_len = 0, 0, np.float32(0), 0
    for match in range(1, min(depth, len(context))):
        v = _locate(node_X, slot_H, token_P, context, match)
        if v == NONE:
            break
        budget = min(float(limit), float(np.float32(match) * factor + offset) + 1e-6)
        n, prob, total, token = 0, np.float32(1), np.float32(0), 0
        while n + 1 <= budget:
            if match + n < node_X[v].depth:
                token = token_P[node_X[v].ref + match + n - node_X[node_X[v].parent].depth]
            else:
                child = node_X[v].first
                token = node_X[child].token if child != NONE else NONE
                if child != NONE:
                    prob *= np.float32(node_X[child].count) / np.float32(node_X[v].count)
                    v = child
            if token == NONE or prob < floor:
                break
            token_2K[spare, n] = token
            prob_2K[spare, n] = prob
            total += prob
            n += 1
        if n and total >= score:
            length, score, match_len = n, total, match
            spare = 1 - spare
        if n == 0 and token == NONE:  # nothing ever followed this match; a longer one is no different
            break
    return 1 - spare, length, float(score), match_len


@njit(cache=True)
def _counts(node_X: Array, slot_H: Array, token_P: Array, context: Array, match: int, draft: Array, count_J: Array) -> None:
    """Of the draft after a match of that length: occurrences of the match, then with each further token."""
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
        node_X, group_G, slot_H = np.zeros(64, NODE), np.zeros((64, 2), np.int32), np.zeros(64, np.int32)
        self._trie = Trie(node_X, group_G, slot_H, np.zeros(0, np.int32), np.zeros(0, LINK), np.zeros(7, np.int64))
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
        """Begin an empty sequence, with room for `capacity` tokens at first. ValueError: the key is taken."""
        if key in self._segments:
            raise ValueError(f"key={key!r} is in the tree already; remove it or take another one")
        self._segments[key] = _Segment(self._allocate(capacity + 1), capacity)

    def extend(self, key: Hashable, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens to a sequence. KeyError: no such sequence."""
        segment = self._segments[key]
        tokens = np.array(tokens, dtype=np.int64)  # a copy: kernels are compiled for one kind of array
        if segment.length + len(tokens) > segment.capacity:
            self._resize(segment, max(2 * segment.capacity, segment.length + len(tokens)))
        for i in range(0, len(tokens), self.CHUNK):
            chunk = tokens[i : i + self.CHUNK]
            self._make_room(2 * (len(chunk) + self.depth))  # a suffix makes at most two nodes
            _extend(*self._trie, self.depth, segment.base, segment.length, chunk)
            segment.length += len(chunk)

    def finish(self, key: Hashable) -> None:
        """Give back the room that the sequence did not use. KeyError: no such sequence."""
        segment = self._segments[key]
        fit = next((start for start, size in self._holes if size > segment.length), segment.base)
        if fit < segment.base:  # move there, or what is too small for any capacity would never be used
            self._resize(segment, segment.length)
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
        """What may follow the context, of which the last `depth` tokens are looked at.

        Tries every match length. A match of m tokens drafts at most `m * max_spec_factor + max_spec_offset`,
        along the likeliest children, while the product of their shares is at least `min_token_prob`. All in float32.

        Returns (tokens, int64; their probabilities, float32; score, the sum of these; match length) for the match with
        the highest score, the longer one on ties; if nothing is drafted, no tokens, 0.0 and 0.
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

    def counts(
        self, context: Sequence[int] | np.ndarray, match_len: int, tokens: Sequence[int] | np.ndarray
    ) -> tuple[Array, Array]:
        """[n] each, of a draft that `speculate` gave: how often each token came after the match and the tokens before it, and
        how often these stood there."""
        context, tokens = np.array(context[-self.depth :], dtype=np.int64), np.array(tokens, dtype=np.int64)
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
        """Let the kernels make that many nodes."""
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

    def _resize(self, segment: _Segment, capacity: int) -> None:
        base, old = self._allocate(capacity + 1), segment.base
        _move(*self._trie, old, segment.length, base)
        self._release(old, segment.capacity + 1)
        segment.base, segment.capacity = base, capacity

    def _allocate(self, size: int) -> int:
        """The first hole that is large enough, filled with -1."""
        for i, (start, room) in enumerate(self._holes):
            if room >= size:
                self._holes[i : i + 1] = [(start + size, room - size)] if room > size else []
                self._trie.token_P[start : start + size] = NONE
                return start
        old = len(self._trie.token_P)
        new = max(old + size, int(self.GROWTH * old))
        token_P, link_P = np.zeros(new, np.int32), np.zeros(new, LINK)
        token_P[:old], link_P[:old] = self._trie.token_P, self._trie.link_P
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
    tree.counts([1, 2], 2, [3])
    tree.remove("a")


@dataclass(slots=True)
class _Row:
    """A running request, its tree, the key of its response in the tree of responses, and how many of its tokens were seen."""

    request: Request
    tree: SuffixTree
    key: int
    seen: int

    @property
    def capacity(self) -> int:
        """Tokens that the response may have; a guess where there is no limit, for trees grow."""
        return min(self.request.params.max_tokens or 1024, 1024)  # it grows when it must


class Suffix(StatelessProposer):
    """Drafts from two suffix trees: of the request, prompt and output; of all responses, running ones too.

    The better score wins, the request's own tree on ties. Drafts vary in length and may be empty; they are
    deterministic (q is one-hot). ValueError: a setting is beyond its limit.

    The tree of all responses ties batch mates together: above temperature 0 a request's tokens then depend on what
    others answered (their law does not), except under `match`. 0 cached requests, and each stands alone.

    num_speculative_tokens: tokens per draft at most; None: the tree's depth.
    suffix_decoding_max_tree_depth: tokens of match and draft together at most.
    suffix_decoding_max_cached_requests: responses in that tree, running ones included, the first to begin the first to go (a
        running request goes on without a place there); 0: no such tree.
    suffix_decoding_max_spec_factor: a match of m tokens drafts at most m times this.
    suffix_decoding_min_token_prob: a draft ends where the product of its tokens' shares falls below this.
    min_score: a draft is made only if at least so many of its tokens are expected to stand, by the counts.

    Evidence of a token: the log-odds of its share among what came after the match and the draft so far; and the logarithm of
    the match's length over 4.
    """

    num_confidence_features = 2

    def __init__(
        self,
        num_speculative_tokens: int | None = None,
        suffix_decoding_max_tree_depth: int = 24,
        suffix_decoding_max_cached_requests: int = 10000,
        suffix_decoding_max_spec_factor: float = 1.0,
        suffix_decoding_min_token_prob: float = 0.1,
        min_score: float = 0.0,
    ) -> None:
        depth, num_cached = suffix_decoding_max_tree_depth, suffix_decoding_max_cached_requests
        factor, floor = suffix_decoding_max_spec_factor, suffix_decoding_min_token_prob
        if num_speculative_tokens is not None and not num_speculative_tokens >= 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be at least 1; try 8")
        if not depth >= 1:
            raise ValueError(f"suffix_decoding_max_tree_depth={depth} must be at least 1; try 24")
        if not num_cached >= 0:
            raise ValueError(f"suffix_decoding_max_cached_requests={num_cached} must be at least 0; 0: none")
        if not factor >= 0:
            raise ValueError(f"suffix_decoding_max_spec_factor={factor} must be at least 0; try 1.0")
        if not 0 <= floor <= 1:
            raise ValueError(f"suffix_decoding_min_token_prob={floor} must be in [0, 1]; try 0.1")
        if not min_score >= 0:
            raise ValueError(f"min_score={min_score} must be at least 0; 0: any draft will do")
        self.num_speculative_tokens = depth if num_speculative_tokens is None else num_speculative_tokens
        self.depth, self.num_cached, self.factor, self.floor = depth, num_cached, factor, floor
        self.min_score = min_score
        self.responses = SuffixTree(depth) if num_cached else None
        self._cached: deque[int] = deque()  # keys of the responses, in the order in which the requests began
        self._rows: dict[int, _Row] = {}
        self._spare: list[SuffixTree] = []  # trees of requests that ended, for those that begin
        self._num_begun = 0
        warm_up()

    def on_start(self, row: int, request: Request) -> None:
        assert row not in self._rows
        prompt, tree = request.prompt_token_ids, self._spare.pop() if self._spare else SuffixTree(self.depth)
        self._num_begun += 1
        state = self._rows[row] = _Row(request, tree, self._num_begun, len(prompt))
        tree.start(0, len(prompt) + state.capacity)
        tree.extend(0, prompt)
        if self.responses is not None:
            self.responses.start(state.key, state.capacity)
            self._cached.append(state.key)
            if len(self._cached) > self.num_cached:
                self.responses.remove(self._cached.popleft())

    def on_finish(self, row: int, hidden: Sequence[object] = ()) -> None:
        """Caches the response, with the tokens since the last `propose` if the engine has filled them in."""
        state = self._rows.pop(row)
        state.tree.reset()
        self._spare.append(state.tree)
        if self.responses is not None and state.key in self.responses:
            unseen = state.request.output_token_ids[state.seen - len(state.request.prompt_token_ids) :]
            self.responses.extend(state.key, unseen)
            self.responses.finish(state.key)

    def reset(self) -> None:
        """Make the cache cold: forget all responses, of running requests what was seen of them so far."""
        if self.responses is not None:
            running = [state for state in self._rows.values() if state.key in self.responses]
            self.responses.reset()
            self._cached = deque(sorted(state.key for state in running))
            for state in running:
                self.responses.start(state.key, state.capacity)

    def propose(self, context: Context) -> Draft:
        drafts, evidence = [], []
        for b, row in enumerate(context.rows.tolist()):
            state, token_L = self._rows[row], context.tokens(b)
            self._append(state, token_L[state.seen :])
            limit = min(self.num_speculative_tokens, int(context.max_draft_B[b]))
            tree, token_K, match_len = self._speculate(state, token_L[-self.depth :], limit)
            drafts.append(token_K)
            if context.return_confidence:
                evidence.append(_evidence(tree, token_L, token_K, match_len))
        return draft_from_lists(drafts, context.last_token_B.device, evidence if context.return_confidence else None)

    def _append(self, state: _Row, token_L: np.ndarray) -> None:
        """All tokens after the prompt are the response's."""
        state.tree.extend(0, token_L)
        if self.responses is not None and state.key in self.responses:
            self.responses.extend(state.key, token_L)
        state.seen += len(token_L)

    def _speculate(self, state: _Row, token_L: np.ndarray, limit: int) -> tuple[SuffixTree, np.ndarray, int]:
        """The tree that drafts, its draft and the length of its match."""
        settings = limit, self.factor, 0.0, self.floor
        tree = state.tree
        token_K, _, score, match_len = tree.speculate(token_L, *settings)
        if self.responses is not None:
            other_K, _, other_score, other_len = self.responses.speculate(token_L, *settings)
            if other_score > score:
                tree, token_K, score, match_len = self.responses, other_K, other_score, other_len
        return tree, token_K if score >= self.min_score else token_K[:0], match_len


def _evidence(tree: SuffixTree, token_L: np.ndarray, token_K: np.ndarray, match_len: int) -> np.ndarray:
    """[n, 2] for the n tokens of a draft."""
    if not len(token_K):
        return np.zeros((0, 2), np.float32)
    share_K = sampling.share_log_odds(*tree.counts(token_L, match_len, token_K))
    return np.stack([share_K, np.full(len(token_K), np.log(match_len / 4))], 1)


def measure(num_cached_tokens: int, depth: int = 24, seed: int = 0, copies: int = 1) -> dict[str, float]:
    """Time and memory of one running request beside a cache of that many tokens, in responses of 2,000.

    The text is synthetic: an order-2 Markov chain over a Zipf vocabulary in which a tenth of the blocks of
    100 tokens are quotations. With `copies=2` all responses are cached twice, and so on. The request has a
    prompt of 1,000 tokens and 500 steps of one token each.

    Returns medians in microseconds: `update_us` (one token, both trees), `propose_us` (a draft, both trees),
    `fill_us` (per cached token, in bulk), `evict_us` (per removed token); and `bytes_per_token`, with the
    room that the arrays have left.
    """
    text_BL = _text(-(-num_cached_tokens // (2000 * copies)) + 1, 2000, np.random.default_rng(seed))
    proposer = Suffix(suffix_decoding_max_tree_depth=depth)
    proposer.responses = responses = SuffixTree(depth)
    seconds: dict[str, list[float]] = {"update_us": [], "propose_us": [], "fill_us": [], "evict_us": []}
    cached_L = np.tile(text_BL[:-1].reshape(-1), copies)[:num_cached_tokens]
    for i in range(0, num_cached_tokens, 2000):
        token_L = cached_L[i : i + 2000]
        begin = perf_counter()
        responses.start(("cached", i), 2000)
        responses.extend(("cached", i), token_L)
        responses.finish(("cached", i))
        seconds["fill_us"].append((perf_counter() - begin) / len(token_L))
    bytes_per_token = responses.num_bytes / num_cached_tokens

    token_L = text_BL[-1]
    proposer.on_start(0, Request("measured", token_L[:1000].tolist(), SamplingParams(max_tokens=500)))
    state = proposer._rows[0]
    for end in range(1001, 1501):
        begin = perf_counter()
        proposer._append(state, token_L[end - 1 : end])
        middle = perf_counter()
        proposer._speculate(state, token_L[max(0, end - depth) : end], proposer.num_speculative_tokens)
        seconds["propose_us"].append(perf_counter() - middle)
        seconds["update_us"].append(middle - begin)

    for i in range(0, min(num_cached_tokens, 40_000), 2000):
        begin = perf_counter()
        responses.remove(("cached", i))
        seconds["evict_us"].append((perf_counter() - begin) / len(cached_L[i : i + 2000]))
    medians = {name: float(np.median(values)) * 1e6 for name, values in seconds.items()}
    return medians | {"bytes_per_token": bytes_per_token}


def _text(num_rows: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """[num_rows, length] tokens of the text that `measure` describes."""
    vocab = 32_000
    law_V = np.cumsum(1 / np.arange(1, vocab + 1))
    token_BL = rng.integers(vocab, size=(num_rows, length))
    rank_BL = rng.geometric(0.4, size=(num_rows, length))  # which one of the followers of the last two tokens
    for i in range(2, length):
        key_B = (token_BL[:, i - 2] * vocab + token_BL[:, i - 1]) * 64 + rank_BL[:, i]
        key_B = (key_B ^ key_B >> 17) * 0x9E3779B97F4A7C1 % 2**61  # a hash instead of a table
        uniform_B = (key_B ^ key_B >> 29) % 2**32 / 2**32
        token_BL[:, i] = np.searchsorted(law_V, uniform_B * law_V[-1])
    block_GL = token_BL.reshape(-1, 100)
    source_GL = block_GL[: max(1, len(block_GL) // 20)].copy()
    quoted_G = rng.random(len(block_GL)) < 0.1
    block_GL[quoted_G] = source_GL[rng.integers(len(source_GL), size=quoted_G.sum())]
    return token_BL
