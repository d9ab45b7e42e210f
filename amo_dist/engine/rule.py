"""The part of an optimizer of the Muon family beside Newton-Schulz: the engine's public seam."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from amo_dist.config import MuonConfig, require
from amo_dist.distributed.layout import Matrix
from amo_dist.engine.parameters import Param, Parameters, Piece
from amo_dist.engine.world import World
from amo_dist.kernels.elementwise import update_scale

# Adds up shares over whole matrices: takes a 1-D tensor or None for each piece, returns the total
# over all pieces of its matrix, on all ranks, for each piece.
AllSum: TypeAlias = Callable[[Sequence[Tensor | None]], list[Tensor]]


class UpdateRule:
    """How momentum becomes the matrix to orthogonalize, and how the result updates the weight.

    With ``M`` the momentum (Nesterov's step included), ``O`` what Newton-Schulz makes of a whole
    matrix, ``U`` what `post` makes of ``O``, and ``s`` what `scale` returns::

        O = orthogonalize(pre(M))
        U = post(O)
        W <- W * (1 - lr * weight_decay) - lr * s * U

    or ``W <- U`` if the rule `sets_weights`. This base is Muon: ``pre`` and ``post`` change
    nothing. A subclass overrides what it needs, and a subclass of `Muon` names it as
    ``rule_class``. A rule sees the pieces of matrices that this rank holds; numbers of a whole
    matrix come from ``allsum``.

    Args:
        config: Mathematics of the optimizer.

    Attributes:
        defaults: Hyperparameters of the rule: keywords of the optimizer, and keys of its groups.
            ``lr``, ``weight_decay``, ``betas`` and ``eps`` take the place of the optimizer's own
            defaults.
        sum_dtype: Dtype of the sums. Integers add up to the same bits however a matrix is cut;
            floats do not.
        sets_weights: Whether `post` returns new weights in place of updates; decay is then its own
            affair.

    Raises:
        ValueError: ``config.adjust_lr`` asks for a scale, and the rule has a `scale` of its own; or
            it `sets_weights` without a `post` that makes them.
    """

    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    sum_dtype: ClassVar[torch.dtype] = torch.float64
    sets_weights: ClassVar[bool] = False

    def __init__(self, config: MuonConfig) -> None:
        kind = type(self)
        scales = kind.scale is not UpdateRule.scale
        own = f"{config.adjust_lr!r} with {kind.__name__}, which scales updates itself"
        is_default = config.adjust_lr == "match_rms_adamw"
        require(is_default or not scales, "adjust_lr", own, "'match_rms_adamw'")
        self.config = config
        self.has_check = kind.check is not UpdateRule.check
        self.has_pre = kind.pre is not UpdateRule.pre
        self.has_post = kind.post is not UpdateRule.post
        has_weights, field = self.has_post or not self.sets_weights, f"{kind.__name__}.sets_weights"
        require(has_weights, field, "True without `post`", "one that returns new weights")

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse hyperparameters that make no sense; at each step, for groups with matrices.

        Args:
            group: A parameter group.

        Raises:
            ValueError: Names the field, what was found and what was expected.
        """

    def state(self, param: Param) -> dict[str, Tensor]:
        """New state tensors beside ``momentum_buffer``, in the placements of the parameter.

        Args:
            param: A parameter with matrices; its ``tensor`` is a DTensor if it is sharded.

        Returns:
            Tensors by name; each in the shape of the parameter, or with size 1 in some dims.
        """
        return {}

    def pre(self, momenta: Sequence[Tensor], pieces: Sequence[Piece]) -> Sequence[Tensor]:
        """The matrices to orthogonalize, from the momentum of some pieces of this rank.

        Args:
            momenta: Momentum of each piece, with Nesterov's step if that is on, at least float32;
                copies that may be overwritten.
            pieces: The pieces.
        """
        return momenta

    def sums(self, matrix: Matrix) -> tuple[int, ...]:
        """Number of elements of each sum that `post` asks for, call by call; 0 for none.

        Args:
            matrix: A matrix; the answer must be the same on all of its ranks, and the number of
                calls the same for all matrices.
        """
        return ()

    def post(
        self, results: Sequence[Tensor], pieces: Sequence[Piece], allsum: AllSum
    ) -> Sequence[Tensor]:
        """The updates of all pieces of this rank, or their new weights if the rule `sets_weights`.

        Args:
            results: Orthogonalized momentum of each piece, in the dtype in which it travels; may be
                overwritten.
            pieces: The pieces; `post` replaces values of their `Piece.state`.
            allsum: Adds up over whole matrices; a collective, called as often as `sums` has
                entries. Takes a share for each piece, 1-D in `sum_dtype`, or None.

        Returns:
            Tensors of the results' shapes.
        """
        return results

    def scale(self, shape: tuple[int, int]) -> float:
        """Factor on the update of a matrix of ``(outputs, inputs)``, beside the learning rate."""
        return update_scale(shape, self.config.update_factor, self.config.adjust_lr)


class MatrixSums:
    """The ``allsum`` of one step: each call is one reduction for each set of ranks.

    Every rank calls as often as the rule's `sums` declares, also if its rule fails: `finish` makes
    up for missing calls, so that no rank waits for another.

    Args:
        parameters: Parameters and matrices of this process.
        sizes: Number of elements of each sum, call by call, by name of the matrix.
        pieces: Pieces of this rank, in the order of shares.
        world: Says which ranks share matrices.
        dtype: Dtype of shares and totals, which lie on the device of the parameters.

    Attributes:
        error: Error of a reduction, after which no rank can go on.
    """

    def __init__(
        self,
        parameters: Parameters,
        sizes: Mapping[str, tuple[int, ...]],
        pieces: Sequence[Piece],
        world: World,
        dtype: torch.dtype,
    ) -> None:
        self._parameters, self._sizes, self._pieces = parameters, sizes, pieces
        self._world, self._dtype = world, dtype
        self._num_left = max(map(len, sizes.values()), default=0)
        self._num_calls = 0
        self.error: Exception | None = None

    def __call__(self, shares: Sequence[Tensor | None]) -> list[Tensor]:
        """Add up shares over all pieces of each matrix, on all of its ranks.

        Raises:
            ValueError: The rule asks for more sums than it declared, or gives another number of
                shares than there are pieces.
        """
        if not self._num_left or len(shares) != len(self._pieces):
            raise ValueError(
                f"allsum: found call {self._num_calls + 1} with {len(shares)} shares, expected "
                f"{self._num_calls + self._num_left} calls, as `sums` declares, each with a share "
                f"for each of {len(self._pieces)} pieces"
            )
        totals: dict[str, Tensor] = {}
        for piece, share in zip(self._pieces, shares, strict=True):
            name = piece.matrix.name
            size = self._sizes[name][self._num_calls]
            if share is not None and share.numel() != size:
                raise ValueError(
                    f"allsum: found a share of {share.numel()} elements for {name}, expected "
                    f"{size}, as `sums` declares"
                )
            # Replicas hold the same numbers: only the first one counts.
            if share is not None and self._world.rank in piece.matrix.replicas[0]:
                totals[name] = totals[name] + share if name in totals else share
        self._add_up(totals)
        zero = torch.zeros(1, dtype=self._dtype, device=self._parameters.device)
        return [totals.get(piece.matrix.name, zero) for piece in self._pieces]

    def finish(self) -> None:
        """Take part in the sums that the rule has not asked for; nothing after a failed one."""
        while self._num_left and self.error is None:
            self._add_up({})

    def _add_up(self, totals: dict[str, Tensor]) -> None:
        """Add totals up over ranks, in place: one vector for each set of ranks."""
        number, device = self._num_calls, self._parameters.matrix_device
        self._num_calls, self._num_left = number + 1, self._num_left - 1
        try:
            with record_function("amo::sums"):
                for ranks in sorted(self._world.names_by_ranks):
                    group = self._world.groups_by_ranks[ranks]
                    alike = self._world.names_by_ranks[ranks]
                    names = [name for name in alike if self._sizes[name][number]]
                    if group is None or not names:
                        continue
                    sizes = [self._sizes[name][number] for name in names]
                    vector = torch.zeros(sum(sizes), dtype=self._dtype, device=device)
                    pairs = list(zip(names, vector.split(sizes), strict=True))
                    if parts := [part for name, part in pairs if name in totals]:
                        own = [totals[name] for name in names if name in totals]
                        torch._foreach_copy_(parts, own)
                    dist.all_reduce(vector, group=group)
                    sums = vector.to(self._parameters.device).split(sizes)
                    totals.update(zip(names, sums, strict=True))
        except Exception as error:
            self.error = error
            raise
