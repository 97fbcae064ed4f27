"""The directory of a run: its name, and the marks and the lock that keep it the run's own.

Unless `out_dir=` says so it is outputs/NAME/START, which no other run has. Beside it the link outputs/NAME/latest leads to the
run that began last, for `checkpoint=` and for `resume=true`. A directory that holds a run is never overwritten.

No large package is imported here, so that a directory that is taken is an error at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from specdec import lock, script
from specdec.files import read_json, write_json

MARKER = "run.json"
LOCK = ".lock"
WANDB_ID = "wandb.json"
_FILES = (  # that runs write
    "config.yaml", "summary.json", "requests.jsonl", "baseline.jsonl", "metrics.jsonl", "manifest.json", "left_out.json",
    "run.png", "train.png", "report.html", "checkpoints", "best", "last", "bench.json", "steps.jsonl", "load.png",
    "choose.json", "choose.png", "cost.json", "cost.png", WANDB_ID,
)  # fmt: skip
OUTPUTS = Path("outputs")
LATEST = "latest"
_START = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")


def default(name: str, resume: bool = False) -> str:
    """The directory of a new run of this name, or with resume that of the last one.

    Raises ValueError, one line, for a run on several machines, which could not agree on one.
    """
    link = OUTPUTS / name / LATEST
    if resume:  # not the link itself, which another run may turn to its own directory meanwhile
        return str(link.with_name(os.readlink(link)) if link.is_symlink() else link)
    return str(link.with_name(start()))


def start() -> str:
    """The time, and four hexadecimal digits that tell a run from others of the same second. All processes that torchrun has
    started on this machine have the same: the time when it began, in place of theirs."""
    began_at = time.time()
    process = os.getpid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
            raise ValueError("processes on several machines: give out_dir=, the same for all of them")
        process = os.getppid()
        began_at = psutil.Process(process).create_time()
    digits = hashlib.sha256(f"{socket.gethostname()} {process} {began_at}".encode()).hexdigest()[:4]
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(began_at))}-{digits}"


def link_latest(out_dir: Path) -> None:
    """Let `latest` lead to a run's directory, or to that of its sweep, if its name was chosen here."""
    for directory in (out_dir, out_dir.parent):
        if _START.fullmatch(directory.name):
            with contextlib.suppress(OSError, NotImplementedError):  # a file system without links: nothing else needs it
                link(directory.with_name(LATEST), directory)


def link(path: Path, to: Path) -> None:
    """Point a link at a directory beside it, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(to.relative_to(path.parent))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def reserve(out_dir: Path, resume: bool, resumes: bool = True) -> None:
    """Lock a directory for this run, before anything expensive; `claim` marks it as the run's. A missing directory is made, and
    removed again if nothing is written there. In a run of several processes the main one does it for all.

    out_dir: the directory.
    resume: go on with the run that it holds.
    resumes: whether the script can go on with a run.

    Raises ValueError if another process has the directory, if it holds a run and resume is false, or none and resume is true.
    """
    if not script.is_main_process():
        return
    check(out_dir, resume, resumes)
    lock.acquire(out_dir / LOCK, f"out_dir={out_dir}")
    _check_files(out_dir, resume, resumes)  # again, now that no other process can write there


def check(out_dir: Path, resume: bool, resumes: bool = True) -> None:
    """Raise what `reserve` would raise, without locking or making the directory."""
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"out_dir={out_dir} is a file; give a directory")
    if resume and not (out_dir / MARKER).exists():
        raise ValueError(f"resume=true, but out_dir={out_dir} holds no run; leave resume out")
    if resume or lock.is_free(out_dir / LOCK):
        _check_files(out_dir, resume, resumes)


def check_report(out: Path) -> None:
    """Raise ValueError for a directory that is a run's own, which no report over several runs may write to."""
    if (out / MARKER).exists():
        raise ValueError(f"--out={out} is the directory of a run, which has a page of its own; give another one")


def _check_files(out_dir: Path, resume: bool, resumes: bool) -> None:
    has_run = (out_dir / MARKER).exists()
    if has_run and not resume:
        go_on = ", or resume=true to go on with it" if resumes else ""
        raise ValueError(f"out_dir={out_dir} already holds a run; give another out_dir={go_on}")
    if not has_run and out_dir.is_dir():
        names = sorted(path.name for path in out_dir.iterdir() if path.name in _FILES or path.suffix == ".safetensors")
        if names:
            raise ValueError(f"out_dir={out_dir} holds {names[0]}, which is of no run of ours; give another out_dir=")


def claim(out_dir: Path, resume: bool, identity: dict[str, Any], resumes: bool = True) -> None:
    """Mark a directory as that of a run. identity: what must be equal for a run to be resumed; the rest: as of `reserve`.

    Raises ValueError as `reserve` does, and if the run to resume has another identity.
    """
    reserve(out_dir, resume, resumes)
    if resume:
        _check_identity(out_dir / MARKER, json.loads(json.dumps(identity)))
    else:
        write_json(out_dir / MARKER, identity)
    link_latest(out_dir)
    script.has_results(out_dir, resumes)


def _check_identity(marker: Path, identity: dict[str, Any]) -> None:
    try:
        previous = read_json(marker)
    except ValueError:
        previous = None
    if not isinstance(previous, dict):
        raise ValueError(f"{marker}: cannot be read, so nothing is known of the run; give another out_dir=")
    changed = sorted(key for key in {*previous, *identity} if previous.get(key) != identity.get(key))
    if not changed:
        return
    key = changed[0]
    old = previous.get(key)
    new = identity.get(key)
    if isinstance(old, dict) and isinstance(new, dict):  # name the entry that differs
        entry = next(entry for entry in {**old, **new} if old.get(entry) != new.get(entry))
        key = f"{key}.{entry}"
        old = old.get(entry)
        new = new.get(entry)
    change = "the prompts are others (task, file or limit)" if key == "prompts" else f"{key} was {old!r} and is {new!r}"
    raise ValueError(f"resume=true, but {change}; use the same settings or another out_dir=")
