"""P-EAGLE (2602.01469): EAGLE-3 that makes all its tokens in one pass, `eagle3` with `parallel_drafting` in vLLM.

After the pairs (token, target state) of a row come K-1 places with the embedding of a mask token and a learned state,
`mask_hidden`, that takes the place of the target's; the last pair and these places each draft one token. Positions do not see
what the places before them drafted, so greedy drafts suit it best. Training: `specdec.drafter.block`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from specdec.core import Context, Draft, MethodFacts, Serving
from specdec.drafter import block, losses, unroll
from specdec.drafter.batch import Batch
from specdec.drafter.block import Depths
from specdec.method import eagle3
from specdec.method.eagle3 import Eagle3
from specdec.model.target import CausalLM


class Architecture(eagle3.Architecture):
    """As EAGLE-3's, and mask_token_id: whose embedding stands for tokens to come; one that the data never has."""

    mask_token_id: int | None = Field(None, ge=0)


class Objective(Depths):
    """As that of every drafter that makes its tokens in one pass; mask_outside_vocab: as in EAGLE-3."""

    loss: losses.Terms = Field({"ce": 1.0})
    mask_outside_vocab: bool = True


class PEagle(Eagle3):
    name = "peagle"
    facts = MethodFacts(
        runs_model=True,
        parallel_of="eagle3",
        parallel_only=True,
        train_script="eagle",
        mask_key="mask_token_id",
        max_draft_key="num_depths",
        serving={"speculators": Serving("speculators", "eagle3"), "vllm": Serving("raw_eagle3", "eagle3")},
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
        self.max_draft_tokens = config.get("num_depths")
        if self.max_draft_tokens is not None and self.num_speculative_tokens > self.max_draft_tokens:
            raise ValueError(
                f"num_speculative_tokens={self.num_speculative_tokens} is over the {self.max_draft_tokens} that this drafter was "
                "trained for; lower it"
            )
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
        draft_B = self.draft_lengths(context)
        if not draft_B.any():
            return Draft.empty(len(context.rows), context.last_token_B.device)
        start_B, pairs_B, token_N, hidden_ND = self.pending_pairs(context, draft_B)
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
        sampler = self.draft_sampler(context)
        for state_BD in state_ND.unflatten(0, asked_BK.shape).unbind(1):
            sampler.sample(self.draft_logits(state_BD))
        return sampler.draft(draft_B)

    # ---------------------------------------------------------------- training

    def for_training(self, objective: Any, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False) -> None:
        """`mask_hidden` begins as the mean of the target's states: where nothing is known, what is usual."""
        super().for_training(objective, init, feature_sample, warm_start)
        objective.check(self.num_speculative_tokens)
        self.config["num_depths"] = objective.num_depths
        if feature_sample is not None and not warm_start:
            with torch.no_grad():
                self.mask_hidden.copy_(feature_sample.float().mean(0).view_as(self.mask_hidden))

    def plan(self, batch: Batch, num_steps: int, seed: int | str) -> unroll.Plan:
        plan: unroll.Plan = self.objective.plan(batch, num_steps, self.label_offset, seed)
        return plan

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, kernel: Any = unroll.attention) -> list[Tensor]:
        """All depths in one pass: the rows of depth 0 are those of the whole batch, the keys of all others."""
        embedding, hidden = self.masks(block.num_masks(plan))
        embedding = torch.cat([self.embed(batch.token_N.roll(-1)), embedding])
        hidden = torch.cat([self.fuse(batch.hidden(self.hidden_layers)), hidden])
        state, _ = self.step(embedding, hidden, self._index(block.positions(plan)), block.DepthAttention(plan, kernel))
        return block.by_depth(state, plan)
