"""Drafters that read the target's hidden states and draft a chain with attention: what EAGLE and MTP have in
common.

At position i such a drafter sees the pair (token i+1, target state i) and predicts token i+2: ids are shifted left by one,
positions are not. `propose` first runs over the pairs of the newly committed tokens, which overwrites what was made of
rejected drafts, then goes on with its own states in place of the target's. `loss` unrolls the same `step` over training data,
with the rows of `specdec.drafter.unroll`. A method adds its module: `fuse`, `step` and a configuration.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from specdec.checked import Checked
from specdec.core import Context, Draft
from specdec.drafter import unroll
from specdec.drafter.base import Drafter
from specdec.drafter.batch import Batch
from specdec.model.attention import Attention, SlotAttention
from specdec.model.kv import ForwardBatch, SlotCache, pack_ragged
from specdec.model.target import CausalLM

PREFILL_CHUNK = 512


class Geometry(Checked):
    """The shape of a Llama-like layer; what is not given is the target's."""

    what: ClassVar[str] = "train.drafter.geometry key"

    intermediate_size: int | None = Field(None, ge=1)
    num_attention_heads: int | None = Field(None, ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    rms_norm_eps: float | None = Field(None, gt=0)
    max_position_embeddings: int | None = Field(None, ge=1)
    rope_parameters: dict[str, Any] | None = None

    def of(self, target: CausalLM) -> LlamaConfig:
        """Width and vocabulary are always the target's, whose embedding is shared."""
        theirs = target.config
        heads = _number(theirs, "num_attention_heads") or 1
        rope = dict(getattr(theirs, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
        # Gemma 3 has one of them for each kind of layer, and some kinds may have none
        rope = dict(rope.get("full_attention") or next((own for own in rope.values() if isinstance(own, dict)), rope))
        rope.pop("partial_rotary_factor", None)
        facts: dict[str, Any] = {
            "intermediate_size": _number(theirs, "intermediate_size") or 4 * target.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": _number(theirs, "num_key_value_heads") or heads,
            "head_dim": _number(theirs, "head_dim") or target.hidden_size // heads,
            "rms_norm_eps": getattr(theirs, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": target.max_model_len,
            "rope_parameters": rope,
        } | self.model_dump(exclude_none=True)
        if facts["num_attention_heads"] % facts["num_key_value_heads"]:
            raise ValueError(
                f"num_attention_heads={facts['num_attention_heads']} is not a multiple of "
                f"num_key_value_heads={facts['num_key_value_heads']}"
            )
        if facts["head_dim"] % 2:
            raise ValueError(f"head_dim={facts['head_dim']} is odd; positions are rotations of pairs, so give an even one")
        try:
            shape = LlamaConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, hidden_act="silu", **facts)
            LlamaRotaryEmbedding(shape)
            return shape
        except Exception as error:  # transformers has rules of its own, and errors of several lines
            given = ", ".join(f"{key}={value}" for key, value in self.model_dump(exclude_none=True).items())
            raise ValueError(f"geometry {given} is no Llama layer: {' '.join(str(error).split())[:200]}") from None

    def filled(self, target: CausalLM) -> dict[str, Any]:
        """Every key with the value that it comes to."""
        shape = self.of(target)
        return {key: getattr(shape, key) for key in type(self).model_fields}


def _number(config: Any, key: str) -> int | None:
    """None where a config has none, or another for every layer, which transformers makes an error."""
    try:
        value = getattr(config, key, None)
    except Exception:
        return None
    return value if isinstance(value, int) else None


class AttentionLayer(nn.Module):
    """Projections of one attention layer, around an attention object: of a slot cache, or of unrolled training."""

    def __init__(self, config: Any, in_features: int, qk_norm: bool, layer: int = 0):
        super().__init__()
        self.layer = layer
        self.width: int = config.head_dim
        self.q_proj = nn.Linear(in_features, config.num_attention_heads * self.width, bias=False)
        self.k_proj = nn.Linear(in_features, config.num_key_value_heads * self.width, bias=False)
        self.v_proj = nn.Linear(in_features, config.num_key_value_heads * self.width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.width, config.hidden_size, bias=False)
        if qk_norm:
            self.q_norm = LlamaRMSNorm(self.width, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.width, config.rms_norm_eps)

    def forward(self, x_ND: Tensor, cos_N: Tensor, sin_N: Tensor, attention: Attention, rows: Tensor | None = None) -> Tensor:
        """rows: the tokens whose output is wanted; keys and values are made of all."""
        wanted = x_ND if rows is None else x_ND[rows]
        query = self.q_proj(wanted).unflatten(-1, (-1, self.width))
        key = self.k_proj(x_ND).unflatten(-1, (-1, self.width))
        value = self.v_proj(x_ND).unflatten(-1, (-1, self.width))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query = _rotate(query, cos_N if rows is None else cos_N[rows], sin_N if rows is None else sin_N[rows])
        key = _rotate(key, cos_N, sin_N)
        query, key = query.to(value.dtype), key.to(value.dtype)
        attention.write_kv(self.layer, key, value)
        return self.o_proj(attention.attend(self.layer, query, self.width**-0.5).flatten(1))


class Layer(nn.Module):
    """A Llama or Qwen3 decoder layer; `first_norm` false leaves out the norm that comes first (EAGLE-1)."""

    def __init__(self, shape: Any, qk_norm: bool = False, layer: int = 0, first_norm: bool = True):
        super().__init__()
        if first_norm:
            self.input_layernorm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = AttentionLayer(shape, shape.hidden_size, qk_norm, layer)
        self.post_attention_layernorm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = LlamaMLP(shape)

    def forward(self, x_ND: Tensor, cos_N: Tensor, sin_N: Tensor, attention: Attention, rows: Tensor | None = None) -> Tensor:
        """rows: the tokens whose output is wanted."""
        normed = self.input_layernorm(x_ND) if hasattr(self, "input_layernorm") else x_ND
        x = (x_ND if rows is None else x_ND[rows]) + self.self_attn(normed, cos_N, sin_N, attention, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


def _rotate(x_NHW: Tensor, cos_NW: Tensor, sin_NW: Tensor) -> Tensor:
    return apply_rotary_pos_emb(x_NHW, x_NHW[:, :1], cos_NW, sin_NW, unsqueeze_dim=1)[0]


class AutoregressiveDrafter(Drafter):
    """A Drafter with attention: `fuse` and `step` are the method's, the caches and the order of things are here."""

    def prepare(self) -> None:
        super().prepare()
        self.cache = SlotCache(self.kv_shapes(), self.target.dtype, self.target.device)

    # ---------------------------------------------------------------- what a method adds

    shape: Any  # of a layer: a config of transformers

    def kv_shapes(self) -> list[tuple[int, ...]]:
        """What the slot cache holds for every layer: heads, width of keys, and of values where that is another."""
        return [(self.shape.num_key_value_heads, self.shape.head_dim)]

    def fuse(self, hidden_NTD: Tensor) -> Tensor:
        """[N, D] from the target's states of `hidden_layers`."""
        raise NotImplementedError

    def step(
        self, embedding_ND: Tensor, hidden_ND: Tensor, position_N: Tensor, attention: Attention, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One pass of the drafter: [A, D] states for the output layer, and [A, D] those fed to the next step."""
        raise NotImplementedError

    def add_feature_noise(self, hidden_ND: Tensor, batch: Batch, seed: int | str) -> Tensor:
        """The states that training reads; a method may blur them."""
        return hidden_ND

    def cos_sin(self, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """[N, W] each. Kept in float32 whatever the drafter's type: large positions need it."""
        if "rotary" not in self.shared:
            with self.target.device:
                self.shared["rotary"] = LlamaRotaryEmbedding(self.shape)
        cos, sin = self.shared["rotary"](torch.zeros((), device=position_N.device), position_N.unsqueeze(0))
        return cos[0], sin[0]

    # ---------------------------------------------------------------- drafting

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        return self.cache.bytes_to_grow(rows, slots)

    def wipe(self) -> None:
        self.cache.wipe()

    def reserve(self, rows: int, slots: int) -> None:
        self.cache.reserve(rows, slots)
        super().reserve(rows, slots)

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        draft_B = self.draft_lengths(context)
        if not draft_B.any():
            return Draft.empty(len(context.rows), context.last_token_B.device)
        start_B, count_B, token_N, hidden_ND = self.pending_pairs(context, draft_B)
        sampler = self.draft_sampler(context)
        for k in range(int(draft_B.max())):
            last_N = (np.cumsum(count_B) - 1).clip(0)
            embedding_ND = self.embed(token_N)
            state_BD, feedback_BD = self.forward_pairs(context.rows, embedding_ND, hidden_ND, start_B, count_B, last_N)
            token_B = sampler.sample(self.draft_logits(state_BD))
            start_B, count_B = start_B + count_B, (draft_B > k + 1).astype(np.int64)
            token_N = pack_ragged(token_B.unsqueeze(1), count_B)
            hidden_ND = pack_ragged(feedback_BD.unsqueeze(1), count_B)
        return sampler.draft(draft_B)

    def pending_pairs(self, context: Context, draft_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
        """A pair for every token committed since the last call, of the rows that draft: where they begin, how many there are,
        their tokens and target states end to end. A row's prompt, all but its last pair, is processed here, on its own."""
        assert context.hidden is not None
        rows, length_B = context.rows, context.length_B
        start_B, count_B = length_B - 1, np.zeros(len(rows), dtype=np.int64)
        hidden: list[Tensor] = []
        tokens: list[Tensor] = []
        for b in np.flatnonzero(draft_B):
            fused, ids = self.fuse(context.hidden[b]), torch.from_numpy(context.tokens(int(b))[-len(context.hidden[b]) :])
            first, ids = int(length_B[b]) - 1 - len(fused), ids.to(self.target.device, non_blocking=True)
            if len(fused) > self.num_speculative_tokens + 1:
                self._process(rows[b : b + 1], ids[:-1], fused[:-1], first)
                fused, ids = fused[-1:], ids[-1:]
            start_B[b], count_B[b] = length_B[b] - 1 - len(fused), len(fused)
            hidden.append(fused)
            tokens.append(ids)
        return start_B, count_B, torch.cat(tokens), torch.cat(hidden)

    def _process(self, row: np.ndarray, ids: Tensor, fused: Tensor, first: int) -> None:
        """Pairs of one row, from position `first` on."""
        for a in range(0, len(fused), PREFILL_CHUNK):
            part = slice(a, a + PREFILL_CHUNK)
            begin, count = np.array([first + a]), np.array([len(fused[part])])
            self.forward_pairs(row, self.embed(ids[part]), fused[part], begin, count, count - 1)

    @torch.inference_mode()
    def catch_up(self, context: Context) -> bool:
        assert context.hidden is not None
        for b in range(len(context.rows)):
            fused, ids = self.fuse(context.hidden[b]), self._index(context.tokens(b)[-len(context.hidden[b]) :])
            self._process(context.rows[b : b + 1], ids, fused, int(context.length_B[b]) - 1 - len(fused))
        return True

    def forward_pairs(
        self,
        rows: np.ndarray,
        embedding_ND: Tensor,
        hidden_ND: Tensor,
        start_B: np.ndarray,
        count_B: np.ndarray,
        keep: np.ndarray,
        **which: int,
    ) -> tuple[Tensor, Tensor]:
        """Process each row's pairs at its positions. States [len(keep), D] of those pairs, for the output layer and for the
        next step. which: of a method's modules, if it has several."""
        batch = self.batch(rows, start_B, count_B, keep)
        step: Any = self.step
        states = step(embedding_ND, hidden_ND, batch.position_N, SlotAttention(batch), **which)
        return states[0][batch.logits_at_N], states[1][batch.logits_at_N]

    def batch(self, rows: np.ndarray, start_B: np.ndarray, count_B: np.ndarray, keep: np.ndarray) -> ForwardBatch:
        """Of these rows; the rows between them take part with no tokens."""
        first = int(rows[0])
        start_R = np.zeros(int(rows[-1]) + 1 - first, dtype=np.int64)
        count_R = np.zeros_like(start_R)
        start_R[rows - first] = start_B
        count_R[rows - first] = count_B
        return ForwardBatch(self.cache, first, start_R, count_R, logits_at_N=keep)

    # ---------------------------------------------------------------- training

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, kernel: Any = unroll.attention) -> list[Tensor]:
        """[A, D] states for the output layer at every step, of the rows of the plan. kernel: the efficient or readable
        one."""
        token_N, first_N = batch.token_N, plan.first_N
        position_N = self._index(np.arange(len(first_N)) - first_N)
        states = []
        hidden = self.add_feature_noise(self.fuse(batch.hidden(self.hidden_layers)), batch, seed)
        # the last row of a document gets the first token of the next one; nobody looks at that row
        embedding = self.embed(token_N.roll(-1))
        position, rows = position_N, self._index(plan.steps[0].rows)
        attention = unroll.UnrolledAttention(plan, kernel)
        for k, step in enumerate(plan.steps):
            if k:
                rows, kept = self._index(step.rows), self._index(step.from_prev)
                fewer = len(step.rows) < len(hidden)
                attention.next_step(kept if fewer else None)
                if fewer:
                    hidden = hidden[kept]
                embedding, position = self.embed(token_N[rows + 1 + k]), position_N[rows] + k
            state, hidden = self.step(embedding, hidden, position, attention, None if k else rows)
            states.append(state)
        return states
