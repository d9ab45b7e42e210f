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
"""Fields, and whole sections, by names that a user may know them by."""


def require_known(names: Iterable[str]) -> None:
    """Check that no field has a name of another vocabulary.

    Args:
        names: Dotted, with either ``_`` or ``-``.

    Raises:
        ValueError: With the name to use, of the first that has one.
    """
    for name in names:
        head, tail = name.replace("-", "_"), ""
        while head not in _ELSEWHERE and "." in head:
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
        if head in _ELSEWHERE:
            expected = f"{_ELSEWHERE[head]}{tail}".lstrip(".")
            raise ValueError(f"{name}: found a field that there is not, expected {expected}")


def of_options(args: Iterable[str]) -> list[str]:
    """The names of the fields that arguments set, such as ``training.steps``."""
    found = []
    for arg in args:
        option = arg.partition("=")[0]
        if option.startswith("--"):
            section, dot, field = option.removeprefix("--").rpartition(".")
            found.append(section + dot + field.replace("-", "_").removeprefix("no_"))  # of flags
    return found
