"""Which parameter is which operator: names and shapes to operator types and parameter groups."""

from amo_dist.operators.groups import (
    Fused,
    MatrixView,
    Patterns,
    classify,
    clean_name,
    describe,
    param_groups,
)

__all__ = [
    "Fused",
    "MatrixView",
    "Patterns",
    "classify",
    "clean_name",
    "describe",
    "param_groups",
]
