"""Memory of a config's run: its parameters by group, and bytes of them, of state and of logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amo_dist.distributed.layout import make_matrix, replicated_layout
from amo_dist.operators.groups import named_parameters
from amo_dist.schedule.types import MatrixInfo
from torchtitan_ext.config.checks import degrees

Groups = Sequence[Mapping[str, Any]]

EAGER_LOGIT_BYTES = 12
"""
Bytes per logit at the peak of an eager loss, whatever its dtype: in backward the logarithm of
softmax, its gradient and that of the logit, each in fp32 (as PyTorch 2.13 allocates).
"""

NCCL_PEER_BYTES = 470_000_000
"""
Bytes that NCCL takes, outside of PyTorch's allocator, for every other GPU of a node from the first
all-to-all on: 4.34 GB less 1.06 GB, on eight H100s (https://github.com/NVIDIA/nccl/issues/1685).
"""


def groups_of(config: Any) -> Groups:
    """Parameter groups as the run makes them, without memory; all of them AdamW's under AdamW.

    Raises:
        ValueError: For a model that there is not, or an unknown matrix inside a block.
    """
    from torchtitan_ext.plugin import models, optimizers

    with torch.device("meta"):
        model = models.spec(config.model).model.build()
    if config.optimizer.name == "AdamW":
        params = [(name, parameter) for parameter, name in named_parameters([model]).items()]
        return [{"params": params, "algorithm": "adamw"}]
    return optimizers.groups_of([model], config.optimizer)


def registry_of(groups: Groups) -> list[MatrixInfo]:
    """Every matrix, in the order in which owners are dealt."""
    registry = []
    for group in groups:
        for name, parameter in group["params"]:
            layout = replicated_layout(parameter.shape, [0])
            for view in group.get("matrix_views", {}).get(name, ()):
                shape = make_matrix("", layout, 0, view.boxes, view.dim).shape
                registry.append(MatrixInfo(name + view.suffix, shape, view.operator_type))
    return registry


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
    """Bytes of the fullest rank that last, by what they are for: no activations.

    Args:
        config: A checked config.
        groups: Parameter groups, see :func:`groups_of`.
        dims: torchtitan's ``ParallelDims``, without tensor or pipeline parallelism.
    """
    params, state = held_bytes(config, groups, dims.dp_shard * dims.cp)
    return {"parameters_bytes": params, "gradients_bytes": params, "optimizer_state_bytes": state}


def check_memory(config: Any, world_size: int, memory_gb: float) -> None:
    """Check that a rank can hold what it must, activations and exchange aside.

    Args:
        config: A checked config.
        world_size: Number of ranks.
        memory_gb: Memory of a rank's device, in 1e9 bytes.

    Raises:
        ValueError: Naming the field that helps.
    """
    dims = degrees(config, world_size)
    logits, lasting = logit_bytes(config, dims), 0
    if dims.tp == dims.pp == 1:
        lasting = sum(memory_of(config, groups_of(config), dims).values())
    if logits + lasting > memory_gb * 1e9:
        raise ValueError(
            f"training.local_batch_size: found {config.training.local_batch_size}, whose logits "
            f"take {size(logits)} a rank, beside {size(lasting)} of parameters, gradients and "
            f"optimizer state; expected at most {memory_gb:.1f} GB (a larger loss.num_chunks "
            "divides the logits, and data_parallel_shard_degree the rest)"
        )


def size(num_bytes: float) -> str:
    """Bytes as text, in units of 1000."""
    unit, value = "kB", num_bytes / 1e3
    for larger in ("MB", "GB", "TB"):
        if value < 1000:
            break
        unit, value = larger, value / 1e3
    return f"{value:.3g} {unit}"
