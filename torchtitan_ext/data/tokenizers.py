"""Tokenizers: of files of the Llama and Qwen families, and one token a byte, built in code."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import tiktoken
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

EOS = "<|eos|>"
BYTE_VOCAB_SIZE = 257
"""256 bytes and the end of a document."""


class Tokenizer(BaseTokenizer):
    """A tokenizer of the config."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """``tokenizer``: which one, and where its files are."""

        kind: Literal["hf", "byte", "tiktoken"] = "hf"
        """
        ``hf`` reads ``tokenizer.json``, ``tiktoken`` Llama's ``tokenizer.model`` or Qwen's
        ``qwen.tiktoken``; ``byte`` (one token a byte) is built in code.
        """

        path: str = ""
        """Folder or file of the tokenizer; by default ``hf_assets_path``."""

        eos_token: str = ""
        """
        The token after each document, such as ``<|endoftext|>``. By default the one that
        ``tokenizer_config.json`` names (``hf``; for a chat model that is the end of a turn), or
        that of the family's pre-training (``tiktoken``).
        """

        def build(self, *, tokenizer_path: str) -> BaseTokenizer:
            """The tokenizer; ``tokenizer_path`` is where its files are unless ``path`` says.

            Raises:
                ValueError: If its files do not make one.
            """
            return make_tokenizer(self.kind, self.path or tokenizer_path, self.eos_token)


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
        """The bytes of ``text``, followed by the end token where ``add_eos``."""
        tokens = [*text.encode()]
        return [*tokens, self.eos_id] if add_eos else tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``; bytes that are not UTF-8 become U+FFFD."""
        parts = (EOS.encode() if token == self.eos_id else bytes([token]) for token in tokens)
        return b"".join(parts).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Number of tokens."""
        return BYTE_VOCAB_SIZE


# How text is cut before merging: as published with the two families' tokenizers. They differ in
# the digits that may be merged, three or one.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """What a file of ranks does not say.

    Attributes:
        pattern: Regular expression of the pieces within which bytes are merged.
        special_tokens: Special tokens, numbered after the ranks.
        eos: The one that ends a document in pre-training.
        normalize: What becomes of text before it is cut.
    """

    pattern: str
    special_tokens: tuple[str, ...]
    eos: str
    normalize: Callable[[str], str]


FAMILIES = {
    "tokenizer.model": Family(
        pattern=_PATTERN % "{1,3}",
        # Llama-3.1 names some of the 256; pre-training uses the second alone.
        special_tokens=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            *(f"<|reserved_special_token_{i}|>" for i in range(254)),
        ),
        eos="<|end_of_text|>",
        normalize=str,
    ),
    "qwen.tiktoken": Family(
        pattern=_PATTERN % "",
        special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos="<|endoftext|>",
        normalize=_nfc,
    ),
}
"""By the name of the file: Llama-3.1, and Qwen."""


class TiktokenTokenizer(BaseTokenizer):
    """Llama-3.1's ``tokenizer.model`` or Qwen's ``qwen.tiktoken``.

    Args:
        path: The file, or a folder with one of them.
        eos_token: Special token after each document; by default that of pre-training.

    Attributes:
        digest: Hexadecimal digest of the file and the end token.

    Raises:
        ValueError: If there is no such file or token, or the file is not one of ranks.
    """

    def __init__(self, path: str, eos_token: str = "") -> None:
        file = _find(Path(path).expanduser(), tuple(FAMILIES))
        family = FAMILIES[file.name]
        content = file.read_bytes()
        ranks = read_ranks(content, file)
        special = {token: len(ranks) + i for i, token in enumerate(family.special_tokens)}
        eos = eos_token or family.eos
        if eos not in special:
            raise ValueError(
                f"tokenizer.eos_token: found {eos!r}, expected a special token of {file}"
            )
        super().__init__()
        self.bos_id: int | None = None
        self.eos_id: int = special[eos]
        self.digest = _digest(content, self.eos_id)
        self._normalize = family.normalize
        self._encoding = tiktoken.Encoding(
            name=file.name,
            pat_str=family.pattern,
            mergeable_ranks=ranks,
            special_tokens=special,
            explicit_n_vocab=len(ranks) + len(special),
        )

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """The tokens of ``text``, followed by the end token where ``add_eos``.

        ``add_bos``, with which torchtitan's own loaders call, adds nothing: here documents are
        packed without a begin token, whoever packs them.
        """
        tokens = self._encoding.encode_ordinary(self._normalize(text))
        return [*tokens, self.eos_id] if add_eos else tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``; bytes that are not UTF-8 become U+FFFD."""
        return self._encoding.decode(tokens)

    def get_vocab_size(self) -> int:
        """Number of tokens."""
        return self._encoding.n_vocab


def read_ranks(content: bytes, file: Path) -> dict[bytes, int]:
    """Tokens and their ranks, from lines of a token in base64 and its rank.

    Raises:
        ValueError: If a line is something else, or the ranks are not 0, 1, 2 and so on.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise ValueError(
                f"{file}, line {number}: expected a token in base64 and its rank (a sentencepiece "
                "model is another format)"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ValueError(f"{file}: expected ranks 0, 1, 2 ... of 256 tokens at least")
    return ranks


class HFTokenizer(HuggingFaceTokenizer):
    """A Hugging Face tokenizer as pre-training needs it.

    Nothing is added that was not asked for (Llama's ``tokenizer.json`` puts a begin token before
    every text), and the text of a special token has no special meaning within a document.

    Args:
        path: Folder with ``tokenizer.json`` (or ``vocab.json`` and ``merges.txt``), or the file.
        eos_token: Special token after each document; by default that of
            ``tokenizer_config.json``.

    Attributes:
        digest: Hexadecimal digest of the vocabulary, the merges and the end token.

    Raises:
        ValueError: If the files are missing, or there is no such token.
    """

    def __init__(self, path: str, eos_token: str = "") -> None:
        folder = Path(path).expanduser()
        folder = folder.parent if folder.is_file() else folder
        try:
            super().__init__(tokenizer_path=str(folder))
        except FileNotFoundError as error:
            raise ValueError(f"tokenizer.path: {error}") from None
        # torchtitan overlooks an end token that is the begin token too.
        named = eos_token or self._get_token_from_config(self._hf_config or {}, "eos_token")
        self.eos_token = named
        eos_id = self.tokenizer.token_to_id(named) if named else None
        if eos_id is None:
            raise ValueError(f"tokenizer.eos_token: found {named!r}, expected a token of {folder}")
        self.eos_id: int = eos_id
        self.tokenizer.encode_special_tokens = True
        self.digest = _digest(self.tokenizer.to_str().encode(), self.eos_id)

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """The tokens of ``text``, followed by the end token where ``add_eos``.

        ``add_bos``, with which torchtitan's own loaders call, adds nothing: here documents are
        packed without a begin token, whoever packs them.
        """
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*tokens, self.eos_id] if add_eos else tokens


def _find(path: Path, names: tuple[str, ...]) -> Path:
    if path.is_file() and path.name in names:
        return path
    found = [path / name for name in names if (path / name).is_file()]
    if len(found) != 1:
        what = "none" if not found else " and ".join(file.name for file in found)
        raise ValueError(
            f"tokenizer.path: found {what} in {str(path)!r}, expected {' or '.join(names)}"
        )
    return found[0]


def _digest(content: bytes, eos_id: int) -> str:
    return hashlib.sha256(content + f"\0{eos_id}".encode()).hexdigest()[:16]


def identity(tokenizer: BaseTokenizer) -> str:
    """What tells tokenizers apart: class, size, and digest where it was read from files."""
    name = f"{type(tokenizer).__name__}-{tokenizer.get_vocab_size()}"
    digest = getattr(tokenizer, "digest", None)
    return name if digest is None else f"{name}-{digest}"


def make_tokenizer(name: str, path: str, eos_token: str = "") -> BaseTokenizer:
    """The tokenizer ``hf``, ``tiktoken`` or ``byte``.

    Args:
        name: Which of them.
        path: Folder or file; ``byte`` needs none.
        eos_token: Token after each document; empty for the tokenizer's own.

    Raises:
        ValueError: If its files do not make one.
    """
    if name == "byte":
        return ByteTokenizer()
    return (TiktokenTokenizer if name == "tiktoken" else HFTokenizer)(path, eos_token)
