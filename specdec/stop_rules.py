"""When a request ends: stop tokens and stop strings. (Its length limit is `RowState.max_len_R`.)"""

from __future__ import annotations

import numpy as np

from specdec.core import Request
from specdec.model.target import CausalLM


class StopRules:
    """Stop rules of the requests that hold the rows of a cache.

    stop_RV: tokens that end a row's request, on the host.
    text_R: the answer so far, of requests with stop strings.
    """

    def __init__(self, target: CausalLM, num_rows: int):
        self.target = target
        self.stop_RV = np.zeros((num_rows, target.vocab_size), dtype=bool)
        self.text_R = [""] * num_rows

    def stop_ids(self, request: Request) -> list[int]:
        """Tokens that end the request: the model's end tokens and its own."""
        return [i for i in (*self._eos_ids(request), *request.params.stop_token_ids) if 0 <= i < self.target.vocab_size]

    def on_start(self, row: int, request: Request) -> None:
        """A request takes a row."""
        self.stop_RV[row] = False
        self.stop_RV[row, self.stop_ids(request)] = True
        self.text_R[row] = ""

    def cut_at_token(self, rows: np.ndarray, token_BJ: np.ndarray, count_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many of each row's first count_B tokens remain, the last one a stop token if any is; and whether one is."""
        stop_BJ = self.stop_RV[rows[:, None], token_BJ] & (np.arange(token_BJ.shape[1]) < count_B[:, None])
        stopped_B = stop_BJ.any(1)
        return np.where(stopped_B, stop_BJ.argmax(1) + 1, count_B), stopped_B

    def cut_at_string(self, row: int, request: Request, output_n: np.ndarray, num_new: int) -> int:
        """How many of the last num_new tokens remain, so that the text ends with the one that completes a stop string; 0 if
        none does. Sets the request's text and stop_reason.

        output_n: all output tokens of the request, the new ones included. A string that was complete before, which can be while
            `min_tokens` holds it off, does not count.
        """
        params = request.params

        def text_of(num_tokens: int) -> str:
            return self.target.tokenizer.decode(output_n[:num_tokens], skip_special_tokens=params.skip_special_tokens)

        def first_stop(text: str, before: str) -> tuple[int, str] | None:
            known = len(before.rstrip("\ufffd"))  # a character may be cut in the middle
            places = [(text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in params.stop]
            return min(((place, stop) for place, stop in places if place >= 0), default=None)

        before = self.text_R[row]
        num_before = len(output_n) - num_new
        self.text_R[row] = text_of(len(output_n))
        if first_stop(self.text_R[row], before) is None:
            return 0
        for count in range(1, num_new + 1):
            text = text_of(num_before + count)
            match = first_stop(text, before)
            if match and num_before + count >= params.min_tokens:
                place, stop = match
                request.text = text[: place + len(stop) if params.include_stop_str_in_output else place]
                request.stop_reason = stop
                return count
            before = text
        return 0

    def token_reason(self, request: Request, last_token: int) -> int | None:
        """The stop token that ended the request, if it is one of its own; None for an end token of the model's."""
        is_requests = last_token in request.params.stop_token_ids and last_token not in self._eos_ids(request)
        return last_token if is_requests else None

    def _eos_ids(self, request: Request) -> list[int]:
        return [] if request.params.ignore_eos else self.target.eos_token_ids
