"""Memory that calls of one thread share.

On CPU a fresh megabyte costs more in page faults than most of what is done with it. Elsewhere the
caching allocator of PyTorch does this work.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

_thread = threading.local()
_Held = tuple[Tensor, dict[tuple[int, ...], Tensor]]
"""A flat buffer, and its beginning in each shape that was asked for."""


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
    held = cast("dict[tuple[str, torch.dtype], _Held]", _thread.__dict__.setdefault("held", {}))
    key, shape = (use, dtype), tuple(shape)
    size = math.prod(shape)
    found = held.get(key)
    if found is None or found[0].numel() < size:
        found = held[key] = (torch.empty(size, dtype=dtype, device=device), {})
    buffer, views = found
    view = views.get(shape)
    if view is None:
        view = views[shape] = buffer[:size].view(shape)
    return view
