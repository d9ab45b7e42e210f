"""Classification of one parameter, as `param_groups` does it for a model."""

from __future__ import annotations

from collections.abc import Sequence

from amo_dist.operators.patterns import (
    UNKNOWN,
    Patterns,
    Shapes,
    check_patterns,
    clean_name,
    find_views,
    unknown_matrices,
)
from amo_dist.operators.views import MatrixView, Site


def classify(
    name: str,
    shape: Sequence[int],
    patterns: Patterns | None = None,
    shapes: Shapes | None = None,
    *,
    flatten_conv: bool = False,
) -> tuple[MatrixView, ...] | None:
    """The matrices of a parameter, None for AdamW; an unknown matrix raises."""
    name, size = clean_name(name), tuple(shape)
    targets = check_patterns(patterns)
    views, reason = find_views(name, size, targets, shapes or {}, Site(), flatten_conv=flatten_conv)
    if reason == UNKNOWN:
        raise unknown_matrices({name: size})
    return views
