from __future__ import annotations

import ast
import hashlib
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.schedule import polar_express
from amo_dist.schedule.polar_express import CUSHION, SAFETY, compose, error_curve, simulate
from amo_dist.schedule.types import Schedule, evaluate

ELLS = st.floats(-12, 0).map(lambda exponent: 10.0**exponent)


def grid(low: float, high: float, points: int = 2000) -> list[float]:
    return [low + (high - low) * i / points for i in range(points + 1)]


@given(ell=st.floats(CUSHION, 0.9999))
def test_one_step_is_the_best_quintic(ell: float) -> None:
    """By Chebyshev's theorem: no point errs more than the ends, with alternating signs."""
    (triple,) = compose(ell, 1)
    level = 1 - evaluate(triple, ell)
    errors = [1 - evaluate(triple, x) for x in grid(ell, 1.0)]
    # Near 1 the level itself is down to rounding of the coefficients (up to about 25).
    rounding = 1e-13
    assert errors[-1] == pytest.approx(-level, rel=1e-6, abs=rounding)
    assert max(map(abs, errors)) <= level * (1 + 1e-6) + rounding
    # The grid meets the inner extrema only nearly; the error is flat there.
    third = len(errors) // 2
    assert min(errors[:third]) == pytest.approx(-level, rel=1e-2, abs=rounding)
    assert max(errors[third:]) == pytest.approx(level, rel=1e-2, abs=rounding)


@settings(max_examples=50)
@given(ell=ELLS, steps=st.integers(1, 10))
def test_the_composition_maps_into_its_last_interval(ell: float, steps: int) -> None:
    low = simulate(ell, steps)
    assert error_curve(ell, [steps]) == {steps: 1 - low}
    schedule = Schedule(compose(ell, steps))
    for x in map(schedule.image, grid(ell, 1.0, 200)):
        assert low - 1e-9 <= x <= 2 - low + 1e-9  # rounding, amplified by 8.2 a step at most


@pytest.mark.parametrize("ell", [1.0, 1 - 1e-9, 1 - 4.9e-6, 1 - 5.1e-6, 0.99, 0.02, 1e-300, 5e-324])
def test_extreme_bounds(ell: float) -> None:
    for steps in (1, 2, 7, 20):
        triples = compose(ell, steps)
        assert all(math.isfinite(x) for triple in triples for x in triple)
        assert 0 < simulate(ell, steps) <= 1 + 1e-15  # one rounding above


def test_bits_are_pinned() -> None:
    """A change of one bit would part ranks of unlike versions, and old runs from resumed ones."""
    bits = " ".join(
        x.hex()
        for ell in (1e-3, SAFETY * 1e-3, 3.00377e-4, 0.0215, 0.5, 1.0)
        for triple in compose(ell, 10)
        for x in triple
    )
    digest = hashlib.sha256(bits.encode()).hexdigest()
    assert digest == "bb3257e61d919eed58b94ef0cc19dbdf4129c6ffd68e1d49b9501e26224d2413"


def test_only_operations_that_ieee_defines_to_the_bit() -> None:
    tree = ast.parse(Path(str(polar_express.__file__)).read_text())
    operators = {type(node.op) for node in ast.walk(tree) if isinstance(node, ast.BinOp)}
    # The bar is that of annotations.
    assert operators <= {ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitOr}
    from_math = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "math"
    }
    assert from_math <= {"sqrt", "inf"}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"pow", "sum", "numpy"}
