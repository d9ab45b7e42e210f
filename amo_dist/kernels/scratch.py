"""Memory that calls of one thread share.

On CPU a fresh megabyte costs more in page faults than most of what is done with it. Elsewhere the
caching allocator of PyTorch does this work.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

_thread = threading.local()


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
    held = cast("dict[tuple[str, torch.dtype], Tensor]", _thread.__dict__.setdefault("held", {}))
    size = torch.Size(shape).numel()
    buffer = held.get((use, dtype))
    if buffer is None or buffer.numel() < size:
        buffer = held[use, dtype] = torch.empty(size, dtype=dtype, device=device)
    return buffer[:size].view(tuple(shape))
