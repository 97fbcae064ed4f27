"""Layers of transformers models with fewer and larger operations, for float32 and bfloat16 on a CPU.

A module is replaced by one that computes the same from fewer parts: a root mean square norm in one operation, the gated layers
of an MLP as one product, queries, keys and values as one product, a decoder layer of such parts in one call. Nothing is known
of an architecture but the names of its parts: a module that has them is tried, and replaced if it computes by the operations
that such a module needs and by no other, and if both give the same results on random numbers, in float32. (Random numbers alone
do not show what happens beyond a threshold.) What is not recognised stays as it is. In bfloat16 a layer's result is rounded
once, at its end.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.model import kernels
from specdec.model.attention import Attention, SlotAttention
from specdec.model.kv import ForwardBatch, SlotCache
from specdec.model.packed_linear import FOR_INFERENCE, PackedLinear, can_pack, is_inference

TOLERANCE = 1e-5  # of the largest number: what rounding makes
# Names of operations of aten that move numbers and change none, and of those that a module computes by.
MOVES = {
    "view", "_unsafe_view", "_reshape_alias", "reshape", "transpose", "t", "permute", "slice", "select", "split",
    "split_with_sizes", "unbind", "unsqueeze", "squeeze", "expand", "cat", "stack", "clone", "copy", "_to_copy", "detach",
    "alias", "as_strided", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
NORM_OPERATIONS = {"pow", "mean", "add", "rsqrt", "mul"}
MLP_OPERATIONS = {"silu", "gelu", "mul"}
ATTENTION_OPERATIONS = {"mul", "add", "neg"}
LAYER_OPERATIONS = {"add"}


class FusedRMSNorm(nn.Module):
    """weight x / sqrt(mean(x^2) + eps) over the last dimension."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight = weight
        self.eps = np.float32(eps)  # of the kernel's own type: it would compute in float64 with one of Python's

    def forward(self, x: Tensor) -> Tensor:
        assert is_inference(x), FOR_INFERENCE
        width = len(self.weight)
        assert x.shape[-1] == width
        dtype = x.dtype
        x = x.float().contiguous()
        y = torch.empty_like(x)
        kernels.rms_norm(x.data_ptr(), self.weight.data_ptr(), y.data_ptr(), x.numel() // width, width, self.eps)
        return y.to(dtype)


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up as one product.

    activation: place in kernels.ACTIVATIONS.
    """

    def __init__(self, gate_up: PackedLinear, down: PackedLinear, activation: int):
        super().__init__()
        self.gate_up = gate_up.in_float32()
        self.down_proj = down.in_float32()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        width = self.down_proj.in_features
        gate_up = self.gate_up(x)
        gated = gate_up.new_empty(*x.shape[:-1], width)
        kernels.gate(gate_up.data_ptr(), gated.data_ptr(), gated.numel() // width, width, gate_up.stride(-2), self.activation)
        return self.down_proj(gated).to(x.dtype)


@dataclass(frozen=True)
class Heads:
    """What an attention layer passes to the attention interface.

    width: of a head, of whose numbers the first rotary_width are rotated.
    arguments: scaling, sliding_window and softcap.
    """

    num_heads: int
    num_kv_heads: int
    width: int
    rotary_width: int
    arguments: tuple[float | None, int | None, float | None]


class FusedAttention(nn.Module):
    """Queries, keys and values as one product, rotated in place."""

    def __init__(self, plain: Any, qkv: PackedLinear, heads: Heads):
        super().__init__()
        # for positions of another width, and transformers' own attention; in a tuple, so that it is no module of this one
        self.plain = (plain,)
        self.heads = heads
        self.qkv = qkv.in_float32()
        self.o_proj = plain.o_proj.in_float32()
        self.q_norm = getattr(plain, "q_norm", None)
        self.k_norm = getattr(plain, "k_norm", None)
        self.layer_idx = plain.layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        attention: Attention | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        cos, sin = (x.float().contiguous() for x in position_embeddings)
        heads = self.heads
        if attention is None or cos.shape[-1] != heads.rotary_width:
            return self.plain[0](hidden_states, position_embeddings, attention_mask, attention=attention, **more)
        first_key = heads.num_heads
        first_value = heads.num_heads + heads.num_kv_heads
        heads_NHW = self.qkv(hidden_states[0]).view(-1, first_value + heads.num_kv_heads, heads.width)
        if self.q_norm is not None and self.k_norm is not None:
            heads_NHW[:, :first_key] = self.q_norm(heads_NHW[:, :first_key])
            heads_NHW[:, first_key:first_value] = self.k_norm(heads_NHW[:, first_key:first_value])
        num_tokens = len(heads_NHW)
        kernels.rotate(
            heads_NHW.data_ptr(), cos.data_ptr(), sin.data_ptr(), num_tokens, first_value, heads.width, heads.rotary_width,
            heads_NHW.stride(0),
        )  # fmt: skip
        attention.write_kv(self.layer_idx, heads_NHW[:, first_key:first_value], heads_NHW[:, first_value:])
        out_NHW = attention.attend(self.layer_idx, heads_NHW[:, :first_key], *heads.arguments)
        return self.o_proj(out_NHW.reshape(1, num_tokens, -1)).to(hidden_states.dtype), None


class FusedLayer(nn.Module):
    """A decoder layer in one call of a kernel, where tokens attend by a kernel too; elsewhere the plain layer.

    plain: whose attention, MLP and norms are fused already.
    names: names of `kernels.LAYER`, and those of the plain layer's norms.
    """

    def __init__(self, plain: Any, names: dict[str, str]):
        super().__init__()
        norms: dict[str, FusedRMSNorm] = {name: getattr(plain, its_name) for name, its_name in names.items()}
        self.names = names
        attention: FusedAttention = plain.self_attn
        mlp: FusedMLP = plain.mlp
        heads = attention.heads
        scaling, self.sliding_window, softcap = heads.arguments
        self.plain = (plain,)  # in a tuple, so that it is no module of this one
        self.layer_idx = attention.layer_idx
        self.kv_shape = (heads.num_kv_heads, heads.width, heads.width)
        self.rotary_width = heads.rotary_width
        values: dict[str, Any] = {
            "hidden": attention.qkv.in_features,
            "intermediate": mlp.down_proj.in_features,
            "num_heads": heads.num_heads,
            "num_kv_heads": heads.num_kv_heads,
            "width": heads.width,
            "rotary_width": heads.rotary_width,
            "weight_size": attention.qkv.panels.itemsize,
            "activation": mlp.activation,
            "scaling": heads.width**-0.5 if scaling is None else scaling,
            "softcap": softcap or 0,
        }
        linear = {"qkv": attention.qkv, "output": attention.o_proj, "gate_up": mlp.gate_up, "down": mlp.down_proj}
        for name, layer in linear.items():
            values |= {name: layer.panels.data_ptr(), f"{name}_bias": layer.bias_of_panels.data_ptr()}
        head_norms = {name: norm for name in ("q_norm", "k_norm") if (norm := getattr(attention, name)) is not None}
        for name, norm in (norms | head_norms).items():
            values |= {name: norm.weight.data_ptr(), "eps": norm.eps}
        self.about = np.zeros(1, kernels.LAYER)  # addresses of what `plain` holds
        for name, value in values.items():
            self.about[name] = value
        self.is_one_eps = len({norm.eps for norm in (norms | head_norms).values()}) == 1

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedLayer, (self.plain[0], self.names)  # a copy has addresses of its own

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention: Attention | None = None, **more: Any
    ) -> Tensor:
        assert is_inference(hidden_states), FOR_INFERENCE
        if isinstance(attention, SlotAttention) and self.can_take(position_embeddings, attention) and not kernels.use_threads():
            return self.compute(hidden_states, position_embeddings, attention)
        # in float32 inside, as the kernel
        x = hidden_states if attention is None else hidden_states.float()
        out: Tensor = self.plain[0](x, position_embeddings=position_embeddings, attention=attention, **more)
        return out.to(hidden_states.dtype)

    def compute(self, hidden_states: Tensor, position_embeddings: Any, attention: SlotAttention) -> Tensor:
        """By the kernel, with one thread."""
        batch = attention.batch
        cache = attention.cache
        keys = cache.key_RHSD[self.layer_idx]
        cos, sin = (x.float().contiguous() for x in position_embeddings)
        x = hidden_states.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        kernels.layer(
            x.data_ptr(),
            batch.num_tokens,
            self.about,
            cos.data_ptr(),
            sin.data_ptr(),
            keys.data_ptr(),
            cache.value_RHSD[self.layer_idx].data_ptr(),
            keys.shape[2],
            keys.itemsize,
            *attention.places,
            attention.rows,
            attention.seen_slots(self.sliding_window),
        )
        return x.to(hidden_states.dtype)

    def can_take(self, position_embeddings: Any, attention: SlotAttention) -> bool:
        """Whether the kernel does what the plain layer would do."""
        return (
            attention.by_kernel
            and attention.cache.layers[self.layer_idx] == self.kv_shape
            and position_embeddings[0].shape[-1] == self.rotary_width
        )


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

    def heads(self, rotary_width: int) -> Heads:
        """Of a layer that was called once."""
        key_NGW, _, query_NHW = self.tensors
        return Heads(query_NHW.shape[1], key_NGW.shape[1], key_NGW.shape[2], rotary_width, self.arguments)


# ---------------------------------------------------------------- what is replaced


@torch.no_grad()
def fuse(root: nn.Module) -> None:
    """Replace norms, gated layers and attention layers inside, for inference."""
    for parent in reversed(list(root.modules())):  # norms inside of an attention layer before the layer
        for name, child in list(parent.named_children()):
            fused = fused_norm(child) or fused_mlp(child) or fused_attention(child) or fused_layer(child)
            if fused is not None:
                setattr(parent, name, fused)


def fused_norm(plain: Any) -> FusedRMSNorm | None:
    """The norm, if it is a root mean square norm; its weight may be kept as the difference to 1 (Gemma)."""
    if not type(plain).__name__.endswith("RMSNorm"):
        return None
    weight: Any = getattr(plain, "weight", None)
    eps = getattr(plain, "variance_epsilon", None) or getattr(plain, "eps", None)
    if not isinstance(eps, float) or not is_packable(weight) or weight.ndim > 1:
        return None
    inputs = [scale * noise(2, 3, len(weight)) for scale in (1, eps**0.5)]  # the second shows eps
    expected = [computed(plain, NORM_OPERATIONS, x) for x in inputs]
    weight = weight.detach().float().clone()
    for candidate in (FusedRMSNorm(weight, eps), FusedRMSNorm(weight + 1, eps)):
        if all(same(candidate(x), y) for x, y in zip(inputs, expected, strict=True)):
            return candidate
    return None


def fused_mlp(plain: Any) -> FusedMLP | None:
    """The layer, if it is a gated one."""
    gate, up, down = (getattr(plain, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    joined = PackedLinear.joined((gate, up))
    if joined is None or type(down) is not PackedLinear:
        return None
    x = noise(1, 3, joined.in_features)
    gates = joined(x)[..., : down.in_features].float()
    inputs = [x, x * (2 / gates.std()).nan_to_num(posinf=1)]  # the second shows the activation
    expected = [computed(plain, MLP_OPERATIONS, x) for x in inputs]
    for activation in range(len(kernels.ACTIVATIONS)):
        candidate = FusedMLP(joined, down, activation)
        if all(same(candidate(x), y) for x, y in zip(inputs, expected, strict=True)):
            return candidate
    return None


def fused_attention(plain: Any) -> FusedAttention | None:
    """The layer, if it does nothing but project, norm and rotate around the attention interface."""
    projections = [getattr(plain, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    joined = PackedLinear.joined(projections)
    if joined is None or type(getattr(plain, "o_proj", None)) is not PackedLinear or not hasattr(plain, "layer_idx"):
        return None
    if any(type(getattr(plain, name, None)) not in (FusedRMSNorm, type(None)) for name in ("q_norm", "k_norm")):
        return None
    rotary_width = rotary_width_of(plain)
    angle = noise(1, 3, rotary_width // 2).repeat(1, 1, 2)
    inputs = {"hidden_states": noise(1, 3, joined.in_features), "position_embeddings": (angle.cos(), angle.sin())}
    far = torch.arange(3).unsqueeze(0) + 2**20  # where a layer that also scales by position shows it
    expected = RecordedAttention()
    actual = RecordedAttention()
    more = {"attention_mask": None, "position_ids": far, "attention": expected}
    output = computed(plain, ATTENTION_OPERATIONS, **inputs, **more)
    if output is None or len(expected.tensors) != 3:
        return None
    fused = FusedAttention(plain, joined, expected.heads(rotary_width))
    fused_output = computed(fused, None, **inputs, attention=actual)
    if fused_output is None:
        return None
    is_same = actual.layers == expected.layers and actual.arguments == expected.arguments
    pairs = zip([*actual.tensors, fused_output], [*expected.tensors, output], strict=True)
    return fused if is_same and all(same(a, b) for a, b in pairs) else None


# names of `kernels.LAYER`, and those of architectures
NORMS = (
    {"norm_before_attention": "input_layernorm", "norm_before_mlp": "post_attention_layernorm"},
    {"norm_after_attention": "post_attention_layernorm", "norm_after_mlp": "post_feedforward_layernorm"},
    {
        "norm_before_attention": "input_layernorm",
        "norm_after_attention": "post_attention_layernorm",
        "norm_before_mlp": "pre_feedforward_layernorm",
        "norm_after_mlp": "post_feedforward_layernorm",
    },
)


def fused_layer(plain: Any) -> FusedLayer | None:
    """The layer, if it is made of a fused attention, a fused MLP and norms, and adds them up as one does."""
    parts = dict(plain.named_children())
    if type(parts.pop("self_attn", None)) is not FusedAttention or type(parts.pop("mlp", None)) is not FusedMLP:
        return None
    for names in NORMS:
        if set(names.values()) != parts.keys() or any(type(part) is not FusedRMSNorm for part in parts.values()):
            continue
        fused = FusedLayer(plain, names)
        if fused.is_one_eps and is_same_layer(fused, plain):
            return fused
    return None


def plain_layer(layer: nn.Module) -> Any:
    """The decoder layer as the architecture has it."""
    return layer.plain[0] if isinstance(layer, FusedLayer) else layer


def is_same_layer(fused: FusedLayer, plain: Any) -> bool:
    """Tried on two rows, one of which goes on from what its cache holds."""
    cache = SlotCache([], torch.float32, torch.device("cpu"))
    cache.reserve(2, 1)
    cache.set_layer(fused.layer_idx, fused.kv_shape)
    for stored_RHSD in (cache.key_RHSD[fused.layer_idx], cache.value_RHSD[fused.layer_idx]):
        stored_RHSD.copy_(noise(*stored_RHSD.shape))
    x = noise(1, 5, int(fused.about["hidden"][0]))
    angle = noise(1, 5, fused.rotary_width // 2).repeat(1, 1, 2)
    cos_sin = angle.cos(), angle.sin()
    attention = SlotAttention(ForwardBatch(cache, 0, np.array([4, 0]), np.array([3, 2])))
    if not fused.can_take(cos_sin, attention):
        return False
    more = {"position_embeddings": cos_sin, "attention_mask": None, "position_ids": None}
    if computed(plain, LAYER_OPERATIONS, x, **more, attention=RecordedAttention()) is None:
        return False
    expected = computed(plain, None, x, **more, attention=attention)
    return same(fused.compute(x, cos_sin, attention), expected)


class Operations(TorchDispatchMode):
    """Collects the names of the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        self.names.add(name.removesuffix("_"))
        return function(*args, **(kwargs or {}))


def computed(plain: Any, allowed: set[str] | None, *args: Any, **kwargs: Any) -> Tensor | None:
    """What a module computes in float32, the first if it is several; None if it cannot be called so, or computes by other
    operations than those that are allowed."""
    operations = Operations()
    try:
        with operations if allowed is not None else contextlib.nullcontext():
            result = in_float32(plain)(*args, **kwargs)
    except Exception:  # whatever a module does with arguments that it does not know: it stays as it is
        return None
    if allowed is not None and operations.names - MOVES - allowed:
        return None
    first = result[0] if isinstance(result, tuple) else result
    return first if isinstance(first, Tensor) else None


def in_float32(module: Any) -> Any:
    """The same module in float32, which shares the weights of its packed layers."""
    if isinstance(module, PackedLinear):
        return module.in_float32()
    if not isinstance(module, nn.Module):
        return module
    twin: Any = copy.copy(module)
    for kind in ("_parameters", "_buffers"):
        tensors = getattr(module, kind).items()
        setattr(twin, kind, {name: x if x is None or not x.is_floating_point() else x.detach().float() for name, x in tensors})
    twin._modules = {name: in_float32(child) for name, child in module._modules.items()}
    return twin


def rotary_width_of(plain: Any) -> int:
    """How many numbers of a head its config says are rotated."""
    config = getattr(plain, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return int(getattr(plain, "head_dim", 2) * share)


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def is_packable(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and can_pack(tensor.dtype, tensor.device)


def same(a: Tensor, b: Tensor | None) -> bool:
    """Whether there are two results, which differ by rounding only."""
    return b is not None and a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * b.abs().max())
