"""The training loop: `fit` trains a drafter on the target's hidden states, on one process or many.

An optimiser step, in the order in which things happen:

    pick      the samples of the step, a function of (seed, step): nothing to save, the same for any number of processes
    features  what the target thinks of them, by its forward or from artifacts
    loss      of every micro-batch, divided by the supervised tokens of the whole step, over processes and micro-batches
    update    gradients are averaged over processes, clipped, and applied; a step with a gradient that is not finite is skipped
    record    metrics as sums, divided when they are written; now and then a checkpoint, and decoding with it: real acceptance

Checkpoints appear whole or not at all, and the best ones are chosen by what the engine accepts, not by the loss.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from specdec.checked import Checked, first_line
from specdec.checkpoint import native
from specdec.core import Proposer, Request
from specdec.drafter.batch import Batch
from specdec.engine import Engine
from specdec.files import apply_umask, writing
from specdec.measure import stats
from specdec.model.target import CausalLM
from specdec.params import SamplingParams
from specdec.rejection import Verifier
from specdec.training.samples import Sample, batch_indices

TEXT_PROMPT = 64  # tokens, as in the second stage of the MLP speculator


class Settings(Checked):
    """Keys of the `train` group.

    max_steps: optimiser steps, unless num_epochs is given; global_batch_size: samples of an optimiser step, over all processes;
    micro_batch_size: samples of one forward; lr_scheduler: cosine or linear (down to min_lr_ratio x lr) or constant, after
    warmup_ratio of the steps; loss_normalization: `tokens` weighs every supervised token alike, `samples` every sample;
    log_every, eval_every, save_every: in steps; keep: checkpoints to keep beside the best; max_nonfinite: steps in a row with a
    loss that is not finite before giving up; sharding: `ddp` or `fsdp`, when there are several processes.
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
    mixed_precision: Literal["bf16", "no"] = "bf16"
    sharding: Literal["ddp", "fsdp"] = "ddp"
    loss_normalization: Literal["tokens", "samples"] = "tokens"
    log_every: int = Field(10, ge=1)
    eval_every: int = Field(200, ge=1)
    save_every: int = Field(200, ge=1)
    keep: int = Field(2, ge=1)
    max_nonfinite: int = Field(3, ge=1)

    @model_validator(mode="after")
    def _length(self) -> Settings:
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
        fall = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress)}[self.lr_scheduler]
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * fall)


def fit(
    drafter: Any,
    source: Callable[[Sequence[Sample]], Batch],
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    settings: Settings,
    out_dir: Path,
    *,
    seed: int = 0,
    evaluate: Callable[[Path], dict[str, Any]] | None = None,
    log: Callable[[dict[str, Any]], None] = lambda row: None,
    advance: Callable[[int], None] = lambda steps: None,
    provenance: dict[str, Any] | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train a drafter that is ready for it (`for_training`), and leave checkpoints in out_dir.

    source: features of samples; held_out: samples for the validation loss; evaluate: what decoding with the checkpoint in a
    directory shows, with `mean_acceptance_length`; log: takes a row of metrics (main process only), and of a resumed run
    perhaps its last one again; resume: go on from out_dir's last checkpoint. Returns where the best and the last checkpoint
    are, and how training ended. Raises ValueError, one line, if losses are not finite again and again.

    A signal ends the run after the step: with a checkpoint, and without the evaluation that may be due. What a checkpoint still
    lacks (its evaluation, its row) is in its state, and comes first when the run is resumed: rows and best are those of a run
    that was never stopped.
    """
    with contextlib.closing(TrainState(drafter, settings, out_dir, seed, len(samples), provenance or {})) as run:

        def finish(row: dict[str, Any], to_evaluate: bool) -> None:
            """Evaluate the checkpoint of this step if that is due, and log its row."""
            if to_evaluate:
                row |= run.validate(source, held_out)
                if run.accelerator.is_main_process:
                    if evaluate is not None:
                        row |= run.update_best(evaluate(run.directory(run.step)))
                    run.note(best=run.best, pending={"row": row, "evaluate": False})
                    run.link_best()
                run.accelerator.wait_for_everyone()
            run.prune()
            if run.accelerator.is_main_process:
                log(row)
                run.note(pending=None)
            run.pending = None

        window, nonfinite = MetricWindow(), list[list[str]]()
        if resume:
            window, nonfinite = run.load()
            advance(run.step)
            if run.pending is not None:
                finish(run.pending["row"], run.pending["evaluate"])
        stopping = run.stopped()
        while run.step < run.num_steps and not stopping:
            began = time.perf_counter()
            picked = [samples[i] for i in batch_indices(run.step, len(samples), settings.global_batch_size, seed)]
            supervised = sum(map(run.supervised, picked))
            micro_batches = run.rank_micro_batches(picked)
            for place, micro in enumerate(micro_batches):
                ready = time.perf_counter()
                batch = source(micro)
                if settings.loss_normalization == "samples":
                    own = np.array([max(run.supervised(sample), 1) for sample in micro])
                    batch.weight_B = supervised / len(picked) / own
                computed = time.perf_counter()
                window.features_s += computed - ready
                with run.accumulate(last=place == len(micro_batches) - 1), run.autocast():
                    loss, sums = run.model(batch, run.step / run.num_steps, f"{seed} {run.step}")
                # gradients are averaged over processes, and the loss is a sum over all of them
                run.accelerator.backward(loss * (run.world / max(supervised, 1)))
                window.add(loss.detach(), sums)
                window.model_s += time.perf_counter() - computed
            updating = time.perf_counter()
            lr = settings.lr_at(run.step, run.num_steps)
            grad_norm = run.update(lr)
            window.model_s += time.perf_counter() - updating
            if grad_norm is None:
                nonfinite.append([sample.id for sample in picked])
                if len(nonfinite) >= settings.max_nonfinite:
                    raise ValueError(
                        f"the loss or its gradient was not finite in {len(nonfinite)} steps in a row, up to step "
                        f"{run.step + 1}; samples of the last: {', '.join(nonfinite[-1][:8])}; lower train.lr, or look at these"
                    )
                run.num_skipped += 1
                window.skip()
            else:
                nonfinite = []
                window.keep(supervised)
            run.step += 1
            window.total_s += time.perf_counter() - began
            advance(1)

            stopping, last = run.stopped(), run.step == run.num_steps
            due = [last or run.step % every == 0 for every in (settings.log_every, settings.eval_every, settings.save_every)]
            row = None
            if any(due):
                epoch = run.step * settings.global_batch_size / len(samples)
                row = {
                    "step": run.step,
                    "epoch": round(epoch, 4),
                    "lr": lr,
                    "grad_norm": grad_norm,
                    "skipped_steps": run.num_skipped,
                }
                row |= window.row(run)
                _give_back_memory()
                window = MetricWindow()
            if due[1] or due[2] or stopping:
                to_evaluate = due[1] and (evaluate is not None or len(held_out) > 0)
                run.pending = None if row is None else {"row": row, "evaluate": to_evaluate}
                run.save(window, nonfinite, scheduled=due[1] or due[2])
                if row is not None and not (stopping and to_evaluate):
                    finish(row, to_evaluate)
                else:
                    run.prune()
            elif row is not None and run.accelerator.is_main_process:
                log(row)
    return {
        "step": run.step,
        "num_steps": run.num_steps,
        "interrupted": run.step < run.num_steps or run.pending is not None,
        "stopped_by": run.stopped_by,
        "skipped_steps": run.num_skipped,
        "best": run.best,
        "last": str(run.directory(run.step)),
    }


@dataclass
class MetricWindow:
    """Sums of the steps since the last row of metrics; a step that is skipped leaves nothing behind."""

    loss: Any = 0.0
    sums: Any = None
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    supervised: int = 0
    features_s: float = 0.0
    model_s: float = 0.0
    total_s: float = 0.0

    def add(self, loss: Tensor, sums: Tensor) -> None:
        self.pending.append((loss, sums))

    def skip(self) -> None:
        self.pending = []

    def keep(self, supervised: int) -> None:
        for loss, sums in self.pending:
            self.loss = self.loss + loss
            if self.sums is None:
                self.sums = torch.zeros_like(sums)
            short, long = sorted((self.sums, sums), key=len)  # with a warm-up, steps of the window unroll differently
            self.sums = torch.cat([short, torch.zeros_like(long[len(short) :])]) + long
        self.pending = []
        self.supervised += supervised

    def state(self, run: TrainState) -> dict[str, Any] | None:
        """What a checkpoint in the middle of a window keeps of it, summed over all processes; None if there is nothing."""
        if self.sums is None:
            return None
        sums, loss = (run.accelerator.reduce(value, "sum") for value in (self.sums, self.loss))
        clocks = {key: getattr(self, key) for key in ("features_s", "model_s", "total_s")}
        return {"loss": loss.item(), "sums": sums.cpu().tolist(), "supervised": self.supervised, **clocks}

    @classmethod
    def of(cls, state: dict[str, Any] | None, run: TrainState) -> MetricWindow:
        """A window that goes on. The sums are the first process's, and zero in all others."""
        if state is None:
            return cls()
        share = 1.0 if run.accelerator.is_main_process else 0.0
        loss, sums = (torch.tensor(state[key], device=run.accelerator.device) for key in ("loss", "sums"))
        if not share:
            loss, sums = torch.zeros_like(loss), torch.zeros_like(sums)
        clocks = {key: state[key] for key in ("features_s", "model_s", "total_s")}
        return cls(loss=loss, sums=sums, supervised=state["supervised"], **clocks)

    def row(self, run: TrainState) -> dict[str, Any]:
        """Metrics, after the sums of all processes are added."""
        row: dict[str, Any] = {
            "loss": None,
            "supervised_tokens": self.supervised,
            "tokens_per_s": self.supervised / self.total_s if self.total_s else None,
            "features_share": self.features_s / self.total_s if self.total_s else None,
            "outside_share": 1 - (self.features_s + self.model_s) / self.total_s if self.total_s else None,
        }
        if self.sums is None:
            return row
        sums = run.accelerator.reduce(self.sums, "sum").cpu().tolist()
        loss = run.accelerator.reduce(self.loss, "sum").item()
        return row | {"loss": loss / max(self.supervised, 1)} | per_step(sums)


def per_step(sums: Sequence[Sequence[float]]) -> dict[str, list[float | None]]:
    """Lists with an entry for each unrolled step, from its sums (loss, hits, overlap, rows, joint hits, reached, chains).

    accuracy: marginal, the likeliest draft token is the target's; joint_accuracy: it and all before it are;
    conditional_accuracy: it is, given that those before are; one_minus_tv: sum min(p, q), the chance that rejection sampling
    accepts, or None where nobody asked for the target's law. All teacher-forced.
    """

    def over(numerator: float, denominator: float) -> float | None:
        if math.isnan(numerator):
            return None
        return numerator / denominator if denominator else 0.0

    return {
        "step_loss": [over(loss, rows) for loss, _, _, rows, *_ in sums],
        "accuracy": [over(hits, rows) for _, hits, _, rows, *_ in sums],
        "one_minus_tv": [over(overlap, rows) for _, _, overlap, rows, *_ in sums],
        "joint_accuracy": [over(joint, chains) for *_, joint, _, chains in sums],
        "conditional_accuracy": [over(joint, reached) for *_, joint, reached, _ in sums],
    }


class TrainState:
    """What a run consists of beside the loop: processes, optimiser, checkpoints."""

    def __init__(
        self, drafter: Any, settings: Settings, out_dir: Path, seed: int, num_samples: int, provenance: dict[str, Any]
    ):
        self.drafter, self.settings, self.out_dir, self.seed = drafter, settings, out_dir, seed
        self.num_steps, self.provenance = settings.num_steps(num_samples), provenance
        self.step = self.num_skipped = 0
        self.best: dict[str, Any] | None = None
        self.pending: dict[str, Any] | None = None  # the row of this step, if it is not logged yet, and whether to evaluate
        self.stopped_by: int | None = None
        device = drafter.target.device
        # autocast is ours: accelerate's setting is one for the whole process, and a sweep may vary it
        self.accelerator = Accelerator(mixed_precision="no", cpu=device.type == "cpu")
        self.world = self.accelerator.num_processes
        if settings.global_batch_size % self.world:
            raise ValueError(
                f"train.global_batch_size={settings.global_batch_size} does not divide into {self.world} processes; "
                f"give a multiple of {self.world}"
            )
        self.model = self.wrap_distributed(drafter)
        parameters = [parameter for _, parameter in self._trained()]
        self.optimizer = torch.optim.AdamW(
            parameters, settings.lr, (settings.adam_beta1, settings.adam_beta2), weight_decay=settings.weight_decay
        )
        self._signals = {signal.SIGINT: 0, signal.SIGTERM: 0}  # how often each has come
        self._handlers: dict[int, Any] = {}
        with contextlib.suppress(ValueError):  # only the main thread may listen
            for number in self._signals:
                self._handlers[number] = signal.signal(number, self._stop)

    def wrap_distributed(self, drafter: nn.Module) -> Any:
        """The drafter as the processes call it."""
        drafter.train()
        if self.world == 1:
            return drafter
        if self.settings.sharding == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            return fully_shard(drafter, mesh=init_device_mesh(self.accelerator.device.type, (self.world,)))
        return self.accelerator.prepare_model(drafter)

    def _stop(self, number: int, frame: Any) -> None:
        if any(self._signals.values()):
            raise KeyboardInterrupt
        self._signals[signal.Signals(number)] += 1

    def stopped(self) -> bool:
        """Whether any process was asked to stop: all of them end after the same step."""
        counts = list(self._signals.values())
        if self.world > 1:
            flags = torch.tensor(counts, dtype=torch.float32, device=self.accelerator.device)
            counts = self.accelerator.reduce(flags, "sum").tolist()
        came = [number for number, count in zip(self._signals, counts, strict=True) if count]
        self.stopped_by = int(max(came)) if came else None
        return bool(came)

    def close(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def supervised(self, sample: Sample) -> int:
        """Supervised tokens that some row can predict: the first of a document have none."""
        return int(sample.mask_n[self.drafter.label_offset :].sum())

    def rank_micro_batches(self, picked: list[Sample]) -> list[list[Sample]]:
        """This process's micro-batches: samples dealt out by length, so that processes finish together."""
        by_length = sorted(picked, key=lambda sample: len(sample.token_n))
        mine = by_length[self.accelerator.process_index :: self.world]
        size = self.settings.micro_batch_size
        return [mine[i : i + size] for i in range(0, len(mine), size)]

    @contextlib.contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Gradients travel between processes with the last micro-batch only."""
        if self.world > 1 and self.settings.sharding == "fsdp":
            self.model.set_requires_gradient_sync(last)
            yield
        elif self.world > 1 and not last:
            with self.accelerator.no_sync(self.model):
                yield
        else:
            yield

    def autocast(self) -> Any:
        """bfloat16 matrix products over float32 weights, if asked for."""
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.settings.mixed_precision == "bf16")

    def update(self, lr: float) -> float | None:
        """Clip and apply the gradients. Returns their norm, or None if it was not finite and nothing was applied."""
        parameters = [p for p in self.drafter.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        value = float(norm)
        if math.isfinite(value):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        return value if math.isfinite(value) else None

    @torch.no_grad()
    def validate(self, source: Callable[[Sequence[Sample]], Batch], held_out: Sequence[Sample]) -> dict[str, Any]:
        """The loss and the accuracies on held-out samples, with all steps unrolled. Every process does the same."""
        if not held_out:
            return {}
        self.model.eval()
        total, sums, count = 0.0, 0.0, 0
        for i in range(0, len(held_out), self.settings.micro_batch_size):
            part = held_out[i : i + self.settings.micro_batch_size]
            batch = source(part)  # the target runs in its own precision
            with self.autocast():
                loss, own = self.model(batch)
            total, sums = total + loss, sums + own
            count += sum(map(self.supervised, part))
        self.model.train()
        found = per_step(sums.cpu().tolist())  # type: ignore[attr-defined]
        return {"val_loss": float(total) / max(count, 1)} | {f"val_{key}": value for key, value in found.items()}

    # ---------------------------------------------------------------- checkpoints

    def directory(self, step: int) -> Path:
        return self.out_dir / "checkpoints" / f"step-{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Those that are there, oldest first."""
        return sorted(path for path in self.out_dir.glob("checkpoints/step-*") if re.fullmatch(r"step-\d{8}", path.name))

    def save(self, window: MetricWindow, nonfinite: list[list[str]], scheduled: bool) -> None:
        """Write a checkpoint under a temporary name and rename it: what has the final name is whole.

        scheduled: whether a run that was never stopped has one at this step too.
        """
        kept = window.state(self)
        state = {key: _whole(tensor) for key, tensor in self.drafter.state_dict().items()}
        moments = {}
        for name, parameter in self._trained():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                moments[f"{key}:{name}"] = _whole(value)
        final = self.directory(self.step)
        if self.accelerator.is_main_process:
            temporary = final.with_name(f".{final.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                (temporary / "training").mkdir(parents=True)
                provenance = native.provenance(step=self.step, **self.provenance)
                self.drafter.write(temporary, state, provenance, self._card())
                tensors = {f"weight:{key}": value for key, value in state.items()} | moments
                save_file(
                    {key: value.contiguous() for key, value in tensors.items()}, temporary / "training" / "state.safetensors"
                )
                apply_umask(temporary / "training" / "state.safetensors")
                place = {
                    "step": self.step,
                    "num_steps": self.num_steps,
                    "skipped_steps": self.num_skipped,
                    "best": self.best,
                    "scheduled": scheduled,
                    "pending": self.pending,
                    "window": kept,
                    "nonfinite": nonfinite,
                }
                (temporary / "training" / "state.json").write_text(json.dumps(place) + "\n")
                if final.exists():  # a run that was resumed and came here again
                    final.rename(final.with_name(f".{final.name}.old"))
                temporary.rename(final)
                _link(self.out_dir / "last", final)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(temporary, ignore_errors=True)
                raise OSError(
                    f"the checkpoint of step {self.step} could not be written ({first_line(error)}); earlier ones are whole; "
                    "make room and go on with resume=true"
                ) from None
        self.accelerator.wait_for_everyone()

    def note(self, **changes: Any) -> None:
        """Change what the checkpoint of this step says about the run."""
        path = self.directory(self.step) / "training" / "state.json"
        temporary = path.with_suffix(".tmp")
        with writing(path):
            temporary.write_text(json.dumps(json.loads(path.read_text()) | changes) + "\n")
            temporary.replace(path)

    def load(self) -> tuple[MetricWindow, list[list[str]]]:
        """Take up the last checkpoint: weights, optimiser, and where the run was. Any number of processes may have written
        it. Returns the sums since the last row, and the samples of the last steps if these were not finite."""
        found = self.checkpoints()
        if not found:  # interrupted before the first checkpoint: begin again
            return MetricWindow(), []
        training = found[-1] / "training"
        try:
            state = json.loads((training / "state.json").read_text())
            self.step, self.num_skipped, self.best = state["step"], state["skipped_steps"], state["best"]
            planned, self.pending = state["num_steps"], state.get("pending")
            window = MetricWindow.of(state.get("window"), self)
            tensors = load_file(training / "state.safetensors")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(
                f"{training}: cannot be read ({first_line(error)}); remove {found[-1]} to go on from before"
            ) from None
        if planned != self.num_steps and self.accelerator.is_main_process:
            print(
                f"note: the run was to have {planned} steps and has {self.num_steps} now: "
                "from here on the learning rate is that of the new length",
                file=sys.stderr,
            )
        if self.best and not self.directory(self.best["step"]).exists():
            self.best = None  # somebody removed it; the next one that is measured is the best again
        if self.accelerator.is_main_process:
            _link(self.out_dir / "last", found[-1])
            self.link_best()
        own = self.drafter.state_dict()
        with torch.no_grad():
            for key, value in own.items():
                _fill(value, tensors[f"weight:{key}"])
        for name, parameter in self._trained():
            kept = {key.partition(":")[0]: value for key, value in tensors.items() if key.partition(":")[2] == name}
            kept.pop("weight", None)
            self.optimizer.state[parameter] = {
                key: value if value.ndim == 0 else _like(parameter, value) for key, value in kept.items()
            }
        self.accelerator.wait_for_everyone()  # what is read here is written again
        return window, state.get("nonfinite", [])

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.drafter.named_parameters() if p.requires_grad]

    def update_best(self, found: dict[str, Any]) -> dict[str, Any]:
        """Remember the checkpoint of this step if it is the best by measured acceptance."""
        value = found["mean_acceptance_length"]
        if self.best is None or value > self.best["mean_acceptance_length"]:
            self.best = {"step": self.step, "mean_acceptance_length": value}
        return found

    def link_best(self) -> None:
        if self.best:
            _link(self.out_dir / "best", self.directory(self.best["step"]))

    def prune(self) -> None:
        """Remove all checkpoints but the last few and the best; one that is there because the run was stopped goes as soon as
        there is a later one."""
        if not self.accelerator.is_main_process:
            return
        found = self.checkpoints()
        kept = set([path for path in found if path == found[-1] or _is_scheduled(path)][-self.settings.keep :])
        if self.best:
            kept.add(self.directory(self.best["step"]))
        for path in found:
            if path not in kept:
                gone = path.rename(path.with_name(f".{path.name}.old"))
                shutil.rmtree(gone, ignore_errors=True)
        for rest in self.out_dir.glob("checkpoints/.step-*"):
            shutil.rmtree(rest, ignore_errors=True)

    def _card(self) -> str:
        target = self.drafter.target.name
        return (
            f"# {self.drafter.name} drafter for {target}\n\nTrained with specdec, step {self.step} of {self.num_steps}; "
            "see provenance.json. Decode with it:\n\n"
            f"```\npython eval/run.py method={self.drafter.name} checkpoint=DIR model.path={target}\n```\n"
        )


def _is_scheduled(checkpoint: Path) -> bool:
    """Whether a run that is never stopped has a checkpoint at this step."""
    try:
        return bool(json.loads((checkpoint / "training" / "state.json").read_text()).get("scheduled", True))
    except (OSError, ValueError, AttributeError):
        return True


def _give_back_memory() -> None:
    """Batches of many sizes leave holes in glibc's heap, which it keeps unless asked; what is no glibc has nothing to ask."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _whole(tensor: Tensor) -> Tensor:
    """On the CPU, gathered from all processes; a copy."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to("cpu", copy=True)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A whole tensor laid out as the parameter is."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)


def _fill(own: Tensor, value: Tensor) -> None:
    if own.shape != value.shape:
        raise ValueError(
            f"resume=true, but a tensor is {list(value.shape)} there and {list(own.shape)} here; use the same settings"
        )
    own.copy_(_like(own, value))


def _link(path: Path, to: Path) -> None:
    """Point a link at a directory beside it, at once."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(to.relative_to(path.parent))
    temporary.replace(path)


def acceptance(
    target: CausalLM,
    proposer: Proposer,
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    max_batch_size: int = 8,
) -> dict[str, Any]:
    """What the engine accepts when it decodes the prompts greedily with this drafter."""
    engine = Engine(target, proposer, verifier, max_batch_size)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [Request(str(i), list(ids), params) for i, ids in enumerate(prompts)]
    pooled = stats.pool([request.stats for request in engine.run(requests)])
    keys = ("mean_acceptance_length", "tokens_per_step", "acceptance_rate_per_position", "conditional_acceptance_per_position")
    return {key: pooled[key] for key in keys}


def prompts_of(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """The first prompts of held-out samples: what comes before the first supervised token; of text that is supervised from its
    beginning, some of it."""
    lengths = [int(sample.mask_n.argmax()) or min(TEXT_PROMPT, len(sample.token_n) // 2) for sample in samples]
    return [sample.token_n[:length].tolist() for sample, length in zip(samples, lengths, strict=True)][:count]
