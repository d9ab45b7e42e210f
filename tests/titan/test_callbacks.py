"""The error of a callback of the user's."""

from __future__ import annotations

from typing import Any

import pytest

from torchtitan_ext.plugin.callbacks import Callback, CallbackError, Callbacks


class Rank(Callback):
    def log_metrics(self, step: int, record: Any) -> dict[str, float]:
        return {"of_rank": step / 2}


def test_an_error_of_a_callback_names_its_rank_and_keeps_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callbacks = Callbacks([f"{__name__}.Rank"])
    assert callbacks.figures(3, {}) == {"of_rank": 1.5}
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    match = r"Rank.log_metrics failed on rank 1 at step .*Type"
    with pytest.raises(CallbackError, match=match) as caught:
        callbacks.figures("three", {})  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, TypeError)
