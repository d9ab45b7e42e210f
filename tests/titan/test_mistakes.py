"""Mistakes of users in sections of a config: the error names the field."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.examples import ROOT
from tests.titan.data_corpus import bpe_folder, build, packed, write_packed
from tests.titan.test_optimizers import A2, config, model
from tests.titan.test_override import applied, llama3_debugmodel
from torchtitan_ext.config import settings
from torchtitan_ext.data.loader import ValidationLoader
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.plugin import models, optimizers
from torchtitan_ext.plugin.callbacks import Callbacks
from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.metrics import MetricsProcessor
from torchtitan_ext.plugin.optimizers import MuonSection

BPE = str(bpe_folder() / "bpe.tiktoken")
JSON = str(bpe_folder() / "tokenizer.json")


def in_world_of_three(option: str) -> None:
    settings.parse([f"--job.config_file={ROOT}/configs/quickstart.toml", option], 3)


def parse(option: str) -> None:
    settings.parse(["--tokenizer.kind=byte", option])


def tokenizer(**fields: Any) -> None:
    Tokenizer.Config(**fields).build(tokenizer_path="")


def data(name: str = "packed", **fields: Any) -> None:
    build(packed(**{"path": "corpus", "name": name, **fields}))


def optimizer(name: str, **fields: str) -> None:
    optimizers.validate(config(name, muon=MuonSection(**fields)))


def groups(**fields: Any) -> None:
    config(**fields).build(model_parts=[model()])


def override(token: str) -> None:
    applied(llama3_debugmodel(), f"torchtitan_ext.override.{token}")


def checkpoint(**fields: Any) -> None:
    CheckpointManager.Config(**fields)


def of_model(**fields: Any) -> None:
    models.spec(models.Model(**fields))


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: in_world_of_three("--parallelism.data_parallel_shard_degree=2"), "parallelism"),
    (lambda: in_world_of_three("--parallelism.tensor_parallel_degree=0"), "parallelism"),
    (lambda: in_world_of_three("--training.global_batch_size=8"), "training.global_batch_size"),
    (lambda: in_world_of_three("--training.global_batch_size=0"), "training.global_batch_size"),
    (lambda: in_world_of_three("--training.local_batch_size=0"), "training.local_batch_size"),
    (lambda: parse("--model.name=no_such"), "model.name"),
    (lambda: parse("--model.name=json"), "model.name"),
    (lambda: parse("--dataloader.dataset=json.Encoder"), "dataloader.dataset"),
    (lambda: parse("--dataloader.dataset=json.decoder.JSONDecoder"), "dataloader.dataset"),
    (lambda: of_model(name="llama5"), "model.name"),
    (lambda: of_model(flavor="9B"), "model.flavor"),
    (lambda: of_model(name="gpt_oss"), "model.attention"),
    (lambda: tokenizer(path="nowhere"), "tokenizer.path"),
    (lambda: tokenizer(path=JSON, eos_token="<eos>"), "tokenizer.eos_token"),
    (lambda: tokenizer(kind="tiktoken"), "tokenizer.path"),
    (lambda: tokenizer(kind="tiktoken", path=JSON), "tokenizer.path"),
    (lambda: tokenizer(kind="tiktoken", path=BPE, eos_token="<eos>"), "tokenizer.eos_token"),
    (lambda: tokenizer(kind="tiktoken", encoding="gpt2"), "tokenizer.encoding"),
    (lambda: tokenizer(kind="tiktoken", encoding="gpt2", path=BPE), "tokenizer.encoding"),
    (lambda: data("fineweb-edu"), "dataloader.dataset"),
    (lambda: data(dataset_path=None), "dataloader.dataset_path"),
    (lambda: data(path="nowhere"), "dataloader.dataset_path"),
    (lambda: data(path="a=1,b"), "dataloader.dataset_path"),
    (lambda: data(path="a=1,b=0.0001"), "dataloader.dataset_path"),
    (lambda: data(path="a=1,b=1", infinite=False), "dataloader.dataset_path"),
    (lambda: data(order="ascend"), "dataloader.order"),
    (lambda: data("stdlib", order="ascend"), "dataloader.order"),
    (lambda: build(packed("corpus"), seq_len=500), "training.seq_len"),
    (
        lambda: build(ValidationLoader.Config(dataset="packed", dataset_path="nowhere")),
        "validator.dataloader.dataset_path",
    ),
    (lambda: optimizer("adamw"), "optimizer.name"),
    (lambda: optimizer("AMO", schedule="pe"), "optimizer.muon.schedule"),
    (lambda: optimizer("Muon", schedule="kjj"), "schedule"),
    (lambda: optimizer("Muon", schedule="pe", schedule_file=A2), "optimizer.muon.schedule_file"),
    (lambda: optimizer("Muon", schedule_file="none.toml"), "schedule_file"),
    (lambda: optimizer("Muon-PE", schedule_file=A2), "optimizer.muon.schedule_file"),
    (lambda: groups(no_decay=("nowhere",)), "no_decay"),
    (lambda: groups(no_decay=("(",)), "no_decay"),
    (lambda: groups(lr_multipliers={".*norm.*": -1.0}), "lr_multipliers['.*norm.*']"),
    (lambda: override('amo={"observe_til": 1}'), "override.imports: observe_til"),
    (lambda: override('amo={"lr": "1e-3"}'), "override.imports: lr"),
    (lambda: override('amo={"observe_until": 2.5}'), "override.imports: amo.observe_until"),
    (lambda: override('amo={"no_decay": [1]}'), "override.imports: no_decay"),
    (lambda: override('amo={"callbacks": "notes.Notes"}'), "override.imports: callbacks"),
    (lambda: override('amo={"stop_seconds": 0}'), "override.imports: stop_seconds"),
    (lambda: override('amo={"name": "AdamW"}'), "override.imports: name"),
    (lambda: override('muon={"name": "AMO"}'), "override.imports: name"),
    (lambda: checkpoint(interval=20, keep_every=30), "keep_every"),
    (lambda: checkpoint(stop_seconds=0), "stop_seconds"),
    (lambda: checkpoint(folder="s3://bucket/run"), "folder"),
    (lambda: checkpoint(interval=0), "interval"),
    (lambda: Callbacks(["json.JSONDecoder"]), "metrics.callbacks"),
    (lambda: Callbacks(["Notes"]), "metrics.callbacks"),
    (lambda: Callbacks(["no_such.Notes"]), "metrics.callbacks"),
    (lambda: MetricsProcessor.Config(processor="logging.Logger").build(), "metrics.processor"),
]


@pytest.mark.parametrize(("call", "field"), CALLS)
def test_a_mistake_is_named(
    call: Callable[[], object], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no download
    write_packed(tmp_path / "corpus", [["a text of some words"] * 10])
    with pytest.raises(ValueError, match=rf"(^|[.: ]){re.escape(field)}[: ]"):
        call()
