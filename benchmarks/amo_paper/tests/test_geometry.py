"""Geometry: the metrics, the callback on ranks, and a run whose log feeds static schedules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from amo_dist import Muon, MuonConfig, param_groups
from benchmarks.amo_paper import geometry
from benchmarks.amo_paper.geometry import SPECTRAL_METRICS, spectral_metrics
from benchmarks.amo_paper.static_schedule import read_pool
from tests.distributed import models
from tests.distributed.harness import Ranks
from torchtitan_ext.runs.records import read_records


def by_hand(x: Tensor, tau: float) -> dict[str, float]:
    """The metrics from the spectrum, one by one."""
    found = dict.fromkeys(SPECTRAL_METRICS, math.nan)
    sigma = torch.linalg.svdvals(x.double()).tolist() if x.isfinite().all() and x.numel() else []
    if not sigma:
        return found
    norm = math.sqrt(math.fsum(s * s for s in sigma))
    found |= {"sigma_min": sigma[-1], "sigma_max": sigma[0], "frobenius": norm}
    if sigma[0] > 0:
        found["ell_static"] = max(sigma[-1], tau * sigma[0]) / norm
    if not (kept := [s for s in sigma if s > tau]):
        return found
    energies = [(s / sigma[0]) ** 2 for s in kept]
    shares = [energy / math.fsum(energies) for energy in energies]
    ranks = (r for r in range(1, len(shares) + 1) if math.fsum(shares[:r]) >= 0.99)
    return found | {
        "kappa": sigma[0] / kept[-1],
        "ell": min(max(sigma[-1], tau) / norm, 1.0),
        "spectral_entropy": -math.fsum(p * math.log(p) for p in shares),
        "effective_rank": float(next(ranks)),
    }


@pytest.mark.parametrize("tau", [1e-10, 0.5])
def test_the_metrics_are_those_of_their_formulas(tau: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for x in (
        torch.randn(7, 12, generator=generator),
        torch.randn(12, 1, generator=generator),
        torch.diag(torch.tensor([3.0, 1.0, 0.0])),
        1e-12 * torch.randn(4, 5, generator=generator),
        torch.zeros(3, 4),
        torch.full((2, 2), float("nan")),
        torch.zeros(0, 4),
    ):
        found = dict(zip(SPECTRAL_METRICS, spectral_metrics(x, tau=tau).tolist(), strict=True))
        # The same formulas of the same spectrum, summed in another order.
        assert found == pytest.approx(by_hand(x, tau), rel=1e-12, abs=1e-15, nan_ok=True)


def test_three_readings_of_tau() -> None:
    """Singular values 10, 1e-3 and 1e-6, with tau between them: clamped, dropped, relative."""
    x, norm = torch.diag(torch.tensor([10.0, 1e-3, 1e-6]).double()), math.hypot(10.0, 1e-3)
    found = dict(zip(SPECTRAL_METRICS, spectral_metrics(x, tau=1e-4).tolist(), strict=True))
    assert found["ell"] == pytest.approx(1e-4 / norm)
    assert found["kappa"] == pytest.approx(10.0 / 1e-3)
    assert found["ell_static"] == pytest.approx(1e-3 / norm)


def run(rank: int, world_size: int, layout: str, folder: str) -> list[dict[str, Any]]:
    """What rank 0 wrote in six steps after an earlier start."""
    model = models.make_model(layout, models.shapes())
    optimizer = Muon(param_groups(model), lr=3e-3)
    config = SimpleNamespace(dump_folder=folder, model=SimpleNamespace(name="llama3"))
    callback = geometry.GeometryOfSmallModels()
    callback.trainer = SimpleNamespace(
        config=config, optimizers=SimpleNamespace(optimizer=optimizer)
    )
    for step in range(3, 8):
        models.set_gradients(model, 11, step)
        callback.before_step(step)
        optimizer.step()
        callback.after_step(step)
    return read_records(Path(folder, "geometry.jsonl"))


def test_every_matrix_is_measured_once_in_any_layout(run_on: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "geometry.jsonl"
    file.write_text('{"step": 2}\n{"step": 3}\n{"step": 9, "cu')
    (split, _) = run_on(2)(run, "fsdp", str(tmp_path))
    assert [record["step"] for record in split] == [2, *[5] * len(models.types())]
    assert [record["name"] for record in split[1:]] == sorted(models.types())
    assert {record["operator_type"] for record in split[1:]} == {*models.types().values()}
    assert {record["family"] for record in split[1:]} == {"Llama-3.1"}
    file.unlink()
    (alone,) = run_on(1)(run, "fsdp", str(tmp_path))
    # Injected gradients: the same momentum.
    assert json.dumps(alone) == json.dumps(split[1:])
    assert len(read_pool([file]).families) == 1


@pytest.mark.parametrize(("nesterov", "coefficient"), [(True, 0.95), (0.1, 0.1)])
def test_momentum_is_what_the_step_orthogonalized(nesterov: float, coefficient: float) -> None:
    model = models.plain_model({"layers.0.attention.wq.weight": (4, 6)})
    optimizer = Muon(param_groups(model), lr=3e-3, config=MuonConfig(nesterov=nesterov))
    for step in (1, 2):
        models.set_gradients(model, 11, step)
        optimizer.step()
    (record,) = geometry.measure(optimizer, 2)
    first, second = (
        models.gradient(11, step, "layers.0.attention.wq.weight", (4, 6)) for step in (1, 2)
    )
    momentum = second + coefficient * (0.95 * first + second)
    assert record["frobenius"] == pytest.approx(momentum.norm().item(), rel=1e-6)
    assert record["ns_residual"] < 1
