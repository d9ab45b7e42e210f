"""What all ranks of the world must hold alike: observations, plan, structure, and each step.

Every function here is a collective over its group: all ranks of it call in the same order. With
no group (one process) each is the identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

_DIRECT_RANKS = 16
"""Up to so many ranks send small vectors to each other at once on CPU: gloo's ring takes two rounds
of as many messages, one after the other, which is most of what a reduction costs."""


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
    """Elementwise maximum over ranks, of a small integer vector."""
    if group is None:
        return values
    world = dist.get_world_size(group)
    if values.device.type != "cpu" or world > _DIRECT_RANKS:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        return values
    received = values.new_empty(world * values.numel())
    dist.all_to_all_single(received, values.repeat(world), group=group)
    return received.view(world, -1).amax(dim=0)


def broadcast_text(text: str | None, group: dist.ProcessGroup | None) -> str:
    """The text that the group's first rank holds; what the others pass is not looked at."""
    if group is None:
        assert text is not None
        return text
    payload = (text or "").encode() if dist.get_rank(group) == 0 else b""
    size = torch.tensor([len(payload)], dtype=torch.int64, device=control_device(group))
    dist.broadcast(size, group=group, group_src=0)
    return _broadcast_bytes(payload, int(size.item()), 0, group).decode()


def _broadcast_bytes(payload: bytes, size: int, source: int, group: dist.ProcessGroup) -> bytes:
    """``size`` bytes that the rank ``source`` of the group passes."""
    device = control_device(group)
    if dist.get_rank(group) == source:
        buffer = torch.tensor(list(payload), dtype=torch.uint8, device=device)
    else:
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(buffer, group=group, group_src=source)
    return bytes(buffer.tolist())


def gather_text(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """The texts of all ranks of the group, in rank order.

    Each distinct text travels once, and none where all are alike: with a thousand ranks of a few
    kinds (pipeline stages), gathering every rank's own would be gigabytes.
    """
    if group is None:
        return [text]
    payload = text.encode()
    header = hashlib.sha256(payload).digest() + len(payload).to_bytes(8, "little")
    headers = _gather_bytes(header, group)
    known = {header: text}
    distinct = list(dict.fromkeys(headers))
    for other in distinct if len(distinct) > 1 else ():
        size = int.from_bytes(other[-8:], "little")
        found = _broadcast_bytes(payload, size, headers.index(other), group)
        known[other] = found.decode()
    return [known[other] for other in headers]


def _gather_bytes(payload: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Of all ranks, which pass the same number of bytes."""
    mine = torch.tensor(list(payload), dtype=torch.uint8, device=control_device(group))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [bytes(part.tolist()) for part in parts]


def text_mark(text: str) -> int:
    """A positive integer of 56 bits that tells texts apart."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def is_alike(text: str, group: dist.ProcessGroup | None) -> bool:
    """Whether all ranks of the group pass the same text, by one reduction of two integers."""
    if group is None:
        return True
    mark = text_mark(text)
    # The greatest mark and, negated, the least.
    extremes = torch.tensor([mark, -mark], dtype=torch.int64, device=control_device(group))
    greatest, negated_least = max_over(extremes, group).tolist()
    return bool(greatest == -negated_least)


def check_alike(what: str, text: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank where the ranks of a group hold different texts.

    Cheap enough for every step: while all agree, two integers are reduced.

    Args:
        what: Names the text in the error.
        text: The same on all ranks, or the error tells which ranks differ and where.
        group: Whose ranks to compare.

    Raises:
        RankMismatchError: Names the ranks that differ from the group's first rank.
    """
    if is_alike(text, group):
        return
    texts = gather_text(text, group)
    others = [index for index, other in enumerate(texts) if other != texts[0]]
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


def check_alike_by_ranks(
    what: str, text_by_ranks: Mapping[tuple[int, ...], str], group: dist.ProcessGroup | None
) -> None:
    """`check_alike` for many sets of ranks at once, as one collective over the world.

    Every rank of the world learns of a mismatch, those outside of the set included: they would
    else wait for it in the next collective.

    Args:
        what: Names the texts in the error.
        text_by_ranks: For each set of global ranks that this rank belongs to, its text.
        group: The world.

    Raises:
        RankMismatchError: Names two ranks of a set that differ.
    """
    mine = [[list(ranks), text] for ranks, text in sorted(text_by_ranks.items())]
    by_rank = gather_json(mine, group)
    first: dict[tuple[int, ...], tuple[int, str]] = {}
    for rank, found in enumerate(by_rank):
        for ranks, text in found:
            other, expected = first.setdefault(tuple(ranks), (rank, text))
            if text != expected:
                raise RankMismatchError(
                    f"{what}: rank(s) {rank} differ from rank {other}; "
                    f"{_first_difference(expected, text, other, rank)}"
                )


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """JSON values of all ranks of the group, in rank order; equal ones are one object."""
    texts = gather_text(json.dumps(value), group)
    values = {text: json.loads(text) for text in dict.fromkeys(texts)}
    return [values[text] for text in texts]
