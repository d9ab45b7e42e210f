"""The short form of the campaign; ``python -m tests.faults`` is the long one."""

from __future__ import annotations

import random

import pytest

from tests.faults.campaign import LAYOUTS, PLANNERS, POINTS, draw, trials
from tests.faults.damage import KINDS
from tests.faults.series import run_series

SEED = 1


@pytest.mark.slow
def test_three_trials() -> None:
    drawn = [draw(random.Random(f"{SEED}/{number}")) for number in range(3)]
    assert {trial.runs[0].planner for trial in drawn} == set(PLANNERS)
    with trials() as trial:
        events = run_series(trial, range(3), SEED, stop=True)
    assert events["a damaged checkpoint named"] > 0


def test_trials_cover_every_kind() -> None:
    drawn = [draw(random.Random(f"0/{number}")) for number in range(100)]
    runs = [run for trial in drawn for run in trial.runs]
    kills = [run.kill for run in runs if run.kill]
    assert {kill.point for kill in kills} == set(POINTS)
    assert {run.world_size for run in runs} == set(LAYOUTS)
    for world_size, layouts in LAYOUTS.items():
        assert {run.layout for run in runs if run.world_size == world_size} == set(layouts)
    assert {run.planner for run in runs} == set(PLANNERS)
    assert {run.saves_async for run in runs} == {True, False}
    assert {len(kill.ranks) for kill in kills} >= {1, 2, 3, 4}
    assert {len(trial.runs) for trial in drawn} == {2, 3, 4}
    damages = [damages for trial in drawn for damages in trial.damages]
    assert {kind for kinds in damages for kind in kinds} == set(KINDS)
    assert {len(kinds) for kinds in damages} == {0, 1, 2}
