"""The native checkpoint: config.json, model.safetensors, provenance.json and a model card, in one directory.

Tensor names and config keys are those of the EAGLE family's raw format where it has them (`fc.weight`, `layers.0.*`, `d2t`,
...). Nothing in the directory is executed or unpickled.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec import __version__, files, hub
from specdec.checked import first_line, nearest, short_repr
from specdec.files import apply_umask, read_json
from specdec.hub import MAX_LAYERS
from specdec.model.target import CausalLM, is_finite

NAME = "native"  # as `format=` of train/share.py
FORMAT = "specdec-drafter"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_COUNTS = ("num_hidden_layers", "num_modules", "num_heads")
_WIDTHS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass
class Checkpoint:
    """The config and the weights of a drafter.

    method: that drafts with it.
    config: settings of the method's modules.
    target: facts about the model it was trained for, as far as they are known.
    tensors: None for a drafter whose weights are still to be drawn.
    name: for errors, a directory if it was read from one.
    copies: parts of the target that a foreign file holds, by their name there, to be compared with the target.
    """

    method: str
    config: dict[str, Any]
    target: dict[str, Any]
    tensors: dict[str, Tensor] | None
    name: str = "a drafter in memory"
    copies: dict[str, Tensor] | None = None

    def check(self, method: str, target: CausalLM) -> None:
        """Raise ValueError, one line, if this is not a drafter of that method for that target."""
        if self.method != method:
            raise ValueError(f"{self.name} is a drafter of method {self.method!r}, not {method!r}; say method={self.method}")
        for key, value in facts(target).items():
            if key != "name" and self.target.get(key, value) != value:
                trained = self.target.get("name", "another target")
                raise ValueError(
                    f"{self.name} was trained for {trained} ({key} {self.target[key]}), and the target "
                    f"{target.name} has {key} {value}; use the target that it was trained for"
                )
        for key, tensor in (self.copies or {}).items():
            if not _is_same(tensor, target_part(target, key)):
                raise ValueError(
                    f"{self.name} has a part of its own, {key}, which is not that of {target.name}; a trained "
                    f"{'embedding' if key.startswith('embed') else 'output layer'} is not supported, drafters here share the "
                    "target's: use the target that it was trained for, or a drafter whose copy was not trained"
                )
        if self.config.get(LAYER_IDS, ()) is None:
            engine_default_ids(target.num_layers, self.name)


def default_ids(num_layers: int) -> list[int]:
    """The layers that vLLM and SGLang tap where a checkpoint names none."""
    return [2, num_layers // 2, num_layers - 3]


def engine_default_ids(num_layers: int, name: str) -> list[int]:
    """`default_ids`. Raises ValueError, one line, if they are not three ascending layers."""
    ids = default_ids(num_layers)
    if not 0 < ids[0] < ids[1] < ids[2]:
        raise ValueError(
            f"{name}: no {LAYER_IDS} in its config, and the default {ids} of {num_layers} layers is not three of them; "
            "write the ids"
        )
    return ids


def target_part(target: CausalLM, key: str) -> Tensor:
    """What a drafter shares with its target, by its name in a drafter's file: [V, D]."""
    assert key in ("embed_tokens.weight", "lm_head.weight"), key
    if key == "lm_head.weight":
        return target.head_rows()[0]
    with torch.no_grad():
        rows: Tensor = target.embedding(torch.arange(target.vocab_size, device=target.device))
    return rows


def _is_same(copy: Tensor, part: Tensor) -> bool:
    """Equal but for the rounding of 16 bits, by which a file and a target may differ."""
    return copy.shape == part.shape and torch.allclose(part.float().cpu(), copy.float(), rtol=2**-7, atol=1e-6)


def facts(target: CausalLM) -> dict[str, Any]:
    """What must be equal for a drafter to fit a target, and the target's name."""
    return {
        "name": target.name,
        "model_type": target.config.model_type,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": target.num_layers,
        "vocab_size": target.vocab_size,
    }


# ------------------------------------------------------------------------------------------------ writing


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, in every format. Raises OSError, one line, if it could not be written."""
    try:
        contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, path, metadata={"format": "pt"})
        apply_umask(path)
    except SafetensorError as error:
        raise OSError(f"{path.parent}: the weights could not be written ({first_line(error)}); is the disk full?") from None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write config.json or provenance.json, of a native checkpoint or a draft model."""
    path.write_text(json.dumps(value, indent=1, default=str) + "\n")


def save(directory: Path, checkpoint: Checkpoint, provenance: dict[str, Any], card: str) -> None:
    """Write a checkpoint into a directory that exists and nobody reads yet; the caller renames it when it is complete.

    provenance: where the checkpoint comes from, see `provenance`.
    card: text of README.md.
    """
    assert checkpoint.tensors is not None
    write_weights(directory / "model.safetensors", checkpoint.tensors)
    config = {
        "format": FORMAT,
        "format_version": 1,
        "method": checkpoint.method,
        "drafter": checkpoint.config,
        "target": checkpoint.target,
    }
    write_json(directory / "config.json", config)
    write_json(directory / "provenance.json", provenance)
    (directory / "README.md").write_text(card)


def add_to_config(directory: Path, **values: Any) -> None:
    """Add keys to the drafter's config of a checkpoint that is complete."""
    path = directory / "config.json"
    config = read_json(path)
    config["drafter"] |= values
    files.write_json(path, config)


def provenance(**extra: Any) -> dict[str, Any]:
    """Where a checkpoint comes from: the command, versions, the code's revision, and what the caller adds."""
    import transformers

    root = Path(__file__).parents[2]
    revision = None
    if shutil.which("git") and (root / ".git").exists():
        done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True)
        revision = done.stdout.strip() or None
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "specdec": __version__,
        "git_revision": revision,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **extra,
    }


# ------------------------------------------------------------------------------------------------ reading


def load(path: str | Path, revision: str | None = None) -> Checkpoint:
    """Read a checkpoint: a directory, a training run's directory (its best), or a hub id. Raises ValueError for what is
    not one."""
    directory = find(path, revision)
    config = read_json(directory / "config.json")
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        kind = f"a model of type {config['model_type']!r}" if isinstance(config, dict) and "model_type" in config else "not one"
        raise ValueError(f"{directory}: no native drafter checkpoint ({kind}); give the directory that train/eagle.py wrote")
    return read(directory, config)


def read(directory: Path, config: dict[str, Any]) -> Checkpoint:
    """The checkpoint of a directory. config: its config.json, which names this format. Raises ValueError, one line, for one
    that is not complete."""
    if config.get("format_version") != 1:
        raise ValueError(
            f"{directory}: format_version {config.get('format_version')!r} is not 1; use the version that wrote it"
        )
    types: dict[str, type] = {"method": str, "drafter": dict, "target": dict}
    for key, expected in types.items():
        if not isinstance(config.get(key), expected):
            raise ValueError(
                f"{directory / 'config.json'}: {key} is {short_repr(config.get(key))}; the checkpoint is not complete"
            )
    try:
        tensors = load_file(directory / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{directory}: model.safetensors cannot be read ({first_line(error)})") from None
    check_values(tensors, str(directory))
    check_sizes(config["drafter"], tensors, str(directory))
    return Checkpoint(config["method"], config["drafter"], config["target"], tensors, str(directory))


def find(path: str | Path, revision: str | None = None) -> Path:
    """The directory of a checkpoint: itself, `best` or else `last` of a training run, or a copy from the hub."""
    directory = hub.locate(path, "checkpoint") or hub.resolve(str(path), revision, hub.DRAFTER_INSTEAD)
    if (directory / "config.json").exists() or (directory / hub.ADAPTER).exists():
        return hub.check_config(directory)
    for name in ("best", "last"):
        if (directory / name / "config.json").exists():
            return hub.check_config(directory / name)
    raise ValueError(f"checkpoint {path}: neither a checkpoint (config.json) nor a training run with one in best or last")


def check_sizes(config: dict[str, Any], tensors: dict[str, Tensor], name: str) -> None:
    """Raise ValueError for a size that the tensors beside the config cannot have: modules of that size would be made first,
    which can take all memory or never end."""
    geometry = config.get("geometry") or {}
    if not isinstance(geometry, dict):
        raise ValueError(f"{name}: geometry is {short_repr(geometry)} in config.json, and should be a mapping")
    widest = max((max(tensor.shape, default=0) for tensor in tensors.values()), default=0)
    limits = dict.fromkeys(_COUNTS, min(len(tensors), MAX_LAYERS)) | dict.fromkeys(("n_predict", "num_depths"), MAX_LAYERS)
    limits |= dict.fromkeys(("inner_dim", "markov_rank", *_WIDTHS), widest)
    if not isinstance(config.get("own_lm_head"), bool | None):
        raise ValueError(
            f"{name}: own_lm_head is {short_repr(config['own_lm_head'])} in config.json, and should be true or false"
        )
    for key, value in (config | geometry).items():
        if key in limits and value is not None and not (type(value) is int and 1 <= value <= limits[key]):
            raise ValueError(
                f"{name}: {key} is {short_repr(value)} in config.json, and its tensors allow 1..{limits[key]}; "
                "take another copy of the checkpoint"
            )


def fill(module: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Load the tensors into a module. Raises ValueError for a name or a shape that does not fit, or that is missing."""
    assert checkpoint.tensors is not None
    state = module.state_dict()
    check_values(checkpoint.tensors, checkpoint.name)
    for key, tensor in checkpoint.tensors.items():
        if key not in state:
            raise ValueError(f"{checkpoint.name}: unknown tensor {key!r}; {nearest(key, state)}")
        if state[key].is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{checkpoint.name}: {key} is {tensor.dtype}, and should be like {state[key].dtype}")
        if state[key].shape != tensor.shape:
            raise ValueError(
                f"{checkpoint.name}: {key} is {list(tensor.shape)}, and its config asks for {list(state[key].shape)}"
            )
    if missing := sorted(set(state) - set(checkpoint.tensors)):
        raise ValueError(f"{checkpoint.name}: the weights lack {missing[0]!r}")
    if "d2t" in state and not state["d2t"].numel():
        raise ValueError(f"{checkpoint.name}: d2t is empty: no token could be drafted; take another checkpoint")
    module.load_state_dict(checkpoint.tensors)


def check_values(tensors: dict[str, Tensor], name: str) -> None:
    """Raise ValueError, one line, for nan or inf, for integer weights, and for ids that are floating-point numbers."""
    for key, tensor in tensors.items():
        is_ids = key == "d2t"
        if tensor.is_floating_point() if is_ids else not tensor.is_floating_point() and key != "t2d":  # t2d is boolean
            dtype = str(tensor.dtype).removeprefix("torch.")
            expected = "ids, which are integers" if is_ids else "a weight, which is bfloat16, float16 or float32"
            raise ValueError(f"{name}: {key} is {dtype}, and should be {expected}; the file was written or labelled wrongly")
        if not is_finite(tensor):
            raise ValueError(f"{name}: {key} holds nan or inf; take another checkpoint")
