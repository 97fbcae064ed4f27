"""The `specdec` command: the scripts under one name, from a checkout and from a wheel."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec import __main__ as command
from specdec import script
from support.cli import OFFLINE, call
from support.tree import ROOT


@pytest.mark.parametrize(
    ("words", "script"),
    [
        ("eval method=suffix -m", "eval/run.py"),
        ("compare a b", "eval/compare.py"),
        ("train eagle model=tiny", "train/eagle.py"),
        ("train bench", "train/bench.py"),
        ("bench", "eval/bench.py"),
        ("share checkpoint=x", "train/share.py"),
    ],
)
def test_a_command_is_a_script(words: str, script: str) -> None:
    path, rest = command.chosen(words.split())
    assert path == ROOT / script
    assert rest == words.split()[2 if words.startswith("train ") else 1 :]


def test_every_script_has_a_command() -> None:
    words = [[name] for name in command.scripts_of("eval")] + [["train", name] for name in command.scripts_of("train")]
    assert {command.chosen(each)[0] for each in words} == {*(ROOT / "eval").glob("*.py"), *(ROOT / "train").glob("*.py")}


@pytest.mark.parametrize(
    ("words", "words_of_error"),
    [
        ("evl", "did you mean 'eval'"),
        ("run", "eval/run.py is `specdec eval`"),
        ("train", "which script? give one of bench, dflash, draft_model, eagle"),
        ("train eagel", "did you mean 'eagle'"),
    ],
)
def test_a_mistake_names_the_nearest(words: str, words_of_error: str, one_line: Callable[..., str]) -> None:
    one_line(lambda: command.chosen(words.split()), words_of_error)


def test_output_that_nobody_reads_ends_without_a_word() -> None:
    """As with `| head`, which has gone away."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "specdec", "--help"], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_pipe_that_breaks_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"error: .*roken pipe"), script.one_line():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec", "--help"])
    command.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in ("eval", "compare", "train eagle", "train share"):
        assert any(line.startswith(f"  {name} ") for line in lines), name


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("specdec ev", ["eval"]),
        ("specdec train e", ["eagle", "extract"]),
        ("specdec train ", [*command.scripts_of("train")]),
        ("specdec compare ", []),
    ],
)
def test_commands_are_completed(line: str, words: list[str]) -> None:
    assert command.completions(line) == words


COMPLETE = """
specdec() { "$PYTHON" -m specdec "$@"; }
eval "$(specdec -sc install=bash)"
for COMP_LINE in "$@"; do
    COMP_POINT=${#COMP_LINE}
    _specdec
    echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_keys_choices_and_files() -> None:
    lines = {
        "specdec eval method=ng": "ngram ngram_gpu",  # what follows the =
        "specdec eval method=ngram method.prompt_lookup_m": "method.prompt_lookup_max= method.prompt_lookup_min=",
        "specdec train mtp  train.warm": "train.warmup_ratio=",
        "specdec eval task.path=./READ": "./README.md",
        "specdec eval 'x=[ ": "",  # no command yet
    }
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    bash = ["bash", "--norc", "-c", COMPLETE, "bash", *lines]
    done = subprocess.run(bash, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert dict(zip(lines, done.stdout.splitlines(), strict=True)) == lines


def test_a_completion_that_there_is_not_is_refused(tmp_path: Path) -> None:
    assert "use -sc with one of install=bash" in call("run", "-sc", "install=tcsh", cwd=tmp_path).error


def test_a_wheel_has_all_that_the_command_needs(tmp_path: Path) -> None:
    """Built from a copy of the tree, unpacked elsewhere, and run from a third directory."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("specdec", "conf", "eval", "train"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tree / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", ".", "./tree"]
    done = subprocess.run(pip, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    package = tmp_path / "package"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(package)
    for name in (
        "conf/eval.yaml",
        "conf/method/suffix.yaml",
        "eval/run.py",
        "train/eagle.py",
        "assets/demo.jsonl",
        "assets/report.html",
    ):
        assert (package / "specdec" / name).is_file(), name
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(package)}
    run = ["eval", "experiment=tiny", "limit=1", "sampling.max_tokens=4", "out_dir=run"]
    done = subprocess.run(
        [sys.executable, "-m", "specdec", *run], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").is_file()
