"""A separate, smaller causal LM drafts (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

Any Hugging Face causal LM with the target's vocabulary. It keeps a slot cache of its own; `propose` first runs over the tokens
committed since its last call (which overwrites what was rejected), then goes on token by token on its own drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec import hub, sampling
from specdec.core import GREEDY_BELOW, Context, Draft, Request
from specdec.kv import end_to_end
from specdec.target import CausalLM

PREFILL_CHUNK = 512


class DraftModel:
    """Settings as in vLLM.

    model: a directory, a hub id, an embedded name, or a loaded model; draft_sample_method: `greedy` (argmax, at every
    temperature: the law of the draft is one-hot) or `probabilistic` (drawn at the request's temperature, the law recorded);
    max_model_len: of the drafter's own context, beyond which a row is not drafted for.
    """

    hidden_layers: tuple[int, ...] = ()
    needs_logits = False

    def __init__(
        self,
        target: CausalLM,
        model: str | CausalLM,
        num_speculative_tokens: int,
        draft_sample_method: str = "greedy",
        max_model_len: int | None = None,
        revision: str | None = None,
    ):
        if num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens={num_speculative_tokens}: at least 1 is needed; method 'none' drafts nothing"
            )
        if draft_sample_method not in ("greedy", "probabilistic"):
            raise ValueError(f"draft_sample_method={draft_sample_method!r}: use 'greedy' or 'probabilistic'")
        self.model = model if isinstance(model, CausalLM) else _load(target, model, revision)
        if self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model {self.model.name} has a vocabulary of {self.model.vocab_size}, the target {target.name} "
                f"one of {target.vocab_size}; they must be equal"
            )
        if max_model_len is not None and not 1 <= max_model_len <= self.model.max_model_len:
            raise ValueError(
                f"max_model_len={max_model_len} of the draft is outside 1..{self.model.max_model_len}, "
                f"the range of {self.model.name}"
            )
        self.max_model_len = max_model_len or self.model.max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.probabilistic = self.needs_noise = draft_sample_method == "probabilistic"
        self.cache = self.model.new_cache()
        self.written_R: dict[int, int] = {}  # tokens of each row that the cache holds, drafts included

    def more_bytes(self, rows: int, slots: int) -> int:
        return self.cache.more_bytes(rows, slots)

    def reserve(self, rows: int, slots: int) -> None:
        self.cache.reserve(rows, slots)

    def begin(self, row: int, request: Request) -> None:
        ids = np.asarray(request.prompt_token_ids[: self.max_model_len], dtype=np.int64)
        self.model.prefill(self.cache, row, ids, 0, PREFILL_CHUNK)
        self.written_R[row] = len(ids)

    def end(self, row: int, hidden: Sequence[torch.Tensor] = ()) -> None:
        del self.written_R[row]

    def propose(self, context: Context) -> Draft:
        """Greedy: argmax drafts. Probabilistic: drawn by inverse CDF from softmax(logits / T), q_BKV recorded."""
        rows, device = context.rows, context.last_token_B.device
        # the drafter sees length + K - 1 tokens at most; a row whose context is used up drafts less, then nothing
        room_B = np.clip(self.max_model_len - context.length_B + 1, 0, None)
        draft_B = np.minimum(context.max_draft_B, room_B)
        num_draft = int(draft_B.max())
        if num_draft == 0:
            return Draft(context.last_token_B.new_zeros(len(rows), 0), torch.zeros(len(rows), dtype=torch.int64))

        # catch up: the committed tokens that the cache lacks, one or two for most rows. Of what was written, the committed
        # tokens stand, and so do the drafts accepted since; the last committed token never was a draft of ours.
        start_B = np.minimum([self.written_R[row] for row in rows], context.length_B - 1)
        active_B = draft_B > 0
        count_B = np.where(active_B, context.length_B - start_B, 0)
        missing = [context.tokens(b)[start_B[b] :] for b in range(len(rows)) if active_B[b]]
        token_N = torch.from_numpy(np.concatenate(missing)).to(device, non_blocking=True)
        temperature_B1 = context.temperature_B.unsqueeze(1)
        tokens, laws = [], []
        for k in range(num_draft):
            logits_BV = self._forward(rows, token_N, start_B, count_B)
            if self.probabilistic:
                assert context.uniform_BK is not None
                tempered_BV = logits_BV.float() / temperature_B1.clamp(min=GREEDY_BELOW)
                argmax_BV = sampling.one_hot(logits_BV.argmax(-1), logits_BV.shape[-1])
                q_BV = torch.where(temperature_B1 < GREEDY_BELOW, argmax_BV, tempered_BV.softmax(-1))
                tokens.append(sampling.inverse_cdf(q_BV, context.uniform_BK[:, k]))
                laws.append(q_BV)
            else:
                tokens.append(logits_BV.argmax(-1))
            start_B, count_B = start_B + count_B, (draft_B > k + 1).astype(np.int64)
            token_N = end_to_end(tokens[-1].unsqueeze(1), count_B)

        for b, row in enumerate(rows):
            if active_B[b]:
                self.written_R[row] = int(context.length_B[b] + draft_B[b] - 1)
        q_BKV = torch.stack(laws, 1) if self.probabilistic else None
        return Draft(torch.stack(tokens, 1), torch.from_numpy(draft_B), q_BKV)

    def _forward(self, rows: np.ndarray, token_N: torch.Tensor, start_B: np.ndarray, count_B: np.ndarray) -> torch.Tensor:
        """Logits [B, V] after each row's last token; of a row without tokens, something that nobody reads."""
        start_R, count_R = np.zeros(rows[-1] + 1, dtype=np.int64), np.zeros(rows[-1] + 1, dtype=np.int64)
        start_R[rows], count_R[rows] = start_B, count_B
        logits_RV = self.model.forward(self.cache, token_N, start_R, count_R, last_only=True).logits
        if len(rows) == len(start_R):
            return logits_RV
        return logits_RV[torch.from_numpy(rows).to(logits_RV.device, non_blocking=True)]


def _load(target: CausalLM, name: str, revision: str | None) -> CausalLM:
    """The drafter's weights; the target's own, if it is to draft for itself."""
    if hub.resolve(name, revision) == target.path:
        return target
    return CausalLM(name, target.dtype, str(target.device), revision)
