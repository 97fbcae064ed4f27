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

from specdec import __version__, hub
from specdec.checked import first_line, nearest, short_repr
from specdec.files import apply_umask, read_json
from specdec.model.target import CausalLM, is_finite

FORMAT = "specdec-drafter"
IDS = "eagle_aux_hidden_state_layer_ids"
DEEPEST = hub.DEEPEST  # layers or heads that any drafter may have
_COUNTS = ("num_hidden_layers", "num_modules")
_WIDTHS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass
class Checkpoint:
    """A drafter at rest. target: facts about the model it was trained for, as far as they are known; config: of the method's
    own; tensors: None for a drafter whose weights are still to be drawn; copies: parts of the target that a foreign file
    brought along, by their name there, to be compared with the target."""

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
            if not _same(tensor, part_of(target, key)):
                raise ValueError(
                    f"{self.name} has a part of its own, {key}, which is not that of {target.name}; a trained "
                    f"{'embedding' if key.startswith('embed') else 'output layer'} is not supported here, ours share the "
                    "target's: use the target that it was trained for, or a drafter whose copy was not trained"
                )
        if self.config.get(IDS, ()) is None:
            engines_default(target.num_layers, self.name)


def default_ids(num_layers: int) -> list[int]:
    """What vLLM and SGLang tap where a checkpoint names nothing."""
    return [2, num_layers // 2, num_layers - 3]


def engines_default(num_layers: int, name: str) -> list[int]:
    """The same. Raises ValueError, one line, if they are not three."""
    ids = default_ids(num_layers)
    if not 0 < ids[0] < ids[1] < ids[2]:
        raise ValueError(
            f"{name}: no {IDS} in its config, and the default {ids} of {num_layers} layers is not three of them; write the ids"
        )
    return ids


def part_of(target: CausalLM, key: str) -> Tensor:
    """What a drafter shares with its target, under the name that it has in a drafter's file: [V, D]."""
    assert key in ("embed_tokens.weight", "lm_head.weight"), key
    if key == "lm_head.weight":
        return target.head_rows()[0]
    with torch.no_grad():
        rows: Tensor = target.embedding(torch.arange(target.vocab_size, device=target.device))
    return rows


def _same(copy: Tensor, part: Tensor) -> bool:
    """Equal but for the rounding of 16 bits, by which a file and a target may differ."""
    return copy.shape == part.shape and torch.allclose(part.float().cpu(), copy.float(), rtol=2**-7, atol=1e-6)


def facts(target: CausalLM) -> dict[str, Any]:
    """What must be the same for a drafter to fit."""
    return {
        "name": target.name,
        "model_type": target.config.model_type,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": target.num_layers,
        "vocab_size": target.vocab_size,
    }


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, as every format has it."""
    try:
        whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(whole, path, metadata={"format": "pt"})
        apply_umask(path)
    except SafetensorError as error:
        raise OSError(f"{path.parent}: the weights could not be written ({first_line(error)}); is the disk full?") from None


def save(directory: Path, checkpoint: Checkpoint, provenance: dict[str, Any], card: str) -> None:
    """Write a checkpoint into a directory that exists and nobody reads yet; the caller renames it when it is whole."""
    assert checkpoint.tensors is not None
    write_weights(directory / "model.safetensors", checkpoint.tensors)
    config = {
        "format": FORMAT,
        "format_version": 1,
        "method": checkpoint.method,
        "drafter": checkpoint.config,
        "target": checkpoint.target,
    }
    for name, value in (("config.json", config), ("provenance.json", provenance)):
        (directory / name).write_text(json.dumps(value, indent=1, default=str) + "\n")
    (directory / "README.md").write_text(card)


def load(path: str | Path, revision: str | None = None) -> Checkpoint:
    """Read a checkpoint: a directory, a training run's directory (its best), or a hub id. Raises ValueError for what is
    not one."""
    directory = find(path, revision)
    config = read_json(directory / "config.json")
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        kind = f"a model of type {config['model_type']!r}" if isinstance(config, dict) and "model_type" in config else "not one"
        raise ValueError(f"{directory}: no native drafter checkpoint ({kind}); give the directory that train/eagle.py wrote")
    if config.get("format_version") != 1:
        raise ValueError(
            f"{directory}: format_version {config.get('format_version')!r} is not 1; use the version that wrote it"
        )
    wanted: dict[str, type] = {"method": str, "drafter": dict, "target": dict}
    for key, its_type in wanted.items():
        if not isinstance(config.get(key), its_type):
            raise ValueError(
                f"{directory / 'config.json'}: {key} is {short_repr(config.get(key))}; the checkpoint is not whole"
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
    directory = hub.local(path, "checkpoint")
    if not directory.is_dir():
        if str(path).count("/") != 1 or str(path).startswith((".", "~", "/")):
            raise ValueError(f"checkpoint {path}: no such directory, and not a hub id (org/name)")
        directory = hub.resolve(str(path), revision)
    if (directory / "config.json").exists() or (directory / hub.ADAPTER).exists():
        return hub.checked(directory)
    for name in ("best", "last"):
        if (directory / name / "config.json").exists():
            return hub.checked(directory / name)
    raise ValueError(f"checkpoint {path}: neither a checkpoint (config.json) nor a training run with one in best or last")


def check_sizes(config: dict[str, Any], tensors: dict[str, Tensor], name: str) -> None:
    """Raise ValueError for a size that the tensors beside the config cannot have: it would only show after modules of that size
    were made, which can take all memory or for ever."""
    widest, geometry = max((max(x.shape, default=0) for x in tensors.values()), default=0), config.get("geometry") or {}
    if not isinstance(geometry, dict):
        raise ValueError(f"{name}: geometry is {short_repr(geometry)} in config.json, and should be a mapping")
    limits = dict.fromkeys(_COUNTS, min(len(tensors), DEEPEST)) | dict.fromkeys(("n_predict", "num_depths"), DEEPEST)
    limits |= dict.fromkeys(("inner_dim", *_WIDTHS), widest)
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
    """Load the tensors into a module. A name or a shape that does not fit is a ValueError; nothing stays as it was drawn."""
    assert checkpoint.tensors is not None
    own = module.state_dict()
    check_values(checkpoint.tensors, checkpoint.name)
    for key, tensor in checkpoint.tensors.items():
        if key not in own:
            raise ValueError(f"{checkpoint.name}: unknown tensor {key!r}; {nearest(key, own)}")
        if own[key].is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{checkpoint.name}: {key} is {tensor.dtype}, and should be like {own[key].dtype}")
        if own[key].shape != tensor.shape:
            raise ValueError(
                f"{checkpoint.name}: {key} is {list(tensor.shape)}, and its config asks for {list(own[key].shape)}"
            )
    if missing := sorted(set(own) - set(checkpoint.tensors)):
        raise ValueError(f"{checkpoint.name}: the weights lack {missing[0]!r}")
    if "d2t" in own and not own["d2t"].numel():
        raise ValueError(f"{checkpoint.name}: d2t is empty: no token could be drafted; take another checkpoint")
    module.load_state_dict(checkpoint.tensors)


def check_values(tensors: dict[str, Tensor], name: str) -> None:
    """Raise ValueError, one line, for nan or inf, for weights that are no floating-point numbers, and for ids that are."""
    for key, tensor in tensors.items():
        ids = key == "d2t"  # t2d, of truth values, is no weight either
        if tensor.is_floating_point() if ids else not tensor.is_floating_point() and key != "t2d":
            kind = str(tensor.dtype).removeprefix("torch.")
            what = "ids, which are integers" if ids else "a weight, which is bfloat16, float16 or float32"
            raise ValueError(f"{name}: {key} is {kind}, and should be {what}; the file was written or labelled wrongly")
        if not is_finite(tensor):
            raise ValueError(f"{name}: {key} holds nan or inf; take another checkpoint")


def provenance(**more: Any) -> dict[str, Any]:
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
        **more,
    }
