"""N-gram drafting, also known as prompt lookup (Saxena 2023): what followed the same n tokens before, follows again.

The longest suffix of the tokens so far with n in [prompt_lookup_min, prompt_lookup_max] that stood earlier is looked up, and up
to K tokens that followed it there are the draft. Of several places the leftmost counts, as in vLLM's `ngram`
(`prompt_lookup_latest=true`: the rightmost, as in its newer runner). No match: no draft.
"""

from __future__ import annotations

import numba
import numpy as np

from specdec.core import Context, Draft, Silent, ragged


class Ngram(Silent):
    """Settings are those of vLLM. With neither bound both are 5; with one, the other is the same."""

    def __init__(
        self,
        num_speculative_tokens: int,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        prompt_lookup_latest: bool = False,
    ):
        if num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}: at least 1 is needed; method 'none' drafts nothing"
            )
        given = [bound for bound in (prompt_lookup_min, prompt_lookup_max) if bound is not None] or [5]
        low = given[0] if prompt_lookup_min is None else prompt_lookup_min
        high = given[-1] if prompt_lookup_max is None else prompt_lookup_max
        if not 1 <= low <= high:
            raise ValueError(f"prompt_lookup_min={low} and prompt_lookup_max={high}: need 1 <= min <= max")
        self.num_speculative_tokens = num_speculative_tokens
        self.prompt_lookup_min, self.prompt_lookup_max, self.prompt_lookup_latest = low, high, prompt_lookup_latest
        find_match(np.zeros(2, dtype=np.int64), 1, 1, False)  # compile now, not in the first measured step

    def propose(self, context: Context) -> Draft:
        drafts = []
        for b in range(len(context.rows)):
            tokens = context.tokens(b)
            after = find_match(tokens, self.prompt_lookup_min, self.prompt_lookup_max, self.prompt_lookup_latest)
            drafts.append(tokens[after : after + context.max_draft_B[b]])
        return ragged(drafts, context.last_token_B.device)


def find_match_reference(tokens: np.ndarray, low: int, high: int, latest: bool = False) -> int:
    """The rule in words: for n from high down to low, the place after an earlier occurrence of the last n tokens."""
    length = len(tokens)
    for n in range(min(high, length - 1), low - 1, -1):
        starts = [i for i in range(length - n) if (tokens[i : i + n] == tokens[length - n :]).all()]
        if starts:
            return starts[-1 if latest else 0] + n
    return length


@numba.njit(cache=True)
def find_match(tokens: np.ndarray, low: int, high: int, latest: bool) -> int:
    """Index of the token after the best earlier occurrence; len(tokens) if there is none.

    One pass: at each place, count backwards how long the text agrees with the end of the sequence.
    """
    length = len(tokens)
    best_n, after = low - 1, length
    for end in range(1, length):  # an occurrence ends before `end`, and tokens[end] is what follows it
        n = 0
        while n < high and n < end and tokens[end - 1 - n] == tokens[length - 1 - n]:
            n += 1
        if n > best_n or (latest and n == best_n and n >= low):
            best_n, after = n, end
            if n == high and not latest:
                break
    return after
