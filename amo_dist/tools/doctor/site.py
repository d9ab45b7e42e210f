"""Where checks run: the ranks, their nodes, the device of each."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from amo_dist.distributed.agreement import gather_json
from amo_dist.tools.doctor.examination import Fault, name_ranks

MEETING_SECONDS = 60.0
"""For all ranks to be there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """What checks are told of the ranks.

    Attributes:
        rank: This process.
        nodes: The ranks of each node.
        device: Of this rank: ``cuda`` with its index, or ``cpu``.
        control: Group of all ranks on the CPU that checks leave alone; None on one rank.
        share: Seconds that a figure may take to be measured on larger sizes; 0 for the least.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    device: torch.device
    control: dist.ProcessGroup | None
    share: float = 0.0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def is_cuda(self) -> bool:
        """Whether the ranks have a CUDA device each."""
        return self.device.type == "cuda"

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
        return Site(0, ((0,),), device, None, share)
    timeout = datetime.timedelta(seconds=MEETING_SECONDS)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    except RuntimeError as error:
        raise Fault(f"the ranks did not meet: {error}") from error
    _call_roll(store, rank, world_size, {"device": device.type, "problem": problem})
    backend = "nccl" if device.type == "cuda" else "gloo"
    slow = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=slow)
    return make_site(device, node=os.environ.get("GROUP_RANK", socket.gethostname()), share=share)


def make_site(device: torch.device, *, node: str, share: float = 0.0) -> Site:
    """The site of the default process group; a collective over it.

    Args:
        device: Of this rank.
        node: A name that ranks of one node share.
        share: Of the site.
    """
    if not dist.is_initialized():
        return Site(0, ((0,),), device, None, share)
    control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=MEETING_SECONDS))
    ranks_by_node: dict[str, list[int]] = {}
    for rank, name in enumerate(gather_json(node, control)):
        ranks_by_node.setdefault(name, []).append(rank)
    nodes = tuple(tuple(ranks) for ranks in ranks_by_node.values())
    return Site(dist.get_rank(), nodes, device, control, share)


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


def _call_roll(store: Any, rank: int, world_size: int, mine: Mapping[str, str]) -> None:
    """Have every rank tell its device, before any group is made that could wait for it."""
    store.set(f"doctor/{rank}", json.dumps(mine))
    end = time.monotonic() + MEETING_SECONDS
    found, missing = {}, []
    for other in range(world_size):
        left = datetime.timedelta(seconds=max(0.1, end - time.monotonic()))
        try:
            store.wait([f"doctor/{other}"], left)
            found[other] = json.loads(store.get(f"doctor/{other}"))
        except RuntimeError:
            missing.append(other)
    if missing:
        raise Fault(f"no answer from {name_ranks(missing)} within {MEETING_SECONDS:.0f} s")
    for other, told in found.items():
        if told["problem"]:
            raise Fault(f"{name_ranks([other])}: {told['problem']}")
        if told["device"] != found[0]["device"]:
            raise Fault(f"device: rank 0 has {found[0]['device']}, rank {other} {told['device']}")


def local_index(nodes: Sequence[Sequence[int]], index: int) -> list[int]:
    """The ranks that are the ``index``-th of their node."""
    return [ranks[index] for ranks in nodes if index < len(ranks)]
