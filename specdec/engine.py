"""The decode loop: requests in, requests out, continuous batching over the rows of a slot cache.

A step, in the order in which things happen:

    admit     waiting requests take free rows
    prefill   chunked prefill: one more chunk of every prompt that is not processed yet
    draft     the policy decides how much to draft for each row; the proposer drafts for the rows that draft at all (ragged);
              the policy decides how much of that to verify
    forward   the target processes each row's last token and its draft, all rows in one ragged forward
    verify    logits -> probabilities -> the rejection scheme decides how much of each draft is accepted, and what follows; the
              verdict is read from the device, in one piece
    observe   the policy learns the verdict
    commit    stop rules, append, statistics; finished requests leave their rows

Rejected tokens stay in their slots and the next forward overwrites them. Invariant, asserted in every step: *the target's cache
holds every committed token but the last*.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import sampling, tree
from specdec.core import (
    MAX_PENDING_STATES,
    Context,
    Draft,
    FixedLengthPolicy,
    Policy,
    Proposer,
    Request,
    RequestStats,
    Step,
    TokenLogprobs,
    check_proposer,
)
from specdec.model.device import Timer, free_memory
from specdec.model.fixed_shapes import FixedShapes
from specdec.model.kv import CAUSAL, SlotCache, Tree, Visibility, pack_ragged, pad_ragged
from specdec.model.target import CausalLM, Output
from specdec.prompts import bad_words_token_ids
from specdec.rejection import Verifier, match
from specdec.row_state import RowState
from specdec.stop_rules import StopRules

ROW_BYTES = 200  # of a row's numbers on the host, beside which tokens end its request
# In place of a verdict's token: whose logits hold nan or inf; or that the request's own settings leave no token to sample.
TARGET_NOT_FINITE = -1
DRAFTER_NOT_FINITE = -2
NOTHING_LEFT = -3
SETTINGS_THAT_FORBID = "allowed_token_ids, bad_words, min_tokens"
BONUS_COLUMN = -1  # column of uniforms that samples the extra token; the same for every draft length, so for any batch mates


@dataclass
class HostVerdict:
    """A verdict and the drafts that it is about, on the host.

    num_accepted_B: as in Verdict.
    token_B: as in Verdict; below 0 where there is no verdict (`TARGET_NOT_FINITE`, ...).
    draft_BK: the drafted tokens; below 0 where the drafter's logits were not finite.
    path_BK: as in Verdict.
    """

    num_accepted_B: np.ndarray
    token_B: np.ndarray
    draft_BK: np.ndarray
    path_BK: np.ndarray | None = None

    def emitted_BJ(self) -> np.ndarray:
        """The accepted tokens of each row in order, then its extra token, which is repeated to the end."""
        token_BK = self.draft_BK if self.path_BK is None else np.take_along_axis(self.draft_BK, self.path_BK, 1)
        token_BJ = np.concatenate([token_BK, self.token_B[:, None]], 1)
        return np.where(np.arange(token_BJ.shape[1]) < self.num_accepted_B[:, None], token_BJ, self.token_B[:, None])

    def last_node_B(self) -> np.ndarray:
        """Where each row's last accepted token is in the forward; 0, the last committed one, if none is accepted."""
        if self.path_BK is None:
            return self.num_accepted_B
        padded_BJ = np.concatenate([np.zeros_like(self.path_BK[:, :1]), 1 + self.path_BK], 1)
        return np.take_along_axis(padded_BJ, self.num_accepted_B[:, None], 1)[:, 0]

    def nodes(self, b: int, count: int) -> slice | np.ndarray:
        """Where the last committed token of row b (0) and its first count - 1 accepted ones are in the forward."""
        if self.path_BK is None:
            return slice(count)
        return np.concatenate([[0], 1 + self.path_BK[b, : count - 1]])


class Engine:
    """Decodes requests with one target, one proposer and one rejection scheme.

    max_batch_size: rows decoded together.
    max_model_len: most tokens of a request, prompt included (default: the model's).
    prefill_chunk_size: most prompt tokens of one forward.
    cache: one to use, for engines that take turns.
    policy: chooses the number of draft tokens by row and step, up to the proposer's K; without one it is always K.
    clock: of times that are recorded about requests, in seconds.
    enforce_eager: verification forwards have the shapes of the step; otherwise few fixed ones, each a CUDA graph on a GPU
        (`specdec.model.fixed_shapes`).

    last_step: the decoding step of the last call of `step`; None if it only processed prompts.
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
        clock: Callable[[], float] = time.perf_counter,
        enforce_eager: bool = True,
    ):
        for key, value in (("max_batch_size", max_batch_size), ("prefill_chunk_size", prefill_chunk_size)):
            if value < 1:
                raise ValueError(f"{key}={value}: at least 1 is needed")
        if max_model_len is not None and not 2 <= max_model_len <= target.max_model_len:
            raise ValueError(
                f"max_model_len={max_model_len} is outside 2..{target.max_model_len}, which {target.name} can do"
                f"{target.max_model_len_reason}"
            )
        need = max_batch_size * (target.vocab_size + ROW_BYTES)
        have = psutil.virtual_memory().available
        if need > have:
            raise ValueError(
                f"max_batch_size={max_batch_size}: what is kept of each row needs {need / 2**30:.1f} GiB, and "
                f"{have / 2**30:.1f} GiB are free; lower max_batch_size"
            )
        check_proposer(proposer)
        self.target = target
        self.proposer = proposer
        self.verifier = verifier
        self.policy: Policy = FixedLengthPolicy() if policy is None else policy
        self.processes = target.processes
        self.max_batch_size = max_batch_size
        self.max_model_len = max_model_len or target.max_model_len
        self.prefill_chunk_size = prefill_chunk_size
        self.cache = target.new_cache() if cache is None else cache
        self.clock = clock
        self.waiting: deque[Request] = deque()
        self.state = RowState(max_batch_size, target.vocab_size, target.device)
        self.stop_rules = StopRules(target, max_batch_size)
        self.last_step: Step | None = None
        self.cache_bytes = 0  # of the caches, the proposer's too, that this engine has set aside
        self.fixed_shapes = None if enforce_eager else FixedShapes(target, proposer.num_speculative_tokens + 1)

    # ---------------------------------------------------------------- requests in

    def check(self, request: Request) -> None:
        """Read a request's bad words. Raises ValueError, one line, for a request that cannot be decoded."""
        params = request.params
        ids = request.prompt_token_ids
        vocab_size = self.target.vocab_size
        if not len(ids):
            raise ValueError(f"request {request.id}: the prompt is empty; give at least one token")
        if len(ids) >= self.max_model_len:
            is_models = self.max_model_len == self.target.max_model_len
            raise ValueError(
                f"request {request.id}: the prompt has {len(ids)} tokens, and max_model_len={self.max_model_len} leaves no "
                f"room for an answer; shorten the prompt{'' if is_models else ' or raise max_model_len'}"
                f"{self.target.max_model_len_reason if is_models else ''}"
            )
        max_draft = self.proposer.num_speculative_tokens
        if (num_draft := params.num_speculative_tokens) is not None and num_draft > max_draft:
            raise ValueError(
                f"request {request.id}: num_speculative_tokens={num_draft} is over the engine's {max_draft}; lower it"
            )
        if params.n > 1:
            raise ValueError(f"request {request.id}: n={params.n}, and the engine decodes one answer; LLM.generate takes n")
        request.bad_words_token_ids = bad_words_token_ids(params.bad_words, self.target.tokenizer) if params.bad_words else []
        bad_tokens = itertools.chain(*request.bad_words_token_ids)
        for token in (min(ids), max(ids), *(params.logit_bias or ()), *(params.allowed_token_ids or ()), *bad_tokens):
            if not 0 <= token < vocab_size:
                raise ValueError(f"request {request.id}: token id {token} is outside the vocabulary 0..{vocab_size - 1}")
        for key, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if (count or 0) > vocab_size:
                raise ValueError(f"request {request.id}: {key}={count} is over the vocabulary of {vocab_size}; -1 is all of it")
        forbidden = {word[0] for word in request.bad_words_token_ids if len(word) == 1}
        forbidden.update(self.stop_rules.stop_ids(request) if params.min_tokens else ())
        allowed = params.allowed_token_ids
        if not (vocab_size - len(forbidden) if allowed is None else set(allowed) - forbidden):
            raise ValueError(f"request {request.id}: {SETTINGS_THAT_FORBID} leave no token that can be sampled; remove one")

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
        # paths end at the limit, and the nodes beside them take slots too
        num_beyond = self.proposer.num_speculative_tokens if self.proposer.drafts_trees else 0
        if self.fixed_shapes is not None:  # padding as well
            num_beyond = self.fixed_shapes.max_length
        self._reserve(min(self.max_batch_size, in_flight), max(map(self.limit, requests), default=0) + num_beyond)

    def add(self, *requests: Request) -> None:
        """Queue requests. All are checked before the first is taken."""
        self.prepare(*requests)
        for request in requests:
            request.stats = RequestStats()
            request.logprobs = []
            request.prompt_logprobs = []
            request.added_at = self.clock()
            self.waiting.append(request)

    @property
    def num_running(self) -> int:
        return self.state.num_running

    def run(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Decode requests and yield each as it finishes. More may be added meanwhile."""
        self.add(*requests)
        while self.waiting or self.num_running:
            yield from self.step()

    def running(self) -> Iterator[tuple[Request, np.ndarray]]:
        """The requests that hold rows, with their output tokens so far (views: do not write)."""
        for row, request in enumerate(self.state.request_R):
            if request is not None:
                yield request, self.state.output(row)

    def abort_all(self) -> None:
        """Drop every request that is waiting or running, as after an error or an interruption."""
        self.waiting.clear()
        for row, request in enumerate(self.state.request_R):
            if request is not None:
                self._release_row(row)

    def _reserve(self, rows: int, slots: int) -> None:
        """Grow the caches. Raises ValueError, one line, before anything runs, if memory does not suffice."""
        rows = max(rows, self.cache.rows)
        slots = max(slots, self.cache.slots)
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
        self.cache_bytes += need
        self.state.reserve(self.cache.rows, self.cache.slots)

    # ---------------------------------------------------------------- the loop

    def step(self) -> list[Request]:
        """Prefill a chunk of every new prompt, then decode one step. Returns the requests that finished."""
        self.last_step = None
        self._admit()
        finished = self._prefill()
        rows = self.state.decoding()
        if len(rows):
            timer = Timer(self.target.device)
            draft, pruned_B = self._draft(rows)
            timer.mark()
            output = self._forward(rows, draft)
            verdict = self._verify(rows, draft, output.logits)
            self._observe(rows, draft, verdict)
            finished += self._commit(rows, draft, verdict, timer, output.logits, output.hidden_NTD, pruned_B)
        return finished

    def _admit(self) -> None:
        """Waiting requests take free rows."""
        for row, holder in enumerate(self.state.request_R[: self.cache.rows]):
            if holder is None and self.waiting:
                request = self.waiting.popleft()
                now = self.clock()
                request.stats.queue_s = now - request.added_at
                num_draft = request.params.num_speculative_tokens
                max_draft = self.proposer.num_speculative_tokens if num_draft is None else num_draft
                self.state.start(row, request, self.limit(request), max_draft, now)
                self.stop_rules.on_start(row, request)

    def _prefill(self) -> list[Request]:
        """One more chunk of every prompt that is not through; a prompt's last chunk yields the first token."""
        state = self.state
        finished: list[Request] = []
        for row in state.prefilling().tolist():
            request = state.request(row)
            timer = Timer(self.target.device)
            first = state.cached_R[row]
            last = min(first + self.prefill_chunk_size, state.num_prompt_R[row])
            # one row at a time: a prompt's numbers then do not depend on its neighbours', and no row is padded
            token_N = state.to_device(state.token_RL[row, first:last])
            output = self.target.forward(
                self.cache,
                token_N,
                np.array([first]),
                np.array([last - first]),
                first_row=row,
                last_only=request.params.prompt_logprobs is None,
                hidden_layers=self.proposer.hidden_layers,
            )
            self.proposer.on_forward(token_N[-len(output.logits) :], output.logits)
            if (num_top := request.params.prompt_logprobs) is not None:
                next_N = state.token_RL[row, first + 1 : min(last + 1, state.num_prompt_R[row])]
                logits_NV = output.logits[: len(next_N)]
                request.prompt_logprobs += self._logprobs(logits_NV, next_N, self._num_top(num_top))
            if output.hidden_NTD is not None and state.max_draft_R[row]:
                state.hidden_R[row].append(output.hidden_NTD)
            state.cached_R[row] = last
            if last < state.num_prompt_R[row]:
                timer.mark()
                request.stats.prefill_s += sum(timer.seconds())
                request.stats.prefill_cpu_s += timer.cpu_seconds()
                continue
            # a proposer whose K is 0 drafts for no row, and reads them all (it extracts hidden states)
            if state.max_draft_R[row] or not self.proposer.num_speculative_tokens:
                self.proposer.on_start(row, request)
                state.started_R[row] = True
            self.policy.on_start(row)
            rows = np.array([row])
            draft = self._empty_draft(1)
            logits_BV = output.logits[-1:]
            finished += self._commit(rows, draft, self._verify(rows, draft, logits_BV), timer, logits_BV)
        return finished

    # ---------------------------------------------------------------- draft

    def _draft(self, rows: np.ndarray) -> tuple[Draft, np.ndarray]:
        """The draft that is verified of each row, and how many tokens more were drafted."""
        state = self.state
        # a step emits one token more than it accepts, so of n tokens that may still be emitted n - 1 can come from a draft
        max_depth_B = state.max_len_R[rows] - state.length_R[rows] - 1
        max_draft_B = np.minimum(state.max_draft_R[rows], max_depth_B)
        if self.proposer.drafts_trees:
            max_draft_B = np.where(max_depth_B > 0, state.max_draft_R[rows], 0)
        # a policy may read measured times, so one process decides
        length_B = self.processes.broadcast(self.policy.draft_lengths(rows, max_draft_B))
        drafting = np.flatnonzero(length_B)
        if self.proposer.hidden_layers and len(drafting) < len(rows):
            self._catch_up_idle_rows(rows[(length_B == 0) & (max_draft_B > 0)])
        if not len(drafting):
            return self._empty_draft(len(rows)), np.zeros(len(rows), dtype=np.int64)
        context = self._context(rows[drafting], length_B[drafting], max_depth_B[drafting])
        draft = self.proposer.propose(context)
        self._check_size(draft, context)
        if draft.parent_BK is not None:  # read from the device once
            draft = replace(draft, parent_BK=torch.from_numpy(draft.parents()))
        draft = self._agreed(draft).scatter_rows(drafting, len(rows))
        drafted_B = draft.length_B.numpy()
        state.num_accepted_prev_R[rows[drafting]] = 0  # of this draft, until the verdict says otherwise
        verified_B = self.processes.broadcast(self.policy.verify_lengths(rows, draft))
        return draft.cut(verified_B), drafted_B - verified_B

    def _check_size(self, draft: Draft, context: Context) -> None:
        name = type(self.proposer).__name__
        if (draft.length_B.numpy() > context.max_draft_B).any():
            raise ValueError(
                f"{name}.propose drafted {draft.length_B.tolist()} tokens; max_draft_B allows {context.max_draft_B.tolist()}"
            )
        if draft.parent_BK is not None:
            draft.check_tree(f"{name}.propose")
            depth_B = tree.height(draft.parents(), draft.length_B.numpy())
            if (depth_B > context.path_limit()).any():
                raise ValueError(
                    f"{name}.propose drafted trees {depth_B.tolist()} deep; max_depth_B allows {context.path_limit().tolist()}"
                )

    def _agreed(self, draft: Draft) -> Draft:
        """The first process's tokens. The others' are the same, unless a proposer of a user's own is not a pure function."""
        if self.processes.size == 1:
            return draft
        length_B = self.processes.broadcast(draft.length_B.numpy())
        width = int(length_B.max(initial=0))
        token_BK = F.pad(draft.token_BK, (0, width - draft.token_BK.shape[1]))  # a negative number cuts
        if width:
            token_BK = self.processes.broadcast_tensor(token_BK)
        finite_BK = None if draft.finite_BK is None else draft.finite_BK[:, :width]
        parent_BK = None
        if draft.parent_BK is not None:
            padded_BK = np.pad(draft.parents(), ((0, 0), (0, width)), constant_values=-1)[:, :width]
            parent_BK = torch.from_numpy(self.processes.broadcast(padded_BK))
        return replace(draft, token_BK=token_BK, length_B=torch.from_numpy(length_B), finite_BK=finite_BK, parent_BK=parent_BK)

    def _catch_up_idle_rows(self, idle: np.ndarray) -> None:
        """The proposer may process the states of rows that have drafted nothing for long."""
        rows = np.array([row for row in idle if self.state.num_pending(row) > MAX_PENDING_STATES], dtype=np.int64)
        if len(rows):
            zeros_B = np.zeros(len(rows), dtype=np.int64)
            context = self._context(rows, zeros_B, zeros_B)
            if not self.proposer.catch_up(context):
                assert context.hidden is not None
                for row, hidden_nTD in zip(rows, context.hidden, strict=True):
                    self.state.hidden_R[row] = [hidden_nTD]

    def _empty_draft(self, num_rows: int) -> Draft:
        draft = Draft.empty(num_rows, self.target.device)
        return replace(draft, proposer_B=[""] * num_rows) if self.proposer.component_names else draft

    def _context(self, rows: np.ndarray, max_draft_B: np.ndarray, max_depth_B: np.ndarray) -> Context:
        state = self.state
        uniform_BK = None
        if self.proposer.needs_uniforms:
            column_K = np.arange(self.proposer.num_speculative_tokens)
            seed_B1 = state.seed_R[rows, None]
            if self.verifier.shares_noise:  # those that the target samples the same positions with
                index_BK = state.num_output(rows)[:, None] + column_K
                uniform_BK = state.to_device(sampling.uniforms(seed_B1, sampling.VERIFY, index_BK, BONUS_COLUMN))
            else:
                uniform_BK = state.to_device(sampling.uniforms(seed_B1, sampling.DRAFT, state.step_R[rows, None], column_K))
        return Context(
            rows=rows,
            requests=state.requests(rows),
            token_RL=state.token_RL,
            length_B=state.length_R[rows],
            max_draft_B=max_draft_B,
            max_depth_B=max_depth_B,
            last_token_B=state.last_token(rows),
            num_accepted_prev_B=state.num_accepted_prev_R[rows],
            uniform_BK=uniform_BK,
            hidden=state.pop_hidden(rows) if self.proposer.hidden_layers else None,
            logits_BV=None if state.logits_RV is None else state.logits_RV[state.to_device(rows)],
            return_confidence=self.policy.needs_confidence,
            shares_noise=self.verifier.shares_noise,
            stop_BV=self.stop_rules.stop_RV[rows] if self.proposer.drafts_trees else None,
        )

    # ---------------------------------------------------------------- forward

    def _forward(self, rows: np.ndarray, draft: Draft) -> Output:
        """The target over each row's last token and its draft, rows laid end to end."""
        state = self.state
        length_B = state.length_R[rows]
        assert (state.cached_R[rows] == length_B - 1).all(), "the target's cache must hold every committed token but the last"
        count_B = draft.length_B.numpy() + 1
        token_BJ = torch.cat([state.last_token(rows).unsqueeze(1), draft.token_BK], 1)
        # the forward takes rows 0 .. last; a row among them that decodes nothing takes part with no tokens
        start_R = np.zeros(rows[-1] + 1, dtype=np.int64)
        count_R = np.zeros(rows[-1] + 1, dtype=np.int64)
        start_R[rows] = length_B - 1
        count_R[rows] = count_B
        forward: Callable[..., Output] = self.target.forward
        if self.fixed_shapes is not None:
            forward = partial(self.fixed_shapes.forward, stored_R=state.cached_R)
        visibility: Visibility = CAUSAL
        slot_RJ = None
        if draft.parent_BK is not None:
            parent_RJ = np.full((len(start_R), draft.token_BK.shape[1] + 1), -1, dtype=np.int64)
            parent_RJ[rows, 1:] = draft.parents() + 1
            visibility = Tree(parent_RJ)
            slot_RJ = start_R[:, None] + np.arange(parent_RJ.shape[1])
            slot_RJ[rows, 1:] = length_B[:, None] + tree.slots(draft.parents(), draft.length_B.numpy())
        token_N = pack_ragged(token_BJ, count_B)
        output = forward(
            self.cache,
            token_N,
            start_R,
            count_R,
            hidden_layers=self.proposer.hidden_layers,
            visibility=visibility,
            slot_BM=slot_RJ,
        )
        self.proposer.on_forward(token_N, output.logits)
        return output

    # ---------------------------------------------------------------- verify

    def _verify(self, rows: np.ndarray, draft: Draft, logits_NV: Tensor) -> HostVerdict:
        """Logits of each row's last token and draft, to a verdict on the host: the loop's one read of the device."""
        state = self.state
        draft_length_B = draft.length_B.numpy()
        if not self.processes.is_main:  # one process decides, and the others read its verdict
            zero_B = np.zeros(len(rows), dtype=np.int64)
            verdict = HostVerdict(zero_B, zero_B, draft.token_BK.cpu().numpy())
        elif self.verifier.lossless and state.argmax_only_R[rows].all():
            verdict = self._verify_greedy(draft, logits_NV)
        else:
            verdict = self._verify_sampled(rows, draft, logits_NV)
        is_token_BK = np.arange(draft.token_BK.shape[1]) < draft_length_B[:, None]
        unfinite_B = ((verdict.draft_BK < 0) & is_token_BK).any(1)
        verdict.token_B = np.where(unfinite_B & (verdict.token_B >= 0), DRAFTER_NOT_FINITE, verdict.token_B)
        if self.processes.size > 1:
            verdict.num_accepted_B, verdict.token_B = self.processes.broadcast(
                np.stack([verdict.num_accepted_B, verdict.token_B])
            )
            if draft.parent_BK is not None:
                path_BK = np.zeros(draft.token_BK.shape, dtype=np.int64) if verdict.path_BK is None else verdict.path_BK
                verdict.path_BK = self.processes.broadcast(path_BK)
        if (verdict.token_B < 0).any():
            self._refuse(rows, draft, verdict.token_B)
        if self.proposer.needs_logits:
            if state.logits_RV is None:
                state.logits_RV = logits_NV.new_zeros(self.max_batch_size, logits_NV.shape[-1])
            first_B = np.cumsum(draft_length_B + 1) - draft_length_B - 1  # of each row in the forward
            state.logits_RV[state.to_device(rows)] = logits_NV[state.to_device(first_B + verdict.last_node_B())]
        return verdict

    def _verify_sampled(self, rows: np.ndarray, draft: Draft, logits_NV: Tensor) -> HostVerdict:
        """The rejection scheme's verdict, from the target's probabilities under each request's sampling parameters."""
        num_rows = len(rows)
        num_positions = draft.token_BK.shape[1] + 1
        params = self.state.params(rows)
        logits_BJV = pad_ragged(logits_NV, draft.length_B.numpy() + 1, num_positions)
        raw_max_N = None
        if not all(p.plain for p in params):
            # constraints, bias, penalties and min_tokens may hide what is not finite, or make it
            raw_max_N = logits_BJV.flatten(0, 1).amax(-1)
            logits_BJV = self._apply_penalties(rows, draft, logits_BJV)
        row_N = torch.arange(num_rows, device=logits_NV.device).repeat_interleave(num_positions)
        flat_NV = logits_BJV.flatten(0, 1).float()
        max_N = flat_NV.amax(-1)
        is_left_BJ = sampling.finite(max_N).view(num_rows, -1)
        if raw_max_N is not None:  # a position with no token left may never be reached: until then, any distribution will do
            is_empty_N = max_N == -torch.inf
            flat_NV.masked_fill_(is_empty_N.unsqueeze(-1), 0.0)
            max_N = max_N.masked_fill(is_empty_N, 0.0)
        p_BJV = sampling.probs(flat_NV, params, row_N, max_N).view_as(logits_BJV)
        verdict = self.verifier(draft, p_BJV, self._verify_uniforms(rows, draft))
        is_finite_B = (is_left_BJ if raw_max_N is None else sampling.finite(raw_max_N).view(num_rows, -1)).all(1)
        is_left_B = (is_left_BJ | ~verdict.visited_BJ(num_positions)).all(1)
        token_B = torch.where(is_finite_B, torch.where(is_left_B, verdict.token_B, NOTHING_LEFT), TARGET_NOT_FINITE)
        columns = [verdict.num_accepted_B.unsqueeze(1), token_B.unsqueeze(1), _tokens_for_host(draft)]
        if verdict.path_BK is not None:
            columns.append(verdict.path_BK)
        host = torch.cat(columns, 1).cpu().numpy()
        path_BK = None if verdict.path_BK is None else host[:, num_positions + 1 :]
        return HostVerdict(host[:, 0], host[:, 1], host[:, 2 : num_positions + 1], path_BK)

    def _verify_greedy(self, draft: Draft, logits_NV: Tensor) -> HostVerdict:
        """`match.compare` with the argmax, on the host: what every lossless scheme comes to when all rows are greedy."""
        count_B = draft.length_B.numpy() + 1
        num_rows, num_draft = draft.token_BK.shape
        max_N, argmax_N = logits_NV.max(-1)  # the first of equals, as argmax; which is slow in bfloat16 on a CPU
        argmax_N = torch.where(sampling.finite(max_N), argmax_N, TARGET_NOT_FINITE)
        host = torch.cat([_tokens_for_host(draft).flatten(), argmax_N]).cpu().numpy()
        draft_BK = host[: num_rows * num_draft].reshape(num_rows, num_draft)
        best_N = host[num_rows * num_draft :]
        first_B = np.cumsum(count_B) - count_B
        if num_draft == 0:
            return HostVerdict(np.zeros(num_rows, dtype=np.int64), best_N, draft_BK)
        worst_B = np.minimum.reduceat(best_N, first_B)  # one position that is not finite spoils the row's slots
        if draft.parent_BK is not None:
            best_BJ = best_N[first_B[:, None] + np.minimum(np.arange(num_draft + 1), count_B[:, None] - 1)]
            host_draft = Draft(torch.from_numpy(draft_BK), draft.length_B, parent_BK=draft.parent_BK.cpu())
            verdict = match.compare(host_draft, torch.from_numpy(best_BJ))
            assert verdict.path_BK is not None
            token_B = np.where(worst_B < 0, worst_B, verdict.token_B.numpy())
            return HostVerdict(verdict.num_accepted_B.numpy(), token_B, draft_BK, verdict.path_BK.numpy())
        position_K = np.arange(num_draft)
        best_BK = best_N[first_B[:, None] + np.minimum(position_K, count_B[:, None] - 1)]
        differs_BK = (draft_BK != best_BK) | (position_K >= count_B[:, None] - 1)
        num_accepted_B = np.where(differs_BK.any(1), differs_BK.argmax(1), num_draft)
        return HostVerdict(num_accepted_B, np.where(worst_B < 0, worst_B, best_N[first_B + num_accepted_B]), draft_BK)

    def _refuse(self, rows: np.ndarray, draft: Draft, token_B: np.ndarray) -> None:
        """Raise ValueError, one line, for logits that hold nan or inf, and for settings that leave no token to sample. All
        requests are dropped: what the caches hold of them would spoil the next ones."""
        b = int(np.flatnonzero(token_B < 0)[0])
        request = self.state.request(rows[b])
        length = int(self.state.length_R[rows[b]])
        if token_B[b] == TARGET_NOT_FINITE:
            reason = self.target.not_finite_message
        elif token_B[b] == NOTHING_LEFT:
            reason = f"{SETTINGS_THAT_FORBID}, logit_bias and penalties leave no token that can be sampled; lower them"
        else:
            name = self.proposer.name if draft.proposer_B is None else draft.proposer_B[b]
            reason = f"the drafter's logits (method {name}) are not finite (nan or inf); use another drafter, or another dtype"
        self.abort_all()
        self.cache.wipe()
        self.proposer.wipe()
        raise ValueError(f"request {request.id}, after {length} tokens: {reason}")

    def _apply_penalties(self, rows: np.ndarray, draft: Draft, logits_BJV: Tensor) -> Tensor:
        state = self.state
        prompt_BV = None
        output_BV = None
        if state.count_RV is not None:
            prompt_BV, output_BV = (count_RV[state.to_device(rows)] for count_RV in state.count_RV)
        return sampling.apply_penalties(
            logits_BJV,
            state.params(rows),
            prompt_BV,
            output_BV,
            draft.token_BK,
            draft.length_B,
            draft.parents(),
            state.num_output(rows),
            [self.stop_rules.stop_ids(request) for request in state.requests(rows)],
            [request.bad_words_token_ids for request in state.requests(rows)],
            [state.output(row) for row in rows],
        )

    def _verify_uniforms(self, rows: np.ndarray, draft: Draft) -> Tensor:
        """u_BJ of the rejection scheme. Without drafts, step n samples token n, with (seed, n) under every scheme; so `none` is
        the same under all of them, and `match` reproduces it."""
        state = self.state
        position_J = np.arange(draft.token_BK.shape[1] + 1)
        if self.verifier.keyed_by == "position":
            depth_BJ = position_J
            if draft.parent_BK is not None:  # nodes of one depth stand at one position; the last committed token is before all
                depth_BJ = np.pad(tree.depths(draft.parents()) + 1, ((0, 0), (1, 0)))
            index = state.num_output(rows)[:, None] + depth_BJ
            column = np.array(BONUS_COLUMN)
        else:
            index = state.step_R[rows, None]
            column = np.where(position_J == position_J[-1], BONUS_COLUMN, position_J)
        return state.to_device(sampling.uniforms(state.seed_R[rows, None], sampling.VERIFY, index, column))

    def _observe(self, rows: np.ndarray, draft: Draft, verdict: HostVerdict) -> None:
        """The verdict, for the policy and for the rows' next drafts."""
        has_draft_B = draft.length_B.numpy() > 0
        self.state.num_accepted_prev_R[rows[has_draft_B]] = verdict.num_accepted_B[has_draft_B]
        self.policy.observe(rows, draft, verdict.num_accepted_B, verdict.path_BK)

    # ---------------------------------------------------------------- commit

    def _commit(
        self,
        rows: np.ndarray,
        draft: Draft,
        verdict: HostVerdict,
        timer: Timer,
        logits_NV: Tensor,
        hidden_NTD: Tensor | None = None,
        pruned_B: np.ndarray | None = None,
    ) -> list[Request]:
        """Append the emitted tokens up to a stop, count them, and let finished requests go.

        logits_NV: the target's raw logits of the forward.
        hidden_NTD: the target's states of the forward, if the proposer reads them.
        pruned_B: tokens that were drafted and not verified; None after a prefill.
        """
        state = self.state
        length_B = state.length_R[rows]
        emitted_BJ = verdict.emitted_BJ()

        # what comes after a stop token, a stop string or the length limit is neither output nor accepted
        count_B = np.minimum(verdict.num_accepted_B + 1, state.max_len_R[rows] - length_B)
        count_B, stopped_B = self.stop_rules.cut_at_token(rows, emitted_BJ, count_B)
        state.append(rows, emitted_BJ, count_B)
        for b, row in enumerate(rows):
            request = state.request(row)
            if request.params.stop:
                output_n = state.token_RL[row, state.num_prompt_R[row] : length_B[b] + count_B[b]]
                if cut := self.stop_rules.cut_at_string(row, request, output_n, count_B[b]):
                    count_B[b] = cut
                    stopped_B[b] = True
        state.length_R[rows] = length_B + count_B
        state.cached_R[rows] = length_B + count_B - 1
        state.step_R[rows] += 1
        if verdict.path_BK is not None:
            self._move_accepted(rows, length_B, draft, verdict, count_B)
        if hidden_NTD is not None:
            hidden = hidden_NTD.split((draft.length_B + 1).tolist())
            for b, row in enumerate(rows):
                if state.max_draft_R[row]:
                    state.hidden_R[row].append(hidden[b][verdict.nodes(b, count_B[b])])
        self._add_logprobs(rows, draft, verdict, count_B, logits_NV)

        timer.mark()
        now = self.clock()
        accepted_B = np.minimum(verdict.num_accepted_B, count_B)
        self._record(rows, draft, verdict, accepted_B, count_B, pruned_B, timer, now)
        finished = []
        for b, row in enumerate(rows):
            state.last_event_R[row] = now
            if stopped_B[b] or state.length_R[row] >= state.max_len_R[row]:
                finished.append(self._finish(row, bool(stopped_B[b])))
        return finished

    def _add_logprobs(
        self, rows: np.ndarray, draft: Draft, verdict: HostVerdict, count_B: np.ndarray, logits_NV: Tensor
    ) -> None:
        """Log probabilities of the emitted tokens, for the requests that ask for them."""
        requests = self.state.requests(rows)
        asking = [b for b, request in enumerate(requests) if request.params.logprobs is not None]
        if not asking:
            return
        place_J = np.arange(draft.token_BK.shape[1] + 1)
        first_B = np.cumsum(draft.length_B.numpy() + 1) - draft.length_B.numpy() - 1  # of each row in the forward
        place_N = np.concatenate([first_B[b] + place_J[verdict.nodes(b, count_B[b])] for b in asking])
        emitted_BJ = verdict.emitted_BJ()
        token_N = np.concatenate([emitted_BJ[b, : count_B[b]] for b in asking])
        num_top_A = [self._num_top(requests[b].params.logprobs) for b in asking]
        logprobs = iter(self._logprobs(logits_NV[self.state.to_device(place_N)], token_N, max(num_top_A)))
        for b, num_top in zip(asking, num_top_A, strict=True):
            for each in itertools.islice(logprobs, int(count_B[b])):
                requests[b].logprobs.append(each.top(num_top))

    def _num_top(self, num_logprobs: int | None) -> int:
        return self.target.vocab_size if num_logprobs == -1 else num_logprobs or 0

    def _logprobs(self, logits_NV: Tensor, token_N: np.ndarray, num_top: int) -> list[TokenLogprobs]:
        """Of each token, and of so many likeliest ones."""
        ids_NX, logprob_NX, rank_N = sampling.token_logprobs(logits_NV, self.state.to_device(token_N), num_top)
        return [TokenLogprobs(*each) for each in zip(ids_NX.tolist(), logprob_NX.tolist(), rank_N.tolist(), strict=True)]

    def _move_accepted(
        self, rows: np.ndarray, length_B: np.ndarray, draft: Draft, verdict: HostVerdict, count_B: np.ndarray
    ) -> None:
        """K and V of a tree's accepted nodes go to the slots of their positions."""
        place_BJ = np.pad(tree.slots(draft.parents(), draft.length_B.numpy()) + 1, ((0, 0), (1, 0)))
        place_N = np.concatenate([place_BJ[b, verdict.nodes(b, count)] for b, count in enumerate(count_B)])
        depth_N = np.concatenate([np.arange(count) for count in count_B])
        first_N = np.repeat(length_B - 1, count_B)
        moves = place_N != depth_N
        row_N = np.repeat(rows, count_B)
        if moves.any():
            moved = (row_N[moves], (first_N + place_N)[moves], (first_N + depth_N)[moves])
            self.cache.move(*map(self.state.to_device, moved))

    def _record(
        self,
        rows: np.ndarray,
        draft: Draft,
        verdict: HostVerdict,
        accepted_B: np.ndarray,
        emitted_B: np.ndarray,
        pruned_B: np.ndarray | None,
        timer: Timer,
        now: float,
    ) -> None:
        """Statistics of a step, or of a prefill (pruned_B is None)."""
        state = self.state
        seconds = timer.seconds()
        cpu_s = timer.cpu_seconds()
        if pruned_B is None:
            (row,) = rows
            stats = state.request(row).stats
            stats.prefill_s += sum(seconds)
            stats.prefill_cpu_s += cpu_s
            stats.time_to_first_token_s = now - float(state.last_event_R[row])
            return
        draft_s, verify_s = seconds
        verified_B = draft.length_B.numpy()
        num_model_drafted_B = None if draft.num_model_drafted_B is None else draft.num_model_drafted_B.numpy()
        self.last_step = Step(
            verified_B + pruned_B, verified_B, accepted_B, emitted_B, draft_s, verify_s, cpu_s, now, num_model_drafted_B
        )
        parent_BK = None if draft.parent_BK is None else draft.parents()
        for b, row in enumerate(rows):
            stats = state.request(row).stats
            stats.add(
                int(verified_B[b]),
                int(accepted_B[b]),
                int(emitted_B[b]),
                draft_s,
                verify_s,
                len(rows),
                trimmed=int(pruned_B[b]),
                wall_s=now - float(state.last_event_R[row]),
                proposer=None if draft.proposer_B is None else draft.proposer_B[b],
                cpu_s=cpu_s,
                draft_token_ids=verdict.draft_BK[b, : verified_B[b]].tolist(),
                draft_parents=None if parent_BK is None else parent_BK[b, : verified_B[b]].tolist(),
                accepted_nodes=None if verdict.path_BK is None else verdict.path_BK[b, : accepted_B[b]].tolist(),
            )
            stats.decode_s += stats.wall_s[-1]

    def _finish(self, row: int, stopped: bool) -> Request:
        request = self.state.request(row)
        request.output_token_ids = self.state.output(row).tolist()
        request.finish_reason = "stop" if stopped else "length"
        if stopped and request.stop_reason is None:
            request.stop_reason = self.stop_rules.token_reason(request, request.output_token_ids[-1])
        self._release_row(row)
        return request

    def _release_row(self, row: int) -> None:
        if self.state.started_R[row]:
            self.proposer.on_finish(int(row), self.state.hidden_R[row])
        self.state.release(row)


def _tokens_for_host(draft: Draft) -> Tensor:
    """[B, K] its tokens for the host, and below 0 those whose logits were not finite."""
    return draft.token_BK if draft.finite_BK is None else torch.where(draft.finite_BK, draft.token_BK, DRAFTER_NOT_FINITE)
