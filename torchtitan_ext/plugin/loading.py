"""Loading a checkpoint, and the reason why one does not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from torchtitan_ext.plugin.storage import CheckpointReader, innermost

_REMEDY = (
    "it was saved with another model or optimizer, or holds weights alone "
    "(checkpoint.last_save_model_only): --checkpoint.load_step goes on from one before it, and "
    "checkpoint.initial_load_path starts a run in another dump_folder from its weights"
)

_CALLBACK_REMEDY = "--checkpoint.exclude_from_loading callbacks starts callbacks anew"


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
    reader = CheckpointReader(checkpoint_id, verify=verify)
    with explained(checkpoint_id, reader):
        dcp_load(state_dict, storage_reader=reader)


@contextlib.contextmanager
def explained(checkpoint_id: str, reader: CheckpointReader | None = None) -> Iterator[None]:
    """Turn an error of DCP, which is no ``Exception``, into one line with its innermost reason.

    Args:
        checkpoint_id: Folder of the checkpoint.
        reader: Reader that may know more.

    Raises:
        ValueError: The checkpoint cannot be loaded.
    """
    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if "Missing key" in str(cause):
                is_callback = "callbacks." in str(cause)
                remedy = _CALLBACK_REMEDY if is_callback else _REMEDY
                raise ValueError(f"checkpoint {checkpoint_id}: {cause} {remedy}") from None
            if isinstance(cause, ValueError):
                raise ValueError(f"checkpoint {cause}") from None
        if reader is not None and reader.error is not None:
            raise ValueError(f"checkpoint {reader.error}") from None
        raise ValueError(f"checkpoint {checkpoint_id}: {innermost(error)}") from None
