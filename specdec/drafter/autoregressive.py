"""Drafters that read the target's hidden states and draft a chain with attention: what EAGLE and MTP share.

At position i such a drafter reads the pair (token i+1, target state i) and predicts token i+2: ids are shifted left by one,
positions are not. `propose` first runs over the pairs of the newly committed tokens, which overwrites K and V of rejected
drafts, then goes on with the drafter's own states in place of the target's. `loss` unrolls the same `step` over training data,
with the rows of `specdec.drafter.unroll`. A method adds its modules: `fuse`, `step` and a configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from specdec.drafter.tree import Level
from specdec.model.attention import Attention, SlotAttention
from specdec.model.kv import CAUSAL, ForwardBatch, SlotCache, Visibility, pack_ragged
from specdec.model.target import CausalLM

PREFILL_CHUNK = 512


class Geometry(Checked):
    """The shape of a Llama-like layer; None is the target's value."""

    what: ClassVar[str] = "train.drafter.geometry key"

    intermediate_size: int | None = Field(None, ge=1)
    num_attention_heads: int | None = Field(None, ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    rms_norm_eps: float | None = Field(None, gt=0)
    max_position_embeddings: int | None = Field(None, ge=1)
    rope_parameters: dict[str, Any] | None = None

    def of(self, target: CausalLM) -> LlamaConfig:
        """Width and vocabulary are always the target's, whose embedding is shared. Raises ValueError for impossible shapes."""
        config = target.config
        num_heads = _number(config, "num_attention_heads") or 1
        rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
        # Gemma 3 has one of them for each kind of layer, and some kinds may have none
        rope = dict(rope.get("full_attention") or next((x for x in rope.values() if isinstance(x, dict)), rope))
        rope.pop("partial_rotary_factor", None)
        values: dict[str, Any] = {
            "intermediate_size": _number(config, "intermediate_size") or 4 * target.hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": _number(config, "num_key_value_heads") or num_heads,
            "head_dim": _number(config, "head_dim") or target.hidden_size // num_heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": target.max_model_len,
            "rope_parameters": rope,
        } | self.model_dump(exclude_none=True)
        if values["num_attention_heads"] % values["num_key_value_heads"]:
            raise ValueError(
                f"num_attention_heads={values['num_attention_heads']} is not a multiple of "
                f"num_key_value_heads={values['num_key_value_heads']}"
            )
        if values["head_dim"] % 2:
            raise ValueError(f"head_dim={values['head_dim']} is odd; positions are rotations of pairs, so give an even one")
        try:
            shape = LlamaConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, hidden_act="silu", **values)
            LlamaRotaryEmbedding(shape)
            return shape
        except Exception as error:  # transformers has rules of its own, and errors of several lines
            geometry = ", ".join(f"{key}={value}" for key, value in self.model_dump(exclude_none=True).items())
            raise ValueError(f"geometry {geometry} is no Llama layer: {' '.join(str(error).split())[:200]}") from None

    def filled(self, target: CausalLM) -> dict[str, Any]:
        """Every key with its value, the target's where the geometry has None."""
        shape = self.of(target)
        return {key: getattr(shape, key) for key in type(self).model_fields}


def _number(config: Any, key: str) -> int | None:
    """None where a config has none, or another for every layer, which transformers makes an error."""
    try:
        value = getattr(config, key, None)
    except Exception:
        return None
    return value if isinstance(value, int) else None


def initial_norm(target: CausalLM) -> Tensor:
    """[D] a weight for the norm in front of the target's output layer, to which the target's final norm belongs. A quarter of
    that: the distribution of an untrained layer is then nearly uniform (with all of it, the loss starts at 15 nats on
    SmolLM2)."""
    ones = torch.ones(1, target.hidden_size, dtype=target.dtype, device=target.device)
    return 0.25 * target.final_norm(ones)[0]


class AttentionLayer(nn.Module):
    """Projections of one attention layer, around an attention object: of a slot cache, or of unrolled training."""

    def __init__(self, config: Any, in_features: int, qk_norm: bool, layer: int = 0, sliding_window: int | None = None):
        super().__init__()
        self.layer = layer
        self.sliding_window = sliding_window
        self.width: int = config.head_dim
        self.q_proj = nn.Linear(in_features, config.num_attention_heads * self.width, bias=False)
        self.k_proj = nn.Linear(in_features, config.num_key_value_heads * self.width, bias=False)
        self.v_proj = nn.Linear(in_features, config.num_key_value_heads * self.width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.width, config.hidden_size, bias=False)
        self.q_norm = LlamaRMSNorm(self.width, config.rms_norm_eps) if qk_norm else None
        self.k_norm = LlamaRMSNorm(self.width, config.rms_norm_eps) if qk_norm else None

    def forward(self, x_ND: Tensor, cos_N: Tensor, sin_N: Tensor, attention: Attention, rows: Tensor | None = None) -> Tensor:
        """rows: the tokens whose output is computed; None: all. Keys and values are of all."""
        query = self.q_proj(x_ND if rows is None else x_ND[rows]).unflatten(-1, (-1, self.width))
        if self.q_norm is not None:
            query = self.q_norm(query)
        query = _rotate(query, cos_N if rows is None else cos_N[rows], sin_N if rows is None else sin_N[rows])
        key, value = self.key_and_value(x_ND, cos_N, sin_N)
        attention.write_kv(self.layer, key, value)
        out = attention.attend(self.layer, query.to(value.dtype), self.width**-0.5, self.sliding_window)
        return self.o_proj(out.flatten(1))

    def key_and_value(self, x_ND: Tensor, cos_N: Tensor, sin_N: Tensor) -> tuple[Tensor, Tensor]:
        """[N, G, W] each, the key at its position."""
        key = self.k_proj(x_ND).unflatten(-1, (-1, self.width))
        value = self.v_proj(x_ND).unflatten(-1, (-1, self.width))
        if self.k_norm is not None:
            key = self.k_norm(key)
        return _rotate(key, cos_N, sin_N).to(value.dtype), value


class Layer(nn.Module):
    """A Llama or Qwen3 decoder layer. first_norm: false leaves out the norm in front of the attention (EAGLE-1)."""

    def __init__(
        self, shape: Any, qk_norm: bool = False, layer: int = 0, first_norm: bool = True, sliding_window: int | None = None
    ):
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps) if first_norm else None
        self.self_attn = AttentionLayer(shape, shape.hidden_size, qk_norm, layer, sliding_window)
        self.post_attention_layernorm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = LlamaMLP(shape)

    def forward(self, x_ND: Tensor, cos_N: Tensor, sin_N: Tensor, attention: Attention, rows: Tensor | None = None) -> Tensor:
        """rows: the tokens whose output is computed; None: all."""
        normed = x_ND if self.input_layernorm is None else self.input_layernorm(x_ND)
        x = (x_ND if rows is None else x_ND[rows]) + self.self_attn(normed, cos_N, sin_N, attention, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


def _rotate(x_NHW: Tensor, cos_NW: Tensor, sin_NW: Tensor) -> Tensor:
    return apply_rotary_pos_emb(x_NHW, x_NHW[:, :1], cos_NW, sin_NW, unsqueeze_dim=1)[0]


class AutoregressiveDrafter(Drafter):
    """A Drafter with attention. `fuse` and `step` are the method's; the cache and the loops over tokens and steps are here."""

    def prepare(self) -> None:
        super().prepare()
        self.cache = SlotCache(self.kv_shapes(), self.target.dtype, self.target.device)

    # ---------------------------------------------------------------- what a method adds

    shape: Any  # of a layer: a config of transformers

    def kv_shapes(self) -> list[tuple[int, ...]]:
        """Of each layer of the slot cache: key heads, width of keys, and of values where that differs."""
        return [(self.shape.num_key_value_heads, self.shape.head_dim)]

    def fuse(self, hidden_NTD: Tensor) -> Tensor:
        """[N, D] from the target's states of `hidden_layers`."""
        raise NotImplementedError

    def step(
        self, embedding_ND: Tensor, hidden_ND: Tensor, position_N: Tensor, attention: Attention, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One pass of the drafter: [A, D] states for the output layer, and [A, D] states that the next step reads.

        embedding_ND, hidden_ND, position_N: of the pairs.
        rows: [A] the pairs whose states are computed; None: all.
        """
        raise NotImplementedError

    def add_feature_noise(self, hidden_ND: Tensor, batch: Batch, seed: int | str) -> Tensor:
        """The fused states that training reads, to which a method may add noise."""
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
        return self.cache.bytes_to_grow(rows, slots + self.num_draft_slots)

    def wipe(self) -> None:
        self.cache.wipe()

    def reserve(self, rows: int, slots: int) -> None:
        self.cache.reserve(rows, slots + self.num_draft_slots)
        super().reserve(rows, slots)

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        draft_B = self.draft_lengths(context)
        if not draft_B.any():
            return Draft.empty(len(context.rows), context.last_token_B.device)
        start_B, count_B, token_N, hidden_ND = self.pending_pairs(context, draft_B)
        if self.tree is not None:
            return self._propose_tree(context, draft_B, start_B, count_B, token_N, hidden_ND)
        sampler = self.draft_sampler(context)
        for k in range(int(draft_B.max())):
            last_N = (np.cumsum(count_B) - 1).clip(0)
            embedding_ND = self.embed(token_N)
            state_BD, feedback_BD = self.forward_pairs(context.rows, embedding_ND, hidden_ND, start_B, count_B, last_N)
            token_B = sampler.sample(self.draft_logits(state_BD))
            start_B = start_B + count_B
            count_B = (draft_B > k + 1).astype(np.int64)
            token_N = pack_ragged(token_B.unsqueeze(1), count_B)
            hidden_ND = pack_ragged(feedback_BD.unsqueeze(1), count_B)
        return sampler.draft(draft_B)

    def _propose_tree(
        self,
        context: Context,
        draft_B: np.ndarray,
        start_B: np.ndarray,
        count_B: np.ndarray,
        token_N: Tensor,
        hidden_ND: Tensor,
    ) -> Draft:
        """The nodes of a level are pairs too: a node's token, and the state that drafted it."""
        last_N = (np.cumsum(count_B) - 1).clip(0)
        state_ND, feedback_ND = self.forward_pairs(context.rows, self.embed(token_N), hidden_ND, start_B, count_B, last_N)
        count_before_B = np.ones_like(count_B)
        prefix_B = start_B + count_B

        def expand(level: Level) -> Tensor:
            nonlocal feedback_ND, count_before_B
            above_ND = feedback_ND[self._index(level.parent_place(count_before_B))]
            embedding_ND = self.embed(self._index(level.token_N))
            all_N = np.arange(len(embedding_ND))
            state_ND, feedback_ND = self.forward_pairs(
                context.rows, embedding_ND, above_ND, prefix_B, level.count_B, all_N, level=level
            )
            count_before_B = level.count_B
            return self.draft_logits(state_ND)

        return self.grower(context, draft_B).grow(self.draft_logits(state_ND), expand)

    def pending_pairs(self, context: Context, draft_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
        """A pair for every token that was committed since the last call, of the rows that draft: position of each row's first
        pair, number of pairs, and their tokens and fused states, rows end to end. A prompt, all but its last pair, is processed
        here."""
        start_B = context.length_B - 1
        count_B = np.zeros_like(start_B)
        hidden: list[Tensor] = []
        tokens: list[np.ndarray] = []
        for b, fused_ND in self.fused_rows(context, np.flatnonzero(draft_B)):
            count = len(fused_ND)
            ids = context.tokens(b)[-count:]
            if count > self.num_speculative_tokens + 1:
                self._process(context.rows[b : b + 1], ids[:-1], fused_ND[:-1], int(start_B[b]) - count)
                fused_ND = fused_ND[-1:]
                ids = ids[-1:]
                count = 1
            count_B[b] = count
            hidden.append(fused_ND)
            tokens.append(ids)
        return start_B - count_B, count_B, self._index(np.concatenate(tokens)), torch.cat(hidden)

    def fused_rows(self, context: Context, places: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """(b, fused states of the pairs that the row at place b has since the last call). As many rows as have PREFILL_CHUNK
        pairs are fused together; a longer prompt is alone.

        places: in the batch, ascending.
        """
        assert context.hidden is not None
        together: dict[int, Tensor] = {}
        num_pairs = 0
        for b in map(int, places):
            if num_pairs + len(context.hidden[b]) > PREFILL_CHUNK and together:
                yield from self._fused_together(together)
                together = {}
                num_pairs = 0
            together[b] = context.hidden[b]
            num_pairs += len(together[b])
        if together:
            yield from self._fused_together(together)

    def _fused_together(self, hidden: dict[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        fused_ND = self.fuse(torch.cat(list(hidden.values())) if len(hidden) > 1 else next(iter(hidden.values())))
        return zip(hidden, fused_ND.split([len(hidden_NTD) for hidden_NTD in hidden.values()]), strict=True)

    def _process(self, row: np.ndarray, ids: np.ndarray, fused_ND: Tensor, start: int) -> None:
        """Write K and V of one row's pairs, with these tokens, from position `start` on."""
        for a in range(0, len(fused_ND), PREFILL_CHUNK):
            hidden_ND = fused_ND[a : a + PREFILL_CHUNK]
            embedding_ND = self.embed(self._index(ids[a : a + PREFILL_CHUNK]))
            count = np.array([len(hidden_ND)])
            self.forward_pairs(row, embedding_ND, hidden_ND, np.array([start + a]), count, count - 1)

    @torch.inference_mode()
    def catch_up(self, context: Context) -> bool:
        for b, fused_ND in self.fused_rows(context, range(len(context.rows))):
            count = len(fused_ND)
            self._process(context.rows[b : b + 1], context.tokens(b)[-count:], fused_ND, int(context.length_B[b]) - 1 - count)
        return True

    def forward_pairs(
        self,
        rows: np.ndarray,
        embedding_ND: Tensor,
        hidden_ND: Tensor,
        start_B: np.ndarray,
        count_B: np.ndarray,
        output_at: np.ndarray,
        level: Level | None = None,
        **module: int,
    ) -> tuple[Tensor, Tensor]:
        """Process pairs: states [len(output_at), D] for the output layer, and those that the next step reads.

        rows: cache rows, ascending.
        embedding_ND, hidden_ND: of the pairs, rows end to end.
        start_B, count_B: position of each row's first pair, and number of its pairs.
        output_at: indices of the pairs whose states are returned.
        level: of a tree, whose nodes the pairs are; None: they continue the row.
        module: which of the method's modules, if it has several.
        """
        batch = self.batch(rows, start_B, count_B, output_at, level)
        step: Any = self.step
        state_ND, feedback_ND = step(embedding_ND, hidden_ND, batch.position_N, SlotAttention(batch), **module)
        return state_ND[batch.logits_at_N], feedback_ND[batch.logits_at_N]

    def batch(
        self,
        rows: np.ndarray,
        start_B: np.ndarray,
        count_B: np.ndarray,
        output_at: np.ndarray,
        level: Level | None = None,
        visibility: Visibility = CAUSAL,
    ) -> ForwardBatch:
        """The forward of these rows; the rows between them take part with no tokens. visibility: unless there is a level."""
        first = int(rows[0])
        start_R = np.zeros(int(rows[-1]) + 1 - first, dtype=np.int64)
        count_R = np.zeros_like(start_R)
        start_R[rows - first] = start_B
        count_R[rows - first] = count_B
        if level is not None:
            visibility = level.visibility(rows - first, len(start_R))
        return ForwardBatch(self.cache, first, start_R, count_R, visibility, logits_at_N=output_at)

    # ---------------------------------------------------------------- training

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, kernel: Any = unroll.attention) -> list[Tensor]:
        """[A, D] states for the output layer at every step. kernel: `unroll.attention` or `unroll.attention_reference`."""
        position_N = self._index(np.arange(len(plan.first_N)) - plan.first_N)
        attention = unroll.UnrolledAttention(plan, kernel)
        hidden = self.add_feature_noise(self.fuse(batch.hidden(self.hidden_layers)), batch, seed)
        # the last pair of a document gets the first token of the next one; it is no row
        embedding = self.embed(batch.token_N.roll(-1))
        rows = self._index(plan.steps[0].rows)
        state, hidden = self.step(embedding, hidden, position_N, attention, rows)
        states = [state]
        for k, step in enumerate(plan.steps[1:], 1):
            rows = self._index(step.rows)
            from_prev = self._index(step.from_prev) if len(step.rows) < len(hidden) else None
            attention.next_step(from_prev)
            if from_prev is not None:
                hidden = hidden[from_prev]
            embedding = self.embed(batch.token_N[rows + 1 + k])
            state, hidden = self.step(embedding, hidden, position_N[rows] + k, attention)
            states.append(state)
        return states
