"""DFlash (2602.06036): a block of drafts in one pass, whose tokens see each other in both directions.

    c_t    = hidden_norm(fc(target states of the tapped layers at position t))      once for every committed token
    block  = embedding of the last committed token and of masks, at the positions after the last state
    layers: queries from the block; keys and values from c of all committed tokens before the block, and from the block
    logits = output layer (norm(block))

The keys and values of a c depend on nothing that follows, so each layer keeps them in a slot cache; those of a block are
overwritten by the next. The context is not normed by a layer's input norm, the block is. Fill-in (z-lab's, and the default):
the masks draft a token each. From the anchor (DeepSpec's, `sample_from_anchor`): the last committed token drafts one too, so a
block is a token shorter than with fill-in. Drafting in one pass: `specdec.drafter.block`; training: `specdec.drafter.anchors`.

Tensors have the names of z-lab's checkpoints, config keys those of `speculators`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec.checked import Checked
from specdec.checkpoint.native import Checkpoint
from specdec.core import Context, MethodFacts
from specdec.drafter import anchors, unroll
from specdec.drafter.anchors import BlockAttention
from specdec.drafter.autoregressive import PREFILL_CHUNK, AutoregressiveDrafter, Geometry, Layer, initial_norm
from specdec.drafter.base import Init
from specdec.drafter.batch import Batch
from specdec.drafter.block import BlockDrafter, BlockLayout
from specdec.drafter.trainable import ChainObjective
from specdec.model.attention import SlotAttention
from specdec.model.kv import CAUSAL, Block
from specdec.model.target import CausalLM


class Architecture(Checked):
    """The parts of the drafter.

    block_size: tokens of a block, the last committed one included.
    sample_from_anchor: the last committed token of a block drafts a token too.
    mask_token_id: the token whose embedding masks have; one that the data never has.
    num_aux_hidden_states: number of tapped layers.
    aux_hidden_state_layer_ids: tapped layers (id i is the input of layer i); null spreads them, from 2 to n-2.
    draft_vocab_size: the most frequent tokens of the training data; null: all tokens, and the target's output layer.
    layer_type: `qwen3` norms queries and keys.
    num_hidden_layers: of the drafter.
    sliding_window: positions that a sliding layer looks back.
    layer_types: of each layer, sliding_attention or full_attention; null: all slide if there is a sliding_window.
    sliding_window_non_causal: in sliding layers, too, tokens of a block see those behind them.
    causal: in no layer do they.
    geometry: the shape of the layers.
    """

    what: ClassVar[str] = "train.drafter key"

    block_size: int = Field(8, ge=2)
    sample_from_anchor: bool = False
    mask_token_id: int | None = Field(None, ge=0)
    num_aux_hidden_states: int = Field(5, ge=1)
    aux_hidden_state_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = Field(None, ge=1)
    layer_type: Literal["llama", "qwen3"] = "qwen3"
    num_hidden_layers: int = Field(5, ge=1)
    sliding_window: int | None = Field(None, ge=1)
    layer_types: list[Literal["sliding_attention", "full_attention"]] | None = None
    sliding_window_non_causal: bool = False
    causal: bool = False
    geometry: Geometry = Geometry()

    def windows(self) -> list[int | None]:
        """Of each layer, how many positions it looks back; None: all. Raises ValueError for types that do not fit."""
        types = self.layer_types
        if types is None:
            return [self.sliding_window] * self.num_hidden_layers
        if len(types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(types)} layers, and num_hidden_layers={self.num_hidden_layers}; give one each"
            )
        if self.sliding_window is None and "sliding_attention" in types:
            raise ValueError("layer_types has sliding_attention, and sliding_window is null; give the positions it looks back")
        return [self.sliding_window if kind == "sliding_attention" else None for kind in types]

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The tapped layers, ascending and distinct."""
        ids = self.aux_hidden_state_layer_ids
        if ids is None:
            spread = np.linspace(min(2, num_layers), max(num_layers - 2, 1), self.num_aux_hidden_states)
            ids = np.unique(spread.round().astype(int)).tolist()
        if not ids or len(set(ids)) < len(ids):
            raise ValueError(f"aux_hidden_state_layer_ids={ids}: give at least one layer, each once")
        for layer in ids:
            if not 0 <= layer <= num_layers:
                raise ValueError(f"aux_hidden_state_layer_ids: layer {layer} is outside 0..{num_layers}, the target's layers")
        return tuple(sorted(ids))


class Objective(ChainObjective):
    """What is minimised, as every drafter of several tokens has it, and:

    num_anchors: blocks of a sample, at most.
    position_decay: token k of a draft, from 0 on, weighs exp(-k / position_decay); null: all weigh 1.
    mask_outside_vocab: rows whose likeliest target token cannot be drafted are left out of the loss.
    """

    num_anchors: int = Field(512, ge=1)
    position_decay: float | None = Field(4.0, gt=0)
    mask_outside_vocab: bool = False

    def weights(self, num_steps: int) -> list[float]:
        return [1.0 if self.position_decay is None else math.exp(-k / self.position_decay) for k in range(num_steps)]


def max_draft(config: dict[str, Any]) -> int:
    """Most tokens of a draft, by a checkpoint's config."""
    return int(config["block_size"]) - (not config["sample_from_anchor"])


class ByLayer:
    """`specdec.model.attention.Attention` of layers that see their block in different ways. of: one of each layer."""

    def __init__(self, of: list[Any]):
        self.of = of

    def write_kv(self, layer: int, key_NGW: Tensor, value_NGW: Tensor) -> None:
        self.of[layer].write_kv(layer, key_NGW, value_NGW)

    def attend(self, layer: int, *arguments: Any) -> Tensor:
        out: Tensor = self.of[layer].attend(layer, *arguments)
        return out


class DFlash(BlockDrafter, AutoregressiveDrafter):
    name = "dflash"
    facts = MethodFacts(
        runs_model=True,
        name_marks=("dflash",),
        train_script="dflash",
        mask_key="mask_token_id",
        max_draft_of=max_draft,
        serving={"vllm": "dflash"},
    )
    architecture_type = Architecture
    objective_type = Objective
    label_offset = 1
    scaled_weight = "fc.weight"

    @classmethod
    def example_checkpoint(cls, target: CausalLM) -> Checkpoint:
        config = {"block_size": 17, "num_hidden_layers": 2}
        return cls.init_checkpoint(target, config, Init(train_lm_head=False), vocab_ids=np.arange(60, 200))

    @classmethod
    def resolve_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        recipe = cls.architecture_type(**architecture)
        return recipe.model_dump(exclude={"num_aux_hidden_states", "draft_vocab_size", "geometry"}) | {
            "aux_hidden_state_layer_ids": list(recipe.layers(target.num_layers)),
            "mask_token_id": target.vocab_size - 1 if recipe.mask_token_id is None else recipe.mask_token_id,
            "geometry": recipe.geometry.filled(target),
        }

    def build(self, config: dict[str, Any]) -> None:
        architecture = self.architecture_type(**config)
        if architecture.block_size > self.target.max_model_len:
            raise ValueError(
                f"block_size={architecture.block_size} is over the {self.target.max_model_len} tokens of the target's context"
            )
        self.limit_drafts(max_draft(config), "this drafter")
        mask = architecture.mask_token_id
        last = self.target.vocab_size - 1
        if mask is None or mask > last:
            raise ValueError(f"mask_token_id={mask} is outside 0..{last}, the rows of the target's embedding")
        self.mask_token_id = mask
        self.first_offset = 0 if architecture.sample_from_anchor else 1  # token of a block that drafts its first token
        windows = architecture.windows()
        slides_causally = not architecture.sliding_window_non_causal
        self.is_causal = [architecture.causal or (window is not None and slides_causally) for window in windows]  # by layer
        self.hidden_layers = architecture.layers(self.target.num_layers)
        self.shape = architecture.geometry.of(self.target)
        width = self.shape.hidden_size
        eps = self.shape.rms_norm_eps
        self.fc = nn.Linear(len(self.hidden_layers) * width, width, bias=False)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.layers: Any = nn.ModuleList(
            Layer(self.shape, architecture.layer_type == "qwen3", i, sliding_window=window) for i, window in enumerate(windows)
        )
        self.norm = LlamaRMSNorm(width, eps)

    def init_from_target(self, target: CausalLM) -> None:
        self.norm.weight.copy_(initial_norm(target))

    def kv_shapes(self) -> list[tuple[int, ...]]:
        return super().kv_shapes() * len(self.layers)

    def fuse(self, hidden_NTD: Tensor) -> Tensor:
        """[N, D] the context."""
        return self.hidden_norm(self.fc(self.scaled_features(hidden_NTD)))

    def keys_and_values(self, context_ND: Tensor, position_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of the context, for every layer."""
        cos_sin = self.cos_sin(position_N)
        return [layer.self_attn.key_and_value(context_ND, *cos_sin) for layer in self.layers]

    def body(self, token_N: Tensor, position_N: Tensor, attention: Any) -> Tensor:
        """[N, D] states of the tokens of blocks, before the final norm."""
        cos_sin = self.cos_sin(position_N)
        state = self.embed(token_N)
        for layer in self.layers:
            state = layer(state, *cos_sin, attention)
        return state

    # ---------------------------------------------------------------- drafting

    @property
    def block_length(self) -> int:
        """Tokens of a full draft. All of its masks are there when fewer tokens are wanted too: they see each other, so that a
        shorter block would have other first tokens (and vLLM's blocks are all full)."""
        return self.num_speculative_tokens if self.tree is None else self.tree.depth

    @property
    def num_draft_slots(self) -> int:
        return self.block_length

    def draft_lengths(self, context: Context) -> np.ndarray:
        """[B] how many tokens to draft."""
        return np.minimum(self.path_limit(context), self._room(context))

    def _room(self, context: Context) -> np.ndarray:
        """[B] how many tokens a block may have. The last place of one has position length + K - 1."""
        return np.clip(self.max_model_len - context.length_B, 0, self.block_length)

    def block_logits(self, context: Context, draft_B: np.ndarray) -> tuple[Tensor, BlockLayout]:
        state_ND, layout = self.block_states(context, draft_B)
        return self.draft_logits(state_ND), layout

    def block_states(self, context: Context, draft_B: np.ndarray) -> tuple[Tensor, BlockLayout]:
        """States for the output layer, of the layout's queries."""
        device = self.target.device
        drafts_B = draft_B > 0
        self._store(context, np.flatnonzero(drafts_B))
        block_B = np.where(drafts_B, self._room(context), 0)
        num_masks_B = np.where(drafts_B, block_B - 1 + self.first_offset, 0)
        layout = BlockLayout(drafts_B.astype(np.int64), num_masks_B, draft_B, device, block_B - draft_B)
        token_N = torch.full((layout.num_places,), self.mask_token_id, device=device)
        token_N = layout.put_committed(token_N, context.last_token_B[self._index(np.flatnonzero(drafts_B))])
        start_B = context.length_B - 1
        batches = {
            is_causal: self.batch(
                context.rows, start_B, layout.length_B, layout.query_N, visibility=CAUSAL if is_causal else Block()
            )
            for is_causal in set(self.is_causal)
        }
        batch = next(iter(batches.values()))
        attention = ByLayer([SlotAttention(batches[is_causal]) for is_causal in self.is_causal])
        state_ND = self.body(token_N, batch.position_N, attention)
        return self.norm(state_ND[batch.logits_at_N]), layout

    def _store(self, context: Context, places: np.ndarray) -> None:
        """Write keys and values of the states that these rows of the batch have since the last call."""
        together: dict[int, Tensor] = {}
        for b, context_ND in self.fused_rows(context, places):
            if len(context_ND) > PREFILL_CHUNK:
                start = int(context.length_B[b]) - 1 - len(context_ND)
                self._process(context.rows[b : b + 1], np.zeros(0), context_ND, start)
            elif len(context_ND):
                together[b] = context_ND
        if together:
            count_B = np.zeros_like(context.length_B)
            count_B[list(together)] = [len(context_ND) for context_ND in together.values()]
            self._write(context.rows, torch.cat(list(together.values())), context.length_B - 1 - count_B, count_B)

    def _process(self, row: np.ndarray, ids: np.ndarray, fused_ND: Tensor, start: int) -> None:
        """Write keys and values of one row's context, from position `start` on. ids: not read."""
        for a in range(0, len(fused_ND), PREFILL_CHUNK):
            chunk_ND = fused_ND[a : a + PREFILL_CHUNK]
            self._write(row, chunk_ND, np.array([start + a]), np.array([len(chunk_ND)]))

    def _write(self, rows: np.ndarray, context_ND: Tensor, start_B: np.ndarray, count_B: np.ndarray) -> None:
        batch = self.batch(rows, start_B, count_B, np.zeros(0, dtype=np.int64))
        attention = SlotAttention(batch)
        for layer, (key, value) in enumerate(self.keys_and_values(context_ND, batch.position_N)):
            attention.write_kv(layer, key, value)

    # ---------------------------------------------------------------- training

    def num_steps(self, progress: float) -> int:
        assert self.max_draft_tokens is not None
        return self.max_draft_tokens

    def plan(self, batch: Batch, num_steps: int, seed: int | str) -> unroll.Plan:
        """The blocks of a sample are drawn anew in every step of the run."""
        num_steps_N = anchors.num_steps(batch.ids, batch.length_B, batch.mask_N, num_steps, self.objective.num_anchors, seed)
        return unroll.plan(batch.length_B, batch.mask_N, num_steps, self.label_offset, num_steps_N)

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, kernel: Any = unroll.attention) -> list[Tensor]:
        anchor_A = plan.steps[0].rows
        position_N = np.arange(len(plan.first_N)) - plan.first_N
        num_tokens = len(plan.steps) + self.first_offset
        attention = ByLayer(
            [BlockAttention(anchor_A, plan.first_N, num_tokens, is_causal, kernel) for is_causal in self.is_causal]
        )
        context_ND = self.fuse(batch.hidden(self.hidden_layers))
        for layer, (key, value) in enumerate(self.keys_and_values(context_ND, self._index(position_N))):
            attention.of[layer].write_context(layer, key, value)
        masks = batch.token_N.new_full(((num_tokens - 1) * len(anchor_A),), self.mask_token_id)
        token_M = torch.cat([batch.token_N[self._index(anchor_A)], masks])
        position_M = (position_N[anchor_A] + np.arange(num_tokens)[:, None]).ravel()
        state_MD = self.norm(self.body(token_M, self._index(position_M), attention))
        return anchors.kept(plan.steps, state_MD, self.first_offset)
