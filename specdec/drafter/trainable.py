"""What training asks of a drafter (`TrainableDrafter`), and the loss that all of them share (`UnrolledDrafter`).

A method adds how its hidden states are computed (`unrolled`), which rows take part (`plan`), and which output layers read the
states (`heads`). Rows, steps and their shape letters: `specdec.drafter.unroll`; losses and labels: `specdec.drafter.losses`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from specdec.checked import Checked
from specdec.checkpoint.native import Checkpoint
from specdec.core import Context, MethodFacts
from specdec.drafter import losses, tree, unroll
from specdec.drafter.batch import Batch
from specdec.drafter.losses import LossSums, Rows, RowSums, Teacher
from specdec.drafter.tree import Grower, TreePlan
from specdec.model.target import CausalLM


@runtime_checkable
class TrainableDrafter(Protocol):
    """A drafter as `specdec.training` sees it: an nn.Module that computes its loss, from recipe to checkpoint."""

    name: ClassVar[str]  # of the method
    facts: ClassVar[MethodFacts]
    architecture_type: ClassVar[type[Checked]]  # keys of train.drafter
    objective_type: ClassVar[type[Checked]]  # keys of train.objective
    init_type: ClassVar[type[Checked]]  # keys of train.init
    target: CausalLM
    hidden_layers: tuple[int, ...]  # target layers whose states it reads; () reads tokens alone

    def __init__(self, target: CausalLM, model: Checkpoint, num_speculative_tokens: int, **settings: Any): ...

    @classmethod
    def load_checkpoint(cls, target: CausalLM, name: str, revision: str | None) -> Checkpoint:
        """The checkpoint of that name, in whatever format it is."""
        ...

    @classmethod
    def init_checkpoint(
        cls, target: CausalLM, architecture: dict[str, Any], init: Any, vocab_ids: np.ndarray | None = None, seed: int = 0
    ) -> Checkpoint:
        """A new drafter."""
        ...

    @classmethod
    def required_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        """The config that a recipe requires of a checkpoint to start from."""
        ...

    def needs_target(self, objective: Any) -> bool:
        """Whether the objective reads the target's features, or the data's tokens alone."""
        ...

    def for_training(self, objective: Any, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False) -> None:
        """Get ready for training: float32 weights that gradients reach."""
        ...

    def num_supervised(self, mask_n: np.ndarray) -> int:
        """Supervised tokens of a sample with this loss mask."""
        ...

    def __call__(self, batch: Batch, progress: float = 1.0, seed: int | str = 0) -> tuple[Tensor, LossSums]:
        """The loss of a batch."""
        ...

    def write(self, directory: Path, state: dict[str, Tensor], provenance: dict[str, Any], card: str) -> None:
        """Save a checkpoint with these weights into an existing directory."""
        ...

    # of nn.Module
    def train(self, mode: bool = True) -> Any: ...
    def parameters(self) -> Any: ...
    def named_parameters(self) -> Any: ...
    def state_dict(self) -> Any: ...


class Objective(Checked):
    """What is minimised.

    loss: weights of the losses of `specdec.drafter.losses`.
    focus: rejected: tokens where a draft token was rejected when the data were made weigh focus_weight; null: all weigh 1
        (Draft-OPD, 2605.29343, replays rejections).
    """

    what: ClassVar[str] = "train.objective key"

    loss: losses.Terms = Field({"nll": 1.0})
    focus: Literal["rejected"] | None = None
    focus_weight: float = Field(4.0, ge=0)

    @property
    def reads_target(self) -> bool:
        """Whether it needs the target's distribution, beside the data's tokens."""
        return losses.needs_target_probs(self.loss)

    def steps_at(self, progress: float) -> int:
        return 1

    def weights(self, num_steps: int) -> list[float]:
        """What each step weighs."""
        return [1.0] * num_steps


class OneStepObjective(Objective):
    """Of a drafter that learns one token after each place."""

    weighting: ClassVar[str | None] = None
    mask_outside_vocab: ClassVar[bool] = False


class ChainObjective(Objective):
    """Of a drafter that learns several tokens after each place: steps that unroll it on its own drafts, heads, or places of a
    block.

    weighting: d_pace or e2e_tv, `losses.chain_weights`; null: a row weighs what its step weighs.
    """

    weighting: Literal["d_pace", "e2e_tv"] | None = None

    @property
    def reads_target(self) -> bool:
        return super().reads_target or self.weighting == "e2e_tv"


class UnrolledDrafter(nn.Module):
    """A drafter whose loss is a sum over unrolled steps, each with its own rows.

    objective: an `Objective`, with `weighting` and `mask_outside_vocab`.
    label_offset: row p predicts token p + label_offset + k at step k.
    """

    facts: ClassVar[MethodFacts]
    target: CausalLM
    objective: Any
    config: dict[str, Any]
    probabilistic: bool  # tokens are drawn from the draft distribution, which the draft reports; false: argmax
    shared: dict[str, Any]  # frozen parts of the target, and what follows from a config: not registered
    label_offset: ClassVar[int] = 2
    num_speculative_tokens: int
    chain_length: int  # most tokens of a draft that is a chain; 0: drafts are trees
    max_draft_tokens: int | None = None  # of a draft, if the checkpoint limits it; of a tree's paths
    tree_builder: ClassVar[str] = "beam"
    tree: TreePlan | None = None  # None: drafts are chains

    def set_tree(
        self,
        tree_topk: int | None,
        tree_depth: int | None,
        tree_builder: str | None,
        speculative_token_tree: str | list[list[int]] | None,
    ) -> None:
        """Draft trees, if the settings are of some. Raises ValueError, one line."""
        self.tree = tree.plan(
            self.num_speculative_tokens,
            tree_topk,
            tree_depth,
            tree_builder,
            speculative_token_tree,
            self.tree_builder,
            self.probabilistic,
            self.max_draft_tokens,
        )
        self.drafts_trees = self.tree is not None

    @property
    def num_draft_slots(self) -> int:
        """Slots that a draft takes in the drafter's cache beyond those of the request's own tokens."""
        return 0 if self.tree is None else self.tree.num_expanded

    def path_limit(self, context: Context) -> np.ndarray:
        """[B] most tokens that one after the other may be drafted for each row."""
        if self.tree is None:
            return context.max_draft_B
        return np.minimum(np.minimum(context.path_limit(), context.max_draft_B), self.tree.depth)

    def grower(self, context: Context, draft_B: np.ndarray) -> Grower:
        """What grows the trees of a step. draft_B: most nodes of a path of each row."""
        assert self.tree is not None
        return Grower(self.tree, context, draft_B, self.probabilistic, self.to_target_vocab)

    def draft_up_to(self, num_tokens: int) -> None:
        """Draft that many tokens from now on, or as many as the checkpoint allows."""
        self.num_speculative_tokens = min(num_tokens, self.max_draft_tokens or num_tokens)

    # ---------------------------------------------------------------- what a family adds

    def draft_lengths(self, context: Context) -> np.ndarray:
        """[B] how many tokens to draft for each row, one after the other."""
        raise NotImplementedError

    def to_target_vocab(self, token_N: Tensor, q_NV: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens and distributions over the draft vocabulary as such over the target's."""
        raise NotImplementedError

    def for_training(self, objective: Any, init: Any, feature_sample: Tensor | None = None, warm_start: bool = False) -> None:
        """float32 weights that gradients reach.

        feature_sample: [tokens, T, D] target states to scale features by.
        warm_start: the weights were trained before, so what is prepared must leave the function as it is.
        """
        raise NotImplementedError

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
        return True

    @property
    def vocab_ids(self) -> Tensor | None:
        """[draft vocabulary] target ids; None if all can be drafted."""
        return None

    scale_draft_logits: losses.ScaleLogits | None = None  # what the drafter's own architecture does to its logits

    def auxiliary_loss(
        self, total: Tensor, states: list[Tensor], overlaps: list[Tensor], teacher: Teacher, batch: Batch, plan: unroll.Plan
    ) -> Tensor:
        """The loss with the terms that a method adds to it.

        states, overlaps: [M, D] and [M] of the supervised rows of every step; overlaps as in `losses.RowSums`.
        """
        return total

    # ---------------------------------------------------------------- the loss

    def num_supervised(self, mask_n: np.ndarray) -> int:
        return len(unroll.supervised_tokens(np.array([len(mask_n)]), mask_n, self.label_offset))

    def forward(self, batch: Batch, progress: float = 1.0, seed: int | str = 0) -> tuple[Tensor, LossSums]:
        """`loss`, under the name that data-parallel wrappers call."""
        return self.loss(batch, progress, seed)

    def loss(self, batch: Batch, progress: float = 1.0, seed: int | str = 0) -> tuple[Tensor, LossSums]:
        """The sum of the losses of all supervised rows and steps, weighted by step, and the sums for metrics.

        progress: the share of the run that is done, 0 to 1; seed: of random choices, if there are any.
        """
        num_steps = self.num_steps(progress)
        plan = self.plan(batch, num_steps, seed)
        if not len(plan.steps[0].rows):  # no supervised token; other processes wait for gradients all the same
            zero = torch.zeros((), device=self.target.device)
            zero = sum((p.sum() * 0.0 for p in self.parameters() if p.requires_grad), zero)
            return zero, LossSums.zeros(num_steps, self.target.device)
        states = self.unrolled(batch, plan, seed)
        supervised = [
            state[self._index(step.supervised)] if len(step.supervised) < len(state) else state
            for state, step in zip(states, plan.steps, strict=True)
        ]
        labelled = [step.labelled for step in plan.steps]
        teacher = self.teacher(batch, plan)
        weights = self.objective.weights(num_steps)
        heads = self.heads()
        # one output layer for all steps shares the target's distribution between them; else each step computes it anew
        head_VD = teacher.weight_VD
        groups = [slice(0, num_steps)] if len(heads) == 1 else [slice(k, k + 1) for k in range(num_steps)]

        def distill(teacher: Teacher, row_weights: list[Tensor] | None = None) -> tuple[Tensor, list[RowSums], list[Rows]]:
            total = torch.zeros((), device=self.target.device)
            sums: list[RowSums] = []
            rows: list[Rows] = []
            for steps, head in zip(groups, heads, strict=False):
                weight_VD = head_VD if head is None else head
                assert weight_VD is not None
                loss, group_sums, group_rows = losses.distill(
                    supervised[steps], labelled[steps], weight_VD, teacher, weights[steps], self.objective.loss,
                    self.scale_draft_logits, None if row_weights is None else row_weights[steps],
                )  # fmt: skip
                total = total + loss
                sums.append(group_sums)
                rows += group_rows
            return total, sums, rows

        row_weights = None
        if self.objective.weighting is not None:
            with torch.no_grad():
                _, _, rows = distill(teacher if self.objective.weighting == "e2e_tv" else teacher.without_states())
            row_weights = losses.chain_weights(self.objective.weighting, rows, [step.prev_match for step in plan.steps])
        total, sums, rows = distill(teacher, row_weights)
        total = self.auxiliary_loss(total, supervised, [of_step.overlap for of_step in rows], teacher, batch, plan)
        row_sums = RowSums(*(torch.cat(of_groups) for of_groups in zip(*sums, strict=True)))
        return total, LossSums(*row_sums, *self._chain_sums([of_step.hit for of_step in rows], plan))

    @torch.no_grad()
    def teacher(self, batch: Batch, plan: unroll.Plan) -> Teacher:
        """The target on the labelled positions; of a batch without hidden states, the data's tokens alone."""
        place = self._index(plan.labelled)
        token_Q = batch.token_N[place + 1]
        label_Q = token_Q if batch.argmax_N is None else batch.argmax_N[place]
        ids = self.vocab_ids
        if ids is not None:
            if "draft_index" not in self.shared:
                index = torch.full((self.target.vocab_size,), -1, dtype=torch.int64, device=self.target.device)
                index[ids] = torch.arange(len(ids), device=self.target.device)
                self.shared["draft_index"] = index
            label_Q = self.shared["draft_index"][label_Q]
            token_Q = self.shared["draft_index"][token_Q]
        weight_Q = torch.ones(len(label_Q), device=label_Q.device)
        if batch.weight_B is not None:
            weight_Q = self._index(batch.weight_B.repeat(batch.length_B))[place].float()
        if self.objective.focus is not None:
            is_rejected_Q = self._index(batch.rejected_N[plan.labelled + 1])
            weight_Q = torch.where(is_rejected_Q, self.objective.focus_weight * weight_Q, weight_Q)
        if self.objective.mask_outside_vocab:
            weight_Q = weight_Q * (label_Q >= 0)
        scale_logits = self.target.scale_logits
        if batch.hidden_NTD is None or batch.logsumexp_N is None:
            return Teacher(None, None, None, scale_logits, None, label_Q, token_Q, weight_Q)
        last = batch.hidden([self.target.num_layers])[:, 0][place]
        with torch.autocast(last.device.type, enabled=False):
            state_QD = self.target.final_norm(last.to(self.target.dtype))
        if "head" not in self.shared:
            weight_VD, bias_V = self.target.head_rows(ids)
            self.shared["head"] = weight_VD.clone() if ids is not None else weight_VD, bias_V
        weight_VD, bias_V = self.shared["head"]
        return Teacher(state_QD, weight_VD, bias_V, scale_logits, batch.logsumexp_N[place], label_Q, token_Q, weight_Q)

    def _chain_sums(self, hits: list[Tensor], plan: unroll.Plan) -> tuple[Tensor, Tensor, Tensor]:
        """[K] each: joint hits, rows reached, and chains, as in `LossSums`. A row's chain ends where a step does not supervise
        it."""
        in_chain = np.ones(len(hits[0]), dtype=bool)  # of each supervised row: at this step and at all before
        reached = torch.ones_like(hits[0])
        joint = hits[0]
        counts = [torch.stack([joint.sum(), reached.sum(), torch.full_like(joint.sum(), int(in_chain.sum()))])]
        for hit, step in zip(hits[1:], plan.steps[1:], strict=True):
            prev = step.prev_match.clip(0)
            in_chain = (step.prev_match >= 0) & in_chain[prev] if len(in_chain) else np.zeros(len(hit), dtype=bool)
            reached = joint[self._index(prev)] & self._index(in_chain) if len(joint) else torch.zeros_like(hit)
            joint = hit & reached
            counts.append(torch.stack([joint.sum(), reached.sum(), torch.full_like(joint.sum(), int(in_chain.sum()))]))
        joint_K, reached_K, chains_K = torch.stack(counts, 1).float()
        return joint_K, reached_K, chains_K

    def _index(self, values: np.ndarray | None) -> Tensor:
        """A numpy array on the target's device."""
        assert values is not None
        return torch.from_numpy(values).to(self.target.device, non_blocking=True)
