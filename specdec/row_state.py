"""What the engine knows of the request in each row of the cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec.core import Request
from specdec.params import SamplingParams


class RowState:
    """Numbers of all rows side by side, so that a step reads them for its rows at once; on the host unless they are tensors.

    request_R: the request that holds the row; None: the row is free.
    num_prompt_R: prompt tokens.
    length_R: committed tokens, prompt included.
    cached_R: committed tokens that the target's cache holds.
    max_len_R: most tokens that the request may hold, prompt included.
    max_draft_R: most tokens to draft for the request in a step.
    num_accepted_prev_R: tokens of the request's last draft that were accepted.
    step_R: verdicts so far, that of the prefill included.
    seed_R: seed of the request's uniforms.
    argmax_only_R: the next token is the argmax of the logits as they are.
    started_R: the proposer knows of the request.
    last_event_R: when the request took the row, then when its last tokens came, on the engine's clock.
    token_RL: committed tokens.
    hidden_R: target states that the proposer has not read yet, in pieces of [n, T, D].
    logits_RV: what the last token was chosen from, if the proposer needs it.
    count_RV: how often each token is in the prompt, and in the output, if some request penalises.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        self.device = device
        self.request_R: list[Request | None] = [None] * num_rows
        self.num_prompt_R = np.zeros(num_rows, dtype=np.int64)
        self.length_R = np.zeros(num_rows, dtype=np.int64)
        self.cached_R = np.zeros(num_rows, dtype=np.int64)
        self.max_len_R = np.zeros(num_rows, dtype=np.int64)
        self.max_draft_R = np.zeros(num_rows, dtype=np.int64)
        self.num_accepted_prev_R = np.zeros(num_rows, dtype=np.int64)
        self.step_R = np.zeros(num_rows, dtype=np.int64)
        self.seed_R = np.zeros(num_rows, dtype=np.int64)
        self.argmax_only_R = np.zeros(num_rows, dtype=bool)
        self.started_R = np.zeros(num_rows, dtype=bool)
        self.last_event_R = np.zeros(num_rows)
        self.token_RL = np.zeros((0, 0), dtype=np.int64)
        self.hidden_R: list[list[Tensor]] = [[] for _ in range(num_rows)]
        self.logits_RV: Tensor | None = None
        self.count_RV: tuple[Tensor, Tensor] | None = None

    # ---------------------------------------------------------------- which rows

    @property
    def num_rows(self) -> int:
        return len(self.request_R)

    @property
    def num_running(self) -> int:
        return sum(request is not None for request in self.request_R)

    def prefilling(self) -> np.ndarray:
        """Rows whose prompt is not processed as a whole."""
        return np.flatnonzero(self.cached_R < self.num_prompt_R)

    def decoding(self) -> np.ndarray:
        """Rows that have a first output token."""
        return np.flatnonzero(self.length_R > self.num_prompt_R)

    def request(self, row: int) -> Request:
        request = self.request_R[row]
        assert request is not None
        return request

    def requests(self, rows: np.ndarray) -> list[Request]:
        return [self.request(row) for row in rows]

    def params(self, rows: np.ndarray) -> list[SamplingParams]:
        return [self.request(row).params for row in rows]

    def num_output(self, rows: np.ndarray) -> np.ndarray:
        """[B] output tokens so far."""
        return self.length_R[rows] - self.num_prompt_R[rows]

    def output(self, row: int) -> np.ndarray:
        """The output tokens of a row (a view)."""
        return self.token_RL[row, self.num_prompt_R[row] : self.length_R[row]]

    def last_token(self, rows: np.ndarray) -> Tensor:
        """[B] on the device."""
        return self.to_device(self.token_RL[rows, self.length_R[rows] - 1])

    def to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    # ---------------------------------------------------------------- what happens to them

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for the tokens of that many rows and slots."""
        have_rows, have_slots = self.token_RL.shape
        self.token_RL = np.pad(self.token_RL, ((0, rows - have_rows), (0, slots - have_slots)))

    def start(self, row: int, request: Request, max_len: int, max_draft: int, now: float) -> None:
        """The request takes the row. The other arguments are those of the row's numbers."""
        ids = np.asarray(request.prompt_token_ids, dtype=np.int64)
        params = request.params
        self.request_R[row] = request
        self.token_RL[row, : len(ids)] = ids
        self.num_prompt_R[row] = len(ids)
        self.length_R[row] = len(ids)
        self.max_len_R[row] = max_len
        self.max_draft_R[row] = max_draft
        self.seed_R[row] = request.seed
        self.last_event_R[row] = now
        self.argmax_only_R[row] = params.greedy and params.plain
        self.hidden_R[row] = []
        penalises = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        if self.count_RV is None and penalises:
            zeros = torch.zeros((self.num_rows, self.vocab_size), dtype=torch.int32, device=self.device)
            self.count_RV = (zeros, zeros.clone())  # other rows' stay 0: their penalties, if any, are neutral
        if self.count_RV is not None:
            prompt_RV, output_RV = self.count_RV
            prompt_RV[row] = torch.from_numpy(np.bincount(ids, minlength=self.vocab_size)).to(prompt_RV)
            output_RV[row] = 0

    def release(self, row: int) -> None:
        """The row is free."""
        self.started_R[row] = False
        self.request_R[row] = None
        for numbers_R in (
            self.num_prompt_R, self.cached_R, self.length_R, self.step_R, self.max_draft_R, self.num_accepted_prev_R,
        ):  # fmt: skip
            numbers_R[row] = 0

    def append(self, rows: np.ndarray, token_BJ: np.ndarray, count_B: np.ndarray) -> None:
        """Write the first count_B of the tokens behind each row's committed ones; they count once `length_R` says so."""
        used_BJ = np.arange(token_BJ.shape[1]) < count_B[:, None]
        place_BJ = self.length_R[rows][:, None] + np.arange(token_BJ.shape[1])
        row_N = np.broadcast_to(rows[:, None], used_BJ.shape)[used_BJ]
        token_N = token_BJ[used_BJ]
        self.token_RL[row_N, place_BJ[used_BJ]] = token_N
        if self.count_RV is not None:
            ones = torch.ones(len(row_N), dtype=torch.int32, device=self.device)
            self.count_RV[1].index_put_((self.to_device(row_N), self.to_device(token_N)), ones, accumulate=True)

    def pop_hidden(self, rows: np.ndarray) -> list[Tensor]:
        """The states that the proposer has not read of each row, in one piece; it has read them then."""
        hidden = [torch.cat(self.hidden_R[row]) for row in rows]
        for row in rows:
            self.hidden_R[row] = []
        return hidden

    def num_pending(self, row: int) -> int:
        """Tokens whose states the proposer has not read."""
        return sum(len(piece) for piece in self.hidden_R[row])
