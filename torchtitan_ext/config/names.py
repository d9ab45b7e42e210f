"""Names of fields: those of torchtitan 0.3.0, and what others are called there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from amo_dist.config import MuonConfig

STOCK = ("Adam", "AdamW")
"""Values of ``optimizer.name`` that are torchtitan's own; they orthogonalize nothing."""

SHARED = tuple(field.name for field in dataclasses.fields(MuonConfig))
"""Fields of ``[optimizer.muon]`` that every optimizer of the Muon family reads, AMO too."""

_ELSEWHERE = {
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "job": "",
    "model.hf_assets_path": "hf_assets_path",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "data.tokenizer": "tokenizer.kind",
    "data.tokenizer_path": "tokenizer.path",
    "data.eos_token": "tokenizer.eos_token",
    "data": "dataloader",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
    "validation": "validator",
    "profiling": "profiler",
    **{f"optimizer.amo.{field}": f"optimizer.muon.{field}" for field in SHARED},
}
"""Fields and whole sections by names that they have elsewhere."""


def require_known(names: Iterable[str]) -> None:
    """Check that no field has a name of another vocabulary.

    Args:
        names: Dotted names, with either ``_`` or ``-``.

    Raises:
        ValueError: The first such name, and the one to use.
    """
    for name in names:
        head, tail = name.replace("-", "_"), ""
        while head not in _ELSEWHERE and "." in head:
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
        if head in _ELSEWHERE:
            expected = f"{_ELSEWHERE[head]}{tail}".lstrip(".")
            raise ValueError(f"{name}: found a field that does not exist, expected {expected}")


def of_options(args: Iterable[str]) -> list[str]:
    """The names of the fields that arguments set, such as ``training.steps``."""
    fields = []
    for arg in args:
        option = arg.partition("=")[0]
        if option.startswith("--"):
            section, dot, field = option.removeprefix("--").rpartition(".")
            # A flag is off as ``--section.no-field``.
            fields.append(section + dot + field.replace("-", "_").removeprefix("no_"))
    return fields
