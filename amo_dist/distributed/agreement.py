"""What all ranks of the world must hold alike: observations, plan, structure, and each step.

Every function here is a collective over its group: all ranks of it call in the same order. With
no group (one process) each is the identity.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_DIRECT_RANKS = 16
"""Up to so many ranks send small vectors to each other at once on CPU: gloo's ring takes two rounds
of as many messages, one after the other, which is most of what a reduction costs."""


_FAILED = "\0failed\0"
"""Begins a text that tells of a failure."""


class RankMismatchError(RuntimeError):
    """Ranks hold different configurations, parameters, plans or checkpoints."""


def world_group() -> dist.ProcessGroup | None:
    """The default process group, or None where there is one process or none was initialised."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


_devices: WeakKeyDictionary[dist.ProcessGroup, torch.device] = WeakKeyDictionary()
"""Device of the parameters that are trained over a group; a group made later may have its name."""


def control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Device of small control tensors: the CPU where the group can reduce there.

    Else that of ``init_process_group(device_id=...)`` or of the parameters, as nobody may have set
    a current device.
    """
    if group is None or "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    if group.bound_device_id is not None:
        return group.bound_device_id
    if group in _devices:
        return _devices[group]
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "a process group without CPU backend needs an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def take_device(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Put control tensors of a group where the parameters lie, if it can send them there.

    Args:
        group: The world.
        device: Of the parameters.

    Raises:
        ValueError: Names the backends that were found, and the line that initialises what is
            needed.
    """
    if group is None:
        return
    if device.type != "cpu":
        _devices[group] = device
    found = dist.get_backend_config(group)
    if f"{device.type}:" not in found:
        needed = "'cpu:gloo,cuda:nccl'" if device.type in ("cpu", "cuda") else "one for both"
        raise ValueError(
            f"process_group: found the backends {found!r} and parameters on {device.type}, "
            f"expected a backend for {device.type}: init_process_group({needed})"
        )


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
    return text or "" if group is None else _broadcast(text or "", 0, group)


def _broadcast(text: str, source: int, group: dist.ProcessGroup) -> str:
    """The text that the rank ``source`` of the group passes; as tensors, nothing is pickled."""
    device, is_source = control_device(group), dist.get_rank(group) == source
    payload = list(text.encode()) if is_source else []
    size = torch.tensor([len(payload)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    buffer = torch.tensor(payload or [0] * int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, group=group, group_src=source)
    return bytes(buffer.tolist()).decode()


def gather_text(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """The texts of all ranks of the group, in rank order.

    Each distinct text travels once, and none where all are alike: with a thousand ranks of a few
    kinds (pipeline stages), gathering every rank's own would be gigabytes.
    """
    if group is None:
        return [text]
    digest = hashlib.sha256(text.encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=control_device(group))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    digests = [bytes(part.tolist()) for part in parts]
    known = {digest: text}
    distinct = list(dict.fromkeys(digests))
    for other in distinct if len(distinct) > 1 else ():
        known[other] = _broadcast(text, digests.index(other), group)
    return [known[other] for other in digests]


def failure_text(what: str, error: Exception) -> str:
    """A text for `check_alike`, unlike that of any other rank: all raise what failed on this one.

    Args:
        what: Failed.
        error: How; a ``ValueError`` is one on all ranks, else all raise ``RuntimeError``.
    """
    kind = type(error).__name__
    return f"{_FAILED}{kind}{_FAILED}{what} failed on rank {dist.get_rank()}: {kind}: {error}"


def _raise_failure(texts: Iterable[str]) -> None:
    """Raise the first failure that one of the texts tells of."""
    for text in texts:
        if text.startswith(_FAILED):
            _, kind, told = text.split(_FAILED, 2)
            raise ValueError(told) if kind == "ValueError" else RuntimeError(told)


def fingerprint56(text: str) -> int:
    """A positive integer of 56 bits that tells texts apart."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def check_alike(what: str, text: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank where the ranks of the world hold different texts.

    Args:
        what: Names the text in the error.
        text: The same on all ranks, or the error tells which ranks differ and where.
        group: The world.

    Raises:
        RankMismatchError: Names the ranks that differ from the first, and a line that differs.
        RuntimeError: A text is a `failure_text`; names its rank and its error. Or ValueError.
    """
    ranks = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
    check_alike_by_ranks(what, {ranks: text}, group)


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
        RankMismatchError: Names the ranks of a set that differ from its first, or that do not
            know of it, and a line that differs.
        RuntimeError: As `check_alike`.
    """
    all_found = gather_json(list(text_by_ranks.items()), group)
    members = range(len(all_found)) if group is None else dist.get_process_group_ranks(group)
    by_rank = {
        rank: {tuple(ranks): text for ranks, text in found}
        for rank, found in zip(members, all_found, strict=True)
    }
    _raise_failure(text for found in by_rank.values() for text in found.values())
    for ranks in sorted({ranks for found in by_rank.values() for ranks in found}):
        texts = {rank: by_rank.get(rank, {}).get(ranks, "nothing") for rank in ranks}
        expected = texts[ranks[0]]
        others = [rank for rank in ranks if texts[rank] != expected]
        if others:
            ours, theirs = _first_difference(expected, texts[others[0]])
            raise RankMismatchError(
                f"{what}: rank(s) {', '.join(map(str, others))} differ from rank {ranks[0]}; "
                f"rank {ranks[0]} has {ours}; rank {others[0]} has {theirs}"
            )


def _first_difference(one: str, other: str) -> tuple[str, str]:
    """The first line that only one of two texts has, of each; or where their order differs."""
    left, right = one.split("\n"), other.split("\n")
    mine, theirs = dict.fromkeys(left), dict.fromkeys(right)
    if mine.keys() == theirs.keys():
        pairs = itertools.zip_longest(left, right, fillvalue="nothing")
        return next(pair for pair in pairs if pair[0] != pair[1])
    return (
        next((line for line in mine if line not in theirs), "nothing"),
        next((line for line in theirs if line not in mine), "nothing"),
    )


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """JSON values of all ranks of the group, in rank order; equal ones are one object."""
    texts = gather_text(json.dumps(value), group)
    values = {text: json.loads(text) for text in dict.fromkeys(texts)}
    return [values[text] for text in texts]


def slowest(seconds: float, group: dist.ProcessGroup | None) -> float:
    """The most seconds of any rank of the group, to a nanosecond; a collective over it."""
    nanoseconds = torch.tensor([round(seconds * 1e9)], device=control_device(group))
    return float(max_over(nanoseconds, group).item()) / 1e9
