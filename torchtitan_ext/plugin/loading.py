"""Loading a checkpoint, and the reason why one does not fit."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from torchtitan_ext.plugin.storage import CheckpointReader

_REMEDY = (
    "it was saved with another model or optimizer, or holds weights alone "
    "(checkpoint.last_save_model_only): --checkpoint.load_step goes on from one before it, and "
    "checkpoint.initial_load_path starts a run in another dump_folder from its weights"
)


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
        dcp_load(state_dict, storage_reader=CheckpointReader(checkpoint_id, verify=verify))
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if "Missing key" in str(cause):
                raise ValueError(f"checkpoint {checkpoint_id}: {cause} {_REMEDY}") from None
            if isinstance(cause, ValueError):
                raise ValueError(f"checkpoint {cause}") from None
        raise
