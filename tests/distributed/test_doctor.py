"""The doctor on real ranks: all is well, and planted faults each give a failing line."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from amo_dist.distributed.ownership import Job, assign
from amo_dist.engine import step as steps
from amo_dist.tools.doctor import machine, optimizer, probe
from amo_dist.tools.doctor.examination import Check, Examination, Verdict
from amo_dist.tools.doctor.models import make_model
from amo_dist.tools.doctor.site import Site, make_site
from tests.distributed.harness import Ranks

CPU = torch.device("cpu")
Lines = dict[str, tuple[str, str]]


def site_of(path: str, ranks_per_node: int = 8) -> Site:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(path, world_size)
    everyone = (tuple(range(world_size)),)
    return make_site(Site(rank, everyone, CPU, store=store), f"node {rank // ranks_per_node}")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def examine(site: Site, checks: Sequence[Check], deadline: float = 60.0) -> Lines:
    """Verdict and figure of each check, as this rank knows them."""
    said: list[Verdict] = []
    Examination(site, seconds=10 * deadline, deadline=deadline, report=said.append).run(checks)
    return {one.name: (one.verdict, one.figure) for one in said}


def failures(lines: Lines) -> dict[str, str]:
    return {name: figure for name, (verdict, figure) in lines.items() if verdict == "FAIL"}


# ------------------------------------------------------------------ a sound world


def everything(rank: int, world_size: int, path: str) -> Lines:
    # Two nodes where there are four ranks.
    site = site_of(path, 2)
    return examine(site, [*machine.checks(site), *optimizer.checks(site)])


@pytest.mark.slow
def test_every_check_passes(run_on: Ranks, path: str) -> None:
    first, *others = run_on(4)(everything, path)
    assert all(found == first for found in others)
    assert failures(first) == {}
    layouts = {f"layout {name}" for name in ("one", "replicate", "fsdp", "hsdp", "tp x fsdp")}
    alone = {"all-to-all", "spectra", "run twice", "resume", "skipped steps"}
    assert {*first} == {*layouts, *alone, "no waits"}
    assert {name for name, (verdict, _) in first.items() if verdict == "skip"} == {"no waits"}
    assert all("the bits of one process" in first[name][1] for name in layouts)


# ------------------------------------------------------------------ planted faults


def deal_otherwise(*args: Any, **options: Any) -> tuple[Job, ...]:
    """As `assign`, but the first matrix goes to the other of two ranks."""
    first, *rest = assign(*args, **options)
    return dataclasses.replace(first, owner=1 - first.owner), *rest


def with_wrong_owner(rank: int, world_size: int, path: str) -> Lines:
    site = site_of(path)
    one, replicate, fsdp = optimizer.layouts(site)[:3]
    lines = examine(site, [one])
    deal = deal_otherwise if rank == 1 else assign
    with mock.patch.object(steps, "assign", deal):
        lines |= examine(site, [replicate])
    return lines | examine(site, [fsdp])


def test_a_wrong_owner(run_on: Ranks, path: str) -> None:
    found = run_on(2)(with_wrong_owner, path)
    assert found[0] == found[1]
    told = failures(found[0])
    # Told before anything is exchanged, so that the layouts after it run.
    assert told.keys() == {"layout replicate"}
    assert "RankMismatchError: exchange plan: rank(s) 1 differ" in told["layout replicate"]


def with_wrong_bits(rank: int, world_size: int, path: str) -> Lines:
    site = site_of(path)

    def make(site: Site, layout: str) -> Any:
        model = make_model(site, layout)
        if layout == "replicate" and rank == 1:
            next(model.parameters()).data[0, 0] += 1
        return model

    with mock.patch.object(optimizer, "make_model", make):
        return examine(site, optimizer.layouts(site)[:2])


def test_a_rank_with_other_values(run_on: Ranks, path: str) -> None:
    found = run_on(2)(with_wrong_bits, path)
    assert found[0] == found[1]
    told = failures(found[0])
    assert told.keys() == {"layout replicate"}
    assert told["layout replicate"].startswith("parameters differ from one process's by")


def with_lost_bytes(rank: int, world_size: int, path: str) -> Lines:
    site = site_of(path)
    real = dist.all_to_all_single

    def lose(received: torch.Tensor, *args: Any) -> None:
        real(received, *args)
        if rank == 1:
            received[-1] += 1

    (check,) = (c for c in machine.checks(site) if c.name == "all-to-all")
    with mock.patch.object(dist, "all_to_all_single", lose):
        return examine(site, [check])


def test_bytes_that_are_lost_on_the_way(run_on: Ranks, path: str) -> None:
    found = run_on(2)(with_lost_bytes, path)
    assert found[0] == found[1]
    assert failures(found[0])["all-to-all"].startswith("rank 1: from rank 0: found other bytes")


def with_wrong_sum(rank: int, world_size: int, path: str) -> tuple[Lines, Lines]:
    site = site_of(path, 1)
    assert site.hosts == (socket.gethostname(),) * world_size
    sound = examine(site, probe.checks(site, Path(path).parent))
    reduce = dist.all_reduce

    def lose(tensor: torch.Tensor) -> None:
        reduce(tensor)
        if rank == 1:
            tensor[-1] += 1

    (check,) = (c for c in probe.checks(site, Path(path)) if c.name == "all-reduce")
    with mock.patch.object(dist, "all_reduce", lose):
        return sound, examine(site, [check])


def test_the_probe_on_two_ranks(run_on: Ranks, path: str) -> None:
    first, second = run_on(2)(with_wrong_sum, path)
    assert first == second
    sound, torn = first
    assert [verdict for verdict, _ in sound.values()] == ["ok", "ok", "ok"]
    assert torn["all-reduce"] == ("FAIL", "rank 1: the sum of all ranks is wrong")
