"""Ends of commands: what they find by themselves, and what they tell when it is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.amo_paper import __main__ as paper
from torchtitan_ext import CheckpointWriter, cli
from torchtitan_ext.config import settings
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.plugin import models
from torchtitan_ext.runs.run_files import RunFiles, find_checkpoint
from torchtitan_ext.tools import export

# ------------------------------------------------------------------ export, evaluate


def saved(folder: Path, *steps: int, last: str = ".metadata") -> None:
    for step in steps:
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}" / last).touch()


@pytest.mark.parametrize("name", ["checkpoint", "elsewhere"])
def test_the_newest_complete_checkpoint_of_a_run_is_found(tmp_path: Path, name: str) -> None:
    RunFiles(tmp_path).start(1, {"checkpoint": {"folder": name}})
    saved(tmp_path / name, 20, 100)
    saved(tmp_path / name, 200, last="__0_0.distcp")  # cut short
    newest = tmp_path / name / "step-100"
    assert find_checkpoint(tmp_path) == newest
    assert find_checkpoint(tmp_path / name) == newest
    one = tmp_path / name / "step-20"
    assert find_checkpoint(one) == one
    saved(tmp_path / "third", 300)
    with pytest.raises(ValueError, match=f"{name} and .*third"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("main", "command"), [(cli.main, ["export", "-o", "out"]), (paper.main, ["score"])]
)
def test_a_folder_without_a_checkpoint_is_told(
    tmp_path: Path, main: Any, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"error: checkpoint: found no complete one in {tmp_path}, expected " in told


def test_the_model_of_a_run_reaches_the_export(tmp_path: Path) -> None:
    config = settings.parse(["--model.name=qwen3", "--model.flavor=tiny", "--tokenizer.kind=byte"])
    RunFiles(tmp_path).start(1, {**config.to_dict()})
    source = export.find_source(tmp_path / "checkpoint" / "step-1")
    assert source == export.Source(config.model, config.tokenizer, "AdamW")


SOURCE = export.Source(
    models.Model(name="llama3", flavor="quickstart"), Tokenizer.Config(kind="byte"), "AMO"
)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_checkpoint_is_told_in_a_line(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = models.spec(models.Model(name="llama3", flavor="quickstart")).model.build()
    weights = {name: torch.zeros(one.shape) for name, one in model.state_dict().items()}
    folder = tmp_path / "step-1"
    dcp.save(weights, storage_writer=CheckpointWriter(folder), no_dist=True)
    (data,) = folder.glob("*.distcp")
    data.write_bytes(b"\x80\x04" + bytes(data.stat().st_size - 2))
    with pytest.raises(ValueError, match=f"checkpoint {folder}"):
        export.export(folder, tmp_path / "hf", SOURCE)
    assert not (tmp_path / "hf").exists()


def test_an_export_keeps_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="--output"):
        export.export(tmp_path / "step-1", tmp_path, SOURCE)
