"""What torchtitan's own entry point finds under ``--module torchtitan_ext --config NAME``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import ConfigManager

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def parse(name: str | Path, *options: str) -> Any:
    return ConfigManager().parse_args(
        ["--module", "torchtitan_ext", "--config", str(name), *options]
    )


def test_a_config_is_found_by_name_and_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = CONFIGS / "debug_llama3.toml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.toml").write_text(f"extends = '{file}'\n")
    monkeypatch.chdir(tmp_path)
    for name in ("debug_llama3", file, "mine", "configs/mine.toml"):
        assert parse(name).description == "debug llama3"


def test_torchtitans_options_are_laid_over_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--training.steps", "5", "--dataloader.seed=3", "--optimizer.muon.momentum=0.5")
    monkeypatch.setattr("sys.argv", ["train", *options])
    config = parse("debug_llama3", *options)
    assert (config.training.steps, config.training.seq_len, config.dataloader.seed) == (5, 128, 3)
    assert config.optimizer.muon.momentum == 0.5
    monkeypatch.setattr("sys.argv", ["train", "--optimizer.amo.momentum=0.5"])
    with pytest.raises(ValueError, match=r"amo\.momentum: .* expected optimizer\.muon\.momentum"):
        parse("debug_llama3", *options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3_17b", "--config: found 'qwen3_17b', expected .*; did you mean 'qwen3_1.7b'?"),
        ("other", "--config: found 'other', expected a TOML file .*; known: cpt_qwen3_0.6b, "),
        ("none/at_all.toml", "--config: cannot read none/at_all.toml"),
    ],
)
def test_a_config_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(name)
