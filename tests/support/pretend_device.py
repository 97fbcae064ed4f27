"""A device for tests without one: its tensors keep their numbers in CPU tensors, and say device="pretend:0".

Everything runs for real, so results can be compared with the CPU's. What would be a fault on a GPU is one here: a mix of
tensors of both devices is an error, and whatever makes the host wait for the device is counted, with the line that did it.
A copy to the host that does not wait holds garbage until something waits. Copies to the device are counted apart.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
torch.pretend.get_rng_state = lambda device: torch.get_rng_state()  # type: ignore[attr-defined]  # fork_rng asks
torch.pretend.set_rng_state = lambda state, device: torch.set_rng_state(state)  # type: ignore[attr-defined]
torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]  # torch.autocast asks
DEVICE = torch.device("pretend:0")
# operations whose result, or whose shape, the host has to know
READS = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::nonzero_numpy",
    "aten::nonzero_static", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount",
}  # fmt: skip
GARBAGE = 77  # fits every dtype
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}


class OnDevice(Tensor):
    """A tensor of the pretend device. stored: where its numbers are."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> OnDevice:
        # a normal tensor in inference mode too: wrappers have no version counter otherwise
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(
                cls, stored.shape, strides=stored.stride(), storage_offset=stored.storage_offset(), dtype=stored.dtype,
                device=DEVICE, requires_grad=False,
            )  # fmt: skip

    def __init__(self, stored: Tensor):
        self.stored = stored

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func.name()} on a pretend device that is not switched on; use `pretend_device`")


class PretendDevice(TorchDispatchMode):
    """Runs every operation on what the tensors store.

    reads: the lines that made the host wait for the device, one for each time.
    num_writes: copies to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.num_writes = 0
        self._on_the_way: list[tuple[Tensor, Tensor]] = []  # where a copy belongs on the host, and what it is

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # in inference mode operations come whole that are made of others, such as `to` and `item`
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        name = func.name().split(".")[0]
        tensors: list[Tensor] = []
        _each((args, kwargs), lambda x: tensors.append(x) if isinstance(x, Tensor) else None)
        here = [x for x in tensors if isinstance(x, OnDevice)]
        wanted = kwargs.get("device")
        goes_here = bool(here) if wanted is None else torch.device(wanted).type == DEVICE.type
        if name in COPIES:
            return self._copy(name, func, args, kwargs, goes_here)
        # a number alone may come from the host: it travels with the call
        elsewhere = [tuple(x.shape) for x in tensors if not isinstance(x, OnDevice) and x.dim()]
        if here and elsewhere:
            raise RuntimeError(f"{name}: tensors on the CPU {elsewhere} beside tensors on the device")
        if here and (name in READS or _has_shape_of_values(name, args, kwargs)):
            self._note_read()
        result = func(*_each(args, _stored), **_each(kwargs, _stored))
        if not goes_here:
            return result
        known = {id(x.stored): x for x in here}  # what was written in place, or to `out`
        return _each(result, lambda x: known[id(x)] if id(x) in known else OnDevice(x) if isinstance(x, Tensor) else x)

    def _copy(self, name: str, func: Any, args: Any, kwargs: Any, goes_here: bool) -> Any:
        result = func(*_each(args, _stored), **_each(kwargs, _stored))
        if name == "aten::_to_copy":
            was_here = isinstance(args[0], OnDevice)
            is_here = goes_here if kwargs.get("device") is not None else was_here
            result = OnDevice(result) if is_here else result
        else:
            is_here, was_here = isinstance(args[0], OnDevice), isinstance(args[1], OnDevice)
            result = args[0]
            if not was_here and not args[1].dim():
                was_here = is_here
        if was_here and not is_here:
            if kwargs.get("non_blocking"):
                self._on_the_way.append((result, result.clone()))
                result.fill_(GARBAGE)
            else:
                self._note_read()
        self.num_writes += is_here and not was_here
        return result

    def _note_read(self) -> None:
        for place, numbers in self._on_the_way:
            place.copy_(numbers)
        self._on_the_way = []
        stack = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename and frame.filename != __file__]
        self.reads.append(f"{stack[-1].filename}:{stack[-1].lineno}: {stack[-1].line}")


@functools.cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """The same with every entry changed. torch's own tree_map takes half of the time here."""
    if type(x) in (tuple, list):
        return type(x)([_each(entry, change) for entry in x])
    if type(x) is dict:
        return {key: _each(value, change) for key, value in x.items()}
    return change(x)


def _stored(x: Any) -> Any:
    if isinstance(x, OnDevice):
        return x.stored
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == DEVICE.type else x


def _has_shape_of_values(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the result has as many entries as the numbers of a tensor say."""
    if name in ("aten::index", "aten::index_put_", "aten::index_put"):
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return name == "aten::repeat_interleave" and kwargs.get("output_size") is None


@contextlib.contextmanager
def pretend_device() -> Iterator[PretendDevice]:
    """Switches the device on. `torch.tensor` copies to it as it does to a GPU."""
    make = torch.tensor

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        on_host = make(data, *args, **kwargs)
        return on_host if device is None else on_host.to(device)

    with PretendDevice() as mode, mock.patch.object(torch, "tensor", tensor):
        yield mode
