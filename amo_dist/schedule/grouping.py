"""Which matrices share a schedule: those of a type, of a type and a depth, or none."""

from __future__ import annotations

from collections.abc import Sequence

from amo_dist.schedule.types import MatrixInfo

DEPTHS = ("shallow", "middle", "deep")
"""The thirds of a model's layers, from its input on."""


def layer_index(name: str) -> int | None:
    """The first part of a dotted name that is a number: 3 in ``layers.3.attention.wq.weight``."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def groups(registry: Sequence[MatrixInfo], granularity: str) -> dict[str, str]:
    """The group of each matrix, by its name.

    Args:
        registry: Every matrix of the world.
        granularity: ``operator_type``; ``layer_group``, each type in the thirds of the layers
            (``attn_q/shallow``; layer ``i`` of ``L`` is in third ``floor(3 i / L)``, and a matrix
            outside of all layers in a group of its type alone); or ``matrix``, each by itself.

    Raises:
        ValueError: The granularity is unknown.
    """
    if granularity == "operator_type":
        return {matrix.name: matrix.operator_type for matrix in registry}
    if granularity == "matrix":
        return {matrix.name: matrix.name for matrix in registry}
    if granularity != "layer_group":
        raise ValueError(
            f"granularity: found {granularity!r}, expected 'operator_type', 'layer_group' or "
            "'matrix'"
        )
    layers = {matrix.name: layer_index(matrix.name) for matrix in registry}
    num_layers = 1 + max((layer for layer in layers.values() if layer is not None), default=0)
    found: dict[str, str] = {}
    for matrix in registry:
        layer = layers[matrix.name]
        depth = "" if layer is None else "/" + DEPTHS[3 * layer // num_layers]
        found[matrix.name] = matrix.operator_type + depth
    return found
