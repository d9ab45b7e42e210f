"""How ranks agree to stop; whole runs that are told to are integration tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchtitan.trainer as titan

from torchtitan_ext.plugin import stop
from torchtitan_ext.plugin.trainer import Trainer
from torchtitan_ext.signals import StopSignal

stop.install()


def test_a_trainer_with_checkpoints_of_its_own_trains_as_before() -> None:
    calls: list[Any] = []
    trainer = SimpleNamespace(checkpointer=object())
    stop._train(calls.append, trainer)
    assert calls == [trainer]


@pytest.mark.cuda
def test_asking_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda votes, _op: votes.clamp_(min=1))
    signal = StopSignal()
    signal.connect(torch.device("cuda"), 1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        signal.ask()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert signal.answer()


def test_the_optimizers_groups_follow_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step torchtitan lowers those of its own groups alone."""
    calls: list[tuple[float, object]] = []
    set_timeout = lambda timeout, group: calls.append((timeout.total_seconds(), group))  # noqa: E731
    monkeypatch.setattr(dist, "set_timeout", set_timeout, raising=False)
    monkeypatch.setattr(titan.Trainer, "train_step", lambda self, data: None)
    trainer: Any = object.__new__(Trainer)
    trainer.stop_signal, trainer._follows_timeout = SimpleNamespace(has_trained=False), True
    trainer.config = SimpleNamespace(comm=SimpleNamespace(train_timeout_seconds=7))
    world = SimpleNamespace(group="world", groups_by_ranks={(0, 1): "pair", (0,): None})
    trainer.optimizers = SimpleNamespace(optimizers=[SimpleNamespace(world=world)])
    trainer.train_step(None)
    assert not calls
    trainer.stop_signal.has_trained = True
    trainer.train_step(None)
    trainer.train_step(None)
    assert sorted(calls) == [(7.0, "pair"), (7.0, "world")]
