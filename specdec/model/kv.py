"""The slot cache: K and V as dense [rows, kv_heads, slots, head_dim] per layer, and the attention that reads it.

A forward writes the tokens it processes at their positions and masks by position, so rolling back rejected tokens is
*nothing*: the next forward overwrites them. The attention is registered with transformers under the name "specdec" and
gets its `ForwardBatch` through the model's keyword arguments, the door that transformers keeps for serving engines; this file,
`contract.py` and `target.py` are the only ones that know that interface.

Two paddings make a row's numbers on the CPU the same bits in any company (checked in tests/test_target.py):
the kernels take another path for fewer than 4 query rows, and sum the keys in another order when their count is not a
multiple of 128, or leaves 256 over from blocks of 512. So query rows are padded to a multiple of 4, and slots to a count
that is neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SLOT_BLOCK = 128
QUERY_BLOCK = 4


def round_up(n: int) -> int:
    """The number of slots that attention looks at when n are in use."""
    slots = -(-n // SLOT_BLOCK) * SLOT_BLOCK
    return slots + SLOT_BLOCK if slots % 512 == 256 else slots


class SlotCache:
    """K and V of every layer. Grows on demand; never shrinks."""

    def __init__(self, layers: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device):
        """layers: (kv_heads, head_dim) of each layer, or (kv_heads, width of keys, width of values)."""
        self.layers = [(heads, widths[0], widths[-1]) for heads, *widths in layers]
        self.dtype, self.device = dtype, device
        self.rows, self.slots = 0, 0
        self.key_RHSD: list[Tensor] = [torch.empty(0) for _ in layers]
        self.value_RHSD: list[Tensor] = [torch.empty(0) for _ in layers]

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        """Bytes that growing to that size takes."""
        per_slot = sum(heads * (of_key + of_value) for heads, of_key, of_value in self.layers) * self.dtype.itemsize
        grown = max(rows, self.rows) * max(round_up(slots), self.slots)
        return per_slot * (grown - self.rows * self.slots)

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for that many rows and slots, keeping what is stored."""
        rows, slots = max(rows, self.rows), max(round_up(slots), self.slots)
        if (rows, slots) == (self.rows, self.slots):
            return
        for which, store in enumerate((self.key_RHSD, self.value_RHSD)):
            for i, (heads, *widths) in enumerate(self.layers):
                # zeros, not empty: a masked slot counts 0 times its value, and 0 times NaN is NaN
                grown = torch.zeros(rows, heads, slots, widths[which], dtype=self.dtype, device=self.device)
                if self.rows:
                    grown[: self.rows, :, : self.slots] = store[i]
                store[i] = grown
        self.rows, self.slots = rows, slots

    def set_layer(self, layer: int, shape: tuple[int, int, int]) -> None:
        """Give a layer its room, empty: heads, width of keys, width of values."""
        while len(self.layers) <= layer:
            self.layers.append((0, 0, 0))
            self.key_RHSD.append(torch.empty(0))
            self.value_RHSD.append(torch.empty(0))
        heads, *widths = self.layers[layer] = shape
        for store, width in zip((self.key_RHSD, self.value_RHSD), widths, strict=True):
            store[layer] = torch.zeros(self.rows, heads, self.slots, width, dtype=self.dtype, device=self.device)

    def wipe(self) -> None:
        """Forget everything. After nan or inf was written somewhere: a masked slot that holds it spoils its row for ever."""
        for stored in (*self.key_RHSD, *self.value_RHSD):
            stored.zero_()


class UnsupportedModel(ValueError):
    """A reason why a model cannot be decoded, to stand inside a line that names the model."""


@dataclass
class ForwardBatch:
    """The tokens of one forward, laid end to end, and where they stand in the cache.

    Rows first_row .. first_row + B - 1 take part; row b has length[b] tokens at positions start[b], start[b] + 1, ...
    """

    cache: SlotCache
    first_row: int
    start_B: np.ndarray
    length_B: np.ndarray
    probe: Any = None  # what takes down how a model calls the attention (`contract.Probe`)
    row_N: Tensor = field(init=False)
    slot_N: Tensor = field(init=False)
    num_positions: int = field(init=False)  # M: tokens of the longest row
    num_slots: int = field(init=False)
    padded_N: Tensor | None = field(init=False, default=None)  # place of each token in the padded [B, M] layout
    slice: tuple[int, int] | None = field(init=False, default=None)  # one row: its tokens are one stretch of slots
    _bias: dict[tuple[int | None, int], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        device = self.cache.device
        num_rows, self.num_positions = len(self.start_B), int(self.length_B.max())
        self.num_slots = round_up(int((self.start_B + self.length_B).max()))
        assert self.num_slots <= self.cache.slots
        assert self.first_row + num_rows <= self.cache.rows
        offset_BM = np.arange(self.num_positions)
        slot_BM = self.start_B[:, None] + offset_BM
        used_BM = offset_BM < self.length_B[:, None]
        if used_BM.all():
            row_N = np.repeat(np.arange(num_rows), self.num_positions)
            slot_N = slot_BM.reshape(-1)
        else:
            row_N, slot_N = np.nonzero(used_BM)[0], slot_BM[used_BM]
            self.padded_N = torch.from_numpy(np.nonzero(used_BM.reshape(-1))[0]).to(device, non_blocking=True)
        if num_rows == 1:
            self.slice = (int(self.start_B[0]), int(self.start_B[0] + self.length_B[0]))
        self.row_N = torch.from_numpy(row_N + self.first_row).to(device, non_blocking=True)
        self.slot_N = torch.from_numpy(slot_N).to(device, non_blocking=True)
        self.slot_BM = torch.from_numpy(slot_BM).to(device, non_blocking=True)

    @property
    def num_rows(self) -> int:
        return len(self.start_B)

    def bias(self, sliding_window: int | None, group: int) -> Tensor:
        """[B, 1, group * M padded, slots] additive mask: 0 where the query may look, the lowest float elsewhere.

        A query sees the slots up to its own position, and of those the last `sliding_window`.
        group: how many query heads share a KV head; their rows lie above each other.
        """
        key = (sliding_window, group)
        if key not in self._bias:
            slot_S = torch.arange(self.num_slots, device=self.cache.device)
            hidden_BMS = slot_S > self.slot_BM.unsqueeze(-1)
            if sliding_window is not None:
                hidden_BMS |= slot_S <= self.slot_BM.unsqueeze(-1) - sliding_window
            bias = torch.zeros(hidden_BMS.shape, dtype=self.cache.dtype, device=self.cache.device)
            bias = bias.masked_fill_(hidden_BMS, torch.finfo(self.cache.dtype).min).unsqueeze(1).repeat(1, 1, group, 1)
            self._bias[key] = F.pad(bias, (0, 0, 0, -bias.shape[2] % QUERY_BLOCK))
        return self._bias[key]


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    window: Any = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over a SlotCache.

    query: [1, heads, N, head_dim]; key, value: [1, kv_heads, N, head_dim]. Writes K and V to their slots, then attends
    over the rows' slots. Query heads that share a KV head are folded into one matrix, so K and V are never repeated.
    The result is contiguous, as that of transformers' own functions is: some models take a view of it.
    window: the tokens of the forward; or, in training, what stands in for all of this. unused: arguments that change nothing
    (`contract.py` refuses a model that gives others).
    """
    if callable(window):
        return window(module, query, key, value, scaling, sliding_window, softcap).contiguous(), None
    if window is None:
        raise UnsupportedModel("the engine's arguments do not reach its attention")
    if window.probe is not None:
        window.probe.note(module, query, key, value, attention_mask, sliding_window, unused)
    num_heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
    group = num_heads // kv_heads
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = window.cache.key_RHSD[layer], window.cache.value_RHSD[layer]
    if window.slice is not None:
        first, last = window.slice
        keys[window.first_row, :, first:last] = key[0]
        values[window.first_row, :, first:last] = value[0]
    else:
        keys[window.row_N, :, window.slot_N] = key[0].transpose(0, 1)
        values[window.row_N, :, window.slot_N] = value[0].transpose(0, 1)
    in_use = slice(window.first_row, window.first_row + window.num_rows)
    keys, values = keys[in_use, :, : window.num_slots], values[in_use, :, : window.num_slots]

    bias = window.bias(sliding_window, group)
    folded = _fold(query, window, kv_heads)
    num_queries, padding = folded.shape[2], bias.shape[2] - folded.shape[2]
    if padding:
        folded = F.pad(folded, (0, 0, 0, padding))
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scaling)
    else:
        scores = torch.matmul(folded, keys.transpose(2, 3)).float() * (scaling or width**-0.5)
        scores = torch.tanh(scores / softcap) * softcap + bias
        out = torch.matmul(scores.softmax(-1).to(values.dtype), values)
    return _unfold(out[:, :, :num_queries] if padding else out, window, num_heads).contiguous(), None


def _fold(query: Tensor, window: ForwardBatch, kv_heads: int) -> Tensor:
    """[1, heads, N, D] -> [B, kv_heads, group * M, D]: rows apart, and query heads that share a KV head above each other."""
    _, num_heads, _, width = query.shape
    rows, m = window.num_rows, window.num_positions
    if rows == 1:  # the same as below, in one operation
        return query.reshape(1, kv_heads, -1, width)
    query = query[0]
    if window.padded_N is not None:
        query = query.new_zeros(num_heads, rows * m, width).index_copy_(1, window.padded_N, query)
    return query.view(kv_heads, -1, rows, m, width).permute(2, 0, 1, 3, 4).reshape(rows, kv_heads, -1, width)


def _unfold(out: Tensor, window: ForwardBatch, num_heads: int) -> Tensor:
    """[B, kv_heads, group * M, D] -> [1, N, heads, D], what transformers expects."""
    rows, kv_heads, _, width = out.shape
    m = window.num_positions
    if rows == 1:
        return out.reshape(1, num_heads, m, width).transpose(1, 2)
    out = out.reshape(rows, kv_heads, -1, m, width).permute(0, 3, 1, 2, 4).reshape(rows * m, num_heads, width)
    if window.padded_N is not None:
        out = out[window.padded_N]
    return out.unsqueeze(0)


def pack_ragged(x_BJ: Tensor, count_B: np.ndarray) -> Tensor:
    """[B, J, ...] -> [N, ...]: the first count_B[b] entries of every row, one row after the other."""
    if (count_B == x_BJ.shape[1]).all():
        return x_BJ.flatten(0, 1)
    used_N = np.flatnonzero(np.arange(x_BJ.shape[1]) < count_B[:, None])
    return x_BJ.flatten(0, 1)[torch.from_numpy(used_N).to(x_BJ.device, non_blocking=True)]


def pad_ragged(x_N: Tensor, count_B: np.ndarray, num_positions: int) -> Tensor:
    """[N, ...] -> [B, J, ...], the inverse; places beyond a row's count repeat its last entry."""
    if (count_B == num_positions).all():
        return x_N.unflatten(0, (len(count_B), num_positions))
    first_B = np.cumsum(count_B) - count_B
    place_BJ = first_B[:, None] + np.minimum(np.arange(num_positions), count_B[:, None] - 1)
    return x_N[torch.from_numpy(place_BJ).to(x_N.device, non_blocking=True)]
