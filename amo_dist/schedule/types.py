"""A schedule, a matrix, and the measurement of one."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from amo_dist.config import PRECONDITIONERS, Triple, fail


def evaluate(triple: Triple, x: float) -> float:
    """Singular value after one Newton-Schulz step."""
    a, b, c = triple
    square = x * x
    return x * (a + square * (b + square * c))


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """How matrices of one operator type are orthogonalized.

    Attributes:
        coefficients: One ``(a, b, c)`` per Newton-Schulz step; at least one.
        norm_scale: The input is divided by ``norm_scale`` times its Frobenius norm (unused under
            ``aol``).
        preconditioner: ``frobenius`` scales by the norm; ``aol`` scales rows by the Gram matrix
            instead.

    Raises:
        ValueError: A field is malformed; the message names it.
    """

    coefficients: tuple[Triple, ...]
    norm_scale: float = 1.01
    preconditioner: str = "frobenius"

    def __post_init__(self) -> None:
        triples = self.coefficients
        is_table = isinstance(triples, tuple) and len(triples) > 0
        is_table = is_table and all(isinstance(t, tuple) and len(t) == 3 for t in triples)
        values = [*itertools.chain(*triples)] if is_table else []
        if not (is_table and all(type(x) is float and math.isfinite(x) for x in values)):
            fail("coefficients", triples, "a non-empty tuple of (a, b, c), each a finite float")
        scale = self.norm_scale
        if not (type(scale) is float and math.isfinite(scale) and scale > 0):
            fail("norm_scale", self.norm_scale, "a finite float > 0")
        if self.preconditioner not in PRECONDITIONERS:
            fail("preconditioner", self.preconditioner, " or ".join(map(repr, PRECONDITIONERS)))

    @property
    def num_steps(self) -> int:
        """The number of Newton-Schulz steps, ``T``."""
        return len(self.coefficients)

    def image(self, x: float) -> float:
        """Singular value after all steps, for ``x`` of the scaled matrix."""
        for triple in self.coefficients:
            x = evaluate(triple, x)
        return x

    def digest(self) -> str:
        """A hexadecimal SHA-256 of the exact bits: equal if and only if the schedules are."""
        words = [self.preconditioner, self.norm_scale.hex()]
        words += [value.hex() for triple in self.coefficients for value in triple]
        return hashlib.sha256(" ".join(words).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixInfo:
    """One matrix of the world's registry, wherever its pieces are.

    Attributes:
        name: Unique in the world: the parameter's name and the suffix of the matrix inside it.
        shape: Rows and columns of the whole matrix.
        operator_type: The type that shares its schedule, e.g. ``attn_q``.
        rate: Factor on its orthogonalized momentum beside the learning rate: the scale of updates,
            times ``muon_lr_factor`` of its parameter group.
    """

    name: str
    shape: tuple[int, int]
    operator_type: str
    rate: float = 1.0

    @property
    def weight(self) -> float:
        """The squared Frobenius norm of its update, were it exact and the learning rate one."""
        return self.rate * self.rate * min(self.shape)


class Measurement(NamedTuple):
    """Measurement of the momentum of one matrix.

    Attributes:
        ell: Least singular value over the Frobenius norm; above 0, and 1 but for rounding at most.
        is_clamped: Whether the absolute tau of the AMO paper took the place of the least singular
            value, and lifted ``ell`` above 1e-6.
        errors: Error of the update by each candidate.
    """

    ell: float
    is_clamped: bool
    errors: Sequence[float]
