"""What trial schedules leave of spectra: grids, means, and how sums are kept."""

from __future__ import annotations

import base64
import copy
import itertools
import math
import random
import struct
from functools import partial
from typing import Any

import pytest

from amo_dist.schedule import fields
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.observation import Observed
from amo_dist.schedule.polar_express import composed, simulate
from amo_dist.schedule.trials import GRID, ErrorSums, Trials
from tests import spectra
from tests.held import Held
from tests.unit.controller_runs import MEASURED, REGISTRY, TYPES, controller, observe

TRIALS = Trials(range(2, 8), 5, 1e-3)
"""Trials of the default settings: 2 to 7 steps."""
ELLS = sorted({*GRID, 1e-3})


def made_up(seed: int, trials: Trials = TRIALS) -> list[float]:
    """Errors without any rule, so that a wrong place shows."""
    generator = random.Random(seed)
    return [generator.random() for _ in range(2 * trials.count)]


def residual(errors: list[float], k: int, ell: float) -> float:
    return errors[(k - 2) * len(ELLS) + ELLS.index(ell)]


def distance(errors: list[float], k: int, ell: float) -> float:
    return residual(errors[TRIALS.count :], k, ell)


def test_the_grid_has_ten_a_decade_and_both_ends() -> None:
    assert len(GRID) == 41
    assert (GRID[0], GRID[-1]) == (1e-5, 0.1)
    assert 1e-3 in GRID
    ratios = [b / a for a, b in itertools.pairwise(GRID)]
    # Three digits of 10 ** 0.1 = 1.2589.
    assert all(abs(ratio - 10**0.1) < 0.01 for ratio in ratios)


@pytest.mark.parametrize(
    ("trials", "num_steps", "num_ells"),
    [
        (TRIALS, 6, 41),
        (Trials(range(3, 8), 5, 2e-3), 5, 41),
        (Trials(range(3, 8), 5, 3e-3), 5, 42),
        (Trials(range(3, 8), 9, 1e-3), 6, 41),
        (Trials(range(2, 3), 1, 0.5), 2, 42),
    ],
)
def test_every_number_of_steps_is_tried_with_every_ell(
    trials: Trials, num_steps: int, num_ells: int
) -> None:
    schedules = trials.schedules()
    assert len(schedules) == len(set(schedules)) == trials.count == num_steps * num_ells
    assert composed(trials.base_ell, trials.base_steps) in schedules
    counts = [schedule.num_steps for schedule in schedules]
    assert counts == sorted(counts)
    assert {schedule.norm_scale for schedule in schedules} == {1.01}


def test_the_best_ell_of_each_number_of_steps() -> None:
    errors = made_up(0)
    found = TRIALS.best(errors)
    for i, k in enumerate(TRIALS.steps):
        row = {ell: distance(errors, k, ell) for ell in ELLS}
        assert found.distances[i] == min(row.values()) == row[found.ells[i]]
        assert found.residuals[i] == residual(errors, k, found.ells[i])
    assert found.uniform_residual == residual(errors, 5, 1e-3)
    assert found.uniform_distance == distance(errors, 5, 1e-3)
    assert [found.distance(k) for k in TRIALS.steps] == list(found.distances)
    assert (found.min_steps, found.max_steps) == (2, 7)
    assert found.within(3, 6).distances == found.distances[1:-1]
    assert found.within(3, 6).ell(4) == found.ell(4)


def test_ties_go_to_the_greater_ell() -> None:
    errors = [0.25] * len(made_up(0))
    first = TRIALS.count
    errors[first + ELLS.index(0.01)] = errors[first + ELLS.index(1e-4)] = 0.125
    found = TRIALS.best(errors)
    assert found.ells == (0.01, *[0.1] * 5)
    assert found.distances == (0.125, *[0.25] * 5)


def test_a_uniform_schedule_that_no_plan_may_give_is_tried_all_the_same() -> None:
    trials = Trials(range(3, 5), 6, 3e-3)
    errors = made_up(1, trials)
    found = trials.best(errors)
    assert len(found.residuals) == 2
    ells = sorted({*GRID, 3e-3})
    assert found.uniform_residual == errors[2 * len(ells) + ells.index(3e-3)]


def test_on_the_grid_nothing_is_interpolated_and_outside_it_ends() -> None:
    errors = made_up(2)
    for ell in ELLS:
        found = TRIALS.at(errors, ell)
        assert found.ells == (ell,) * 6
        expected = [residual(errors, k, ell) for k in TRIALS.steps]
        # One rounding of a sum and a difference, where the upper end of an interval is asked for.
        assert found.residuals == pytest.approx(expected, rel=1e-14)
    for ell, end in ((1e-12, 1e-5), (0.9, 0.1), (1.0, 0.1)):
        outside, inside = TRIALS.at(errors, ell), TRIALS.at(errors, end)
        assert outside.residuals == inside.residuals
        assert outside.distances == inside.distances
        assert outside.ells == (ell,) * 6


def test_between_two_ells_of_the_grid_errors_are_linear() -> None:
    errors = made_up(3)
    low, high = 1e-3, 1.26e-3
    for share in (0.25, 0.5, 0.9):
        found = TRIALS.at(errors, low + share * (high - low))
        for i, k in enumerate(TRIALS.steps):
            first, last = (residual(errors, k, ell) for ell in (low, high))
            assert found.residuals[i] == pytest.approx(first + share * (last - first), rel=1e-9)
    at = TRIALS.at(errors, 1.1e-3)
    assert (at.uniform_residual, at.uniform_distance) == (
        TRIALS.best(errors).uniform_residual,
        TRIALS.best(errors).uniform_distance,
    )


@pytest.mark.parametrize("trials", [TRIALS, Trials(range(2, 4), 6, 0.02)])
def test_without_a_valid_matrix_all_singular_values_are_at_the_base(trials: Trials) -> None:
    for found in (trials.best(None), trials.at(None, 0.3)):
        assert set(found.ells) == {trials.base_ell}
        for k, residual_, distance in zip(
            trials.steps, found.residuals, found.distances, strict=True
        ):
            y = simulate(1.01 * trials.base_ell, k)
            assert residual_ == pytest.approx((y * y - 1) ** 2, rel=1e-9)
            assert distance == pytest.approx((y - 1) ** 2, rel=1e-9)
        y = simulate(1.01 * trials.base_ell, trials.base_steps)
        assert found.uniform_residual == pytest.approx((y * y - 1) ** 2, rel=1e-9)
        assert list(found.residuals) == sorted(found.residuals, reverse=True)


# ---------------------------------------------------------------- sums over observations


def test_an_observation_without_a_valid_matrix_counts_for_nothing() -> None:
    one = made_up(0)
    observed = Observed(0.1, one[: TRIALS.count], one[TRIALS.count :])
    sums = ErrorSums.empty(("a", "b"), TRIALS).plus({"a": [(7.0, observed)], "b": []})
    sums = sums.plus({"a": [], "b": []})
    assert sums.mean("a") == one
    assert sums.mean("b") is None
    assert sums.counts == {"a": 1, "b": 0}


def test_matrices_that_are_invalid_now_and_then_are_left_out() -> None:
    """Each observation weighs the same, however many of its matrices are valid."""
    target, expected = controller(MEASURED), dict[str, list[list[float]]]()
    for step in (2, 4, 6):
        sample = target.sample(step)
        ells = {name: 10.0 ** -(1 + i % 4) for i, name in enumerate(sample)}
        if step == 4:
            ells |= {name: math.nan for name in sample if name.endswith("expert")}
            ells |= {next(n for n in sample if n.endswith("attn_q")): math.inf}
        observed = spectra.observed(target, ells)
        kept = {
            m.name: [*observed[m.name].residuals, *observed[m.name].distances]
            for m in REGISTRY
            if m.name in sample and math.isfinite(ells[m.name])
        }
        for kind in TYPES:
            valid = [errors for name, errors in kept.items() if name.endswith(kind)]
            if valid:
                means = [math.fsum(v) / len(valid) for v in zip(*valid, strict=True)]
                expected.setdefault(kind, []).append(means)
        target.record(step, observed)
    assert [len(expected[kind]) for kind in TYPES] == [3, 3, 2]
    target.adopt_plan(target.make_plan())
    assert target.plan is not None
    assert target.plan.measured is not None
    for kind, measured in zip(TYPES, target.plan.measured, strict=True):
        mean = [math.fsum(v) / len(expected[kind]) for v in zip(*expected[kind], strict=True)]
        best = Trials(range(3, 8), 5, 1e-3).best(mean)
        assert measured.ells == best.ells
        assert measured.residuals == pytest.approx(best.residuals, rel=1e-14)
        assert measured.distances == pytest.approx(best.distances, rel=1e-14)


# ---------------------------------------------------------------- saved state


def observed_state() -> dict[str, Any]:
    target = controller(MEASURED)
    for step in (2, 4):
        observe(target, step)
    return target.state_dict()


@pytest.mark.parametrize(
    "other",
    [Trials(range(2, 8), 5, 1e-3), Trials(range(3, 8), 5, 3e-3), Trials(range(3, 8), 9, 1e-3)],
)
@pytest.mark.parametrize("bind_first", [True, False])
def test_the_sums_of_other_trials_are_refused(other: Trials, bind_first: bool) -> None:
    state = observed_state()
    totals = ErrorSums.empty(TYPES, other).to_dict()["totals"]
    state["error_sums"]["totals"] = totals
    restored = Held(AMOPolicy(MEASURED))
    if bind_first:
        restored.bind(REGISTRY)
    else:
        restored.load_state_dict(state)
    found = f"found '{2 * other.count} errors', expected 410: other schedules were tried"
    refused = partial(restored.load_state_dict, state)
    if not bind_first:
        refused = partial(restored.bind, REGISTRY)
    with pytest.raises(ValueError, match=rf"state\.error_sums\.totals\.attn_q: {found}"):
        refused()


def packed(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}d", *values)).decode()


def test_packed_floats_keep_their_bits() -> None:
    values = fields.Packed([0.0, -0.0, 5e-324, 1 / 3, -1e308])
    found = fields.read_packed("p", values.to_text())
    assert [value.hex() for value in found] == [value.hex() for value in values]
    assert fields.read_packed("p", "") == ()
    # Little-endian on every machine.
    assert fields.Packed([1.0]).to_text() == base64.b64encode(bytes(6) + b"\xf0\x3f").decode()


@pytest.mark.parametrize(
    "damaged",
    [
        *(None, 3, [], b"", "!", "AAAA", "A"),
        packed(1.0)[:-1],
        packed(1.0) + "\n",
        packed(1.0) + packed(1.0),  # padding in the middle
        packed(math.nan),
        packed(math.inf),
        packed(1.0, 2.0)[:-4],
        packed(1.0)[:-2] + "9=",  # bits that base64 does not use
    ],
)
def test_damaged_base64_is_refused(damaged: Any) -> None:
    with pytest.raises(ValueError, match=r"p: found .*, expected base64 of finite float64 values"):
        fields.read_packed("p", damaged)
    state = copy.deepcopy(observed_state())
    state["error_sums"]["totals"]["expert"] = damaged
    target = controller(MEASURED)
    with pytest.raises(ValueError, match=r"state\.error_sums\.totals\.expert: found .*, expected"):
        target.load_state_dict(state)
    assert target.observations == ()


def test_sums_and_counts_are_of_the_same_groups() -> None:
    state = observed_state()
    del state["error_sums"]["counts"]["expert"]
    with pytest.raises(
        ValueError, match=r"error_sums\.counts: found .*, expected the groups \['at"
    ):
        controller(MEASURED).load_state_dict(state)
    state = observed_state()
    for part in ("counts", "totals"):
        state["error_sums"][part]["more"] = state["error_sums"][part].pop("expert")
    with pytest.raises(ValueError, match=r"error_sums\.totals: found .*, expected the operator ty"):
        controller(MEASURED).load_state_dict(state)
