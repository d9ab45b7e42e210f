"""Observation on a thread: the same bits, agreed at the next step or before a save."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import amo_dist.engine.observer
from amo_dist import AMO, AMOConfig, RankMismatchError, param_groups
from amo_dist.engine.observer import Observer
from amo_dist.kernels.spectra import observe
from amo_dist.schedule.polar_express import composed
from tests.distributed import models
from tests.distributed.harness import Ranks

SEED, STEPS = 3, 12
FIELDS: dict[str, Any] = {
    "observe_until": 6,
    "observe_every": 2,
    "sample_size": 2,
    "transition_steps": 3,
    "bucket_bytes": 256,
}


def train(
    rank: int, world_size: int, layout: str, objective: str, in_background: bool, saves: bool
) -> tuple[dict[str, torch.Tensor], list[Any], list[int]]:
    """Parameters, control states, and how many observations the policy knew after each step."""
    model = models.make_model(layout, models.shapes())
    optimizer = AMO(
        param_groups(model),
        lr=3e-3,
        config=AMOConfig(**FIELDS, objective=objective, observe_in_background=in_background),
        process_group=dist.group.WORLD if layout == "plain" and world_size > 1 else None,
    )
    controls, known = [], []
    for step in range(1, STEPS + 1):
        models.set_gradients(model, SEED, step)
        optimizer.step()
        known.append(int(optimizer.policy.metrics(step)["amo/observations"]))
        if saves:
            control = optimizer.state_dict()["param_groups"][0]["control"]
            controls.append(control.replace('"observe_in_background":true,', ""))
    params = {name: models.whole(param) for name, param in model.named_parameters()}
    return params, controls, known


@pytest.mark.parametrize(("layout", "world_size"), [("plain", 1), ("fsdp", 3), ("hsdp", 4)])
@pytest.mark.parametrize("objective", ["measured", "projected"])
def test_nothing_changes_but_when_it_is_known(
    run_on: Ranks, layout: str, world_size: int, objective: str
) -> None:
    at_once = run_on(world_size)(train, layout, objective, False, True)
    later = run_on(world_size)(train, layout, objective, True, False)
    saved = run_on(world_size)(train, layout, objective, True, True)
    for before, after, drained in zip(at_once, later, saved, strict=True):
        assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
        assert all(torch.equal(before[0][name], drained[0][name]) for name in before[0])
        expected = [each.replace('"observe_in_background":false,', "") for each in before[1]]
        assert drained[1] == expected
        assert before[2] == [min(step, 6) // 2 for step in range(1, STEPS + 1)]
        # One step later, when the next one begins; a save between does not come before this look.
        assert after[2] == [min(step - 1, 6) // 2 for step in range(1, STEPS + 1)]


def stop_and_load(rank: int, world_size: int) -> list[str]:
    """A load while an observation is under way forgets it."""
    model = models.make_model("fsdp", models.shapes())
    config = AMOConfig(**FIELDS, observe_in_background=True)
    optimizer = AMO(param_groups(model), lr=3e-3, config=config)
    models.set_gradients(model, SEED, 1)
    optimizer.step()
    earlier = optimizer.control_state_dict()
    models.set_gradients(model, SEED, 2)
    optimizer.step()
    optimizer.load_control_state_dict(earlier)
    assert optimizer.control_state_dict() == earlier
    models.set_gradients(model, SEED, 2)
    optimizer.step()
    return [str(each["step"]) for each in optimizer.control_state_dict()["policy"]["observations"]]


def test_a_load_forgets_what_is_under_way(run_on: Ranks) -> None:
    assert run_on(2)(stop_and_load) == [["2"], ["2"]]


def load_on_one_rank(rank: int, world_size: int) -> tuple[str, str, int]:
    """The second rank alone loads while an observation is under way; then a load fails on it."""
    model = models.make_model("fsdp", models.shapes())
    config = AMOConfig(**FIELDS, observe_in_background=True)
    optimizer = AMO(param_groups(model), lr=3e-3, config=config)
    whole = copy.deepcopy(optimizer.state_dict())
    cut = {**whole, "state": {}}
    for step in (1, 2):
        models.set_gradients(model, SEED, step)
        optimizer.step()
    refusal = told = ""
    try:
        optimizer.load_state_dict(whole) if rank == 1 else optimizer.step()
    except RankMismatchError as error:
        told = str(error)
    try:
        optimizer.load_state_dict(cut if rank == 1 else whole)
    except ValueError as error:
        refusal = str(error)
    optimizer.load_state_dict(whole)  # with the right state on both, they go on
    optimizer.step()
    return refusal, told, optimizer.num_steps_taken


def test_a_load_that_fails_on_one_rank_leaves_no_rank_waiting(run_on: Ranks) -> None:
    found = run_on(2, timeout=60.0)(load_on_one_rank)
    assert found[0] == found[1]
    refusal, told, steps = found[0]
    assert "load_state_dict failed on rank 1: ValueError: state of " in refusal
    assert "momentum_buffer: found 'nothing', expected this key" in refusal
    assert "rank 0 has observation of step 2; rank 1 has load_state_dict" in told
    assert steps == 1


def fail_on_one_rank(rank: int, world_size: int) -> str:
    model = models.make_model("fsdp", models.shapes())
    config = AMOConfig(**{**FIELDS, "sample_size": 9}, observe_in_background=True)
    optimizer = AMO(param_groups(model), lr=3e-3, config=config)
    told = ""
    error = RuntimeError("no convergence")
    broken = mock.patch.object(amo_dist.engine.observer, "observe", side_effect=error)
    with broken if rank == 1 else contextlib.nullcontext():
        for step in (1, 2):
            models.set_gradients(model, SEED, step)
            optimizer.step()
        try:
            optimizer.state_dict()
        except RuntimeError as failure:
            told = str(failure)
    return told


def test_a_measurement_that_fails_on_one_rank_is_told_on_all(run_on: Ranks) -> None:
    found = run_on(2, timeout=60.0)(fail_on_one_rank)
    assert found[0] == found[1]
    assert found[0] == "observation of step 2 failed on rank 1: RuntimeError: no convergence"


TRIALS = [composed(ell, steps) for steps in (3, 5) for ell in (1e-4, 1e-3, 0.1)]


def at_once(matrix: torch.Tensor) -> torch.Tensor:
    observer = Observer(in_background=False, trials=TRIALS)
    observer.measure("it", matrix)
    (found,) = observer.collect().values()
    assert found.shape == (observer.num_values,) == (13,)
    return found


def test_a_measurement_is_ell_and_what_each_trial_leaves() -> None:
    """Trials of unlike length stand in one table."""
    torch.manual_seed(0)
    matrix = torch.randn(5, 8) * torch.logspace(0, -3, 5).unsqueeze(1)
    sigmas = torch.linalg.svdvals(matrix.double())
    norm = float(sigmas.norm())
    expected = [float(sigmas[-1]) / norm]
    images = [[trial.image(x / (1.01 * norm)) for x in sigmas.tolist()] for trial in TRIALS]
    expected += [sum((y * y - 1) ** 2 for y in ys) / 5 for ys in images]
    expected += [sum((y - 1) ** 2 for y in ys) / 5 for ys in images]
    # Singular values come from a Gram matrix of float32 entries, some of them a thousandth.
    assert at_once(matrix).tolist() == pytest.approx(expected, rel=1e-6)
    assert Observer(in_background=False).num_values == 1


def test_a_sample_is_cloned_and_measured_on_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    may_go_on = threading.Event()

    def measured(matrix: torch.Tensor, *trials: Any) -> torch.Tensor:
        assert may_go_on.wait(60)
        threads.append(threading.get_ident())
        return observe(matrix, *trials)

    torch.manual_seed(0)
    matrices = {name: torch.randn(6, 4) for name in "ab"}
    expected = {name: at_once(matrix) for name, matrix in matrices.items()}
    monkeypatch.setattr(amo_dist.engine.observer, "observe", measured)
    observer = Observer(in_background=True, trials=TRIALS)
    for name, matrix in matrices.items():
        observer.measure(name, matrix)
        matrix.zero_()
    may_go_on.set()
    found = observer.collect()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert len(threads) == 2
    assert threading.get_ident() not in threads
    assert observer.collect() == {}
    assert observer.reset_seconds() > 0.0
    assert observer.reset_seconds() == 0.0


def test_a_failure_on_the_thread_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(matrix: torch.Tensor, *trials: Any) -> torch.Tensor:
        raise RuntimeError("no convergence")

    monkeypatch.setattr(amo_dist.engine.observer, "observe", failing)
    observer = Observer(in_background=True)
    observer.measure("a", torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="no convergence"):
        observer.collect()
    # Told once: the next observation is another one.
    assert observer.collect() == {}


def test_a_load_goes_on_from_a_failed_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it wait for measurements, of which it has no use."""

    def failing(matrix: torch.Tensor, *trials: Any) -> torch.Tensor:
        raise RuntimeError("no convergence")

    model = models.make_model("plain", models.shapes())
    optimizer = AMO(param_groups(model), config=AMOConfig(**FIELDS, observe_in_background=True))
    earlier = copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(amo_dist.engine.observer, "observe", failing)
    for step in (1, 2):
        models.set_gradients(model, SEED, step)
        optimizer.step()
    optimizer.load_state_dict(earlier)
    assert optimizer.num_steps_taken == 0
    monkeypatch.setattr(amo_dist.engine.observer, "observe", observe)
    for step in (1, 2, 3):
        models.set_gradients(model, SEED, step)
        optimizer.step()
    assert optimizer.policy.metrics(3)["amo/observations"] == 1.0


def test_what_is_discarded_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()

    def slow(matrix: torch.Tensor, *trials: Any) -> torch.Tensor:
        assert may_go_on.wait(60)
        return observe(matrix, *trials)

    monkeypatch.setattr(amo_dist.engine.observer, "observe", slow)
    for in_background in (True, False):
        observer = Observer(in_background=in_background)
        for name in "ab":
            observer.measure(name, torch.ones(2, 2))
        observer.discard()  # would wait for ever here
        may_go_on.set()
        assert observer.collect() == {}


@pytest.mark.cuda
def test_a_stream_of_its_own_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    matrices = {str(i): torch.randn(96, 64 + i, device="cuda") for i in range(8)}
    expected = {name: at_once(matrix).cpu() for name, matrix in matrices.items()}
    observer = Observer(in_background=True, trials=TRIALS)
    for name, matrix in matrices.items():
        observer.measure(name, matrix)
        matrix.zero_()
    found = observer.collect()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_thread_stays_on_the_device_of_its_matrices() -> None:
    observer = Observer(in_background=True)
    observer.measure("a", torch.randn(96, 64, device="cuda:1"))
    observer.collect()
    assert observer._thread is not None
    # Also once it has left the stream: that is when it would go back to device 0.
    assert observer._thread.submit(torch.cuda.current_device).result() == 1
