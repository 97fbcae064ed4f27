"""The training loop: `fit` trains a drafter on the target's hidden states, on one process or many.

An optimiser step, in the order in which things happen:

    samples   of the step, a function of (seed, step): nothing to save, the same for any number of processes
    features  the target's hidden states and labels, by its forward or from artifacts
    loss      of every micro-batch, divided by the supervised tokens of the whole step, over processes and micro-batches
    update    gradients are averaged over processes, clipped, and applied; a step with a gradient that is not finite is skipped
    record    metrics as sums, divided when they are written; now and then a checkpoint, and decoding with it: real acceptance

The best checkpoint is the one whose drafts the engine accepts most, not the one with the lowest loss.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specdec.drafter.batch import Batch, Sample
from specdec.drafter.trainable import TrainableDrafter
from specdec.training.evaluate import validation_metrics
from specdec.training.samples import batch_indices
from specdec.training.settings import Settings
from specdec.training.state import TrainState

Features = Callable[[Sequence[Sample]], Batch]


def fit(
    drafter: TrainableDrafter,
    features: Features,
    samples: Sequence[Sample],
    validation: Sequence[Sample],
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

    features: makes a batch of samples.
    validation: samples for the validation loss.
    evaluate: metrics of decoding with the checkpoint in a directory, with `mean_acceptance_length`.
    log: takes a row of metrics (main process only), and of a resumed run perhaps its last one again.
    advance: takes the number of steps that were done.
    provenance: for the checkpoints.
    resume: go on from out_dir's last checkpoint.

    Returns the best and the last checkpoint, and how training ended. Raises ValueError if losses are not finite again and
    again.

    A signal ends the run after the step, with a checkpoint and without an evaluation that may be due. What a checkpoint still
    lacks (its evaluation, its row) is in its state and comes first when the run is resumed: rows and best are those of a run
    that was never stopped.
    """
    with contextlib.closing(TrainState(drafter, settings, out_dir, len(samples), provenance or {})) as run:

        def finish(row: dict[str, Any], to_evaluate: bool) -> None:
            """Evaluate the checkpoint of this step if that is due, and log its row."""
            if to_evaluate:
                row |= validation_metrics(run, features, validation)
                if run.is_main and evaluate is not None:
                    decoding = evaluate(run.directory(run.step))
                    run.update_best(decoding)
                    row |= decoding
                run.update_pending({"row": row, "evaluate": False})
                run.link_best()
                run.accelerator.wait_for_everyone()
            run.prune()
            if run.is_main:
                log(row)
            run.update_pending(None)

        if resume:
            run.load()
            advance(run.step)
            if run.pending is not None:
                finish(run.pending["row"], run.pending["evaluate"])
        stopping = run.stopped()
        while run.step < run.num_steps and not stopping:
            lr = settings.lr_at(run.step, run.num_steps)
            indices = batch_indices(run.step, len(samples), settings.global_batch_size, seed)
            grad_norm = train_step(run, features, [samples[i] for i in indices], lr, f"{seed} {run.step}")
            advance(1)

            stopping = run.stopped()
            last = run.step == run.num_steps
            log_due = last or run.step % settings.log_every == 0 or (run.step == 1 and settings.logging_first_step)
            evaluate_due = last or run.step % settings.eval_every == 0
            save_due = last or run.step % settings.save_every == 0
            row = None
            if log_due or evaluate_due or save_due:
                row = {
                    "step": run.step,
                    "epoch": round(run.step * settings.global_batch_size / len(samples), 4),
                    "lr": lr,
                    "grad_norm": grad_norm,
                    "skipped_steps": run.num_skipped,
                } | run.take_metrics()
                _trim_heap()
            if evaluate_due or save_due or stopping:
                to_evaluate = evaluate_due and (evaluate is not None or len(validation) > 0)
                pending = None if row is None else {"row": row, "evaluate": to_evaluate}
                run.save(evaluate_due or save_due, pending)
                if row is not None and not (stopping and to_evaluate):
                    finish(row, to_evaluate)
                else:
                    run.prune()
            elif row is not None and run.is_main:
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


def train_step(run: TrainState, features: Features, samples: list[Sample], lr: float, seed: str) -> float | None:
    """One optimiser step on these samples of all processes. Returns the norm of the gradient, or None if it was not finite and
    the step is skipped."""
    began = time.perf_counter()
    supervised = sum(map(run.num_supervised, samples))
    micro_batches = run.rank_micro_batches(samples)
    for i, micro_batch in enumerate(micro_batches):
        features_from = time.perf_counter()
        batch = features(micro_batch)
        if run.settings.loss_normalization == "samples":
            supervised_B = np.array([max(run.num_supervised(sample), 1) for sample in micro_batch])
            batch = replace(batch, weight_B=supervised / len(samples) / supervised_B)
        model_from = time.perf_counter()
        with run.accumulate(last=i == len(micro_batches) - 1), run.autocast():
            loss, sums = run.model(batch, run.step / run.num_steps, seed)
        # gradients are averaged over processes, and the loss is a sum over all of them
        run.accelerator.backward(loss * (run.world / max(supervised, 1)))
        run.window.add(loss.detach(), sums)
        run.window.add_times(features_s=model_from - features_from, model_s=time.perf_counter() - model_from)
    update_from = time.perf_counter()
    grad_norm = run.update(lr)
    run.count_step(samples, supervised, applied=grad_norm is not None)
    ended = time.perf_counter()
    run.window.add_times(model_s=ended - update_from, total_s=ended - began)
    return grad_norm


def _trim_heap() -> None:
    """Batches of many sizes leave holes in glibc's heap, which it keeps unless asked to trim; other libraries have no such
    call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
