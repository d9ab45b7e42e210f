from __future__ import annotations

import json

import pytest
import torch

from amo_dist.config import MuonConfig
from amo_dist.optimizers.root import NUM_VALUES, Root, calibration_set, fit, objective
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.types import MatrixInfo, Schedule

KJ = torch.tensor(named_schedule("kj").schedule.coefficients[0], dtype=torch.float64)
REGISTRY = [
    MatrixInfo(f"layers.{layer}.{name}", shape, name)
    for layer in range(2)
    for name, shape in (("attn_q", (8, 6)), ("attn_o", (6, 8)), ("attn_k", (3, 6)))
]


@pytest.mark.parametrize("shape", [(1, 8), (64, 256), (768, 3072), (1024, 1024), (7168, 2048)])
def test_the_fit_beats_kj(shape: tuple[int, int]) -> None:
    values, triple = calibration_set(shape), fit(shape)
    found = objective(torch.tensor(triple, dtype=torch.float64), values)
    assert found < objective(KJ, values)
    # Stable, and of the right sign, up to the rounding of a matrix of rank one in bf16.
    schedule = Schedule((triple,) * 5)
    images = [schedule.image(x) for x in torch.linspace(3e-3, 1.02, 5000).tolist()]
    assert 0.6 < min(images) < max(images) < 1.4


def test_the_objective_is_that_of_five_steps() -> None:
    values = torch.tensor([0.01, 0.3, 1.0], dtype=torch.float64)
    expected = 0.0
    for value in values.tolist():
        for _ in range(5):
            value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
        expected += (value - 1) ** 2 / 3
    assert objective(KJ, values).item() == pytest.approx(expected, rel=1e-12)  # float64


def test_the_gaussian_quarter_is_the_spectrum_of_a_gaussian_matrix() -> None:
    shape = (48, 160)
    quarter = calibration_set(shape)[NUM_VALUES : NUM_VALUES + NUM_VALUES // 2]
    generator = torch.Generator().manual_seed(3)
    sample = torch.linalg.svdvals(torch.randn(shape, generator=generator, dtype=torch.float64))
    sample = (sample / sample.norm()).sort().values
    quantiles = quarter[torch.arange(48) * quarter.numel() // 48 + quarter.numel() // 96]
    # Of one matrix with 48 singular values: edges fluctuate by about 48^(-2/3) = 8 %.
    assert torch.allclose(sample, quantiles, rtol=0.1)


# --- the source


def test_matrices_of_a_shape_share_one_triple_five_times() -> None:
    source = Root()
    source.bind(REGISTRY)
    schedules = source.schedules(1)
    assert set(schedules) == {"8x6", "6x8", "3x6"}
    assert source.key(REGISTRY[1]) == "6x8"
    for schedule in schedules.values():
        assert schedule.num_steps == 5
        assert len(set(schedule.coefficients)) == 1
        assert (schedule.norm_scale, schedule.preconditioner) == (1.0, "frobenius")
    assert schedules["8x6"].coefficients[0] == fit((8, 6))


@pytest.mark.parametrize("binds_first", [True, False])
def test_a_saved_fit_stays_in_force(binds_first: bool) -> None:
    source = Root()
    source.bind(REGISTRY)
    state = json.loads(json.dumps(source.state()))
    state["fits"]["8x6"] = [2.0, -1.5, 0.5]
    resumed = Root()
    if binds_first:
        resumed.bind(REGISTRY)
    resumed.load(state, MuonConfig(), (), 3)
    resumed.bind(REGISTRY)
    assert resumed.schedules(1)["8x6"].coefficients == ((2.0, -1.5, 0.5),) * 5
    assert resumed.state() == state


def test_fits_of_other_shapes_are_refused() -> None:
    source, other, unbound = Root(), Root(), Root()
    source.bind(REGISTRY)
    other.bind(REGISTRY[:1])
    with pytest.raises(ValueError, match="fits"):
        other.load(source.state(), MuonConfig(), (), 3)
    unbound.load(source.state(), MuonConfig(), (), 3)
    with pytest.raises(ValueError, match="fits"):
        unbound.bind(REGISTRY[:1])
