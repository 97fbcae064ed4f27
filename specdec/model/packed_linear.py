"""Linear layers on a CPU: weights packed once, and rows whose bits do not depend on the batch.

torch's plain CPU path passes a weight to the BLAS in its usual layout, which rearranges it in every call; few rows then cost
twice what the memory bandwidth allows, and a row's last bits depend on the number of rows. oneDNN takes weights that were
rearranged once, as `torch.compile` does when it freezes them. That halves a decoding step and flattens the cost of verifying a
draft, and its sums run in the same order for every number of rows, so a request's numbers are the same bits alone and in any
batch, with a draft and without (measured in LOG.md, 2026-11-29).

AMX is the exception: with it, oneDNN sums in an order that depends on the number of rows, so it is off where this module is
imported before oneDNN is first used. ONEDNN_MAX_CPU_ISA=ALL in the environment turns it on again.
"""

from __future__ import annotations

import os
from functools import cache, cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

ROWS_HINT = 8  # the number of rows that oneDNN optimises the layout for; it works for every other number


class PackedLinear(nn.Module):
    """y = x W^T + b for inference, with W in oneDNN's own layout. Any leading dimensions, float32 or bfloat16."""

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
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.in_features
        if num_rows >= self.min_rows:
            return _linear(x, self.packed, self.bias)
        padded = F.pad(x.reshape(num_rows, self.in_features), (0, 0, 0, self.min_rows - num_rows))
        return _linear(padded, self.packed, self.bias)[:num_rows].view(*x.shape[:-1], self.out_features)

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


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has packed linear layers for a dtype and a device."""
    supported = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if dtype == torch.bfloat16:
        supported = supported and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cpu" and supported and dtype in (torch.float32, torch.bfloat16)


@torch.no_grad()
def pack(module: nn.Module) -> None:
    """Replace every nn.Linear inside by a PackedLinear. The plain weights are released unless something else holds them."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
        else:
            pack(child)
