"""Suffix decoding: draft what followed the last tokens before, in this request or in earlier responses.

Paper: SuffixDecoding, arXiv 2411.04975. Settings, defaults and limits are those of vLLM's method `suffix`, and so are the
drafts and which responses are cached: they follow Arctic Inference 0.3, which it calls. The tree is that of
`specdec.drafter.suffix_tree`. Draft trees are our addition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from specdec import sampling
from specdec.core import Context, Draft, Request, StatelessProposer, draft_from_lists
from specdec.drafter.suffix_tree import SuffixTree, TreeSpeculation, warm_up
from specdec.params import SamplingParams
from specdec.tree import check_settings


@dataclass(slots=True)
class _Row:
    """A running request. tree: its own; key: of its response in the tree of responses; num_tokens: how many of its tokens the
    trees hold."""

    request: Request
    tree: SuffixTree
    key: int
    num_tokens: int

    @property
    def capacity(self) -> int:
        """Tokens to make room for; the tree grows where the response gets longer."""
        return min(self.request.params.max_tokens or 1024, 1024)


class Suffix(StatelessProposer):
    """Drafts from two suffix trees: of the request, prompt and output; of all responses, running ones too.

    The draft with the higher score is used, on ties that of the request's tree. Drafts vary in length and may be empty; they
    are deterministic (q is one-hot). ValueError: a setting is beyond its limit.

    With the tree of all responses, a request's tokens above temperature 0 depend on the other responses (their distribution
    does not), except under `match`. With 0 cached requests there is no such tree, and no such dependence.

    num_speculative_tokens: tokens per draft at most; None: the tree's depth.
    suffix_decoding_max_tree_depth: tokens of match and draft together at most.
    suffix_decoding_max_cached_requests: responses in that tree, running ones included; the one that began first is removed
        first (a running request goes on without a place there); 0: no such tree.
    suffix_decoding_max_spec_factor: a match of m tokens drafts at most m times this.
    suffix_decoding_min_token_prob: a draft ends where the product of its tokens' shares, on its path, falls below this.
    min_score: a draft is proposed only if at least so many of its tokens are expected to be accepted, by the counts.
    tree_topk: drafts are trees of up to num_speculative_tokens nodes with at most so many children each; None: chains.
        The factor limits their depth.
    tree_depth: tokens of a tree's longest path at most; None: no limit of its own.

    Confidence features of a token: the log-odds of its share among what came after the match and the draft so far; and the
    logarithm of the match's length over 4.
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
        tree_topk: int | None = None,
        tree_depth: int | None = None,
    ) -> None:
        depth = suffix_decoding_max_tree_depth
        num_cached = suffix_decoding_max_cached_requests
        factor = suffix_decoding_max_spec_factor
        min_prob = suffix_decoding_min_token_prob
        if num_speculative_tokens is not None and not num_speculative_tokens >= 1:
            raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be at least 1; try 8")
        if not depth >= 1:
            raise ValueError(f"suffix_decoding_max_tree_depth={depth} must be at least 1; try 24")
        if not num_cached >= 0:
            raise ValueError(f"suffix_decoding_max_cached_requests={num_cached} must be at least 0; 0: none")
        if not factor >= 0:
            raise ValueError(f"suffix_decoding_max_spec_factor={factor} must be at least 0; try 1.0")
        if not 0 <= min_prob <= 1:
            raise ValueError(f"suffix_decoding_min_token_prob={min_prob} must be in [0, 1]; try 0.1")
        if not min_score >= 0:
            raise ValueError(f"min_score={min_score} must be at least 0; 0: any draft will do")
        check_settings(tree_topk, tree_depth)
        self.num_speculative_tokens = depth if num_speculative_tokens is None else num_speculative_tokens
        self.depth = depth
        self.num_cached = num_cached
        self.max_spec_factor = factor
        self.min_token_prob = min_prob
        self.min_score = min_score
        self.tree_topk = tree_topk
        self.tree_depth = depth if tree_depth is None else tree_depth
        self.drafts_trees = tree_topk is not None
        self.responses = SuffixTree(depth) if num_cached else None
        self._cached: deque[int] = deque()  # keys of the responses, in the order in which the requests started
        self._rows: dict[int, _Row] = {}
        self._spare: list[SuffixTree] = []  # trees of finished requests, used again
        self._num_started = 0
        warm_up()

    def on_start(self, row: int, request: Request) -> None:
        assert row not in self._rows
        prompt = request.prompt_token_ids
        tree = self._spare.pop() if self._spare else SuffixTree(self.depth)
        self._num_started += 1
        state = _Row(request, tree, self._num_started, len(prompt))
        self._rows[row] = state
        tree.start(0, len(prompt) + state.capacity)
        tree.extend(0, prompt)
        if self.responses is not None:
            self.responses.start(state.key, state.capacity)
            self._cached.append(state.key)
            if len(self._cached) > self.num_cached:
                self.responses.remove(self._cached.popleft())

    def on_finish(self, row: int, hidden: Sequence[object] = ()) -> None:
        """Cache the response, with the tokens since the last `propose` if the engine has added them to the request."""
        state = self._rows.pop(row)
        state.tree.reset()
        self._spare.append(state.tree)
        if self.responses is not None and state.key in self.responses:
            num_cached = state.num_tokens - len(state.request.prompt_token_ids)
            self.responses.extend(state.key, state.request.output_token_ids[num_cached:])
            self.responses.finish(state.key)

    def reset(self) -> None:
        """Empty the tree of responses; of running requests it keeps what comes from now on."""
        if self.responses is not None:
            running = [state for state in self._rows.values() if state.key in self.responses]
            self.responses.reset()
            self._cached = deque(sorted(state.key for state in running))
            for state in running:
                self.responses.start(state.key, state.capacity)

    def propose(self, context: Context) -> Draft:
        drafts = []
        parents = []
        confidence = []
        max_depth_B = context.path_limit()
        for b, row in enumerate(context.rows.tolist()):
            state = self._rows[row]
            token_L = context.tokens(b)
            self._append(state, token_L[state.num_tokens :])
            limit = min(self.num_speculative_tokens, int(context.max_draft_B[b]))
            if self.tree_topk is None:
                tree, token_K, match_len = self._speculate(state, token_L[-self.depth :], limit)
                drafts.append(token_K)
                if context.return_confidence:
                    confidence.append(_confidence(*tree.counts(token_L, match_len, token_K), match_len))
            else:
                max_depth = min(self.tree_depth, int(max_depth_B[b]))
                draft = self._speculate_tree(state, token_L[-self.depth :], limit, max_depth, self.tree_topk)
                num_nodes = len(draft.token_K) if draft.score >= self.min_score else 0
                drafts.append(draft.token_K[:num_nodes])
                parents.append(draft.parent_K[:num_nodes])
                if context.return_confidence:
                    confidence.append(_confidence(draft.count_K[:num_nodes], draft.total_K[:num_nodes], draft.match_len))
        return draft_from_lists(
            drafts,
            context.last_token_B.device,
            confidence if context.return_confidence else None,
            parents if self.drafts_trees else None,
        )

    def _append(self, state: _Row, token_L: np.ndarray) -> None:
        """Add tokens of the response to the trees."""
        state.tree.extend(0, token_L)
        if self.responses is not None and state.key in self.responses:
            self.responses.extend(state.key, token_L)
        state.num_tokens += len(token_L)

    def _speculate(self, state: _Row, token_L: np.ndarray, limit: int) -> tuple[SuffixTree, np.ndarray, int]:
        """(the tree that drafts, its draft, the length of its match)"""
        settings = (limit, self.max_spec_factor, 0.0, self.min_token_prob)
        tree = state.tree
        token_K, _, score, match_len = tree.speculate(token_L, *settings)
        if self.responses is not None:
            other_K, _, other_score, other_len = self.responses.speculate(token_L, *settings)
            if other_score > score:
                tree = self.responses
                token_K = other_K
                score = other_score
                match_len = other_len
        return tree, token_K if score >= self.min_score else token_K[:0], match_len

    def _speculate_tree(self, state: _Row, token_L: np.ndarray, num_nodes: int, max_depth: int, topk: int) -> TreeSpeculation:
        """The draft tree."""
        settings = (num_nodes, max_depth, topk, self.max_spec_factor, 0.0, self.min_token_prob)
        draft = state.tree.speculate_tree(token_L, *settings)
        if self.responses is not None:
            other = self.responses.speculate_tree(token_L, *settings)
            if other.score > draft.score:
                draft = other
        return draft


def _confidence(count_K: np.ndarray, total_K: np.ndarray, match_len: int) -> np.ndarray:
    """[n, 2] confidence features of the n tokens of a draft."""
    if not len(count_K):
        return np.zeros((0, 2), np.float32)
    return np.stack([sampling.share_log_odds(count_K, total_K), np.full(len(count_K), np.log(match_len / 4))], 1)


def measure(num_cached_tokens: int, depth: int = 24, seed: int = 0, copies: int = 1) -> dict[str, float]:
    """Time and memory of one running request beside a cache of that many tokens, in responses of 2,000.

    The text is synthetic: an order-2 Markov chain over a Zipf vocabulary in which a tenth of the blocks of
    100 tokens are quotations. All responses are cached `copies` times. The request has a
    prompt of 1,000 tokens and 500 steps of one token each.

    Returns medians in microseconds: `update_us` (one token, both trees), `propose_us` (a draft, both trees),
    `fill_us` (per cached token, in bulk), `evict_us` (per removed token); and `bytes_per_token`, the arrays' room to grow
    included.
    """
    text_BL = _text(-(-num_cached_tokens // (2000 * copies)) + 1, 2000, np.random.default_rng(seed))
    proposer = Suffix(suffix_decoding_max_tree_depth=depth)
    responses = SuffixTree(depth)
    proposer.responses = responses
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
    cumulative_V = np.cumsum(1 / np.arange(1, vocab + 1))
    token_BL = rng.integers(vocab, size=(num_rows, length))
    rank_BL = rng.geometric(0.4, size=(num_rows, length))  # which of the tokens that follow the last two
    for i in range(2, length):
        key_B = (token_BL[:, i - 2] * vocab + token_BL[:, i - 1]) * 64 + rank_BL[:, i]
        key_B = (key_B ^ key_B >> 17) * 0x9E3779B97F4A7C1 % 2**61  # a hash instead of a table
        uniform_B = (key_B ^ key_B >> 29) % 2**32 / 2**32
        token_BL[:, i] = np.searchsorted(cumulative_V, uniform_B * cumulative_V[-1])
    block_GL = token_BL.reshape(-1, 100)
    source_GL = block_GL[: max(1, len(block_GL) // 20)].copy()
    quoted_G = rng.random(len(block_GL)) < 0.1
    block_GL[quoted_G] = source_GL[rng.integers(len(source_GL), size=quoted_G.sum())]
    return token_BL
