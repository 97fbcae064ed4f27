"""The processes that decode together (tensor parallelism): who is who, and how they stay of one mind.

Each of them runs the same loop over the same requests and holds a part of every large matrix (`specdec.model.tensor_parallel`). Noise is a pure
function of seeds, so what is computed from whole states is the same everywhere. What hangs on a clock, on free memory or on a
user's own code is decided by the first process and told to the others: `broadcast`.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = datetime.timedelta(hours=2)  # for others, who may be reading a large model or sit in front of a debugger
_store: Any = None  # torchrun's own, if this process asked whether another has failed


class ProcessGroup:
    """A group of processes with one target among them; one process alone is a group too, and asks nobody.

    size, rank: of the group; device: this process's own, None for a process alone, which chooses for itself.
    """

    def __init__(self, size: int = 1, rank: int = 0, device: torch.device | None = None):
        self.size, self.rank, self.device = size, rank, device

    @property
    def is_main(self) -> bool:
        """True for the one that decides, writes files and speaks."""
        return self.rank == 0

    # ---------------------------------------------------------------- decisions

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """The first process's array. All call it, with arrays of one shape and dtype."""
        if self.size == 1:
            return array
        told = torch.from_numpy(np.array(array))  # a copy: the caller's stays as it is
        dist.broadcast(told, 0)
        return told.numpy()

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        """As `broadcast`, on the device."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.broadcast(tensor, 0)
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        """The first process's value, whatever it is (it is pickled): for what is said once, not in every step."""
        if self.size > 1:
            told = [value]
            dist.broadcast_object_list(told, 0)
            value = told[0]
        return value

    def all_reduce_min(self, number: int) -> int:
        """The least of all processes' numbers."""
        if self.size > 1:
            told = torch.tensor(number)
            dist.all_reduce(told, dist.ReduceOp.MIN)
            number = int(told)
        return number

    # ---------------------------------------------------------------- parts of a sum, and of a row

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all processes' parts, the same bits in each.

        On the CPU the parts are added in the order of the ranks, so that a row's sum hangs on nothing beside it (and gloo
        gathers faster than it reduces, LOG.md); on CUDA the sum is NCCL's.
        """
        if part.is_cuda:
            part = part.contiguous()
            dist.all_reduce(part)
            return part
        first, *others = self._gathered(part)
        for other in others:
            first += other
        return first

    def join_columns(self, part: Tensor) -> Tensor:
        """[..., n] of each process side by side, [..., size * n]."""
        return torch.cat(self._gathered(part), -1)

    def join_rows(self, part: Tensor) -> Tensor:
        """[n, ...] of each process one after the other, [size * n, ...]."""
        return torch.cat(self._gathered(part))

    def _gathered(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part)
        return parts

    # ---------------------------------------------------------------- what they share

    @property
    def on_this_machine(self) -> int:
        """How many of them share this machine's memory."""
        return 1 if self.size == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """One process of a machine after the other: for what takes much of the memory that they share."""
        if self.size == 1:
            yield
            return
        place = int(os.environ.get("LOCAL_RANK", self.rank))
        for _ in range(place):
            self.all_reduce_min(0)  # everybody waits here for everybody
        try:
            yield
        finally:  # the others have their turn, and fail alike or not
            for _ in range(place, self.on_this_machine):
                self.all_reduce_min(0)


SINGLE = ProcessGroup()


def num_started() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def join(size: int, device: torch.device) -> ProcessGroup:
    """The group of `size` processes that torchrun has started, this one among them. Raises ValueError, one line, if it has
    started another number of them."""
    if type(size) is not int or size < 1:
        raise ValueError(f"tensor_parallel_size={size!r}: a whole number, at least 1 is needed")
    if size == 1:
        return SINGLE
    if num_started() != size or "RANK" not in os.environ:
        begun = f"{num_started()} processes were started" if "RANK" in os.environ else "torchrun has not started this"
        command = f"torchrun --nproc_per_node {size} {shlex.join(sys.argv)}"
        raise ValueError(f"tensor_parallel_size={size}, and {begun}; type {command}")
    place = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    backend = "gloo"
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(f"device={device}: each process takes the device of its local rank; use device=cuda")
        if (have := torch.cuda.device_count()) < (need := int(os.environ.get("LOCAL_WORLD_SIZE", size))):
            raise ValueError(f"{need} processes on this machine, and {have} CUDA devices; lower tensor_parallel_size")
        device, backend = torch.device("cuda", place), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=TIMEOUT)
        atexit.register(_leave)
    return ProcessGroup(size, dist.get_rank(), device)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# -------------------------------------------------------------------------------------------- who says what went wrong


def report_failure_once() -> None:
    """From now on, of processes that fail together the first says why, and the others are silent."""
    global _store
    if _store is None and num_started() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)


def claim_failure_report() -> bool | None:
    """None if nobody asked to speak once."""
    return None if _store is None else _store.add("specdec/failed", 1) == 1


def another_failed() -> bool:
    return _store is not None and _store.add("specdec/failed", 0) > 0
