"""Tokenizers from files: Llama's and Qwen's formats, against each other on one vocabulary."""

from __future__ import annotations

import base64
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext.data.files import find_files
from torchtitan_ext.data.tokenizers import (
    FAMILIES,
    ByteTokenizer,
    HFTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    identity,
)

NAMES = list(FAMILIES)
NUM_RANKS = 600


@functools.cache
def trained(name: str) -> str:
    """A small byte-level BPE as `tokenizer.json`, with the cutting and special tokens of a family.

    Like Llama's it puts a begin token before every text, unless told otherwise.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from tokenizers.trainers import BpeTrainer

    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    if name == "qwen.tiktoken":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(family.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=NUM_RANKS, initial_alphabet=alphabet, show_progress=False)
    library = find_files("stdlib").urls[::40]
    texts = [Path(file).read_text(errors="ignore")[:20_000] for file in library]
    tokenizer.train_from_iterator([*texts, "1234 12 2024 naïve 中文 été" * 50], trainer)
    tokenizer.add_special_tokens(list(family.special_tokens))
    begin = family.special_tokens[0]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return str(tokenizer.to_str())


def characters() -> dict[str, int]:
    """The byte for which each character of a byte-level alphabet stands."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(others)}


@functools.cache
def assets(name: str) -> Path:
    """A folder with one vocabulary as `tokenizer.json` and as a file of ranks."""
    path = Path(tempfile.mkdtemp())
    (path / "tokenizer.json").write_text(trained(name))
    config = {"eos_token": FAMILIES[name].eos, "bos_token": FAMILIES[name].special_tokens[0]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    vocab = json.loads(trained(name))["model"]["vocab"]
    byte_of = characters()
    lines = [
        f"{base64.b64encode(bytes(byte_of[c] for c in token)).decode()} {rank}"
        for token, rank in sorted(vocab.items(), key=lambda item: item[1])
    ]
    (path / name).write_text("\n".join(lines) + "\n")
    return path


@functools.cache
def both(name: str) -> tuple[TiktokenTokenizer, HFTokenizer]:
    return TiktokenTokenizer(str(assets(name))), HFTokenizer(str(assets(name)))


SAMPLES = [
    "Hello world, it's 12345 o'clock!  \n\n\tdef f(x):\r\n    return x ",
    "cafe\u0301 \u00e9t\u00e9 \u4e2d\u6587\u5b57\u7b26 \U0001f642\u200d \u200b",
    "<|endoftext|> <|end_of_text|><|im_start|> <|begin_of_text|>",
    "",
    " \t\n ",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", SAMPLES)
def test_both_loaders_give_the_same_tokens(name: str, text: str) -> None:
    by_ranks, by_json = both(name)
    tokens = by_ranks.encode(text, add_eos=True)
    assert by_json.encode(text, add_eos=True) == tokens
    assert by_ranks.decode(tokens[:-1]) == by_json.decode(tokens[:-1])
    assert by_ranks.eos_id == by_json.eos_id == tokens[-1]
    assert max(tokens[:-1], default=0) < NUM_RANKS  # no special token comes out of a text


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)  # the first example pays for the vocabulary
@given(text=st.text(max_size=60))
def test_both_loaders_give_the_same_tokens_of_any_text(name: str, text: str) -> None:
    by_ranks, by_json = both(name)
    assert by_ranks.encode(text) == by_json.encode(text)


@pytest.mark.parametrize("name", NAMES)
def test_merges_and_digits_are_those_of_the_family(name: str) -> None:
    by_ranks, _ = both(name)
    assert len(by_ranks.encode("return")) < len("return")
    digits = {"tokenizer.model": 1, "qwen.tiktoken": 2}[name]
    assert len(by_ranks.encode("12")) == digits
    # Qwen composes characters, Llama takes them as they are.
    composed = by_ranks.decode(by_ranks.encode("e\u0301"))
    assert composed == {"tokenizer.model": "e\u0301", "qwen.tiktoken": "\u00e9"}[name]


def test_special_tokens_are_numbered_as_published() -> None:
    llama, qwen = both("tokenizer.model")[0], both("qwen.tiktoken")[0]
    # With the published 128,000 and 151,643 ranks these are 128,001 of 128,256, and 151,643.
    assert (llama.eos_id, llama.get_vocab_size()) == (NUM_RANKS + 1, NUM_RANKS + 256)
    assert qwen.eos_id == NUM_RANKS


def test_the_end_token_is_that_of_the_config_or_the_one_asked_for() -> None:
    folder = str(assets("qwen.tiktoken"))
    for cls in (TiktokenTokenizer, HFTokenizer):
        other = cls(folder, eos_token="<|im_end|>")
        assert other.eos_id == NUM_RANKS + 2
        assert other.encode("a", add_eos=True)[-1] == NUM_RANKS + 2
        assert identity(other) != identity(cls(folder))
        with pytest.raises(ValueError, match=r"tokenizer\.eos_token: found '<eos>'"):
            cls(folder, eos_token="<eos>")
        # torchtitan's own loaders ask for a begin token, and documents here have none.
        assert other.encode("a", add_bos=True) == other.encode("a")


def test_a_folder_without_an_end_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained("qwen.tiktoken"))
    with pytest.raises(ValueError, match=r"tokenizer\.eos_token: found None"):
        HFTokenizer(str(tmp_path))
    assert HFTokenizer(str(tmp_path / "tokenizer.json"), "<|endoftext|>").eos_id == NUM_RANKS


def test_files_that_make_no_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.path: found none"):
        TiktokenTokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"tokenizer\.path:"):
        HFTokenizer(str(tmp_path / "nowhere"))
    file = tmp_path / "tokenizer.model"
    file.write_bytes(b"\x0a\x0b sentence\xff")
    with pytest.raises(ValueError, match=r"tokenizer\.model, line \d: expected a token in base64"):
        TiktokenTokenizer(str(file))
    file.write_bytes(b"YQ== 0\nYg== 2\n")
    with pytest.raises(ValueError, match="expected ranks 0, 1, 2"):
        TiktokenTokenizer(str(file))
    (tmp_path / "qwen.tiktoken").write_bytes(b"")
    with pytest.raises(ValueError, match=r"found tokenizer\.model and qwen\.tiktoken"):
        TiktokenTokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["hf", "tiktoken", "byte"])
def test_a_config_selects_the_tokenizer(kind: Any, tmp_path: Path) -> None:
    folder = str(assets("tokenizer.model"))
    classes = {"hf": HFTokenizer, "tiktoken": TiktokenTokenizer, "byte": ByteTokenizer}
    for path, assets_path in (("", folder), (folder, str(tmp_path))):
        config = Tokenizer.Config(kind=kind, path=path)
        assert type(config.build(tokenizer_path=assets_path)) is classes[kind]
