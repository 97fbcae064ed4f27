"""One process per directory: an operating system's lock on a small file, held as long as a run lasts.

A process that ends, however it ends, loses the lock with its file descriptor: a killed one leaves a file that nobody holds.
Where the file system has no locks, a note says so and the run goes on without one.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

WAIT_S = 0.5  # for a holder that is about to end
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}


@dataclass
class _Held:
    """A lock file of this process. created: directories that were made for it, the deepest first."""

    lock: FileLock | None
    created: list[Path] = field(default_factory=list)


_held: dict[Path, _Held] = {}


def acquire(path: Path, setting: str) -> None:
    """Take a lock file until `release` or the end of the process, making its directory if there is none.

    setting: `key=value` of the command line that the file stands for.

    Raises ValueError, one line with the holder, if another process has it, and OSError if the file cannot be written.
    """
    path = path.absolute()
    if path in _held:
        return
    held = _Held(None)
    try:
        held.lock = _lock(path, held.created)
        if held.lock is not None:
            since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
            path.write_text(json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since}) + "\n")
    except Timeout:
        raise ValueError(f"{setting} is in use by {_holder(path)}; wait until that ends, or give another") from None
    except BaseException as error:
        _release(path, held)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        raise
    _held[path] = held


def is_free(path: Path) -> bool:
    """Whether no other process holds a lock file. Nothing is changed."""
    path = path.absolute()
    if path in _held or not path.exists():
        return True
    lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        return False
    except (OSError, NotImplementedError):
        return True
    lock.release()
    return True


@contextlib.contextmanager
def released_at_end() -> Iterator[None]:
    """What the block, or the function that this decorates, has locked does not stay locked, as it would in a notebook."""
    try:
        yield
    finally:
        release()


def release() -> None:
    """Release everything that this process holds, and remove directories that were made for it and are empty."""
    while _held:
        _release(*_held.popitem())


def _lock(path: Path, created: list[Path]) -> FileLock | None:
    """The acquired lock; None where the file system has none. created: directories that are made are added to it."""
    lock = FileLock(path, timeout=WAIT_S, thread_local=False, fallback_to_soft=False)
    while True:
        missing = [directory for directory in (path.parent, *path.parent.parents) if not directory.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        created[:0] = [directory for directory in missing if directory not in created]
        is_new = not path.exists()
        try:
            path.touch()  # where no file can be made, `lock.acquire` would wait as for another process
            lock.acquire()
            return lock
        except FileNotFoundError:
            if path.parent.is_dir():
                raise
            continue  # the last holder has just removed its empty directory
        except (OSError, NotImplementedError) as error:
            if isinstance(error, Timeout):
                raise
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                if is_new:
                    with contextlib.suppress(OSError):
                        path.unlink()
                raise
        print(f"note: {path.parent}: no locks on this file system; start no second process there", file=sys.stderr)
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _holder(path: Path) -> str:
    """The process that holds a lock file, by what it wrote into it."""
    for _ in range(5):
        try:
            holder = json.loads(path.read_text())
            return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (OSError, ValueError, KeyError, TypeError):  # it has not written it yet
            time.sleep(0.02)
    return "another process"


def _release(path: Path, held: _Held) -> None:
    if held.lock is not None:
        # before the release: a process that waits for this very file then sees that it is gone, and makes another
        with contextlib.suppress(OSError):
            path.unlink()
        held.lock.release()
    for directory in held.created:
        with contextlib.suppress(OSError):  # not empty
            directory.rmdir()
