"""Medusa (2401.10774): heads on the target's last state, one for every token ahead.

    s = h                                      the target's last state after its final norm
    s <- s + silu(W_ki s + b_ki)               layer i of head k
    logits_k = output layer k (s)

All heads read the state of one position, so all tokens are drafted in one pass, and no head knows what the others drafted.
Tensors and settings have the names of vLLM's class, which is there up to 0.32.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from specdec.checked import Checked
from specdec.checkpoint.native import Checkpoint
from specdec.core import Context, Draft, MethodFacts
from specdec.drafter import unroll
from specdec.drafter.base import Drafter, Init
from specdec.drafter.batch import Batch
from specdec.drafter.trainable import ChainObjective
from specdec.model.target import CausalLM


class Architecture(Checked):
    """The parts of the drafter.

    num_heads: the most tokens of a draft.
    num_hidden_layers: of each head.
    medusa_fc_bias: they have a bias, as in the authors' code.
    original_lm_head: one output layer for all heads, which is the target's unless it is trained; false: each has its own.
    draft_vocab_size: the most frequent tokens of the training data; null: all.
    """

    what: ClassVar[str] = "train.drafter key"

    num_heads: int = Field(3, ge=1)
    num_hidden_layers: int = Field(1, ge=1)
    medusa_fc_bias: bool = True
    original_lm_head: bool = False
    draft_vocab_size: int | None = Field(None, ge=1)


class Objective(ChainObjective):
    """What is minimised, as every drafter of several tokens has it, and:

    step_loss_decay: head k weighs decay^k.
    mask_outside_vocab: rows whose likeliest target token cannot be drafted are left out of the loss.
    """

    step_loss_decay: float = Field(0.8, gt=0)
    mask_outside_vocab: bool = False

    def weights(self, num_steps: int) -> list[float]:
        return [self.step_loss_decay**k for k in range(num_steps)]


class ResidualBlock(nn.Module):
    def __init__(self, width: int, num_layers: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class Medusa(Drafter):
    name = "medusa"
    facts = MethodFacts(
        runs_model=True,
        name_marks=("medusa",),
        train_script="medusa",
        max_draft_key="num_heads",
        defaults_to_max=True,
        serving={"vllm": "medusa"},
        serving_note="vLLM 0.33 has no Medusa any more; 0.32 is the last that loads it.",
    )
    architecture_type = Architecture
    objective_type = Objective
    tree_builder = "best_first"

    @classmethod
    def resolve_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        return Architecture(**architecture).model_dump(exclude={"draft_vocab_size"})

    def build(self, config: dict[str, Any]) -> None:
        architecture = Architecture(**config)
        self.hidden_layers = (self.target.num_layers,)
        self.max_draft_tokens = architecture.num_heads
        self.shares_head = architecture.original_lm_head
        if self.chain_length > architecture.num_heads:
            raise ValueError(
                f"num_speculative_tokens={self.chain_length}, and this drafter has num_heads={architecture.num_heads}; lower it"
            )
        width = self.target.hidden_size
        self.blocks = nn.ModuleList(
            ResidualBlock(width, architecture.num_hidden_layers, architecture.medusa_fc_bias)
            for _ in range(architecture.num_heads)
        )
        self.lm_heads = nn.ModuleList()

    def make_head(self, num_draft_vocab: int) -> None:
        if self.shares_head:
            super().make_head(num_draft_vocab)
        else:
            self.lm_heads.extend(nn.Linear(self.target.hidden_size, num_draft_vocab, bias=False) for _ in self.blocks)

    def init_from_target(self, target: CausalLM) -> None:
        """Every head begins as the target's output layer: its blocks pass the state on."""
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def example_checkpoint(cls, target: CausalLM) -> Checkpoint:
        return cls.init_checkpoint(target, {"num_hidden_layers": 2}, Init(lm_head="random"))

    def output_layers(self) -> list[Any]:
        return list(self.lm_heads) or super().output_layers()

    def heads(self) -> list[Tensor | None]:
        return [head.weight for head in self.output_layers()] or [None]

    def step(self, k: int, state_ND: Tensor) -> Tensor:
        """[N, D] what the output layer reads for the k-th token ahead."""
        state: Tensor = self.blocks[k](state_ND)
        return state

    def head_logits(self, k: int, state_ND: Tensor) -> Tensor:
        return self.lm_heads[k](state_ND) if len(self.lm_heads) else self.draft_logits(state_ND)

    def marginals(self, state_BD: Tensor, count: int) -> list[Tensor]:
        """[B, draft vocabulary] logits of each of the first heads."""
        states = [self.step(k, state_BD) for k in range(count)]
        if len(self.lm_heads):
            return [self.head_logits(k, state) for k, state in enumerate(states)]
        return list(self.head_logits(0, torch.cat(states)).split(len(state_BD)))  # the one output layer is read once

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        draft_B = self.draft_lengths(context)
        if not draft_B.any():
            return Draft.empty(len(context.rows), context.last_token_B.device)
        assert context.hidden is not None
        state_BD = self.last_state(torch.cat([states[-1:, -1] for states in context.hidden]))
        logits = self.marginals(state_BD, int(draft_B.max()))
        if self.tree is not None:
            grower = self.grower(context, draft_B)
            return grower.grow(logits[0], lambda level: logits[level.depth + 1][self._index(level.row_N)])
        sampler = self.draft_sampler(context)
        for logits_BV in logits:
            sampler.sample(logits_BV)
        return sampler.draft(draft_B)

    def num_steps(self, progress: float) -> int:
        return len(self.blocks)

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0) -> list[Tensor]:
        state_ND = self.last_state(batch.hidden(self.hidden_layers)[:, -1])
        return [self.step(k, state_ND[self._index(step.rows)]) for k, step in enumerate(plan.steps)]
