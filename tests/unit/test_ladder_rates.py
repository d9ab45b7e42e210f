"""The ladder under learning rates of every kind, through the optimizer."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from amo_dist import AMO, AMOConfig, NonFiniteGradientError, param_groups
from amo_dist.engine.controller import greatest_rate
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.trials import ErrorSums
from tests.distributed import models
from tests.simulated_device import simulated_device

SHAPES: dict[str, tuple[int, ...]] = {
    "layers.0.attention.wq.weight": (16, 8),
    "layers.0.feed_forward.w2.weight": (8, 24),
    "norm.weight": (8,),
}
FIELDS: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "transition_steps": 2,
    "ladder_tau": 1.0,
}
LOCK = 6


def make(**changes: Any) -> tuple[nn.Module, AMO]:
    model = models.plain_model(SHAPES)
    return model, AMO(param_groups(model), config=AMOConfig(**{**FIELDS, **changes}))


def take(model: nn.Module, optimizer: AMO, rate: Any, steps: int = 1) -> tuple[int, ...]:
    """Steps at one rate of matrices; the Newton-Schulz steps of the last."""
    for _ in range(steps):
        step = optimizer.num_steps_taken + 1
        models.set_gradients(model, 7, step)
        for group in optimizer.param_groups:
            if group["algorithm"] == "muon":
                group["lr"] = rate
        optimizer.step()
    return counts(optimizer)


def counts(optimizer: AMO) -> tuple[int, ...]:
    schedules = optimizer.schedules_by_group(optimizer.num_steps_taken)
    return tuple(schedule.num_steps for schedule in schedules.values())


def locked(rate: Any = 1.0, **changes: Any) -> tuple[nn.Module, AMO]:
    model, optimizer = make(**changes)
    take(model, optimizer, rate, LOCK)
    assert optimizer.phase == "locked"
    assert optimizer.plan is not None
    assert counts(optimizer) == optimizer.plan.allocation
    return model, optimizer


def expected(optimizer: AMO, rate: float) -> tuple[int, ...]:
    assert optimizer.plan is not None
    return optimizer.plan.steps_at(rate)


def test_steps_fall_with_the_rate_and_rise_with_it_again() -> None:
    model, optimizer = locked()
    for rate in (0.5, 0.3, 0.1, 0.3, 0.9, 3.0, 0.1):
        assert take(model, optimizer, rate, 12) == expected(optimizer, rate)
    assert optimizer.plan is not None
    assert expected(optimizer, 3.0) == optimizer.plan.allocation
    assert expected(optimizer, 0.1) == (2, 2)


def test_under_a_constant_rate_the_steps_stay() -> None:
    model, optimizer = locked()
    first = take(model, optimizer, 1.0, 12)
    assert first == expected(optimizer, 1.0)
    assert take(model, optimizer, 1.0, 12) == first


def test_at_a_rate_of_zero_all_types_take_the_fewest() -> None:
    model, optimizer = locked()
    assert take(model, optimizer, 0.0, 12) == (2, 2)
    # If no rate was above zero, no error is allowed at any other.
    model, optimizer = locked(0.0)
    assert take(model, optimizer, 0.0, 12) == (2, 2)
    assert optimizer.plan is not None
    assert take(model, optimizer, 1e-9, 12) == optimizer.plan.allocation


def test_the_reference_is_the_greatest_rate_up_to_the_plan() -> None:
    model, optimizer = make()
    for rate in (0.25, 1.0, 0.5, 0.5, 7.0, 7.0):  # the last two are those of the transition
        take(model, optimizer, rate)
    assert optimizer.control_state_dict()["policy"]["peak_rate"] == (1.0).hex()
    assert take(model, optimizer, 0.3, 12) == expected(optimizer, 0.3)


def test_a_ladder_may_end_above_two_steps() -> None:
    model, optimizer = locked(ladder_min_steps=4)
    assert take(model, optimizer, 0.0, 12) == (4, 4)


def test_the_greatest_rate_of_the_groups_with_matrices_counts() -> None:
    groups = [
        {"algorithm": "muon", "lr": 0.25},
        {"algorithm": "muon", "lr": torch.tensor(0.5, dtype=torch.float64)},
        {"algorithm": "adamw", "lr": 3.0},
    ]
    assert greatest_rate(groups) == 0.5
    assert greatest_rate(groups[2:]) == 3.0  # of a stage without matrices


@pytest.mark.parametrize("kind", [float, torch.tensor, lambda rate: torch.tensor([rate])])
def test_a_tensor_on_the_cpu_is_read(kind: Callable[[float], Any]) -> None:
    model, optimizer = locked(kind(1.0))
    assert take(model, optimizer, kind(0.25), 12) == expected(optimizer, 0.25)


def test_a_tensor_on_a_device_is_refused_as_each_step_would_wait() -> None:
    groups = [{"algorithm": "muon", "lr": torch.tensor(0.5, device="meta")}]
    with pytest.raises(ValueError, match="lr: found a tensor on meta, expected a number or a tens"):
        greatest_rate(groups)
    # Without a ladder nobody asks for it.
    assert not AMOPolicy(AMOConfig(ladder_tau=0.0)).follows_rate
    assert not AMOPolicy(AMOConfig.paper()).follows_rate


def test_a_scheduler_of_pytorch_moves_the_ladder() -> None:
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=30)
    for step in range(1, 31):
        models.set_gradients(model, 7, step)
        optimizer.step()
        scheduler.step()
    assert counts(optimizer) == (2, 2)


METHODS = ("follow", "steady_rates", "schedules", "sample", "digest", "next_change", "phase")


def asked(take_step: Callable[[], Any]) -> list[str]:
    """Names of the policy's methods that a step calls."""
    calls: list[str] = []

    def spy(name: str) -> Any:
        method = getattr(AMOPolicy, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return method(*args)

        return mock.patch.object(AMOPolicy, name, call)

    patches = [spy(name) for name in METHODS]
    for patch in patches:
        patch.start()
    take_step()
    for patch in patches:
        patch.stop()
    return calls


def test_a_locked_step_between_two_rungs_asks_the_policy_nothing() -> None:
    model, optimizer = locked()
    assert optimizer.plan is not None
    assert optimizer.plan.ladder is not None
    rungs = optimizer.plan.ladder.rungs
    top, below = (rung.rate for rung in rungs[len(rungs) // 2 :][:2])
    take(model, optimizer, top, 12)

    def one(rate: float) -> list[str]:
        step = optimizer.num_steps_taken + 1
        models.set_gradients(model, 7, step)
        optimizer.param_groups[0]["lr"] = rate
        return asked(optimizer.step)

    assert optimizer.param_groups[0]["algorithm"] == "muon"
    assert one(top) == []
    assert one((top + below) / 2) == []
    assert "follow" in one(below)
    assert "follow" in one(math.nextafter(top, 1.0))


def test_no_step_on_the_ladder_waits_for_a_device() -> None:
    """Steps that change schedules do not wait, either."""
    with simulated_device() as device:
        model = models.plain_model(SHAPES, "cuda")
        optimizer = AMO(param_groups(model), config=AMOConfig(**FIELDS))
        take(model, optimizer, 1.0, LOCK)
        seen = set()
        for rate in (0.6, 0.4, 0.3, 0.2, 0.1, 0.1, 0.0, 0.5, 1.0):
            models.set_gradients(model, 7, optimizer.num_steps_taken + 1)
            optimizer.param_groups[0]["lr"] = rate
            device.clear()
            optimizer.step()
            assert device.waits == {}
            seen.add(counts(optimizer))
        assert len(seen) > 3
        optimizer.check_last_update()


def test_a_step_that_changes_nothing_leaves_the_ladder_where_it_was() -> None:
    model, optimizer = locked()
    before = copy.deepcopy(optimizer.control_state_dict())
    models.set_gradients(model, 7, LOCK + 1)
    optimizer.param_groups[0]["lr"] = 0.1
    weight = model.get_parameter("layers.0.attention.wq.weight")
    assert weight.grad is not None
    weight.grad[0, 0] = math.nan
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    assert optimizer.control_state_dict() == before
    take(model, optimizer, 0.1)
    after = optimizer.control_state_dict()
    assert after["steps_taken"] == LOCK + 1
    assert after["policy"]["ladder_steps"] is not None


def test_a_step_that_a_late_verdict_undoes_leaves_the_ladder_where_it_was() -> None:
    """On devices the next step tells of it; a save before that has the state before it, too."""
    with simulated_device():
        model = models.plain_model(SHAPES, "cuda")
        optimizer = AMO(param_groups(model), config=AMOConfig(**FIELDS))
        take(model, optimizer, 1.0, LOCK)
        before = copy.deepcopy(optimizer.control_state_dict())
        models.set_gradients(model, 7, LOCK + 1)
        optimizer.param_groups[0]["lr"] = 0.1
        weight = model.get_parameter("layers.0.attention.wq.weight")
        assert weight.grad is not None
        weight.grad[0, 0] = math.nan
        optimizer.step()
        assert optimizer.num_steps_taken == LOCK + 1
        assert optimizer.control_state_dict() == before
        models.set_gradients(model, 7, LOCK + 1)
        with pytest.raises(NonFiniteGradientError):
            optimizer.step()
        assert optimizer.num_steps_taken == LOCK
        assert optimizer.control_state_dict() == before
        take(model, optimizer, 0.1)
        after = optimizer.control_state_dict()
        assert after["steps_taken"] == LOCK + 1
        assert after["policy"]["ladder_steps"] is not None


def test_an_undone_step_is_told_as_it_was_taken_in_the_end() -> None:
    with simulated_device():
        model = models.plain_model(SHAPES, "cuda")
        optimizer = AMO(param_groups(model), config=AMOConfig(**FIELDS))
        planned = take(model, optimizer, 1.0, LOCK)
        models.set_gradients(model, 7, LOCK + 1)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.fill_(math.nan)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.step()  # down the ladder, and undone
        models.set_gradients(model, 7, LOCK + 1)
        with pytest.raises(NonFiniteGradientError):
            optimizer.step()
        assert take(model, optimizer, 1.0) == planned


def test_errors_of_past_observations_are_not_kept() -> None:
    def count() -> int:
        gc.collect()
        return sum(type(entry) is ErrorSums for entry in gc.get_objects())

    before = count()
    _, optimizer = locked()
    assert count() <= before
    assert optimizer.plan is not None


def resumed(optimizer: AMO, model: nn.Module, **changes: Any) -> tuple[nn.Module, AMO]:
    other_model, other = make(**changes)
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other_model, other


@pytest.mark.parametrize("saved_after", [0, 1, 2, 5, 9])
def test_a_run_goes_on_from_any_place_between_rungs(saved_after: int) -> None:
    rates: Sequence[float] = [0.6, 0.4, 0.4, 0.3, 0.2, 0.1, 0.1, 0.5, 0.5, 0.9, 0.9]
    model, optimizer = locked()
    for rate in rates[:saved_after]:
        take(model, optimizer, rate)
    other_model, other = resumed(optimizer, model)
    for rate in rates[saved_after:]:
        assert take(other_model, other, rate) == take(model, optimizer, rate)
    assert other.control_state_dict() == optimizer.control_state_dict()
    for name, param in model.named_parameters():
        assert torch.equal(param, other_model.get_parameter(name))


def test_steps_before_the_first_move_after_a_resume_are_told_as_they_were() -> None:
    model, optimizer = locked()
    take(model, optimizer, 0.3, 12)
    model, optimizer = resumed(optimizer, model)
    rates = enumerate([0.3, 0.3, 0.9], LOCK + 13)
    taken = {step: take(model, optimizer, rate) for step, rate in rates}
    assert len(set(taken.values())) > 1
    for step, steps in taken.items():
        schedules = optimizer.schedules_by_group(step).values()
        assert tuple(schedule.num_steps for schedule in schedules) == steps


def test_another_tau_on_resume_plans_anew() -> None:
    model, optimizer = locked()
    take(model, optimizer, 0.1, 12)
    _, other = make(ladder_tau=2.0)
    with pytest.raises(ValueError, match=r"ladder_tau: the checkpoint has 1\.0, this run has 2\.0"):
        other.load_state_dict(optimizer.state_dict())
    _, other = resumed(optimizer, model, ladder_tau=2.0, on_config_change="replan")
    policy = other.control_state_dict()["policy"]
    assert (policy["plan"], policy["ladder_steps"]) == (None, None)
    assert policy["peak_rate"] == (0.0).hex()
    assert policy["timeline"] == {
        "begin": 18,
        "observe_until": 20,
        "plan_step": 20,
        "lock_step": 22,
    }
