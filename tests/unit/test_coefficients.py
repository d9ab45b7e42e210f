from __future__ import annotations

import ast
import hashlib
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amo_dist.config import OPERATOR_TYPES
from amo_dist.schedule import polar_express
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.polar_express import CUSHION, SAFETY, compose, error_curve, simulate
from amo_dist.schedule.types import Schedule, evaluate

# Digests of the exact bits, from the sources that the tables name: a change of a digit is one.
DIGESTS = {
    "kj": "6c27ff6f706788a9",
    "you": "607592a6d29a1b25",
    "pe": "6b78017caaedd8d3",
    "cans": "05d574248be14db9",
    "turbo": "d90bab4908759a3b",
    "deepseek_v4": "85c68579109ac65b",
}
STEPS = {
    "a1": [5, 4, 5, 5, 4, 4, 4],
    "a2": [6, 4, 6, 6, 4, 4, 4],
    "a3": [6, 5, 6, 6, 5, 5, 5],
    "a4": [4, 7, 7, 4, 4, 4, 4],
    "a5": [4, 6, 6, 4, 5, 5, 4],
}


def test_uniform_tables() -> None:
    digests = {name: named_schedule(name).schedule.digest()[:16] for name in DIGESTS}
    assert digests == DIGESTS
    by_type = {name: named_schedule(name).by_type for name in (*DIGESTS, *STEPS)}
    steps = {
        name: [own[kind].num_steps for kind in OPERATOR_TYPES]
        for name, own in by_type.items()
        if own
    }
    assert steps == STEPS


def test_deepseek_v4_is_what_its_report_prints() -> None:
    schedule = named_schedule("deepseek_v4").schedule
    fast, exact = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
    assert schedule.coefficients == (*[fast] * 8, exact, exact)
    # Eight steps lift 1e-4 to between 0.68 and 1.13, and each of two more squares the error.
    images = [schedule.image(10 ** (-exponent / 25)) for exponent in range(101)]
    assert max(abs(image - 1) for image in images) < 0.003


def test_pe_is_generated_with_safety_on_each_step() -> None:
    coefficients = named_schedule("pe").schedule.coefficients
    assert coefficients == compose(1e-3, 10)[:5]
    assert coefficients[4] != compose(1e-3, 5)[4]


def test_digest_tells_the_last_bit() -> None:
    one = Schedule(((1.0, 2.0, 3.0),))
    assert one.digest() == Schedule(((1.0, 2.0, 3.0),)).digest()
    others = [
        Schedule(((1.0, 2.0, 3.0000000000000004),)),
        Schedule(((1.0, 2.0, 3.0),), norm_scale=1.0),
        Schedule(((1.0, 2.0, 3.0),), preconditioner="aol"),
        Schedule(((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))),
        Schedule(((2.0, 1.0, 3.0),)),
    ]
    assert len({one.digest(), *(other.digest() for other in others)}) == 6


# ---------------------------------------------------------------- Polar Express


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
