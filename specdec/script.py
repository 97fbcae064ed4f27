"""How a script ends: with one line, whatever happened, and an exit code.

Exit codes: 0 done; 1 an error; 130 stopped by Ctrl-C (SIGINT), 143 by SIGTERM, 141 nobody reads the output (SIGPIPE).
SPECDEC_DEBUG=1 shows the traceback too. No large package is imported here, so that Ctrl-C while torch is being imported ends in
one line too.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from specdec import fold, lock

DEBUG = "SPECDEC_DEBUG"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_results_hint = ""  # end of the last line of a run that fails or is stopped
_signal: int | None = None  # received since `one_line` was entered


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a script as Ctrl-C does."""


class StopSignals:
    """Counts Ctrl-C and SIGTERM until it is closed, for a loop that ends between two steps: a library may make another error of
    an exception in the middle of one. The second signal is such an exception all the same.

    counts: how often each has been received.
    """

    def __init__(self) -> None:
        self.counts = {signal.SIGINT: 0, signal.SIGTERM: 0}
        self._handlers: dict[int, Any] = {}
        with contextlib.suppress(ValueError):  # only the main thread may listen
            for number in self.counts:
                self._handlers[number] = signal.signal(number, self._count)

    @property
    def received(self) -> int | None:
        """Number of the signal; None: none yet."""
        return max((number for number, count in self.counts.items() if count), default=None)

    def close(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: Any) -> None:
        if self.received is not None:
            _stop(number, frame)
        self.counts[signal.Signals(number)] += 1


def has_results(directory: Path, resumes: bool) -> None:
    """From now on, the last line of a run that fails or is stopped says where its results are.

    resumes: whether `resume=true` continues the run.
    """
    global _results_hint
    rest = ", and resume=true goes on with the rest" if resumes else ""
    _results_hint = f"; what had finished is kept in {directory}{rest}"


def fail(message: object) -> NoReturn:
    """End the program with one line on stderr and exit code 1. Of processes that decode together one writes it."""
    if _signal is not None:  # the failure is a consequence of the signal
        _end_interrupted(128 + _signal)
    line = _first_line(message)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from specdec.model import distributed

        may_report = distributed.claim_failure_report()
        if may_report is not None:
            if may_report:  # flushed: torchrun ends the other processes when the first has ended
                print(f"error: {line}", file=sys.stderr, flush=True)
            sys.exit(1)
    sys.exit(f"error: {line}")


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Whatever ends the block ends the program, in one line; its locks (`specdec.lock`) are released."""
    global _results_hint, _signal
    _results_hint = ""
    _signal = None
    defaults: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        del defaults[signal.SIGTERM]  # torchrun sends it when another process has failed, which has reported the reason
    handlers: dict[int, Any] = {}
    for number, default in defaults.items():
        if signal.getsignal(number) == default:
            with contextlib.suppress(ValueError):  # only the main thread may set a handler
                handlers[number] = signal.signal(number, _stop)
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        handlers = {}
        _end_interrupted(exit_code(error))
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
        if _signal is not None:  # a library may turn the interrupt into an error of its own
            handlers = {}
            _end_interrupted(128 + _signal)
        if _failed_elsewhere(error):
            sys.exit(1)
        _show_traceback()
        fail(_describe(error))
    finally:
        lock.release()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Parser(argparse.ArgumentParser):
    """For scripts without Hydra: a mistake on the command line is one line.

    docstring: of the script, which --help shows
    """

    def __init__(self, docstring: str | None) -> None:
        description = fold.docstring(docstring or "")
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        fail(f"{message}; see --help")


def count(text: str) -> int:
    """The type of an argument that must be an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 1")
    return int(text)


def is_main_process() -> bool:
    """Whether this process writes files and prints: it is alone, or the first of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def exit_code(stopped: KeyboardInterrupt) -> int:
    """128 plus the number of the signal, as shells do."""
    return 128 + (signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT)


def _stop(number: int, frame: Any) -> None:
    global _signal
    _signal = number
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _end_interrupted(code: int) -> NoReturn:
    """End the program after a signal, in one line."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a second signal ends the clean-up silently
        with contextlib.suppress(ValueError):
            signal.signal(number, signal.SIG_DFL)
    _show_traceback()
    if is_main_process():  # torchrun interrupts all of its processes
        print(f"interrupted{_results_hint}", file=sys.stderr, flush=True)
    sys.exit(code)


def _nobody_reads() -> bool:
    """Whether the reader of the output has gone away, as `head` does: a pipe that broke may be another one."""
    output = select.poll()
    output.register(sys.stdout, 0)  # errors are always reported
    return bool(output.poll(0))


def _failed_elsewhere(error: Exception) -> bool:
    """Whether the error is a consequence of another process's failure, which that process reports."""
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
        prefix = f"{error.filename}: " if error.filename is not None else ""
        return f"{prefix}{text}{'; make room' if error.errno in _FULL else ''}{_results_hint}"
    if isinstance(error, OSError | ValueError) and _first_line(error) != "failed":
        return _first_line(error)
    if isinstance(error, MemoryError | OverflowError):
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        return f"{text}; a number is too large for this machine, such as max_batch_size or seed"
    text = str(error).strip()
    hint = "" if DEBUG in os.environ else f"; {DEBUG}=1 shows where"
    return f"{type(error).__name__}{': ' if text else ''}{text.splitlines()[0] if text else ''}{hint}{_results_hint}"


def _first_line(message: object) -> str:
    text = str(message).strip()
    return text.splitlines()[0] if text else "failed"
