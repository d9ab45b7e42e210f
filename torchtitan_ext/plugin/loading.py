"""Loading a checkpoint, and the reason why one does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from torchtitan_ext.plugin.storage import CheckpointReader
from torchtitan_ext.runs.run_files import checkpoint_step, complete_steps


def load(state_dict: dict[str, Any], checkpoint_id: str, *, verify: bool = True) -> None:
    """Load a checkpoint in place.

    Args:
        state_dict: State dict that ``torch.distributed.checkpoint.load`` takes.
        checkpoint_id: Folder of the checkpoint.
        verify: Whether to compare its checksums, which reads all of it.

    Raises:
        ValueError: On every rank, if the checkpoint lacks something, is damaged, or would run
            code.
    """
    try:
        reader = CheckpointReader(checkpoint_id, verify=verify)
        dcp_load(state_dict, storage_reader=reader, planner=_Planner())
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, _MissingError):
                keys, saved = cause.args
                why = _why(keys, saved, Path(checkpoint_id))
                raise ValueError(f"checkpoint {checkpoint_id}: {why}") from None
            if isinstance(cause, ValueError):
                raise ValueError(f"checkpoint {cause}") from None
        raise


class _MissingError(Exception):
    """Keys that a checkpoint lacks, and those that it has."""


class _Planner(DefaultLoadPlanner):
    """Collects all keys that a checkpoint lacks; PyTorch's planner names one."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        saved = metadata.state_dict_metadata
        if missing := sorted(set(self.state_dict) - set(saved)):
            raise _MissingError(missing, [*saved])


def _why(missing: Sequence[str], saved: Sequence[str], folder: Path) -> str:
    lacks = f"lacks {len(missing)} of the keys that this run needs, such as {missing[0]}"
    optimizer = any(key.startswith("optimizer.") for key in missing)
    if optimizer and not any(key.startswith("optimizer.") for key in saved):
        step = checkpoint_step(folder)
        steps = complete_steps(folder.parent) if step is not None else []
        earlier = max((other for other in steps if other < (step or 0)), default=None)
        remedy = (
            "expected another dump_folder, with these weights as checkpoint.initial_load_path"
            if earlier is None
            else f"--checkpoint.load_step {earlier} goes on from the one before it"
        )
        return f"{lacks}: it holds weights alone (checkpoint.last_save_model_only); {remedy}"
    if any(".wqkv." in key for key in missing) and any(".wq." in key for key in saved):
        return (
            f"{lacks}: its optimizer kept queries, keys and values apart, where this model fuses "
            "them; expected model.fuse_qkv = false with a flavor of the project (or its weights "
            "alone, by checkpoint.initial_load_path)"
        )
    return f"{lacks}: it was saved with another model, optimizer or number of streams"
