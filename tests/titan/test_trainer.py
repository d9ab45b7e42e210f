"""How ranks agree to stop; whole runs that are told to are integration tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_ext.plugin import trainer


@pytest.mark.parametrize("stops", [False, True])
def test_the_vote_is_asked_before_a_step_and_heard_after_it(
    monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    calls: list[str] = []
    made: Any = object.__new__(trainer.Trainer)
    made._request = SimpleNamespace(is_made=lambda: stops)

    def answer() -> bool:
        calls.append("answer")
        return stops

    made._vote = SimpleNamespace(ask=lambda vote: calls.append(f"ask {vote}"), answer=answer)
    monkeypatch.setattr(
        trainer.titan.Trainer, "train_step", lambda *_: calls.append("read data and train")
    )
    made.train_step(None)
    assert calls == [f"ask {stops}", "read data and train", "answer"]
    assert made._stops == stops


def ask(monkeypatch: pytest.MonkeyPatch, device: str, mine: bool, others: bool) -> trainer.StopVote:
    monkeypatch.setattr(
        "torch.distributed.all_reduce", lambda votes, _op: votes.clamp_(min=int(others))
    )
    vote = trainer.StopVote(torch.device(device))
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


def test_a_config_is_settled_and_checked_where_the_trainer_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        trainer.titan.Trainer, "__init__", lambda _self, config: seen.append(config)
    )
    config = trainer.Trainer.Config()
    config.model.flavor, config.tokenizer.kind = "tiny", "byte"
    config.training.steps = 0
    with pytest.raises(ValueError, match=r"training.steps: found 0, expected an integer >= 1"):
        config.build()
    assert seen == []
    config.training.steps = 1
    with pytest.raises(AttributeError, match="device"):  # which torchtitan's would have set
        config.build()
    assert seen[0].model_spec.flavor == "tiny"
    assert seen[0].loss.global_vocab_size == 320
