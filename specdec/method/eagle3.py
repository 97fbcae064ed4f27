"""EAGLE-3 (Li et al. 2503.01840): one layer that reads three of the target's layers and drafts over a reduced vocabulary.

    g      = fc(target states of the tapped layers)          at the first step; afterwards the drafter's own state
    a      = attention(concat[input_layernorm(embedding), hidden_norm(g)])
    u      = g + a        (norm_before_residual: hidden_norm(g) + a)
    g'     = u + mlp(post_attention_layernorm(u))
    logits = lm_head(norm(g')), and the next step reads g'   (norm_output: norm(g'))

Tensor names, config keys and their meaning are vLLM's. Drafting and unrolled training: `specdec.drafter.autoregressive`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec.checked import Checked
from specdec.checkpoint.native import Checkpoint
from specdec.core import MethodFacts
from specdec.drafter.autoregressive import AttentionLayer, AutoregressiveDrafter, Geometry, Layer, initial_norm
from specdec.drafter.base import Init
from specdec.model.attention import Attention
from specdec.model.target import CausalLM


class Architecture(Checked):
    """The parts of the drafter.

    num_aux_hidden_states: number of tapped layers.
    eagle_aux_hidden_state_layer_ids: tapped layers (id i is the input of layer i); null spreads them, three to 2, n/2 and n-3.
    draft_vocab_size: the most frequent tokens of the training data; null: all tokens.
    layer_type: `qwen3` norms queries and keys.
    num_hidden_layers: layers after the first are ordinary decoder layers.
    norm_before_fc: one norm over all tapped states; fc_norm: one over each.
    norm_output, norm_before_residual: see the module.
    geometry: the shape of the layers.
    """

    what: ClassVar[str] = "train.drafter key"

    num_aux_hidden_states: int = Field(3, ge=1)
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    draft_vocab_size: int | None = Field(None, ge=1)
    layer_type: Literal["llama", "qwen3"] = "llama"
    num_hidden_layers: int = Field(1, ge=1)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    geometry: Geometry = Geometry()

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The tapped layers, ascending and distinct, as vLLM has them."""
        if (ids := self.eagle_aux_hidden_state_layer_ids) is None:
            ids = [2, num_layers // 2, num_layers - 3]
            if self.num_aux_hidden_states != 3 or not 2 < ids[1] < ids[2]:
                spread = np.linspace(min(2, num_layers), max(num_layers - 3, 1), self.num_aux_hidden_states)
                ids = spread.round().astype(int).tolist()
        if not ids:
            raise ValueError("eagle_aux_hidden_state_layer_ids=[] taps nothing; name at least one layer, or leave the key out")
        if self.eagle_aux_hidden_state_layer_ids is not None and len(set(ids)) < len(ids):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids={ids} names a layer twice; each can be tapped once")
        for layer in ids:
            if not 0 <= layer <= num_layers:
                raise ValueError(
                    f"eagle_aux_hidden_state_layer_ids: layer {layer} is outside 0..{num_layers}, the target's layers"
                )
        return tuple(sorted(set(ids)))


class FirstLayer(nn.Module):
    """A decoder layer whose queries, keys and values come from embedding and state side by side."""

    def __init__(self, shape: Any, architecture: Architecture):
        super().__init__()
        self.norm_before_residual = architecture.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = AttentionLayer(shape, 2 * shape.hidden_size, architecture.layer_type == "qwen3")
        self.post_attention_layernorm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = LlamaMLP(shape)

    def forward(
        self, embedding_ND: Tensor, hidden_ND: Tensor, cos_N: Tensor, sin_N: Tensor, attention: Attention, rows: Tensor | None
    ) -> Tensor:
        normed = self.hidden_norm(hidden_ND)
        residual = normed if self.norm_before_residual else hidden_ND
        x = torch.cat([self.input_layernorm(embedding_ND), normed], -1)
        residual = residual if rows is None else residual[rows]
        residual = residual + self.self_attn(x, cos_N, sin_N, attention, rows)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3(AutoregressiveDrafter):
    name = "eagle3"
    facts = MethodFacts(
        runs_model=True,
        name_marks=("eagle3",),
        train_script="eagle",
        serving={"vllm": "eagle3", "sglang": "EAGLE3"},
    )
    architecture_type: ClassVar[type[Architecture]] = Architecture

    @classmethod
    def example_checkpoint(cls, target: CausalLM) -> Checkpoint:
        return cls.init_checkpoint(target, {}, Init(), vocab_ids=np.arange(60, 200))

    @classmethod
    def resolve_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        recipe = cls.architecture_type(**architecture)
        return recipe.model_dump(exclude={"num_aux_hidden_states", "draft_vocab_size", "geometry"}) | {
            "eagle_aux_hidden_state_layer_ids": list(recipe.layers(target.num_layers)),
            "geometry": recipe.geometry.filled(target),
        }

    def build(self, config: dict[str, Any]) -> None:
        architecture = self.architecture_type(**config)
        self.hidden_layers = architecture.layers(self.target.num_layers)
        self.shape = architecture.geometry.of(self.target)
        width = self.shape.hidden_size
        eps = self.shape.rms_norm_eps
        taps = len(self.hidden_layers)
        self.norm_output = architecture.norm_output
        self.input_norm = LlamaRMSNorm(taps * width, eps) if architecture.norm_before_fc else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps) for _ in range(taps)) if architecture.fc_norm else None
        self.fc = nn.Linear(taps * width, width, bias=False)
        later = (Layer(self.shape, architecture.layer_type == "qwen3", i) for i in range(1, architecture.num_hidden_layers))
        self.layers = nn.ModuleList([FirstLayer(self.shape, architecture), *later])
        self.norm = LlamaRMSNorm(width, eps)

    def kv_shapes(self) -> list[tuple[int, ...]]:
        return super().kv_shapes() * len(self.layers)

    def fuse(self, hidden_NTD: Tensor) -> Tensor:
        x = self.scaled_features(hidden_NTD)
        if self.input_norm is not None:
            x = self.input_norm(x)
        if self.fc_norm is not None:
            layers = x.chunk(len(self.fc_norm), -1)
            x = torch.cat([norm(layer) for norm, layer in zip(self.fc_norm, layers, strict=True)], -1)
        return self.fc(x)

    def step(
        self, embedding_ND: Tensor, hidden_ND: Tensor, position_N: Tensor, attention: Attention, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        cos_sin = self.cos_sin(position_N)
        first, *others = self.layers
        # only the last layer can leave out rows: all rows of a layer are keys of the next one
        state = first(embedding_ND, hidden_ND, *cos_sin, attention, None if others else rows)
        for layer in others:
            state = layer(state, *cos_sin, attention, rows if layer is others[-1] else None)
        normed = self.norm(state)
        return normed, normed if self.norm_output else state

    def init_from_target(self, target: CausalLM) -> None:
        self.norm.weight.copy_(initial_norm(target))

    @property
    def scaled_weight(self) -> str | None:  # type: ignore[override]
        return "fc.weight" if self.input_norm is None and self.fc_norm is None else None  # a norm would undo it
