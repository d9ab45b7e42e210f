"""The doctor on one process: verdicts, planted faults, the roll call, the command."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from amo_dist.__main__ import main
from amo_dist.doctor import machine, optimizer
from amo_dist.doctor import site as sites
from amo_dist.doctor.examination import Check, conclude, examine
from amo_dist.doctor.site import Fault, Site

CPU = torch.device("cpu")
ONE = Site(0, 1, CPU)


def fault(*_: Any) -> str:
    raise Fault("three")


def test_only_a_stuck_check_stops_the_others() -> None:
    never = threading.Event()
    checks = [
        Check("one", lambda: 3, lambda values: f"{values[0]} s"),
        Check("two", lambda: 1 // 0),
        Check("three", figure=fault),
        Check("four", skip="no room"),
        Check("stuck", lambda: never.wait()),
        Check("later"),
    ]
    verdicts = [(one.verdict, one.name) for one in examine(ONE, checks, 0.4)]
    never.set()
    expected = ("ok", "FAIL", "FAIL", "skip", "FAIL", "skip")
    assert verdicts == [(word, one.name) for word, one in zip(expected, checks, strict=True)]


def test_the_error_of_the_rank_that_broke_is_printed_with_its_ranks() -> None:
    ended, broke = {"state": "ended", "values": 1}, {"state": "broke", "error": "E: x"}
    stuck = {"state": "stuck", "error": "no end within 5 s"}
    assert conclude(Check("c"), [stuck, ended, broke, broke]).figure == "ranks 2, 3: E: x"
    assert conclude(Check("c"), [ended, broke]).is_last
    assert not conclude(Check("c"), [broke, broke]).is_last
    assert not conclude(Check("c"), [ended, {**ended, "error": "a fault"}]).is_last


def test_the_roll_names_missing_and_unlike_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def roll(*others: str) -> None:
        store = dist.HashStore()
        for rank, device in enumerate(others, start=1):
            store.set(f"doctor/roll/{rank}", json.dumps([device, "host"]))
        sites.call_roll(Site(0, 3, CPU, store))

    monkeypatch.setattr(sites, "MEETING_SECONDS", 0.2)
    roll("cpu", "cpu")
    with pytest.raises(Fault, match=r"ranks 1, 2"):
        roll()
    with pytest.raises(Fault, match=r"device: rank 0 has cpu, rank 1 cuda"):
        roll("cuda", "cpu")


@pytest.mark.parametrize(
    ("name", "off"),
    [("orthogonalize", lambda x: x * 1.1), ("spectrum", lambda x: (x[0] * 1.01, x[1]))],
)
def test_a_planted_fault_is_found(
    name: str, off: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel in bfloat16 on the device, or an observation, whose result is off."""
    machine.arithmetic(ONE)
    real, is_device = getattr(machine, name), itertools.cycle([False, True])  # the CPU comes first

    def wrong(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        return off(result) if next(is_device) else result

    monkeypatch.setattr(machine, name, wrong)
    with pytest.raises(Fault):
        machine.arithmetic(ONE)


def test_a_slow_device_is_named() -> None:
    values = [{"difference": 0.01, "seconds": seconds} for seconds in (1.0, 1.1, 2.5, 1.2)]
    with pytest.raises(Fault, match=r"^rank 2: 2\.1 times"):
        machine.arithmetic_figure(values, compares=True)
    machine.arithmetic_figure(values, compares=False)


@pytest.mark.parametrize("difference", [0.1, float("inf")])
def test_parameters_far_from_those_of_one_process_are_a_fault(difference: float) -> None:
    with pytest.raises(Fault):
        optimizer.layout_figure([{"steps": [5], "difference": it} for it in (0.0, difference)])


def test_the_probe_of_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"")
    assert main(["doctor", "--probe", str(tmp_path)]) == 1
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == ["ok   arithmetic", "skip network", "FAIL disk"]
    assert [*tmp_path.iterdir()] == []


def test_a_launcher_without_its_other_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sites, "MEETING_SECONDS", 1.0)
    names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0", "MASTER_ADDR": "localhost"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("FAIL ranks")
    assert main(["doctor", "--seconds", "0"]) == 2
    assert "--seconds" in capsys.readouterr().err


def test_a_driver_under_which_pytorch_sees_no_gpu_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "nvidia_driver", lambda: "570.86.15")
    monkeypatch.delenv("AMO_DEVICE", raising=False)
    assert main(["doctor"]) == 2
    error = capsys.readouterr().err
    assert "found NVIDIA's driver 570.86.15" in error
    assert f"PyTorch {torch.__version__}" in error
