"""A sample of the hostile command lines of ``python -m tests.hostile``."""

from __future__ import annotations

import random

import pytest

from tests import hostile


@pytest.mark.slow
def test_bad_values_end_in_an_error() -> None:
    with hostile.corner():
        wrong = [
            (line, text)
            for line in random.Random(0).sample(hostile.lines(), 150)
            if (text := hostile.problem(line))
        ]
    assert wrong == []
