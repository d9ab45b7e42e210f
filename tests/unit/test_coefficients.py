from __future__ import annotations

from amo_dist.config import OPERATOR_TYPES
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.polar_express import compose
from amo_dist.schedule.types import Schedule

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
