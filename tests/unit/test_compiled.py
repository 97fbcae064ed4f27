"""Code that numba has compiled is kept, and whatever happens to what is kept costs a compilation and no more."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec import compiled
from support.tree import ROOT

SOURCE = """
from specdec.compiled import compiled

@compiled
def twice(x):
    return x + x
"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[[], Callable[[int], int]]:
    """The function, as a new process has it."""
    (tmp_path / "doubling.py").write_text(SOURCE)
    compiled.note_no_cache.cache_clear()
    return lambda: runpy.run_path(str(tmp_path / "doubling.py"))["twice"]


def kept(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("__pycache__/*twice*"))


def test_code_is_kept(make: Callable[[], Callable[[int], int]], tmp_path: Path) -> None:
    assert make()(3) == 6
    assert len(kept(tmp_path)) == 2, "an index and the code"
    before = [path.stat().st_mtime_ns for path in kept(tmp_path)]
    again = make()
    assert again(4) == 8
    assert sum(again._cache_hits.values()) == 1  # type: ignore[attr-defined]
    assert [path.stat().st_mtime_ns for path in kept(tmp_path)] == before


@pytest.mark.parametrize("size", [0, 40])
@pytest.mark.parametrize("place", [0, 1], ids=["index", "code"])
def test_a_damaged_file_is_written_anew(
    size: int, place: int, make: Callable[[], Callable[[int], int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make()(3)
    damaged = sorted(kept(tmp_path), key=lambda path: path.suffix == ".nbc")[place]
    os.truncate(damaged, size)
    assert make()(3) == 6
    last = make()
    assert last(3) == 6
    assert sum(last._cache_hits.values()) == 1, "repaired"  # type: ignore[attr-defined]
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_a_note(
    make: Callable[[], Callable[[int], int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiled.FunctionCache, "save_overload", full)
    assert make()(3) == 6
    assert make()(3) == 6
    error = capsys.readouterr().err
    assert error.startswith("note: compiled code cannot be kept")
    assert "No space left" in error
    assert len(error.splitlines()) == 1


def test_code_without_a_place_is_compiled_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Callable[[int], int]] = {}
    compiled.note_no_cache.cache_clear()
    exec(SOURCE, names)
    assert names["twice"](3) == 6
    assert "set NUMBA_CACHE_DIR (RuntimeError: cannot cache function" in capsys.readouterr().err


def test_without_a_compiler_nothing_works() -> None:
    program = [sys.executable, "-c", "import specdec.model.kernels"]
    done = subprocess.run(program, cwd=ROOT, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ValueError: NUMBA_DISABLE_JIT is set")
