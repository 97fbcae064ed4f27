"""Time and free memory of the device that a model runs on."""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def memory_line(taken: dict[str, int], device: torch.device) -> str:
    """What a run takes and what is left, for people. taken: bytes by what takes them."""
    size = lambda num_bytes: f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in taken.items())
    return f"memory: {parts}; {free_memory(device) / 2**30:.1f} GiB free"


class Timer:
    """Durations between marks, and CPU time of the process from the first to the last.

    On CUDA a mark is an event in the stream, so that marking never waits for the device; the CPU time is then the host's alone.
    """

    def __init__(self, device: torch.device):
        self.is_cuda = device.type == "cuda"
        self.marks: list[Any] = []
        self.first_cpu_s = time.process_time()
        self.last_cpu_s = self.first_cpu_s
        self.mark()

    def mark(self) -> None:
        self.last_cpu_s = time.process_time()
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between consecutive marks; on CUDA this waits for the last one."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.is_cuda:
            self.marks[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return [b - a for a, b in pairs]

    def cpu_seconds(self) -> float:
        """CPU time of this process, all its threads, from the first mark to the last."""
        return self.last_cpu_s - self.first_cpu_s
