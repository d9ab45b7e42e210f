"""Flat memory for lists of tensors, whose views are made once and kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Elements at whose multiples a view starts: kernels read aligned memory in wider pieces."""
_MOST_LISTS = 4096
"""Lists whose views are kept; a training step has a few for each bucket, of which plans that are
past leave some."""


class Scratch:
    """Memory that is used again at every step; one engine, on one thread, owns it.

    A list of tensors gets views that lie one after the other in one flat tensor, so that what is
    done to all of them takes one launch.
    """

    def __init__(self) -> None:
        self._buffers: dict[object, Tensor] = {}
        self._known: dict[object, tuple[Tensor, list[Tensor]]] = {}

    def take(
        self, use: str, like: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, list[Tensor]]:
        """Memory of unspecified values.

        Args:
            use: Tells apart what is needed at the same time.
            like: Tensors on one device, at least one.
            dtype: Of the memory.

        Returns:
            A flat tensor; and a contiguous view of it in the shape of each tensor.
        """
        device = like[0].device
        key = (use, dtype, device, tuple([each.shape for each in like]))
        if key not in self._known:
            if len(self._known) >= _MOST_LISTS:
                self._known.clear()
            self._known[key] = self._cut((use, dtype, device), like)
        return self._known[key]

    def _cut(
        self, place: tuple[str, torch.dtype, torch.device], like: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        _, dtype, device = place
        spaces = [-(-each.numel() // _ALIGNMENT) * _ALIGNMENT for each in like]
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < sum(spaces):
            # Views of the smaller one would keep it alive.
            self._known = {key: value for key, value in self._known.items() if key[:3] != place}  # type: ignore[index]
            self._buffers.pop(place, None)
            buffer = torch.empty(sum(spaces), dtype=dtype, device=device)
            self._buffers[place] = buffer
        flat = buffer[: sum(spaces)]
        parts = zip(flat.split(spaces), like, strict=True)
        return flat, [part[: each.numel()].view(each.shape) for part, each in parts]
