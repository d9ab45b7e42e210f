"""Memory that kernels use again and again.

On CPU a fresh megabyte costs more in page faults than most of what is done with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Workspace:
    """Flat buffers by use and dtype. Whoever makes it owns it: one engine, on one thread.

    A buffer that is too small is replaced by a larger one; the small one lives on for as long as
    something laid out on it does. So lay out what is largest first, and no memory is held twice.

    Args:
        device: Where the memory lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of unspecified values, at the beginning of the buffer of a use.

        Args:
            use: Tells apart what is needed at the same time.
            shape: Of the tensor.
            dtype: Of the tensor.
        """
        size = math.prod(shape)
        buffer = self._buffers.get((use, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[use, dtype] = buffer
        return buffer[:size].view(tuple(shape))
