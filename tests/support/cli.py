"""Scripts as a user calls them, and readers of what they write."""

from __future__ import annotations

import io
import json
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

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
