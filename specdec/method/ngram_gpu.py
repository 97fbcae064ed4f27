"""N-gram drafting on the device: the drafts of method `ngram`, looked up in all rows at once.

The tokens so far stay on the device, by cache row; a step sends the tokens committed since the row's last draft. At every place
of every row it is counted how many tokens before it agree with the row's last ones, the best place is an argmax, and what
follows it is gathered: no loop over rows or places, and one read by the host, of the draft lengths. `ngram` stops at the first
match that cannot be beaten, this compares everything: an advantage for many rows, long texts and a fast device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec.core import Context, Draft, Request, StatelessProposer
from specdec.method.ngram import Ngram, check_bounds
from specdec.model.target import CausalLM


class NgramGpu(StatelessProposer):
    """Settings and confidence are those of `ngram`."""

    name = "ngram_gpu"
    facts = Ngram.facts
    num_confidence_features = 2

    def __init__(
        self,
        target: CausalLM,
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
        self.token_RL = torch.zeros(0, 0, dtype=torch.int32, device=target.device)
        self.num_sent_R = np.zeros(0, dtype=np.int64)  # tokens of each row that are on the device

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        have_rows, have_slots = self.token_RL.shape
        return 4 * (max(rows, have_rows) * max(slots, have_slots) - have_rows * have_slots)

    def reserve(self, rows: int, slots: int) -> None:
        have_rows, have_slots = self.token_RL.shape
        if rows > have_rows or slots > have_slots:
            grown = self.token_RL.new_zeros(max(rows, have_rows), max(slots, have_slots))
            grown[:have_rows, :have_slots] = self.token_RL
            self.token_RL = grown
            self.num_sent_R = np.pad(self.num_sent_R, (0, len(grown) - have_rows))

    def on_start(self, row: int, request: Request) -> None:
        self.num_sent_R[row] = 0

    def propose(self, context: Context) -> Draft:
        self._send(context)
        device = self.token_RL.device
        # one transfer for all numbers of the rows
        numbers = np.stack([context.rows, context.length_B, context.max_draft_B])
        row_B, length_B, max_draft_B = torch.from_numpy(numbers).to(device, non_blocking=True)
        token_BL = self.token_RL[row_B, : int(context.length_B.max())]
        after_B, match_BL = find_matches(
            token_BL, length_B, self.prompt_lookup_min, self.prompt_lookup_max, self.prompt_lookup_latest
        )
        draft_B = torch.minimum(max_draft_B, length_B - after_B)
        place_BK = after_B.unsqueeze(1) + torch.arange(int(context.max_draft_B.max()), device=device)
        token_BK = token_BL.gather(1, place_BK.clamp(max=token_BL.shape[1] - 1)).long()
        host_draft_B = draft_B.cpu()  # the one read
        token_BK = token_BK[:, : int(host_draft_B.max())]
        confidence_BKF = None
        if context.return_confidence:
            confidence_BKF = find_confidence(token_BL, length_B, match_BL, after_B, token_BK, draft_B)
        return Draft(token_BK, host_draft_B, confidence_BKF=confidence_BKF)

    def _send(self, context: Context) -> None:
        """Bring the device's tokens up to date: all rows' new ones in one piece, with their places."""
        rows = context.rows
        # the row's last token is sent again, so that there is always something to send
        first_B = np.minimum(self.num_sent_R[rows], context.length_B - 1)
        count_B = context.length_B - first_B
        row_N = np.repeat(rows, count_B)
        place_N = np.arange(len(row_N)) + np.repeat(first_B - np.cumsum(count_B) + count_B, count_B)
        new_3N = np.stack([row_N, place_N, context.token_RL[row_N, place_N]])
        row, place, token = torch.from_numpy(new_3N).to(self.token_RL.device, non_blocking=True)
        self.token_RL[row, place] = token.to(self.token_RL.dtype)
        self.num_sent_R[rows] = context.length_B


def find_matches(token_BL: Tensor, length_B: Tensor, low: int, high: int, latest: bool) -> tuple[Tensor, Tensor]:
    """[B] what `ngram.find_match` returns for every row: the place after the best earlier occurrence of the row's last tokens,
    or its length if there is none; and [B, L] how many tokens before each place match, 0 below `low`.

    token_BL: entries at or beyond a row's length do not count.
    """
    width = token_BL.shape[1]
    place_L = torch.arange(width, device=token_BL.device)
    agree_BL = torch.ones_like(token_BL, dtype=torch.bool)
    match_BL = torch.zeros_like(token_BL, dtype=torch.int64)
    for n in range(min(high, width - 1)):  # over the tokens of a match, at most prompt_lookup_max
        last_B1 = token_BL.gather(1, (length_B - 1 - n).clamp(min=0).unsqueeze(1))
        # the token n + 1 before place i is token i - 1 - n
        same_BL = torch.zeros_like(agree_BL)
        same_BL[:, n + 1 :] = token_BL[:, : width - 1 - n] == last_B1
        agree_BL &= same_BL
        match_BL += agree_BL
    match_BL.masked_fill_((place_L >= length_B.unsqueeze(1)) | (match_BL < low), 0)
    # longest first, then leftmost or rightmost: one number for both, so that ties need no rule
    rank_BL = match_BL * width + (place_L if latest else width - 1 - place_L)
    best_B = rank_BL.argmax(1)
    is_match_B = match_BL.gather(1, best_B.unsqueeze(1)).squeeze(1) > 0
    return torch.where(is_match_B, best_B, length_B), match_BL


def find_confidence(
    token_BL: Tensor, length_B: Tensor, match_BL: Tensor, after_B: Tensor, token_BK: Tensor, draft_B: Tensor
) -> Tensor:
    """[B, K, 2] from the counts of `ngram.count_followers`, in all rows at once.

    token_BL: the rows' tokens.
    length_B: how many they are.
    match_BL, after_B: of `find_matches`.
    token_BK: the drafts.
    draft_B: their lengths.
    """
    width = token_BL.shape[1]
    length_B1 = length_B.unsqueeze(1)
    place_L = torch.arange(width, device=token_BL.device)
    n_B1 = match_BL.gather(1, after_B.clamp(max=width - 1).unsqueeze(1))
    is_place_BL = (match_BL >= n_B1) & (place_L < length_B1)
    confidence_BKF = torch.zeros(*token_BK.shape, 2, device=token_BL.device)
    for k in range(token_BK.shape[1]):
        is_place_BL = is_place_BL & (place_L + k < length_B1)
        total_B = is_place_BL.sum(1)
        follows_BL = torch.zeros_like(is_place_BL)
        follows_BL[:, : width - k] = token_BL[:, k:] == token_BK[:, k : k + 1]
        is_place_BL = is_place_BL & follows_BL
        count_B = is_place_BL.sum(1)
        confidence_BKF[:, k, 0] = torch.log((count_B + 0.5) / (total_B - count_B + 0.5))
    confidence_BKF[:, :, 1] = n_B1 - 3
    is_token_BK = torch.arange(token_BK.shape[1], device=token_BL.device) < draft_B.unsqueeze(1)
    return confidence_BKF * is_token_BK.unsqueeze(-1)
