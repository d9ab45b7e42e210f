"""Where checks run: the ranks, their nodes, the device of each."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from amo_dist.distributed.agreement import gather_json

MEETING_SECONDS = 60.0
"""For all ranks to be there."""


class Fault(RuntimeError):
    """What a check measured is wrong; raised where no collective is under way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """What checks are told of the ranks.

    Attributes:
        rank: This process.
        nodes: The ranks of each node.
        device: Of this rank: ``cuda`` with its index, or ``cpu``.
        control: Group of all ranks on the CPU that checks leave alone; None on one rank.
        store: Of all ranks, used by nothing else; None on one rank.
        share: Seconds that a figure may take to be measured on larger sizes; 0 for the least.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    device: torch.device
    control: dist.ProcessGroup | None = None
    store: Any = None
    share: float = 0.0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def is_cuda(self) -> bool:
        """Whether the ranks have a CUDA device each."""
        return self.device.type == "cuda"

    def sign(self, key: str, seconds: float) -> None:
        """Meet the other ranks; a key serves once.

        Raises:
            Fault: Names the ranks that have not come within so many seconds.
        """
        if self.store is not None:
            sign(self.store, key, self.rank, self.world_size, seconds)

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        where = f"on {len(self.nodes)} node{'s' * (len(self.nodes) > 1)}"
        backend = ("nccl" if self.is_cuda else "gloo") if self.world_size > 1 else "no group"
        return f"{ranks} {where}, {self.device.type}, {backend}"


def join(seconds: float, share: float) -> Site:
    """Meet the other ranks and start the process groups; one rank needs neither.

    What a launcher such as torchrun sets is read from the environment.

    Args:
        seconds: After which a collective between devices fails; none should ever come to it.
        share: Of the site.

    Raises:
        Fault: A rank has no device, another than rank 0, or is not there.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device, problem = _take_device()
    if world_size == 1:
        if problem:
            raise Fault(problem)
        return Site(0, ((0,),), device, share=share)
    timeout = datetime.timedelta(seconds=MEETING_SECONDS)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    except RuntimeError as error:
        raise Fault(f"the ranks did not meet: {error}") from error
    _call_roll(store, rank, world_size, {"device": device.type, "problem": problem})
    backend = "nccl" if device.type == "cuda" else "gloo"
    slow = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=slow)
    node = os.environ.get("GROUP_RANK", socket.gethostname())
    # A copy: a thread that waits in the store holds back all others that use the same object.
    return make_site(device, store.clone(), node=node, share=share)


def make_site(device: torch.device, store: Any, *, node: str, share: float = 0.0) -> Site:
    """The site of the default process group; a collective over it.

    Args:
        device: Of this rank.
        store: Of the site.
        node: A name that ranks of one node share.
        share: Of the site.
    """
    timeout = datetime.timedelta(seconds=MEETING_SECONDS)
    control = dist.new_group(backend="gloo", timeout=timeout)
    ranks_by_node: dict[str, list[int]] = {}
    for rank, name in enumerate(gather_json(node, control)):
        ranks_by_node.setdefault(name, []).append(rank)
    nodes = tuple(tuple(ranks) for ranks in ranks_by_node.values())
    return Site(dist.get_rank(), nodes, device, control, store, share)


def _take_device() -> tuple[torch.device, str]:
    """The device of this rank, and what is wrong with it."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), ""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except RuntimeError as error:
        return device, " ".join(str(error).split())
    return device, ""


def sign(store: Any, key: str, rank: int, world_size: int, seconds: float, text: str = "") -> None:
    """Leave a text under a key of this rank, and wait for the other ranks.

    Raises:
        Fault: Names the ranks that have not come within so many seconds.
    """
    keys = [f"doctor/{key}/{other}" for other in range(world_size)]
    store.set(keys[rank], text)
    try:
        store.wait(keys, datetime.timedelta(seconds=seconds))
    except RuntimeError:
        missing = [other for other, name in enumerate(keys) if not store.check([name])]
        raise Fault(f"no answer from {name_ranks(missing)}") from None


def _call_roll(store: Any, rank: int, world_size: int, mine: Mapping[str, str]) -> None:
    """Have every rank tell its device, before any group is made that could wait for it."""
    sign(store, "device", rank, world_size, MEETING_SECONDS, json.dumps(mine))
    found = [json.loads(store.get(f"doctor/device/{other}")) for other in range(world_size)]
    for other, told in enumerate(found):
        if told["problem"]:
            raise Fault(f"{name_ranks([other])}: {told['problem']}")
        if told["device"] != found[0]["device"]:
            raise Fault(f"device: rank 0 has {found[0]['device']}, rank {other} {told['device']}")


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 1, 3``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def local_index(nodes: Sequence[Sequence[int]], index: int) -> list[int]:
    """The ranks that are the ``index``-th of their node."""
    return [ranks[index] for ranks in nodes if index < len(ranks)]
