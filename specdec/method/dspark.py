"""DSpark (2607.05147): DFlash's block, whose tokens are drawn one after the other with a Markov head.

    logits_k = output layer (h_k) + W2 z_k      h_k: state of the block's token k, which drafts; e = W1[token before it]
    vanilla:  z = e
    gated:    z = sigmoid(gate [h_k; e]) * e
    rnn:      z = tanh(o), s = sigmoid(a) * s + (1 - sigmoid(a)) * tanh(b),    a, b, o = joint [s; e; h_k]
    confidence_k = sigmoid(w [h_k; e])          of the acceptance of token k, given that all before it were accepted

So the block takes one pass, and each token a product of W2, a few percent of that pass. What the confidence reads was known
before token k was drawn, so a sampled token may be kept or cut by it (`specdec.policy.adaptive`). Training
evaluates drafters, and divides the log-odds of the confidence by temperatures that suit what was accepted there, position by
position (`specdec.policy.calibration`); they are saved as `confidence_temperatures`.

Training gives every token the data's token before it. The weights of the output layer and W2 lie side by side, as do h and z,
so that the losses are those of every drafter. Tensors and config keys have the names of DeepSpec's checkpoints.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from specdec.core import Context, Draft, MethodFacts
from specdec.drafter import losses, unroll
from specdec.drafter.batch import Batch
from specdec.drafter.losses import Teacher
from specdec.drafter.tree import Level
from specdec.method import dflash
from specdec.method.dflash import DFlash


class Architecture(dflash.Architecture):
    """As DFlash's, and:

    markov_rank: width of the Markov head.
    markov_head_type: `vanilla` reads the token before; `gated` weighs it by the state, too; `rnn` remembers all tokens before.
    enable_confidence_head: predict the acceptance of every token.
    confidence_head_with_markov: its head reads the token before, too.
    """

    sample_from_anchor: bool = True
    markov_rank: int = Field(256, ge=1)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True


class Objective(dflash.Objective):
    """As DFlash's, and confidence: the weight of the confidence head's cross-entropy. The published .9 of the L1 distance is
    1.8 of tv."""

    loss: losses.Terms = Field({"nll": 0.1, "tv": 1.8})
    confidence: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _knows_acceptance(self) -> Objective:
        if self.confidence and not losses.needs_target_probs(self.loss):
            raise ValueError(
                f"train.objective.confidence={self.confidence} learns the overlap with the target's distribution, which nll "
                "alone does not compute; give confidence=0, or a loss with tv, kl or ce"
            )
        return self


class MarkovHead(nn.Module):
    """What the token before adds to a token's logits: markov_w2 of what `forward` returns.

    num_tokens, num_draft_vocab: of the target, and of the drafter.
    width: of a block's states.
    """

    def __init__(self, kind: str, num_tokens: int, num_draft_vocab: int, rank: int, width: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(num_tokens, rank)
        self.markov_w2 = nn.Linear(rank, num_draft_vocab, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if kind == "rnn" else None

    def forward(self, state_ND: Tensor, prev_N: Tensor, memory_NR: Tensor | None) -> tuple[Tensor, Tensor]:
        """[N, rank] each: what markov_w2 reads, and what the next token remembers.

        state_ND: of the block's tokens.
        prev_N: the tokens before those that they draft.
        memory_NR: of the token before; None: it was committed.
        """
        embedding_NR = self.markov_w1(prev_N)
        if memory_NR is None:
            memory_NR = torch.zeros_like(embedding_NR)
        if self.gate_proj is not None:
            return self.gate_proj(torch.cat([state_ND, embedding_NR], -1)).sigmoid() * embedding_NR, memory_NR
        if self.joint_proj is None:
            return embedding_NR, memory_NR
        keep, new, out = self.joint_proj(torch.cat([memory_NR, embedding_NR, state_ND], -1)).chunk(3, -1)
        memory_NR = torch.lerp(new.tanh(), memory_NR, keep.sigmoid())
        return out.tanh(), memory_NR


class ConfidenceHead(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, x_NF: Tensor) -> Tensor:
        """[N] log-odds."""
        return self.proj(x_NF).squeeze(-1).float().clamp(-40, 40)


class DSpark(DFlash):
    name = "dspark"
    facts = MethodFacts(
        runs_model=True,
        name_marks=("dspark",),
        train_script="dflash",
        mask_key="mask_token_id",
        max_draft_of=dflash.max_draft,
        serving={"vllm": "dspark"},
    )
    architecture_type = Architecture
    objective_type = Objective
    tree_builder = "beam"

    def build(self, config: dict[str, Any]) -> None:
        config = dict(config)
        self.calibrate(config.pop("confidence_temperatures", []))
        super().build(config)
        architecture = Architecture(**config)
        self.width = width = self.shape.hidden_size
        rank = architecture.markov_rank
        num_tokens = self.target.vocab_size
        num_draft_vocab = architecture.draft_vocab_size or num_tokens
        self.markov_head = MarkovHead(architecture.markov_head_type, num_tokens, num_draft_vocab, rank, width)
        self.confidence_reads_token = architecture.confidence_head_with_markov
        num_features = width + rank * self.confidence_reads_token
        self.confidence_head = ConfidenceHead(num_features) if architecture.enable_confidence_head else None

    def draft_logits(self, state_ND: Tensor) -> Tensor:
        """Of states and what the Markov head reads, side by side."""
        return super().draft_logits(state_ND[:, : self.width]) + self.markov_head.markov_w2(state_ND[:, self.width :])

    def confidence(self, state_ND: Tensor, prev_N: Tensor) -> Tensor | None:
        """[N] log-odds that a token is accepted if those before it are."""
        if self.confidence_head is None:
            return None
        if self.confidence_reads_token:
            state_ND = torch.cat([state_ND, self.markov_head.markov_w1(prev_N)], -1)
        log_odds_N: Tensor = self.confidence_head(state_ND)
        return log_odds_N

    def for_training(self, objective: Any, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False) -> None:
        super().for_training(objective, init, feature_sample, warm_start)
        if self.confidence_head is not None:
            self.confidence_head.requires_grad_(objective.confidence > 0)

    # ---------------------------------------------------------------- drafting

    @property
    def predicts_acceptance(self) -> bool:  # type: ignore[override]
        """In a tree a node competes with its siblings, of which the confidence head knows nothing."""
        return self.confidence_head is not None and self.tree is None

    def calibrate(self, temperatures: list[float]) -> None:
        """Divide the log-odds of the confidence at each position by these, and beyond them by the last. Raises ValueError."""
        if not isinstance(temperatures, list) or not all(type(t) in (int, float) and 0 < t < math.inf for t in temperatures):
            raise ValueError(f"confidence_temperatures={temperatures!r} must be a list of positive numbers, one a position")
        self.temperatures = temperatures

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        draft_B = self.draft_lengths(context)
        if not draft_B.any():
            return Draft.empty(len(context.rows), context.last_token_B.device)
        state_ND, layout = self.block_states(context, draft_B)
        state_BKD = layout.padded(state_ND)
        base_BKV = layout.padded(super().draft_logits(state_ND))
        if self.tree is not None:
            return self._propose_tree_of(context, draft_B, state_BKD, base_BKV)
        sampler = self.draft_sampler(context)
        token_B = context.last_token_B
        memory_BR = None
        for k in range(base_BKV.shape[1]):
            log_odds_B = self.confidence(state_BKD[:, k], token_B) if context.return_confidence else None
            if log_odds_B is not None and self.temperatures:
                log_odds_B = log_odds_B / self.temperatures[min(k, len(self.temperatures) - 1)]
            read_BR, memory_BR = self.markov_head(state_BKD[:, k], token_B, memory_BR)
            token_B = sampler.sample(base_BKV[:, k] + self.markov_head.markov_w2(read_BR), log_odds_B)
        return sampler.draft(draft_B)

    def _propose_tree_of(self, context: Context, draft_B: np.ndarray, state_BKD: Tensor, base_BKV: Tensor) -> Draft:
        """A node's distribution follows from its depth, its token and what its ancestors left in memory."""
        count_B = np.ones_like(draft_B)
        read_NR, memory_NR = self.markov_head(state_BKD[:, 0], context.last_token_B, None)

        def expand(level: Level) -> Tensor:
            nonlocal memory_NR, count_B
            at = self._index(level.row_N), level.depth + 1
            above_NR = memory_NR[self._index(level.parent_place(count_B))]
            read_NR, memory_NR = self.markov_head(state_BKD[at], self._index(level.token_N), above_NR)
            count_B = level.count_B
            return base_BKV[at] + self.markov_head.markov_w2(read_NR)

        return self.grower(context, draft_B).grow(base_BKV[:, 0] + self.markov_head.markov_w2(read_NR), expand)

    # ---------------------------------------------------------------- training

    def heads(self) -> list[Tensor | None]:
        weight_VD = self.target.head_rows()[0].to(self.dtype) if self.lm_head is None else self.lm_head.weight
        return [torch.cat([weight_VD, self.markov_head.markov_w2.weight], 1)]

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0, kernel: Any = unroll.attention) -> list[Tensor]:
        memory_AR = None
        joint = []
        for k, (step, state_AD) in enumerate(zip(plan.steps, super().unrolled(batch, plan, seed, kernel), strict=True)):
            if memory_AR is not None:
                memory_AR = memory_AR[self._index(step.from_prev)]
            read_AR, memory_AR = self.markov_head(state_AD, batch.token_N[self._index(step.rows + k)], memory_AR)
            joint.append(torch.cat([state_AD, read_AR], -1))
        return joint

    def auxiliary_loss(
        self, total: Tensor, states: list[Tensor], overlaps: list[Tensor], teacher: Teacher, batch: Batch, plan: unroll.Plan
    ) -> Tensor:
        """The cross-entropy of the confidence with the chance that rejection sampling accepts."""
        if self.confidence_head is None or not self.objective.confidence:
            return total
        weights = self.objective.weights(len(plan.steps))
        for k, (step, state_MF, overlap_M) in enumerate(zip(plan.steps, states, overlaps, strict=True)):
            prev_M = batch.token_N[self._index(step.rows[step.supervised] + k)]
            log_odds_M = self.confidence(state_MF[:, : self.width], prev_M)
            assert log_odds_M is not None
            want_M = overlap_M.to(log_odds_M.dtype).clamp(0, 1)
            loss_M = F.binary_cross_entropy_with_logits(log_odds_M, want_M, reduction="none")
            weight_M = teacher.weight_Q[self._index(step.labelled)]
            total = total + self.objective.confidence * weights[k] * (loss_M * weight_M).sum()
        return total
