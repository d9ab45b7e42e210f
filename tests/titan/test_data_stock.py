"""torchtitan's own datasets, read by its own loader with the tokenizers of the project."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.titan.data_corpus import build, write_jsonl
from torchtitan_ext.data import loader
from torchtitan_ext.data.loader import PackedLoader, ValidationLoader


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torch's DataLoader
@pytest.mark.parametrize("positions", [False, True])
def test_documents_follow_without_begin_tokens(
    positions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "data.jsonl", [{"text": letter * 3} for letter in "abcdefgh"])
    config = PackedLoader.Config(dataset="c4_test", dataset_path=str(folder), positions=positions)
    one = build(config, batch=1, seq_len=6)
    inputs, labels = next(iter(one))
    assert inputs["input"].tolist() == [[*b"aaabbb"]]
    assert labels.tolist() == [[*b"aa", 256, *b"bb", 256]]
    # Where documents see each other, so does the order of their tokens.
    assert inputs.get("positions", labels).tolist() == (
        [[0, 1, 2, 0, 1, 2]] if positions else labels.tolist()
    )
    other = build(config, batch=1, seq_len=6)
    other.load_state_dict(one.state_dict())
    assert next(iter(other))[0]["input"].tolist() == [[*b"cccddd"]]


@pytest.mark.parametrize(
    ("training", "validation", "freq", "message"),
    [
        ("fineweb-edu", "stdlib", 1, r"^dataloader\.dataset: found 'fineweb-edu', expected one of"),
        (
            "stdlib",
            "c4-val",
            1,
            r"^validator\.dataloader\.dataset: found 'c4-val', expected one of",
        ),
        ("stdlib", "packed", 1, r"^validator\.dataloader\.dataset_path: found none"),
        ("stdlib", "stdlib", 0, r"^validator\.freq: found 0"),
    ],
)
def test_what_cannot_be_read_is_named(
    training: str, validation: str, freq: int, message: str
) -> None:
    validator = SimpleNamespace(
        enable=True, freq=freq, dataloader=ValidationLoader.Config(dataset=validation)
    )
    config = SimpleNamespace(dataloader=PackedLoader.Config(dataset=training), validator=validator)
    with pytest.raises(ValueError, match=message):
        loader.validate(config)
    config.dataloader.dataset, validator.enable = "stdlib", False
    loader.validate(config)
