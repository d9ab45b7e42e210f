"""Tokenizers from files, as pre-training needs them, and of bytes."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext import openai_public
from transformers.convert_slow_tokenizer import TikTokenConverter

from tests.titan.data_corpus import BPE_SIZE, END, TURN, bpe_folder
from torchtitan_ext.data.tokenizers import ByteTokenizer, HFTokenizer, TiktokenTokenizer

BPE = "bpe.tiktoken"


@functools.cache
def tokenizer(kind: str) -> Any:
    if kind == "byte":
        return ByteTokenizer()
    if kind == "hf":
        return HFTokenizer(str(bpe_folder()))
    return TiktokenTokenizer(str(bpe_folder() / BPE))


@pytest.mark.parametrize("kind", ["byte", "hf", "tiktoken"])
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


def texts() -> list[str]:
    """A thousand random texts: words, numbers, contractions, white space, any character."""
    draw = random.Random(0)
    pieces = ["self.", "return", " the", "I'LL", "don't", "\r\n", "  \n", "\t", "12345", "...", END]
    return [
        "".join(
            draw.choice(pieces) if draw.random() < 0.7 else chr(draw.randrange(1, 0xD800))
            for _ in range(draw.randrange(40))
        )
        for _ in range(1000)
    ]


@pytest.mark.parametrize("name", ["", "cl100k_base", "o200k_base"])
def test_tokens_are_those_of_tiktoken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(bpe_folder() / BPE)
    ranks = load_tiktoken_bpe(path)
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    if name:
        constants = openai_public.ENCODING_CONSTRUCTORS[name]()
        special, pattern = constants["special_tokens"], constants["pat_str"]
    else:
        special = {"<|end_of_text|>": BPE_SIZE + 1, "<|eot_id|>": BPE_SIZE + 9}
        special["<|reserved_special_token_247|>"] = BPE_SIZE + 255
        pattern = TikTokenConverter().pattern
    stock = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    ours = TiktokenTokenizer("" if name else path, name)
    assert [ours.encode(text) for text in texts()] == [stock.encode_ordinary(t) for t in texts()]
    assert {token: ours.encoding.encode_single_token(token) for token in special} == special
    assert ours.get_vocab_size() == max(special.values()) + 1
    assert ours.eos_id == special.get(END, BPE_SIZE + 1)
    assert ours.decode([*b"a\xff"]) == stock.decode([*b"a\xff"])  # which is no UTF-8


@pytest.mark.parametrize(
    ("name", "make", "end"),
    [
        ("tokenizer.json", HFTokenizer, TURN),
        (BPE, lambda path, eos="": TiktokenTokenizer(f"{path}/{BPE}", "", eos), "<|eot_id|>"),
    ],
)
def test_an_identity_is_that_of_the_file_and_the_end_token(
    name: str, make: Callable[..., Any], end: str, tmp_path: Path
) -> None:
    for file in (name, "tokenizer_config.json"):
        shutil.copy(bpe_folder() / file, tmp_path / file)
    before = make(str(tmp_path)).identity
    assert before == make(str(bpe_folder())).identity
    assert make(str(tmp_path), end).identity != before
    content = (tmp_path / name).read_bytes()
    changed = content.replace(b" 599\n", b" 5990\n")
    (tmp_path / name).write_bytes(changed.replace(b'_merges": true', b'_merges": false'))
    assert make(str(tmp_path)).identity != before


def test_the_end_token_may_be_another_than_that_of_the_config(tmp_path: Path) -> None:
    other = HFTokenizer(str(bpe_folder()), eos_token=TURN)
    assert other.encode("a", add_eos=True)[-1] == other.eos_id == BPE_SIZE + 2
    shutil.copy(bpe_folder() / "tokenizer.json", tmp_path)
    assert HFTokenizer(str(tmp_path / "tokenizer.json"), END).eos_id == BPE_SIZE
