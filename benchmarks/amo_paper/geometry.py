"""Geometry of every matrix while a run trains: a callback that writes ``geometry.jsonl``.

``--metrics.callbacks=benchmarks.amo_paper.geometry.Geometry`` adds it to a run. The file holds one
JSON object for each matrix and measured step, as `static_schedule` reads them: ``step``, ``name``,
``layer`` (``null`` outside of the blocks), ``operator_type``, ``family``, ``shape``, the figures
`SPECTRAL_METRICS` of momentum, and of its orthogonalization ``ns_residual`` and ``update_norm``,
the norm over that of an exact polar factor. ``null`` stands for a value that is not finite.

The AMO paper reads its threshold ``tau`` in three ways, and so do the metrics:

- ``ell``, the control signal, clamps: ``max(sigma_min, tau)``, tau absolute;
- ``kappa``, ``spectral_entropy`` and ``effective_rank`` drop every singular value that is not above
  tau, tau absolute;
- ``ell_static``, of the offline schedules, clamps relatively: ``max(sigma_min, tau * sigma_max)``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.distributed.ranks import this_rank
from amo_dist.engine.hyperparameters import read_groups
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.kernels.spectrum import ns_residual
from benchmarks.amo_paper.catalog import GEOMETRY_FILE
from torchtitan_ext.plugin.callbacks import Callback
from torchtitan_ext.runs.records import append_records, drop_from

SPECTRAL_METRICS = (
    *("sigma_min", "sigma_max", "frobenius", "kappa", "ell", "ell_static"),
    *("spectral_entropy", "effective_rank"),
)
"""Metrics of one matrix, from its singular values; see `spectral_metrics`."""
TAU = 1e-10
"""The paper's least singular value that counts."""
ENERGY = 0.99
"""Share of the energy that ``effective_rank`` singular directions hold."""
# Names that the paper gives to torchtitan's models.
_FAMILIES = {"llama3": "Llama-3.1", "qwen3": "Qwen3"}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Geometry(Callback):
    """Measures every matrix at each multiple of ``interval`` steps; training stays as it is."""

    interval = 10
    _has_started = False

    def before_step(self, step: int) -> None:
        """Drop what earlier starts wrote for the first step of this process and for later ones."""
        if not self._has_started and this_rank() == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            drop_from(self._path, step)
        self._has_started = True

    def after_step(self, step: int) -> None:
        """Measure, each rank a part of the matrices, and append the records on the first rank."""
        if step % self.interval:
            return
        family = {"family": family_label(self.trainer.config)}
        records = measure(self.trainer.optimizers.optimizer, step)
        if this_rank() == 0:
            append_records(self._path, [record | family for record in records])

    @property
    def _path(self) -> Path:
        return Path(self.trainer.config.dump_folder) / GEOMETRY_FILE


class GeometryOfSmallModels(Geometry):
    """The paper measures its two smallest models more often."""

    interval = 5


def measure(optimizer: Any, step: int) -> list[dict[str, Any]]:
    """Measure all matrices after a step, while its gradients are there; a collective.

    Args:
        optimizer: Optimizer of the Muon family whose parameters are one matrix each.
        step: The step that it has just taken.

    Returns:
        A record of each matrix, in the order of names, the same on every rank.
    """
    schedules = optimizer.schedules_by_type(step)
    own: dict[str, dict[str, Any]] = {}
    for index, info in enumerate(optimizer.world.registry):
        momentum = _momentum(optimizer, info.name)
        if index % _world_size() != this_rank():
            continue
        schedule = schedules[info.operator_type]
        result = orthogonalize(momentum, schedule.coefficients, norm_scale=schedule.norm_scale)
        norm = torch.linalg.vector_norm(result, dtype=torch.float64).item()
        layer = _LAYER.search(info.name)
        own[info.name] = {
            "step": step,
            "name": info.name,
            "layer": None if layer is None else int(layer[1]),
            "operator_type": info.operator_type,
            "shape": list(info.shape),
            **dict(zip(SPECTRAL_METRICS, spectral_metrics(momentum).tolist(), strict=True)),
            "ns_residual": ns_residual(result).item(),
            "update_norm": norm / math.sqrt(min(result.shape)),  # 1 for a polar factor
        }
    parts: list[Any] = [own]
    if _world_size() > 1:
        parts *= _world_size()
        dist.all_gather_object(parts, own)
    record_by_name: Mapping[str, dict[str, Any]] = {k: v for part in parts for k, v in part.items()}
    return [record_by_name[name] for name in sorted(record_by_name)]


def _momentum(optimizer: Any, name: str) -> Tensor:
    """What the last step orthogonalized, whole, in the dtype of momentum; a collective."""
    param = optimizer.params_by_name[name]
    buffer = optimizer.state[param]["momentum_buffer"]
    (group,) = [g for g in optimizer.param_groups if any(p is param for p in g["params"])]
    (settings,) = read_groups([group], lambda _: None)
    coefficient = settings.lookahead
    matrix = buffer
    if coefficient is not None:
        matrix = param.grad.to(buffer.dtype) + coefficient * buffer
    return matrix.full_tensor() if isinstance(matrix, DTensor) else matrix


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def family_label(config: Any) -> str:
    """The paper's name of the family, or torchtitan's."""
    name: str = config.model.name
    return _FAMILIES.get(name, name)


@torch.no_grad()
def spectral_metrics(x: Tensor, *, tau: float = TAU) -> Tensor:
    """All of `SPECTRAL_METRICS` from one singular value decomposition in float64.

    - ``sigma_min``, ``sigma_max`` and ``frobenius`` are in the unit of ``x``, as they are.
    - ``kappa``: ``sigma_max`` over the least singular value above tau.
    - ``ell`` and ``ell_static``: see the module.
    - ``spectral_entropy``: Shannon's, in nats, of the energies ``sigma_i^2 / sum_j sigma_j^2``:
      zero for rank one, ``log(min(m, n))`` for a flat spectrum. The AMO paper names it without a
      formula; this is the one that shares the energies of the next.
    - ``effective_rank``: fewest singular directions that hold `ENERGY` of the energy.

    Args:
        x: One matrix ``(m, n)``; momentum in float32, as rounding to a narrower dtype lifts the
            small singular values by orders of magnitude.
        tau: Threshold, absolute but for ``ell_static``.

    Returns:
        Float64, on the CPU, in the order of `SPECTRAL_METRICS`; NaN where a matrix has no such
        geometry: an entry is not finite, or no singular value is above an absolute tau.
    """
    nothing = torch.full((len(SPECTRAL_METRICS),), float("nan"), dtype=torch.float64)
    if x.numel() == 0 or not torch.isfinite(x).all():
        return nothing
    # CUDA's default driver takes a minute for a model; and CUDA has no deterministic cumsum.
    sigma = torch.linalg.svdvals(x.double(), driver="gesvd" if x.is_cuda else None).cpu()
    least, greatest = sigma[-1], sigma[0]
    if greatest == 0:
        return torch.cat([torch.zeros(3, dtype=torch.float64), nothing[3:]])
    frobenius = greatest * torch.linalg.vector_norm(sigma / greatest)  # squares stay in range
    kept = torch.where(sigma > tau, sigma, 0.0)
    energies = (kept / greatest).square()
    cumulative = energies.cumsum(0)
    values = torch.stack(
        [
            *(least, greatest, frobenius),
            greatest / sigma.masked_fill(sigma <= tau, float("inf")).amin(),
            (least.clamp(min=tau) / frobenius).clamp(max=1.0),
            torch.maximum(least, tau * greatest) / frobenius,
            torch.special.entr(energies / cumulative[-1]).sum(),
            (cumulative < ENERGY * cumulative[-1]).sum(dtype=torch.float64) + 1.0,
        ]
    )
    if greatest <= tau:
        values[[3, 4, 6, 7]] = float("nan")  # a relative tau knows no such threshold
    return values
