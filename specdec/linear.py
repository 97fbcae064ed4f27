"""Linear layers on a CPU: weights packed once, and rows that do not depend on their company.

torch's plain CPU path hands a weight to the BLAS as it lies and re-arranges it in every call; few rows then cost twice what
the memory allows, and a row's last bits depend on how many rows stand beside it. oneDNN takes weights arranged once, ahead of
time, the same way `torch.compile` freezes them. That halves a decoding step, flattens the cost of verifying a draft, and its
sums run in the same order for every number of rows, so a request's numbers are the same bits alone and in any batch, with a
draft and without (measured in LOG.md, 2026-11-29).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS_HINT = 8  # the number of rows that oneDNN lays the weight out for; it serves every other number too


class PackedLinear(nn.Module):
    """y = x W^T + b for inference, with W in oneDNN's own layout. Any leading dimensions, float32 or bfloat16."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.dtype = weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.min_rows = self._min_rows()

    def _apply_packed(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _min_rows(self) -> int:
        """The fewest rows that give the bits of many rows: for long sums a single row takes another path."""
        probe = torch.randn(16, self.in_features, generator=torch.Generator().manual_seed(0)).to(self.dtype)
        many = self._apply_packed(probe).split(1)
        for n in (1, 2, 4):
            few = [self._apply_packed(part)[:1] for part in probe.split(n)]
            if all(map(torch.equal, few, many[::n])):
                return n
        return 1  # no number of rows helps: take the fastest

    def forward(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.in_features
        if num_rows >= self.min_rows:
            return self._apply_packed(x)
        padded = x.reshape(num_rows, -1)[[0] * self.min_rows]
        return self._apply_packed(padded)[:num_rows].view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, min_rows={self.min_rows}"


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
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
