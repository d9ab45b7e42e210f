"""Parts of a user that a config names by import path."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_ext import config_registry
from torchtitan_ext.config import settings
from torchtitan_ext.plugin import models
from torchtitan_ext.plugin.callbacks import Callback, CallbackError, Callbacks
from torchtitan_ext.plugin.metrics import MetricsProcessor


class Rank(Callback):
    def log_metrics(self, step: int, record: Any) -> dict[str, float]:
        return {"of_rank": step / 2}


def test_figures_are_numbers_with_names_of_their_own() -> None:
    path = f"{__name__}.Rank"
    assert Callbacks([path]).figures(3, {"loss": 1.0}) == {"of_rank": 1.5}
    with pytest.raises(ValueError, match="found two figures 'of_rank' at step 3"):
        Callbacks([path, path]).figures(3, {"loss": 1.0})


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"validation_loss": 1.0}, "found two figures 'validation_loss' at step 3"),
        ({"own": None}, r"found {'own': None} of .*Rank.log_metrics at step 3, expected numbers"),
        ([1.0], r"found \[1.0\] of .*Rank.log_metrics at step 3, expected numbers by name"),
    ],
)
def test_figures_that_cannot_be_read_back_are_named(
    figures: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "log_metrics", lambda *_: figures)
    with pytest.raises(ValueError, match=f"metrics.callbacks: {message}"):
        Callbacks([f"{__name__}.Rank"]).figures(3, {"loss": 1.0})


def test_an_error_of_a_callback_keeps_its_cause() -> None:
    callbacks = Callbacks([f"{__name__}.Rank"])
    match = r"Rank.log_metrics failed on rank 0 at step .*Type"
    with pytest.raises(CallbackError, match=match) as caught:
        callbacks.figures("three", {})  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.name=no_such"], r"model.name: found 'no_such', expected one of .*, or a module"),
        (
            ["--model.name=json"],
            "model.name: found 'json', expected .*no attribute 'model_registry'",
        ),
        (["--dataloader.dataset=json.Encoder"], r"dataloader.dataset: found 'json.Encoder', expec"),
        (["--dataloader.dataset=json.decoder.JSONDecoder"], r"a subclass of .*BaseDataLoader"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.parse(["--tokenizer.kind=byte", *options])


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"callbacks": ["json.JSONDecoder"]}, "metrics.callbacks: found 'json.JSONDecoder', expe"),
        ({"callbacks": ["Notes"]}, r"metrics.callbacks: found 'Notes', expected 'MODULE.CLASS'"),
        ({"processor": "no_such.Metrics"}, "metrics.processor: found 'no_such', expected a modul"),
        ({"processor": "logging.Logger"}, "expected 'MODULE.CLASS' of a subclass of .*MetricsPro"),
    ],
)
def test_a_metrics_class_or_callback_that_is_none_is_named(
    field: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    dims = SimpleNamespace(dp_replicate=1, dp_shard=1, pp_enabled=False)
    options = {"pp_schedule": "1F1B", "config_dict": {"model": {}, "training": {}}}
    with pytest.raises(ValueError, match=message):
        MetricsProcessor.Config(**field).build(
            parallel_dims=dims, dump_folder=str(tmp_path), **options
        )


def test_a_module_beside_the_config_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_model_of_mine.py").write_text(
        "def model_registry(flavor, attn_backend):\n    return {'small': 1}[flavor]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    with pytest.raises(ValueError, match=r"model.flavor: found 'large', which a_model_of_mine"):
        models.spec(models.Model(name="a_model_of_mine", flavor="large"))
    make = config_registry.__getattr__("a_model_of_mine.no_such")
    with pytest.raises(ValueError, match=r"--config: found 'no_such', which is no function of a_m"):
        make()
    with pytest.raises(ValueError, match=re.escape("found 'no_such_module.small'")):
        config_registry.__getattr__("no_such_module.small")
