"""numba's compiler for this package: code is compiled once for a machine, and kept on disk where that is possible.

Trouble with the disk costs a compilation and nothing else: numba itself fails where no directory can be written, or where a
file of its cache is cut short.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numba
from numba import njit
from numba.core.caching import FunctionCache

from specdec.checked import first_line


class Cache(FunctionCache):
    """numba's cache of a function's compiled code, which is never the reason for a failure."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            code = super().load_overload(sig, target_context)
        except Exception:  # whatever a damaged file leads to
            self.clear()
            code = None
        if code is None:
            note_compiling()
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # such as a full disk
            self.clear()
            note_no_cache(first_line(error))

    def clear(self) -> None:
        """Empty the cache of this function."""
        try:
            self.flush()
        except OSError:
            self.disable()


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A decorator for functions that numba compiles when they are first called. options: of `numba.njit`."""
    if function is None:
        return partial(compiled, **options)
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise ValueError("NUMBA_DISABLE_JIT is set, and specdec is built on compiled functions; unset it")
    dispatcher = njit(**options)(function)
    try:
        dispatcher._cache = Cache(function)
    except RuntimeError as error:  # no directory can be written
        note_no_cache(first_line(error))
    return dispatcher


@cache
def note_compiling() -> None:
    """Say on a terminal, once, why nothing happens for a while."""
    if sys.stderr.isatty():
        print("note: compiling for this CPU, once; about a minute", file=sys.stderr)


@cache
def note_no_cache(reason: str) -> None:
    """Say once that every process will compile."""
    print(
        f"note: compiled code cannot be kept, so that every start takes a minute more; set NUMBA_CACHE_DIR ({reason})",
        file=sys.stderr,
    )
