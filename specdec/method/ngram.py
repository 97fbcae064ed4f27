"""N-gram drafting, also known as prompt lookup (Saxena 2023): what followed the same n tokens before, follows again.

The longest suffix of the tokens so far with n in [prompt_lookup_min, prompt_lookup_max] that occurred earlier is looked up, and
up to K tokens that followed it there are the draft. Of several places the leftmost counts, as in vLLM's `ngram`
(`prompt_lookup_latest=true`: the rightmost, as in its newer runner). No match: no draft.

A draft tree merges what followed at all these places. The share of a token is how many of the places where its path occurred,
and went on, it follows; a node's probability is the product of the shares on its path. Nodes are ordered by (-probability,
depth, creation): a node creates its children when its turn in this order comes, those with more places first, and of equal ones
the one that occurred first after the path (`prompt_lookup_latest=true`: last).
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush

import numpy as np

from specdec import sampling
from specdec.compiled import compiled
from specdec.core import Context, Draft, MethodFacts, StatelessProposer, draft_from_lists
from specdec.tree import check_settings

DraftTree = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]  # what `draft_tree` returns


class Ngram(StatelessProposer):
    """Settings are those of vLLM. With neither bound both are 5; with one, the other is the same.

    tree_topk: drafts are trees of up to num_speculative_tokens nodes with at most so many children each; None: chains.
    tree_depth: tokens of a tree's longest path at most; None: no limit of its own.

    Confidence of a token, from the earlier places where the matched tokens and the draft so far occurred: the log-odds of the
    share of them that the token followed; and how many tokens over 3 the match has.
    """

    name = "ngram"
    facts = MethodFacts(model_spellings=("ngram", "[ngram]"))
    num_confidence_features = 2

    def __init__(
        self,
        num_speculative_tokens: int,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        prompt_lookup_latest: bool = False,
        tree_topk: int | None = None,
        tree_depth: int | None = None,
    ):
        low, high = check_bounds(num_speculative_tokens, prompt_lookup_min, prompt_lookup_max)
        check_settings(tree_topk, tree_depth)
        self.num_speculative_tokens = num_speculative_tokens
        self.prompt_lookup_min = low
        self.prompt_lookup_max = high
        self.prompt_lookup_latest = prompt_lookup_latest
        self.tree_topk = tree_topk
        self.tree_depth = num_speculative_tokens if tree_depth is None else tree_depth
        self.drafts_trees = tree_topk is not None
        tokens = np.zeros(2, dtype=np.int64)  # compile now, not in the first measured step
        if self.drafts_trees:
            draft_tree(tokens, 1, 1, False, 1, 1, 1)
        else:
            count_followers(tokens, find_match(tokens, 1, 1, False), 1, 1)

    def propose(self, context: Context) -> Draft:
        if self.tree_topk is not None:
            return self._propose_trees(context, self.tree_topk)
        drafts = []
        confidence = []
        for b in range(len(context.rows)):
            tokens = context.tokens(b)
            after = find_match(tokens, self.prompt_lookup_min, self.prompt_lookup_max, self.prompt_lookup_latest)
            drafts.append(tokens[after : after + context.max_draft_B[b]])
            if context.return_confidence:
                n, count_K, total_K = count_followers(tokens, after, len(drafts[-1]), self.prompt_lookup_max)
                confidence.append(np.stack([sampling.share_log_odds(count_K, total_K), np.full(len(count_K), n - 3)], 1))
        return draft_from_lists(drafts, context.last_token_B.device, confidence if context.return_confidence else None)

    def _propose_trees(self, context: Context, topk: int) -> Draft:
        drafts = []
        parents = []
        confidence = []
        max_depth_B = context.path_limit()
        for b in range(len(context.rows)):
            token_K, parent_K, count_K, total_K, n = draft_tree(
                context.tokens(b),
                self.prompt_lookup_min,
                self.prompt_lookup_max,
                self.prompt_lookup_latest,
                int(context.max_draft_B[b]),
                min(self.tree_depth, int(max_depth_B[b])),
                topk,
            )
            drafts.append(token_K)
            parents.append(parent_K)
            if context.return_confidence:
                confidence.append(np.stack([sampling.share_log_odds(count_K, total_K), np.full(len(count_K), n - 3)], 1))
        device = context.last_token_B.device
        return draft_from_lists(drafts, device, confidence if context.return_confidence else None, parents)


def check_bounds(num_speculative_tokens: int, low: int | None, high: int | None) -> tuple[int, int]:
    """The bounds on n, with their defaults. Raises ValueError for impossible ones."""
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens={num_speculative_tokens}: at least 1 is needed; method 'none' drafts nothing")
    if low is None:
        low = 5 if high is None else high
    if high is None:
        high = low
    if not 1 <= low <= high:
        raise ValueError(f"prompt_lookup_min={low} and prompt_lookup_max={high}: need 1 <= min <= max")
    return low, high


def find_match_reference(tokens: np.ndarray, low: int, high: int, latest: bool = False) -> int:
    """The rule in words: for n from high down to low, the place after an earlier occurrence of the last n tokens."""
    length = len(tokens)
    for n in range(min(high, length - 1), low - 1, -1):
        starts = [i for i in range(length - n) if (tokens[i : i + n] == tokens[length - n :]).all()]
        if starts:
            return starts[-1 if latest else 0] + n
    return length


@compiled
def find_match(tokens: np.ndarray, low: int, high: int, latest: bool) -> int:
    """Index of the token after the best earlier occurrence; len(tokens) if there is none.

    One pass: at each place, count backwards how long the text agrees with the end of the sequence.
    """
    length = len(tokens)
    best_n = low - 1
    after = length
    for end in range(1, length):  # an occurrence ends before `end`, and tokens[end] is what follows it
        n = 0
        while n < high and n < end and tokens[end - 1 - n] == tokens[length - 1 - n]:
            n += 1
        if n > best_n or (latest and n == best_n and n >= low):
            best_n = n
            after = end
            if n == high and not latest:
                break
    return after


def count_followers_reference(tokens: np.ndarray, after: int, num_draft: int, high: int) -> tuple[int, list[int], list[int]]:
    """Of the draft that begins at `after`: how many tokens before it match the last ones (at most `high`); and for each draft
    token, how many of the places where match and draft so far occurred it follows, and how many of these places there are."""
    text = tokens.tolist()
    draft = text[after : after + num_draft]
    n = next((n for n in range(min(high, after), 0, -1) if text[after - n : after] == text[-n:]), 0)
    counts = []
    totals = []
    for k in range(num_draft):
        sought = text[len(text) - n :] + draft[:k]
        followers = [text[i + n + k] for i in range(len(text) - n - k) if text[i : i + n + k] == sought]
        counts.append(followers.count(draft[k]))
        totals.append(len(followers))
    return n, counts, totals


@compiled
def count_followers(tokens: np.ndarray, after: int, num_draft: int, high: int) -> tuple[int, np.ndarray, np.ndarray]:
    """The same in one pass."""
    length = len(tokens)
    n = 0
    while n < high and n < after and tokens[after - 1 - n] == tokens[length - 1 - n]:
        n += 1
    count_K = np.zeros(num_draft, dtype=np.int64)
    total_K = np.zeros(num_draft, dtype=np.int64)
    for end in range(n, length):
        i = 0
        while i < n and tokens[end - 1 - i] == tokens[length - 1 - i]:
            i += 1
        if i < n:
            continue
        for k in range(min(num_draft, length - end)):
            total_K[k] += 1
            if tokens[end + k] != tokens[after + k]:
                break
            count_K[k] += 1
    return n, count_K, total_K


def draft_tree_reference(
    tokens: np.ndarray, low: int, high: int, latest: bool, num_nodes: int, max_depth: int, topk: int
) -> DraftTree:
    """The rule in words, which the module's docstring has; for each node, its path is looked up in the text again."""
    text = tokens.tolist()
    length = len(text)
    for n in range(min(high, length - 1), low - 1, -1):
        places = [i + n for i in range(length - n) if text[i : i + n] == text[length - n :]]
        if places:
            break
    else:
        n = 0
        places = []
    heap: list[tuple[float, int, int, int, list[int], int, int]] = []
    nodes: list[tuple[int, int, int, int]] = []
    num_created = 0
    path: list[int] = []
    parent = -1
    minus_prob = -1.0
    while len(nodes) < num_nodes:
        depth = len(path)
        followers = [text[i + depth] for i in places if text[i : i + depth] == path and i + depth < length]
        if latest:
            followers.reverse()
        if depth < max_depth:
            for token, count in Counter(followers).most_common(topk):  # of equal ones, the first in the list
                share = count / len(followers)
                heappush(heap, (minus_prob * share, depth + 1, num_created, parent, [*path, token], count, len(followers)))
                num_created += 1
        if not heap:
            break
        minus_prob, _, _, parent_place, path, count, total = heappop(heap)
        parent = len(nodes)
        nodes.append((path[-1], parent_place, count, total))
    token_K, parent_K, count_K, total_K = np.array(nodes, np.int64).reshape(-1, 4).T
    return token_K, parent_K, count_K, total_K, n


@compiled
def draft_tree(tokens: np.ndarray, low: int, high: int, latest: bool, num_nodes: int, max_depth: int, topk: int) -> DraftTree:
    """The best nodes of the tree of what followed the longest match.

    tokens: the text so far.
    low, high: the longest match has so many tokens.
    latest: of children with equally many places, the one that occurred last comes first.
    num_nodes: most nodes.
    max_depth: most tokens of a path.
    topk: most children of a node, and of the match.

    Returns, for each node in order, its token; its parent's place, -1: the match; how many places of its parent's path it
    follows, and at how many of these the text went on; then the number of matched tokens, 0 if there is no match.
    """
    length = len(tokens)
    place_P = np.empty(length, np.int64)  # after each occurrence; places of a node's path are a stretch, in order of the text
    num_places = 0
    best_n = low - 1
    for end in range(1, length):
        n = 0
        while n < high and n < end and tokens[end - 1 - n] == tokens[length - 1 - n]:
            n += 1
        if n > best_n:
            best_n = n
            num_places = 0
        if n == best_n and n >= low:
            place_P[num_places] = end
            num_places += 1

    token_K = np.empty(num_nodes, np.int64)
    parent_K = np.empty(num_nodes, np.int64)
    count_K = np.empty(num_nodes, np.int64)
    total_K = np.empty(num_nodes, np.int64)
    num_children_J = np.zeros(num_nodes + 1, np.int64)  # taken so far; first of the match
    # (-probability, depth, the parent's place, order among siblings, the stretch of its places, how many its parent has)
    heap = [(0.0, 0, 0, 0, 0, 0, 0)]
    heap.clear()
    minus_prob = -1.0
    depth = 0
    first = 0
    last = num_places
    k = 0
    while k < num_nodes:
        while last > first and place_P[last - 1] + depth >= length:  # the text ends there
            last -= 1
        if depth < max_depth and last > first:
            next_P = tokens[place_P[first:last] + depth]
            order_P = np.argsort(next_P, kind="mergesort")
            place_P[first:last] = place_P[first:last][order_P]
            begin = first
            for end in range(first + 1, last + 1):
                if end == last or next_P[order_P[end - first]] != next_P[order_P[begin - first]]:
                    sibling = -place_P[end - 1] if latest else place_P[begin]
                    share = (end - begin) / (last - first)
                    heappush(heap, (minus_prob * share, depth + 1, k - 1, sibling, begin, end, last - first))
                    begin = end
        while len(heap) and num_children_J[heap[0][2] + 1] == topk:
            heappop(heap)
        if len(heap) == 0:
            break
        minus_prob, depth, parent, _, first, last, total = heappop(heap)
        num_children_J[parent + 1] += 1
        token_K[k] = tokens[place_P[first] + depth - 1]
        parent_K[k] = parent
        count_K[k] = last - first
        total_K[k] = total
        k += 1
    return token_K[:k], parent_K[:k], count_K[:k], total_K[:k], best_n if num_places else 0
