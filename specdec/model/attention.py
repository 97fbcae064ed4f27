"""The attention of a forward, as an object that is passed to the model: `write_kv` stores keys and values, `attend` reads them.

It reaches a transformers model through the keyword argument `attention` of its forward, the hook that transformers has for
serving engines: `attention_interface` is registered as an attention implementation and calls the object. Our own drafter layers
call it directly. This file, `contract.py` and `target.py` are the only ones that know the interface of transformers.

Letters: H query heads, G key heads, W width of a head.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.model import kernels, packed_linear
from specdec.model.kv import ForwardBatch

QUERY_BLOCK = 4
MAX_KERNEL_TOKENS = 256  # of a prompt: for more, torch's blocks of queries are faster


class UnsupportedModel(ValueError):
    """A reason why a model cannot be decoded, to be put into a line that names the model."""


class Attention(Protocol):
    """How a layer's tokens read each other. Tensors are [tokens, heads, width]."""

    def write_kv(self, layer: int, key_NGW: Tensor, value_NGW: Tensor) -> None:
        """Store keys and values of the forward's tokens."""

    def attend(
        self,
        layer: int,
        query_NHW: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """[N, H, width of values] of what the queries read.

        scaling: factor of the scores, W ** -0.5 unless given.
        sliding_window: how many positions, its own included, a token looks back.
        softcap: bends the scores to softcap * tanh(score / softcap).
        """
        ...


class SlotAttention:
    """Attention of the tokens of one forward over their rows' slots. It has to be made anew for every forward."""

    def __init__(self, batch: ForwardBatch):
        self.batch = batch
        self.cache = batch.cache
        self._bias: dict[tuple[int | None, int], Tensor] = {}
        self._seen: dict[int | None, tuple[np.ndarray, ...]] = {}
        self.by_kernel = self._is_for_kernel()

    def write_kv(self, layer: int, key_NGW: Tensor, value_NGW: Tensor) -> None:
        batch = self.batch
        for stored_RGSW, new_NGW in ((self.cache.key_RHSD[layer], key_NGW), (self.cache.value_RHSD[layer], value_NGW)):
            if batch.num_rows == 1:  # the same as below, faster
                stored_RGSW[batch.first_row].index_copy_(1, batch.slot_N, new_NGW.transpose(0, 1).to(stored_RGSW.dtype))
            else:
                stored_RGSW[batch.row_N, :, batch.slot_N] = new_NGW.to(stored_RGSW.dtype)

    def attend(
        self,
        layer: int,
        query_NHW: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """In the dtype of the query. Query heads that share a KV head are folded into one matrix, so K and V are never
        repeated."""
        batch = self.batch
        if self.by_kernel and all(w % kernels.LANES == 0 and w <= kernels.MAX_WIDTH for w in self.cache.layers[layer][1:]):
            return self._attend_by_kernel(layer, query_NHW, scaling, sliding_window, softcap)
        rows = slice(batch.first_row, batch.first_row + batch.num_rows)
        keys = self.cache.key_RHSD[layer][rows, :, : batch.num_slots]
        values = self.cache.value_RHSD[layer][rows, :, : batch.num_slots]
        num_heads = query_NHW.shape[1]
        kv_heads = keys.shape[1]
        bias = self._bias_of(sliding_window, num_heads // kv_heads)
        folded = _fold(query_NHW.to(keys.dtype).transpose(0, 1), batch, kv_heads)
        num_queries = folded.shape[2]
        padding = bias.shape[2] - num_queries
        if padding:
            folded = F.pad(folded, (0, 0, 0, padding))
        if softcap is None:
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scaling)
        else:
            scores = torch.matmul(folded, keys.transpose(2, 3)).float() * (scaling or query_NHW.shape[2] ** -0.5)
            scores = torch.tanh(scores / softcap) * softcap + bias
            out = torch.matmul(scores.softmax(-1).to(values.dtype), values)
        return _unfold(out[:, :, :num_queries] if padding else out, batch, num_heads).to(query_NHW.dtype)

    def _is_for_kernel(self) -> bool:
        """Whether `kernels.attend` serves this forward, where a layer's heads are of widths that it takes."""
        batch = self.batch
        # which is processed alone, and needs the logits of its last token; of a draft all are needed, whatever its length
        is_long_prompt = batch.num_rows == 1 and batch.max_length > MAX_KERNEL_TOKENS and not batch.has_all_logits
        return self.cache.device.type == "cpu" and self.cache.dtype in packed_linear.DTYPES and not is_long_prompt

    def _attend_by_kernel(
        self, layer: int, query_NHW: Tensor, scaling: float | None, sliding_window: int | None, softcap: float | None
    ) -> Tensor:
        keys = self.cache.key_RHSD[layer]
        values = self.cache.value_RHSD[layer]
        num_heads, width = query_NHW.shape[1:]
        dtype = query_NHW.dtype
        query_NHW = query_NHW.float()
        if query_NHW.stride()[1:] != (width, 1):
            query_NHW = query_NHW.contiguous()
        out_NHW = query_NHW.new_zeros(len(query_NHW), num_heads, values.shape[3])
        attend: Any = kernels.attend_by_threads if kernels.use_threads() else kernels.attend
        attend(
            query_NHW.data_ptr(),
            4 * query_NHW.stride(0),
            out_NHW.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            (keys.shape[1], num_heads // keys.shape[1], keys.shape[2], width, values.shape[3], keys.itemsize),
            self.rows,
            self.seen_slots(sliding_window),
            np.float32(width**-0.5 if scaling is None else scaling),
            np.float32(softcap or 0),
        )
        return out_NHW.to(dtype)

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the rows that have tokens: the row of the cache, the first token, and how many."""
        length_B = self.batch.length_B
        present = np.flatnonzero(length_B)
        return self.batch.first_row + present, (np.cumsum(length_B) - length_B)[present], length_B[present]

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and slot of each token, where its key and value belong."""
        return self.batch.row_N.numpy(), self.batch.slot_N.numpy()

    def seen_slots(self, sliding_window: int | None) -> tuple[np.ndarray, ...]:
        """Which slots each token sees, as `kernels.attend` takes it: a stretch, and more of them one by one."""
        if sliding_window not in self._seen:
            batch = self.batch
            past_N = batch.position_N.numpy() + 1
            first_N = np.zeros_like(past_N) if sliding_window is None else np.maximum(past_N - sliding_window, 0)
            if batch.start_B is None:
                extra_N = np.zeros(len(past_N) + 1, dtype=np.int64)
                self._seen[sliding_window] = first_N, past_N - first_N, extra_N, extra_N[:0]
            else:
                prefix_N = np.repeat(batch.start_B.numpy(), batch.length_B)
                self._seen[sliding_window] = first_N, (prefix_N - first_N).clip(0), *batch.forward_slots(sliding_window)
        return self._seen[sliding_window]

    def _bias_of(self, sliding_window: int | None, group: int) -> Tensor:
        """[B, 1, group * M padded, slots] additive mask: 0 where the query may look, the lowest float elsewhere.

        group: how many query heads share a KV head; their rows lie above each other.
        """
        key = (sliding_window, group)
        if key not in self._bias:
            visible_BMS = self.batch.visible_BMS(sliding_window)
            bias = torch.zeros(visible_BMS.shape, dtype=self.cache.dtype, device=self.cache.device)
            bias = bias.masked_fill_(~visible_BMS, torch.finfo(self.cache.dtype).min).unsqueeze(1).repeat(1, 1, group, 1)
            self._bias[key] = F.pad(bias, (0, 0, 0, -bias.shape[2] % QUERY_BLOCK))
        return self._bias[key]


def _fold(query_HNW: Tensor, batch: ForwardBatch, kv_heads: int) -> Tensor:
    """[H, N, W] -> [B, G, group * M, W]: rows apart, and query heads that share a KV head above each other."""
    num_heads, _, width = query_HNW.shape
    rows = batch.num_rows
    length = batch.max_length
    if rows == 1:  # the same as below, in one operation
        return query_HNW.reshape(1, kv_heads, -1, width)
    if batch.is_padded:
        query_HNW = query_HNW.new_zeros(num_heads, rows * length, width).index_copy_(1, batch.padded_N, query_HNW)
    return query_HNW.view(kv_heads, -1, rows, length, width).permute(2, 0, 1, 3, 4).reshape(rows, kv_heads, -1, width)


def _unfold(out: Tensor, batch: ForwardBatch, num_heads: int) -> Tensor:
    """[B, G, group * M, W] -> [N, H, W]."""
    rows, kv_heads, _, width = out.shape
    length = batch.max_length
    if rows == 1:
        return out.reshape(num_heads, length, width).transpose(0, 1)
    out = out.reshape(rows, kv_heads, -1, length, width).permute(0, 3, 1, 2, 4).reshape(rows * length, num_heads, width)
    return out[batch.padded_N] if batch.is_padded else out


def attention_interface(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention: Attention | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, answered by the forward's attention object.

    query: [1, H, N, W]; key, value: [1, G, N, W].
    attention: the object that the model's forward was called with.
    unused: arguments that change nothing (`contract.py` refuses a model that gives others).
    Returns [1, N, H, W], contiguous as that of transformers' own functions is: some models take a view of it.
    """
    if attention is None:
        raise UnsupportedModel("the engine's arguments do not reach its attention")
    # rotary embeddings are float32 in some models, and under autocast
    query_NHW, key_NGW, value_NGW = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    attention.write_kv(layer, key_NGW, value_NGW)
    return attention.attend(layer, query_NHW, scaling, sliding_window, softcap).contiguous().unsqueeze(0), None
