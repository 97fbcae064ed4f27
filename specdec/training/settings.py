"""The `train` group of a recipe: how long, how large, how fast, how often."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from specdec.checked import Checked


class Settings(Checked):
    """Keys of the `train` group.

    max_steps: optimiser steps, unless num_epochs is given.
    global_batch_size: samples of an optimiser step, over all processes; micro_batch_size: samples of one forward.
    lr_scheduler: cosine or linear (down to min_lr_ratio x lr) or constant, after warmup_ratio of the steps.
    loss_normalization: `tokens` weighs every supervised token alike, `samples` every sample.
    log_every, eval_every, save_every: in steps; with logging_first_step the first one is logged too.
    mixed_precision: bf16 (matrix products, over float32 weights) or no; None: bf16 where the device has instructions for it.
    keep: checkpoints to keep beside the best.
    max_nonfinite: consecutive steps with a loss that is not finite before the run fails.
    sharding: `ddp` or `fsdp`, with several processes.
    """

    what: ClassVar[str] = "train key"

    max_steps: int | None = Field(None, ge=1)
    num_epochs: float | None = Field(None, gt=0)
    global_batch_size: int = Field(8, ge=1)
    micro_batch_size: int = Field(8, ge=1)
    lr: float = Field(1e-4, gt=0)
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    mixed_precision: Literal["bf16", "no"] | None = None
    sharding: Literal["ddp", "fsdp"] = "ddp"
    loss_normalization: Literal["tokens", "samples"] = "tokens"
    log_every: int = Field(10, ge=1)
    logging_first_step: bool = False
    eval_every: int = Field(200, ge=1)
    save_every: int = Field(200, ge=1)
    keep: int = Field(2, ge=1)
    max_nonfinite: int = Field(3, ge=1)

    @model_validator(mode="after")
    def _one_length(self) -> Settings:
        if (self.max_steps is None) == (self.num_epochs is None):
            raise ValueError("give one of train.max_steps and train.num_epochs")
        return self

    def num_steps(self, num_samples: int) -> int:
        if self.max_steps is not None:
            return self.max_steps
        assert self.num_epochs is not None
        return max(round(self.num_epochs * num_samples / self.global_batch_size), 1)

    def lr_at(self, step: int, num_steps: int) -> float:
        """Learning rate of step `step` (from 0) of num_steps."""
        warmup = round(self.warmup_ratio * num_steps)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / max(num_steps - warmup, 1)
        decay = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}[self.lr_scheduler]
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * decay)
