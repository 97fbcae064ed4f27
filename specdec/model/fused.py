"""Layers of transformers models with fewer and larger operations, for float32 on a CPU.

A module is replaced by one that computes the same from fewer parts: a root mean square norm in one operation, the gated layers
of an MLP as one product, queries, keys and values as one product. Nothing is known of architectures: a module that has the
parts is tried, and replaced if both give the same results on random numbers. What is not recognised stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec.model import kernels
from specdec.model.attention import Attention
from specdec.model.packed_linear import PackedLinear

TOLERANCE = 1e-5  # of the largest number: what rounding makes


class FusedRMSNorm(nn.Module):
    """weight x / sqrt(mean(x^2) + eps) over the last dimension."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        width = len(self.weight)
        assert x.dtype == torch.float32
        assert x.shape[-1] == width
        x = x.contiguous()
        y = torch.empty_like(x)
        kernels.rms_norm(x.data_ptr(), self.weight.data_ptr(), y.data_ptr(), x.numel() // width, width, self.eps)
        return y


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up as one product."""

    def __init__(self, gate_up: PackedLinear, down: nn.Module, act: Any):
        super().__init__()
        self.gate_up = gate_up
        self.down_proj = down
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)


class FusedAttention(nn.Module):
    """Queries, keys and values as one product, rotated in place.

    recorded: what the plain module passes to the attention interface beside its tensors.
    rotary_width: numbers of a head that are rotated.
    """

    def __init__(self, plain: Any, qkv: PackedLinear, recorded: RecordedAttention, rotary_width: int):
        super().__init__()
        self.plain = (plain,)  # for positions of another width; in a tuple, so that it is no module of this one
        self.rotary_width = rotary_width
        self.qkv = qkv
        self.o_proj = plain.o_proj
        self.q_norm = getattr(plain, "q_norm", None)
        self.k_norm = getattr(plain, "k_norm", None)
        self.layer_idx = plain.layer_idx
        self.recorded = recorded

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        attention: Attention | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        assert attention is not None
        cos, sin = (x.float().contiguous() for x in position_embeddings)
        if cos.shape[-1] != self.rotary_width:
            return self.plain[0](hidden_states, position_embeddings, attention_mask, attention=attention, **more)
        about = self.recorded
        heads_NHW = self.qkv(hidden_states[0]).view(-1, about.num_heads + 2 * about.num_kv_heads, about.width)
        last = about.num_heads + about.num_kv_heads
        if self.q_norm is not None and self.k_norm is not None:
            heads_NHW[:, : about.num_heads] = self.q_norm(heads_NHW[:, : about.num_heads])
            heads_NHW[:, about.num_heads : last] = self.k_norm(heads_NHW[:, about.num_heads : last])
        num_tokens = len(heads_NHW)
        kernels.rotate(
            heads_NHW.data_ptr(), cos.data_ptr(), sin.data_ptr(), num_tokens, last, about.width, self.rotary_width,
            heads_NHW.stride(0),
        )  # fmt: skip
        attention.write_kv(self.layer_idx, heads_NHW[:, about.num_heads : last], heads_NHW[:, last:])
        out_NHW = attention.attend(self.layer_idx, heads_NHW[:, : about.num_heads], *about.arguments)
        return self.o_proj(out_NHW.reshape(1, num_tokens, -1)), None


class RecordedAttention:
    """An `Attention` that keeps what it is given, and gives the queries back.

    arguments: scaling, sliding_window and softcap.
    """

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.tensors: list[Tensor] = []
        self.arguments: tuple[float | None, int | None, float | None] = (None, None, None)

    def write_kv(self, layer: int, key_NGW: Tensor, value_NGW: Tensor) -> None:
        self.layers.append(layer)
        self.tensors += [key_NGW.clone(), value_NGW.clone()]

    def attend(
        self,
        layer: int,
        query_NHW: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        self.layers.append(layer)
        self.tensors.append(query_NHW.clone())
        self.arguments = (scaling, sliding_window, softcap)
        return query_NHW.clone()

    @property
    def num_heads(self) -> int:
        return self.tensors[2].shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def width(self) -> int:
        return self.tensors[0].shape[2]


# ---------------------------------------------------------------- what is replaced


@torch.no_grad()
def fuse(root: nn.Module) -> None:
    """Replace norms, gated layers and attention layers inside, for inference."""
    for parent in reversed(list(root.modules())):  # norms inside of an attention layer before the layer
        for name, child in list(parent.named_children()):
            fused = fused_norm(child) or fused_mlp(child) or fused_attention(child)
            if fused is not None:
                setattr(parent, name, fused)


def fused_norm(plain: Any) -> FusedRMSNorm | None:
    """The norm, if it is a root mean square norm; its weight may be kept as the difference to 1 (Gemma)."""
    if not type(plain).__name__.endswith("RMSNorm"):
        return None
    weight: Any = getattr(plain, "weight", None)
    eps = getattr(plain, "variance_epsilon", None) or getattr(plain, "eps", None)
    if not isinstance(eps, float) or not is_float32(weight) or weight.ndim > 1:
        return None
    x = noise(2, 3, len(weight))
    for candidate in (FusedRMSNorm(weight.detach().clone(), eps), FusedRMSNorm(weight.detach() + 1, eps)):
        if same(candidate(x), plain(x)):
            return candidate
    return None


def fused_mlp(plain: Any) -> FusedMLP | None:
    """The layer, if it is a gated one."""
    gate, up, down, act = (getattr(plain, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
    joined = PackedLinear.joined((gate, up))
    if joined is None or joined.dtype != torch.float32 or down is None or act is None:
        return None
    fused = FusedMLP(joined, down, act)
    x = noise(1, 3, joined.in_features)
    return fused if same(fused(x), plain(x)) else None


def fused_attention(plain: Any) -> FusedAttention | None:
    """The layer, if it does nothing but project, norm and rotate around the attention interface."""
    projections = [getattr(plain, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    joined = PackedLinear.joined(projections)
    if joined is None or joined.dtype != torch.float32 or not hasattr(plain, "o_proj") or not hasattr(plain, "layer_idx"):
        return None
    rotary_width = rotary_width_of(plain)
    angle = noise(1, 3, rotary_width // 2).repeat(1, 1, 2)
    inputs = {"hidden_states": noise(1, 3, joined.in_features), "position_embeddings": (angle.cos(), angle.sin())}
    far = torch.arange(3).unsqueeze(0) + 2**20  # where a layer that also scales by position shows it
    expected = RecordedAttention()
    try:
        output = plain(**inputs, attention_mask=None, position_ids=far, attention=expected)[0]
        fused = FusedAttention(plain, joined, expected, rotary_width)
        actual = RecordedAttention()
        fused_output = fused(**inputs, attention=actual)[0]
    except Exception:  # whatever a module does with arguments that it does not know: it stays as it is
        return None
    is_same = actual.layers == expected.layers and actual.arguments == expected.arguments
    pairs = zip([*actual.tensors, fused_output], [*expected.tensors, output], strict=True)
    return fused if is_same and all(same(a, b) for a, b in pairs) else None


def rotary_width_of(plain: Any) -> int:
    """How many numbers of a head its config says are rotated."""
    config = getattr(plain, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(getattr(plain, "head_dim", 2) * share)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def is_float32(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by rounding only."""
    return a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * b.abs().max())
