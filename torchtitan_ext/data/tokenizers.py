"""Tokenizers: torchtitan's of a Hugging Face model, tiktoken's, and one token per byte.

Documents have no begin token. Each ends with ``eos_id``, and the text of a special token has no
special meaning within a document.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tiktoken
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from amo_dist.config import require
from torchtitan_ext.runs import files

EOS = "<|eos|>"


class Tokenizer(BaseTokenizer):
    """A tokenizer of the config.

    Attributes:
        eos_id: Token after each document.
        identity: Name by which tokens are known as those of this tokenizer.
    """

    eos_id: int
    bos_id: int | None = None
    identity: str

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """``[tokenizer]``: its kind, and the place of its files.

        Attributes:
            kind: ``hf`` reads ``tokenizer.json``, ``tiktoken`` an encoding; ``byte`` reads nothing.
            path: Folder or file of ``hf``, by default ``hf_assets_path``.
            encoding: Encoding of ``tiktoken``, from its cache or the internet.
            eos_token: Token after each document. The default is the one that
                ``tokenizer_config.json`` names, which for a chat model is the end of a turn; for
                ``tiktoken`` the end of a text.
        """

        kind: Literal["hf", "tiktoken", "byte"] = "hf"
        path: str = ""
        encoding: Literal["", "gpt2", "cl100k_base", "o200k_base"] = ""
        eos_token: str = ""

        def build(self, *, tokenizer_path: str) -> Tokenizer:
            """Build the tokenizer.

            Args:
                tokenizer_path: Folder or file to read if ``path`` is empty.

            Raises:
                ValueError: Its files do not make one.
            """
            if self.kind == "hf":
                return HFTokenizer(self.path or tokenizer_path, self.eos_token)
            if self.kind == "byte":
                return ByteTokenizer()
            return TiktokenTokenizer(self.encoding, self.eos_token)

    def encode_documents(self, texts: Sequence[str]) -> list[Any]:
        """The tokens of each document, (num_tokens,) integers, its end token included."""
        raise NotImplementedError

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """The tokens of ``text``, followed by the end token if ``add_eos``.

        ``add_bos``, with which torchtitan's own loaders call, adds nothing.
        """
        tokens = list(map(int, self.encode_documents([text])[0]))
        return tokens if add_eos else tokens[:-1]

    def _identify(self, *contents: bytes) -> None:
        content = b"\0".join([*contents, str(self.eos_id).encode()])
        digest = hashlib.sha256(content).hexdigest()[:16]
        self.identity = f"{type(self).__name__}-{self.get_vocab_size()}-{digest}"


class HFTokenizer(Tokenizer, HuggingFaceTokenizer):
    """A Hugging Face tokenizer without the begin token that some put before every text.

    Args:
        path: Folder with ``tokenizer.json``, or the file.
        eos_token: Special token after each document; empty for that of ``tokenizer_config.json``.

    Raises:
        ValueError: The file is missing, or the token does not exist.
    """

    def __init__(self, path: str, eos_token: str = "") -> None:
        folder = Path(path).expanduser()
        folder = folder.parent if folder.is_file() else folder
        try:
            content = files.read_bytes(folder / "tokenizer.json")
            if (options := folder / "tokenizer_config.json").exists():
                files.read_json(options)
            super().__init__(tokenizer_path=str(folder))
        except Exception as error:  # Errors of the library have no class of their own.
            raise ValueError(
                f"tokenizer.path: found no tokenizer in {folder}, expected one: {error}"
            ) from None
        # torchtitan overlooks an end token that is the begin token too.
        name = eos_token or self._get_token_from_config(self._hf_config or {}, "eos_token")
        eos_id = self.tokenizer.token_to_id(name) if name else None
        if eos_id is None:
            raise ValueError(f"tokenizer.eos_token: found {name!r}, expected a token of {folder}")
        self.eos_token, self.eos_id = name, eos_id
        self.tokenizer.encode_special_tokens = True
        self._identify(content)

    def encode_documents(self, texts: Sequence[str]) -> list[Any]:
        """The tokens of each document, its end token included."""
        batch = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[*encoding.ids, self.eos_id] for encoding in batch]


class TiktokenTokenizer(Tokenizer):
    """A tokenizer of ``tiktoken``.

    Args:
        encoding: Name of one of tiktoken's encodings.
        eos_token: Special token after each document; empty for the end of a text.

    Attributes:
        encoding: ``tiktoken``'s own object.

    Raises:
        ValueError: The file of the encoding cannot be had, or the token does not exist.
    """

    def __init__(self, encoding: str, eos_token: str = "") -> None:
        super().__init__()
        try:
            self.encoding = tiktoken.get_encoding(encoding)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"tokenizer.encoding: found {encoding!r}, expected an encoding of tiktoken, whose "
                f"file is in TIKTOKEN_CACHE_DIR or can be downloaded: {error}"
            ) from None
        name, names = eos_token or "<|endoftext|>", sorted(self.encoding.special_tokens_set)
        expected = f"one of {', '.join(names)}"
        require(name in names, "tokenizer.eos_token", repr(name), expected)
        self.eos_id = self.encoding.encode_single_token(name)
        self._identify(encoding.encode())  # tiktoken checks its file against a digest

    def encode_documents(self, texts: Sequence[str]) -> list[Any]:
        """The tokens of each document, its end token included."""
        batch = self.encoding.encode_ordinary_batch(list(texts))
        return [[*tokens, self.eos_id] for tokens in batch]

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode(tokens)

    def get_vocab_size(self) -> int:
        """Number of tokens: one more than the largest."""
        return self.encoding.n_vocab


class ByteTokenizer(TiktokenTokenizer):
    """One token for each byte of the UTF-8 text, and one for the end of a document.

    Needs no files. Token ``i < 256`` is byte ``i``, token 256 is ``eos_id``.
    """

    def __init__(self) -> None:
        BaseTokenizer.__init__(self)
        ranks = {bytes([byte]): byte for byte in range(256)}
        self.encoding = tiktoken.Encoding(
            "byte", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={EOS: len(ranks)}
        )
        self.eos_id = len(ranks)
        self._identify()

    def encode_documents(self, texts: Sequence[str]) -> list[Any]:
        """The tokens of each document, (num_tokens,) uint16, its end token included."""
        bytes_by_text = (np.frombuffer(text.encode(), np.uint8) for text in texts)
        return [np.append(data, np.uint16(self.eos_id)) for data in bytes_by_text]
