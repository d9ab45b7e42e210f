"""Tokenizers from files, as pre-training needs them, and of bytes."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from tests.titan.data_corpus import BPE_SIZE, END, TURN, bpe_folder
from torchtitan_ext.data.tokenizers import ByteTokenizer, HFTokenizer, TiktokenTokenizer


@functools.cache
def tokenizer(kind: str) -> Any:
    return ByteTokenizer() if kind == "byte" else HFTokenizer(str(bpe_folder()))


@pytest.mark.parametrize("kind", ["byte", "hf"])
@settings(max_examples=40, deadline=None)  # the first example pays for the vocabulary
@given(text=st.text(max_size=60) | st.sampled_from([f"{END}a{TURN}", " \n", "return x"]))
def test_text_survives_and_no_special_token_comes_out_of_it(kind: str, text: str) -> None:
    one = tokenizer(kind)
    tokens = one.encode(text, add_eos=True)
    assert tokens[-1] == one.eos_id
    assert max(tokens[:-1], default=0) < (BPE_SIZE if kind != "byte" else 256)
    assert one.decode(tokens[:-1]) == text
    # torchtitan's own loaders ask for a begin token, and documents here have none.
    assert one.encode(text, add_bos=True) == tokens[:-1]
    documents = [list(document) for document in one.encode_documents([text, ""])]
    assert documents == [tokens, [one.eos_id]]


@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base"])
def test_tokens_are_those_of_tiktoken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_alone = {bytes([byte]): byte for byte in range(256)}
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: bytes_alone)
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    stock, ours = tiktoken.get_encoding(name), TiktokenTokenizer(name)
    for text in (f"self.\r\n I'LL  return 12345 {END}", "\t...\U0001f642"):
        assert ours.encode(text) == stock.encode_ordinary(text)
    assert ours.get_vocab_size() == stock.n_vocab
    assert ours.eos_id == stock.eot_token
    assert ours.decode([*b"a\xff"]) == stock.decode([*b"a\xff"])  # which is no UTF-8
    last = TiktokenTokenizer(name, "<|endofprompt|>")
    assert len({ours.identity, last.identity, ByteTokenizer().identity}) == 3


def test_an_identity_is_that_of_the_file_and_the_end_token(tmp_path: Path) -> None:
    shutil.copytree(bpe_folder(), tmp_path, dirs_exist_ok=True)
    before = HFTokenizer(str(tmp_path)).identity
    assert before == HFTokenizer(str(bpe_folder())).identity
    assert HFTokenizer(str(tmp_path), TURN).identity != before
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('_merges": true', '_merges": false'))
    assert HFTokenizer(str(tmp_path)).identity != before


def test_the_end_token_may_be_another_than_that_of_the_config(tmp_path: Path) -> None:
    other = HFTokenizer(str(bpe_folder()), eos_token=TURN)
    assert other.encode("a", add_eos=True)[-1] == other.eos_id == BPE_SIZE + 2
    shutil.copy(bpe_folder() / "tokenizer.json", tmp_path)
    assert HFTokenizer(str(tmp_path / "tokenizer.json"), END).eos_id == BPE_SIZE
