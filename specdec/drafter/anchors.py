"""Blocks that begin at anchors: how a drafter of blocks that reads target states (DFlash 2602.06036) learns.

An anchor is a token of the data that was generated and is followed by one that was. Its block is the anchor and the masks
behind it, at the positions that follow. A token of the block sees the target's states before the anchor and its own block, in
both directions unless it is causal. It never sees another block, nor the anchor's own state, which does not exist yet when the
drafter drafts.

Rows are those of `specdec.drafter.unroll` with a label_offset of 1: row p is the block whose anchor is at p, and its step k
predicts token p+1+k.

Letters: A blocks, W width of a head, J tokens of a block.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.drafter import unroll

WINDOW_KEYS = 1 << 14  # keys that are gathered at once


def num_steps(
    names: Sequence[str], length_B: np.ndarray, mask_N: np.ndarray, most: int, num_anchors: int, seed: int | str
) -> np.ndarray:
    """[N] tokens that the block at each place learns to draft, 0 where there is no anchor: up to `most`, and none beyond a
    token that was not generated.

    names, length_B, mask_N: of the samples, which lie end to end: name, length, whether each token was generated.
    num_anchors: of each sample, at most; they are sampled by its name, so that the batch and the process do not matter.
    """
    counts = []
    ends = np.cumsum(length_B)
    for name, first, end in zip(names, ends - length_B, ends, strict=True):
        is_generated_n = mask_N[first:end].astype(bool)
        place_n = np.arange(end - first)
        gaps = np.append(np.flatnonzero(~is_generated_n), end - first)
        # generated ones behind each, without a gap
        following_n = gaps[np.searchsorted(gaps, place_n, side="right")] - place_n - 1
        place_A = np.flatnonzero(is_generated_n & (following_n > 0) & (place_n > 0))
        if len(place_A) > num_anchors:
            rng = np.random.default_rng(zlib.crc32(f"{seed} {name}".encode()))
            place_A = rng.choice(place_A, num_anchors, replace=False)
        count_n = np.zeros(end - first, dtype=np.int64)
        count_n[place_A] = following_n[place_A].clip(max=most)
        counts.append(count_n)
    return np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)


class BlockAttention:
    """`specdec.model.attention.Attention` of blocks, which lie token by token: the first of every block, then the second, ...

    anchor_A: places of the anchors in the batch, ascending; none is the first of its document.
    first_N: for every token of the batch, where its document begins.
    num_tokens: of a block.
    is_causal: a token sees those of its block up to itself.
    kernel: as `unroll.attention`.
    """

    def __init__(
        self,
        anchor_A: np.ndarray,
        first_N: np.ndarray,
        num_tokens: int,
        is_causal: bool = False,
        kernel: Any = unroll.attention,
    ):
        self.anchor_A = anchor_A
        self.first_N = first_N
        self.num_tokens = num_tokens
        self.is_causal = is_causal
        self.kernel = kernel
        self.context: dict[int, tuple[Tensor, Tensor]] = {}  # by layer, of the batch's tokens
        self.block: dict[int, tuple[Tensor, Tensor]] = {}

    def write_context(self, layer: int, key_NGW: Tensor, value_NGW: Tensor) -> None:
        self.context[layer] = key_NGW, value_NGW

    def write_kv(self, layer: int, key_NGW: Tensor, value_NGW: Tensor) -> None:
        self.block[layer] = key_NGW, value_NGW

    def attend(
        self,
        layer: int,
        query_NHW: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        assert softcap is None
        scaling = scaling or query_NHW.shape[-1] ** -0.5
        if sliding_window is not None:
            return self._attend_window(layer, query_NHW, scaling, sliding_window)
        size = len(self.anchor_A)
        keys, values = (x.split(size) for x in self.block[layer])
        out = []
        for j, query_AHW in enumerate(query_NHW.split(size)):
            seen = slice(0, j + 1 if self.is_causal else self.num_tokens)
            # rows right before the anchors, and the tokens of the blocks as if they were steps
            in_block = list(keys[seen]), list(values[seen])
            out.append(self.kernel(query_AHW, *self.context[layer], *in_block, self.anchor_A - 1, self.first_N, scaling))
        return torch.cat(out)

    def _attend_window(self, layer: int, query_NHW: Tensor, scaling: float, window: int) -> Tensor:
        """`attend` with the context that is in reach gathered for every block, some blocks at a time."""
        num_blocks = len(self.anchor_A)
        device = query_NHW.device
        context = self.context[layer]
        block = [x.unflatten(0, (self.num_tokens, num_blocks)).transpose(0, 1) for x in self.block[layer]]  # [A, J, G, W]
        query_AJHW = query_NHW.unflatten(0, (self.num_tokens, num_blocks)).transpose(0, 1)
        offset_J = np.arange(self.num_tokens)
        reach_S = np.concatenate([np.arange(1 - window, 0), offset_J])  # of keys, from the anchor: context, then the block
        sees_JS = reach_S > offset_J[:, None] - window
        if self.is_causal:
            sees_JS &= reach_S <= offset_J[:, None]
        place_AS = self.anchor_A[:, None] + reach_S[: window - 1]
        exists_AS = place_AS >= self.first_N[self.anchor_A][:, None]
        out = []
        chunk = max(WINDOW_KEYS // len(reach_S), 1)
        for a in range(0, num_blocks, chunk):
            blocks = slice(a, a + chunk)
            at = torch.from_numpy(place_AS[blocks].clip(0)).to(device, non_blocking=True)
            keys, values = (torch.cat([x[at], y[blocks]], 1) for x, y in zip(context, block, strict=True))  # [a, S, G, W]
            visible_aJS = np.broadcast_to(sees_JS, (len(at), *sees_JS.shape)).copy()
            visible_aJS[:, :, : window - 1] &= exists_AS[blocks][:, None]
            mask = torch.from_numpy(visible_aJS).to(device, non_blocking=True)[:, None, None]
            query = query_AJHW[blocks].unflatten(2, (keys.shape[2], -1)) * scaling
            score = torch.einsum("ajgrw,asgw->agrjs", query, keys)
            weight = score.float().masked_fill(~mask, float("-inf")).softmax(-1).to(values.dtype)
            out.append(torch.einsum("agrjs,asgw->ajgrw", weight, values).flatten(2, 3))
        return torch.cat(out).transpose(0, 1).flatten(0, 1)

    def attend_reference(self, layer: int, query_NHW: Tensor, scaling: float, sliding_window: int | None = None) -> Tensor:
        """`attend` with one dense mask. sliding_window: a token sees so many positions up to its own, and all later ones."""
        repeat = query_NHW.shape[1] // self.block[layer][0].shape[1]
        keys, values = (
            torch.cat([context, block]).repeat_interleave(repeat, 1)
            for context, block in zip(self.context[layer], self.block[layer], strict=True)
        )
        mask = torch.from_numpy(self.visible(sliding_window)).to(query_NHW.device)
        score = torch.einsum("ahw,khw->hak", query_NHW * scaling, keys)
        weight = score.float().masked_fill(~mask, float("-inf")).softmax(-1).to(values.dtype)
        return torch.einsum("hak,khw->ahw", weight, values)

    def visible(self, sliding_window: int | None = None) -> np.ndarray:
        """[J * A, N + J * A] whether each token of the blocks sees each token of the batch's context, and of the blocks."""
        place_N = np.arange(len(self.first_N))
        block_M = np.tile(np.arange(len(self.anchor_A)), self.num_tokens)
        offset_M = np.repeat(np.arange(self.num_tokens), len(self.anchor_A))
        place_M1 = (self.anchor_A[block_M] + offset_M)[:, None]
        anchor_M1 = self.anchor_A[block_M][:, None]
        context_MN = (place_N < anchor_M1) & (place_N >= self.first_N[self.anchor_A[block_M]][:, None])
        block_MM = block_M[:, None] == block_M
        if self.is_causal:
            block_MM &= offset_M <= offset_M[:, None]
        if sliding_window is not None:
            context_MN &= place_N > place_M1 - sliding_window
            block_MM &= place_M1 - sliding_window < place_M1.T
        return np.concatenate([context_MN, block_MM], 1)


def kept(steps: Sequence[Any], state_MD: Tensor, first_offset: int) -> list[Tensor]:
    """[A, D] states of every step's rows, from those of all tokens of the blocks.

    steps: of the plan; the rows of the first are the blocks.
    first_offset: token of a block that drafts its first token.
    """
    anchor_A = steps[0].rows
    by_token = state_MD.split(len(anchor_A))
    states = []
    for k, step in enumerate(steps):
        place = torch.from_numpy(np.searchsorted(anchor_A, step.rows)).to(state_MD.device, non_blocking=True)
        states.append(by_token[k + first_offset][place])
    return states
