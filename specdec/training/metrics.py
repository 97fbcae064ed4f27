"""Metrics of a stretch of training steps, summed over micro-batches and processes and divided when they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from specdec.drafter.losses import LossSums


@dataclass
class MetricWindow:
    """Sums of the steps since the last row of metrics; a step that is skipped adds nothing but its time.

    loss, sums: of the steps that were applied; None before the first.
    uncommitted: those of the step in progress, which `commit` adds and `discard` drops.
    supervised: supervised tokens of the applied steps, over all processes.
    features_s, model_s, total_s: seconds in the target's forwards, in the drafter's step, and altogether.
    """

    loss: Tensor | None = None
    sums: LossSums | None = None
    uncommitted: list[tuple[Tensor, LossSums]] = field(default_factory=list)
    supervised: int = 0
    features_s: float = 0.0
    model_s: float = 0.0
    total_s: float = 0.0

    def add(self, loss: Tensor, sums: LossSums) -> None:
        self.uncommitted.append((loss, sums))

    def add_times(self, features_s: float = 0.0, model_s: float = 0.0, total_s: float = 0.0) -> None:
        self.features_s += features_s
        self.model_s += model_s
        self.total_s += total_s

    def discard(self) -> None:
        self.uncommitted = []

    def commit(self, supervised: int) -> None:
        for loss, sums in self.uncommitted:
            self.loss = loss if self.loss is None else self.loss + loss
            self.sums = sums if self.sums is None else self.sums + sums
        self.uncommitted = []
        self.supervised += supervised

    def state(self, accelerator: Accelerator) -> dict[str, Any] | None:
        """The window as JSON for a checkpoint, summed over all processes; None if no step was applied."""
        if self.sums is None:
            return None
        sums = accelerator.reduce(self.sums.table(), "sum")
        loss = accelerator.reduce(self.loss, "sum")
        return {
            "loss": loss.item(),
            "sums": sums.cpu().tolist(),
            "supervised": self.supervised,
            "features_s": self.features_s,
            "model_s": self.model_s,
            "total_s": self.total_s,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any] | None, accelerator: Accelerator) -> MetricWindow:
        """The window of a checkpoint. The main process has the sums, all others zeros."""
        if state is None:
            return cls()
        share = 1.0 if accelerator.is_main_process else 0.0
        return cls(
            loss=share * torch.tensor(state["loss"], device=accelerator.device),
            sums=LossSums.from_table(share * torch.tensor(state["sums"], device=accelerator.device)),
            supervised=state["supervised"],
            features_s=state["features_s"],
            model_s=state["model_s"],
            total_s=state["total_s"],
        )

    def row(self, accelerator: Accelerator) -> dict[str, Any]:
        """Metrics over all processes."""
        row: dict[str, Any] = {
            "loss": None,
            "supervised_tokens": self.supervised,
            "tokens_per_s": self.supervised / self.total_s if self.total_s else None,
            "features_share": self.features_s / self.total_s if self.total_s else None,
            "outside_share": 1 - (self.features_s + self.model_s) / self.total_s if self.total_s else None,
        }
        if self.sums is None:
            return row
        sums = LossSums.from_table(accelerator.reduce(self.sums.table(), "sum").cpu())
        loss = accelerator.reduce(self.loss, "sum").item()
        return row | {"loss": loss / max(self.supervised, 1)} | sums.metrics()
