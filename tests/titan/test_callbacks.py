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


def test_figures_are_numbers_with_names_of_their_own() -> None:
    path = f"{__name__}.Rank"
    assert Callbacks([path]).figures(3, {"loss": 1.0}) == {"of_rank": 1.5}
    with pytest.raises(ValueError, match="found two figures 'of_rank' at step 3"):
        Callbacks([path, path]).figures(3, {"loss": 1.0})


@pytest.mark.parametrize("figures", [{"validation_loss": 1.0}, {"own": None}, [1.0]])
def test_figures_that_cannot_be_read_back_are_named(
    figures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "log_metrics", lambda *_: figures)
    with pytest.raises(ValueError, match=r"^metrics\.callbacks: found "):
        Callbacks([f"{__name__}.Rank"]).figures(3, {"loss": 1.0})


def test_an_error_of_a_callback_names_its_rank_and_keeps_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    callbacks = Callbacks([f"{__name__}.Rank"])
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
