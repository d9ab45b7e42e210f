"""Matrices that share a schedule: those of a type, of a type and a depth, or of a shape."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from amo_dist.config import sort_operator_types
from amo_dist.schedule.types import MatrixInfo

DEPTHS = ("shallow", "middle", "deep")
"""The thirds of a model's layers, from its input on."""

_LAYER = re.compile(r"(?:^|\.)(?:\w*(?:layers?|blocks?)|h)\.(\d+)\.")


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """Every matrix of the world, and which of them share a schedule."""

    matrices: tuple[MatrixInfo, ...]
    """Sorted by name."""
    members: Mapping[str, tuple[MatrixInfo, ...]]
    """The matrices of each group, sorted by name; groups in the order of plans."""
    group_of: Mapping[str, str]
    """The group of each matrix, by its name."""


def layer_index(name: str) -> int | None:
    """The number of the layer that a parameter lies in; None outside of any.

    It is the number after ``layers``, ``blocks`` or the like, wherever that stands: 5 in
    ``0.layers.5.attention.wq.weight``.
    """
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def group_matrices(registry: Sequence[MatrixInfo], granularity: str = "operator_type") -> Groups:
    """Group matrices by what they have in common.

    Args:
        registry: Every matrix of the world, in any order.
        granularity: ``operator_type``; ``layer_group``, each type in the thirds of the layers
            (``attn_q/shallow``; layer ``i`` of ``L`` is in third ``floor(3 i / L)``, and a matrix
            outside of all layers in a group of its type alone); or ``shape`` (``1024x3072``, short
            side first).
    """
    if granularity == "operator_type":
        return collect(registry, lambda matrix: matrix.operator_type)
    if granularity == "shape":
        return collect(registry, lambda matrix: f"{min(matrix.shape)}x{max(matrix.shape)}")
    layers = {matrix.name: layer_index(matrix.name) for matrix in registry}
    num_layers = 1 + max((layer for layer in layers.values() if layer is not None), default=0)

    def third(matrix: MatrixInfo) -> str:
        layer = layers[matrix.name]
        depth = "" if layer is None else "/" + DEPTHS[3 * layer // num_layers]
        return matrix.operator_type + depth

    return collect(registry, third)


def collect(registry: Sequence[MatrixInfo], group_of: Callable[[MatrixInfo], str]) -> Groups:
    """Group matrices by any rule; see `group_matrices`."""
    ordered = tuple(sorted(registry, key=lambda matrix: matrix.name))
    names = {matrix.name: group_of(matrix) for matrix in ordered}
    members: dict[str, list[MatrixInfo]] = defaultdict(list)
    for matrix in ordered:
        members[names[matrix.name]].append(matrix)
    order = sort_operator_types(members)
    return Groups(ordered, {group: tuple(members[group]) for group in order}, names)
