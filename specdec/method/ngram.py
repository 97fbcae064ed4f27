"""N-gram drafting, also known as prompt lookup (Saxena 2023): what followed the same n tokens before, follows again.

The longest suffix of the tokens so far with n in [prompt_lookup_min, prompt_lookup_max] that occurred earlier is looked up, and
up to K tokens that followed it there are the draft. Of several places the leftmost counts, as in vLLM's `ngram`
(`prompt_lookup_latest=true`: the rightmost, as in its newer runner). No match: no draft.
"""

from __future__ import annotations

import numpy as np

from specdec import sampling
from specdec.compiled import compiled
from specdec.core import Context, Draft, MethodFacts, StatelessProposer, draft_from_lists


class Ngram(StatelessProposer):
    """Settings are those of vLLM. With neither bound both are 5; with one, the other is the same.

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
    ):
        low, high = check_bounds(num_speculative_tokens, prompt_lookup_min, prompt_lookup_max)
        self.num_speculative_tokens = num_speculative_tokens
        self.prompt_lookup_min = low
        self.prompt_lookup_max = high
        self.prompt_lookup_latest = prompt_lookup_latest
        tokens = np.zeros(2, dtype=np.int64)  # compile now, not in the first measured step
        count_followers(tokens, find_match(tokens, 1, 1, False), 1, 1)

    def propose(self, context: Context) -> Draft:
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
