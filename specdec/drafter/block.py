"""Drafters that draft a block in one pass, from mask tokens (PARD 2504.18583, P-EAGLE 2602.01469).

Drafting: behind the entries of a row's newly committed tokens come mask places. One forward runs over both, and the last places
of the row draft a token each: the last committed entry and the masks behind it, or the masks alone. Places do not see what the
places before them drafted, so greedy drafts suit such a drafter best.

Training: rows are those of `specdec.drafter.unroll`, and a step is a depth. At depth 0 a row is an entry of the data, at depth
d the d-th mask behind it, d positions further on, which sees what the row saw and the masks in between. All depths go through
the drafter together, laid end to end: every entry of the batch, then the rows of depth 1, 2, ... Deeper ones are sub-sampled
(PARD's conditional drop, COD), since most of what they teach the others teach too.

An entry is what the drafter reads for one token: the token, or the pair of token and target state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from specdec import sampling
from specdec.core import Context, Draft
from specdec.drafter import unroll
from specdec.drafter.batch import Batch
from specdec.drafter.trainable import ChainObjective, UnrolledDrafter
from specdec.drafter.tree import Level


class DepthObjective(ChainObjective):
    """What is trained at which depth.

    num_depths: tokens that are trained, that of the row itself included.
    down_sample_ratio: each depth has this share of the rows of the depth before; down_sample_ratio_min: at least this of all.
    step_loss_decay: depth d weighs decay^d.
    depth_warmup: for this share of the run there is depth 0 alone.
    """

    num_depths: int = Field(8, ge=1)
    down_sample_ratio: float = Field(0.7, gt=0, le=1)
    down_sample_ratio_min: float = Field(0.2, ge=0, le=1)
    step_loss_decay: float = Field(1.0, gt=0)
    depth_warmup: float = Field(0.0, ge=0, le=1)

    def steps_at(self, progress: float) -> int:
        return 1 if progress < self.depth_warmup else self.num_depths

    def weights(self, num_steps: int) -> list[float]:
        return [self.step_loss_decay**k for k in range(num_steps)]


class BlockLayout:
    """The places of one pass, rows end to end: each row's committed entries, then its masks. The last ones draft a token each.

    num_committed_B, num_masks_B: entries and masks of each row.
    draft_B: tokens that each row drafts.
    device: of the drafter.
    num_unused_B: masks at the end that draft nothing; none unless given.
    """

    def __init__(
        self,
        num_committed_B: np.ndarray,
        num_masks_B: np.ndarray,
        draft_B: np.ndarray,
        device: torch.device,
        num_unused_B: np.ndarray | int = 0,
    ):
        self.draft_B = draft_B
        self.length_B = num_committed_B + num_masks_B
        end_B = np.cumsum(self.length_B)
        committed_row_N = np.repeat(np.arange(len(draft_B)), num_committed_B)
        shift_B = end_B - self.length_B - (np.cumsum(num_committed_B) - num_committed_B)
        self.committed_N = np.arange(len(committed_row_N)) + shift_B[committed_row_N]  # places of the committed entries
        # of every drafted token: the place that drafts it, its row and its position in the draft
        row_N, position_N = np.nonzero(np.arange(draft_B.max(initial=0)) < draft_B[:, None])
        self.query_N = (end_B - num_unused_B - draft_B)[row_N] + position_N
        self.drafted_at = tuple(torch.from_numpy(i).to(device, non_blocking=True) for i in (row_N, position_N))

    @property
    def num_places(self) -> int:
        return int(self.length_B.sum())

    def padded(self, x_N: Tensor, fill: bool | int = 0) -> Tensor:
        """[B, K, ...] of what every drafted token has."""
        shape = (len(self.draft_B), int(self.draft_B.max(initial=0)), *x_N.shape[1:])
        return x_N.new_full(shape, fill).index_put_(self.drafted_at, x_N)

    def put_committed(self, places: Tensor, committed: Tensor) -> Tensor:
        """places [num_places, ...], which holds masks, with the committed entries in theirs."""
        return places.index_copy_(0, torch.from_numpy(self.committed_N).to(places.device, non_blocking=True), committed)


class BlockDrafter(UnrolledDrafter):
    """Drafting of a drafter that drafts a block in one pass. A method names it, or `DepthDrafter`, before its family, as in
    `class PEagle(DepthDrafter, Eagle3)`, and adds `block_logits`."""

    tree_builder = "best_first"

    def block_logits(self, context: Context, draft_B: np.ndarray) -> tuple[Tensor, BlockLayout]:
        """One forward over committed entries and masks: logits of the layout's queries, [N, draft vocabulary]."""
        raise NotImplementedError

    # ---------------------------------------------------------------- drafting

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """All tokens of a draft from one pass. Probabilistic: each from its own distribution, independent of the others."""
        draft_B = self.draft_lengths(context)
        if not draft_B.any():
            return Draft.empty(len(context.rows), context.last_token_B.device)
        logits_NV, layout = self.block_logits(context, draft_B)
        if self.tree is not None:
            return self._tree_of(context, draft_B, logits_NV)
        temperature_N = context.temperature_B[layout.drafted_at[0]]
        uniform_N = None
        if self.probabilistic:
            assert context.uniform_BK is not None
            uniform_N = context.uniform_BK[layout.drafted_at]
        token_N, q_NV, max_logit_N = sampling.sample(
            logits_NV, temperature_N, uniform_N, self.to_target_vocab, context.shares_noise
        )
        padded = layout.padded
        confidence_BKF = None
        if context.return_confidence:
            confidence_BKF = padded(sampling.log_odds(logits_NV, temperature_N).unsqueeze(1))
        return Draft(
            padded(token_N),
            torch.from_numpy(draft_B),
            None if q_NV is None else padded(q_NV),
            confidence_BKF=confidence_BKF,
            finite_BK=padded(sampling.finite(max_logit_N), fill=True),
        )

    def _tree_of(self, context: Context, draft_B: np.ndarray, logits_NV: Tensor) -> Draft:
        """Whatever a node is, what follows it depends on its depth alone."""
        first_B = np.cumsum(draft_B) - draft_B

        def logits_of(level: Level) -> Tensor:
            return logits_NV[self._index(first_B[level.row_N] + level.depth + 1)]

        first_NV = logits_NV[self._index(first_B.clip(max=len(logits_NV) - 1))]
        return self.grower(context, draft_B).grow(first_NV, logits_of)

    def limit_drafts(self, num_depths: int | None, name: str) -> None:
        """Drafts are not longer than those that the drafter was trained for; None: not known. Raises ValueError."""
        if num_depths is not None and self.chain_length > num_depths:
            raise ValueError(
                f"num_speculative_tokens={self.chain_length} is over the {num_depths} that {name} was trained for; lower it"
            )
        self.max_draft_tokens = num_depths


class DepthDrafter(BlockDrafter):
    """A block drafter that learns from masks at several depths, each of which sees what is before it."""

    def for_training(self, objective: Any, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False) -> None:
        super().for_training(objective, init, feature_sample, warm_start)
        if self.chain_length > objective.num_depths:
            raise ValueError(
                f"method.num_speculative_tokens={self.chain_length}, which decodes while training, is over "
                f"train.objective.num_depths={objective.num_depths}; lower it"
            )
        self.config = self.config | {"num_depths": objective.num_depths}

    def plan(self, batch: Batch, num_steps: int, seed: int | str) -> unroll.Plan:
        """Rows of every depth; those of a sample are drawn anew in every step of the run."""
        num_steps_N = unroll.sample_num_steps(
            batch.ids, batch.length_B, num_steps, self.objective.down_sample_ratio, self.objective.down_sample_ratio_min, seed
        )
        return unroll.plan(batch.length_B, batch.mask_N, num_steps, self.label_offset, num_steps_N)


# ---------------------------------------------------------------- depths laid end to end


def num_masks(plan: unroll.Plan) -> int:
    return sum(len(step.rows) for step in plan.steps[1:])


def positions(plan: unroll.Plan) -> np.ndarray:
    """Positions of all entries and all masks in their documents."""
    position_N = np.arange(len(plan.first_N)) - plan.first_N
    return np.concatenate([position_N, *(position_N[step.rows] + d for d, step in enumerate(plan.steps[1:], 1))])


def by_depth(state_ND: Tensor, plan: unroll.Plan) -> list[Tensor]:
    """[A, D] states of every depth's rows, from those of all entries and all masks."""
    entry_ND, *depths = state_ND.split([len(plan.first_N), *(len(step.rows) for step in plan.steps[1:])])
    return [entry_ND[torch.from_numpy(plan.steps[0].rows).to(state_ND.device, non_blocking=True)], *depths]


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
        first_N = self.plan.first_N
        sizes = [len(first_N), *(len(step.rows) for step in self.plan.steps[1:])]
        key_NGW, value_NGW = self.kv.pop(layer)
        queries = query_NHW.split(sizes)
        keys = key_NGW.split(sizes)
        values = value_NGW.split(sizes)
        out = [kernel(queries[0], keys[0], values[0], [], [], np.arange(len(first_N)), first_N, scaling)]
        step_key: list[Tensor] = []
        step_value: list[Tensor] = []
        for d, step in enumerate(self.plan.steps[1:], 1):
            if d > 1:
                assert step.from_prev is not None
                from_prev = torch.from_numpy(step.from_prev).to(query_NHW.device, non_blocking=True)
                step_key = [x[from_prev] for x in step_key]
                step_value = [x[from_prev] for x in step_value]
            step_key.append(keys[d])
            step_value.append(values[d])
            out.append(kernel(queries[d], keys[0], values[0], step_key, step_value, step.rows, first_N, scaling))
        return torch.cat(out)
