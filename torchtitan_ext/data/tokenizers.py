"""Tokenizers: torchtitan's of a Hugging Face model, tiktoken's, and one token per byte.

Documents have no begin token. Each ends with :attr:`eos_id`, and the text of a special token has no
special meaning within a document.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tiktoken
from tiktoken_ext import openai_public
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

EOS = "<|eos|>"
BYTE_VOCAB_SIZE = 257
"""256 bytes and the end of a document."""

Encoding = Literal["llama3", "gpt2", "cl100k_base", "o200k_base"]

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *("<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
)
"""Special tokens of Llama 3.1 in the order of their numbers, which follow those of the BPE file.

Pattern and names are those of Meta's package ``llama-models`` and of ``tokenizer.json``.
"""


class Tokenizer(BaseTokenizer):
    """A tokenizer of the config."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """``[tokenizer]``: its kind, and the place of its files."""

        kind: Literal["hf", "tiktoken", "byte"] = "hf"
        """
        ``hf`` reads ``tokenizer.json``; ``tiktoken`` reads a BPE file, or has an ``encoding`` of
        its own; ``byte`` (one token per byte) is built in code.
        """

        path: str = ""
        """
        Folder or file of the tokenizer; by default ``hf_assets_path``. For ``tiktoken`` a BPE file,
        ``*.tiktoken`` or Llama's ``tokenizer.model``.
        """

        encoding: Encoding = "llama3"
        """
        Pattern and special tokens of ``tiktoken``. ``gpt2``, ``cl100k_base`` and ``o200k_base``
        need no ``path``: tiktoken reads their BPE files from its cache, or downloads them.
        """

        eos_token: str = ""
        """
        Token after each document, such as ``<|endoftext|>``. The default is the one that
        ``tokenizer_config.json`` names, which for a chat model is the end of a turn; for
        ``tiktoken`` it is ``<|endoftext|>``, or Llama's ``<|end_of_text|>``.
        """

        def build(self, *, tokenizer_path: str) -> BaseTokenizer:
            """Build the tokenizer.

            Args:
                tokenizer_path: Folder or file to read if ``path`` is empty.

            Raises:
                ValueError: Its files do not make one.
            """
            if self.kind == "byte":
                return ByteTokenizer()
            if self.kind == "tiktoken":
                return TiktokenTokenizer(self.path, self.encoding, self.eos_token)
            return HFTokenizer(self.path or tokenizer_path, self.eos_token)


class ByteTokenizer(BaseTokenizer):
    """One token for each byte of the UTF-8 text, and one for the end of a document.

    Needs no files. Token ``i < 256`` is byte ``i``, token 256 is :attr:`eos_id`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bos_id: int | None = None
        self.eos_id: int = BYTE_VOCAB_SIZE - 1

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """The bytes of ``text``, followed by the end token if ``add_eos``."""
        tokens = [*text.encode()]
        return [*tokens, self.eos_id] if add_eos else tokens

    def encode_documents(self, texts: Sequence[str]) -> list[Any]:
        """The tokens of each document, (num_tokens,) uint16, its end token included."""
        bytes_by_text = (np.frombuffer(text.encode(), np.uint8) for text in texts)
        return [np.append(data, np.uint16(self.eos_id)) for data in bytes_by_text]

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``; bytes that are not UTF-8 become U+FFFD."""
        parts = (EOS.encode() if token == self.eos_id else bytes([token]) for token in tokens)
        return b"".join(parts).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Number of tokens."""
        return BYTE_VOCAB_SIZE


class HFTokenizer(HuggingFaceTokenizer):
    """A Hugging Face tokenizer as pre-training needs it.

    It adds no begin token; Llama's ``tokenizer.json`` puts one before every text.

    Args:
        path: Folder with ``tokenizer.json`` (or ``vocab.json`` and ``merges.txt``), or the file.
        eos_token: Special token after each document; empty for that of ``tokenizer_config.json``.

    Attributes:
        digest: Hexadecimal digest of the files and the end token.

    Raises:
        ValueError: The files are missing, or the token does not exist.
    """

    def __init__(self, path: str, eos_token: str = "") -> None:
        folder = Path(path).expanduser()
        folder = folder.parent if folder.is_file() else folder
        try:
            super().__init__(tokenizer_path=str(folder))
        except FileNotFoundError as error:
            raise ValueError(f"tokenizer.path: {error}") from None
        # torchtitan overlooks an end token that is the begin token too.
        name = eos_token or self._get_token_from_config(self._hf_config or {}, "eos_token")
        self.eos_token = name
        eos_id = self.tokenizer.token_to_id(name) if name else None
        if eos_id is None:
            raise ValueError(f"tokenizer.eos_token: found {name!r}, expected a token of {folder}")
        self.eos_id: int = eos_id
        self.tokenizer.encode_special_tokens = True
        names = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")
        files = [folder / name for name in names if (folder / name).is_file()]
        # torchtitan reads the others only where there is no tokenizer.json.
        contents = [file.read_bytes() for file in files[: 1 if files[0].name == names[0] else None]]
        self.digest = _digest(*contents, str(self.eos_id).encode())

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """The tokens of ``text``, followed by the end token if ``add_eos``.

        ``add_bos``, with which torchtitan's own loaders call, adds nothing: documents are packed
        without a begin token.
        """
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*tokens, self.eos_id] if add_eos else tokens

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each document, its end token included."""
        batch = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[*encoding.ids, self.eos_id] for encoding in batch]


class TiktokenTokenizer(BaseTokenizer):
    """A tokenizer of ``tiktoken``.

    Args:
        path: BPE file: lines of a token in base64 and its number; empty for that of ``encoding``.
        encoding: Pattern and special tokens.
        eos_token: Special token after each document; empty for the end of a text.

    Attributes:
        encoding: ``tiktoken``'s own object.
        digest: Hexadecimal digest of tokens, pattern, special tokens and end token.

    Raises:
        ValueError: The file is missing or no BPE file, or the token does not exist.
    """

    def __init__(self, path: str, encoding: Encoding, eos_token: str = "") -> None:
        super().__init__()
        ranks = _read_bpe(path) if path or encoding == "llama3" else None
        arguments = _encoding_arguments(encoding, ranks)
        special = arguments["special_tokens"]
        name = eos_token or ("<|end_of_text|>" if encoding == "llama3" else "<|endoftext|>")
        if name not in special:
            raise ValueError(
                f"tokenizer.eos_token: found {name!r}, expected one of {', '.join(special)}"
            )
        self.encoding = tiktoken.Encoding(**arguments)
        self.bos_id: int | None = None
        self.eos_id: int = special[name]
        content = (sorted(arguments["mergeable_ranks"].items()), arguments["pat_str"], special)
        self.digest = _digest(repr((*content, self.eos_id)).encode())

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """The tokens of ``text``, followed by the end token if ``add_eos``."""
        tokens = self.encoding.encode_ordinary(text)
        return [*tokens, self.eos_id] if add_eos else tokens

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each document, its end token included."""
        batch = self.encoding.encode_ordinary_batch(list(texts))
        return [[*tokens, self.eos_id] for tokens in batch]

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode(tokens)

    def get_vocab_size(self) -> int:
        """Number of tokens: one more than the largest."""
        return self.encoding.n_vocab


def _read_bpe(path: str) -> dict[bytes, int]:
    # tiktoken's own reader keeps a copy of each file, and does not see when the file changes.
    try:
        lines = [line.split() for line in Path(path).expanduser().read_bytes().splitlines()]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer.path: found {path!r}, expected a BPE file of tiktoken: {error}"
        ) from None


def _encoding_arguments(encoding: Encoding, ranks: dict[bytes, int] | None) -> dict[str, Any]:
    """Arguments of ``tiktoken.Encoding``; without ``ranks`` from tiktoken's cache."""
    if encoding == "llama3":
        assert ranks is not None
        special = {name: len(ranks) + i for i, name in enumerate(LLAMA3_SPECIAL_TOKENS)}
        return {
            "name": encoding,
            "pat_str": LLAMA3_PATTERN,
            "mergeable_ranks": ranks,
            "special_tokens": special,
        }
    constructor = openai_public.ENCODING_CONSTRUCTORS[encoding]
    if ranks is not None:  # The same function, which reads this file instead of its own.
        readers = ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks")
        replaced = {**vars(openai_public), **dict.fromkeys(readers, lambda *_, **__: ranks)}
        constructor = types.FunctionType(constructor.__code__, replaced)
    try:
        arguments: dict[str, Any] = constructor()
    except OSError as error:
        raise ValueError(
            f"tokenizer.encoding: found {encoding!r}, whose BPE file is neither in tiktoken's "
            f"cache nor can be downloaded, expected it in TIKTOKEN_CACHE_DIR: {error}"
        ) from None
    arguments.pop("explicit_n_vocab", None)  # A file may have fewer tokens.
    return arguments


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def identity(tokenizer: BaseTokenizer) -> str:
    """Name of a tokenizer: its class, its size, and the digest of its files if it has any."""
    name = f"{type(tokenizer).__name__}-{tokenizer.get_vocab_size()}"
    digest = getattr(tokenizer, "digest", None)
    return name if digest is None else f"{name}-{digest}"
