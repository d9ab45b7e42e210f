"""Tokenizers: torchtitan's of a Hugging Face model, and one token per byte, built in code."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Literal

from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

EOS = "<|eos|>"
BYTE_VOCAB_SIZE = 257
"""256 bytes and the end of a document."""


class Tokenizer(BaseTokenizer):
    """A tokenizer of the config."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """``[tokenizer]``: its kind, and the place of its files."""

        kind: Literal["hf", "byte"] = "hf"
        """``hf`` reads ``tokenizer.json``; ``byte`` (one token per byte) is built in code."""

        path: str = ""
        """Folder or file of the tokenizer; by default ``hf_assets_path``."""

        eos_token: str = ""
        """
        Token after each document, such as ``<|endoftext|>``. The default is the one that
        ``tokenizer_config.json`` names, which for a chat model is the end of a turn.
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
            return HFTokenizer(self.path or tokenizer_path, self.eos_token)


class ByteTokenizer(BaseTokenizer):
    """One token for each byte of the UTF-8 text, and one for the end of a document.

    Needs no files. Token ``i < 256`` is byte ``i``, token 256 is :attr:`eos_id`; the text of the
    end token has no special meaning within a document.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bos_id: int | None = None
        self.eos_id: int = BYTE_VOCAB_SIZE - 1

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """The bytes of ``text``, followed by the end token if ``add_eos``."""
        tokens = [*text.encode()]
        return [*tokens, self.eos_id] if add_eos else tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``; bytes that are not UTF-8 become U+FFFD."""
        parts = (EOS.encode() if token == self.eos_id else bytes([token]) for token in tokens)
        return b"".join(parts).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Number of tokens."""
        return BYTE_VOCAB_SIZE


class HFTokenizer(HuggingFaceTokenizer):
    """A Hugging Face tokenizer as pre-training needs it.

    It adds no begin token (Llama's ``tokenizer.json`` puts one before every text), and the text of
    a special token has no special meaning within a document.

    Args:
        path: Folder with ``tokenizer.json`` (or ``vocab.json`` and ``merges.txt``), or the file.
        eos_token: Special token after each document; empty for that of ``tokenizer_config.json``.

    Attributes:
        digest: Hexadecimal digest of the vocabulary, the merges and the end token.

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
        content = f"{self.tokenizer.to_str()}\0{self.eos_id}"
        self.digest = hashlib.sha256(content.encode()).hexdigest()[:16]

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """The tokens of ``text``, followed by the end token if ``add_eos``.

        ``add_bos``, with which torchtitan's own loaders call, adds nothing: documents are packed
        without a begin token.
        """
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*tokens, self.eos_id] if add_eos else tokens


def identity(tokenizer: BaseTokenizer) -> str:
    """Name of a tokenizer: its class, its size, and the digest of its files if it has any."""
    name = f"{type(tokenizer).__name__}-{tokenizer.get_vocab_size()}"
    digest = getattr(tokenizer, "digest", None)
    return name if digest is None else f"{name}-{digest}"
