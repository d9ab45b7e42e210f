"""What a driver asks of the engine for one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from amo_dist.schedule.types import Schedule


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """A measurement of some matrices, made by their owners within a step."""

    names: frozenset[str]
    """The matrices to measure."""
    measure: Callable[[str, Tensor, Tensor], None]
    """Called with a matrix's name, its momentum and the orthogonalized result, ``(m, n)`` each.
    Both are lent: their memory is used again after the call."""
    is_wide: bool = False
    """Whether momentum must come in the dtype in which it is kept, not in that of the products."""


@dataclasses.dataclass(frozen=True, slots=True)
class Orders:
    """One step, as the driver wants it."""

    step: int
    """Optimizer step, counted from 1."""
    schedules: Sequence[Schedule]
    """Of each matrix of this process."""
    is_settled: bool
    """Whether schedules have come to stay. Matrices are dealt to owners anew when this changes."""
    observed: tuple[str, ...] = ()
    """Names of the matrices that are observed for the next plan, sorted."""
    checked: str | None = None
    """Name of the matrix whose residual is measured."""
    probes: tuple[Probe, ...] = ()
    """All measurements, those of the two above among them."""
    num_steps: tuple[int, ...] = ()
    """Newton-Schulz steps of every group of matrices in the world, where ranks may share some."""

    @property
    def wide(self) -> frozenset[str]:
        """Names of the matrices that travel in the dtype of momentum."""
        return frozenset().union(*(probe.names for probe in self.probes if probe.is_wide))

    @property
    def measured(self) -> frozenset[str]:
        """Names of the matrices that are measured."""
        return frozenset().union(*(probe.names for probe in self.probes))

    def with_probe(self, probe: Probe) -> Orders:
        """The same with one more measurement."""
        return dataclasses.replace(self, probes=(*self.probes, probe))
