"""The doctor on real ranks: all is well, and planted faults each give a failing line."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from amo_dist.doctor import examination, machine, models, optimizer
from amo_dist.doctor.examination import Check
from amo_dist.doctor.site import Site
from tests.distributed.harness import Ranks

Lines = dict[str, tuple[str, str]]


def examine(path: str, checks: Sequence[Check] | str, seconds: float = 240.0) -> Lines:
    """Verdict and figure of each check, as this rank knows them.

    Args:
        path: File of the ranks' store.
        checks: Checks; or the beginning of the names of the doctor's own.
        seconds: Time of all checks together.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    site = Site(rank, world_size, torch.device("cpu"), dist.FileStore(path, world_size))
    if isinstance(checks, str):
        everything = [*machine.checks(site, Path(path).parent), *optimizer.checks(site)]
        checks = [check for check in everything if check.name.startswith(checks)]
    verdicts = examination.examine(site, checks, seconds)
    return {one.name: (one.verdict, one.figure) for one in verdicts}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def everything(rank: int, world_size: int, path: str) -> Lines:
    return examine(path, "")


@pytest.mark.slow
def test_every_check_passes(run_on: Ranks, path: str) -> None:
    first, *others = run_on(4)(everything, path)
    assert all(lines == first for lines in others)
    layouts = {f"layout {name}" for name in models.LAYOUTS}
    assert {*first} == {*layouts, "arithmetic", "network", "disk"}
    assert {verdict for verdict, _ in first.values()} == {"ok"}
    assert all("the bits of one process" in first[name][1] for name in layouts)


def with_faults(rank: int, world_size: int, path: str) -> list[Lines]:
    exchange, make_model = dist.all_to_all_single, models.make_model

    def lose(received: torch.Tensor, *args: Any) -> None:
        exchange(received, *args)
        if rank == 1:
            received[-1] += 1

    def move(site: Site, layout: str) -> Any:
        model = make_model(site, layout)
        if layout == "replicate" and rank == 1:
            next(model.parameters()).data[0, 0] += 1
        return model

    with mock.patch.object(dist, "all_to_all_single", lose):
        lines = [examine(f"{path} network", "network")]
    with mock.patch.object(models, "make_model", move):
        lines.append(examine(f"{path} layout", "layout"))
    return lines


def test_lost_bytes_and_other_values_are_found(run_on: Ranks, path: str) -> None:
    first, second = run_on(2)(with_faults, path)
    assert first == second
    network, layouts = first
    assert network["network"][0] == "FAIL"
    assert network["network"][1].startswith("rank 1: from rank 0: found other bytes")
    verdicts = {name: verdict for name, (verdict, _) in layouts.items() if verdict != "skip"}
    assert verdicts == {"layout one": "ok", "layout replicate": "FAIL", "layout fsdp": "ok"}


def with_missing_rank(rank: int, world_size: int, path: str) -> Lines:
    if rank == 1:
        time.sleep(3)  # there, but it does not answer
        os._exit(0)
    with mock.patch.object(examination, "GRACE", 0.5):
        return examine(path, [Check("meet", dist.barrier), Check("later")], 1.0)


def test_a_missing_rank(run_on: Ranks, path: str) -> None:
    lines, _, others = run_on(3, fresh=True)(with_missing_rank, path)
    assert lines == others
    assert lines["meet"] == ("FAIL", "no answer from rank 1")
    assert lines["later"] == ("skip", "after meet ranks may be out of step")
