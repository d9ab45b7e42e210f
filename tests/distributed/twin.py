"""The same model for ranks and for the slow twin of `tests.oracle`, which knows matrices alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amo_dist import MuonConfig
from amo_dist.operators.views import Fused
from amo_dist.optimizers.named import MUON_SCHEDULES
from amo_dist.optimizers.root import fit
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.types import Schedule
from tests.distributed import models
from tests.layouts import cut_view
from tests.operators import classify
from tests.oracle import AdaMuonOracle, NorMuonOracle, Oracle

LR, WEIGHT_DECAY, SEED = 3e-3, 0.1, 7
Shapes = Mapping[str, tuple[int, ...]]
PATTERNS = {
    # Uneven grouped-query attention, in three pieces and interleaved by group.
    r".*attention\.wqkv\.weight": Fused((("attn_q", 6), ("attn_k", 3), ("attn_v", 3))),
    r".*attention\.woven\.weight": Fused((("attn_q", 8), ("attn_k", 4), ("attn_v", 2)), groups=2),
    r".*\.conv\.weight": "conv",
}
NORMED = {"AdaMuon": AdaMuonOracle, "NorMuon": NorMuonOracle}
"""Twins of optimizers whose updates have a fixed norm."""


def gradient(step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """A gradient, whole; of a stack of experts one by one."""
    if len(shape) != 3:
        flat = (shape[0], math.prod(shape[1:])) if len(shape) == 4 else shape
        return models.gradient(SEED, step, name, flat).view(shape)
    parts = [models.gradient(SEED, step, f"{name}[{e}]", shape[1:]) for e in range(shape[0])]
    # Harder for one operator type than for the others, or the plan would be the uniform one.
    decay = {"w1": 0.0, "w2": 3.0, "w3": 0.5}[name[-2:]]
    rows = torch.arange(shape[1], dtype=torch.float32)
    return torch.stack(parts) * torch.exp(-decay * rows).unsqueeze(-1)


def set_gradients(model: nn.Module, step: int) -> None:
    """The same gradients, in the placements of the parameters."""
    for name, param in model.named_parameters():
        grad = gradient(step, name, tuple(param.shape)).to(param.dtype)
        param.grad = models.place_like(grad, param)


def views_of(name: str, shape: tuple[int, ...], head_dim: int = 0) -> Any:
    """The matrices of a parameter; None for AdamW."""
    patterns = {p: t for p, t in PATTERNS.items() if p.split(".")[-2].strip("\\") in name}
    return classify(name, shape, patterns, per_head=head_dim or False)


def by_matrix(name: str, tensor: Tensor, head_dim: int = 0) -> dict[str, Tensor]:
    """The tensors of the twin: each matrix is one, and so is what goes to AdamW."""
    views = views_of(name, tuple(tensor.shape), head_dim)
    if views is None:
        return {name: tensor.clone()}
    if tensor.dim() == 4:
        return {name: tensor.flatten(1)}
    return {name + view.suffix: cut_view(view, tensor).clone() for view in views}


class Twin:
    """The twin of an optimizer over a model.

    Args:
        shapes: Shapes of the parameters by name.
        config: Settings.
        name: Name of the optimizer.
        head_dim: Rows of a head, each of which is a matrix; 0 for none.
        dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        shapes: Shapes,
        config: MuonConfig,
        name: str = "AMO",
        head_dim: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shapes, self.head_dim, self.dtype = shapes, head_dim, dtype
        params, types = self._cut(models.initial), dict[str, str]()
        for own, shape in shapes.items():
            for view in views_of(own, shape, head_dim) or ():
                types[own + view.suffix] = view.operator_type
        schedules: dict[str, Schedule] = {}
        if name == "ROOT":
            sizes = {own: (params[own].shape[0], params[own].shape[1]) for own in types}
            schedules = {own: Schedule((fit(sizes[own]),) * 5, norm_scale=1.0) for own in types}
        elif name != "AMO":
            table = named_schedule(MUON_SCHEDULES.get(name, "kj")).schedule
            schedules = dict.fromkeys(types, table)
        options = {"lr": LR, "weight_decay": WEIGHT_DECAY, "schedules": schedules}
        self.oracle = NORMED.get(name, Oracle)(params, types, config, **options)

    def _cut(self, make: Any) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            tensors |= by_matrix(name, make(name, shape).to(self.dtype), self.head_dim)
        return tensors

    def step(self, step: int) -> None:
        """Take a step with the gradients of `set_gradients`."""
        self.oracle.step(self._cut(lambda name, shape: gradient(step, name, shape)))
