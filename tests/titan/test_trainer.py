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


def connected(patch: pytest.MonkeyPatch, others: bool = False, device: str = "cpu") -> StopSignal:
    """A signal whose other ranks had one, or none."""
    patch.setattr("torch.distributed.all_reduce", lambda votes, _op: votes.clamp_(min=int(others)))
    signal = StopSignal()
    signal.connect(torch.device(device), 1.0)
    return signal


class Steps:
    """What torchtitan's trainer asks before each step, of a run of ``num_steps``."""

    should_continue_training = titan.Trainer.should_continue_training

    def __init__(self, signal: StopSignal | None, num_steps: int) -> None:
        self.calls: list[str] = []
        self.step, self.stop_signal = 0, signal
        self.config = SimpleNamespace(training=SimpleNamespace(steps=num_steps))
        add = self.calls.append
        callbacks = SimpleNamespace(run=lambda name, step: add(f"{name} {step}"))
        self.metrics_processor = SimpleNamespace(callbacks=callbacks)
        self.checkpointer = SimpleNamespace(save_and_wait=lambda step: add(f"save {step}"))

    def run(self) -> list[bool]:
        """Whether a signal would have found something to save, before and after each step."""
        trained = []
        while self.should_continue_training():  # type: ignore[misc]
            trained.append(bool(self.stop_signal and self.stop_signal.has_trained))
            self.step += 1
        return trained


@pytest.mark.parametrize(
    ("num_steps", "others", "trained", "calls"),
    [
        (1, False, [False], []),
        (3, False, [False, True, True], []),
        (9, True, [False], ["save 1", "on_stop 1"]),
    ],
)
def test_a_run_ends_at_its_end_or_after_the_next_step_with_a_signal_on_another_rank(
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int,
    others: bool,
    trained: list[bool],
    calls: list[str],
) -> None:
    signal = connected(monkeypatch, others)
    run = Steps(signal, num_steps)
    assert run.run() == trained
    assert (run.calls, signal.has_stopped, signal.has_trained) == (calls, others, True)


def test_a_trainer_with_checkpoints_of_its_own_trains_as_before() -> None:
    assert len(Steps(None, 3).run()) == 3
    calls: list[Any] = []
    trainer = SimpleNamespace(checkpointer=object())
    stop._train(calls.append, trainer)
    assert calls == [trainer]


@pytest.mark.cuda
def test_asking_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    signal = connected(monkeypatch, others=True, device="cuda")
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
