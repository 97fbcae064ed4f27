"""Drafter checkpoints: `native` is ours, one directory of JSON and safetensors. Every other format is a file here, that knows
its own config.json, reads it into a native checkpoint and writes one; `lint` holds a directory against what engines load.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.checkpoint.native import Checkpoint
    from specdec.model.target import CausalLM

# A format is a module with recognises(config, names of tensors), read(directory, config), write(checkpoint, directory, engine,
# target, served, count), and WRITES: the engines that load it, for each method that it holds. The first that recognises a
# directory reads it, so one that asks for less stands further back.
FORMATS = ("speculators", "mlp_speculator", "mtp", "raw_eagle3", "raw_eagle", "causal_lm")
# What others share and we cannot read, by a word of its config.json.
UNREADABLE = ("medusa", "dflash", "dspark", "xpress", "domino", "hydra", "deepseek", "mtp", "minimax", "kimi")


def load(path: str | Path, revision: str | None = None) -> Checkpoint:
    """A drafter in any known format, recognised by its config.json: a directory, a training run's (its best), or a hub id.

    Raises ValueError, one line, for what is not one, not whole, or would need code or pickles to be read.
    """
    from specdec.checkpoint import causal_lm, hf_common, native

    directory = native.find(path, revision)
    config = hf_common.read_config(directory)
    if config.get("format") == native.FORMAT:
        return native.load(directory)
    module = format_of(directory, config)
    if module is causal_lm:
        kind, method = config.get("model_type"), causal_lm.method_of(config)
        raise ValueError(f"{directory}: a causal LM (model_type {kind!r}), which drafts with method={method}")
    return module.read(directory, config)


def format_of(directory: Path, config: dict[str, Any]) -> Any:
    """The module of a directory's format. Raises ValueError if there is none."""
    from specdec.checkpoint import hf_common

    names = set(hf_common.shapes_of(directory))
    for name in FORMATS:
        module = importlib.import_module(f"specdec.checkpoint.{name}")
        if module.recognises(config, names):
            return module
    kind = str(config.get("speculators_model_type") or config.get("model_type"))
    said = " ".join([kind, *map(str, config.get("architectures") or []), *map(str, config)]).lower()
    for word in UNREADABLE:
        if word in said:
            raise ValueError(f"{directory}: a drafter of kind {word}, which cannot be imported; readable: {', '.join(FORMATS)}")
    raise ValueError(
        f"{directory}: no drafter of a known format (model_type {kind!r}, architectures {config.get('architectures')}); "
        f"readable: native, {', '.join(FORMATS)}"
    )


def write(
    checkpoint: Checkpoint,
    directory: Path,
    engine: str,
    target: CausalLM | None = None,
    served: str | None = None,
    count: int | None = None,
) -> None:
    """Write a checkpoint as an engine loads it, into a directory that exists and nobody reads yet.

    engine: vllm, sglang or speculators. target: the loaded target, of which some formats hold parts; served: the name under
    which the engine is given the target, if it is not the one that the checkpoint was trained with; count: how many tokens to
    draft, where the format says it.
    """
    can: list[str] = []
    for name in FORMATS:
        module = importlib.import_module(f"specdec.checkpoint.{name}")
        if engine in module.WRITES.get(checkpoint.method, ()):
            module.write(checkpoint, directory, engine, target, served, count)
            return
        can += module.WRITES.get(checkpoint.method, ())
    raise ValueError(
        f"format={engine}: {engine} has no {checkpoint.method} drafters; "
        f"{checkpoint.method} can be written for {', '.join(['native', *can])}"
    )


def method_of(path: str | Path, revision: str | None = None) -> str:
    """The method that decodes with what is in a directory: of a drafter in any known format, or `draft_model` or `pard` of a
    causal LM."""
    from specdec.checkpoint import causal_lm, hf_common, mtp, native

    directory = native.find(path, revision)
    config = hf_common.read_config(directory)
    if config.get("format") == native.FORMAT:
        return str(config.get("method"))
    module = format_of(directory, config)
    if module is causal_lm:
        return causal_lm.method_of(config)
    if module is mtp:
        return "mtp"
    return str(module.read(directory, config).method)
