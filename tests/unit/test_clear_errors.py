"""Mistakes of users that ended in a bare error of Python, or trained nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from amo_dist import Muon, MuonConfig, param_groups
from tests.memory import peak_bytes


def build(**options: Any) -> tuple[nn.Parameter, Muon]:
    model = nn.Linear(8, 8, bias=False)
    optimizer = Muon(param_groups(model, patterns={"weight": "mlp_up"}), **options)
    model.weight.grad = torch.ones(8, 8)
    return model.weight, optimizer


def clear_state(optimizer: Muon) -> None:
    optimizer.state.clear()
    optimizer.step()


def drop_rate(optimizer: Muon) -> None:
    del optimizer.param_groups[0]["lr"]
    optimizer.step()


def set_huge_rate(optimizer: Muon) -> None:
    optimizer.param_groups[0]["lr"] = 10**400
    optimizer.step()


def load_nothing(optimizer: Muon) -> None:
    optimizer.load_state_dict(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (clear_state, "^state of weight.momentum_buffer: found none, expected"),
        (drop_rate, r"^groups\[0\].lr: found none, expected its value"),
        (set_huge_rate, r"^groups\[0\].lr: found 1000\d+, expected a finite number >= 0"),
        (load_nothing, "^state_dict: found None, expected the dict that state_dict"),
    ],
)
def test_a_mistake_names_the_field_and_changes_nothing(
    mistake: Callable[[Muon], None], message: str
) -> None:
    weight, optimizer = build()
    before = weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        mistake(optimizer)
    assert torch.equal(weight, before)


def test_float8_parameters_are_refused_at_construction() -> None:
    weight = nn.Parameter(torch.ones(8, 8).to(torch.float8_e4m3fn), requires_grad=False)
    groups = [{"algorithm": "adamw", "params": [("weight", weight)]}]
    with pytest.raises(ValueError, match=r"^weight: found dtype torch.float8_e4m3fn, "):
        Muon(groups, allow_no_matrices=True)


def test_momentum_of_float64_parameters_is_float64() -> None:
    model = nn.Linear(8, 8, bias=False, dtype=torch.float64)
    groups = param_groups(model, patterns={"weight": "mlp_up"})
    optimizer = Muon(groups, config=MuonConfig(ns_dtype="float64"))
    assert optimizer.state[model.weight]["momentum_buffer"].dtype == torch.float64
    model.weight.grad = torch.ones(8, 8, dtype=torch.float64) / 3
    optimizer.step()
    # One third in float32 is another number.
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], model.weight.grad)


def test_a_lost_device_is_raised_at_once_and_not_once_a_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, optimizer = build()
    logged = []
    ballots = type("Ballots", (), {"report_failure": lambda *arguments: logged.append(arguments)})
    monkeypatch.setattr(optimizer._engine, "_ballots", ballots(), raising=False)
    step: Any = SimpleNamespace(number=1)
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError):
        optimizer._engine._report(step, "updating momentum", lost)
    assert logged == []
    optimizer._engine._report(step, "updating momentum", MemoryError("no memory"))
    assert len(logged) == 1


def test_adamw_widens_one_parameter_at_a_time() -> None:
    """Float32 copies of all embeddings and their gradients were a second model in memory."""
    model = nn.ModuleList(nn.Embedding(1000, 64, dtype=torch.bfloat16) for _ in range(8))
    config = MuonConfig(bfloat16_params="master")
    optimizer = Muon(param_groups(model), config=config, allow_no_matrices=True)
    for embedding in model:
        embedding.weight.grad = torch.ones_like(embedding.weight)
    optimizer.step()
    in_float32 = 4 * sum(embedding.weight.numel() for embedding in model)
    # All widened at once took thrice.
    assert peak_bytes(optimizer.step) < 2 * in_float32
