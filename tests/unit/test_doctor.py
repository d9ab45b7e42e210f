"""The doctor on one process: verdicts, planted faults, the roll call, the command."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from amo_dist.__main__ import main
from amo_dist.doctor import machine, optimizer
from amo_dist.doctor import site as sites
from amo_dist.doctor.examination import Check, Examination, conclude
from amo_dist.doctor.models import Run
from amo_dist.doctor.site import Fault, Site

CPU = torch.device("cpu")
ONE = Site(0, 1, CPU)


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Give back the levels of loggers, which the command sets for its process."""
    loggers = [logging.getLogger(name) for name in ("amo_dist", "torch.distributed.tensor")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def run(checks: list[Check], seconds: float = 120.0) -> list[str]:
    lines: list[str] = []
    Examination(ONE, seconds, lambda verdict: lines.append(str(verdict))).run(checks)
    return lines


def fault(*_: Any) -> str:
    raise Fault("three")


def test_a_verdict_is_a_line_and_only_a_stuck_check_stops_the_others() -> None:
    never = threading.Event()
    checks = [
        Check("one", lambda: 3, lambda values: f"{values[0]} s"),
        Check("two", lambda: 1 // 0),
        Check("three", figure=fault),
        Check("four", skip="no room"),
        Check("stuck", lambda: never.wait()),
        Check("later"),
    ]
    lines = run(checks, 0.4)
    never.set()
    assert [line[:9] for line in lines[:4]] == ["ok   one:", "FAIL two:", "FAIL thre", "skip four"]
    assert lines[4:] == [
        "FAIL stuck: no end within 0 s",
        "skip later: after stuck ranks may be out of step",
    ]


def test_the_error_of_the_rank_that_broke_is_printed_with_its_ranks() -> None:
    ended, broke = {"state": "ended", "values": 1}, {"state": "broke", "error": "E: x"}
    stuck = {"state": "stuck", "error": "no end within 5 s"}
    assert conclude(Check("c"), [stuck, ended, broke, broke]).figure == "ranks 2, 3: E: x"


def roll(monkeypatch: pytest.MonkeyPatch, **others: str) -> None:
    monkeypatch.setattr(sites, "MEETING_SECONDS", 0.2)
    store = dist.HashStore()
    for rank, device in others.items():
        store.set(f"doctor/roll/{rank[1:]}", json.dumps([device, "host"]))
    sites.call_roll(Site(0, 3, CPU, store))


def test_the_roll_is_called_before_any_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    roll(monkeypatch, r1="cpu", r2="cpu")
    with pytest.raises(Fault, match=r"no answer from ranks 1, 2"):
        roll(monkeypatch)
    with pytest.raises(Fault, match=r"device: rank 0 has cpu, rank 1 cuda"):
        roll(monkeypatch, r1="cuda", r2="cpu")


def off_by(factor: float, which: int) -> Callable[..., Any]:
    """A kernel in bfloat16 on the device, or an observation, whose result is off."""
    real = (machine.orthogonalize, machine.spectrum)[which]
    calls: list[int] = []

    def wrong(*args: Any, **options: Any) -> Any:
        calls.append(1)
        result = real(*args, **options)
        if len(calls) % 2:  # the CPU's comes first
            return result
        return (result[0] * factor, result[1]) if which else result * factor

    return wrong


@pytest.mark.parametrize(
    ("target", "name", "value", "check"),
    [
        (machine, "orthogonalize", off_by(1.1, 0), lambda: machine.arithmetic(ONE)),
        (machine, "spectrum", off_by(1.01, 1), lambda: machine.arithmetic(ONE)),
        (optimizer.Run, "train", lambda *_: None, lambda: optimizer.skipped(ONE)),
        (torch, "equal", lambda *_: False, lambda: optimizer.resume(ONE)),
    ],
)
def test_a_planted_fault_is_found(
    target: Any, name: str, value: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    monkeypatch.setattr(target, name, value)
    with pytest.raises(Fault):
        check()


def test_state_that_does_not_come_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(ONE, "one", optimizer.CONFIG)
    monkeypatch.setattr(type(run.optimizer), "load_state_dict", lambda self, state: None)
    with pytest.raises(Fault, match="parameters differ"):
        optimizer.resume(ONE)


def test_a_slow_device_is_named_and_a_slow_millisecond_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = [{"difference": 0.01, "seconds": seconds} for seconds in (1.0, 1.1, 2.5, 1.2)]
    with pytest.raises(Fault, match=r"^rank 2: 2\.1 times"):
        machine.arithmetic_figure(values, compares=True)
    machine.arithmetic_figure(values, compares=False)
    clock, slow = [0.0], [0.0]

    def work() -> None:
        clock[0] += 0.001 + slow[0]
        slow[0] = 0.0

    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    slow[0] = 0.5
    assert machine.least_seconds(work, ONE) == pytest.approx(0.001)
    assert clock[0] > machine.TIMINGS * machine.LEAST_SECONDS


def test_parameters_and_plans_of_one_process_are_compared() -> None:
    one = {"steps": [5], "mark": 7, "difference": 0.0}
    assert optimizer.layout_figure([one, one]).startswith("the bits of one process")
    for other in ({"difference": 0.1}, {"difference": float("inf")}, {"mark": 8}):
        with pytest.raises(Fault):
            optimizer.layout_figure([one, one | other])


def test_a_disk_that_loses_bytes_fails_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.disk(ONE, tmp_path) > 0
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"")
    with pytest.raises(Fault):
        machine.disk(ONE, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_the_probe_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--probe", str(tmp_path)]) == 0
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == ["ok   arithmetic", "skip network", "ok   disk"]
    assert main(["doctor", "--probe", str(tmp_path / "missing")]) == 1
    assert "FAIL disk: FileNotFoundError" in capsys.readouterr().out


@pytest.mark.slow
def test_one_rank_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    verdicts = {
        record["name"]: record["verdict"] for record in json.loads(file.read_text())["checks"]
    }
    assert {line.split(":")[0][5:]: line[:4].strip() for line in lines} == verdicts
    passed = {name for name, verdict in verdicts.items() if verdict == "ok"}
    assert passed == {"arithmetic", "layout one", "resume", "skipped step"}


def test_a_launcher_without_its_other_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sites, "MEETING_SECONDS", 1.0)
    names = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0", "MASTER_ADDR": "localhost"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("FAIL ranks: the ranks did not meet: Timed out")
    assert main(["doctor", "--seconds", "0"]) == 2
    assert "--seconds" in capsys.readouterr().err
