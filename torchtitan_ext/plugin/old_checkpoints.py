"""Checkpoints that were written under torchtitan 0.2.2, where some parameters had other names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from amo_dist import CheckpointReader

RENAMED = (("lm_head.", "output."), ("attention.qkv_linear.w", "attention.w"))
"""Parts of names now, and under torchtitan 0.2.2; the others are as they were."""


def old_name(key: str) -> str:
    """The key of a parameter, or of its optimizer state, under torchtitan 0.2.2."""
    for now, then in RENAMED:
        key = key.replace(now, then)
    return key


def load(state_dict: dict[str, Any], checkpoint_id: str, *, verify: bool = True) -> None:
    """Load a checkpoint in place; what it lacks is looked for under its older name.

    Args:
        state_dict: As for ``torch.distributed.checkpoint.load``.
        checkpoint_id: The folder of the checkpoint.
        verify: Whether to compare its checksums, which reads all of it.

    Raises:
        ValueError: On every rank, if the checkpoint lacks something under both names, is damaged,
            or would run code.
    """
    try:
        reader = CheckpointReader(checkpoint_id, verify=verify)
        dcp_load(state_dict, storage_reader=reader, planner=_Planner())
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, _MissingError):
                raise ValueError(f"checkpoint {checkpoint_id}: {cause}") from None
            if isinstance(cause, ValueError):
                raise ValueError(f"checkpoint {cause}") from None
        raise


class _MissingError(Exception):
    """A checkpoint lacks keys."""


class _Planner(DefaultLoadPlanner):
    """Renames keys in the metadata, by which the data is found; nothing is copied."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        saved = metadata.state_dict_metadata
        lacking = [key for key in self.state_dict if key not in saved]
        names = {old_name(key): key for key in lacking if old_name(key) in saved}
        if missing := sorted(set(lacking) - set(names.values())):
            raise _MissingError(_why(missing, saved))
        if names:
            metadata.state_dict_metadata = {names.get(k, k): value for k, value in saved.items()}
            metadata.storage_data = {
                dataclasses.replace(index, fqn=names.get(index.fqn, index.fqn)): place
                for index, place in metadata.storage_data.items()
            }


def _why(missing: list[str], saved: Iterable[str]) -> str:
    lacks = f"lacks {len(missing)} of the keys that this run needs, such as {missing[0]}"
    moe, optimizer = ([key for key in missing if part in key] for part in (".moe.", "optimizer."))
    if moe and any(".moe.experts." in key for key in saved):
        return f"{lacks}: mixtures of experts of torchtitan 0.2.2 cannot be taken on"
    if optimizer and not any(key.startswith("optimizer.") for key in saved):
        return (
            f"{lacks}: it holds weights alone; expected a run with checkpoint.last_save_model_only "
            "= false (or its weights, by checkpoint.initial_load_path)"
        )
    if any(".wqkv." in key for key in missing) and any(".wq." in key for key in saved):
        return (
            f"{lacks}: its optimizer kept queries, keys and values apart, where this model fuses "
            "them; expected model.fuse_qkv = false with a flavor of the project (or its weights "
            "alone, by checkpoint.initial_load_path)"
        )
    return f"{lacks}: it was saved with another model, optimizer or number of streams"
