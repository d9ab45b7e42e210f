"""What NCCL refuses, hangs on or mixes up, refused in collectives over gloo.

`tests.simulated_device` refuses CPU tensors among them; this compares what the ranks are about to
do, and what is under way.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


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
            if not tensor.is_contiguous():
                raise NcclError(f"{name}: a tensor that is not contiguous")
            if any(work.uses(tensor) for work in self._under_way):
                raise NcclError(f"{name}: memory that another collective uses")
        # These collectives are the check's own: they are over the CPU.
        with _disable_current_modes():
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
