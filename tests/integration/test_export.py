"""Export to Hugging Face's format, on tiny models and offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.distributed.checkpoint as dcp
import transformers

from tests.titan.data_corpus import bpe_folder
from torchtitan_ext import CheckpointWriter
from torchtitan_ext.config import settings
from torchtitan_ext.data.tokenizers import ByteTokenizer, HFTokenizer
from torchtitan_ext.plugin import models
from torchtitan_ext.plugin.metrics import run_config
from torchtitan_ext.runs.run_files import RunFiles
from torchtitan_ext.tools import export

# These packages warn of one another's deprecations, at import and in use.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def tiny_model(name: str, *, fuse_qkv: bool = False) -> Any:
    """Weights far larger than the first ones, so that every one of them shows in the logits."""
    torch.manual_seed(0)
    spec = models.spec(models.Model(name=name, flavor="tiny", fuse_qkv=fuse_qkv))
    model: Any = spec.model.build()
    with torch.no_grad():
        model.init_states()
        for parameter in model.parameters():
            noise = 0.3 * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return model


def save(model: Any, folder: Path, name: str, assets: str = "", **tokenizer: str) -> Path:
    """A checkpoint in a run's folder, among other state, as a run leaves it."""
    checkpoint = folder / "checkpoint" / "step-7"
    state = {**model.state_dict(), "train_state": {"step": torch.tensor(7)}}
    dcp.save(state, storage_writer=CheckpointWriter(checkpoint), no_dist=True)
    config = {
        "hf_assets_path": assets,
        "model": {"name": name, "flavor": "tiny"},
        "tokenizer": {"kind": "byte", **tokenizer},
        "optimizer": {"name": "AMO"},
    }
    (folder / "run.json").write_text(json.dumps(config))
    return checkpoint


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.slow
@pytest.mark.parametrize("fuse_qkv", [False, True])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_logits_survive_the_export(tmp_path: Path, name: str, fuse_qkv: bool) -> None:
    model = tiny_model(name, fuse_qkv=fuse_qkv)
    checkpoint = save(model, tmp_path, name)
    export.export(checkpoint, tmp_path / "hf", export.find_source(checkpoint))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert theirs.config.tie_word_embeddings == (name == "qwen3")
    assert theirs.config.eos_token_id == ByteTokenizer().eos_id
    # Long enough for the rotary embedding's scaled frequencies to matter.
    tokens = torch.randint(0, 257, (2, 300), generator=torch.Generator().manual_seed(1))
    expected = logits(model, tokens)
    assert expected.std() > 1  # the tolerance is one of numbers of this size
    # Rotary embeddings in complex against real arithmetic: 2e-5 in float32.
    torch.testing.assert_close(logits(theirs, tokens), expected, rtol=0, atol=1e-4)
    # The tolerance would notice a rotary embedding of another base.
    theirs.model.rotary_emb.inv_freq.mul_(1.001)
    assert (logits(theirs, tokens) - expected).abs().max() > 1e-3


@pytest.mark.slow
def test_the_tokenizer_is_the_one_of_the_run(tmp_path: Path) -> None:
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "z": 2}, unk_token="a")
    folder = tmp_path / "tokenizer"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="b"
    ).save_pretrained(folder)
    model = tiny_model("llama3")
    # By its own path; without one in the folder of the assets; with an end token of the run's.
    cases: list[tuple[str, dict[str, str], int]] = [
        ("nowhere", {"path": str(folder / "tokenizer.json")}, 1),
        (str(folder), {}, 1),
        ("nowhere", {"path": str(folder), "eos_token": "z"}, 2),
    ]
    for index, (assets, section, eos_id) in enumerate(cases):
        checkpoint = save(model, tmp_path / str(index), "llama3", assets, kind="hf", **section)
        output = tmp_path / str(index) / "hf"
        export.export(checkpoint, output, export.find_source(checkpoint))
        assert transformers.AutoTokenizer.from_pretrained(output).encode("z") == [2]
        assert json.loads((output / "config.json").read_text())["eos_token_id"] == eos_id


def test_tokens_are_those_of_training_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tokenizer that, as Llama's, puts a token before each text: training reads none."""
    monkeypatch.chdir(bpe_folder().parent)
    texts = ["def f(x):\n    return x", " naïve 北京", "", "a  b"]
    stock = transformers.AutoTokenizer.from_pretrained(bpe_folder().name)
    assert stock.encode("a") != stock.encode("a", add_special_tokens=False)
    config = settings.parse(["--model.flavor=tiny", f"--hf_assets_path={bpe_folder().name}"])
    checkpoint = save(tiny_model("llama3"), tmp_path, "llama3")
    RunFiles(tmp_path).start(1, run_config(config.to_dict()))
    monkeypatch.chdir(tmp_path)
    export.export(checkpoint, tmp_path / "hf", export.find_source(checkpoint))
    ours = HFTokenizer(str(bpe_folder()))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert [theirs(text).input_ids for text in texts] == [ours.encode(text) for text in texts]


def test_byte_tokenizers_agree() -> None:
    ours, theirs = ByteTokenizer(), export.byte_tokenizer()
    for text in ("", " leading, double  spaces\n\n\ttabs ", "naïve 北京 🙂", "a<|eos|>b"):
        tokens = theirs.encode(text, add_special_tokens=False)
        assert tokens == ours.encode(text)
        assert theirs.decode(tokens) == text
    assert theirs.eos_token_id == ours.eos_id


def test_what_cannot_be_exported_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    checkpoint, output = save(tiny_model("llama3"), tmp_path, "llama3"), tmp_path / "hf"
    source = export.find_source(checkpoint)
    other = source._replace(model=models.Model(name="qwen3", flavor="tiny"))
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.k_norm"):
        export.export(checkpoint, output, other)
    (data,) = checkpoint.glob("*.distcp")
    data.write_bytes(b"\x80\x04" + bytes(data.stat().st_size - 2))
    with pytest.raises(ValueError, match=f"checkpoint {checkpoint}"):
        export.export(checkpoint, output, source)
    assert not output.exists()
    with pytest.raises(ValueError, match="--output"):
        export.export(checkpoint, tmp_path, source)  # which holds files of others
