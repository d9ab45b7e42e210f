"""Which parameter is which operator: names and shapes to operator types and parameter groups."""

from amo_dist.operators.groups import describe, param_groups
from amo_dist.operators.patterns import Patterns, classify, clean_name
from amo_dist.operators.views import Fused, MatrixView

__all__ = [
    "Fused",
    "MatrixView",
    "Patterns",
    "classify",
    "clean_name",
    "describe",
    "param_groups",
]
