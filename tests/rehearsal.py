"""CUDA and NCCL, rehearsed on a CPU: what they refuse or wait for fails here.

`on_devices` builds optimizers that take the path for devices, with CPU tensors and memory full of
NaN. Inside `Steps` each operation is counted, and what would read a value on the host, or copy one
to the device, raises. Inside `nccl` collectives are those of gloo, and refuse what NCCL refuses.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from amo_dist.kernels.cuda.kernels import CudaKernels

READS = frozenset(
    {
        *("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select"),
        *("unique", "_unique2", "unique_consecutive", "bincount", "repeat_interleave"),
    }
)
"""Operations whose result the host needs, or whose size depends on values."""
COPIES = frozenset(
    {
        *("lift_fresh", "lift_fresh_copy", "scalar_tensor", "pin_memory", "_pin_memory"),
        *("index", "index_put", "index_put_"),
    }
)
"""Operations that make a tensor of numbers of the host, or that copy an index to the device."""
METHODS = frozenset(
    {
        *("tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__"),
        *("__array__", "tensor", "as_tensor", "from_numpy", "new_tensor", "synchronize"),
    }
)
"""Calls with the same effect that no operation tells of."""


class HostError(AssertionError):
    """A locked step read a value on the host, or copied one to the device."""


class Steps(contextlib.ExitStack):
    """Counts the operations of the steps taken inside, and raises `HostError`.

    What is made without a device lies elsewhere than parameters: PyTorch refuses to compute with
    both, and `nccl` to send it. What is made on the device ``"cpu"``, by that name, raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __enter__(self) -> Steps:
        super().__enter__()
        self.enter_context(torch.device("meta"))
        self.enter_context(_Operations(self.operations))
        self.enter_context(_Calls())
        return self


class _Operations(TorchDispatchMode):
    def __init__(self, numbers: Counter[str]) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "aten" and not _is_aside():
            self._numbers[name] += 1
            if name in READS or name in COPIES:
                raise HostError(f"aten::{name}")
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        # A device of the parameters, which is the CPU here, comes from a tensor; a name is written.
        is_named = any(
            isinstance(each, str) and each == "cpu" for each in (*args, *kwargs.values())
        )
        if (name in METHODS or is_named) and not _is_aside():
            raise HostError(f"{name} on the CPU" if is_named else name)
        return func(*args, **kwargs)


_aside = threading.local()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What is done inside is the rehearsal's own, and not looked at."""
    was, _aside.is_so = _is_aside(), True
    try:
        yield
    finally:
        _aside.is_so = was


def _is_aside() -> bool:
    return getattr(_aside, "is_so", False)


class DeviceKernels(CudaKernels):
    """Those of CUDA, for CPU tensors."""

    def fetch(self, values: Tensor) -> Callable[[], list[int]]:
        """Stands for the copy to pinned memory: the one way to the host."""
        there = values.clone()

        def read() -> list[int]:
            with aside():
                found: list[int] = there.tolist()
                return found

        return read


@contextlib.contextmanager
def on_devices(*candidates: str) -> Iterator[None]:
    """Optimizers built inside take the path for devices; fresh memory holds NaN.

    Args:
        candidates: Backends that ``auto`` chooses among by measuring; ``standard`` without any.
    """

    def make(
        device: object, *, ns_dtype: torch.dtype, ns_backend: str, cuda_graphs: bool
    ) -> DeviceKernels:
        kernels = DeviceKernels(ns_dtype, ns_backend)
        kernels.candidates = candidates
        return kernels

    was = torch.are_deterministic_algorithms_enabled()
    # With these PyTorch fills new memory with NaN, and bytes with ones, which are NaN too.
    torch.use_deterministic_algorithms(True)
    try:
        with (
            mock.patch("amo_dist.engine.engine.make_kernels", make),
            # gloo's short cut for small vectors is none of NCCL's.
            mock.patch("amo_dist.distributed.agreement._DIRECT_RANKS", 0),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(was)


# ---------------------------------------------------------------- NCCL


class NcclError(AssertionError):
    """NCCL would refuse this, hang, or give something else."""


class _Work:
    """Of a collective under way."""

    def __init__(self, work: Any, what: str, tensors: list[Tensor]) -> None:
        self._work, self.what, self._tensors, self.is_over = work, what, tensors, False

    def uses(self, tensor: Tensor) -> bool:
        """Whether it may still read or write memory of ``tensor``."""
        (start, stop), mine = _memory(tensor), map(_memory, self._tensors)
        return not self.is_over and any(low < stop and start < high for low, high in mine)

    def wait(self) -> None:
        self._work.wait()
        self.is_over = True


def _memory(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


OBJECTS = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "monitored_barrier", "gather", "scatter"),
)
"""Collectives that pickle, and through the CPU; or that NCCL does not have."""


class Nccl:
    """Collectives of gloo, checked.

    Attributes:
        calls: How often each was called.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._gather = dist.all_gather_object
        self._thread = threading.get_ident()
        self._under_way: list[_Work] = []

    def run(self, name: str, collective: Any, *args: Any, **kwargs: Any) -> Any:
        """Check a call on all of its ranks, and make it."""
        self.calls[name] += 1
        if threading.get_ident() != self._thread:
            raise NcclError(f"{name}: two threads use one communicator")
        tensors = [each for each in _flat((args, kwargs)) if isinstance(each, Tensor)]
        for tensor in tensors:
            if tensor.is_meta:
                raise NcclError(f"{name}: a tensor that is not on the device")
            if not tensor.is_contiguous():
                raise NcclError(f"{name}: a tensor that is not contiguous")
            if any(work.uses(tensor) for work in self._under_way):
                raise NcclError(f"{name}: memory that another collective uses")
        with aside(), torch.device("cpu"):
            self._check_alike(name, tensors, args, kwargs)
        found = collective(*args, **kwargs)
        if kwargs.get("async_op"):
            self._under_way.append(_Work(found, name, tensors))
            return self._under_way[-1]
        return found

    def _check_alike(self, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> None:
        """Order and sizes, which NCCL does not compare: it hangs, or mixes up bytes."""
        group = kwargs.get("group")
        splits = [each for each in (*args, *kwargs.values()) if isinstance(each, list)]
        splits = [each for each in splits if all(isinstance(number, int) for number in each)]
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        told = (name, [str(each.dtype) for each in tensors], str(kwargs.get("op")))
        sizes = [each.numel() for each in tensors] if not splits else []
        everyone: list[Any] = [None] * ranks
        with mock.patch.object(dist, "all_gather_object", self._gather):
            self._gather(everyone, (told, sizes, splits), group=group)
        if any(other[:2] != (told, sizes) for other in everyone):
            raise NcclError(f"{name}: ranks differ: {everyone}")
        if splits:
            receive, send = splits
            meant = [other[2][1][rank] for other in everyone]
            if receive != meant or len(send) != ranks:
                raise NcclError(f"{name}: rank {rank} expects {receive}, is sent {meant}")

    def check_waited(self) -> None:
        """All that was started has been waited for."""
        left = [work.what for work in self._under_way if not work.is_over]
        if left:
            raise NcclError(f"not waited for: {left}")
        self._under_way = []


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


@contextlib.contextmanager
def nccl() -> Iterator[Nccl]:
    """Collectives inside are checked; all must have been waited for at the end."""
    checks = Nccl()

    def refuse(name: str) -> Callable[..., None]:
        def call(*args: object, **kwargs: object) -> None:
            raise NcclError(f"{name}: not on devices")

        return call

    def checked(name: str) -> Callable[..., Any]:
        collective = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            # What a collective calls for itself is its own affair.
            with mock.patch.object(dist, name, collective):
                return checks.run(name, collective, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "all_to_all_single", "broadcast", "all_gather"):
            stack.enter_context(mock.patch.object(dist, name, checked(name)))
        for name in OBJECTS:
            stack.enter_context(mock.patch.object(dist, name, refuse(name)))
        yield checks
        checks.check_waited()
