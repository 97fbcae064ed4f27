"""P-EAGLE (2602.01469): EAGLE-3 that makes all its tokens in one pass, `eagle3` with `parallel_drafting` in vLLM.

After the pairs (token, target state) of a row come K-1 places with the embedding of a mask token and a learned state,
`mask_hidden`, that takes the place of the target's; the last pair and these places each draft one token. Positions do not see
what the places before them drafted, so greedy drafts suit it best. Training sub-samples the deeper places (COD, 2504.18583), in
the rows and with the attention of `specdec.training.unroll`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from specdec.chain import Attend
from specdec.core import Checked, Context, Draft
from specdec.drafter import nothing
from specdec.method import eagle3
from specdec.method.eagle3 import Eagle3
from specdec.target import CausalLM
from specdec.training import losses, unroll
from specdec.training.features import Batch


class Architecture(eagle3.Architecture):
    """As EAGLE-3's, and mask_token_id: whose embedding stands for tokens to come; one that the data never has."""

    mask_token_id: int | None = Field(None, ge=0)


class Objective(Checked):
    """num_depths: places that are trained, the pair's own included; down_sample_ratio: each keeps this share of the rows of the
    one before, down_sample_ratio_min: and no less than this of all; step_loss_decay: depth d weighs decay^d; loss: weights of
    ce, kl, tv and nll; mask_outside_vocab: as in EAGLE-3."""

    what: ClassVar[str] = "train.objective key"

    num_depths: int = Field(8, ge=1)
    down_sample_ratio: float = Field(0.7, gt=0, le=1)
    down_sample_ratio_min: float = Field(0.2, ge=0, le=1)
    step_loss_decay: float = Field(1.0, gt=0)
    loss: losses.Terms = Field({"ce": 1.0})
    mask_outside_vocab: bool = True

    def steps_at(self, progress: float) -> int:
        return self.num_depths

    def weights(self, num_steps: int) -> list[float]:
        return [self.step_loss_decay**k for k in range(num_steps)]


class PEagle(Eagle3):
    name = "peagle"
    objective_type = Objective
    architecture_type = Architecture

    @classmethod
    def resolved(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        config = super().resolved(target, architecture)
        if config["mask_token_id"] is None:
            config["mask_token_id"] = target.vocab_size - 1
        return config

    def build(self, config: dict[str, Any]) -> None:
        super().build(config)
        mask, last = config.get("mask_token_id"), self.target.vocab_size - 1
        if not isinstance(mask, int) or not 0 <= mask <= last:
            raise ValueError(f"mask_token_id={mask} is outside 0..{last}, the rows of the target's embedding")
        self.mask_token_id = mask
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(self.hidden_layers) * self.target.hidden_size))

    def masks(self, count: int) -> tuple[Tensor, Tensor]:
        """Embeddings and fused states [count, D] of that many mask places."""
        token_N = torch.full((count,), self.mask_token_id, device=self.target.device)
        hidden = self.mask_hidden.view(1, len(self.hidden_layers), -1)
        return self.embed(token_N), self.fuse(hidden).repeat(count, 1)

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """All tokens of a draft from one pass. Probabilistic: each from its own law, which knows nothing of the others."""
        draft_B = self.room(context)
        if not draft_B.any():
            return nothing(context)
        start_B, pairs_B, token_N, hidden_ND = self.caught_up(context, draft_B)
        count_B = pairs_B + np.clip(draft_B - 1, 0, None)
        # pairs and mask places of each row, one behind the other
        place_B = np.cumsum(count_B) - count_B
        row_of_pair = np.repeat(np.arange(len(count_B)), pairs_B)
        of_pairs = np.arange(len(row_of_pair)) - np.repeat(np.cumsum(pairs_B) - pairs_B, pairs_B) + place_B[row_of_pair]
        embedding, hidden = self.masks(int(count_B.sum()))
        pair_N = torch.from_numpy(of_pairs).to(token_N.device, non_blocking=True)
        embedding[pair_N], hidden[pair_N] = self.embed(token_N), hidden_ND
        num_draft = int(draft_B.max())
        asked_BK = (place_B + pairs_B - 1)[:, None] + np.arange(num_draft).clip(max=np.maximum(draft_B - 1, 0)[:, None])
        state_ND, _ = self.forward_pairs(
            context.rows, embedding, hidden, start_B, count_B, asked_BK.clip(0, count_B.sum() - 1).flatten()
        )
        state_BKD = state_ND.unflatten(0, asked_BK.shape)
        drafted, laws = zip(*(self.drawn(state_BKD[:, k], context, k) for k in range(num_draft)), strict=True)
        q_BKV = torch.stack(laws, 1) if self.probabilistic else None
        return Draft(torch.stack(drafted, 1), torch.from_numpy(draft_B), q_BKV)

    # ---------------------------------------------------------------- training

    def for_training(self, objective: Checked, init: Any, statistics: Tensor | None = None, warm: bool = False) -> None:
        """`mask_hidden` begins as the mean of the target's states: where nothing is known, what is usual."""
        super().for_training(objective, init, statistics, warm)
        if statistics is not None and not warm:
            with torch.no_grad():
                self.mask_hidden.copy_(statistics.float().mean(0).view_as(self.mask_hidden))

    def plan(self, batch: Batch, num_steps: int, seed: int | str) -> unroll.Plan:
        """Rows of every depth; a sample's are drawn anew in every step of the run."""
        own: Objective = self.objective
        shares = own.down_sample_ratio, own.down_sample_ratio_min
        reach_N = unroll.reach(batch.ids, batch.length_B, num_steps, *shares, seed)
        return unroll.plan(batch.length_B, batch.mask_N, num_steps, self.lead, reach_N)

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, attention: Any = unroll.attention) -> list[Tensor]:
        """All depths in one pass: the rows of depth 0 are those of the whole batch, the keys of all others."""
        first_N, num_tokens = plan.first_A, len(batch.token_N)
        within_N = np.arange(num_tokens) - first_N
        depths = [step.rows for step in plan.steps[1:]]
        position_N = self._index(np.concatenate([within_N, *(within_N[rows] + d for d, rows in enumerate(depths, 1))]))
        embedding, hidden = self.masks(sum(map(len, depths)))
        embedding = torch.cat([self.embed(batch.token_N.roll(-1)), embedding])
        hidden = torch.cat([self.fuse(batch.hidden(self.hidden_layers)), hidden])
        state, _ = self.step(embedding, hidden, position_N, in_depths(plan, num_tokens, attention))
        parts = state.split([num_tokens, *map(len, depths)])
        return [parts[0][self._index(plan.steps[0].rows)], *parts[1:]]


def in_depths(plan: unroll.Plan, num_tokens: int, attention: Any) -> Attend:
    """Attention of rows that lie depth by depth, end to end: all tokens, then the rows of depth 1, 2, ... of the plan. A row
    sees the tokens up to its own place, and its own mask places at lesser depths."""
    sizes = [num_tokens, *(len(step.rows) for step in plan.steps[1:])]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        queries, keys, values = query.split(sizes), key.split(sizes), value.split(sizes)
        every, first_N = np.arange(num_tokens), plan.first_A
        out = [attention(queries[0], keys[0], values[0], [], [], every, first_N, scaling)]
        own_key: list[Tensor] = []
        own_value: list[Tensor] = []
        for d, step in enumerate(plan.steps[1:], 1):
            if d > 1:
                kept = torch.from_numpy(step.kept).to(query.device, non_blocking=True)
                own_key, own_value = [x[kept] for x in own_key], [x[kept] for x in own_value]
            own_key, own_value = [*own_key, keys[d]], [*own_value, values[d]]
            out.append(attention(queries[d], keys[0], values[0], own_key, own_value, step.rows, first_N, scaling))
        return torch.cat(out)

    return attend
