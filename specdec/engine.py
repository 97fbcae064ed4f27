"""The decode loop: requests in, requests out, continuous batching over the rows of a slot cache.

A step, in the order in which things happen:

    admit     waiting requests take free rows; every prompt that is not through is processed by one more chunk
    propose   the policy, if there is one, says how much to draft for each row; the proposer drafts for rows that draft at all
              (ragged); the policy says how much of that to verify
    forward   the target processes each row's last token and its draft, all rows in one ragged forward
    verify    logits -> laws -> the rejection scheme says how much of each draft stands, and which token comes after it
    commit    one read of the device; stop rules, append, statistics; finished requests leave their rows

Rolling back is nothing: rejected tokens stay in their slots and the next forward overwrites them. Invariant, asserted in
every step: *the target's cache holds every committed token but the last*.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import sampling
from specdec.core import Context, Draft, Policy, Proposer, Request, RequestStats, Step
from specdec.model.kv import SlotCache, pack_ragged, pad_ragged
from specdec.model.target import CausalLM
from specdec.rejection import Verifier

MAX_PENDING_STATES = 256  # tokens whose states are kept for a row that sits out, before the proposer has to take them in
ROW_BYTES = 200  # of a row's numbers on the host, beside which tokens end its request
# In place of a verdict's token: whose logits hold nan or inf; or that the request's own settings leave no token to sample.
TARGET_NOT_FINITE, DRAFTER_NOT_FINITE, NOTHING_LEFT = -1, -2, -3
BONUS_COLUMN = -1  # the noise column that samples the extra token; the same for every draft length, so for any batch mates


class Engine:
    """Decodes requests with one target, one proposer and one rejection scheme.

    max_batch_size: rows decoded together; max_model_len: most tokens of a request, prompt included (default: the model's);
    prefill_chunk_size: most prompt tokens of one forward; cache: one to use, for engines that take turns; policy: chooses the
    number of draft tokens by row and step, at most the proposer's K, which it is without a policy.
    """

    def __init__(
        self,
        target: CausalLM,
        proposer: Proposer,
        verifier: Verifier,
        max_batch_size: int = 8,
        max_model_len: int | None = None,
        prefill_chunk_size: int = 512,
        cache: SlotCache | None = None,
        policy: Policy | None = None,
    ):
        for key, value in (("max_batch_size", max_batch_size), ("prefill_chunk_size", prefill_chunk_size)):
            if value < 1:
                raise ValueError(f"{key}={value}: at least 1 is needed")
        if max_model_len is not None and not 2 <= max_model_len <= target.max_model_len:
            raise ValueError(
                f"max_model_len={max_model_len} is outside 2..{target.max_model_len}, which {target.name} can do"
                f"{target.max_model_len_reason}"
            )
        need, have = max_batch_size * (target.vocab_size + ROW_BYTES), psutil.virtual_memory().available
        if need > have:
            raise ValueError(
                f"max_batch_size={max_batch_size}: what is kept of each row needs {need / 2**30:.1f} GiB, and "
                f"{have / 2**30:.1f} GiB are free; lower max_batch_size"
            )
        self.target, self.proposer, self.verifier, self.policy = target, proposer, verifier, policy
        self.processes = target.processes
        self.max_model_len = max_model_len or target.max_model_len
        self.prefill_chunk_size = prefill_chunk_size
        self.cache = target.new_cache() if cache is None else cache
        self.waiting: deque[Request] = deque()
        self.steps: list[Step] | None = None  # a list that is put here gets every step
        self.now: Callable[[], float] = time.perf_counter  # of what requests are told; engines that take turns have their own

        # what is known about the request in each row of the cache; "R" arrays are on the host unless they are tensors
        self.max_batch_size = max_batch_size
        self.request_R: list[Request | None] = [None] * max_batch_size
        self.prompt_R = np.zeros(max_batch_size, dtype=np.int64)  # prompt tokens
        self.cached_R = np.zeros(max_batch_size, dtype=np.int64)  # committed tokens that the target's cache holds
        self.length_R = np.zeros(max_batch_size, dtype=np.int64)  # committed tokens
        self.max_len_R = np.zeros(max_batch_size, dtype=np.int64)  # most tokens that the request may hold
        self.max_draft_R = np.zeros(max_batch_size, dtype=np.int64)  # most tokens to draft for the request in a step
        self.num_accepted_prev_R = np.zeros(max_batch_size, dtype=np.int64)  # tokens of the last draft that stood
        self.step_R = np.zeros(max_batch_size, dtype=np.int64)  # verdicts so far, the prefill's included
        self.seed_R = np.zeros(max_batch_size, dtype=np.int64)
        self.argmax_only_R = np.zeros(max_batch_size, dtype=bool)  # the next token is the argmax of the logits as they are
        self.started_R = np.zeros(max_batch_size, dtype=bool)  # the proposer knows of the request
        self.text_R = [""] * max_batch_size  # the answer so far, if the request has stop strings
        self.last_event_R = np.zeros(max_batch_size)  # when the request took the row, then when its last tokens came
        self.stop_RV = np.zeros((max_batch_size, target.vocab_size), dtype=bool)  # tokens that end the request
        self.token_RL = np.zeros((0, 0), dtype=np.int64)  # committed tokens
        self.hidden_R: list[list[Tensor]] = [[] for _ in range(max_batch_size)]
        self.logits_RV: Tensor | None = None  # what the last token was chosen from, if the proposer asks for it
        self.counts_RV: tuple[Tensor, Tensor] | None = None  # of prompt and output tokens, if some request penalises

    # ---------------------------------------------------------------- requests in

    def check(self, request: Request) -> None:
        """Raise ValueError, one line, for a request that cannot be decoded."""
        ids, vocab_size = request.prompt_token_ids, self.target.vocab_size
        if not len(ids):
            raise ValueError(f"request {request.id}: the prompt is empty; give at least one token")
        if len(ids) >= self.max_model_len:
            own = self.max_model_len == self.target.max_model_len
            raise ValueError(
                f"request {request.id}: the prompt has {len(ids)} tokens, and max_model_len={self.max_model_len} leaves no "
                f"room for an answer; shorten the prompt{'' if own else ' or raise max_model_len'}"
                f"{self.target.max_model_len_reason if own else ''}"
            )
        if (asked := request.params.num_speculative_tokens) is not None and asked > self.proposer.num_speculative_tokens:
            most = self.proposer.num_speculative_tokens
            raise ValueError(f"request {request.id}: num_speculative_tokens={asked} is over the engine's {most}; lower it")
        if request.params.min_tokens and len(set(self._stop_ids(request))) == vocab_size:
            raise ValueError(f"request {request.id}: min_tokens forbids the stop tokens, and these are the whole vocabulary")
        for token in (min(ids), max(ids), *(request.params.logit_bias or ())):
            if not 0 <= token < vocab_size:
                raise ValueError(f"request {request.id}: token id {token} is outside the vocabulary 0..{vocab_size - 1}")

    def limit(self, request: Request) -> int:
        """Most tokens that the request may hold, prompt included."""
        if request.params.max_tokens is None:
            return self.max_model_len
        return min(len(request.prompt_token_ids) + request.params.max_tokens, self.max_model_len)

    def prepare(self, *requests: Request) -> None:
        """Check requests and set memory aside for them. Raises ValueError, one line, if one of them cannot be served."""
        for request in requests:
            self.check(request)
        in_flight = len(requests) + len(self.waiting) + self.num_running
        self._reserve(min(self.max_batch_size, in_flight), max(map(self.limit, requests), default=0))

    def add(self, *requests: Request) -> None:
        """Queue requests. All are checked before the first is taken."""
        self.prepare(*requests)
        for request in requests:
            request.stats, request.added_at = RequestStats(), self.now()
            self.waiting.append(request)

    @property
    def num_running(self) -> int:
        return sum(request is not None for request in self.request_R)

    def run(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Decode requests and yield each as it finishes. More may be added meanwhile."""
        self.add(*requests)
        while self.waiting or self.num_running:
            yield from self.step()

    def abort_all(self) -> None:
        """Drop every request that is waiting or running, as after an error or an interruption."""
        self.waiting.clear()
        for row, request in enumerate(self.request_R):
            if request is not None:
                self._release_row(row)

    def _reserve(self, rows: int, slots: int) -> None:
        """Grow the caches, or say before anything runs that memory does not suffice."""
        rows, slots = max(rows, self.cache.rows), max(slots, self.cache.slots)
        need = self.cache.bytes_to_grow(rows, slots) + self.proposer.bytes_to_grow(rows, slots)
        have = self.processes.all_reduce_min(free_memory(self.target.device))
        if self.target.device.type == "cpu":  # which processes share
            have //= self.processes.on_this_machine
        if need > have:
            raise ValueError(
                f"the caches need {need / 2**30:.1f} GiB ({rows} rows x {slots} slots) and {have / 2**30:.1f} GiB are free; "
                "lower max_batch_size, max_model_len or max_tokens"
            )
        self.cache.reserve(rows, slots)
        self.proposer.reserve(rows, slots)
        have_rows, have_slots = self.token_RL.shape
        self.token_RL = np.pad(self.token_RL, ((0, self.cache.rows - have_rows), (0, self.cache.slots - have_slots)))

    # ---------------------------------------------------------------- the loop

    def step(self) -> list[Request]:
        """Prefill a chunk of every new prompt, then decode one step. Returns the requests that finished."""
        finished = self._prefill()
        rows = np.flatnonzero(self.length_R > self.prompt_R)
        return finished + (self._decode(rows) if len(rows) else [])

    def _prefill(self) -> list[Request]:
        finished: list[Request] = []
        if not self.waiting and (self.cached_R >= self.prompt_R).all():
            return finished
        for row, holder in enumerate(self.request_R[: self.cache.rows]):
            if holder is None and self.waiting:
                self._admit(row, self.waiting.popleft())
        for row in np.flatnonzero(self.cached_R < self.prompt_R).tolist():
            request, clock = self._request(row), Clock(self.target.device)
            first, last = self.cached_R[row], min(self.cached_R[row] + self.prefill_chunk_size, self.prompt_R[row])
            chunk = torch.from_numpy(self.token_RL[row, first:last]).to(self.target.device)
            start_B, length_B = np.array([first]), np.array([last - first])
            # one row at a time: a prompt's numbers then do not depend on its neighbours', and no row is padded
            out = self.target.forward(self.cache, chunk, start_B, length_B, int(row), True, self.proposer.hidden_layers)
            if out.hidden_NTD is not None and self.max_draft_R[row]:
                self.hidden_R[row].append(out.hidden_NTD)
            self.cached_R[row] = last
            if last < self.prompt_R[row]:
                clock.mark()
                request.stats.prefill_s += sum(clock.seconds())
                request.stats.prefill_cpu_s += clock.cpu_seconds()
                continue
            if self.max_draft_R[row] or not self.proposer.num_speculative_tokens:
                self.proposer.on_start(int(row), request)
                self.started_R[row] = True
            if self.policy is not None:
                self.policy.on_start(int(row))
            rows = np.array([row])
            finished += self._commit(rows, self._empty_draft(1), self._verify(rows, self._empty_draft(1), out.logits), clock)
        return finished

    def _admit(self, row: int, request: Request) -> None:
        """The request takes the row."""
        ids = np.asarray(request.prompt_token_ids, dtype=np.int64)
        self.request_R[row] = request
        self.token_RL[row, : len(ids)] = ids
        self.prompt_R[row] = self.length_R[row] = len(ids)
        self.cached_R[row] = self.step_R[row] = 0
        self.max_len_R[row], self.seed_R[row], self.last_event_R[row] = self.limit(request), request.seed, self.now()
        request.stats.queue_s = float(self.last_event_R[row]) - request.added_at
        asked, most = request.params.num_speculative_tokens, self.proposer.num_speculative_tokens
        self.max_draft_R[row] = most if asked is None else asked
        self.argmax_only_R[row] = request.params.greedy and request.params.plain
        self.stop_RV[row] = False
        self.stop_RV[row, self._stop_ids(request)] = True
        self.hidden_R[row], self.text_R[row] = [], ""
        params = request.params
        if self.counts_RV is None and (params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty):
            shape = (self.max_batch_size, self.target.vocab_size)
            zeros = torch.zeros(shape, dtype=torch.int32, device=self.target.device)
            self.counts_RV = (zeros, zeros.clone())  # other rows' stay 0: their penalties, if any, are neutral
        if self.counts_RV is not None:
            prompt_RV, output_RV = self.counts_RV
            prompt_RV[row] = torch.from_numpy(np.bincount(ids, minlength=self.target.vocab_size)).to(prompt_RV)
            output_RV[row] = 0

    def _decode(self, rows: np.ndarray) -> list[Request]:
        length_B = self.length_R[rows]
        assert (self.cached_R[rows] == length_B - 1).all(), "the target's cache must hold every committed token but the last"
        clock = Clock(self.target.device)
        draft, trimmed_B = self._draft(rows, length_B)
        clock.mark()

        count_B = draft.length_B.numpy() + 1
        last_B1 = self._on_device(self.token_RL[rows, length_B - 1]).unsqueeze(1)
        token_BJ = torch.cat([last_B1, draft.token_BK], 1)
        # the forward takes rows 0 .. last; a row among them that decodes nothing takes part with no tokens
        start_R, count_R = np.zeros(rows[-1] + 1, dtype=np.int64), np.zeros(rows[-1] + 1, dtype=np.int64)
        start_R[rows], count_R[rows] = length_B - 1, count_B
        out = self.target.forward(
            self.cache, pack_ragged(token_BJ, count_B), start_R, count_R, hidden_layers=self.proposer.hidden_layers
        )
        told = self._verify(rows, draft, out.logits)
        drafted_B = draft.length_B.numpy() > 0
        self.num_accepted_prev_R[rows[drafted_B]] = told.accepted_B[drafted_B]
        if self.policy is not None:
            self.policy.observe(rows, draft, told.accepted_B)
        return self._commit(rows, draft, told, clock, out.hidden_NTD, trimmed_B)

    def _draft(self, rows: np.ndarray, length_B: np.ndarray) -> tuple[Draft, np.ndarray]:
        """What is to be verified of each row, and how many tokens were drafted beside."""
        # a step emits at least one token of its own, so more than the rest of the budget less one is waste
        most_B = np.minimum(self.max_draft_R[rows], self.max_len_R[rows] - length_B - 1)
        # what hangs on measured times is one process's decision
        want_B = most_B if self.policy is None else self.processes.broadcast(self.policy.draft_lengths(rows, most_B))
        some = np.flatnonzero(want_B)
        if self.proposer.hidden_layers and len(some) < len(rows):
            self._catch_up_idle_rows(rows, length_B, np.flatnonzero((want_B == 0) & (most_B > 0)))
        if not len(some):
            return self._empty_draft(len(rows)), np.zeros(len(rows), dtype=np.int64)
        context = self._context(rows[some], length_B[some], want_B[some])
        draft = self.proposer.propose(context)
        if (draft.length_B.numpy() > context.max_draft_B).any():
            who = type(self.proposer).__name__
            raise ValueError(
                f"{who}.propose drafted {draft.length_B.tolist()} tokens; max_draft_B allows {context.max_draft_B.tolist()}"
            )
        draft = self._agreed(draft).scatter_rows(some, len(rows))
        made_B, self.num_accepted_prev_R[rows[some]] = draft.length_B.numpy(), 0
        kept_B = made_B if self.policy is None else self.processes.broadcast(self.policy.verify_lengths(rows, draft))
        return draft.cut(kept_B), made_B - kept_B

    def _agreed(self, draft: Draft) -> Draft:
        """The first process's tokens. The others' are the same, unless a proposer of a user's own is not a pure function."""
        if self.processes.size == 1:
            return draft
        length_B = self.processes.broadcast(draft.length_B.numpy())
        most = int(length_B.max(initial=0))
        token_BK = F.pad(draft.token_BK, (0, most - draft.token_BK.shape[1]))  # a negative number cuts
        if most:
            token_BK = self.processes.broadcast_tensor(token_BK)
        finite_BK = None if draft.finite_BK is None else draft.finite_BK[:, :most]
        return replace(draft, token_BK=token_BK, length_B=torch.from_numpy(length_B), finite_BK=finite_BK)

    def _catch_up_idle_rows(self, rows: np.ndarray, length_B: np.ndarray, idle: np.ndarray) -> None:
        """The proposer may process the states of idle rows that have sat out for long."""
        long = np.array(
            [b for b in idle if sum(len(part) for part in self.hidden_R[rows[b]]) > MAX_PENDING_STATES], dtype=np.int64
        )
        if len(long):
            context = self._context(rows[long], length_B[long], np.zeros(len(long), dtype=np.int64))
            if not self.proposer.catch_up(context):
                assert context.hidden is not None
                for row, hidden_nTD in zip(rows[long], context.hidden, strict=True):
                    self.hidden_R[row] = [hidden_nTD]

    def _empty_draft(self, num_rows: int) -> Draft:
        """No draft for any row."""
        empty = torch.zeros(num_rows, 0, dtype=torch.int64, device=self.target.device)
        names = [""] * num_rows if self.proposer.parts else None
        return Draft(empty, torch.zeros(num_rows, dtype=torch.int64), proposer_B=names)

    def _context(self, rows: np.ndarray, length_B: np.ndarray, max_draft_B: np.ndarray) -> Context:
        num_draft, uniform_BK = self.proposer.num_speculative_tokens, None
        if self.proposer.needs_uniforms:
            seed_B1, step_B1 = self.seed_R[rows, None], self.step_R[rows, None]
            uniform_BK = self._on_device(sampling.uniforms(seed_B1, sampling.DRAFT, step_B1, np.arange(num_draft)))
        hidden = None
        if self.proposer.hidden_layers:
            hidden = [torch.cat(self.hidden_R[row]) for row in rows]
            for row in rows:
                self.hidden_R[row] = []
        return Context(
            rows=rows,
            requests=[self._request(row) for row in rows],
            token_RL=self.token_RL,
            length_B=length_B,
            max_draft_B=max_draft_B,
            last_token_B=self._on_device(self.token_RL[rows, length_B - 1]),
            num_accepted_prev_B=self.num_accepted_prev_R[rows],
            uniform_BK=uniform_BK,
            hidden=hidden,
            logits_BV=None if self.logits_RV is None else self.logits_RV[self._on_device(rows)],
        )

    def _verify(self, rows: np.ndarray, draft: Draft, logits_NV: Tensor) -> HostVerdict:
        """Logits of each row's last token and draft, end to end, to a verdict on the host: the step's one synchronisation."""
        count_B, num_positions = draft.length_B.numpy() + 1, draft.token_BK.shape[1] + 1
        if not self.processes.is_main:  # one process judges, and tells the others
            nobody_B = np.zeros(len(rows), dtype=np.int64)
            told = HostVerdict(nobody_B, nobody_B, draft.token_BK.cpu().numpy())
        elif self.verifier.lossless and self.argmax_only_R[rows].all():
            told = self._verify_greedy(draft, logits_NV)
        else:
            params = [self._request(row).params for row in rows]
            logits_BJV = pad_ragged(logits_NV, count_B, num_positions)
            raw_N = None
            if not all(p.plain for p in params):
                # bias, penalties and min_tokens may hide what is not finite, or make it
                raw_N = logits_BJV.flatten(0, 1).amax(-1)
                logits_BJV = self._apply_penalties(rows, draft, logits_BJV)
            row_N = torch.arange(len(rows), device=logits_NV.device).repeat_interleave(num_positions)
            flat_NV = logits_BJV.flatten(0, 1).float()
            most_N = flat_NV.amax(-1)
            p_BJV = sampling.probs(flat_NV, params, row_N, most_N).view_as(logits_BJV)
            verdict = self.verifier(draft, p_BJV, self._verify_uniforms(rows, num_positions))
            finite_B, left_B = (
                sampling.finite(x).view(len(rows), -1).all(1) for x in (most_N if raw_N is None else raw_N, most_N)
            )
            token_B = torch.where(finite_B, torch.where(left_B, verdict.token_B, NOTHING_LEFT), TARGET_NOT_FINITE)
            columns = [verdict.num_accepted_B.unsqueeze(1), token_B.unsqueeze(1), _tokens_for_host(draft)]
            host = torch.cat(columns, 1).cpu().numpy()
            told = HostVerdict(host[:, 0], host[:, 1], host[:, 2:])
        bad_BK = (told.draft_BK < 0) & (np.arange(num_positions - 1) < count_B[:, None] - 1)
        told.token_B = np.where(bad_BK.any(1) & (told.token_B >= 0), DRAFTER_NOT_FINITE, told.token_B)
        if self.processes.size > 1:
            told.accepted_B, told.token_B = self.processes.broadcast(np.stack([told.accepted_B, told.token_B]))
        if (told.token_B < 0).any():
            self._refuse_not_finite(rows, draft, told.token_B)
        if self.proposer.needs_logits:
            if self.logits_RV is None:
                self.logits_RV = logits_NV.new_zeros(self.max_batch_size, logits_NV.shape[-1])
            chosen_B = np.cumsum(count_B) - count_B + told.accepted_B
            self.logits_RV[self._on_device(rows)] = logits_NV[self._on_device(chosen_B)]
        return told

    def _verify_greedy(self, draft: Draft, logits_NV: Tensor) -> HostVerdict:
        """`match.compare` with the argmax, on the host: what every lossless scheme comes to when all rows are greedy."""
        count_B, (num_rows, num_draft) = draft.length_B.numpy() + 1, draft.token_BK.shape
        most, best = logits_NV.max(-1)  # the first of equals, as argmax; which is slow in bfloat16 on a CPU
        best = torch.where(sampling.finite(most), best, TARGET_NOT_FINITE)
        host = torch.cat([_tokens_for_host(draft).flatten(), best]).cpu().numpy()
        draft_BK, best_N = host[: num_rows * num_draft].reshape(num_rows, num_draft), host[num_rows * num_draft :]
        first_B = np.cumsum(count_B) - count_B
        if num_draft == 0:
            return HostVerdict(np.zeros(num_rows, dtype=np.int64), best_N, draft_BK)
        position_K = np.arange(num_draft)
        best_BK = best_N[first_B[:, None] + np.minimum(position_K, count_B[:, None] - 1)]
        wrong_BK = (draft_BK != best_BK) | (position_K >= count_B[:, None] - 1)
        accepted_B = np.where(wrong_BK.any(1), wrong_BK.argmax(1), num_draft)
        worst_B = np.minimum.reduceat(best_N, first_B)  # one position that is not finite spoils the row's slots
        return HostVerdict(accepted_B, np.where(worst_B < 0, worst_B, best_N[first_B + accepted_B]), draft_BK)

    def _refuse_not_finite(self, rows: np.ndarray, draft: Draft, token_B: np.ndarray) -> None:
        """Raise ValueError, one line, for logits that hold nan or inf. All requests are dropped: what the caches hold of them
        would spoil whoever comes next."""
        b = int(np.flatnonzero(token_B < 0)[0])
        request, length = self._request(rows[b]), int(self.length_R[rows[b]])
        if token_B[b] == TARGET_NOT_FINITE:
            what = self.target.not_finite_message
        elif token_B[b] == NOTHING_LEFT:
            what = "min_tokens, logit_bias and penalties leave no token that can be sampled; lower them"
        else:
            names = draft.proposer_B or [getattr(self.proposer, "name", type(self.proposer).__name__)] * len(rows)
            what = (
                f"the drafter's logits (method {names[b]}) are not finite (nan or inf); use another drafter, or another dtype"
            )
        self.abort_all()
        for owner in (self, self.proposer, *(turn.proposer for turn in getattr(self.proposer, "components", ()))):
            if (cache := getattr(owner, "cache", None)) is not None:
                cache.wipe()
        raise ValueError(f"request {request.id}, after {length} tokens: {what}")

    def _apply_penalties(self, rows: np.ndarray, draft: Draft, logits_BJV: Tensor) -> Tensor:
        prompt_BV, output_BV = (None, None) if self.counts_RV is None else (c[self._on_device(rows)] for c in self.counts_RV)
        return sampling.apply_penalties(
            logits_BJV,
            [self._request(row).params for row in rows],
            prompt_BV,
            output_BV,
            draft.token_BK,
            draft.length_B,
            self.length_R[rows] - self.prompt_R[rows],
            [self._stop_ids(self._request(row)) for row in rows],
        )

    def _verify_uniforms(self, rows: np.ndarray, num_positions: int) -> Tensor:
        """u_BJ of the rejection scheme. Token n of a request is sampled with (seed, n) when the draft is empty, under every
        scheme; so `none` is the same under all of them, and `match` reproduces it."""
        seed_B1, position_J = self.seed_R[rows, None], np.arange(num_positions)
        if self.verifier.keyed_by == "position":
            index, column = (self.length_R[rows] - self.prompt_R[rows])[:, None] + position_J, np.array(BONUS_COLUMN)
        else:
            index, column = self.step_R[rows, None], np.where(position_J == num_positions - 1, BONUS_COLUMN, position_J)
        u_BJ = sampling.uniforms(seed_B1, sampling.VERIFY, index, column)
        return self._on_device(u_BJ)

    def _commit(
        self,
        rows: np.ndarray,
        draft: Draft,
        told: HostVerdict,
        clock: Clock,
        hidden_NTD: Tensor | None = None,
        trimmed_B: np.ndarray | None = None,
    ) -> list[Request]:
        """Append what stands, cut at a stop, count, and let finished requests go."""
        accepted_B, length_B, num_rows = told.accepted_B, self.length_R[rows], len(rows)
        position_J = np.arange(told.draft_BK.shape[1] + 1)
        emit_BJ = np.concatenate([told.draft_BK, told.token_B[:, None]], 1)
        emit_BJ = np.where(position_J < accepted_B[:, None], emit_BJ, told.token_B[:, None])

        # stop rules: what comes after a stop token, a stop string or the length limit is neither output nor accepted
        count_B = np.minimum(accepted_B + 1, self.max_len_R[rows] - length_B)
        stop_BJ = self.stop_RV[rows[:, None], emit_BJ] & (position_J < count_B[:, None])
        stopped_B = stop_BJ.any(1)
        count_B = np.where(stopped_B, stop_BJ.argmax(1) + 1, count_B)

        used_BJ = position_J < count_B[:, None]
        row_N, place_N = np.broadcast_to(rows[:, None], used_BJ.shape)[used_BJ], (length_B[:, None] + position_J)[used_BJ]
        self.token_RL[row_N, place_N] = emit_BJ[used_BJ]
        for b, row in enumerate(rows):
            if self._request(row).params.stop and (cut := self._stop_string(row, length_B[b], count_B[b])):
                count_B[b], stopped_B[b] = cut, True
        self.length_R[rows] = length_B + count_B
        self.cached_R[rows] = length_B + count_B - 1
        self.step_R[rows] += 1
        if self.counts_RV is not None:
            ones = torch.ones(len(row_N), dtype=torch.int32, device=self.target.device)
            index = (self._on_device(row_N), self._on_device(emit_BJ[used_BJ]))
            self.counts_RV[1].index_put_(index, ones, accumulate=True)
        if hidden_NTD is not None:
            parts = hidden_NTD.split((draft.length_B + 1).tolist())
            for row, part, count in zip(rows, parts, count_B, strict=True):
                if self.max_draft_R[row]:
                    self.hidden_R[row].append(part[:count])

        clock.mark()
        now, times, cpu_s = self.now(), clock.seconds(), clock.cpu_seconds()
        if trimmed_B is not None and self.steps is not None:
            drafted_B, draft_s, verify_s = draft.length_B.numpy(), *times
            made_B, stood_B = drafted_B + trimmed_B, np.minimum(accepted_B, count_B)
            self.steps.append(
                Step(made_B, drafted_B, stood_B, count_B, draft_s, verify_s, cpu_s, now, draft.num_model_drafted_B)
            )
        finished = []
        for b, row in enumerate(rows):
            stats = self._request(row).stats
            if self.step_R[row] == 1:
                stats.prefill_s += sum(times)
                stats.prefill_cpu_s += cpu_s
                stats.time_to_first_token_s = now - float(self.last_event_R[row])
            else:
                draft_s, verify_s = times
                stats.add(
                    int(draft.length_B[b]),
                    int(min(accepted_B[b], count_B[b])),
                    int(count_B[b]),
                    draft_s,
                    verify_s,
                    num_rows,
                    trimmed=0 if trimmed_B is None else int(trimmed_B[b]),
                    wall_s=now - float(self.last_event_R[row]),
                    proposer=None if draft.proposer_B is None else draft.proposer_B[b],
                    cpu_s=cpu_s,
                )
                stats.decode_s += stats.wall_s[-1]
            self.last_event_R[row] = now
            if stopped_B[b] or self.length_R[row] >= self.max_len_R[row]:
                finished.append(self._finish(row, bool(stopped_B[b])))
        return finished

    def _finish(self, row: int, stopped: bool) -> Request:
        request = self._request(row)
        request.output_token_ids = self.token_RL[row, self.prompt_R[row] : self.length_R[row]].tolist()
        request.finish_reason = "stop" if stopped else "length"
        last = request.output_token_ids[-1]
        eos = [] if request.params.ignore_eos else self.target.eos_token_ids
        if stopped and request.stop_reason is None and last in request.params.stop_token_ids and last not in eos:
            request.stop_reason = last
        self._release_row(row)
        return request

    def _release_row(self, row: int) -> None:
        if self.started_R[row]:
            self.proposer.on_finish(int(row), self.hidden_R[row])
        self.started_R[row] = False
        self.request_R[row] = None
        for of_row in (self.prompt_R, self.cached_R, self.length_R, self.step_R, self.max_draft_R, self.num_accepted_prev_R):
            of_row[row] = 0

    # ---------------------------------------------------------------- small things

    def _request(self, row: int) -> Request:
        request = self.request_R[row]
        assert request is not None
        return request

    def _on_device(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self.target.device, non_blocking=True)

    def _stop_ids(self, request: Request) -> list[int]:
        eos = [] if request.params.ignore_eos else self.target.eos_token_ids
        return [i for i in (*eos, *request.params.stop_token_ids) if 0 <= i < self.target.vocab_size]

    def _stop_string(self, row: int, length: int, count: int) -> int:
        """How many of the tokens just committed to keep, so that the text ends with the one that completes a stop string;
        0 if none does. Sets the request's text and stop_reason. A string that was complete before, as can be while
        `min_tokens` holds it off, does not count."""
        request, first = self._request(row), self.prompt_R[row]

        def text_of(last: int) -> str:
            tokens = self.token_RL[row, first:last]
            return self.target.tokenizer.decode(tokens, skip_special_tokens=request.params.skip_special_tokens)

        def found_in(text: str, before: str) -> tuple[int, str] | None:
            known = len(before.rstrip("\ufffd"))  # a character may be cut in the middle
            new = [(text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in request.params.stop]
            return min(((place, stop) for place, stop in new if place >= 0), default=None)

        before, whole = self.text_R[row], text_of(length + count)
        self.text_R[row] = whole
        if found_in(whole, before) is None:
            return 0
        for keep in range(1, count + 1):
            text = text_of(length + keep)
            found = found_in(text, before)
            if found and length + keep - first >= request.params.min_tokens:
                place, stop = found
                end = place + len(stop) if request.params.include_stop_str_in_output else place
                request.text, request.stop_reason = text[:end], stop
                return keep
            before = text
        return 0


def _tokens_for_host(draft: Draft) -> Tensor:
    """[B, K] its tokens for the host, and below 0 those whose logits were not finite."""
    return draft.token_BK if draft.finite_BK is None else torch.where(draft.finite_BK, draft.token_BK, DRAFTER_NOT_FINITE)


@dataclass
class HostVerdict:
    """A verdict and the drafts it is about, on the host. token_B: below 0 where there is no verdict (`TARGET_NOT_FINITE`)."""

    accepted_B: np.ndarray
    token_B: np.ndarray
    draft_BK: np.ndarray


class Clock:
    """Durations between marks, and CPU time of the process from the first to the last. On CUDA a mark is an event in the
    stream, so that marking never waits for the device; the CPU time is then the host's part alone."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []
        self.first_cpu_s = self.last_cpu_s = time.process_time()
        self.mark()

    def mark(self) -> None:
        self.last_cpu_s = time.process_time()
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between consecutive marks; on CUDA this waits for the last one."""
        if self.cuda:
            self.marks[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]

    def cpu_seconds(self) -> float:
        """CPU time of this process, all its threads, from the first mark to the last."""
        return self.last_cpu_s - self.first_cpu_s


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
