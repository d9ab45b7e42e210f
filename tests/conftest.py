"""Fixtures and markers of the whole suite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from amo_dist.kernels.newton_schulz import has_bfloat16
from amo_dist.optimizers import muon
from tests.distributed.harness import Ranks, compute_in_float32

# No test depends on how long something takes.
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("unhurried", settings(), **SLOW)
settings.load_profile("unhurried")

compute_in_float32()


@pytest.fixture
def cpu_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ns_dtype = "auto"`` asks the CPU, as outside of tests."""
    monkeypatch.setattr(muon, "has_bfloat16", has_bfloat16)


@pytest.fixture(scope="session")
def run_on() -> Iterator[Ranks]:
    """``run_on(world_size)(case, *args)``: a case on real gloo ranks, results by rank."""
    with contextlib.closing(Ranks()) as ranks:
        yield ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # no slow one at the end
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
