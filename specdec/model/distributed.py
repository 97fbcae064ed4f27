"""The processes that decode together (tensor parallelism), and how their decisions stay equal.

Each of them runs the same loop over the same requests and has a part of every large matrix (`specdec.model.tensor_parallel`).
Uniforms are a pure function of seeds, so what is computed from complete states is the same everywhere. What depends on a clock,
on free memory or on a user's own code is decided by the first process and sent to the others: `broadcast`.
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

TIMEOUT = datetime.timedelta(hours=2)  # for another process, which may read a large model or be stopped in a debugger
_FAILURES = "specdec/failed"
_store: Any = None  # torchrun's own store, after `report_failure_once`


class ProcessGroup:
    """Processes that share one target; a single process is a group too, and then nothing is sent.

    size: number of processes.
    rank: of this one.
    device: of this one; None for a single process, which chooses it itself.
    """

    def __init__(self, size: int = 1, rank: int = 0, device: torch.device | None = None):
        self.size = size
        self.rank = rank
        self.device = device

    @property
    def is_main(self) -> bool:
        """Whether this process decides, writes files and prints."""
        return self.rank == 0

    # ---------------------------------------------------------------- decisions

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """The first process's array. All call it, with arrays of one shape and dtype."""
        if self.size == 1:
            return array
        tensor = torch.from_numpy(np.array(array))  # a copy: the caller's array does not change
        dist.broadcast(tensor, 0)
        return tensor.numpy()

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        """As `broadcast`, on the device."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.broadcast(tensor, 0)
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        """The first process's value, whatever it is. It is pickled, so not for every step."""
        if self.size > 1:
            values = [value]
            dist.broadcast_object_list(values, 0)
            value = values[0]
        return value

    def all_reduce_min(self, number: int) -> int:
        """The smallest of all processes' numbers."""
        if self.size > 1:
            tensor = torch.tensor(number)
            dist.all_reduce(tensor, dist.ReduceOp.MIN)
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
            dist.all_reduce(part)
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
        dist.all_gather(parts, part)
        return parts

    # ---------------------------------------------------------------- memory that they share

    @property
    def on_this_machine(self) -> int:
        """How many of them share this machine's memory."""
        return 1 if self.size == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    @contextlib.contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """The processes of a machine enter the block one after the other: for what takes much of the memory that they share."""
        if self.size == 1:
            yield
            return
        local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        for _ in range(local_rank):
            self.all_reduce_min(0)  # a barrier
        try:
            yield
        finally:  # also after an error: the other processes wait at their barriers
            for _ in range(local_rank, self.on_this_machine):
                self.all_reduce_min(0)


SINGLE = ProcessGroup()


def num_started() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def join(size: int, device: torch.device) -> ProcessGroup:
    """The group of `size` processes that torchrun has started, this one among them. Raises ValueError, one line, if it has
    started another number of them."""
    if type(size) is not int or size < 1:
        raise ValueError(f"tensor_parallel_size={size!r}: an integer of at least 1 is needed")
    if size == 1:
        return SINGLE
    if num_started() != size or "RANK" not in os.environ:
        state = f"{num_started()} processes were started" if "RANK" in os.environ else "torchrun has not started this"
        command = f"torchrun --nproc_per_node {size} {shlex.join(sys.argv)}"
        raise ValueError(f"tensor_parallel_size={size}, and {state}; type {command}")
    backend = "gloo"
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(f"device={device}: each process takes the device of its local rank; use device=cuda")
        num_devices = torch.cuda.device_count()
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if num_devices < num_local:
            raise ValueError(
                f"{num_local} processes on this machine, and {num_devices} CUDA devices; lower tensor_parallel_size"
            )
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=TIMEOUT)
        atexit.register(_leave)
    return ProcessGroup(size, dist.get_rank(), device)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ reports of failures


def report_failure_once() -> None:
    """From now on, of processes that fail together the first reports the reason, and the others are silent."""
    global _store
    if _store is None and num_started() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        _store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)


def claim_failure_report() -> bool | None:
    """Whether this process is the first to fail, which reports; None without `report_failure_once`."""
    return None if _store is None else _store.add(_FAILURES, 1) == 1


def another_failed() -> bool:
    return _store is not None and _store.add(_FAILURES, 0) > 0
