"""Training of drafters that make all tokens of a draft in one pass, from mask tokens (PARD 2504.18583, P-EAGLE 2602.01469).

Rows are those of `specdec.drafter.unroll`, and a step is a depth: at depth 0 a row is a token (or a pair) of the data, at
depth d the d-th mask token behind it, d positions further on, which sees what the row saw and the mask tokens in between. All
depths go through the drafter together, laid end to end: every token of the batch, then the rows of depth 1, 2, ... Deeper ones
are sub-sampled (COD), since most of what they teach the others teach too.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from specdec.checked import Checked
from specdec.drafter import losses, unroll
from specdec.drafter.batch import Batch


class Depths(Checked):
    """num_depths: tokens that are trained, the row's own included; down_sample_ratio: each depth keeps this share of the rows
    of the one before, down_sample_ratio_min: and no less than this of all; step_loss_decay: depth d weighs decay^d;
    depth_warmup: for this share of the run there is depth 0 alone; loss: weights of ce, kl, tv and nll."""

    what: ClassVar[str] = "train.objective key"

    num_depths: int = Field(8, ge=1)
    down_sample_ratio: float = Field(0.7, gt=0, le=1)
    down_sample_ratio_min: float = Field(0.2, ge=0, le=1)
    step_loss_decay: float = Field(1.0, gt=0)
    depth_warmup: float = Field(0.0, ge=0, le=1)
    loss: losses.Terms = Field({"nll": 1.0})

    def steps_at(self, progress: float) -> int:
        return 1 if progress < self.depth_warmup else self.num_depths

    def weights(self, num_steps: int) -> list[float]:
        return [self.step_loss_decay**k for k in range(num_steps)]

    def check(self, num_speculative_tokens: int) -> None:
        """What decodes while training must not draft deeper than is trained."""
        if num_speculative_tokens > self.num_depths:
            raise ValueError(
                f"method.num_speculative_tokens={num_speculative_tokens}, which decodes while training, is over "
                f"train.objective.num_depths={self.num_depths}; lower it"
            )

    def plan(self, batch: Batch, num_depths: int, label_offset: int, seed: int | str) -> unroll.Plan:
        """Rows of every depth; a sample's are drawn anew in every step of the run."""
        shares = self.down_sample_ratio, self.down_sample_ratio_min
        num_steps_N = unroll.sample_num_steps(batch.ids, batch.length_B, num_depths, *shares, seed)
        return unroll.plan(batch.length_B, batch.mask_N, num_depths, label_offset, num_steps_N)


def positions(plan: unroll.Plan) -> np.ndarray:
    """Of all tokens and all mask tokens, in their documents."""
    within_N = np.arange(len(plan.first_N)) - plan.first_N
    return np.concatenate([within_N, *(within_N[step.rows] + d for d, step in enumerate(plan.steps[1:], 1))])


def num_masks(plan: unroll.Plan) -> int:
    return sum(len(step.rows) for step in plan.steps[1:])


def by_depth(state_ND: Tensor, plan: unroll.Plan) -> list[Tensor]:
    """What came out, as the states of every depth's rows."""
    parts = state_ND.split([len(plan.first_N), *(len(step.rows) for step in plan.steps[1:])])
    return [parts[0][torch.from_numpy(plan.steps[0].rows).to(state_ND.device, non_blocking=True)], *parts[1:]]


class DepthAttention:
    """`specdec.model.attention.Attention` of rows that lie depth by depth. kernel: as `unroll.attention`."""

    def __init__(self, plan: unroll.Plan, kernel: Any = unroll.attention):
        self.plan = plan
        self.kernel = kernel
        self.max_position = int(positions(plan).max(initial=0))
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def write_kv(self, layer: int, key_NGW: Tensor, value_NGW: Tensor) -> None:
        self.kv[layer] = key_NGW, value_NGW

    def attend(
        self,
        layer: int,
        query_NHW: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if sliding_window is not None and sliding_window > self.max_position:
            sliding_window = None
        is_plain = sliding_window is None and softcap is None
        kernel = self.kernel if is_plain else unroll.masked_attention(sliding_window, softcap)
        scaling = scaling or query_NHW.shape[-1] ** -0.5
        num_tokens = len(self.plan.first_N)
        sizes = [num_tokens, *(len(step.rows) for step in self.plan.steps[1:])]
        key_NGW, value_NGW = self.kv.pop(layer)
        queries = query_NHW.split(sizes)
        keys = key_NGW.split(sizes)
        values = value_NGW.split(sizes)
        first_N = self.plan.first_N
        out = [kernel(queries[0], keys[0], values[0], [], [], np.arange(num_tokens), first_N, scaling)]
        step_key: list[Tensor] = []
        step_value: list[Tensor] = []
        for d, step in enumerate(self.plan.steps[1:], 1):
            if d > 1:
                assert step.from_prev is not None
                kept = torch.from_numpy(step.from_prev).to(query_NHW.device, non_blocking=True)
                step_key = [x[kept] for x in step_key]
                step_value = [x[kept] for x in step_value]
            step_key = [*step_key, keys[d]]
            step_value = [*step_value, values[d]]
            out.append(kernel(queries[d], keys[0], values[0], step_key, step_value, step.rows, first_N, scaling))
        return torch.cat(out)
