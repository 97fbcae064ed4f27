"""The state of a training run: its processes, optimiser and stop signals, and its checkpoints.

A checkpoint appears under a temporary name and is renamed: a directory with the final name is complete. It holds the drafter as
it is decoded with, and beside it `training/`: the weights as they are trained, the optimiser, and where the run was.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from specdec import script
from specdec.checked import first_line
from specdec.checkpoint import native
from specdec.drafter.batch import Sample
from specdec.drafter.trainable import TrainableDrafter
from specdec.files import apply_umask, write_atomically
from specdec.model import packed_linear
from specdec.run_dir import link
from specdec.training.metrics import MetricWindow
from specdec.training.settings import Settings


def mixed_precision(settings: Settings, device: torch.device) -> str:
    """That of the settings, or what is fast on the device: a CPU without instructions for bfloat16 takes many times as long."""
    is_fast = device.type != "cpu" or packed_linear.has_bfloat16_instructions()
    return settings.mixed_precision or ("bf16" if is_fast else "no")


class TrainState:
    """A run beside its loop.

    step: optimiser steps that are done, skipped ones included; num_skipped: those that were skipped.
    nonfinite: ids of the samples of the last steps, if these were skipped one after the other.
    window: metrics since the last row.
    best: step and mean acceptance length of the best checkpoint.
    pending: the row of this step, if it is not logged yet, and whether its evaluation is due.
    stopped_by: the signal that ended the run.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        settings: Settings,
        out_dir: Path,
        num_samples: int,
        provenance: dict[str, Any],
    ):
        self.drafter = drafter
        self.settings = settings
        self.out_dir = out_dir
        self.provenance = provenance
        self.num_steps = settings.num_steps(num_samples)
        self.step = 0
        self.num_skipped = 0
        self.nonfinite: list[list[str]] = []
        self.window = MetricWindow()
        self.best: dict[str, Any] | None = None
        self.pending: dict[str, Any] | None = None
        self.stopped_by: int | None = None
        # autocast is ours: accelerate's setting is one for the whole process, and a sweep may vary it
        self.accelerator = Accelerator(mixed_precision="no", cpu=drafter.target.device.type == "cpu")
        self.world = self.accelerator.num_processes
        if settings.global_batch_size % self.world:
            raise ValueError(
                f"train.global_batch_size={settings.global_batch_size} does not divide into {self.world} processes; "
                f"give a multiple of {self.world}"
            )
        self.model = self.wrap_distributed()
        parameters = [parameter for _, parameter in self._trained()]
        betas = (settings.adam_beta1, settings.adam_beta2)
        self.optimizer = torch.optim.AdamW(parameters, settings.lr, betas, weight_decay=settings.weight_decay)
        self._signals = script.StopSignals()

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def close(self) -> None:
        self._signals.close()

    # ---------------------------------------------------------------- processes

    def wrap_distributed(self) -> Any:
        """The drafter as the processes call it."""
        self.drafter.train()
        if self.world == 1:
            return self.drafter
        assert isinstance(self.drafter, nn.Module)
        if self.settings.sharding == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            return fully_shard(self.drafter, mesh=init_device_mesh(self.accelerator.device.type, (self.world,)))
        return self.accelerator.prepare_model(self.drafter)

    def stopped(self) -> bool:
        """Whether a signal has come to any process: all of them end after the same step."""
        counts = list(self._signals.counts.values())
        if self.world > 1:
            flags = torch.tensor(counts, dtype=torch.float32, device=self.accelerator.device)
            counts = self.accelerator.reduce(flags, "sum").tolist()
        received = [number for number, count in zip(self._signals.counts, counts, strict=True) if count]
        self.stopped_by = int(max(received)) if received else None
        return bool(received)

    # ---------------------------------------------------------------- a step

    def num_supervised(self, sample: Sample) -> int:
        return self.drafter.num_supervised(sample.mask_n)

    def rank_micro_batches(self, samples: list[Sample]) -> list[list[Sample]]:
        """This process's micro-batches: samples dealt out by length, so that processes finish together."""
        by_length = sorted(samples, key=lambda sample: len(sample.token_n))
        rank_samples = by_length[self.accelerator.process_index :: self.world]
        size = self.settings.micro_batch_size
        return [rank_samples[i : i + size] for i in range(0, len(rank_samples), size)]

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
        """bfloat16 matrix products over float32 weights, if the settings say so."""
        device = self.accelerator.device
        return torch.autocast(device.type, torch.bfloat16, enabled=mixed_precision(self.settings, device) == "bf16")

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

    def count_step(self, samples: list[Sample], num_supervised: int, applied: bool) -> None:
        """The step is done. Raises ValueError if it was not applied, and too many before it in a row were not."""
        if applied:
            self.nonfinite = []
            self.window.commit(num_supervised)
        else:
            self.nonfinite.append([sample.id for sample in samples])
            if len(self.nonfinite) >= self.settings.max_nonfinite:
                raise ValueError(
                    f"the loss or its gradient was not finite in {len(self.nonfinite)} steps in a row, up to step "
                    f"{self.step + 1}; samples of the last: {', '.join(self.nonfinite[-1][:8])}; lower train.lr, or look at "
                    "these"
                )
            self.num_skipped += 1
            self.window.discard()
        self.step += 1

    def take_metrics(self) -> dict[str, Any]:
        """Metrics of the window, over all processes; the next window begins."""
        metrics = self.window.row(self.accelerator)
        self.window = MetricWindow()
        return metrics

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.drafter.named_parameters() if p.requires_grad]

    # ---------------------------------------------------------------- checkpoints

    def directory(self, step: int) -> Path:
        return self.out_dir / "checkpoints" / f"step-{step:08d}"

    def checkpoints(self) -> list[Path]:
        """Those that exist, oldest first."""
        return sorted(path for path in self.out_dir.glob("checkpoints/step-*") if re.fullmatch(r"step-\d{8}", path.name))

    def save(self, scheduled: bool, pending: dict[str, Any] | None) -> None:
        """Write the checkpoint of this step. scheduled: whether a run that was never stopped has one at this step too."""
        self.pending = pending
        window = self.window.state(self.accelerator)
        state = {key: _gathered(tensor) for key, tensor in self.drafter.state_dict().items()}
        tensors = {f"weight:{key}": value for key, value in state.items()}
        for name, parameter in self._trained():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}:{name}"] = _gathered(value)
        final = self.directory(self.step)
        if self.is_main:
            temporary = final.with_name(f".{final.name}.tmp")
            training = temporary / "training"
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                training.mkdir(parents=True)
                provenance = native.provenance(step=self.step, **self.provenance)
                self.drafter.write(temporary, state, provenance, self._card())
                save_file({key: value.contiguous() for key, value in tensors.items()}, training / "state.safetensors")
                apply_umask(training / "state.safetensors")
                run_state = {
                    "step": self.step,
                    "num_steps": self.num_steps,
                    "skipped_steps": self.num_skipped,
                    "best": self.best,
                    "scheduled": scheduled,
                    "pending": self.pending,
                    "window": window,
                    "nonfinite": self.nonfinite,
                }
                (training / "state.json").write_text(json.dumps(run_state) + "\n")
                if final.exists():  # a run that was resumed from before it
                    final.rename(final.with_name(f".{final.name}.old"))
                temporary.rename(final)
                link(self.out_dir / "last", final)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(temporary, ignore_errors=True)
                raise OSError(
                    f"the checkpoint of step {self.step} could not be written ({first_line(error)}); earlier ones are whole; "
                    "make room and go on with resume=true"
                ) from None
        self.accelerator.wait_for_everyone()

    def update_pending(self, pending: dict[str, Any] | None) -> None:
        """What the checkpoint of this step still lacks, written into it together with the best."""
        self.pending = pending
        if self.is_main:
            self._update_checkpoint(best=self.best, pending=pending)

    def _update_checkpoint(self, **changes: Any) -> None:
        """Change entries of the run's state in the checkpoint of this step."""
        path = self.directory(self.step) / "training" / "state.json"
        write_atomically(path, json.dumps(json.loads(path.read_text()) | changes) + "\n")

    def load(self) -> None:
        """Go on from the last checkpoint, if there is one: weights, optimiser, and where the run was. Any number of processes
        may have written it."""
        checkpoints = self.checkpoints()
        if not checkpoints:  # interrupted before the first one
            return
        training = checkpoints[-1] / "training"
        try:
            state = json.loads((training / "state.json").read_text())
            self.step = state["step"]
            self.num_skipped = state["skipped_steps"]
            self.best = state["best"]
            self.pending = state.get("pending")
            self.nonfinite = state.get("nonfinite", [])
            self.window = MetricWindow.from_state(state.get("window"), self.accelerator)
            planned = state["num_steps"]
            tensors = load_file(training / "state.safetensors")
        except (OSError, ValueError, KeyError, IndexError, TypeError, SafetensorError) as error:
            raise ValueError(
                f"{training}: cannot be read ({first_line(error)}); remove {checkpoints[-1]} to go on from before"
            ) from None
        if planned != self.num_steps and self.is_main:
            print(
                f"note: the run was to have {planned} steps and has {self.num_steps} now: "
                "from here on the learning rate is that of the new length",
                file=sys.stderr,
            )
        if self.best and not self.directory(self.best["step"]).exists():
            self.best = None  # it was removed: the next one that is evaluated is the best again
        if self.is_main:
            link(self.out_dir / "last", checkpoints[-1])
        self.link_best()
        with torch.no_grad():
            for key, value in self.drafter.state_dict().items():
                _copy_into(value, tensors[f"weight:{key}"])
        for name, parameter in self._trained():
            of_parameter = {key.partition(":")[0]: value for key, value in tensors.items() if key.partition(":")[2] == name}
            of_parameter.pop("weight", None)
            self.optimizer.state[parameter] = {
                key: value if value.ndim == 0 else _laid_out_as(parameter, value) for key, value in of_parameter.items()
            }
        self.accelerator.wait_for_everyone()  # the files that are read here are written again

    def update_best(self, metrics: dict[str, Any]) -> None:
        """The checkpoint of this step is the best if its acceptance is the highest so far."""
        value = metrics["mean_acceptance_length"]
        if self.best is None or value > self.best["mean_acceptance_length"]:
            self.best = {"step": self.step, "mean_acceptance_length": value}

    def link_best(self) -> None:
        if self.is_main and self.best:
            link(self.out_dir / "best", self.directory(self.best["step"]))

    def prune(self) -> None:
        """Remove all checkpoints but the last few and the best. One that exists because the run was stopped is removed as soon
        as there is a later one."""
        if not self.is_main:
            return
        paths = self.checkpoints()
        kept = set([path for path in paths if path == paths[-1] or _is_scheduled(path)][-self.settings.keep :])
        if self.best:
            kept.add(self.directory(self.best["step"]))
        for path in paths:
            if path not in kept:
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.old")), ignore_errors=True)
        for leftover in self.out_dir.glob("checkpoints/.step-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _card(self) -> str:
        name = self.drafter.name
        target = self.drafter.target.name
        return (
            f"# {name} drafter for {target}\n\nTrained with specdec, step {self.step} of {self.num_steps}; "
            "see provenance.json. Decode with it:\n\n"
            f"```\npython eval/run.py method={name} checkpoint=DIR model.path={target}\n```\n"
        )


def _is_scheduled(checkpoint: Path) -> bool:
    """Whether a run that is never stopped has a checkpoint at this step."""
    try:
        return bool(json.loads((checkpoint / "training" / "state.json").read_text()).get("scheduled", True))
    except (OSError, ValueError, AttributeError):
        return True


def _gathered(tensor: Tensor) -> Tensor:
    """A copy on the CPU, gathered from all processes."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to("cpu", copy=True)


def _laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """A gathered tensor on the parameter's device, sharded as the parameter is."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)


def _copy_into(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape:
        raise ValueError(
            f"resume=true, but a tensor is {list(value.shape)} there and {list(tensor.shape)} here; use the same settings"
        )
    tensor.copy_(_laid_out_as(tensor, value))
