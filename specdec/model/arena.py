"""Memory for the weights of a CPU engine: one region, on huge pages where the system gives them.

A model's weights are read from end to end in every step. On ordinary pages of 4 KiB much of that time goes into finding the
next page, and prefetching stops at each border; on pages of 2 MiB memory gives up to twice as much (measured in LOG.md).
"""

from __future__ import annotations

import math
import mmap
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
ALIGNMENT = 64  # of every tensor: a line of the cache
WORTH_A_NOTE = 64 << 20  # bytes of weights
SYSTEM_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Arena:
    """A region that tensors are cut from, one behind the other. It lives as long as one of them.

    num_bytes: of the region. Pages that are never written take no memory.
    """

    def __init__(self, num_bytes: int):
        region = mmap.mmap(-1, num_bytes + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if not ask_for_huge_pages(region) and num_bytes > WORTH_A_NOTE:
            note_ordinary_pages()
        bytes_of_region = torch.frombuffer(region, dtype=torch.uint8)
        first = -bytes_of_region.data_ptr() % HUGE_PAGE
        self.free = bytes_of_region[first : first + padded(num_bytes)]

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros."""
        num_bytes = math.prod(shape) * dtype.itemsize
        assert padded(num_bytes) <= len(self.free), "the arena is full"
        taken = self.free[:num_bytes]
        self.free = self.free[padded(num_bytes) :]
        return taken.view(dtype).view(shape)


def padded(num_bytes: int) -> int:
    """The room that so many bytes take in an arena."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def ask_for_huge_pages(region: mmap.mmap) -> bool:
    """Ask the system for huge pages. False if it has none to give, which costs speed and nothing else."""
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):  # not on this system; not in this kernel
        return False
    return has_huge_pages()


@cache
def note_ordinary_pages() -> None:
    """Say so, once."""
    print(
        f"note: no huge pages, so weights are read more slowly; write 'madvise' to {SYSTEM_SETTING} if your system has it",
        file=sys.stderr,
    )


def has_huge_pages() -> bool:
    """Whether the system backs a region with huge pages if it is asked to."""
    return SYSTEM_SETTING.exists() and "[never]" not in SYSTEM_SETTING.read_text()
