"""From a composed configuration to a trained drafter: what the scripts in train/ share.

A script trains the methods whose facts name it. `run` is the rest, in the order in which things happen: check what a typo can
break, load the target and the data, make the drafter, `fit`, and write the summary.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from specdec import config, hub, lock, method, rejection
from specdec.checkpoint import native
from specdec.checkpoint.native import Checkpoint
from specdec.config.pages import Train
from specdec.drafter.batch import Sample
from specdec.drafter.trainable import TrainableDrafter
from specdec.files import read_json_object, write_json
from specdec.measure import logger, records
from specdec.measure.report import console, page
from specdec.measure.report import training as training_report
from specdec.model.device import memory_line
from specdec.model.target import CausalLM, choose_device, fastest_dtype
from specdec.policy.calibration import ConfidenceRecorder
from specdec.script import is_main_process
from specdec.training import features, loop
from specdec.training.data import Loaded
from specdec.training.evaluate import acceptance, calibrated, prompts_of
from specdec.training.samples import draft_vocabulary, fingerprint, mask_token, split_validation
from specdec.training.state import mixed_precision

# settings that may change when a run is resumed
CHANGEABLE = (
    "max_steps",
    "num_epochs",
    "log_every",
    "logging_first_step",
    "eval_every",
    "save_every",
    "keep",
    "micro_batch_size",
    "sharding",
    "max_nonfinite",
)

# the widest target that the demo's recipes, of minutes on a CPU, are for
DEMO_HIDDEN_SIZE = 1024

PLOT_EVERY = 60.0  # seconds between two plots of a run that goes on

# settings of a method that are for decoding alone
NOT_TRAINED = ("model", "revision", "parallel_drafting")

# every batch has shapes of its own, and oneDNN would keep the kernels of 1,024 of them: gigabytes that are never used again
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
# a drafter's products in bfloat16 may be summed in any order
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "ALL")


@dataclass
class Recipe:
    """What a run trains, checked without a model. architecture, init, objective: keys of train.drafter, train.init and
    train.objective as the drafter's class has them."""

    drafter_class: type[TrainableDrafter]
    architecture: dict[str, Any]
    init: Any
    objective: Any

    @classmethod
    def check(cls, cfg: Train, script: str) -> Recipe:
        """Raises ValueError, one line, for what a typo can break. script: the stem of the file in train/ that was started."""
        name = cfg.method.name
        drafter_class: type[TrainableDrafter] = method.find(name)
        if cfg.method.settings.get("parallel_drafting"):
            raise ValueError(f"parallel_drafting=true has a recipe of its own; give method={method.parallel(name)}")
        trained_by = drafter_class.facts.train_script
        if trained_by != script:
            mistake = "has nothing to train" if trained_by is None else f"is trained by train/{trained_by}.py"
            methods = [known for known, facts in method.all_facts().items() if facts.train_script == script]
            raise ValueError(f"method={name} {mistake}; train/{script}.py trains {', '.join(methods)}")
        architecture = dict(cfg.train.drafter)
        if "geometry" in architecture:
            architecture["geometry"] = architecture["geometry"] or {}
        drafter_class.architecture_type(**architecture)
        init = drafter_class.init_type(**cfg.train.init)
        objective = drafter_class.objective_type(**cfg.train.objective)
        return cls(drafter_class, architecture, init, objective)


@lock.released_at_end()
def run(cfg: Train, script: str) -> dict[str, Any]:
    """Train a drafter as the config says. script: the stem of the file in train/ that was started."""
    # everything that a typo can break comes before the weights
    recipe = Recipe.check(cfg, script)
    check_defaults(cfg)
    model_arguments = cfg.model.arguments()
    out_dir = cfg.start()

    processes, device = start_processes(cfg)
    # features need no more precision than decoding has; the drafter's own weights are float32 whatever this says
    target = CausalLM(cfg.model.source, cfg.model.dtype or fastest_dtype(device), str(device), cfg.model.revision)
    data = load_data(cfg, target, processes.is_main_process)
    if recipe.objective.focus is not None and all(sample.rejected_n is None for sample in data.samples):
        raise ValueError(
            f"train.objective.focus={recipe.objective.focus}: the data do not say where drafts were rejected; make them with "
            "train/prepare.py drafter=DIR, or leave focus out"
        )
    samples, held_out = split_validation(data.samples, cfg.data.held_out)
    checkpoint = new_drafter(recipe, target, cfg, samples, held_out)
    drafting = {key: value for key, value in cfg.method.settings.items() if key not in NOT_TRAINED}
    drafter = recipe.drafter_class(target, checkpoint, **drafting)
    source = feature_source(cfg, drafter, recipe.objective, [*samples, *held_out], device, processes.is_main_process)

    identity = identity_of(cfg, recipe, target, checkpoint, data.samples, drafting)
    if processes.is_main_process:
        cfg.claim(identity)
        if data.skipped:
            write_json(out_dir / "left_out.json", data.skipped_at)
    processes.wait_for_everyone()
    feature_sample = first_states(source, samples[:64], drafter.hidden_layers, processes.is_main_process)
    drafter.for_training(recipe.objective, recipe.init, feature_sample, warm_start=cfg.checkpoint is not None)
    prompts = prompts_of(held_out, cfg.eval.num_prompts)

    def evaluate(saved: Path) -> dict[str, Any]:
        """Decode with the drafter as it would be loaded; where it predicts acceptance, calibrate that."""
        proposer: Any = method.build(cfg.method.name, target, model=str(saved), **drafting)
        recorder = None
        if proposer.predicts_acceptance:
            recorder = ConfidenceRecorder()
            proposer.calibrate([])
        verifier = rejection.build("standard")
        decoding = acceptance(target, proposer, verifier, prompts, cfg.eval.max_tokens, cfg.eval.max_batch_size, recorder)
        return decoding if recorder is None else decoding | calibrated(recorder, saved)

    if processes.is_main_process:
        print(memory(drafter, recipe.objective, cfg), file=sys.stderr)
    wandb_run = logger.WandbRun(config.plain(cfg), "train") if processes.is_main_process else None
    metrics = logger.Metrics(out_dir, wandb_run) if wandb_run else None
    with console.training_progress(cfg.train.num_steps(len(samples)), visible=processes.is_main_process) as (advance, show_row):
        plotted_at = time.monotonic()

        def log(row: dict[str, Any]) -> None:
            nonlocal plotted_at
            assert metrics is not None
            metrics.add(row)
            show_row(row)
            if time.monotonic() - plotted_at >= PLOT_EVERY:
                plot(cfg, target, metrics)
                plotted_at = time.monotonic()

        result = loop.fit(
            drafter, source, samples, held_out, cfg.train, out_dir, seed=cfg.seed, evaluate=evaluate if prompts else None,
            log=log, advance=advance, provenance={"identity": identity, "environment": records.environment()},
            resume=cfg.resume,
        )  # fmt: skip
    if metrics is not None and wandb_run is not None:
        write_results(cfg, target, metrics, wandb_run, identity, result)
        console.show(f"written to {out_dir}; decode with it:")
        count = f"method.num_speculative_tokens={drafting['num_speculative_tokens']}"
        print(f"python eval/run.py {model_arguments}checkpoint={out_dir} {count}")  # not wrapped, so that it can be copied
    stop(processes, result)
    return result


def check_defaults(cfg: Train) -> None:
    """Raises ValueError if a larger target than those of the demo would be trained with its recipe or its data because nobody
    chose others."""
    demo = {"train": cfg.train.name.endswith("_demo"), "data": cfg.data.name == "demo"}
    defaults = [group for group, is_demo in demo.items() if is_demo and not config.is_typed(group)]
    if not defaults or is_of_demo_size(cfg.model.source):
        return
    advice = {
        "train": f"train={cfg.train.name.removesuffix('_demo')} (the published recipe)",
        "data": "data=jsonl data.path=FILE, or a set by name (docs/training.md)",
    }
    taken = " ".join(f"{group}={getattr(cfg, group).name}" for group in defaults)
    raise ValueError(
        f"{taken}: the defaults are for a target of 135M, not for {cfg.model.source}; give "
        f"{' and '.join(advice[group] for group in defaults)}, or {taken} to train with them all the same"
    )


def is_of_demo_size(source: str) -> bool:
    """Whether a target is as small as those of the demo, or random; one of the hub is not, since they come from wheels."""
    directory = hub.local(source, "model")
    if directory.is_dir():
        try:
            values = read_json_object(directory / "config.json")
        except ValueError:  # raised again where it is loaded
            return True
        text = values.get("text_config")
        sizes = [part.get("hidden_size") for part in (values, text) if isinstance(part, dict)]
        return any(isinstance(size, int) and size <= DEMO_HIDDEN_SIZE for size in sizes)
    return "/" not in source


def memory(drafter: TrainableDrafter, objective: Any, cfg: Train) -> str:
    """A line with what training takes, and what is free: the target's weights, and of the drafter also gradients and the two
    moments of Adam, all in float32. Activations come on top."""
    target = drafter.target
    trained = [weight.nbytes for weight in drafter.parameters() if weight.requires_grad]
    taken = {
        "target": target.num_parameters * target.dtype.itemsize,
        "drafter": sum(weight.nbytes for weight in drafter.parameters()),
        "gradients and moments": 3 * sum(trained),
    }
    if not cfg.features.path and drafter.needs_target(objective):
        taken["features, at most"] = int(cfg.features.keep_gb * 2**30)
    return memory_line(taken, target.device)


def start_processes(cfg: Train) -> tuple[PartialState, torch.device]:
    """The processes of the run, and the device of this one. Raises ValueError if a batch does not divide into them."""
    device = choose_device(cfg.model.device)
    processes = PartialState(cpu=device.type == "cpu")
    if cfg.train.global_batch_size % processes.num_processes:
        raise ValueError(
            f"train.global_batch_size={cfg.train.global_batch_size} does not divide into {processes.num_processes} processes; "
            f"give a multiple of {processes.num_processes}"
        )
    return processes, processes.device if processes.num_processes > 1 and device.type == "cuda" else device


def load_data(cfg: Train, target: CausalLM, is_main: bool) -> Loaded:
    """The training set, with its notes shown. Raises ValueError if nothing of it is left to train on."""
    data = cfg.data.load(target)
    notes = list(data.notes)
    if cfg.data.path is None and data.header and data.header["target"] != target.name:
        notes.insert(
            0,
            f"the answers of the demo data are those of {data.header['target']}, not of {target.name}; "
            "make data of its own with train/prepare.py",
        )
    for note in notes if is_main else ():
        console.show(f"note: {note}")
    if cfg.data.held_out >= len(data.samples):
        advice = "lower it" if cfg.data.limit is None else f"lower it, or raise data.limit={cfg.data.limit}"
        raise ValueError(f"data.held_out={cfg.data.held_out} leaves nothing of {len(data.samples)} samples; {advice}")
    return data


def feature_source(
    cfg: Train, drafter: TrainableDrafter, objective: Any, samples: Sequence[Sample], device: torch.device, is_main: bool
) -> Any:
    """Where the batches of training come from: tokens alone, hidden states on disk, or a target that runs."""
    if not drafter.needs_target(objective):
        if cfg.features.path and is_main:
            console.show("note: features.path is not read, since this objective learns from the data's tokens alone")
        return features.TokenSource(device)
    if not cfg.features.path:
        return features.OnlineFeatures(drafter.target, drafter.hidden_layers, int(cfg.features.keep_gb * 2**30))
    source = features.StoredFeatures(cfg.features.path, drafter.target, drafter.hidden_layers, cfg.features.layer_ids)
    for sample in samples:  # a missing one is an error now, not in the middle of the run
        source.locate(sample)
    return source


def identity_of(
    cfg: Train, recipe: Recipe, target: CausalLM, checkpoint: Checkpoint, samples: Sequence[Sample], drafting: dict[str, Any]
) -> dict[str, Any]:
    """What must be the same when a run is resumed. drafting: settings of the method."""
    return {
        "target": target.name,
        "target_weights": hub.weights_digest(target.path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "method": cfg.method.name,
        "data": fingerprint(samples),
        "drafter": checkpoint.config,
        "init": recipe.init.model_dump(),
        "objective": recipe.objective.model_dump(),
        "train": cfg.train.model_dump(exclude={"name", "drafter", "init", "objective", *CHANGEABLE})
        | {"mixed_precision": mixed_precision(cfg.train, target.device)},
        "seed": cfg.seed,
        "checkpoint": cfg.checkpoint,
        "checkpoint_weights": hub.weights_digest(native.find(cfg.checkpoint)) if cfg.checkpoint else None,
        # the best checkpoint is chosen by these
        "eval": config.plain(cfg.eval) | {"held_out": cfg.data.held_out} | drafting,
    }


def write_results(
    cfg: Train,
    target: CausalLM,
    metrics: logger.Metrics,
    wandb_run: logger.WandbRun,
    identity: dict[str, Any],
    result: dict[str, Any],
) -> None:
    """summary.json and the plot, and what became of the run on the console."""
    out_dir = Path(cfg.out_dir)
    rows = metrics.rows.rows
    cpu_s = {"cpu_s": round(time.process_time(), 1)}  # of this process; of the last one, if the run was resumed
    outcome = {"environment": records.environment(), "last_metrics": rows[-1] if rows else None}
    write_json(out_dir / "summary.json", identity | result | cpu_s | outcome)
    image = plot(cfg, target, metrics)
    metrics.rows.close()
    report = page.write_training(out_dir)
    wandb_run.finish(result, [image, out_dir / "summary.json", report])
    if result["interrupted"]:
        console.show(f"stopped after step {result['step']} of {result['num_steps']}; resume=true out_dir={out_dir} goes on")
    if result["best"]:
        console.show(training_report.best_line(result["best"]))


def plot(cfg: Train, target: CausalLM, metrics: logger.Metrics) -> Path:
    """train.png of the rows so far."""
    title = f"{cfg.method.name} for {target.name}, {cfg.data.name} data"
    return training_report.plot_training(metrics.rows.rows, title, Path(cfg.out_dir) / "train.png")


def first_states(source: loop.Features, samples: Sequence[Sample], layers: tuple[int, ...], visible: bool) -> Tensor | None:
    """[tokens, T, D] target states of all but the first token of each sample: that is an attention sink, thousands of times
    larger than the others, and would set the scale. None for a drafter that reads none. visible: with a bar."""
    if not layers:
        return None
    with console.one_bar("target's states", len(samples), visible) as advance:
        states = []
        for sample in samples:
            states.append(source([sample]).hidden(layers)[1:])
            advance()
    return torch.cat(states)


def stop(processes: PartialState, result: dict[str, Any]) -> None:
    """If a signal stopped the run, end the process with its exit code, 130 (SIGINT) or 143 (SIGTERM), when all processes are
    here."""
    if result["interrupted"]:
        processes.wait_for_everyone()
        sys.exit(128 + result["stopped_by"])


def new_drafter(
    recipe: Recipe, target: CausalLM, cfg: Train, samples: Sequence[Sample], held_out: Sequence[Sample]
) -> Checkpoint:
    """The checkpoint to begin with: that of cfg.checkpoint, or of a new drafter."""
    drafter_class = recipe.drafter_class
    architecture = recipe.architecture
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
    if size is not None and size < target.vocab_size:
        vocab_ids = draft_vocabulary(samples, size, target.vocab_size)
    elif size is not None and size > target.vocab_size and is_main_process():
        console.show(f"note: train.drafter.draft_vocab_size={size}: all {target.vocab_size} tokens of {target.name} are taken")
    return drafter_class.init_checkpoint(target, architecture, recipe.init, vocab_ids, cfg.seed)


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
