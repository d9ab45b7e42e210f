"""Tokenizers: torchtitan's own, and one token a byte, built in code."""

from __future__ import annotations

from typing import Any

import tiktoken
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer

EOS = "<|eos|>"
BYTE_VOCAB_SIZE = 257
"""256 bytes and the end of a document."""


class ByteTokenizer(BaseTokenizer):
    """One token for each byte of the UTF-8 text, and one for the end of a document.

    Needs no files. Token ``i < 256`` is byte ``i``, token 256 is :attr:`eos_id`; the text of the
    end token has no special meaning within a document.
    """

    def __init__(self) -> None:
        super().__init__()
        self._encoding = tiktoken.Encoding(
            name="bytes",
            # Single characters: longer pieces would be searched for merges, and there are none.
            pat_str=r"[\s\S]",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={EOS: BYTE_VOCAB_SIZE - 1},
            explicit_n_vocab=BYTE_VOCAB_SIZE,
        )
        self.bos_id: int | None = None
        self.eos_id: int = BYTE_VOCAB_SIZE - 1

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """The tokens of ``text``, followed by the end token where ``add_eos``.

        Raises:
            ValueError: For ``add_bos``: there is no such token.
        """
        if add_bos:
            raise ValueError("add_bos: found True, the byte tokenizer has no token for it")
        tokens = self._encoding.encode_ordinary(text)
        return [*tokens, self.eos_id] if add_eos else tokens

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``; bytes that are not UTF-8 become U+FFFD."""
        return self._encoding.decode(tokens)

    def get_vocab_size(self) -> int:
        """Number of tokens, 257."""
        return self._encoding.n_vocab


def build_tokenizer(job_config: Any) -> BaseTokenizer:
    """The tokenizer that ``[data] tokenizer`` names.

    Raises:
        ValueError: For a config that cannot work: this is the first of the project's functions that
            torchtitan calls with the whole of it.
    """
    from torchtitan_ext.plugin import settings

    settings.validate(job_config)
    if job_config.data.tokenizer == "byte":
        return ByteTokenizer()
    return build_hf_tokenizer(job_config)
