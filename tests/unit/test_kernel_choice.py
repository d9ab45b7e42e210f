"""Kernels chosen by measuring: what is measured, what is taken, and what a checkpoint keeps."""

from __future__ import annotations

import logging
import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.kernels import choice
from amo_dist.kernels.choice import Work, choose, measure
from amo_dist.kernels.cuda.kernels import CudaKernels, packaged
from amo_dist.kernels.devices import make_kernels
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.schedule.polar_express import compose
from tests import rehearsal
from tests.distributed import models

CPU = torch.device("cpu")
STEPS = tuple(compose(1e-3, 6))
KEY = "24x64, 6 steps"


def work(**changes: Any) -> Work:
    fields = {
        "count": 3,
        "shape": (24, 64),
        "coefficients": STEPS,
        "norm_scale": 1.01,
        "preconditioner": "frobenius",
    }
    return Work(**{**fields, **changes})


def kernels(*candidates: str, dtype: torch.dtype = torch.bfloat16) -> CudaKernels:
    found = CudaKernels(dtype)
    found.candidates = candidates
    return found


def test_every_candidate_is_timed_and_held_to_the_exact_result() -> None:
    names = ("standard", "single", "symmetric", "gram")
    rows = measure(kernels(*names, dtype=torch.float32), [work()], CPU)[KEY]
    assert tuple(rows) == names
    assert all(seconds > 0 for seconds, _ in rows.values())
    # Six steps in float32, of matrices with a condition of 1e3; an exact result has no error.
    assert all(1e-9 < error < 1e-4 for _, error in rows.values())


def test_a_key_has_the_worst_of_its_schedules() -> None:
    easy, hard = (work(coefficients=tuple(compose(ell, 6))) for ell in (1e-1, 1e-4))
    of_each = [
        measure(kernels("standard"), [each], CPU)[KEY]["standard"][1] for each in (easy, hard)
    ]
    assert measure(kernels("standard"), [easy, hard], CPU)[KEY]["standard"][1] == max(of_each)
    assert of_each[0] != of_each[1]


def test_what_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = measure(kernels("standard", "gram_newton_schulz"), [work(preconditioner="aol")], CPU)
    assert rows[KEY]["gram_newton_schulz"] == [math.inf, math.inf]
    assert choose([rows]) == {KEY: "standard"}
    assert "gram_newton_schulz at 24x64, 6 steps left out" in caplog.text


def test_the_gram_form_is_not_measured_where_it_is_not_stable() -> None:
    steps = tuple(compose(1e-3, 4))
    rows = measure(kernels("standard", "gram"), [work(coefficients=steps)], CPU)
    assert list(rows["24x64, 4 steps"]) == ["standard"]


def test_measuring_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "MOST_SECONDS", -1.0)
    assert measure(kernels("standard", "single"), [work()], CPU) == {}
    assert "the rest is not measured" in caplog.text


def rows(**found: tuple[float, float]) -> dict[str, dict[str, tuple[float, float]]]:
    return {KEY: found}


STANDARD = (1.0, 1e-3)


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([rows(standard=STANDARD, gram=(0.5, 1e-3))], "gram"),
        # Not worth other bits; too inexact; an error that is no number.
        ([rows(standard=STANDARD, gram=(0.96, 1e-3))], "standard"),
        ([rows(standard=STANDARD, gram=(0.5, 2.1e-3))], "standard"),
        ([rows(standard=STANDARD, gram=(0.5, math.nan))], "standard"),
        # The slowest rank counts, and one on which it is missing.
        (
            [rows(standard=STANDARD, gram=(0.5, 0)), rows(standard=STANDARD, gram=(2, 0))],
            "standard",
        ),
        ([rows(standard=STANDARD, gram=(0.5, 0)), rows(standard=STANDARD)], "standard"),
        ([rows(standard=STANDARD), rows(standard=STANDARD, gram=(0.5, 0))], "standard"),
        # Ranks without these matrices have no say.
        ([{}, rows(standard=STANDARD, gram=(0.5, 0), single=(0.4, 0))], "single"),
    ],
)
def test_the_fastest_that_is_exact_enough_everywhere(by_rank: Any, expected: str) -> None:
    assert choose(by_rank) == {KEY: expected}


def test_a_key_without_the_standard_form_is_left_for_later() -> None:
    assert choose([rows(single=(0.5, 0.0)), rows(standard=STANDARD)]) == {}


def test_only_auto_asks_for_the_choice() -> None:
    for requested, expected in (("auto", "single"), ("symmetric", "symmetric")):
        found = CudaKernels(torch.float32, requested)
        found.chosen[KEY] = "single"
        assert found.backend_name((24, 64), STEPS) == expected
    found = CudaKernels(torch.float32)
    found.chosen[KEY] = "single"
    assert found.backend_name((24, 64), STEPS[:5]) == "standard"


def test_devices_have_candidates_and_a_cpu_has_a_cost_model() -> None:
    def names(device: str) -> list[str]:
        options: Any = {"ns_dtype": torch.float32, "ns_backend": "auto", "cuda_graphs": False}
        return list(make_kernels(torch.device(device), **options).candidates)

    assert names("cpu") == []
    assert names("meta") == ["standard", "single", "symmetric", "gram"]
    assert names("cuda")[:4] == names("meta")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_measures_all_that_it_has() -> None:
    device = torch.device("cuda")
    found = make_kernels(device, ns_dtype=torch.bfloat16, ns_backend="auto", cuda_graphs=False)
    rows = measure(found, [work(shape=(1024, 4096))], device)["1024x4096, 6 steps"]
    assert {"standard", "single", "symmetric", "triton"} <= rows.keys()
    # Six steps in bfloat16.
    assert all(error < 5e-2 for _, error in rows.values())
    assert choose([{KEY: rows}])[KEY] in rows


# ---------------------------------------------------------------- in an optimizer

SHAPES = {f"layers.{i}.attention.wq.weight": (24, 64) for i in range(3)} | {"norm.weight": (64,)}
CANDIDATES = ("standard", "single", "symmetric")
CONFIG = AMOConfig(observe_until=2, observe_every=1, transition_steps=2, ns_dtype="float32")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``single`` is fastest, whatever the clock says; the names that were measured."""
    told: list[str] = []

    def fake(_: object, name: str, *__: object) -> tuple[float, float]:
        told.append(name)
        return (0.5 if name == "single" else 1.0), 1e-6

    monkeypatch.setattr(choice, "_measure", fake)
    return told


def train(optimizer: AMO | Muon, model: torch.nn.Module, steps: range) -> list[Tensor]:
    for step in steps:
        models.set_gradients(model, 1, step)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def make(kind: type[Muon] = AMO, **config: Any) -> tuple[Any, torch.nn.Module]:
    model = models.plain_model(SHAPES)
    options = CONFIG.to_dict() if kind is AMO else {"ns_dtype": "float32"}
    made = (AMOConfig if kind is AMO else MuonConfig)(**{**options, **config})
    with rehearsal.on_devices(*CANDIDATES):
        return kind(param_groups(model), lr=0.02, config=made), model


def test_the_choice_is_made_once_at_the_lock_and_told(
    measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, model = make()
    with caplog.at_level(logging.INFO, logger="amo_dist.kernels.choice"):
        for step in range(1, 9):
            locked = optimizer.policy.phase(step) == "locked"
            train(optimizer, model, range(step, step + 1))
            assert measured == (list(CANDIDATES) if locked else []), step
            assert optimizer.metrics()["newton_schulz/single_matrices"] == (3 if locked else 0)
    assert "runs single, 0.50 of standard's time" in caplog.text


def test_a_fixed_schedule_is_locked_from_its_first_step(measured: list[str]) -> None:
    optimizer, model = make(Muon)
    train(optimizer, model, range(1, 4))
    assert measured == list(CANDIDATES)
    assert optimizer.control_state_dict()["kernels"] == {"24x64, 5 steps": "single"}


def test_a_name_leaves_nothing_to_measure(measured: list[str]) -> None:
    optimizer, model = make(ns_backend="symmetric")
    train(optimizer, model, range(1, 8))
    assert measured == []
    assert optimizer.metrics()["newton_schulz/symmetric_matrices"] == 3
    assert "kernels" not in optimizer.control_state_dict()


def test_a_resumed_run_keeps_the_choice(measured: list[str]) -> None:
    optimizer, model = make()
    train(optimizer, model, range(1, 8))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with rehearsal.on_devices(*CANDIDATES):
        saved = models.through_a_file(optimizer.state_dict())
        expected = train(optimizer, model, range(8, 12))
        again, other = make()
        other.load_state_dict(weights)
        again.load_state_dict(saved)
        assert all(map(torch.equal, train(again, other, range(8, 12)), expected))
    assert measured == list(CANDIDATES)
    assert again.control_state_dict() == optimizer.control_state_dict()


def test_kernels_that_are_missing_here_are_measured_anew(measured: list[str]) -> None:
    optimizer, model = make()
    train(optimizer, model, range(1, 8))
    state = optimizer.control_state_dict() | {"kernels": {KEY: "triton"}}
    measured.clear()
    with rehearsal.on_devices(*CANDIDATES):
        optimizer.load_control_state_dict(state)
    assert "kernels" not in optimizer.control_state_dict()
    train(optimizer, model, range(8, 10))
    assert measured == list(CANDIDATES)


@pytest.mark.parametrize("kernels", [["single"], {KEY: "fast"}, {KEY: "auto"}, {KEY: 1}])
def test_a_record_with_unknown_kernels_is_refused(kernels: object) -> None:
    optimizer, _ = make()
    state = optimizer.control_state_dict() | {"kernels": kernels}
    with pytest.raises(ValueError, match=r"^control\.kernels"):
        optimizer.load_control_state_dict(state)


# ---------------------------------------------------------------- the package


class Packaged:
    """What the package does: scales to norm one, and runs the steps; float32 is scaled in place."""

    def __init__(self, ns_coefficients: Any, **options: Any) -> None:
        assert options["gram_newton_schulz_reset_iterations"] == [2, 4]
        assert options["compile_kwargs"] is None
        self._coefficients = ns_coefficients

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float()
        x /= x.norm(dim=(-2, -1), keepdim=True) + 1e-7
        for a, b, c in self._coefficients:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("gram_newton_schulz")
    module.GramNewtonSchulz = Packaged  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", module)
    packaged.cache_clear()


@pytest.mark.usefixtures("package")
def test_the_package_gives_what_the_standard_form_gives() -> None:
    x = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0))
    x[1] = 0.0
    before = x.clone()
    # A safety factor far from one: the package must be told of it.
    args = (3, (24, 64), STEPS, 1.5, "frobenius")
    found = CudaKernels(torch.float32, "gram_newton_schulz").orthogonalizer(*args)(list(x))
    expected = orthogonalize(x, STEPS, norm_scale=1.5, dtype=torch.float32, backend="standard")
    assert torch.equal(x, before)
    # Six steps in float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("package")
def test_the_package_knows_one_preconditioner() -> None:
    run = CudaKernels(torch.float32, "gram_newton_schulz").orthogonalizer(
        1, (24, 64), STEPS, 1.01, "aol"
    )
    with pytest.raises(ValueError, match="with the preconditioner 'aol', expected 'frobenius'"):
        run([torch.ones(24, 64)])
