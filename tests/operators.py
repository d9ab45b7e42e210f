"""Models of nothing but names and shapes, and what `param_groups` makes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from amo_dist.operators.groups import param_groups
from amo_dist.operators.views import MatrixView
from tests.distributed import models


def module_of(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """A module whose parameters have these dotted names and shapes, on the meta device.

    What is called weight and has two dims behaves like the weight of a linear module.
    """
    model = models.build({n: torch.empty(shape, device="meta") for n, shape in shapes.items()})
    for module in model.modules():
        if len(shape := getattr(module, "weight", torch.empty(0)).shape) == 2:
            vars(module).update(out_features=shape[0], in_features=shape[1])
    return model


def views_of(model: nn.Module, **options: Any) -> dict[str, tuple[MatrixView, ...]]:
    """The matrices of each parameter that is orthogonalized."""
    groups = param_groups(model, **options)
    return {name: views for g in groups for name, views in g.get("matrix_views", {}).items()}


def types_of(model: nn.Module, **options: Any) -> dict[str, str]:
    """Operator types, joined by a comma, of every parameter that is orthogonalized."""
    return {
        name: ",".join(dict.fromkeys(view.operator_type for view in views))
        for name, views in views_of(model, **options).items()
    }


def classify(
    name: str,
    shape: tuple[int, ...],
    patterns: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    **options: Any,
) -> tuple[MatrixView, ...] | None:
    """The matrices of one parameter, beside others of some shapes; None for AdamW."""
    others = {other: size for other, size in (shapes or {}).items() if other != name}
    model = module_of({name: shape, **others})
    views_by_name = views_of(model, patterns=patterns, allow_unused=True, **options)
    return next((views for own, views in views_by_name.items() if own not in others), None)


def pasted(text: str) -> dict[str, Any]:
    """The patterns that an error or a report prints."""
    (source,) = re.findall(r"^patterns = .*?^\}$", text, flags=re.MULTILINE | re.DOTALL)
    variables: dict[str, Any] = {}
    exec(source, variables)
    patterns: dict[str, Any] = variables["patterns"]
    return patterns
