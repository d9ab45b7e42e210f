from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from amo_dist.optimizers.root import NUM_VALUES, RootPolicy, calibration_set, fit, objective
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.types import MatrixInfo
from tests.held import Held

KJ = torch.tensor(named_schedule("kj").schedule.coefficients[0], dtype=torch.float64)
REGISTRY = [
    MatrixInfo(f"layers.{layer}.{name}", shape, name)
    for layer in range(2)
    for name, shape in (("attn_q", (8, 6)), ("attn_o", (6, 8)), ("attn_k", (3, 6)))
]


def loss(triple: tuple[float, float, float], values: torch.Tensor) -> float:
    return objective(torch.tensor(triple, dtype=torch.float64), values).item()


def check_fit(shape: tuple[int, int]) -> None:
    values = calibration_set(shape)
    triple = fit(shape)
    assert loss(triple, values) < objective(KJ, values).item()
    # Stable, and of the right sign, up to the rounding of a matrix of rank one in bf16.
    x = torch.linspace(3e-3, 1.02, 5000, dtype=torch.float64)
    a, b, c = triple
    for _ in range(5):
        x = a * x + b * x**3 + c * x**5
    assert 0.6 < x.min() < x.max() < 1.4


@pytest.mark.parametrize("shape", [(1, 8), (64, 256), (768, 3072), (1024, 1024), (7168, 2048)])
def test_the_fit_beats_kj(shape: tuple[int, int]) -> None:
    check_fit(shape)


def test_the_objective_is_that_of_five_steps() -> None:
    values = torch.tensor([0.01, 0.3, 1.0], dtype=torch.float64)
    expected = 0.0
    for value in values.tolist():
        for _ in range(5):
            value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
        expected += (value - 1) ** 2 / 3
    assert objective(KJ, values).item() == pytest.approx(expected, rel=1e-12)  # float64


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (5, 3), (64, 256), (256, 256)])
def test_a_calibration_set_holds_singular_values_of_unit_norm(shape: tuple[int, int]) -> None:
    values = calibration_set(shape)
    assert values.shape == (2 * NUM_VALUES,)
    assert values.dtype == torch.float64
    assert ((values > 0) & (values <= 1 + 1e-12)).all()  # rounding of a norm of one


def test_the_gaussian_quarter_is_the_spectrum_of_a_gaussian_matrix() -> None:
    shape = (48, 160)
    quarter = calibration_set(shape)[NUM_VALUES : NUM_VALUES + NUM_VALUES // 2]
    generator = torch.Generator().manual_seed(3)
    sample = torch.linalg.svdvals(torch.randn(shape, generator=generator, dtype=torch.float64))
    sample = (sample / sample.norm()).sort().values
    quantiles = quarter[torch.arange(48) * quarter.numel() // 48 + quarter.numel() // 96]
    # Of one matrix with 48 singular values: edges fluctuate by about 48^(-2/3) = 8 %.
    assert torch.allclose(sample, quantiles, rtol=0.1)


def test_measured_spectra_take_the_place_of_the_proxies() -> None:
    measured = ((4.0, 2.0, 0.0), (0.3, 0.3, 0.3))
    values = calibration_set((3, 5), measured)
    half = set(values[:NUM_VALUES].tolist())
    assert half == {0.0, 2 / 20**0.5, 4 / 20**0.5, 0.3 / 0.27**0.5}
    assert torch.equal(values[NUM_VALUES:], calibration_set((3, 5))[NUM_VALUES:])
    assert fit((3, 5), measured) != fit((3, 5))


def test_the_fit_follows_what_was_measured() -> None:
    """With half of all values at one point, that point ends nearer to one than under KJ."""
    measured = ((0.05,) * 400,)
    a, b, c = fit((400, 400), measured)
    values = torch.tensor([400**-0.5], dtype=torch.float64)
    assert objective(torch.tensor([a, b, c], dtype=torch.float64), values) < objective(KJ, values)


# --- the policy


def planned() -> Held:
    policy = Held(RootPolicy(), REGISTRY)
    assert policy.plan_due()
    policy.adopt_plan(policy.make_plan())
    return policy


def test_matrices_of_a_shape_share_one_triple_five_times() -> None:
    policy = planned()
    schedules = policy.schedules(1)
    assert set(schedules) == {"8x6", "6x8", "3x6"}
    assert policy.group_of("layers.1.attn_o") == "6x8"
    for schedule in schedules.values():
        assert schedule.num_steps == 5
        assert len(set(schedule.coefficients)) == 1
        assert schedule.norm_scale == 1.0
        assert schedule.preconditioner == "frobenius"
    assert schedules["8x6"].coefficients[0] == fit((8, 6))
    assert policy.phase(1) == "uniform"
    assert not policy.plan_due()


def test_no_schedule_before_the_fit() -> None:
    policy = Held(RootPolicy(), REGISTRY)
    with pytest.raises(ValueError, match="step: found 1, expected a fit before it"):
        policy.schedules(1)


@pytest.mark.parametrize("is_bound", [True, False])
def test_a_saved_fit_stays_in_force_whatever_the_spectra(is_bound: bool) -> None:
    policy = planned()
    state = json.loads(json.dumps(policy.state_dict()))
    resumed = Held(RootPolicy({(8, 6): [[1.0, 0.1]]}))
    if is_bound:
        resumed.bind(REGISTRY)
    resumed.load_state_dict(state)
    resumed.bind(REGISTRY)
    assert not resumed.plan_due()
    assert resumed.schedules(1) == policy.schedules(1)
    assert resumed.digest(1) == policy.digest(1)


def test_a_state_without_a_fit_leaves_one_to_be_made() -> None:
    policy = Held(RootPolicy())
    policy.load_state_dict(Held(RootPolicy()).state_dict())
    assert policy.plan_due()


def test_a_fit_of_other_shapes_is_refused() -> None:
    other = Held(RootPolicy())
    other.bind(REGISTRY[:1])
    with pytest.raises(ValueError, match=r"fits: found .*, expected the shapes \['8x6'\]"):
        other.load_state_dict(planned().state_dict())
    unbound = Held(RootPolicy())
    unbound.load_state_dict(planned().state_dict())
    with pytest.raises(ValueError, match="expected the shapes"):
        unbound.bind(REGISTRY[:1])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((), [], "state: found"),
        (("version",), 2, r"state\.version: found 2, expected 1"),
        (("policy",), "amo", r"state\.policy: found 'amo', expected 'root'"),
        (("fits",), 3, "fits: found 3, expected a mapping"),
        (("fits", "8x6", "triple"), ["0x1p+0"], "a list of 3"),
        (("fits", "8x6", "triple"), ["nan"] * 3, "expected a finite float"),
        (("fits", "8x6", "objective"), 1.0, "expected a finite float"),
        (("fits", "8x6", "num_measured"), -1, "an integer >= 0"),
        (("fits", "8x6", "calibration"), None, "a non-empty string"),
        (("fits", "8x6", "more"), 1, "only the keys"),
    ],
)
def test_a_malformed_state_is_refused(place: tuple[str, ...], value: Any, message: str) -> None:
    state = json.loads(json.dumps(planned().state_dict()))
    target: Any = state
    for key in place[:-1]:
        target = target[key]
    if place:
        target[place[-1]] = value
    policy = planned()
    before = policy.state_dict()
    with pytest.raises(ValueError, match=message):
        policy.load_state_dict(state if place else value)
    assert policy.state_dict() == before


@pytest.mark.parametrize("spectrum", [[], [0.0, 0.0], [1.0, -0.1], [1.0, float("nan")]])
def test_a_malformed_spectrum_is_refused(spectrum: list[float]) -> None:
    with pytest.raises(ValueError, match=r"spectra\[8x6\]: found .*, expected finite numbers"):
        RootPolicy({(8, 6): [spectrum]})
