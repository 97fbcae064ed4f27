"""Drafter checkpoints: `native` is the format of this project, one directory of JSON and safetensors. Every other format is one
module here, a `Format`; `lint` checks a directory against the rules of the serving engines.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from specdec import hub
from specdec.checkpoint import hf_common, native
from specdec.checkpoint.hf_common import Export
from specdec.checkpoint.native import Checkpoint
from specdec.model.target import CausalLM

if TYPE_CHECKING:
    from specdec.checkpoint.lint import Findings, TargetFacts

# Formats that others share and that cannot be read here, by a word of their config.json.
UNREADABLE = ("dflash", "dspark", "xpress", "domino", "hydra", "deepseek", "mtp", "minimax", "kimi")


class Format(Protocol):
    """What a module of this package declares to be a format: it is found by its PRECEDENCE.

    PRECEDENCE: formats are tried in ascending order, and the first that recognises a directory reads it. 0: a key of
        config.json names the format. Higher: it requires less, and would also match directories of the formats before it.
    WRITES: {method: {engine: its name in `lint.ENGINES`}}, the methods whose drafters it holds and the engines that load them.
    """

    PRECEDENCE: int
    WRITES: dict[str, dict[str, str]]

    def recognises(self, config: dict[str, Any], names: set[str]) -> bool:
        """Whether a directory has this format. config: its config.json; names: of its tensors."""

    def method_of(self, config: dict[str, Any], names: set[str]) -> str:
        """The method that drafts with a directory of this format."""

    def read(self, directory: Path, config: dict[str, Any]) -> Checkpoint:
        """The drafter of a directory. Raises ValueError, one line, for one that is not complete or cannot be represented."""

    def needs_target(self, checkpoint: Checkpoint) -> bool:
        """Whether `write` needs the loaded target, to write parts of it."""

    def write(self, checkpoint: Checkpoint, directory: Path, export: Export) -> None:
        """Write a drafter into a directory that exists and nobody reads yet. Raises ValueError, one line, if it cannot."""

    def lint(self, directory: Path, config: dict[str, Any], findings: Findings, target: TargetFacts) -> None:
        """Add what keeps engines from loading a directory of this format."""


@cache
def formats() -> dict[str, Format]:
    """Every format by name, in the order in which they are tried."""
    modules = {info.name: importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)}
    with_format = {name: cast(Format, module) for name, module in modules.items() if "PRECEDENCE" in vars(module)}
    return dict(sorted(with_format.items(), key=lambda item: (item[1].PRECEDENCE, item[0])))


def load(path: str | Path, revision: str | None = None) -> Checkpoint:
    """A drafter in any known format: a directory, that of a training run (its best), or a hub id.

    Raises ValueError, one line, for what is none or not complete, or would need code or pickles to be read.
    """
    directory = native.find(path, revision)
    config = hf_common.read_config(directory)
    if config.get("format") == native.FORMAT:
        return native.read(directory, config)
    return format_of(directory, config).read(directory, config)


def method_of(path: str | Path, revision: str | None = None) -> str:
    """The method that decodes with a directory, of a drafter in any known format or of a causal LM."""
    directory = native.find(path, revision)
    config = hf_common.read_config(directory)
    if config.get("format") == native.FORMAT:
        return str(config.get("method"))
    return format_of(directory, config).method_of(config, set(hf_common.shapes_of(directory)))


def target_of(path: str | Path, revision: str | None = None) -> str | None:
    """The target that a drafter was trained for, if it names one that can be loaded from here."""
    name = hf_common.target_name(hf_common.read_config(native.find(path, revision)))
    return name if name is not None and hub.can_resolve(name) else None


def format_of(directory: Path, config: dict[str, Any]) -> Format:
    """The format of a directory that is not native. Raises ValueError if there is none."""
    names = set(hf_common.shapes_of(directory))
    for candidate in formats().values():
        if candidate.recognises(config, names):
            return candidate
    model_type = str(config.get("speculators_model_type") or config.get("model_type"))
    words = " ".join([model_type, *map(str, config.get("architectures") or []), *map(str, config)]).lower()
    for word in UNREADABLE:
        if word in words:
            readable = ", ".join(formats())
            what = f"{directory}: model_type {model_type!r}, architectures {config.get('architectures')}"
            raise ValueError(f"{what}: a {word} drafter of a kind that cannot be imported; readable: {readable}")
    raise ValueError(
        f"{directory}: no drafter of a known format (model_type {model_type!r}, architectures {config.get('architectures')}); "
        f"readable: {', '.join([native.NAME, *formats()])}"
    )


def engines() -> list[str]:
    """Everything that a drafter can be written for, and `native`."""
    written = {engine for candidate in formats().values() for names in candidate.WRITES.values() for engine in names}
    return [native.NAME, *sorted(written)]


def format_for(method: str, engine: str) -> Format:
    """The format in which an engine loads drafters of a method. Raises ValueError if there is none."""
    engines: list[str] = []
    for candidate in formats().values():
        if engine in candidate.WRITES.get(method, {}):
            return candidate
        engines += candidate.WRITES.get(method, {})
    raise ValueError(
        f"format={engine}: {engine} has no {method} drafters; {method} can be written for {', '.join([native.NAME, *engines])}"
    )


def needs_target(checkpoint: Checkpoint, engine: str) -> bool:
    """Whether `write` for an engine, or a native copy, needs the loaded target: to compare parts of it, or to write them."""
    return bool(checkpoint.copies) or (engine != native.NAME and format_for(checkpoint.method, engine).needs_target(checkpoint))


def lint_engine(method: str, engine: str) -> str:
    """The name in `lint.ENGINES` of the engine that loads what `write` wrote for it."""
    return format_for(method, engine).WRITES[method][engine]


def write(
    checkpoint: Checkpoint,
    directory: Path,
    engine: str,
    target: CausalLM | None = None,
    target_name: str | None = None,
    num_speculative_tokens: int | None = None,
) -> None:
    """Write a checkpoint as an engine loads it, into a directory that exists and nobody reads yet. Arguments: `Export`."""
    export = Export(engine, target, target_name, num_speculative_tokens)
    format_for(checkpoint.method, engine).write(checkpoint, directory, export)
