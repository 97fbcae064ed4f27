"""P-EAGLE (2602.01469): EAGLE-3 that drafts a block in one pass, `eagle3` with `parallel_drafting` in vLLM.

A row's entries are the pairs (token, target state) of EAGLE-3. A mask has the embedding of a mask token and a learned state,
`mask_hidden`, in place of the target's; the last pair and K-1 masks draft a token each. The rest: `specdec.drafter.block`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from specdec.core import Context, MethodFacts
from specdec.drafter import block, losses, unroll
from specdec.drafter.batch import Batch
from specdec.drafter.block import BlockLayout, DepthDrafter, DepthObjective
from specdec.method import eagle3
from specdec.method.eagle3 import Eagle3
from specdec.model.target import CausalLM


class Architecture(eagle3.Architecture):
    """As EAGLE-3's. mask_token_id: the token whose embedding masks have; one that the data never has."""

    mask_token_id: int | None = Field(None, ge=0)


class Objective(DepthObjective):
    """As that of every drafter that drafts a block in one pass; mask_outside_vocab: as in EAGLE-3."""

    loss: losses.Terms = Field({"ce": 1.0})
    mask_outside_vocab: bool = True


class PEagle(DepthDrafter, Eagle3):
    name = "peagle"
    facts = MethodFacts(
        runs_model=True,
        parallel_of="eagle3",
        parallel_only=True,
        train_script="eagle",
        mask_key="mask_token_id",
        max_draft_key="num_depths",
        serving={"vllm": "eagle3"},
    )
    objective_type = Objective
    architecture_type = Architecture

    @classmethod
    def resolve_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        config = super().resolve_config(target, architecture)
        if config["mask_token_id"] is None:
            config["mask_token_id"] = target.vocab_size - 1
        return config

    def build(self, config: dict[str, Any]) -> None:
        super().build({key: value for key, value in config.items() if key != "num_depths"})
        self.limit_drafts(config.get("num_depths"), "this drafter")
        mask = config.get("mask_token_id")
        last = self.target.vocab_size - 1
        if not isinstance(mask, int) or not 0 <= mask <= last:
            raise ValueError(f"mask_token_id={mask} is outside 0..{last}, the rows of the target's embedding")
        self.mask_token_id = mask
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(self.hidden_layers) * self.target.hidden_size))

    def masks(self, count: int) -> tuple[Tensor, Tensor]:
        """Embeddings and fused states [count, D] of masks."""
        token_N = torch.full((count,), self.mask_token_id, device=self.target.device)
        hidden_1TD = self.mask_hidden.view(1, len(self.hidden_layers), -1)
        return self.embed(token_N), self.fuse(hidden_1TD).repeat(count, 1)

    def block_logits(self, context: Context, draft_B: np.ndarray) -> tuple[Tensor, BlockLayout]:
        start_B, num_pairs_B, token_N, hidden_ND = self.pending_pairs(context, draft_B)
        layout = BlockLayout(num_pairs_B, np.maximum(draft_B - 1, 0), draft_B, self.target.device)
        mask_embedding_ND, mask_hidden_ND = self.masks(layout.num_places)
        embedding_ND = layout.put_committed(mask_embedding_ND, self.embed(token_N))
        hidden_ND = layout.put_committed(mask_hidden_ND, hidden_ND)
        state_ND, _ = self.forward_pairs(context.rows, embedding_ND, hidden_ND, start_B, layout.length_B, layout.query_N)
        return self.draft_logits(state_ND), layout

    # ---------------------------------------------------------------- training

    def for_training(self, objective: Any, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False) -> None:
        """`mask_hidden` begins as the mean of the target's states."""
        super().for_training(objective, init, feature_sample, warm_start)
        if feature_sample is not None and not warm_start:
            with torch.no_grad():
                self.mask_hidden.copy_(feature_sample.float().mean(0).view_as(self.mask_hidden))

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, kernel: Any = unroll.attention) -> list[Tensor]:
        """All depths in one pass: the rows of depth 0 are those of the whole batch, which are keys to all others."""
        mask_embedding_ND, mask_hidden_ND = self.masks(block.num_masks(plan))
        embedding_ND = torch.cat([self.embed(batch.token_N.roll(-1)), mask_embedding_ND])
        hidden_ND = torch.cat([self.fuse(batch.hidden(self.hidden_layers)), mask_hidden_ND])
        position_N = self._index(block.positions(plan))
        state_ND, _ = self.step(embedding_ND, hidden_ND, position_N, block.DepthAttention(plan, kernel))
        return block.by_depth(state_ND, plan)
