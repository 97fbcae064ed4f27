"""From a composed configuration to a trained drafter: what the scripts in train/ share.

A script trains the methods whose facts name it. `run` is the rest, in the order in which things happen: check what a typo can
break, load the target and the data, make the drafter, `fit`, and write the summary.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from specdec import config, hub, method, rejection
from specdec.checkpoint import native
from specdec.checkpoint.native import Checkpoint
from specdec.config.pages import Train
from specdec.drafter.batch import Batch
from specdec.drafter.trainable import TrainableDrafter
from specdec.measure import logger, records
from specdec.measure.report import console
from specdec.measure.report import training as training_report
from specdec.model.target import CausalLM, choose_device
from specdec.training import features, loop
from specdec.training.evaluate import acceptance, prompts_of
from specdec.training.samples import draft_vocabulary, fingerprint, mask_token, split_validation

# settings that may change when a run is resumed
CHANGEABLE = (
    "max_steps",
    "num_epochs",
    "log_every",
    "eval_every",
    "save_every",
    "keep",
    "micro_batch_size",
    "sharding",
    "max_nonfinite",
)


# settings of a method that training has of its own
NOT_TRAINED = ("model", "revision", "parallel_drafting")

# every batch has shapes of its own, and oneDNN would keep the kernels of 1,024 of them: gigabytes that are never used again
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def run(cfg: Train, script: str) -> dict[str, Any]:
    """Train a drafter as the config says. script: the stem of the file in train/ that was started."""
    # everything that a typo can break comes before the weights
    name = cfg.method.name
    settings = cfg.train
    drafter_class: type[TrainableDrafter] = method.find(name)
    if cfg.method.settings.get("parallel_drafting"):
        raise ValueError(f"parallel_drafting=true has a recipe of its own; give method={method.parallel(name)}")
    trained_by = drafter_class.facts.train_script
    if trained_by != script:
        mistake = "has nothing to train" if trained_by is None else f"is trained by train/{trained_by}.py"
        methods = [known for known, facts in method.all_facts().items() if facts.train_script == script]
        raise ValueError(f"method={name} {mistake}; train/{script}.py trains {', '.join(methods)}")
    architecture = dict(settings.drafter)
    if "geometry" in architecture:
        architecture["geometry"] = architecture["geometry"] or {}
    drafter_class.architecture_type(**architecture)
    init = drafter_class.init_type(**settings.init)
    objective = drafter_class.objective_type(**settings.objective)
    model_arguments = cfg.model.arguments()
    out_dir = cfg.start()

    device = choose_device(cfg.model.device)
    processes = PartialState(cpu=device.type == "cpu")
    if settings.global_batch_size % processes.num_processes:
        raise ValueError(
            f"train.global_batch_size={settings.global_batch_size} does not divide into {processes.num_processes} processes; "
            f"give a multiple of {processes.num_processes}"
        )
    if processes.num_processes > 1 and device.type == "cuda":
        device = processes.device
    # features need no more precision than decoding has; the drafter's own weights are float32 whatever this says
    target = CausalLM(cfg.model.source, cfg.model.dtype or "bfloat16", str(device), cfg.model.revision)
    loaded = cfg.data.load(target)
    if cfg.data.path is None and loaded.header and loaded.header["target"] != target.name and processes.is_main_process:
        console.show(
            f"note: the answers of the demo data are those of {loaded.header['target']}, not of {target.name}; "
            "make data of its own with train/prepare.py"
        )
    for note in loaded.notes if processes.is_main_process else ():
        console.show(f"note: {note}")
    if cfg.data.held_out >= len(loaded.samples):
        raise ValueError(f"data.held_out={cfg.data.held_out} leaves nothing of {len(loaded.samples)} samples; lower it")
    samples, held_out = split_validation(loaded.samples, cfg.data.held_out)

    checkpoint = new_drafter(drafter_class, target, cfg, architecture, init, samples, held_out)
    drafting = {key: value for key, value in cfg.method.settings.items() if key not in NOT_TRAINED}
    drafter = drafter_class(target, checkpoint, **drafting)
    source: Any
    if not drafter.needs_target(objective):
        source = features.TokenSource(device)
        if cfg.features.path and processes.is_main_process:
            console.show("note: features.path is not read, since this objective learns from the data's tokens alone")
    elif cfg.features.path:
        source = features.StoredFeatures(cfg.features.path, target, drafter.hidden_layers, cfg.features.layer_ids)
        for sample in (*samples, *held_out):  # a missing one is an error now, not in the middle of the run
            source.locate(sample)
    else:
        source = features.OnlineFeatures(target, drafter.hidden_layers, int(cfg.features.keep_gb * 2**30))
    feature_sample = without_first_tokens(source(samples[:64]), drafter.hidden_layers) if drafter.hidden_layers else None
    drafter.for_training(objective, init, feature_sample, warm_start=cfg.checkpoint is not None)

    identity = {
        "target": target.name,
        "target_weights": hub.weights_digest(target.path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "method": name,
        "data": fingerprint(loaded.samples),
        "drafter": checkpoint.config,
        "init": init.model_dump(),
        "objective": objective.model_dump(),
        "train": settings.model_dump(exclude={"name", "drafter", "init", "objective", *CHANGEABLE}),
        "seed": cfg.seed,
        "checkpoint": cfg.checkpoint,
        "checkpoint_weights": hub.weights_digest(native.find(cfg.checkpoint)) if cfg.checkpoint else None,
        # the best checkpoint is chosen by these
        "eval": config.plain(cfg.eval) | {"held_out": cfg.data.held_out} | drafting,
    }
    if processes.is_main_process:
        cfg.claim(identity)
        if loaded.skipped:
            records.write_json(out_dir / "left_out.json", loaded.skipped_at)
    processes.wait_for_everyone()
    prompts = prompts_of(held_out, cfg.eval.num_prompts)

    def evaluate(saved: Path) -> dict[str, Any]:
        """Decode with the drafter as it would be loaded."""
        proposer = method.build(name, target, model=str(saved), **drafting)
        return acceptance(target, proposer, rejection.build("standard"), prompts, cfg.eval.max_tokens, cfg.eval.max_batch_size)

    metrics = logger.Metrics(out_dir, config.plain(cfg)) if processes.is_main_process else None
    with console.training_progress(settings.num_steps(len(samples)), visible=processes.is_main_process) as (advance, show_row):

        def log(row: dict[str, Any]) -> None:
            assert metrics is not None
            metrics.add(row)
            show_row(row)

        result = loop.fit(
            drafter, source, samples, held_out, settings, out_dir, seed=cfg.seed, evaluate=evaluate if prompts else None,
            log=log, advance=advance, provenance={"identity": identity, "environment": records.environment()},
            resume=cfg.resume,
        )  # fmt: skip
    if metrics is None:
        stop(processes, result)
        return result
    last = metrics.rows.rows[-1] if metrics.rows.rows else None
    cpu_s = {"cpu_s": round(time.process_time(), 1)}  # of this process; of the last one, if the run was resumed
    summary = identity | result | cpu_s | {"environment": records.environment(), "last_metrics": last}
    records.write_json(out_dir / "summary.json", summary)
    title = f"{name} for {target.name}, {cfg.data.name} data"
    plot = training_report.plot_training(metrics.rows.rows, title, out_dir / "train.png")
    where = metrics.close(result, [plot])
    if result["interrupted"]:
        console.show(f"stopped after step {result['step']} of {result['num_steps']}; resume=true out_dir={out_dir} goes on")
    if result["best"]:
        best = result["best"]
        console.show(
            f"best: step {best['step']}, mean acceptance length {best['mean_acceptance_length']:.3f} on held-out prompts"
        )
    if where:
        console.show(f"wandb: {where}")
    console.show(f"written to {out_dir}; decode with it:")
    count = f"method.num_speculative_tokens={drafting['num_speculative_tokens']}"
    print(f"python eval/run.py {model_arguments}checkpoint={out_dir} {count}")  # not wrapped, so that it can be copied
    stop(processes, result)
    return result


def without_first_tokens(batch: Batch, layers: tuple[int, ...]) -> Tensor:
    """[tokens, T, D] target states of all but the first token of each sample: that is an attention sink, thousands of times
    larger than the others, and would set the scale."""
    start_B = np.cumsum(batch.length_B) - batch.length_B
    is_first_N = np.zeros(len(batch.token_N), dtype=bool)
    is_first_N[start_B] = True
    states = batch.hidden(layers)
    return states[torch.from_numpy(~is_first_N).to(states.device)]


def stop(processes: PartialState, result: dict[str, Any]) -> None:
    """If a signal stopped the run, end the process with its exit code, 130 (SIGINT) or 143 (SIGTERM), when all processes are
    here."""
    if result["interrupted"]:
        processes.wait_for_everyone()
        sys.exit(128 + result["stopped_by"])


def new_drafter(
    drafter_class: type[TrainableDrafter], target: CausalLM, cfg: Train, architecture: dict[str, Any], init: Any, samples: Any,
    held_out: Any,
) -> Checkpoint:  # fmt: skip
    """The checkpoint to begin with: that of cfg.checkpoint, or of a new drafter."""
    checkpoint = drafter_class.load_checkpoint(target, cfg.checkpoint, None) if cfg.checkpoint else None
    key = drafter_class.facts.mask_key
    if key is not None:
        token = architecture[key]
        if token is None and checkpoint is not None:
            token = checkpoint.config.get(key)
        architecture[key] = mask_token((*samples, *held_out), tokenizer_of(target), target.vocab_size, token)
        if checkpoint is not None and checkpoint.config.get(key) is None:  # it was not trained with a mask token before
            checkpoint.config[key] = architecture[key]
    if checkpoint is not None:
        return same_drafter(checkpoint, drafter_class, target, architecture)
    size = architecture.get("draft_vocab_size")
    vocab_ids = None
    if size is not None and size != target.vocab_size:
        vocab_ids = draft_vocabulary(samples, size, target.vocab_size)
    return drafter_class.init_checkpoint(target, architecture, init, vocab_ids, cfg.seed)


def tokenizer_of(target: CausalLM) -> Any:
    """The target's tokenizer; None if it has none."""
    try:
        return target.tokenizer
    except ValueError:
        return None


def as_argument(value: Any) -> str:
    """A value as the command line has it."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def same_drafter(
    checkpoint: Checkpoint, drafter_class: type[TrainableDrafter], target: CausalLM, architecture: dict[str, Any]
) -> Checkpoint:
    """The checkpoint, if it has every value of the recipe's architecture that is not null. Raises ValueError for one that
    differs."""
    checkpoint.check(drafter_class.name, target)
    required = drafter_class.required_config(target, architecture)
    if architecture.get("draft_vocab_size"):
        required["draft_vocab_size"] = min(architecture["draft_vocab_size"], target.vocab_size)
    for key, value in required.items():
        present = checkpoint.config.get(key)
        if present != value:
            raise ValueError(
                f"train.drafter.{key} is {as_argument(value)}, and {checkpoint.name} has {as_argument(present)}; "
                f"give train.drafter.{key}={as_argument(present)} to start from it"
            )
    return checkpoint
