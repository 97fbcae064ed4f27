"""The processes that decode together (tensor parallelism), how their decisions stay equal, and how several groups of them share
the requests of a run (data parallelism).

Each process of a group runs the same loop over the same requests and has a part of every large matrix
(`specdec.model.tensor_parallel`). Uniforms are a pure function of seeds, so what is computed from complete states is the same
everywhere. What depends on a clock, on free memory or on a user's own code is decided by the first process and sent to the
others: `broadcast`.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")
TIMEOUT = datetime.timedelta(hours=2)  # for another process, which may read a large model or be stopped in a debugger
POLL_S = 0.2  # between two looks at what the other groups have done
_FAILURES = "specdec/failed"
_ENDED = "specdec/ended"
_store: Any = None  # torchrun's own store, after `report_failure_once`


class ProcessGroup:
    """Processes that share one target; a single process is a group too, and then nothing is sent.

    size: number of processes.
    rank: of this one.
    device: of this one; None for a single process, which chooses it itself.
    data_parallel_size: number of groups that share the work, each with a target of its own.
    data_parallel_rank: of this group.
    handle: torch's group of these processes; None: of all that were started.
    """

    def __init__(
        self,
        size: int = 1,
        rank: int = 0,
        device: torch.device | None = None,
        data_parallel_size: int = 1,
        data_parallel_rank: int = 0,
        handle: dist.ProcessGroup | None = None,
    ):
        self.size = size
        self.rank = rank
        self.device = device
        self.data_parallel_size = data_parallel_size
        self.data_parallel_rank = data_parallel_rank
        self.handle = handle

    @property
    def is_main(self) -> bool:
        """Whether this process decides for its group and writes the group's rows."""
        return self.rank == 0

    @property
    def is_first(self) -> bool:
        """Whether this process is the main one of the first group, which has the run's directory and prints."""
        return self.is_main and self.data_parallel_rank == 0

    # ---------------------------------------------------------------- decisions

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """The first process's array. All call it, with arrays of one shape and dtype."""
        if self.size == 1:
            return array
        tensor = torch.from_numpy(np.array(array))  # a copy: the caller's array does not change
        dist.broadcast(tensor, group=self.handle, group_src=0)
        return tensor.numpy()

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        """As `broadcast`, on the device."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.broadcast(tensor, group=self.handle, group_src=0)
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        """The first process's value, whatever it is. It is pickled, so not for every step."""
        if self.size > 1:
            values = [value]
            dist.broadcast_object_list(values, group=self.handle, group_src=0)
            value = values[0]
        return value

    def all_reduce_min(self, number: int) -> int:
        """The smallest of all processes' numbers."""
        if self.size > 1:
            tensor = torch.tensor(number)
            dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.handle)
            number = int(tensor)
        return number

    # ---------------------------------------------------------------- parts of a sum, and of a row

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all processes' parts, the same bits in each.

        On the CPU the parts are added in the order of the ranks, so that a row's sum does not depend on the other rows (and
        gloo gathers faster than it reduces, LOG.md); on CUDA the sum is NCCL's.
        """
        if part.is_cuda:
            part = part.contiguous()
            dist.all_reduce(part, group=self.handle)
            return part
        first, *others = self._all_gather(part)
        for other in others:
            first += other
        return first

    def join_columns(self, part: Tensor) -> Tensor:
        """[..., n] of each process side by side, [..., size * n]."""
        return torch.cat(self._all_gather(part), -1)

    def join_rows(self, part: Tensor) -> Tensor:
        """[n, ...] of each process one after the other, [size * n, ...]."""
        return torch.cat(self._all_gather(part))

    def _all_gather(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.handle)
        return parts

    # ---------------------------------------------------------------- the work of several groups

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This group's part of the work: as many items as the others', from everywhere in it."""
        return list(items[self.data_parallel_rank :: self.data_parallel_size])

    def from_first(self, value: Any) -> Any:
        """The value of the first process of all groups, whatever it is; all processes call it."""
        if self.size * self.data_parallel_size > 1:
            values = [value]
            dist.broadcast_object_list(values, 0)
            value = values[0]
        return value

    def from_all(self, value: Any) -> list[Any]:
        """The values of all processes; all of them call it."""
        values = [value] * self.size * self.data_parallel_size
        if len(values) > 1:
            dist.all_gather_object(values, value)
        return values

    # ---------------------------------------------------------------- memory that they share

    @property
    def on_this_machine(self) -> int:
        """How many of all groups' processes share this machine's memory."""
        size = self.size * self.data_parallel_size
        return 1 if size == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", size))

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """The processes of a machine enter the block one after the other: for what takes much of the memory that they share."""
        if self.size == 1:
            yield
            return
        local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        for _ in range(local_rank):
            self.from_first(None)  # a barrier
        try:
            yield
        finally:  # also after an error: the other processes wait at their barriers
            for _ in range(local_rank, self.on_this_machine):
                self.from_first(None)


SINGLE = ProcessGroup()


def num_started() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


class SharedCount:
    """How often something has been done by all groups of processes together. Their main processes count.

    processes: of this group.
    name: of what is counted, the same in all processes.
    """

    def __init__(self, processes: ProcessGroup, name: str):
        self._num_here = 0
        self._key = f"specdec/count/{name}"
        self._store = _connect() if processes.is_main and processes.data_parallel_size > 1 else None
        self._num_before = 0
        self._num_before = self.add(0)  # of an earlier work

    def add(self, count: int) -> int:
        """Count this many more; returns the number of all groups."""
        self._num_here += count
        return self._num_here if self._store is None else int(self._store.add(self._key, count)) - self._num_before


def wait_for_all(processes: ProcessGroup, look: Callable[[], object]) -> None:
    """Return when the main processes of all groups have called this, however long that takes. look: called meanwhile."""
    size = processes.data_parallel_size
    if size == 1 or not processes.is_main:
        return
    store = _connect()
    num_ended = store.add(_ENDED, 1)
    num_wanted = -(-num_ended // size) * size  # of an earlier wait all have been counted
    while store.add(_ENDED, 0) < num_wanted:
        time.sleep(POLL_S)
        look()


def join(size: int, device: torch.device, data_parallel: bool = False) -> ProcessGroup:
    """The group of processes of this one, of those that torchrun has started.

    size: of a group.
    device: of a group's processes.
    data_parallel: there may be several groups; otherwise torchrun must have started one, and a group of one is for itself.

    Raises ValueError, one line, if torchrun has started another number of processes.
    """
    if type(size) is not int or size < 1:
        raise ValueError(f"tensor_parallel_size={size!r}: an integer of at least 1 is needed")
    started = num_started()
    if size == 1 and (started == 1 or not data_parallel):
        return SINGLE
    if (started % size if data_parallel else started != size) or "RANK" not in os.environ:
        state = f"{started} processes were started" if "RANK" in os.environ else "torchrun has not started this"
        command = f"torchrun --nproc_per_node {size} {shlex.join(sys.argv)}"
        raise ValueError(f"tensor_parallel_size={size}, and {state}; type {command}")
    backend = "gloo"
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(f"device={device}: each process takes the device of its local rank; use device=cuda")
        num_devices = torch.cuda.device_count()
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", started))
        if num_devices < num_local:
            raise ValueError(f"{num_local} processes on this machine, and {num_devices} CUDA devices; start fewer")
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=TIMEOUT)
        atexit.register(_leave)
    number, rank = divmod(dist.get_rank(), size)
    handle = None
    if 1 < size < started:
        handles = [dist.new_group(list(range(first, first + size))) for first in range(0, started, size)]
        handle = handles[number]
    return ProcessGroup(size, rank, device, started // size, number, handle)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ reports of failures


def report_failure_once() -> None:
    """From now on, of processes that fail together the first reports the reason, and the others are silent."""
    global _store
    if _store is None and num_started() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _store = _connect()


@functools.cache
def _connect() -> dist.Store:
    """The store that the processes find each other with."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)


def claim_failure_report() -> bool | None:
    """Whether this process is the first to fail, which reports; None without `report_failure_once`."""
    return None if _store is None else _store.add(_FAILURES, 1) == 1


def another_failed() -> bool:
    return _store is not None and _store.add(_FAILURES, 0) > 0
