"""EAGLE-1 (Li et al. 2401.15077): one layer that predicts the target's next last state, which the target's output layer reads.

    x  = fc(concat[embedding, f])        f: the target's last state after its final norm, then the drafter's own
    u  = x + attention(x)                no norm in front of it
    f' = u + mlp(post_attention_layernorm(u)),   logits = target's lm_head(f')

Tensor names are vLLM's. Trained by SmoothL1 between f' and the target's state, and soft cross-entropy between the distributions
that follow from them.
"""

from __future__ import annotations

import zlib
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from specdec.checked import Checked
from specdec.core import MethodFacts
from specdec.drafter import losses, unroll
from specdec.drafter.autoregressive import AutoregressiveDrafter, Geometry, Layer
from specdec.drafter.batch import Batch
from specdec.drafter.losses import Teacher
from specdec.drafter.trainable import OneStepObjective
from specdec.model.attention import Attention
from specdec.model.target import CausalLM


class Architecture(Checked):
    """The shape of the layer."""

    what: ClassVar[str] = "train.drafter key"

    geometry: Geometry = Geometry()


class Objective(OneStepObjective):
    """What is minimised: the loss over the whole vocabulary, and:

    smooth_l1: weight of the regression onto the target's state.
    feature_noise: width of the uniform noise on input states, for a sequence of 512 tokens; less for longer ones.
    """

    smooth_l1: float = Field(1.0, ge=0)
    loss: losses.Terms = Field({"ce": 0.1})
    feature_noise: float = Field(0.2, ge=0)


class Eagle(AutoregressiveDrafter):
    name = "eagle"
    facts = MethodFacts(
        runs_model=True,
        name_marks=("eagle-",),
        train_script="eagle",
        serving={"vllm": "eagle", "sglang": "EAGLE"},
    )
    architecture_type = Architecture
    objective_type = Objective

    @classmethod
    def resolve_config(cls, target: CausalLM, architecture: dict[str, Any]) -> dict[str, Any]:
        return {"geometry": Architecture(**architecture).geometry.filled(target)}

    def build(self, config: dict[str, Any]) -> None:
        self.shape = Geometry(**config.get("geometry", {})).of(self.target)
        self.hidden_layers = (self.target.num_layers,)
        self.fc = nn.Linear(2 * self.shape.hidden_size, self.shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(self.shape, first_norm=False)])

    def fuse(self, hidden_NTD: Tensor) -> Tensor:
        return self.last_state(hidden_NTD[:, -1])

    def step(
        self, embedding_ND: Tensor, hidden_ND: Tensor, position_N: Tensor, attention: Attention, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedding_ND, hidden_ND], -1))
        state = self.layers[0](x, *self.cos_sin(position_N), attention, rows)
        return state, state

    def add_feature_noise(self, hidden_ND: Tensor, batch: Batch, seed: int | str) -> Tensor:
        """Uniform noise on the input states, as in the published training code: less for longer sequences."""
        if not (width := self.objective.feature_noise) or not self.training:
            return hidden_ND
        noise = []
        for name, length in zip(batch.ids, batch.length_B.tolist(), strict=True):
            # by the sample's name, so that the batch and the process do not matter
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            noise.append((torch.rand(length, hidden_ND.shape[1], generator=generator) - 0.5) * (width * 512 / length))
        return hidden_ND + torch.cat(noise).to(hidden_ND)

    def auxiliary_loss(
        self, total: Tensor, states: list[Tensor], overlaps: list[Tensor], teacher: Teacher, batch: Batch, plan: unroll.Plan
    ) -> Tensor:
        """The regression of the first step's states."""
        label_M = self._index(plan.steps[0].labelled)
        assert teacher.state_QD is not None
        gap_M = F.smooth_l1_loss(states[0], teacher.state_QD[label_M].to(states[0].dtype), reduction="none").mean(-1)
        return total + self.objective.smooth_l1 * (gap_M * teacher.weight_Q[label_M]).sum()
