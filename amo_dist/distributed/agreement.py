"""Agreement of all ranks of a world, on observations, plans, structure and each step.

Most functions are collectives over a group, which all of its ranks call in the same order. Without
a group (one process) they return what they get.
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
"""Most ranks that exchange small vectors directly on CPU. gloo's ring would take two rounds of one
message per rank, one after the other, and these messages are most of the cost of a reduction."""


_FAILED = "\0failed\0"
"""Start of a text that reports a failure."""


class RankMismatchError(RuntimeError):
    """Ranks hold different configurations, parameters, plans or checkpoints."""


def world_group() -> dist.ProcessGroup | None:
    """The default process group, or None where there is one process or none was initialised."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


_devices: WeakKeyDictionary[dist.ProcessGroup, torch.device] = WeakKeyDictionary()
"""Device of the parameters by group. Keys are objects, as a later group may get an earlier name."""


def control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Device of small control tensors.

    It is the CPU if the group has a backend for it, else the device of
    ``init_process_group(device_id=...)``, else that of the parameters: a script may never have set
    the current device.
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
    """Remember the device of the parameters for control tensors, if the group has a backend for it.

    Args:
        group: Group of the world.
        device: Device of the parameters.

    Raises:
        ValueError: The group has no backend for the device; names the line that initialises one.
    """
    if group is None:
        return
    if device.type != "cpu":
        _devices[group] = device
    backends = dist.get_backend_config(group)
    if f"{device.type}:" not in backends:
        needed = "'cpu:gloo,cuda:nccl'" if device.type in ("cpu", "cuda") else "one for both"
        raise ValueError(
            f"process_group: found the backends {backends!r} and parameters on {device.type}, "
            f"expected a backend for {device.type}: init_process_group({needed})"
        )


def sum_over(values: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """Elementwise sum over ranks, in float64.

    The sum is exact if only one rank has a value other than zero in a slot.
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
    """The text of the group's first rank; those of the other ranks are ignored."""
    return text or "" if group is None else _broadcast(text or "", 0, group)


def _broadcast(text: str, source: int, group: dist.ProcessGroup) -> str:
    """The text of the rank ``source`` of the group; it travels as a tensor and not as a pickle."""
    device, is_source = control_device(group), dist.get_rank(group) == source
    payload = list(text.encode()) if is_source else []
    size = torch.tensor([len(payload)], device=device)
    dist.broadcast(size, group=group, group_src=source)
    buffer = torch.tensor(payload or [0] * int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, group=group, group_src=source)
    return bytes(buffer.tolist()).decode()


def gather_text(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """The texts of all ranks of the group, in rank order.

    Each distinct text travels once, and none travels if all are alike. A thousand ranks of a few
    kinds (pipeline stages) would otherwise send gigabytes.
    """
    if group is None:
        return [text]
    digest = hashlib.sha256(text.encode()).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8, device=control_device(group))
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    digests = [bytes(part.tolist()) for part in parts]
    known = {digest: text}
    distinct = list(dict.fromkeys(digests))
    for other in distinct if len(distinct) > 1 else ():
        known[other] = _broadcast(text, digests.index(other), group)
    return [known[other] for other in digests]


def failure_text(activity: str, error: Exception) -> str:
    """A text for `check_alike` that makes all ranks raise what failed on this one.

    Args:
        activity: Name of what failed.
        error: Error of this rank. All ranks raise ``ValueError`` for a ``ValueError``, and
            ``RuntimeError`` for any other.
    """
    kind = type(error).__name__
    return f"{_FAILED}{kind}{_FAILED}{activity} failed on rank {dist.get_rank()}: {kind}: {error}"


def _raise_failure(texts: Iterable[str]) -> None:
    """Raise the first failure among the texts."""
    for text in texts:
        if text.startswith(_FAILED):
            _, kind, message = text.split(_FAILED, 2)
            raise ValueError(message) if kind == "ValueError" else RuntimeError(message)


def fingerprint56(text: str) -> int:
    """A positive integer of 56 bits that differs between different texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def check_alike(subject: str, text: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if the ranks of the world hold different texts.

    Args:
        subject: Name of the text, for the error.
        text: Text of this rank.
        group: Group of the world.

    Raises:
        RankMismatchError: Names the ranks that differ from the first, and a line that differs.
        RuntimeError: A text is a `failure_text`; names its rank and its error.
        ValueError: Likewise, for a ``ValueError``.
    """
    ranks = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
    check_alike_by_ranks(subject, {ranks: text}, group)


def check_alike_by_ranks(
    subject: str, text_by_ranks: Mapping[tuple[int, ...], str], group: dist.ProcessGroup | None
) -> None:
    """`check_alike` for many sets of ranks at once, as one collective over the world.

    Every rank of the world raises for a mismatch, also a rank outside of the set: it would
    otherwise wait for the others in the next collective.

    Args:
        subject: Name of the texts, for the error.
        text_by_ranks: Text of this rank by set of global ranks, for the sets that it belongs to.
        group: Group of the world.

    Raises:
        RankMismatchError: Names the ranks of a set that differ from its first, or that do not
            know of it, and a line that differs.
        RuntimeError: A text is a `failure_text`, see `check_alike`.
    """
    gathered = gather_json(list(text_by_ranks.items()), group)
    members = range(len(gathered)) if group is None else dist.get_process_group_ranks(group)
    by_rank = {
        rank: {tuple(ranks): text for ranks, text in items}
        for rank, items in zip(members, gathered, strict=True)
    }
    _raise_failure(text for texts in by_rank.values() for text in texts.values())
    for ranks in sorted({ranks for texts in by_rank.values() for ranks in texts}):
        texts = {rank: by_rank.get(rank, {}).get(ranks, "nothing") for rank in ranks}
        expected = texts[ranks[0]]
        others = [rank for rank in ranks if texts[rank] != expected]
        if others:
            ours, theirs = _first_difference(expected, texts[others[0]])
            raise RankMismatchError(
                f"{subject}: rank(s) {', '.join(map(str, others))} differ from rank {ranks[0]}; "
                f"rank {ranks[0]} has {ours}; rank {others[0]} has {theirs}"
            )


def _first_difference(left: str, right: str) -> tuple[str, str]:
    """The first line of each text that the other lacks, or the first place of another order."""
    left_lines, right_lines = left.split("\n"), right.split("\n")
    if set(left_lines) == set(right_lines):
        pairs = itertools.zip_longest(left_lines, right_lines, fillvalue="nothing")
        return next(pair for pair in pairs if pair[0] != pair[1])
    return (
        next((line for line in left_lines if line not in right_lines), "nothing"),
        next((line for line in right_lines if line not in left_lines), "nothing"),
    )


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """JSON values of all ranks of the group, in rank order; equal ones are one object."""
    texts = gather_text(json.dumps(value), group)
    values = {text: json.loads(text) for text in dict.fromkeys(texts)}
    return [values[text] for text in texts]


def slowest(seconds: float, group: dist.ProcessGroup | None) -> float:
    """Seconds of the slowest rank of the group, to a nanosecond; a collective over it."""
    nanoseconds = torch.tensor([round(seconds * 1e9)], device=control_device(group))
    return float(max_over(nanoseconds, group).item()) / 1e9
