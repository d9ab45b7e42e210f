"""What NCCL refuses, hangs on or mixes up, refused in collectives over gloo.

`tests.simulated_device` refuses CPU tensors among them; this compares what the ranks are about to
do, and what is under way. No kernel may write to the memory of a collective under way, or read what
it receives; an all-to-all and a gather deliver as late as they may, when somebody waits.
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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from tests.simulated_device import SimulatedTensor


class NcclError(AssertionError):
    """NCCL would refuse this, hang, or give something else."""


class _Work:
    """A collective under way.

    Args:
        work: Work of gloo.
        what: Name of the collective.
        tensors: Tensors that it reads or writes.
        late: Tensor that it receives, and the values that are to arrive there; None for one that
            writes at once.
    """

    def __init__(
        self, work: Any, what: str, tensors: list[Tensor], late: tuple[Tensor, Tensor] | None
    ) -> None:
        self._work, self.what, self.tensors, self._late = work, what, tensors, late
        self.received = tensors if late is None else [late[0]]
        self.is_over = False

    def wait(self) -> None:
        self._work.wait()
        self.is_over = True
        if self._late is not None:
            target, values = self._late
            target.copy_(values)


def _overlap(tensor: Tensor, others: list[Tensor]) -> bool:
    start, stop = _memory(tensor)
    return any(low < stop and start < high for low, high in map(_memory, others))


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Addresses from the first element to behind the last; none for an empty tensor."""
    if not tensor.numel():
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    size = 1 + sum((length - 1) * stride for length, stride in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + size * tensor.element_size()


class _Kernels(TorchDispatchMode):
    """Shows every kernel to the checks."""

    def __init__(self, checks: Nccl) -> None:
        super().__init__()
        self._checks = checks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._checks.check_kernel(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


OBJECTS = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "monitored_barrier", "gather", "scatter"),
)
"""Collectives that pickle, and through the CPU; or that NCCL does not have."""


ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""The collective of equal parts, by this PyTorch's name."""


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
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise NcclError(f"{name}: a tensor that is not contiguous")
            if any(_overlap(tensor, work.tensors) for work in self._left()):
                raise NcclError(f"{name}: memory that another collective uses")
        # These collectives are the check's own: they are over the CPU.
        with _disable_current_modes():
            self._check_alike(name, tensors, args, kwargs)
        late = None
        if kwargs.get("async_op") and name in ("all_to_all_single", ALL_GATHER):
            target, sent, *rest = args
            # A gather may send a part of what it receives.
            late, args = (target, torch.empty_like(target)), (sent.clone(), *rest)
            target.view(torch.uint8).fill_(255)  # NaN in every floating dtype
            args = (late[1], *args)
        found = collective(*args, **kwargs)
        if kwargs.get("async_op"):
            self._under_way.append(_Work(found, name, tensors, late))
            return self._under_way[-1]
        return found

    def check_kernel(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a kernel on memory of a collective under way."""
        works, schema = self._left(), func._schema
        is_write = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        is_view = not is_write and any(result.alias_info for result in schema.returns)
        if not works or is_view or func.namespace == "c10d":
            return
        names = [argument.name for argument in schema.arguments]
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            for tensor in tree_iter(value):
                if type(tensor) not in (Tensor, SimulatedTensor):
                    continue
                for work in works:
                    if _overlap(tensor, work.tensors if name in is_write else work.received):
                        raise NcclError(f"{func}: memory that {work.what} may still use")

    def _left(self) -> list[_Work]:
        return [work for work in self._under_way if not work.is_over]

    def _check_alike(self, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> None:
        """Order and sizes, which NCCL does not compare: it hangs, or mixes up bytes.

        Plans give the sizes of an all-to-all, and have a test of their own.
        """
        group = kwargs.get("group")
        has_splits = any(isinstance(each, list) for each in (*args, *kwargs.values()))
        sizes = [each.numel() for each in tensors] if not has_splits else []
        told = (name, [str(each.dtype) for each in tensors], str(kwargs.get("op")), sizes)
        everyone: list[Any] = [None] * dist.get_world_size(group)
        with mock.patch.object(dist, "all_gather_object", self._gather):
            self._gather(everyone, told, group=group)
        if any(other != told for other in everyone):
            raise NcclError(f"{name}: ranks differ: {everyone}")

    def check_waited(self) -> None:
        """All that was started has been waited for."""
        if left := [work.what for work in self._left()]:
            raise NcclError(f"not waited for: {left}")
        self._under_way = []


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
        for name in ("all_reduce", "all_to_all_single", "broadcast", "all_gather", ALL_GATHER):
            stack.enter_context(mock.patch.object(dist, name, checked(name)))
        for name in OBJECTS:
            stack.enter_context(mock.patch.object(dist, name, refuse(name)))
        stack.enter_context(_Kernels(checks))
        yield checks
        checks.check_waited()
