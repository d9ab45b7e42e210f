"""torchtitan's own datasets, read by its own loaders with the tokenizers of the project."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchtitan_ext

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
    torchtitan_ext.register()

from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader

from tests.unit.data_corpus import write_jsonl
from torchtitan_ext.data.loader import build_dataloader
from torchtitan_ext.data.tokenizers import ByteTokenizer
from torchtitan_ext.plugin import settings


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torch's DataLoader
@pytest.mark.parametrize("build", [build_dataloader, build_text_validation_dataloader])
def test_documents_follow_with_end_tokens_alone(
    build: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "data.jsonl", [{"text": letter * 3} for letter in "abcdefgh"])
    options = ["--validation.enable", "--data.tokenizer=byte"]
    for section in ("training", "validation"):
        options += [f"--{section}.{option}" for option in ("dataset=c4_test", "seq_len=7")]
        options += [f"--{section}.dataset_path={folder}", f"--{section}.local_batch_size=1"]
    tokenizer = ByteTokenizer()
    inputs, labels = next(iter(build(1, 0, tokenizer, settings.parse(options))))
    eos = tokenizer.eos_id
    assert inputs["input"].tolist() == [[*b"aaa", eos, *b"bbb"]]
    assert labels.tolist() == [[*b"aa", eos, *b"bbb", eos]]


def test_an_unknown_dataset_is_named_where_it_is_read(tmp_path: Path) -> None:
    config = settings.parse(["--training.dataset=c4_test", "--data.tokenizer=byte"])
    config.training.dataset = "fineweb-edu"
    with pytest.raises(
        ValueError, match=r"training\.dataset: found 'fineweb-edu', expected one of"
    ):
        build_dataloader(1, 0, ByteTokenizer(), config)
