"""Sizes of what an optimizer step trains on."""

from __future__ import annotations

from typing import Any


def sequences_per_step(training: Any, dims: Any) -> int:
    """Sequences of an optimizer step, over all ranks and accumulated batches.

    Args:
        training: torchtitan's ``[training]``; without a global batch size there is no accumulation.
        dims: torchtitan's ``ParallelDims``; ranks of one context share their sequences.
    """
    batch: int = training.global_batch_size
    return batch if batch > 0 else training.local_batch_size * dims.dp_replicate * dims.dp_shard
