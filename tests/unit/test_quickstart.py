from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from amo_dist import AMOConfig
from torchtitan_ext.tools import quickstart


@pytest.mark.parametrize(
    ("steps", "fields", "expected"),
    [
        (7, {}, "The plan"),
        (8, {}, "The plan, locked at step 8"),
        (9, {"replan_every": 6}, "The plan, locked at step 8"),
        (10, {"replan_every": 6}, "The last plan"),
    ],
)
def test_a_later_plan_is_not_told_to_be_locked_where_the_first_was(
    steps: int, fields: dict[str, Any], expected: str
) -> None:
    amo = AMOConfig(observe_until=4, observe_every=2, transition_steps=4, **fields)
    config = SimpleNamespace(
        optimizer=SimpleNamespace(amo=amo), training=SimpleNamespace(steps=steps)
    )
    assert quickstart._plan_title(config) == expected
