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
    """Of each thread: flat buffers by use and dtype, and their beginnings by shape too."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.views: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}


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
    view = _memory.views.get((use, dtype, shape))
    if view is not None:
        return view
    size = math.prod(shape)
    buffer = _memory.buffers.get((use, dtype))
    if buffer is None or buffer.numel() < size:
        buffer = _memory.buffers[use, dtype] = torch.empty(size, dtype=dtype, device=device)
        # Those of the buffer before would keep its memory.
        for key in [key for key in _memory.views if key[:2] == (use, dtype)]:
            del _memory.views[key]
    view = _memory.views[use, dtype, shape] = buffer[:size].view(shape)
    return view
