"""Local tensors and pieces of them, found once and kept for as long as these lie where they lay.

To make a view takes the host as long as to launch a kernel, and a step has hundreds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.config import Box
from amo_dist.distributed.layout import flattened, local_tensor
from amo_dist.distributed.plan import Part
from amo_dist.engine.parameters import Parameters

_MOST_LISTS = 4096
"""Lists of parts whose pieces are kept: a plan has some for each bucket, and plans pass."""


class Cuts:
    """Pieces of local tensors, kept for as long as the tensors stay where they are.

    Args:
        parameters: Of this process.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._matrices = parameters.matrices
        self._tensors: object = None
        # By the identity of parts, which live here: to hash them takes longer than to cut.
        self._known: dict[int, tuple[Sequence[Part], list[Tensor]]] = {}

    def take(self, tensors: Sequence[Tensor], parts: Sequence[Part]) -> list[Tensor]:
        """The piece of each part, as a matrix; shares memory.

        Args:
            tensors: Local tensors by parameter; the same list for as long as they stay.
            parts: A tuple for those of a plan, which come again.
        """
        if tensors is not self._tensors or len(self._known) >= _MOST_LISTS:
            self._tensors, self._known = tensors, {}
        if id(parts) in self._known:
            return self._known[id(parts)][1]
        found = [cut(tensors[self._matrices[p.matrix].tensor], p.piece.source) for p in parts]
        if isinstance(parts, tuple):
            self._known[id(parts)] = parts, found
        return found


class Locals:
    """Local tensors, as one list for as long as they stay where they are.

    Args:
        convolutions: Indices of those that come as `flattened`.
    """

    def __init__(self, convolutions: Sequence[int] = ()) -> None:
        self._convolutions = convolutions
        self._places: list[int] = []
        self._held: list[Tensor] = []

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of parameters or of state, which share their memory.

        Args:
            tensors: The same ones each time, though each may have come to lie elsewhere.
        """
        places = [
            (each._local_tensor if isinstance(each, DTensor) else each).data_ptr()
            for each in tensors
        ]
        if places != self._places:
            local = [local_tensor(each) for each in tensors]
            for index in self._convolutions:
                local[index] = flattened(local[index])
            self._places, self._held = places, local
        return self._held


def as_matrix(tensor: Tensor) -> Tensor:
    """Without the leading dims of a piece, which all have size 1."""
    return tensor if tensor.dim() == 2 else tensor.view(tensor.shape[-2:])


def cut(local: Tensor, box: Box) -> Tensor:
    """The box of a local tensor, as a matrix; shares memory."""
    if all(stop - start == size for (start, stop), size in zip(box, local.shape, strict=True)):
        return as_matrix(local)
    return as_matrix(local[tuple(slice(start, stop) for start, stop in box)])


def cut_like(value: Tensor, box: Box, shape: torch.Size) -> Tensor:
    """The box of a tensor in this shape, or with size 1 where the shape has another."""
    pairs = zip(box, value.shape, shape, strict=True)
    return cut(value, tuple(each if size == whole else (0, 1) for each, size, whole in pairs))
