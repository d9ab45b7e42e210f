"""Checks of the machine that starts a run: its tokenizer and data."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torchtitan_ext.config.checks import collect
from torchtitan_ext.data.loader import open_corpora


def missing_on_this_machine(config: Any) -> list[str]:
    """Check what a config needs of this machine; a line for each lack.

    Args:
        config: A checked config.
    """
    problems: list[str] = []
    tokenizer = collect(problems, lambda: _tokenizer(config))
    loaders = [config.dataloader]
    if config.validator.enable:
        loaders.append(config.validator.dataloader)
    for loader in loaders:
        if loader.dataset == "packed" and tokenizer is not None:
            collect(problems, functools.partial(open_corpora, loader, tokenizer))
    return problems


def _tokenizer(config: Any) -> Any:
    """The tokenizer, which must be there and fit the model.

    Raises:
        ValueError: Otherwise.
    """
    section, model = config.tokenizer, config.model_spec.model
    field = "tokenizer.path" if section.path else "hf_assets_path"
    path = section.path or config.hf_assets_path
    if section.kind == "hf" and not Path(path).expanduser().exists():
        raise ValueError(f"{field}: found no tokenizer in {path} on this machine, expected one")
    try:
        tokenizer = section.build(tokenizer_path=config.hf_assets_path)
    except ValueError:
        raise
    except Exception as error:  # the readers of files raise what they like
        raise ValueError(f"{field}: the tokenizer in {path} cannot be read: {error}") from None
    if (num_tokens := tokenizer.get_vocab_size()) > model.vocab_size:
        raise ValueError(
            f"model.flavor: found {config.model.flavor!r} with a vocabulary of {model.vocab_size} "
            f"tokens, expected at least the {num_tokens} of the tokenizer ({section.kind!r})"
        )
    return tokenizer
