"""A CUDA device that is not there: CPU values behind tensors that say they are on ``cuda:0``.

Inside `simulated_device` code runs as on a device, on any machine: ``tensor.to("cuda")`` and
``torch.zeros(3, device="cuda")`` give such tensors, meshes of ``"cuda"`` and DTensors take them,
collectives on them run over gloo underneath. What a device is strict about is strict here:

- Tensors of two devices in one operation raise, and so do CPU tensors in a collective of `NCCL`.
- Each wait of the host is counted, by what waits and by file and line.
- A copy to pinned memory that does not block lands when an event behind it is synchronized, or the
  device is; until then, or once its memory is copied to again, no useful number is there.
- New memory holds NaN, or the greatest integer.

Not simulated: streams (all work is in order), allocators, the bits of CUDA's own kernels.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)
NCCL = "cuda:nccl"
"""Backends of a world whose collectives take tensors of the device alone."""

_READS = frozenset(
    {
        *("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "bincount"),
        *("unique_dim", "_unique", "_unique2", "unique_consecutive", "repeat_interleave"),
        *("_linalg_svd", "_linalg_eigh", "linalg_qr", "linalg_cholesky_ex", "linalg_lu_factor_ex"),
    }
)
"""Operations whose result the host needs, whose size depends on values, or that wait inside."""
_COPIES = frozenset({"copy_", "_to_copy", "_foreach_copy_"})
"""Operations that go from one device to another."""
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_STRICT = ("cat", "stack", "_foreach_", "_fused_")
"""Operations that refuse a 0-dim tensor of the CPU, which others take as a number."""


class SimulatedTensor(Tensor):
    """A tensor of the device; ``values`` are its values, on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> SimulatedTensor:
        # PyTorch's own code must find a device that exists in every build.
        made: SimulatedTensor = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device="meta",
        )
        made.values = values
        return made

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, types)

    # What PyTorch refuses for a subclass, or does otherwise on meta.

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: SimulatedTensor) -> None:
        assert (new.shape, new.dtype) == (self.shape, self.dtype), "not simulated"
        self.values = new.values

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Any:
        return _run(torch.ops.aten.copy_.default, (self, source, non_blocking), {})

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("copy"):
            rest = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, *_ = torch._C._nn._parse_to(*args, **rest)
            if device is not None and device.type == "cuda" and dtype in (None, self.dtype):
                return self
        return super().to(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> SimulatedTensor:
        made = memo[id(self)] = SimulatedTensor(self.values.clone())
        made.__dict__ |= {**self.__dict__, "values": made.values}  # whether it is a parameter
        return made.requires_grad_(self.requires_grad)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": DEVICE, **kwargs})

    def record_stream(self, stream: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:
        return f"{self.values!r} on {DEVICE}"


class Device:
    """What the device has been asked.

    Attributes:
        operations: How often each operation was run on it.
        bytes: Bytes that each operation read and wrote, views not counted.
        waits: How often the host waited for it: ``_to_copy at engine/ballot.py:12``.
        collectives: How often each collective was called.
    """

    def __init__(self, backends: str) -> None:
        self.backends = backends
        self.operations: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.time = self.num_copies = 0
        """Operations so far, and copies to pinned memory."""
        self._under_way: dict[int, tuple[int, Tensor, Tensor]] = {}
        self._pinned: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Begin to count anew."""
        for counter in (self.operations, self.bytes, self.waits, self.collectives):
            counter.clear()

    def held_bytes(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes of all memory of the device that tensors keep alive, but for that of some."""
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) is SimulatedTensor]
        storages = {one._cdata: one for one in map(SimulatedTensor.untyped_storage, tensors)}
        for tensor in without:
            storages.pop(tensor.untyped_storage()._cdata, None)
        return sum(storage.nbytes() for storage in storages.values())

    def wait(self, what: str) -> None:
        """Count a wait for all that was asked."""
        self.waits[f"{what} at {_caller()}"] += 1
        self.land(self.num_copies)

    def pin(self, tensor: Tensor) -> Tensor:
        """Take memory as pinned, for good."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the CPU lies in pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def delay(self, landing: Tensor) -> Tensor:
        """Take what was written to pinned memory as under way."""
        # An earlier copy to this memory has lost its place.
        self._under_way[landing.data_ptr()] = self.num_copies, landing, landing.clone()
        self.num_copies += 1
        return _spoil(landing)

    def land(self, count: int) -> None:
        """The first copies, so many since the beginning, are done."""
        for place, (number, landing, values) in [*self._under_way.items()]:
            if number < count:
                landing.copy_(values)
                del self._under_way[place]


_current: Device | None = None


def _device() -> Device:
    assert _current is not None, "a tensor of the device is used outside of simulated_device"
    return _current


def _spoil(new: Tensor) -> Tensor:
    is_integer = not (new.is_floating_point() or new.is_complex() or new.dtype == torch.bool)
    return new.fill_(torch.iinfo(new.dtype).max if is_integer else math.nan)


def _caller() -> str:
    """The line outside of PyTorch and of the checks that is under way."""
    frame, torchs = sys._getframe(1), str(Path(torch.__file__).parent)
    checks = __file__, str(Path(__file__).with_name("nccl.py"))
    while frame.f_back and frame.f_code.co_filename.startswith((torchs, *checks)):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


# ---------------------------------------------------------------- operations


def _run(func: Any, args: Any, kwargs: Any, types: Any = ()) -> Any:
    """Run an operation on the values of its tensors, as the device would, or refuse it."""
    if any(each not in (Tensor, Parameter, SimulatedTensor) for each in types):
        return NotImplemented  # a DTensor or the like, which takes it apart
    device, (space, _, name) = _device(), func._schema.name.partition("::")
    given = _tensors((args, kwargs))
    here = [each for each in given if isinstance(each, SimulatedTensor)]
    there = [each for each in given if not isinstance(each, SimulatedTensor)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    # PyTorch's own code takes the device to be meta.
    if asked == "meta" and (here or name == "scalar_tensor"):
        asked = "cuda"
    is_ours = asked == "cuda" or (bool(here) and asked is None)
    if name == "is_pinned":
        return not here and device.is_pinned(args[0])
    if "c10d" in space:
        device.collectives[name] += 1
        if there and device.backends == NCCL:
            raise RuntimeError(f"{name}: No backend type associated with device type cpu")
    elif here or is_ours:
        device.operations[name] += 1
        device.time += 1
        if here:
            # Fused optimizers read a rate of the CPU, which waits for nothing.
            rate = kwargs.get("lr") if name.startswith("_fused_") else None
            _check(device, name, args, [each for each in there if each is not rate])
            if name == "_fused_sgd_":
                _check_sgd(args[2], kwargs)
    pins = kwargs.get("pin_memory") or name == "_pin_memory"
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if asked is not None and (here or is_ours):
        kwargs["device"] = torch.device("cpu")
    run = torch.ops.aten.clone.default if name == "_pin_memory" else func
    found = run(*_map(_values, args), **_map(_values, kwargs))
    if name.startswith(("empty", "new_empty")) and (is_ours or pins):
        _spoil(found)
    if pins:
        return device.pin(found)
    if name in _COPIES and (here or is_ours):
        _cross(device, name, args, kwargs, found, is_ours)
    known = {id(each.values): each for each in here} | {id(each): each for each in there}

    def wrapped(value: Any) -> Any:
        if isinstance(value, AsyncCollectiveTensor):
            value = value.trigger_wait()
        if not is_ours or type(value) is not Tensor:  # not for PyTorch's fake ones either
            return value
        return known[id(value)] if id(value) in known else SimulatedTensor(value)

    result = _map(wrapped, found)
    if here or is_ours:
        device.bytes[name] += _traffic(func, name, args, here, result)
    return result


def _traffic(func: Any, name: str, args: Any, here: list[Tensor], result: Any) -> int:
    """Bytes of memory that an operation reads and writes."""
    results = [each for each in _tensors([result]) if isinstance(each, SimulatedTensor)]
    read = {id(each): each for each in here}
    new = [each for each in results if id(each) not in read]
    storages = {each.untyped_storage()._cdata for each in here}
    if name.startswith(("empty", "new_empty")) or any(
        each.untyped_storage()._cdata in storages for each in new
    ):
        return 0  # views, and memory that nobody has written yet
    pairs = zip(func._schema.arguments, args, strict=False)
    written = [value for spec, value in pairs if spec.alias_info and spec.alias_info.is_write]
    changed = _tensors(written)
    if name.rstrip("_").endswith(("copy", "fill", "zero")):  # these do not read what they write
        read = {key: each for key, each in read.items() if not any(each is x for x in changed)}
    return sum(each.numel() * each.element_size() for each in (*read.values(), *changed, *new))


def _map(use: Callable[[Any], Any], value: Any) -> Any:
    """What an operation takes or gives, each part used; PyTorch's own takes longer than steps."""
    if isinstance(value, (list, tuple)):
        return type(value)([_map(use, each) for each in value])
    if isinstance(value, dict):
        return {key: _map(use, each) for key, each in value.items()}
    return use(value)


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(lambda each: found.append(each) if isinstance(each, Tensor) else None, list(value))
    return found


def _is_here(tensor: Tensor) -> bool:
    return isinstance(tensor, SimulatedTensor)


def _values(value: Any) -> Any:
    return value.values if isinstance(value, SimulatedTensor) else value


def _check(device: Device, name: str, args: Any, there: list[Tensor]) -> None:
    """Refuse tensors of two devices; count a wait for what the host reads or copies inside."""
    if name in _COPIES:
        return
    waits = name in _READS or (name == "where" and bool(there))
    if name in _INDEXING:
        # An index of the CPU is copied; the size of what a mask takes is read.
        indices = _tensors(args[1])
        waits = any(each.device != DEVICE or each.dtype == torch.bool for each in indices)
        there = [each for each in there if not any(each is index for index in indices)]
        assert not any(each.device.type == "meta" for each in indices), "not simulated: x[[0, 1]]"
    if any(each.dim() or name.startswith(_STRICT) for each in there):
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, but found at least two "
            f"devices, {DEVICE} and cpu!"
        )
    if waits:
        device.wait(name)


def _check_sgd(buffers: list[Tensor], options: dict[str, Any]) -> None:
    """Refuse what CUDA's kernel of SGD refuses, and a rate that it would misread."""
    if buffers and not options["momentum"] > 0:
        raise RuntimeError("_fused_sgd_: Expected momentum > 0 with buffers of momentum")
    if isinstance(options["lr"], SimulatedTensor) and options["lr"].dtype != torch.float32:
        raise RuntimeError(f"_fused_sgd_: a rate of {options['lr'].dtype} is read as float32")


def _cross(device: Device, name: str, args: Any, kwargs: Any, found: Any, is_ours: bool) -> None:
    """Count a wait for a copy between host and device, or put off its landing."""
    if name == "_to_copy":
        pairs = [(is_ours, args[0], found)]
    else:
        targets, sources = ([each] if isinstance(each, Tensor) else each for each in args[:2])
        pairs = [(_is_here(a), b, a) for a, b in zip(targets, sources, strict=True)]
    non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
    for comes, source, target in pairs:
        if comes == _is_here(source):
            continue
        host = source if comes else target
        if name == "_to_copy" and not comes and non_blocking:
            device.pin(host)  # as PyTorch does
        if not (non_blocking and device.is_pinned(host)):
            device.wait(name)
        elif not comes:
            device.delay(host)


class _Mode(TorchDispatchMode):
    """Catches what makes tensors out of none, and passes on what other subclasses take apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {}, types)


class _Calls(TorchFunctionMode):
    """Makes tensors of numbers, and names the one device, where PyTorch asks CUDA itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args = [_with_index(each) for each in args]
        kwargs = {name: _with_index(value) for name, value in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


def _with_index(value: Any) -> Any:
    is_named = isinstance(value, (str, torch.device)) and str(value) == "cuda"
    return DEVICE if is_named else value


# ---------------------------------------------------------------- torch.cuda


class _Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._time = self._num_copies = 0

    def record(self, stream: object = None) -> None:
        self._time, self._num_copies = _device().time, _device().num_copies

    def synchronize(self) -> None:
        """A wait where nothing was asked of the device meanwhile: it has none to go on with."""
        if self._time == _device().time:
            _device().wait("synchronize")
        _device().land(self._num_copies)

    def wait(self, stream: object = None) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 1.0


class _Stream(contextlib.nullcontext[None]):
    device = DEVICE

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def wait_stream(self, other: object) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def synchronize(self) -> None:
        _device().wait("synchronize")

    def is_capturing(self) -> bool:
        return False


def _replacements(device: Device) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name, and what stands for it."""

    def synchronize(device: object = None) -> None:
        _device().wait("synchronize")

    for name, value in {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": synchronize,
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "get_device_capability": lambda device=None: (9, 0),
    }.items():
        yield torch.cuda, name, value
    yield torch.accelerator, "synchronize", synchronize
    yield (
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: torch.device("cuda"),
    )
    yield torch.accelerator, "current_stream", _Stream
    yield torch.accelerator, "empty_cache", lambda: None
    yield torch.accelerator, "current_device_index", lambda: 0
    yield dist, "get_backend_config", lambda group=None: device.backends
    # A DTensor asks PyTorch's own code, which takes the device to be meta.
    for name in ("device", "is_cuda", "is_meta"):
        of_local = property(lambda self, name=name: getattr(self._local_tensor, name))
        yield DTensor, name, of_local


@contextlib.contextmanager
def simulated_device(backends: str = NCCL) -> Iterator[Device]:
    """Code inside finds a CUDA device.

    Args:
        backends: What a process group says of itself; ``cpu:gloo,cuda:nccl`` takes CPU tensors too.
    """
    global _current
    assert _current is None, "there is one device"
    device = _current = Device(backends)
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, value in _replacements(device):
                stack.enter_context(mock.patch.object(owner, name, value))
            stack.enter_context(_Calls())
            stack.enter_context(_Mode())
            yield device
    finally:
        _current = None
