"""What one optimizer of the Muon family does beside Newton-Schulz: the engine's public seam."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from amo_dist.config import Box, MathConfig
from amo_dist.distributed.layout import MatrixLayout
from amo_dist.kernels.elementwise import update_scale

Finish: TypeAlias = Generator[Tensor, Tensor, Tensor]
"""Yields this rank's share of a sum over the whole matrix, is sent the sum, returns the update."""


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixPiece:
    """A box of one matrix that lies on this rank. Tensors of a piece have the box's shape."""

    matrix: MatrixLayout
    """The whole matrix: name, shape, which rank holds what."""
    box: Box
    """``((first row, end), (first column, end))`` in the matrix."""
    dim: int
    """Dim of the matrix that counts outputs (neurons): 0, or 1 for a parameter fused by columns."""
    param: Tensor
    """The piece of the parameter, before this step; read only."""
    state: Mapping[str, Tensor]
    """By name, the piece of each tensor that `UpdateRule.state` made; write in place."""
    group: Mapping[str, Any]
    """The parameter group, with the rule's own hyperparameters."""


class UpdateRule:
    """How momentum becomes what is orthogonalized, and the result an update.

    This base is Muon: momentum as it is, the result as it is. A subclass overrides what it needs,
    and a subclass of `Muon` names it as ``rule_class``. Everything is called for the pieces of
    matrices that this rank holds; what concerns a whole matrix goes through sums.

    Args:
        config: Mathematics of the optimizer.

    Raises:
        ValueError: ``config.adjust_lr`` asks for a size, and the rule has a `scale` of its own.
    """

    defaults: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Hyperparameters of the rule's own: keywords of the optimizer, keys of its groups."""
    sum_dtype: ClassVar[torch.dtype] = torch.float64
    """Of the sums. Integers add up to the same bits however a matrix is cut; floats do not."""

    def __init__(self, config: MathConfig) -> None:
        kind = type(self)
        if kind.scale is not UpdateRule.scale and config.adjust_lr != "match_rms_adamw":
            raise ValueError(
                f"adjust_lr: found {config.adjust_lr!r} with {kind.__name__}, which scales "
                "updates itself, expected 'match_rms_adamw'"
            )
        self.config = config
        self.prepares = kind.prepare is not UpdateRule.prepare
        self.finishes = kind.finish is not UpdateRule.finish

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse hyperparameters of the rule's own that mean nothing; for each step.

        Args:
            group: A parameter group.

        Raises:
            ValueError: Names the field, what was found and what was expected.
        """

    def state(self, param: Tensor, dim: int) -> dict[str, Tensor]:
        """New state tensors beside ``momentum_buffer``, in the placements of the parameter.

        Args:
            param: A parameter with matrices; a DTensor where it is sharded.
            dim: As `MatrixPiece.dim`.

        Returns:
            By name; each in the shape of the parameter, or with size 1 in some dims.
        """
        return {}

    def prepare(self, momentum: Tensor, piece: MatrixPiece) -> Tensor:
        """What to orthogonalize.

        Args:
            momentum: With Nesterov's step if that is on, float32 at least; may be overwritten.
            piece: Which piece it is.
        """
        return momentum

    def sums(self, matrix: MatrixLayout, dim: int) -> tuple[int, ...]:
        """How many numbers each sum has that `finish` asks for, one after the other.

        Args:
            matrix: The answer must be the same on all of its ranks.
            dim: As `MatrixPiece.dim`.
        """
        return ()

    def finish(self, result: Tensor, piece: MatrixPiece) -> Finish:
        """Turn a result into the update, before it is scaled and written.

        A generator: each ``total = yield share`` adds up ``share``, 1-D in `sum_dtype`, over all
        pieces of the matrix on all of its ranks. Yield as often as `sums` has entries.

        Args:
            result: Orthogonalized; lent until the first ``yield``, so keep a copy, not the tensor.
            piece: Which piece it is.

        Returns:
            The update, a tensor of the result's shape.
        """
        return result
        yield

    def scale(self, shape: tuple[int, int]) -> float:
        """Factor on the update of a matrix of ``(outputs, inputs)``, beside the learning rate."""
        return update_scale(shape, self.config.update_factor, self.config.adjust_lr)
