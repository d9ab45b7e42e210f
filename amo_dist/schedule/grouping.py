"""Matrices that share a schedule."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from amo_dist.config import sort_operator_types
from amo_dist.schedule.types import MatrixInfo


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """Every matrix of the world, and which of them share a schedule."""

    matrices: tuple[MatrixInfo, ...]
    """Sorted by name."""
    members: Mapping[str, tuple[MatrixInfo, ...]]
    """The matrices of each group, sorted by name; groups in the order of plans."""
    group_of: Mapping[str, str]
    """The group of each matrix, by its name."""


def group_matrices(registry: Sequence[MatrixInfo]) -> Groups:
    """Group matrices by operator type.

    Args:
        registry: Every matrix of the world, in any order.
    """
    return collect(registry, lambda matrix: matrix.operator_type)


def collect(registry: Sequence[MatrixInfo], group_of: Callable[[MatrixInfo], str]) -> Groups:
    """Group matrices by any rule; see `group_matrices`."""
    ordered = tuple(sorted(registry, key=lambda matrix: matrix.name))
    names = {matrix.name: group_of(matrix) for matrix in ordered}
    members: dict[str, list[MatrixInfo]] = defaultdict(list)
    for matrix in ordered:
        members[names[matrix.name]].append(matrix)
    order = sort_operator_types(members)
    return Groups(ordered, {group: tuple(members[group]) for group in order}, names)
