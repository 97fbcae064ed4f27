"""Linear layers on a CPU: packed weights in one arena, and rows whose bits do not depend on the batch.

A decoding step at batch 1 is little but the time to read the weights. torch's plain CPU path passes them to a BLAS that
rearranges them in every call, reads them slowly where rows are few, and sums in an order that depends on the number of rows.
`kernels.product` reads them from front to back in one order of summation, so a request's numbers are the same bits alone and
in any batch, with a draft and without.

bfloat16 has instructions of its own on some CPUs, which oneDNN uses; there `OneDnnLinear` holds the weights. Its sums run in
the same order for every number of rows too, except with AMX, which `turn_amx_off` forbids.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, TypeGuard

import llvmlite.binding
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.model import kernels
from specdec.model.arena import Arena, padded

FOR_INFERENCE = "packed and fused layers are for inference"
ROWS_HINT = 8  # the number of rows that oneDNN optimises the layout for; it works for every other number
DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """y = x W^T + b for inference. Any leading dimensions; sums are float32, and so is the bias.

    panels: [panels, in, kernels.PANEL] weights, float32 or bfloat16; the last panel may be filled up with zeros.
    bias: [panels * kernels.PANEL].
    dtype: of y; unless given, that of the weights.
    """

    def __init__(self, panels: Tensor, bias: Tensor, out_features: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.panels = panels
        self.bias_of_panels = bias
        self.in_features = panels.shape[1]
        self.out_features = out_features
        self.dtype = dtype or panels.dtype

    @classmethod
    def of(cls, linear: nn.Linear, arena: Arena) -> PackedLinear:
        """The same layer, with its weights in an arena."""
        num_rows = linear.out_features
        panels = arena.take((num_panels(num_rows), linear.in_features, kernels.PANEL), linear.weight.dtype)
        bias = torch.zeros(len(panels) * kernels.PANEL)
        num_full = num_rows // kernels.PANEL
        weight = linear.weight.detach()
        panels[:num_full] = weight[: num_full * kernels.PANEL].view(num_full, kernels.PANEL, linear.in_features).transpose(1, 2)
        if num_full < len(panels):
            panels[num_full, :, : num_rows - num_full * kernels.PANEL] = weight[num_full * kernels.PANEL :].t()
        if linear.bias is not None:
            bias[:num_rows] = linear.bias.detach()
        return cls(panels, bias, num_rows)

    @classmethod
    def joined(cls, layers: Sequence[Any]) -> PackedLinear | None:
        """One layer with the outputs of several, whose weights lie one behind the other; None if they do not."""
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            if type(layer) is not PackedLinear:
                return None
            if following is not None and (
                type(following) is not PackedLinear
                or layer.out_features % kernels.PANEL
                or layer.panels.shape[1] != following.panels.shape[1]
                or layer.panels.data_ptr() + layer.panels.nbytes != following.panels.data_ptr()
            ):
                return None
        first = layers[0].panels
        size = (sum(len(layer.panels) for layer in layers), *first.shape[1:])
        bias = torch.cat([layer.bias_of_panels for layer in layers])
        return cls(first.as_strided(size, first.stride()), bias, sum(layer.out_features for layer in layers))

    def in_float32(self) -> PackedLinear:
        """The same weights with results in float32."""
        return PackedLinear(self.panels, self.bias_of_panels, self.out_features, torch.float32)

    @property
    def bias(self) -> Tensor | None:
        """[out] as in nn.Linear."""
        return self.bias_of_panels[: self.out_features].to(self.dtype) if self.bias_of_panels.any() else None

    @cached_property
    def weight(self) -> Tensor:
        """[out, in] as in nn.Linear, for models that multiply by it themselves (routers of mixtures). Made when first read."""
        return self.dense()

    def dense(self) -> Tensor:
        """[out, in] a copy of the weight as nn.Linear has it."""
        return self.panels.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]

    def rows(self, index: Tensor) -> Tensor:
        """[*index, in] rows of the weight."""
        return self.panels[index // kernels.PANEL, :, index % kernels.PANEL]

    def forward(self, x: Tensor) -> Tensor:
        assert is_inference(x), FOR_INFERENCE
        num_rows = x.numel() // self.in_features
        x_MI = x.reshape(num_rows, self.in_features).float().contiguous()
        y_MO = x_MI.new_empty(num_rows, len(self.bias_of_panels))
        product: Any = kernels.product_by_threads if kernels.use_threads() else kernels.product
        if num_rows:
            product(
                x_MI.data_ptr(),
                self.panels.data_ptr(),
                self.bias_of_panels.data_ptr(),
                y_MO.data_ptr(),
                num_rows,
                self.in_features,
                len(self.panels),
                self.panels.itemsize,
            )
        return y_MO[:, : self.out_features].to(self.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}"


class PackedEmbedding(nn.Module):
    """The rows of a tied output layer, so that they are not held twice. scale: factor of the rows (Gemma)."""

    def __init__(self, head: PackedLinear, scale: Tensor | float | None):
        super().__init__()
        self.head = (head,)  # a tuple, so that the layer is registered once, where the model has it
        self.scale = scale

    @property
    def weight(self) -> Tensor:
        return self.head[0].weight

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self.head[0].rows(token_ids)
        if self.scale is None:
            return rows
        return rows * (self.scale.to(rows.dtype) if isinstance(self.scale, Tensor) else self.scale)


class OneDnnLinear(nn.Module):
    """y = x W^T + b for inference, with W in oneDNN's own layout. Any leading dimensions, bfloat16."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        self.dtype = weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.min_rows = min_rows(self.in_features, self.out_features, self.dtype)

    @cached_property
    def weight(self) -> Tensor:
        """[out, in] as in nn.Linear, for models that multiply by it themselves (routers of mixtures). Made when first read."""
        return self.dense()

    def dense(self) -> Tensor:
        """[out, in] a copy of the weight as nn.Linear has it."""
        dense: Tensor = self.packed.to_dense()
        return dense

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.in_features
        if num_rows >= self.min_rows:
            return _linear(x, self.packed, self.bias)
        padded_rows = F.pad(x.reshape(num_rows, self.in_features), (0, 0, 0, self.min_rows - num_rows))
        return _linear(padded_rows, self.packed, self.bias)[:num_rows].view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, min_rows={self.min_rows}"


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@cache
def min_rows(in_features: int, out_features: int, dtype: torch.dtype) -> int:
    """The fewest rows whose sums run in the order of many rows' sums: for long sums, oneDNN computes a single row differently.

    Tested on sums that are exactly 0: what remains of them is rounding, which distinguishes one order from another even where
    other bfloat16 results would rarely differ.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(min(out_features, 4096), (in_features + 1) // 2, generator=generator).to(dtype)
    order = torch.randperm(2 * half.shape[1], generator=generator)[:in_features]
    weight = torch.cat([half, -half], 1)[:, order].contiguous()
    x = torch.randn(16, half.shape[1], generator=generator).to(dtype).repeat(1, 2)[:, order].contiguous()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    many = _linear(x, packed, None).split(1)
    for n in (1, 2, 4):
        if all(map(torch.equal, [_linear(part, packed, None)[:1] for part in x.split(n)], many[::n])):
            return n
    return 1  # no number of rows has that order: take the fastest


Packed = PackedLinear | OneDnnLinear


def is_inference(x: Tensor) -> bool:
    """Whether nobody wants the gradient of x."""
    return not (x.requires_grad and torch.is_grad_enabled())


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are packed linear layers for a dtype and a device."""
    return device.type == "cpu" and dtype in DTYPES


def turn_amx_off() -> None:
    """Forbid oneDNN the instructions whose order of summation depends on the number of rows, unless the environment has a
    choice. Of effect if oneDNN was not used before."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@cache
def has_bfloat16_instructions() -> bool:
    """Whether this CPU has instructions for products of bfloat16, of whatever kind."""
    features = llvmlite.binding.get_host_cpu_features()
    return any(features.get(name) for name in ("avx512bf16", "amx-bf16", "bf16"))


@cache
def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 by instructions of its own, faster than float32, and oneDNN is there to use them.
    CPUs with AMX have fast ones there alone: their other ones take twice the time of float32."""
    is_there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    features = llvmlite.binding.get_host_cpu_features()
    return is_there and bool(features.get("avx512bf16")) and not features.get("amx-bf16")


def num_panels(num_rows: int) -> int:
    return -(-num_rows // kernels.PANEL)


@torch.no_grad()
def pack(module: nn.Module) -> None:
    """Replace every nn.Linear inside by a packed one, and an embedding that is tied to one by its rows. The plain weights are
    released as they are packed, unless something else holds them."""
    layers = {id(child): child for child in module.modules() if is_plain_linear(child)}
    in_panels = {key for key, layer in layers.items() if layer.weight.dtype != torch.bfloat16 or not has_bfloat16_products()}
    arena = Arena(sum(padded(panel_bytes(layers[key])) for key in in_panels))
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # of each layer, where the model has it
    embeddings: dict[int, list[tuple[nn.Module, str]]] = {}  # by their weights
    for parent in module.modules():
        for name, child in parent.named_children():
            if id(child) in layers:
                places.setdefault(id(child), []).append((parent, name))
            elif isinstance(child, nn.Embedding):
                embeddings.setdefault(id(child.weight), []).append((parent, name))
    for key in list(layers):
        layer = layers.pop(key)
        packed = PackedLinear.of(layer, arena) if key in in_panels else OneDnnLinear(layer)
        if isinstance(packed, PackedLinear):
            for parent, name in embeddings.get(id(layer.weight), []):
                _share_with_embedding(parent, name, packed)
        for parent, name in places[key]:
            setattr(parent, name, packed)
    for parameter in module.parameters():  # small ones, each of which may hold the file that it was read from in memory
        parameter.data = parameter.data.clone()


def is_plain_linear(child: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module multiplies by its weight and does nothing else: without a hook, or a forward of its own."""
    is_hooked = child._forward_hooks or child._forward_pre_hooks or "forward" in vars(child)
    return type(child) is nn.Linear and not is_hooked and can_pack(child.weight.dtype, child.weight.device)


def panel_bytes(linear: nn.Linear) -> int:
    """What a layer takes in an arena."""
    return num_panels(linear.out_features) * kernels.PANEL * linear.in_features * linear.weight.element_size()


def _share_with_embedding(parent: nn.Module, name: str, head: PackedLinear) -> None:
    """Let an embedding that is tied to a layer read the packed one. One that does more than to look up and scale stays."""
    plain: Any = getattr(parent, name)
    shared = PackedEmbedding(head, getattr(plain, "embed_scale", None))
    some = torch.arange(0, head.out_features, max(head.out_features // 8, 1))
    if torch.equal(shared(some), plain(some)):
        setattr(parent, name, shared)
