"""What all ranks of the world must hold alike: observations, plan, structure, and each step.

Every function here is a collective over its group: all ranks of it call in the same order. With
no group (one process) each is the identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class RankMismatchError(RuntimeError):
    """Ranks hold different configurations, parameters, plans or checkpoints."""


def world_group() -> dist.ProcessGroup | None:
    """The default process group, or None where there is one process or none was initialised."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


def control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Device of small control tensors: the CPU where the group can reduce there."""
    if group is None or "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "a process group without CPU backend needs an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def sum_over(values: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """Elementwise sum over ranks, in float64.

    Where each slot is written by one rank and is zero elsewhere, the sum is exact.
    """
    if group is None:
        return list(values)
    vector = torch.tensor(list(values), dtype=torch.float64, device=control_device(group))
    dist.all_reduce(vector, group=group)
    return [float(value) for value in vector.tolist()]


def max_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Elementwise maximum over ranks, of an integer vector, in place."""
    if group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def broadcast_text(text: str | None, group: dist.ProcessGroup | None) -> str:
    """The text that the group's first rank holds; what the others pass is not looked at."""
    if group is None:
        assert text is not None
        return text
    device = control_device(group)
    is_source = dist.get_rank(group) == 0
    payload = list((text or "").encode()) if is_source else []
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(size, group=group, group_src=0)
    if is_source:
        buffer = torch.tensor(payload, dtype=torch.uint8, device=device)
    else:
        buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, group=group, group_src=0)
    return bytes(buffer.tolist()).decode()


def gather_text(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """The texts of all ranks of the group, in rank order.

    Where all are alike, as is usual, only their digests travel.
    """
    if group is None:
        return [text]
    digests = _gather_bytes(hashlib.sha256(text.encode()).digest(), 32, group)
    if all(digest == digests[0] for digest in digests):
        return [text] * len(digests)
    payload = text.encode()
    lengths = _gather_bytes(len(payload).to_bytes(8, "little"), 8, group)
    sizes = [int.from_bytes(length, "little") for length in lengths]
    texts = _gather_bytes(payload, max(sizes), group)
    return [raw[:size].decode() for raw, size in zip(texts, sizes, strict=True)]


def _gather_bytes(payload: bytes, size: int, group: dist.ProcessGroup) -> list[bytes]:
    device = control_device(group)
    mine = torch.tensor(list(payload.ljust(size, b"\0")), dtype=torch.uint8, device=device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [bytes(part.tolist()) for part in parts]


def check_alike(what: str, text: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank where the ranks of a group hold different texts.

    Args:
        what: Names the text in the error.
        text: The same on all ranks, or the error tells which ranks differ and where.
        group: Whose ranks to compare.

    Raises:
        RankMismatchError: Names the ranks that differ from the group's first rank.
    """
    texts = gather_text(text, group)
    others = [index for index, other in enumerate(texts) if other != texts[0]]
    if not others:
        return
    ranks = dist.get_process_group_ranks(group)
    first = texts[others[0]]
    raise RankMismatchError(
        f"{what}: rank(s) {', '.join(str(ranks[index]) for index in others)} differ from rank "
        f"{ranks[0]}; {_first_difference(texts[0], first, ranks[0], ranks[others[0]])}"
    )


def _first_difference(expected: str, found: str, expected_rank: int, found_rank: int) -> str:
    """One line about the first place where two texts (of lines) differ."""
    left, right = expected.splitlines(), found.splitlines()
    for number in range(max(len(left), len(right))):
        ours = left[number] if number < len(left) else "nothing"
        theirs = right[number] if number < len(right) else "nothing"
        if ours != theirs:
            return f"rank {expected_rank} has {ours}; rank {found_rank} has {theirs}"
    return "they differ in line ends only"


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """JSON values of all ranks of the group, in rank order."""
    return [json.loads(text) for text in gather_text(json.dumps(value), group)]
