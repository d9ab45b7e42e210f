"""Memory that calls of one thread share.

On CPU a fresh megabyte costs more in page faults than most of what is done with it. Elsewhere the
caching allocator of PyTorch does this work.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor


class _Memory(threading.local):
    """Of each thread, by use and dtype: a flat buffer, and its beginning in each shape so far."""

    def __init__(self) -> None:
        self.whereabouts = object()
        self.held: dict[tuple[str, torch.dtype], tuple[Tensor, dict[tuple[int, ...], Tensor]]] = {}


_memory = _Memory()


def scratch(use: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor of unspecified values; the next call for the same use may overwrite it.

    Args:
        use: Tells apart what is needed at the same time.
        shape: Of the tensor.
        dtype: Of the tensor.
        device: Of the tensor.
    """
    if device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    shape = tuple(shape)
    found = _memory.held.get((use, dtype))
    view = None if found is None else found[1].get(shape)
    if view is not None:
        return view
    size = math.prod(shape)
    if found is None or found[0].numel() < size:
        _memory.whereabouts = object()
        found = _memory.held[use, dtype] = torch.empty(size, dtype=dtype, device=device), {}
    buffer, views = found
    view = views[shape] = buffer[:size].view(shape)
    return view


def whereabouts() -> object:
    """While this is the same object, all memory of the calling thread is where it was."""
    return _memory.whereabouts
