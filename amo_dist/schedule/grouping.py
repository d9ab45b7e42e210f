"""Which matrices share a schedule: those of a type, of a type and a depth, of a shape, or none."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

from amo_dist.config import sort_operator_types
from amo_dist.schedule.types import MatrixInfo

DEPTHS = ("shallow", "middle", "deep")
"""The thirds of a model's layers, from its input on."""

_LAYER = re.compile(r"(?:^|\.)(?:\w*(?:layers?|blocks?)|h)\.(\d+)\.")


def layer_index(name: str) -> int | None:
    """The number of the layer that a parameter lies in; None outside of any.

    It is the number after ``layers``, ``blocks`` or the like, wherever that stands: 5 in
    ``0.layers.5.attention.wq.weight``.
    """
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def matrices_by_group(
    registry: Sequence[MatrixInfo], granularity: str = "operator_type"
) -> dict[str, list[MatrixInfo]]:
    """The matrices that share a schedule, by group.

    Args:
        registry: Every matrix of the world.
        granularity: ``operator_type``; ``layer_group``, each type in the thirds of the layers
            (``attn_q/shallow``; layer ``i`` of ``L`` is in third ``floor(3 i / L)``, and a matrix
            outside of all layers in a group of its type alone); ``shape`` (``1024x3072``, short
            side first); or ``matrix``, each by itself.

    Returns:
        Groups in the order of plans, the matrices of each in that of the registry.
    """
    if granularity == "operator_type":
        return collect(registry, lambda matrix: matrix.operator_type)
    if granularity == "matrix":
        return collect(registry, lambda matrix: matrix.name)
    if granularity == "shape":
        return collect(registry, lambda matrix: f"{min(matrix.shape)}x{max(matrix.shape)}")
    layers = {matrix.name: layer_index(matrix.name) for matrix in registry}
    num_layers = 1 + max((layer for layer in layers.values() if layer is not None), default=0)

    def third(matrix: MatrixInfo) -> str:
        layer = layers[matrix.name]
        depth = "" if layer is None else "/" + DEPTHS[3 * layer // num_layers]
        return matrix.operator_type + depth

    return collect(registry, third)


def collect(
    registry: Sequence[MatrixInfo], group_of: Callable[[MatrixInfo], str]
) -> dict[str, list[MatrixInfo]]:
    """As `matrices_by_group`, by any rule."""
    found: dict[str, list[MatrixInfo]] = defaultdict(list)
    for matrix in registry:
        found[group_of(matrix)].append(matrix)
    return {group: found[group] for group in sort_operator_types(found)}
