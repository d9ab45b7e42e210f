"""The short form of the campaign; ``python -m tests.faults`` is the long one."""

from __future__ import annotations

import random

import pytest

from tests.faults.campaign import OBJECTIVES, POINTS, draw, run_trials

SEED = 1


@pytest.mark.slow
def test_three_trials() -> None:
    trials = [draw(random.Random(f"{SEED}/{number}")) for number in range(3)]
    assert {trial.after.objective for trial in trials} == set(OBJECTIVES)
    assert run_trials(3, seed=SEED).total() == 3


def test_trials_cover_every_kind() -> None:
    trials = [draw(random.Random(f"0/{number}")) for number in range(100)]
    kills = [trial.before.kill for trial in trials]
    assert {kill.point for kill in kills if kill} == set(POINTS)
    for sizes in ({t.before.world_size for t in trials}, {t.after.world_size for t in trials}):
        assert sizes == {1, 2, 3, 4}
    assert {trial.before.objective for trial in trials} == set(OBJECTIVES)
    assert all(trial.before.objective == trial.after.objective for trial in trials)
    assert {trial.before.saves_async for trial in trials} == {True, False}
    assert {trial.before.layout for trial in trials} == {"plain", "fsdp", "hsdp"}
    assert {len(kill.ranks) for kill in kills if kill} >= {1, 2, 3, 4}
