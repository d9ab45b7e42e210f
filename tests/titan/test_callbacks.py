"""Parts of a user that a config names by import path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_ext import config_registry
from torchtitan_ext.plugin import models
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


def test_a_module_beside_the_config_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_model_of_mine.py").write_text(
        "def model_registry(flavor, attn_backend):\n    return {'small': 1}[flavor]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    with pytest.raises(ValueError, match=r"^model.flavor: found 'large'"):
        models.spec(models.Model(name="a_model_of_mine", flavor="large"))
    assert not hasattr(config_registry, "a_model_of_mine.no_such")
    assert callable(getattr(config_registry, "a_model_of_mine.model_registry"))
