"""The short form; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

import random

import pytest

from tests.distributed.harness import Ranks
from tests.faults.series import run_series
from tests.fuzz.cases import LAYOUTS, NAMES, cases, draw

SEED = 7


@pytest.mark.slow
def test_twenty_cases(run_on: Ranks) -> None:
    with cases(run_on) as case:
        assert run_series(case, range(20), SEED, stop=True)["with twin"] > 5


def test_cases_are_of_every_kind() -> None:
    drawn = [draw(random.Random(f"0/{number}")) for number in range(500)]
    assert {case.name for case in drawn} == set(NAMES)
    for world_size, layouts in LAYOUTS.items():
        assert {case.layout for case in drawn if case.world_size == world_size} == set(layouts)
    pairs = {(case.config.ns_dtype, case.config.wire) for case in drawn}
    assert len(pairs) == 4  # float32 and bfloat16, each on each wire
    assert {case.head_dim for case in drawn} == {0, 2, 3}
    shapes = [shape for case in drawn for shape in case.shapes.values()]
    assert {len(shape) for shape in shapes} == {1, 2, 3}
    assert any(case.shapes.get("tok_embeddings.weight") == (0, 8) for case in drawn)
