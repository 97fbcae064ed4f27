"""How a script ends: with one line, whatever happened, and an exit code.

Exit codes: 0 done; 1 an error; 130 stopped by Ctrl-C (SIGINT), 143 by SIGTERM. SPECDEC_DEBUG=1 shows the traceback too. Nothing
heavy is imported here, so that Ctrl-C while torch is being imported ends in one line as well.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from specdec import lock

DEBUG = "SPECDEC_DEBUG"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_kept = ""
_signal: int | None = None  # that has come since the block began


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a script as Ctrl-C does."""


def keeps(where: Path, resumes: bool) -> None:
    """From now on there is something to keep: the last line of a run that fails or is stopped says where it is.

    resumes: whether `resume=true` goes on with it.
    """
    global _kept
    _kept = f"; what had finished is kept in {where}{', and resume=true goes on with the rest' if resumes else ''}"


def fail(message: object) -> NoReturn:
    """End the program with one line on stderr and exit code 1. Of processes that decode together one says it."""
    if _signal is not None:  # what failed is what the signal broke off
        _end_interrupted(128 + _signal)
    line = _first_line(message)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from specdec.model import distributed

        if (speaks := distributed.claim_failure_report()) is not None:
            if speaks:  # at once: when the first has ended, torchrun ends the others
                print(f"error: {line}", file=sys.stderr, flush=True)
            sys.exit(1)
    sys.exit(f"error: {line}")


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Whatever ends the block ends the program, in one line; what it holds (`specdec.lock`) is given back."""
    global _kept, _signal
    _kept, _signal = "", None
    defaults: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        del defaults[signal.SIGTERM]  # torchrun ends its processes by it when one has failed, and that one has said why
    handlers: dict[int, Any] = {}
    for number, default in defaults.items():
        if signal.getsignal(number) == default:
            with contextlib.suppress(ValueError):  # only the main thread may listen
                handlers[number] = signal.signal(number, _stop)
    try:
        yield
    except KeyboardInterrupt as error:
        handlers = {}
        _end_interrupted(exit_code(error))
    except Exception as error:
        if _signal is not None:  # a library that was broken off may make another error of it
            handlers = {}
            _end_interrupted(128 + _signal)
        if another_has_said_why(error):
            sys.exit(1)
        _show_traceback()
        fail(_describe(error))
    finally:
        lock.release()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Parser(argparse.ArgumentParser):
    """For scripts without Hydra: a mistake on the command line is one line here too."""

    def error(self, message: str) -> NoReturn:
        fail(f"{message}; see --help")


def count(text: str) -> int:
    """An argument that must be a number from 1 on."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 1")
    return int(text)


def is_main_process() -> bool:
    """Whether this is the process that writes and speaks: the only one, or the first of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def exit_code(stopped: KeyboardInterrupt) -> int:
    """128 and the number of the signal, as a shell has it."""
    return 128 + (signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT)


def _stop(number: int, frame: Any) -> None:
    global _signal
    _signal = number
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _end_interrupted(code: int) -> NoReturn:
    """End the program after a signal, in one line."""
    for each in (signal.SIGINT, signal.SIGTERM):  # a second one ends what is left to do, without a word
        with contextlib.suppress(ValueError):
            signal.signal(each, signal.SIG_DFL)
    _show_traceback()
    if is_main_process():  # torchrun interrupts all of its processes
        print(f"interrupted{_kept}", file=sys.stderr, flush=True)
    sys.exit(code)


def another_has_said_why(error: Exception) -> bool:
    """Whether this is what is left of a group of processes of which one has failed."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not isinstance(error, RuntimeError):
        return False
    from specdec.model import distributed

    return distributed.another_failed()


def _show_traceback() -> None:
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        traceback.print_exc()


def _describe(error: Exception) -> str:
    """What went wrong, and what to do about it, in one line."""
    if isinstance(error, OSError) and error.errno is not None:
        text = error.strerror or os.strerror(error.errno)
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{text}{'; make room' if error.errno in _FULL else ''}{_kept}"
    if isinstance(error, OSError | ValueError) and _first_line(error) != "failed":
        return _first_line(error)
    if isinstance(error, MemoryError | OverflowError):
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        return f"{what}; a number is too large for this machine, such as max_batch_size or seed"
    text = str(error).strip()
    hint = "" if DEBUG in os.environ else f"; {DEBUG}=1 shows where"
    return f"{type(error).__name__}{': ' if text else ''}{text.splitlines()[0] if text else ''}{hint}{_kept}"


def _first_line(message: object) -> str:
    text = str(message).strip()
    return text.splitlines()[0] if text else "failed"
