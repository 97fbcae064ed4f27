"""Scripts as processes. `start` is what a shell does; `fork` spares the five seconds that imports take, where only what a
process does afterwards matters: how it ends, and how it and others work together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed

from support.cli import OFFLINE, Done

# The server imports these once, has run nothing else and has no threads; every process of `fork` is a fork of it.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "specdec.llm",
        "specdec.config",
        "specdec.training.recipe",
        "specdec.measure.serving",
        "specdec.measure.report",
        "accelerate",
    ]
)


def start(script: Path, *arguments: object, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """`python SCRIPT ARGUMENTS` in a directory."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # a suite that runs in the background of a shell has Ctrl-C ignored, and its children would too
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env={**os.environ, **OFFLINE, **env}, preexec_fn=listen, **pipes)


class Fork:
    """A script as a fork of the server, with the part of subprocess.Popen that tests use."""

    def __init__(self, script: Path, arguments: tuple[object, ...], cwd: Path, env: dict[str, str]) -> None:
        self.logs = Path(tempfile.mkdtemp())
        self.process = FORKS.Process(
            target=_run, args=(str(script), [*map(str, arguments)], str(cwd), env, str(self.logs)), daemon=True
        )
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.process.join(timeout)
        assert self.returncode is not None, "it did not end"
        out, err = (path.read_text() if path.exists() else "" for path in (self.logs / "out", self.logs / "err"))
        return out, err


def _run(script: str, arguments: list[str], cwd: str, env: dict[str, str], logs: str) -> None:
    import huggingface_hub
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{logs}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(cwd)
    os.environ.update(OFFLINE | env)
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def fork(script: Path, *arguments: object, cwd: Path, **env: str) -> Fork:
    return Fork(script, arguments, cwd, env)


@contextlib.contextmanager
def started_ranks(script: Path, *arguments: object, cwd: Path, size: int = 2, **env: str) -> Iterator[list[Fork]]:
    """The processes of `torchrun --nproc_per_node SIZE SCRIPT ARGUMENTS`, while its store is there."""
    # as torchrun does: a store that outlives the ranks, so that none of them fails because another has left
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **env,
    }
    yield [fork(script, *arguments, cwd=cwd, RANK=str(i), LOCAL_RANK=str(i), **shared) for i in range(size)]
    del store


def fork_ranks(script: Path, *arguments: object, cwd: Path, size: int = 2, **env: str) -> Done:
    """`torchrun --nproc_per_node SIZE SCRIPT ARGUMENTS`: what all ranks wrote, and the first exit code that is not 0."""
    with started_ranks(script, *arguments, cwd=cwd, size=size, **env) as ranks:
        results = [ended(process) for process in ranks]
    code = next((done.code for done in results if done.code), 0)
    return Done(code, "".join(done.out for done in results), "".join(done.err for done in results))


def ended(process: subprocess.Popen[str] | Fork) -> Done:
    out, err = process.communicate(timeout=300)
    assert process.returncode is not None
    return Done(process.returncode, out, err)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[str] | Fork) -> None:
    limit = time.monotonic() + 90
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, f"ended too soon: {ended(process)}"
        assert time.monotonic() < limit, "no progress"
        time.sleep(0.005)
