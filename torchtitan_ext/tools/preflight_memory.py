"""Memory of a config's run: its parameters by group, and bytes of them, of state and of logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amo_dist.config import require
from amo_dist.operators.tree import read_tree
from torchtitan_ext.config.checks import degrees

Groups = Sequence[Mapping[str, Any]]

EAGER_LOGIT_BYTES = 12
"""
Bytes per logit at the peak of an eager loss, whatever its dtype: in backward the logarithm of
softmax, its gradient and that of the logit, each in fp32 (as PyTorch 2.13 allocates).
"""


def groups_of(config: Any) -> Groups:
    """Parameter groups as the run makes them, without memory; all of them AdamW's under AdamW.

    Raises:
        ValueError: For a model that there is not, an unknown matrix inside a block, or an
            expression that matches no parameter.
    """
    from torchtitan_ext.plugin import models, optimizers

    with torch.device("meta"):
        model = models.spec(config.model).model.build()
    optimizers.require_used([model], config.optimizer)
    if config.optimizer.name == "AdamW":
        params = [(place.name, place.parameter) for place in read_tree([model])]
        return [{"params": params, "algorithm": "adamw"}]
    return optimizers.groups_of([model], config.optimizer)


def held_bytes(config: Any, groups: Groups, shards: int) -> tuple[int, int]:
    """Bytes of the fullest rank: of parameters, and of optimizer state.

    FSDP cuts dim 0 as ``torch.chunk`` does: the first rank holds the ceiling.
    """
    optimizer = config.optimizer
    itemsize = getattr(torch, config.training.dtype).itemsize
    params = state = 0
    for group in groups:
        bytes_per_entry = 2 * itemsize  # of AdamW
        if group["algorithm"] == "muon":
            bytes_per_entry = torch.float32.itemsize * (2 if optimizer.name == "AdaMuon" else 1)
        for _, parameter in group["params"]:
            held = -(-parameter.shape[0] // shards) * math.prod(parameter.shape[1:])
            params += held * itemsize
            state += held * bytes_per_entry
    return params, state


def logit_bytes(config: Any, dims: Any) -> int:
    """Bytes that the logits of a batch and their gradients take at the worst moment of a rank.

    Args:
        config: A settled config.
        dims: torchtitan's ``ParallelDims``. Ranks of one context share a sequence, those of one
            tensor the vocabulary; a stage of a pipeline sees a microbatch at a time.
    """
    training, loss = config.training, config.compile
    bytes_per_logit: int = EAGER_LOGIT_BYTES
    if loss.enable and "loss" in loss.components:
        # One kernel: the logits and their gradient alone.
        bytes_per_logit = 2 * getattr(torch, training.mixed_precision_param).itemsize
    rows: int = training.local_batch_size
    if dims.pp > 1:
        rows = config.parallelism.pipeline_parallel_microbatch_size
    shares: int = dims.cp * dims.tp * config.loss.num_chunks
    num_logits = rows * int(training.seq_len) * int(config.loss.global_vocab_size)
    return num_logits * bytes_per_logit // shares


def memory_of(config: Any, groups: Groups, dims: Any) -> dict[str, int]:
    """Bytes of the fullest rank by what they are for: no activations, and not the optimizer's step.

    Args:
        config: A checked config.
        groups: Parameter groups, see :func:`groups_of`.
        dims: torchtitan's ``ParallelDims``; under tensor or pipeline parallelism logits alone are
            counted.
    """
    memory = {"logits_bytes": logit_bytes(config, dims)}
    if dims.tp == dims.pp == 1:
        params, state = held_bytes(config, groups, dims.dp_shard * dims.cp)
        memory |= {"parameters_bytes": params, "gradients_bytes": params}
        memory["optimizer_state_bytes"] = state
    return memory


def check_memory(config: Any, world_size: int, memory_gb: float) -> None:
    """Check that a rank can hold what it must.

    Args:
        config: A checked config.
        world_size: Number of ranks.
        memory_gb: Memory of a rank's device, in 1e9 bytes.

    Raises:
        ValueError: Naming the field that helps.
    """
    memory = memory_of(config, groups_of(config), degrees(config, world_size))
    logits, total = memory["logits_bytes"], sum(memory.values())
    text = f"{config.training.local_batch_size}, whose logits take {size(logits)} a rank, beside "
    text += f"{size(total - logits)} of parameters, gradients and optimizer state"
    expected = f"at most {memory_gb:.1f} GB (a larger loss.num_chunks divides the logits, and "
    expected += "data_parallel_shard_degree the rest)"
    require(total <= memory_gb * 1e9, "training.local_batch_size", text, expected)


def size(num_bytes: float) -> str:
    """Bytes as text, in units of 1000."""
    unit, value = "kB", num_bytes / 1e3
    for larger in ("MB", "GB", "TB"):
        if value < 1000:
            break
        unit, value = larger, value / 1e3
    return f"{value:.3g} {unit}"
