"""Mistakes of users in a config and among the words of a command: the error names the field."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tokenizers
import torch

from tests import hostile
from tests.examples import ROOT
from tests.titan.data_corpus import bpe_folder, build, packed, write_jsonl, write_packed
from tests.titan.test_launch import with_gpus
from tests.titan.test_optimizers import A2, config, model
from tests.titan.test_override import applied, llama3_debugmodel
from torchtitan_ext import cli
from torchtitan_ext.config import settings
from torchtitan_ext.config.schedule_file import load_schedule_file
from torchtitan_ext.data.loader import ValidationLoader
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.plugin import models, optimizers, patches
from torchtitan_ext.plugin.callbacks import Callback, Callbacks
from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.optimizers import MuonSection
from torchtitan_ext.plugin.parallelize import parallelize
from torchtitan_ext.tools import train

JSON = str(bpe_folder() / "tokenizer.json")


def in_world_of_three(option: str) -> None:
    settings.parse([f"--job.config_file={ROOT}/configs/quickstart.toml", option], 3)


def parse(option: str) -> None:
    settings.parse(["--tokenizer.kind=byte", option])


def toml(text: str) -> None:
    Path("config.toml").write_text(text)
    settings.parse(["--job.config_file=config.toml"])


def schedules(old: str, new: str) -> None:
    text = (ROOT / "configs/schedules/a1.toml").read_text()
    assert old in text
    Path("schedules.toml").write_text(text.replace(old, new))
    load_schedule_file("schedules.toml")


def tokenizer(**fields: Any) -> None:
    Tokenizer.Config(**fields).build(tokenizer_path="")


def data(name: str = "packed", **fields: Any) -> None:
    build(packed(**{"path": "corpus", "name": name, **fields}))


def optimizer(name: str, **fields: str) -> None:
    optimizers.validate(config(name, muon=MuonSection(**fields)))


def groups(**fields: Any) -> None:
    config(**fields).build(model_parts=[model()])


def override(token: str, stock: Any = None) -> None:
    applied(stock or llama3_debugmodel(), f"torchtitan_ext.override.{token}")


def figures(*results: Any) -> None:
    """Log what callbacks return, one each."""
    with mock.patch.object(Callback, "log_metrics", side_effect=results):
        module = "tests.integration.own_callbacks"
        names = [f"{Callback.__module__}.Callback", f"{module}.Other"]
        Callbacks(names[: len(results)]).figures(3, {})


def on_cpu(attention: Any) -> None:
    patches.install()
    with torch.device("meta"):
        model = models.spec(models.Model(flavor="tiny", attention=attention)).model.build()
    parallelize(lambda model: model, model)


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: in_world_of_three("--parallelism.tensor_parallel_degree=0"), "tensor_parallel_degree"),
    (lambda: in_world_of_three("--training.global_batch_size=8"), "training.global_batch_size"),
    (lambda: parse("--model.name=json"), "model.name"),
    (lambda: parse("--dataloader.dataset=json.decoder.JSONDecoder"), "dataloader.dataset"),
    (lambda: toml("extends = 3"), "config.toml: extends"),
    (lambda: toml("extends = 'none.toml'"), "config.toml: extends"),
    (lambda: toml("extends = 'ring.toml'"), "ring.toml: extends"),
    (lambda: toml("[optimizer.amo]\nobserv_every = 3"), "optimizer.amo.observ_every"),
    (lambda: toml("model_spec = 'x'"), "model_spec"),
    (lambda: toml("dataloader = 3"), "dataloader"),
    (lambda: toml("[optimizer]\nlr = true"), "optimizer.lr"),
    (lambda: toml("[optimizer.amo]\nobserve_every = 7"), "optimizer.amo.observe_every"),
    (lambda: toml("[optimizer.amo]\nmomentum = 0.5"), "optimizer.amo.momentum"),
    (lambda: toml("[optimizer.muon]\non_config_change = 'replan'"), "muon.on_config_change"),
    (lambda: toml("[loss]\nnum_chunks = 3"), "loss.num_chunks"),
    (lambda: toml("[optimizer]\nname = 'AMO'\n[training]\nsteps = 307"), "training.steps"),
    (lambda: schedules("format = 1", "format = 2"), "format"),
    (lambda: schedules("steps = 5", "steps = 2"), "steps"),
    (lambda: schedules("norm_scale = 1.0", "norm_scale = nan"), "norm_scale"),
    (lambda: schedules('"frobenius"', '"spectral"'), "preconditioner"),
    (lambda: schedules("steps = 5", "steps = 5\nell = 0.5"), "coefficients"),
    (lambda: models.spec(models.Model(flavor="9B")), "model.flavor"),
    (lambda: models.spec(models.Model(name="gpt_oss")), "model.attention"),
    (lambda: on_cpu("flex"), "model.attention"),
    (lambda: tokenizer(path="nowhere"), "tokenizer.path"),
    (lambda: tokenizer(path=JSON, eos_token="<eos>"), "tokenizer.eos_token"),
    (lambda: tokenizer(kind="tiktoken"), "tokenizer.encoding"),
    (lambda: tokenizer(kind="tiktoken", encoding="gpt2"), "tokenizer.encoding"),
    (lambda: data("fineweb-edu"), "dataloader.dataset"),
    (lambda: data(dataset_path=None), "dataloader.dataset_path"),
    (lambda: data(path="a=1,b"), "dataloader.dataset_path"),
    (lambda: data(path="a=1,b=0.0001"), "dataloader.dataset_path"),
    (lambda: data(path="a=1,b=1", infinite=False), "dataloader.dataset_path"),
    (lambda: data(order="ascend"), "dataloader.order"),
    (lambda: build(packed("corpus"), seq_len=500), "training.seq_len"),
    (
        lambda: build(ValidationLoader.Config(dataset="packed", dataset_path="nowhere")),
        "validator.dataloader.dataset_path",
    ),
    (lambda: optimizer("adamw"), "optimizer.name"),
    (lambda: optimizer("AMO", schedule="pe"), "optimizer.muon.schedule"),
    (lambda: optimizer("Muon", schedule="kjj"), "schedule"),
    (lambda: optimizer("Muon", schedule="pe", schedule_file=A2), "optimizer.muon.schedule_file"),
    (lambda: groups(no_decay=("nowhere",)), "no_decay"),
    (lambda: optimizers.validate(config("AdamW", patterns={"(": "attn_q"})), "optimizer.patterns"),
    (lambda: override('amo={"observe_til": 1}'), "override.imports: observe_til"),
    (lambda: override('amo={"observe_until": 2.5}'), "override.imports: amo.observe_until"),
    (lambda: override('amo={"callbacks": "notes.Notes"}'), "override.imports: callbacks"),
    (lambda: override('amo={"stop_seconds": 0}'), "override.imports: stop_seconds"),
    (lambda: override('muon={"name": "AMO"}'), "override.imports: name"),
    (lambda: override('float8={"filter_fqns": ["router"]}'), "override.imports"),
    (lambda: override("muon", settings.load([])[0]), "override.imports"),
    (lambda: CheckpointManager.Config(interval=20, keep_every=30), "keep_every"),
    (lambda: Callbacks(["Notes"]), "metrics.callbacks"),
    (lambda: Callbacks([f"{Callback.__module__}.Callback"] * 2), "metrics.callbacks"),
    (lambda: figures({"validation_loss": 1.0}), "metrics.callbacks"),
    (lambda: figures({"own": 1.0}, {"own": 1.0}), "metrics.callbacks"),
    (lambda: figures({"own": None}), "metrics.callbacks"),
]


@pytest.mark.parametrize(("call", "field"), CALLS)
def test_a_mistake_is_named(
    call: Callable[[], object], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AMO_DEVICE", "cpu")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no download
    write_packed(tmp_path / "corpus", [["a text of some words"] * 10])
    (tmp_path / "ring.toml").write_text("extends = 'config.toml'")
    with pytest.raises(ValueError, match=rf"(^|[.:\s]){re.escape(field)}[:\s]"):
        call()


# ------------------------------------------------------------------ words of a command

BROKEN = ["--training.steps=-5", "--optimizer.name=Foo"]
CONFIGS = ROOT / "configs"
DEBUG, QUICK, QWEN = (
    str(CONFIGS / f"{name}.toml") for name in ("debug_llama3", "quickstart", "qwen3_1.7b")
)
PREFLIGHT = ["preflight", QUICK, "--world=2"]
DATA, HELD_OUT = "dataloader.dataset", "validator.dataloader.dataset"
VALIDATE = [*PREFLIGHT, "--validator.enable"]
HF = [*PREFLIGHT, "--tokenizer.kind=hf"]
BATCH = "training.global_batch_size"
TOKENIZE = ["tokenize", "rows", "-o", "out", "--tokenizer=byte"]
FILE = "--optimizer.muon.schedule_file=short.toml"

COMMANDS: list[tuple[int, list[str], list[str]]] = [
    (0, ["train", DEBUG, "--nodes=2", "--head=a:1"], ["AMO_DEVICE"]),
    (8, ["train", DEBUG, "--nodes=2"], ["--head"]),
    (7, ["train", DEBUG, "--ranks=8"], ["--ranks"]),
    (0, ["train", DEBUG, "--ranks=0"], ["--ranks"]),
    (0, ["train", DEBUG, "--restarts=-1"], ["--restarts"]),
    (0, ["train", DEBUG, "--numa-binding=node"], ["--numa-binding"]),
    (0, ["train", DEBUG, "--dump_folder=s3://bucket/run"], ["dump_folder"]),
    (8, ["train", DEBUG, "--nodes=2", "--head=a:1", "--ranks=3", f"--{BATCH}=4"], [BATCH]),
    # The question for the newest step was answered with 0.
    (8, ["train", QWEN, *BROKEN, "--newest-step"], ["optimizer.name", "training.steps"]),
    (0, ["train", DEBUG, *HF[3:], "--hf_assets_path=gone", "--newest-step"], ["hf_assets_path"]),
    (0, ["preflight", "no.toml"], ["job.config_file: cannot read no.toml"]),
    (0, ["preflight", QUICK, "--world=0"], ["--world"]),
    (0, [*PREFLIGHT, "--optimizer.name=Muon", FILE], ["operator_type: found 'mlp_down'"]),
    (0, [*HF, "--hf_assets_path=gone"], ["hf_assets_path"]),
    (0, [*HF, "--tokenizer.path=gone/t.json"], ["tokenizer.path"]),
    (0, [*HF, "--hf_assets_path=large"], ["model.flavor"]),
    (0, [*HF, "--hf_assets_path=broken"], ["tokenizer.path"]),
    (0, [*PREFLIGHT, f"--{DATA}=packed", f"--{DATA}_path=gone"], [f"{DATA}_path"]),
    (0, [*VALIDATE, f"--{HELD_OUT}=packed", f"--{HELD_OUT}_path=gone"], [f"{HELD_OUT}_path"]),
    (0, PREFLIGHT, []),
    (0, ["export", "rows", "-o", "out"], ["checkpoint"]),
    (0, [*TOKENIZE, "--text-field=body"], ["--max-bad-rows"]),
    (0, [*TOKENIZE, "--pattern=*.csv"], ["source"]),
    (0, [*TOKENIZE, "--tokenizer=hf"], ["tokenizer.path"]),
    (0, [*TOKENIZE, "--tasks=-1"], ["--tasks"]),
    (0, [*TOKENIZE, "--executor=moon"], ["--executor"]),
]
"""Number of GPUs, words, and the fields of all errors."""


def fill(folder: Path) -> None:
    """Write what the commands ask for, some of it broken, into the current folder."""
    for name in ("large", "broken", "rows"):
        (folder / name).mkdir()
    words = {f"w{number}": number for number in range(321)}  # one more than the model has
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.save(str(folder / "large" / "tokenizer.json"))
    (folder / "large" / "tokenizer_config.json").write_text('{"eos_token": "w1"}')
    (folder / "broken" / "tokenizer.json").write_text("{")
    write_jsonl(folder / "rows" / "a.jsonl", [{"text": "a"}])
    schedules = (CONFIGS / "schedules" / "a1.toml").read_text()
    (folder / "short.toml").write_text(schedules.partition("[schedules.mlp_down]")[0])


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of datatrove's log files
@pytest.mark.parametrize(("gpus", "words", "fields"), COMMANDS)
def test_mistakes_among_the_words_of_a_command_are_all_named(
    gpus: int,
    words: list[str],
    fields: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_gpus(monkeypatch, gpus)
    monkeypatch.setattr(train, "start", lambda *_: pytest.fail("started"))
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    with mock.patch.dict(os.environ):  # which a start sets for its ranks
        try:
            status = cli.main(words)
        except SystemExit as error:
            status = int(str(error.code))
    output, errors = capsys.readouterr()
    # The preflight lists what it has computed as well.
    lines = output.partition("\nerrors\n")[2].splitlines() if status == 1 else errors.splitlines()
    named = [line for line in lines if status == 1 or "error: " in line]
    assert status in ((1, 2) if fields else (0,))
    assert status != 2 or not output
    assert len(named) == len(fields), named
    for line, field in zip(named, fields, strict=True):
        assert re.match(rf"(.*error: )?(argument )?\s*{re.escape(field)}", line), line


@pytest.mark.slow
def test_bad_values_end_in_an_error() -> None:
    """A sample of the command lines of ``python -m tests.hostile``."""
    with hostile.corner():
        wrong = [
            (line, text)
            for line in random.Random(0).sample(hostile.lines(), 150)
            if (text := hostile.problem(line))
        ]
    assert wrong == []
