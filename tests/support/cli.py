"""Scripts as a user calls them, and readers of what they write."""

from __future__ import annotations

import copy
import io
import json
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.global_hydra import GlobalHydra
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from specdec.config import CONF

EVAL = CONF.parent / "eval"
TRAIN = CONF.parent / "train"


OFFLINE = {"HF_HUB_OFFLINE": "1"}


@dataclass
class Done:
    """What a process leaves: exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that it failed with."""
        assert self.code != 0, self.out
        message = self.err.strip()
        assert len(message.splitlines()) == 1, f"more than one line:\n{message}"
        assert message.startswith("error: "), message
        return message


Cli = Callable[..., Done]


COMPOSED: dict[Any, DictConfig] = {}
LOADED: dict[Any, ConfigResult] = {}


def composed_once(page: str, overrides: list[str], **more: Any) -> DictConfig:
    """`hydra.compose`, which takes a sixth of a second: that of the same files and choices is a copy of the first."""
    of_hydra: Any = GlobalHydra.instance().config_loader().get_search_path()
    folders = [element.path.removeprefix("file://") for element in of_hydra.get_path() if element.path]
    files = [(path, path.stat().st_mtime_ns) for folder in folders for path in sorted(Path(folder).rglob("*.yaml"))]
    key = (page, tuple(overrides), tuple(more.items()), tuple(files))
    if key not in COMPOSED:
        COMPOSED[key] = hydra.compose(page, overrides, **more)
    return copy.deepcopy(COMPOSED[key])


def loaded_once(load: Callable[..., ConfigResult]) -> Callable[..., ConfigResult]:
    """Hydra's reading of a YAML file; one that did not change is a copy of the first reading."""

    def load_config(source: Any, config_path: str) -> ConfigResult:
        path = Path(source.path) / source._normalize_file_name(config_path)
        key = (path, path.stat().st_mtime_ns if path.exists() else 0, source.provider)
        if key not in LOADED:
            LOADED[key] = load(source, config_path)
        return copy.deepcopy(LOADED[key])

    return load_config


def call(name: str, *arguments: object, cwd: Path, folder: Path = EVAL) -> Done:
    """A script in this process, as `python eval/NAME.py ARGUMENTS` from another directory."""
    script = folder / f"{name}.py"
    out = io.StringIO()
    err = io.StringIO()
    code = None
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("specdec.config.command_line.compose", composed_once)
        patch.setattr(FileConfigSource, "load_config", loaded_once(FileConfigSource.load_config))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    if isinstance(code, str):  # as the interpreter does
        err.write(f"{code}\n")
        code = 1
    return Done(int(code or 0), out.getvalue(), err.getvalue())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outputs(out_dir: Path, name: str = "requests") -> dict[str, list[int]]:
    return {row["id"]: row["output_token_ids"] for row in rows_of(out_dir / f"{name}.jsonl")}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_tasks(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path
