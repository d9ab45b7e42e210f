"""What a run records of its observations: each one once, as long as the slowest rank took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from amo_dist import AMO, AMOConfig, Muon, param_groups
from torchtitan_ext.plugin import metrics
from torchtitan_ext.plugin.callbacks import Callbacks


def groups() -> Any:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
    return param_groups(model, patterns={r"\d\.weight": "mlp_up"})


def processor(optimizer: Any, log_freq: int) -> metrics.MetricsProcessor:
    """A processor before its first step, without loggers and files."""
    made = metrics.MetricsProcessor.__new__(metrics.MetricsProcessor)
    made._files, made._first_step, made._num_steps = None, None, 12
    made.callbacks = Callbacks([])
    made.ntokens_since_last_log = 0
    made.config = metrics.MetricsProcessor.Config(log_freq=log_freq)
    made._optimizers = SimpleNamespace(optimizer=optimizer)
    return made


def seconds_by_step(optimizer: Any, log_freq: int, steps: range) -> dict[int, float | None]:
    """What the record of each logged step of a run says; the run starts at the first of them."""
    made = processor(optimizer, log_freq)
    found = {}
    for step in steps:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn_like(param)
        optimizer.step()
        if made.should_log(step):
            found[step] = made._observe_seconds(optimizer.metrics())
    return found


def test_an_observation_is_recorded_once() -> None:
    config = AMOConfig(observe_until=6, observe_every=3, transition_steps=2, ns_dtype="float32")
    optimizer = AMO(groups(), config=config)
    found = seconds_by_step(optimizer, 1, range(1, 8))
    assert [step for step, seconds in found.items() if seconds is not None] == [3, 6]
    assert all(seconds is None or seconds > 0 for seconds in found.values())
    # A resumed run knows of earlier observations, which took none of its time.
    assert set(seconds_by_step(optimizer, 1, range(8, 10)).values()) == {None}


def test_observations_between_two_logs_are_recorded_at_the_second() -> None:
    config = AMOConfig(observe_until=6, observe_every=3, transition_steps=2, ns_dtype="float32")
    found = seconds_by_step(AMO(groups(), config=config), 5, range(1, 13))
    recorded = {step: seconds is not None for step, seconds in found.items()}
    assert recorded == {1: False, 5: True, 10: True, 12: False}


def test_optimizers_that_observe_nothing_record_nothing() -> None:
    assert set(seconds_by_step(Muon(groups()), 1, range(1, 3)).values()) == {None}
