"""The slow twin: training on one process, written as the algorithm reads, without any exchange.

It shares with the package the kernels and AMO's source of schedules, which have tests of their own,
and nothing else. `Oracle` knows matrices alone; `Twin` cuts those out of a model's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.engine.observe import coefficient_table
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.kernels.spectrum import distances, spectrum
from amo_dist.operators.views import Fused
from amo_dist.optimizers.named import MUON_SCHEDULES
from amo_dist.optimizers.root import fit
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.polar_express import SAFETY
from amo_dist.schedule.source import Amo
from amo_dist.schedule.types import MatrixInfo, Measurement, Schedule
from tests.distributed import models
from tests.layouts import cut_view
from tests.operators import classify


class Oracle:
    """Trains a dict of plain tensors in place.

    Args:
        params: Tensors by name.
        types: Operator type of each of them that is a matrix.
        config: Settings; of AMO where no schedules are given.
        lr: Learning rate.
        weight_decay: Weight decay.
        schedules: Of each matrix, where they are fixed.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        types: Mapping[str, str],
        config: MuonConfig,
        *,
        lr: float,
        weight_decay: float,
        schedules: Mapping[str, Schedule] | None = None,
    ) -> None:
        self.params = dict(params)
        self.types = dict(types)
        self.config = config.in_force(has_bfloat16=False)
        self.lr, self.weight_decay = lr, weight_decay
        self.schedules = dict(schedules or {})
        self.buffers = {name: torch.zeros_like(params[name], dtype=torch.float32) for name in types}
        rest = [param for name, param in params.items() if name not in types]
        options: Any = {"betas": (0.9, 0.95), "weight_decay": weight_decay, "foreach": False}
        self.adamw = torch.optim.AdamW(rest, lr, **options) if rest else None
        self.moments: dict[str, Tensor] = {}
        self.step_number = 0
        self.source: Amo | None = None
        if isinstance(self.config, AMOConfig):
            self.source = Amo(self.config)
            shapes = {name: (params[name].shape[0], params[name].shape[1]) for name in types}
            self.source.bind(
                [MatrixInfo(n, shapes[n], types[n], self._scale(params[n])) for n in types]
            )

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor | None]) -> None:
        self.step_number += 1
        by_type = self.source.schedules(self.step_number) if self.source else {}
        sample = self.source.sample(self.step_number) if self.source else ()
        sampled: dict[str, Tensor] = {}
        dtype, wire = (
            getattr(torch, name) for name in (self.config.ns_dtype, str(self.config.wire_dtype))
        )
        for name, operator_type in self.types.items():
            grad = grads.get(name)
            if grad is None:
                continue
            momentum = self._momentum(name, grad)
            if name in sample:
                sampled[name] = momentum
            schedule = self.schedules.get(name) or by_type[operator_type]
            update = orthogonalize(
                self._direction(momentum).to(wire),
                schedule.coefficients,
                dtype=dtype,
                norm_scale=schedule.norm_scale,
                preconditioner=schedule.preconditioner,
            )
            param = self.params[name]
            update, scale = self._scaled(name, self._sized(update).to(wire).float())
            new = param.float() * (1 - self.lr * self.weight_decay)
            param.copy_(new - update * (self.lr * scale))
        for name in self.params.keys() - self.types.keys():
            self.params[name].grad = grads.get(name)
        if self.adamw:
            self.adamw.step()
        if self.source and sample:
            self._observe(self.source, sampled)

    def _observe(self, source: Amo, sampled: Mapping[str, Tensor]) -> None:
        rows, table = {}, coefficient_table(source.candidates())
        for name, momentum in sampled.items():
            ell, sigma, is_clamped = spectrum(momentum)
            exact_norm = self.config.update_norm == "exact"
            errors = distances(sigma / SAFETY, table, exact_norm=exact_norm)
            if not ell.isnan():
                rows[name] = Measurement(ell.item(), is_clamped, errors.tolist())
        source.record(self.step_number, rows)

    def _direction(self, momentum: Tensor) -> Tensor:
        return momentum

    def _sized(self, update: Tensor) -> Tensor:
        if self.config.update_norm == "exact":
            wide = torch.promote_types(update.dtype, torch.float32)
            norm = torch.linalg.vector_norm(update, dtype=wide)
            exact = math.sqrt(min(update.shape))
            update *= exact / max(norm, torch.tensor(exact / 2, dtype=wide))
        return update

    def _scale(self, matrix: Tensor) -> float:
        return self.config.update_factor * math.sqrt(max(matrix.shape))

    def _scaled(self, name: str, update: Tensor) -> tuple[Tensor, float]:
        return update, self._scale(update)

    def _momentum(self, name: str, grad: Tensor) -> Tensor:
        buffer, nesterov = self.buffers[name], self.config.nesterov
        buffer.copy_(buffer * self.config.momentum + grad.float())
        if nesterov is False:
            return buffer
        coefficient = self.config.momentum if nesterov is True else nesterov
        return buffer * coefficient + grad.float()


class NormedOracle(Oracle):
    """An update of the norm of an orthogonal one.

    The norm comes from a correctly rounded sum, the package's from one in integers: they agree to
    about ten digits, so that a factor in float32 may differ in its last bit.
    """

    def _sized(self, update: Tensor) -> Tensor:
        return update

    def _normed(self, update: Tensor) -> tuple[Tensor, float]:
        norm = math.sqrt(math.fsum((update.double() ** 2).flatten().tolist()))
        wanted = math.sqrt(min(update.shape))
        return update * (wanted / norm if norm else 0.0), self._scale(update)


class AdaMuonOracle(NormedOracle):
    """AdaMuon: signs in, an elementwise second moment out."""

    def _direction(self, momentum: Tensor) -> Tensor:
        return momentum.sign()

    def _scaled(self, name: str, update: Tensor) -> tuple[Tensor, float]:
        decay = self.config.momentum
        moment = self.moments.setdefault(name, torch.zeros_like(update))
        moment.copy_(moment * decay + update * update * (1 - decay))
        return self._normed(update / (moment.sqrt() + 1e-8))


class NorMuonOracle(NormedOracle):
    """NorMuon: a second moment of each row."""

    def _scaled(self, name: str, update: Tensor) -> tuple[Tensor, float]:
        moment = self.moments.setdefault(name, torch.zeros_like(update[:, :1]))
        # In the unit of the package's exact sums, which shows where a row is almost nothing.
        unit = 2.0 ** (math.ceil(math.log2(4 * update.shape[1])) - 62)
        rows = update.double().tolist()
        means = [sum(round(x * x / unit) for x in row) * unit / len(row) for row in rows]
        moment.copy_(moment * 0.95 + torch.tensor(means).unsqueeze(1) * (1 - 0.95))
        return self._normed(update / (moment.sqrt() + 1e-8))


# ---------------------------------------------------------------- of a model

NORMED = {"AdaMuon": AdaMuonOracle, "NorMuon": NorMuonOracle}
"""Twins of optimizers that scale updates themselves."""
LR, WEIGHT_DECAY, SEED = 3e-3, 0.1, 7
Shapes = Mapping[str, tuple[int, ...]]
PATTERNS = {
    # Uneven grouped-query attention, in three pieces and interleaved by group.
    r".*attention\.wqkv\.weight": Fused((("attn_q", 6), ("attn_k", 3), ("attn_v", 3))),
    r".*attention\.woven\.weight": Fused((("attn_q", 8), ("attn_k", 4), ("attn_v", 2)), groups=2),
    r".*\.conv\.weight": "conv",
}


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
