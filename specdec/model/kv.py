"""The slot cache, K and V as dense [rows, kv_heads, slots, head_dim] per layer, and the tokens that one forward adds to it.

Three things about a token of a forward are independent: the slot that holds its K and V, its position (for RoPE and sliding
windows), and which other tokens it sees. Rolling back rejected tokens costs nothing: their slots are hidden from the next
forward, which overwrites them. `specdec.model.attention` reads and writes the cache.

In float32 and bfloat16 on a CPU `kernels.attend` computes every token by itself, except in long prompts. Elsewhere padding
makes a row's numbers on the CPU the same bits in any batch (checked in tests/unit/test_target.py): torch's kernels take
another path for fewer than 4 query rows, and sum the keys in another order when their count is not a multiple of 128, or
leaves 256 (on AMD and Intel) or 384 (on Intel) over from blocks of 512. So query rows are padded to a multiple of 4, and slots
to a multiple of 512, or 128 more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec import tree

SLOT_BLOCK = 128
KERNEL_BLOCK = 512  # keys that the attention kernel sums at a time


def round_up(n: int) -> int:
    """The number of slots that attention looks at when n are in use."""
    blocks = -(-n // SLOT_BLOCK) * SLOT_BLOCK
    return blocks if blocks % KERNEL_BLOCK <= SLOT_BLOCK else -(-n // KERNEL_BLOCK) * KERNEL_BLOCK


class SlotCache:
    """K and V of every layer. Grows on demand; never shrinks."""

    def __init__(self, layers: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device):
        """layers: (kv_heads, head_dim) of each layer, or (kv_heads, width of keys, width of values)."""
        self.layers = [(heads, widths[0], widths[-1]) for heads, *widths in layers]
        self.dtype = dtype
        self.device = device
        self.rows = 0
        self.slots = 0
        self.key_RHSD: list[Tensor] = [torch.empty(0) for _ in layers]
        self.value_RHSD: list[Tensor] = [torch.empty(0) for _ in layers]

    def bytes_to_grow(self, rows: int, slots: int) -> int:
        """Bytes that growing to that size takes."""
        per_slot = sum(heads * (key_width + value_width) for heads, key_width, value_width in self.layers) * self.dtype.itemsize
        size = max(rows, self.rows) * max(round_up(slots), self.slots)
        return per_slot * (size - self.rows * self.slots)

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for that many rows and slots, keeping what is stored."""
        rows = max(rows, self.rows)
        slots = max(round_up(slots), self.slots)
        if (rows, slots) == (self.rows, self.slots):
            return
        for which, store in enumerate((self.key_RHSD, self.value_RHSD)):
            for i, (heads, *widths) in enumerate(self.layers):
                grown = self._zeros(rows, heads, slots, widths[which])
                if self.rows:
                    grown[: self.rows, :, : self.slots] = store[i]
                store[i] = grown
        self.rows = rows
        self.slots = slots

    def set_layer(self, layer: int, shape: tuple[int, int, int]) -> None:
        """Give a layer its room, empty: heads, width of keys, width of values."""
        while len(self.layers) <= layer:
            self.layers.append((0, 0, 0))
            self.key_RHSD.append(torch.empty(0))
            self.value_RHSD.append(torch.empty(0))
        self.layers[layer] = shape
        heads, *widths = shape
        for store, width in zip((self.key_RHSD, self.value_RHSD), widths, strict=True):
            store[layer] = self._zeros(self.rows, heads, self.slots, width)

    def _zeros(self, *shape: int) -> Tensor:
        """Not `empty`: a masked slot counts 0 times its value, and 0 times NaN is NaN. numpy's zeros take no memory before they
        are written; torch writes them."""
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(self.dtype).view(shape)

    def move(self, row_N: Tensor, from_slot_N: Tensor, to_slot_N: Tensor) -> None:
        """Copy K and V from one slot to another of the same row, all at once: a slot may be both read and written.

        The tensors are int64 on the device; entries with the same slot twice do nothing.
        """
        for stored in (*self.key_RHSD, *self.value_RHSD):
            stored[row_N, :, to_slot_N] = stored[row_N, :, from_slot_N]  # the right side is read before the left is written

    def wipe(self) -> None:
        """Forget everything. After nan or inf was written somewhere: a masked slot that holds it spoils its row for ever."""
        for stored in (*self.key_RHSD, *self.value_RHSD):
            stored.zero_()


# ---------------------------------------------------------------- what a token of a forward sees


@dataclass(frozen=True)
class Causal:
    """Every slot of its row up to its own position. A token's slot is its position."""


@dataclass(frozen=True, eq=False)
class Tree:
    """The row's slots before the forward's tokens, its ancestors among these, and itself. A chain has parents -1, 0, 1, ...

    A tree may be processed level by level: its first tokens are in the cache then, in the slots after the prefix, and the
    forward has those that follow.

    parent_BX: place of each token's parent in the row's tree, before its own; -1: the token that the tree continues. A token's
        position is one after its parent's. Entries beyond a row's length do not matter.
    num_stored: tokens of every row's tree that are in the cache.
    """

    parent_BX: np.ndarray
    num_stored: int = 0

    def depth_BX(self) -> np.ndarray:
        """Tokens between each token and the prefix."""
        return tree.depths(self.parent_BX)

    def visible_BMX(self) -> np.ndarray:
        """Whether token m of the forward sees token x of its row's tree: it is x, or below x."""
        return tree.on_path(self.parent_BX)[:, self.num_stored :]


@dataclass(frozen=True)
class Block:
    """The row's slots before the forward's tokens, and all of these, in both directions."""


Visibility = Causal | Tree | Block
CAUSAL = Causal()


class ForwardBatch:
    """The tokens of one forward, rows laid end to end: where they are stored, their positions, and what they see.

    Made on the host, and sent to the device in one piece, `index`; a batch of the same `bucket` can be written over it, which
    leaves every address as it is: what a captured CUDA graph needs.

    cache: that the forward writes.
    first_row: rows first_row .. first_row + B - 1 of the cache take part.
    start_B: slots of each row that hold its prefix; its tokens come behind them.
    length_B: tokens of each row, 0 or more.
    visibility: what they see.
    slot_BM: where they are stored; start, start + 1, ... unless given. Entries beyond a row's length do not matter.
    logits_at_N: places among the tokens whose logits are wanted; None for all of them.
    buffers: a batch of the same bucket, whose device memory is taken over.
    num_slots: that attention looks at; as few as hold the tokens, unless given.
    max_position: tokens have no higher one; for padding, whose position does not matter.
    """

    def __init__(
        self,
        cache: SlotCache,
        first_row: int,
        start_B: np.ndarray,
        length_B: np.ndarray,
        visibility: Visibility = CAUSAL,
        slot_BM: np.ndarray | None = None,
        logits_at_N: np.ndarray | None = None,
        buffers: ForwardBatch | None = None,
        num_slots: int | None = None,
        max_position: int | None = None,
    ):
        self.cache = cache
        self.first_row = first_row
        self.num_rows = len(start_B)
        self.length_B = length_B
        self.max_length = int(length_B.max())  # M
        self.visibility = visibility
        offset_M = np.arange(self.max_length)
        num_stored = visibility.num_stored if isinstance(visibility, Tree) else 0
        offset_X = np.arange(num_stored + self.max_length)
        position_BX = start_B[:, None] + (visibility.depth_BX() if isinstance(visibility, Tree) else offset_X)
        if max_position is not None:
            position_BX = np.minimum(position_BX, max_position)
        position_BM = position_BX[:, num_stored:]
        if slot_BM is None:
            slot_BM = start_B[:, None] + offset_X[num_stored:]
        in_use_BM = offset_M < length_B[:, None]
        place_N = np.flatnonzero(in_use_BM)
        slot_N = slot_BM.ravel()[place_N]
        self.num_slots = num_slots or round_up(max(int(start_B.max()), int(slot_N.max(initial=-1)) + 1))
        self.is_padded = len(place_N) < in_use_BM.size  # some rows have fewer tokens than others
        self.num_tokens = len(place_N)
        assert self.num_slots <= cache.slots
        assert first_row + self.num_rows <= cache.rows

        arrays = {
            "row_N": first_row + place_N // self.max_length,
            "slot_N": slot_N,
            "position_N": position_BM.ravel()[place_N],
            "padded_N": place_N if self.is_padded else place_N[:0],
            "position_BM": position_BM,
        }
        if not isinstance(visibility, Causal):
            arrays["start_B"] = start_B
            # keys beyond a row's length go to a column that is cut off
            stored_BS = np.where(length_B[:, None] > 0, start_B[:, None] + offset_X[:num_stored], self.num_slots)
            arrays["slot_BX"] = np.concatenate([stored_BS, np.where(in_use_BM, slot_BM, self.num_slots)], 1)
            arrays["position_BX"] = position_BX
            if isinstance(visibility, Tree):
                arrays["visible_BMX"] = visibility.visible_BMX()
        self.has_all_logits = logits_at_N is None
        arrays["logits_at_N"] = np.zeros(0, dtype=np.int64) if logits_at_N is None else logits_at_N
        self.bucket = (
            first_row, self.num_slots, self.is_padded, self.has_all_logits, type(visibility),
            tuple(array.shape for array in arrays.values()),
        )  # fmt: skip
        host = torch.from_numpy(np.concatenate([array.ravel() for array in arrays.values()], dtype=np.int64))
        if buffers is None:
            self.index = host.to(cache.device, non_blocking=True)
        else:
            assert buffers.bucket == self.bucket, "buffers are of one bucket"
            self.index = buffers.index.copy_(host, non_blocking=True)
        views = self.index.split([array.size for array in arrays.values()])
        on_device = {name: x.view(array.shape) for (name, array), x in zip(arrays.items(), views, strict=True)}
        self.row_N = on_device["row_N"]
        self.slot_N = on_device["slot_N"]
        self.position_N = on_device["position_N"]
        self.padded_N = on_device["padded_N"]  # place of each token in [B, M], if is_padded
        self.position_BM = on_device["position_BM"]
        self.start_B = on_device.get("start_B")
        self.slot_BX = on_device.get("slot_BX")
        self.position_BX = on_device.get("position_BX")
        self.visible_BMX = on_device.get("visible_BMX")
        self.logits_at_N = None if self.has_all_logits else on_device["logits_at_N"]

    def forward_slots(self, sliding_window: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Of a forward that is not causal, on the CPU: the slots behind the prefix that each token sees, in order.

        Returns where each token's slots begin, [N + 1], and the slots of all, end to end.
        """
        assert self.slot_BX is not None
        assert self.position_BX is not None
        slot_BX = self.slot_BX.numpy()
        is_token_BM = np.arange(self.max_length) < self.length_B[:, None]
        sees_BMX = is_token_BM[:, :, None] & (slot_BX < self.num_slots)[:, None]
        if self.visible_BMX is not None:
            sees_BMX &= self.visible_BMX.numpy().astype(bool)
        if sliding_window is not None:
            position_BX = self.position_BX.numpy()
            sees_BMX &= position_BX[:, None] > self.position_BM.numpy()[:, :, None] - sliding_window
        count_N = sees_BMX.sum(-1)[is_token_BM]
        row_N, _, place_N = np.nonzero(sees_BMX)
        return np.concatenate([[0], np.cumsum(count_N)]), slot_BX[row_N, place_N]

    def visible_BMS(self, sliding_window: int | None) -> Tensor:
        """Whether each token sees each slot of its row.

        sliding_window: leaves the keys at the last so many positions up to a token's own, and those at later ones.
        """
        slot_S = torch.arange(self.num_slots, device=self.index.device)
        position_BM1 = self.position_BM.unsqueeze(-1)
        if isinstance(self.visibility, Causal):
            visible_BMS = slot_S <= position_BM1
            key_position_B1S = slot_S
        else:
            assert self.start_B is not None
            assert self.slot_BX is not None
            assert self.position_BX is not None
            # one column more, for the tokens that rows do not have
            slot_S = torch.arange(self.num_slots + 1, device=self.index.device)
            shape = (self.num_rows, self.max_length, self.num_slots + 1)
            visible_BMS = (slot_S < self.start_B[:, None, None]).expand(shape).clone()
            slot_B1X = self.slot_BX.unsqueeze(1)
            tokens_BMX = visible_BMS.new_ones(()) if self.visible_BMX is None else self.visible_BMX.bool()
            index_BMX = slot_B1X.expand(-1, self.max_length, -1)
            visible_BMS = visible_BMS.scatter_(2, index_BMX, tokens_BMX.expand(index_BMX.shape))[..., :-1]
            key_position_B1S = slot_S.expand(self.num_rows, 1, -1).scatter(2, slot_B1X, self.position_BX.unsqueeze(1))[..., :-1]
        if sliding_window is not None:
            visible_BMS &= key_position_B1S > position_BM1 - sliding_window
        return visible_BMS


# ---------------------------------------------------------------- ragged rows


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
