"""Verification forwards of fixed shapes, so that on a GPU each is one CUDA graph, launched at once, in place of hundreds of
kernels.

A forward is padded up to a bucket: a number of rows, of tokens per row, and of slots that attention looks at. Of each the
buckets are the powers of two up to the largest that there can be, so that they are few and no more than half of anything is
padding. A row's padding tokens stand behind its own, in slots that its next forward overwrites; a row without tokens has only
those. For every bucket there is one set of buffers: the host fills them, and the device's work reads and writes nothing else.

On a CPU nothing is captured, and the same buffers are worked through again: what a graph would read or overwrite is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.model.kv import CAUSAL, ForwardBatch, SlotCache, Tree, Visibility, round_up
from specdec.model.target import CausalLM, Output


def bucket(n: int, most: int) -> int:
    """The smallest power of two that is not below n, and not over `most`."""
    return min(1 << (n - 1).bit_length(), most)


class FixedShapes:
    """A target whose forwards have few shapes. It does what `CausalLM.forward` does for the decoding loop.

    target: that decodes.
    max_length: most tokens of a row in a forward.
    """

    def __init__(self, target: CausalLM, max_length: int):
        self.target = target
        self.max_length = max_length
        self._graphs: dict[tuple[object, ...], Graph] = {}
        self._size = (0, 0)
        self._pool = torch.cuda.graph_pool_handle() if target.device.type == "cuda" else None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def forward(
        self,
        cache: SlotCache,
        token_N: Tensor,
        start_B: np.ndarray,
        length_B: np.ndarray,
        hidden_layers: tuple[int, ...] = (),
        visibility: Visibility = CAUSAL,
        slot_BM: np.ndarray | None = None,
        *,
        stored_R: np.ndarray,
    ) -> Output:
        """As of `CausalLM.forward`. stored_R: slots that are in use of all rows, behind which their padding goes."""
        with self.target.timed():
            return self._forward(cache, token_N, length_B, hidden_layers, visibility, slot_BM, stored_R)

    def _forward(
        self,
        cache: SlotCache,
        token_N: Tensor,
        length_B: np.ndarray,
        hidden_layers: tuple[int, ...],
        visibility: Visibility,
        slot_BM: np.ndarray | None,
        stored_R: np.ndarray,
    ) -> Output:
        num_present, num_rows = len(length_B), bucket(len(length_B), cache.rows)
        width = int(length_B.max())
        length = bucket(width, self.max_length)
        more_rows = (0, num_rows - num_present)
        start_B = np.pad(stored_R[:num_rows], (0, max(num_rows - len(stored_R), 0)))
        if isinstance(visibility, Tree):
            parent_BX = np.pad(visibility.parent_BX, (more_rows, (0, length - width)), constant_values=-1)
            visibility = replace(visibility, parent_BX=parent_BX)
        if slot_BM is not None:
            in_order_BM = start_B[:, None] + np.arange(length)
            has_tokens_B = np.pad(length_B > 0, more_rows)
            in_order_BM[has_tokens_B, :width] = slot_BM[length_B > 0]
            slot_BM = in_order_BM
        num_slots = bucket(round_up(int(start_B.max()) + length), cache.slots)
        if self._size != (cache.rows, cache.slots):  # the caches have moved
            self._graphs.clear()
            self._size = (cache.rows, cache.slots)

        key = (num_rows, length, num_slots, type(visibility), hidden_layers)
        graph = self._graphs.get(key)
        batch = ForwardBatch(
            cache, 0, start_B, np.full(num_rows, length), visibility, slot_BM, num_slots=num_slots,
            max_position=self.target.max_model_len - 1, buffers=None if graph is None else graph.batch,
        )  # fmt: skip
        place_N = np.flatnonzero(np.arange(length) < length_B[:, None])  # rows that are only padding come last
        at_N = torch.from_numpy(place_N).to(token_N.device, non_blocking=True)
        padded_N = F.pad(token_N, (0, num_rows * length - len(token_N)))
        padded_N = torch.zeros_like(padded_N).index_copy_(0, at_N, token_N)
        if graph is None:
            graph = self._graphs[key] = Graph(self.target, padded_N, batch, hidden_layers, self._pool)
        output = graph.replay(padded_N, batch)
        # copies: the next forward of this bucket overwrites what this one returned
        hidden_NTD = None if output.hidden_NTD is None else output.hidden_NTD[at_N]
        return Output(output.logits[at_N], hidden_NTD)


class Graph:
    """The forward of one bucket, and its buffers.

    token_N: as many tokens as the bucket has.
    batch: whose device memory becomes the buffers.
    pool: memory that all graphs share; None: nothing is captured.
    """

    def __init__(
        self,
        target: CausalLM,
        token_N: Tensor,
        batch: ForwardBatch,
        hidden_layers: tuple[int, ...],
        pool: Any,
    ):
        self.token_N = token_N.clone()
        self.batch = batch
        self._run: Callable[[ForwardBatch], Output] = lambda batch: target.run(self.token_N, batch, hidden_layers)
        self._captured: torch.cuda.CUDAGraph | None = None
        if pool is None:
            self.output = self._run(batch)
            return
        current = torch.cuda.current_stream(target.device)
        aside = torch.cuda.Stream(target.device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # libraries choose their kernels and set memory aside in the first run
            self._run(batch)
        current.wait_stream(aside)
        self._captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._captured, pool=pool):
            self.output = self._run(batch)

    def replay(self, token_N: Tensor, batch: ForwardBatch) -> Output:
        """The output's tensors are the same in every call. batch: with this graph's buffers."""
        self.token_N.copy_(token_N)
        if self._captured is not None:
            self._captured.replay()
            return self.output
        output = self._run(batch)
        self.output.logits.copy_(output.logits)
        if output.hidden_NTD is not None and self.output.hidden_NTD is not None:
            self.output.hidden_NTD.copy_(output.hidden_NTD)
        return self.output
