"""What a drafter's loss consists of, whatever the drafter: which rows learn, what the target says there, how it is counted.

A family says how its states come about (`unrolled`), which rows take part (`plan`) and which output layers read the states
(`heads`). Rows, steps and shape letters are those of `specdec.drafter.unroll`, losses those of `specdec.drafter.losses`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from specdec.core import MethodFacts
from specdec.drafter import losses, unroll
from specdec.drafter.batch import Batch
from specdec.drafter.losses import Teacher
from specdec.model.target import CausalLM


class TrainableDrafter(nn.Module):
    """objective: `weights(num_steps)`, `loss` (a mix of terms), `mask_outside_vocab`, and mostly `steps_at(progress)`. lead:
    row p predicts token p + lead + k at step k."""

    facts: ClassVar[MethodFacts]
    target: CausalLM
    objective: Any
    shared: dict[str, Any]  # frozen parts of the target, and what follows from a config: not registered
    label_offset: ClassVar[int] = 2
    num_speculative_tokens: int
    max_draft_tokens: int | None = None  # of a draft, if the checkpoint limits it

    def draft_up_to(self, num_tokens: int) -> None:
        """Draft that many tokens from now on, or as many as the checkpoint allows."""
        self.num_speculative_tokens = min(num_tokens, self.max_draft_tokens or num_tokens)

    # ---------------------------------------------------------------- what a family adds

    def unrolled(self, batch: Batch, plan: unroll.Plan, seed: int | str = 0) -> list[Tensor]:
        """[A, D] states for the output layer at every step, of the rows of the plan."""
        raise NotImplementedError

    def heads(self) -> list[Tensor | None]:
        """The weight of the output layer, or one for every step; None is the target's, frozen."""
        raise NotImplementedError

    def num_steps(self, progress: float) -> int:
        """Unrolled steps at this point of the run, 0 to 1."""
        steps: int = self.objective.steps_at(progress)
        return steps

    def plan(self, batch: Batch, num_steps: int, seed: int | str) -> unroll.Plan:
        """The rows of every step."""
        return unroll.plan(batch.length_B, batch.mask_N, num_steps, self.label_offset)

    def needs_target(self, objective: Any) -> bool:
        """Whether training by this objective needs the target's features, or the data's tokens alone."""
        return True

    @property
    def vocab_ids(self) -> Tensor | None:
        """[draft vocabulary] target ids; None if all can be drafted."""
        return None

    scale_draft_logits: losses.ScaleLogits | None = None  # what the drafter's own architecture does to its logits

    def auxiliary_loss(self, total: Tensor, state_MD: Tensor, teacher: Teacher, plan: unroll.Plan) -> Tensor:
        """What a method adds to the loss; nothing here. state_MD: the supervised states of the first step."""
        return total

    # ---------------------------------------------------------------- the loss

    def forward(self, batch: Batch, progress: float = 1.0, seed: int | str = 0) -> tuple[Tensor, Tensor]:
        """`loss`, under the name that data-parallel wrappers call."""
        return self.loss(batch, progress, seed)

    def loss(self, batch: Batch, progress: float = 1.0, seed: int | str = 0) -> tuple[Tensor, Tensor]:
        """Sum of the losses of all supervised rows and steps, weighed by step; [K, 7] sums per step, for metrics.

        progress: how much of the run is behind, 0 to 1; seed: of what is random, if anything is.
        """
        num_steps = self.num_steps(progress)
        plan = self.plan(batch, num_steps, seed)
        if not len(plan.labelled):  # nothing to learn from; other processes wait for gradients all the same
            nothing = sum(
                (p.sum() * 0.0 for p in self.parameters() if p.requires_grad), torch.zeros((), device=self.target.device)
            )
            return nothing, torch.zeros(num_steps, 7, device=self.target.device)
        states = self.unrolled(batch, plan, seed)
        supervised = [
            state[self._index(step.supervised)] if len(step.supervised) < len(state) else state
            for state, step in zip(states, plan.steps, strict=True)
        ]
        teacher, weights, heads = self.teacher(batch, plan), self.objective.weights(num_steps), self.heads()
        # one output layer for all steps shares the target's law between them; else each step makes it anew
        groups = [slice(0, num_steps)] if len(heads) == 1 else [slice(k, k + 1) for k in range(num_steps)]
        total = torch.zeros((), device=self.target.device)
        sums: list[Tensor] = []
        hits: list[Tensor] = []
        for own, given in zip(groups, heads, strict=False):
            head = teacher.weight_VD if given is None else given
            assert head is not None
            labelled = [step.labelled for step in plan.steps[own]]
            part, of_steps, hit = losses.distill(
                supervised[own], labelled, head, teacher, weights[own], self.objective.loss, self.scale_draft_logits
            )
            total, sums, hits = total + part, [*sums, of_steps], [*hits, *hit]
        return self.auxiliary_loss(total, supervised[0], teacher, plan), torch.cat(
            [torch.cat(sums), self._chains(hits, plan)], 1
        )

    @torch.no_grad()
    def teacher(self, batch: Batch, plan: unroll.Plan) -> Teacher:
        """The target's law on the labelled positions; of a batch without hidden states, the data's tokens alone."""
        place = self._index(plan.labelled)
        token = batch.token_N[place + 1]
        label = token if batch.argmax_N is None else batch.argmax_N[place]
        if (ids := self.vocab_ids) is not None:
            if "draft_index" not in self.shared:
                index = torch.full((self.target.vocab_size,), -1, dtype=torch.int64, device=self.target.device)
                index[ids] = torch.arange(len(ids), device=self.target.device)
                self.shared["draft_index"] = index
            label, token = self.shared["draft_index"][label], self.shared["draft_index"][token]
        count_Q = torch.ones(len(label), device=label.device)
        if batch.weight_B is not None:
            count_Q = self._index(batch.weight_B.repeat(batch.length_B))[place].float()
        if self.objective.mask_outside_vocab:
            count_Q = count_Q * (label >= 0)
        if batch.hidden_NTD is None or batch.logsumexp_N is None:
            return Teacher(None, None, None, self.target.scale_logits, None, label, token, count_Q)
        last = batch.hidden([self.target.num_layers])[:, 0][place]
        with torch.autocast(last.device.type, enabled=False):
            state_QD = self.target.final_norm(last.to(self.target.dtype))
        if "head" not in self.shared:
            weight, bias = self.target.head_rows(ids)
            self.shared["head"] = weight.clone() if ids is not None else weight, bias
        weight_VD, bias_V = self.shared["head"]
        return Teacher(state_QD, weight_VD, bias_V, self.target.scale_logits, batch.logsumexp_N[place], label, token, count_Q)

    def _chains(self, hits: list[Tensor], plan: unroll.Plan) -> Tensor:
        """[K, 3] per step: rows whose tokens were all hits up to here, rows whose earlier ones were, and rows with all
        steps."""
        counts = []
        whole: Any = None
        joint: Any = None
        for hit, step in zip(hits, plan.steps, strict=True):
            if whole is None:
                reached, whole = torch.ones_like(hit), np.ones(len(hit), dtype=bool)
            else:
                before = step.prev_match.clip(0)
                whole = (step.prev_match >= 0) & whole[before] if len(whole) else np.zeros(len(hit), dtype=bool)
                reached = joint[self._index(before)] & self._index(whole) if len(joint) else torch.zeros_like(hit)
            joint = hit & reached
            counts.append(torch.stack([joint.sum(), reached.sum(), torch.full_like(joint.sum(), int(whole.sum()))]))
        return torch.stack(counts).float()

    def _index(self, values: np.ndarray | None) -> Tensor:
        assert values is not None
        return torch.from_numpy(values).to(self.target.device, non_blocking=True)
