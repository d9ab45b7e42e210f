"""How ranks agree to stop; whole runs that are told to are integration tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_ext.plugin import stop


@pytest.mark.parametrize("stops", [False, True])
def test_the_vote_is_asked_before_a_step_and_heard_after_it(stops: bool) -> None:
    calls: list[str] = []
    callbacks = SimpleNamespace(run=lambda method, step: calls.append(f"{method} {step}"))
    trainer: Any = SimpleNamespace(step=7)
    trainer.metrics_processor = SimpleNamespace(callbacks=callbacks)
    trainer.checkpointer = SimpleNamespace(save_and_wait=lambda step: calls.append(f"save {step}"))

    def answer() -> bool:
        calls.append("answer")
        return stops

    vote: Any = SimpleNamespace(ask=lambda made: calls.append(f"ask {made}"), answer=answer)
    request: Any = SimpleNamespace(is_made=lambda: stops, has_trained=False)
    trainer.ballot = stop.Ballot(request, vote)
    # Before the first step there is no answer; after the last one nothing is asked or saved.
    assert stop._should_continue(lambda _: True, trainer)
    assert not request.has_trained  # A signal now ends the process: there is nothing to save.
    calls.append("read data and train")
    assert stop._should_continue(lambda _: True, trainer) != stops
    assert trainer.ballot.has_stopped == stops
    last = ["save 7", "on_stop 7"] if stops else ["ask False"]
    assert calls == [f"ask {stops}", "read data and train", "answer", *last]
    assert not stop._should_continue(lambda _: False, trainer)
    assert calls[-1] == last[-1]
    assert request.has_trained


def test_the_only_step_of_a_process_counts() -> None:
    """A stop while its checkpoint is written would otherwise end the process."""
    request: Any = SimpleNamespace(is_made=lambda: False, has_trained=False)
    vote: Any = SimpleNamespace(ask=lambda _: None)
    trainer: Any = SimpleNamespace(ballot=stop.Ballot(request, vote))
    assert stop._should_continue(lambda _: True, trainer)
    assert not stop._should_continue(lambda _: False, trainer)
    assert request.has_trained


def test_a_trainer_with_checkpoints_of_its_own_trains_as_before() -> None:
    calls: list[Any] = []
    trainer = SimpleNamespace(checkpointer=object())
    stop._train(calls.append, trainer)
    assert calls == [trainer]
    assert stop._should_continue(lambda _: True, trainer)


def ask(monkeypatch: pytest.MonkeyPatch, device: str, mine: bool, others: bool) -> stop.StopVote:
    monkeypatch.setattr(
        "torch.distributed.all_reduce", lambda votes, _op: votes.clamp_(min=int(others))
    )
    vote = stop.StopVote(torch.device(device))
    vote.ask(mine)
    return vote


@pytest.mark.parametrize("mine", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_one_vote_is_enough(monkeypatch: pytest.MonkeyPatch, mine: bool, others: bool) -> None:
    assert ask(monkeypatch, "cpu", mine, others).answer() == (mine or others)


@pytest.mark.cuda
def test_asking_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        vote = ask(monkeypatch, "cuda", False, True)
        vote.ask(True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert vote.answer()
