"""Tokenizers from files, as pre-training needs them, and of bytes."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext.data.files import find_files
from torchtitan_ext.data.tokenizers import ByteTokenizer, HFTokenizer, Tokenizer, identity

SIZE = 600
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@functools.cache
def trained() -> str:
    """A small byte-level BPE as `tokenizer.json`, which like Llama's puts a token before a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=SIZE, initial_alphabet=alphabet, show_progress=False)
    library = find_files("stdlib").urls[::40]
    texts = [Path(file).read_text(errors="ignore")[:20_000] for file in library]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], SIZE)]
    )
    return str(tokenizer.to_str())


@functools.cache
def assets() -> str:
    path = Path(tempfile.mkdtemp())
    (path / "tokenizer.json").write_text(trained())
    config = {"eos_token": SPECIAL[0], "bos_token": SPECIAL[0]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


@functools.cache
def tokenizer() -> HFTokenizer:
    return HFTokenizer(assets())


@settings(max_examples=60, deadline=None)  # the first example pays for the vocabulary
@given(text=st.text(max_size=60) | st.sampled_from(["<|endoftext|>a<|im_end|>", " \n", "return x"]))
def test_text_survives_and_no_special_token_comes_out_of_it(text: str) -> None:
    tokens = tokenizer().encode(text, add_eos=True)
    assert tokens[-1] == tokenizer().eos_id == SIZE
    assert max(tokens[:-1], default=0) < SIZE
    assert tokenizer().decode(tokens[:-1]) == text
    # torchtitan's own loaders ask for a begin token, and documents here have none.
    assert tokenizer().encode(text, add_bos=True) == tokens[:-1]


def test_the_end_token_is_that_of_the_config_or_the_one_asked_for() -> None:
    other = HFTokenizer(assets(), eos_token="<|im_end|>")
    assert other.eos_id == SIZE + 2
    assert other.encode("a", add_eos=True)[-1] == SIZE + 2
    assert identity(other) != identity(tokenizer())
    with pytest.raises(ValueError, match=r"tokenizer\.eos_token: found '<eos>'"):
        HFTokenizer(assets(), eos_token="<eos>")


def test_a_folder_without_an_end_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained())
    with pytest.raises(ValueError, match=r"tokenizer\.eos_token: found None"):
        HFTokenizer(str(tmp_path))
    assert HFTokenizer(str(tmp_path / "tokenizer.json"), "<|endoftext|>").eos_id == SIZE


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.path:"):
        HFTokenizer(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("kind", ["hf", "byte"])
def test_a_config_selects_the_tokenizer(kind: Any, tmp_path: Path) -> None:
    classes = {"hf": HFTokenizer, "byte": ByteTokenizer}
    for path, assets_path in (("", assets()), (assets(), str(tmp_path))):
        config = Tokenizer.Config(kind=kind, path=path)
        assert type(config.build(tokenizer_path=assets_path)) is classes[kind]
