"""The doctor's parts on one process: verdicts, planted faults, the roll call."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from amo_dist.tools.cli import main
from amo_dist.tools.doctor import examination, machine, optimizer, probe
from amo_dist.tools.doctor import site as sites
from amo_dist.tools.doctor.examination import Check, Examination, Verdict
from amo_dist.tools.doctor.site import Fault, Site

CPU = torch.device("cpu")
ONE = Site(0, ((0,),), CPU)


def run(checks: list[Check], seconds: float = 60.0, deadline: float = 60.0) -> list[str]:
    said: list[Verdict] = []
    Examination(ONE, seconds=seconds, deadline=deadline, report=said.append).run(checks)
    return list(map(str, said))


def fail() -> None:
    raise ValueError("a\nb")


def wrong(values: Any) -> str:
    raise Fault(f"found {values}")


def test_a_verdict_is_a_line() -> None:
    assert run(
        [
            Check("one", lambda: 3, lambda values: f"{values[0]} s"),
            Check("two", fail),
            Check("three", lambda: 4, wrong),
            Check("four", skip="no room"),
        ]
    ) == [
        "ok   one: 3 s",
        "FAIL two: ValueError: a b",
        "FAIL three: found [4]",
        "skip four: no room",
    ]


def test_a_check_that_does_not_end_is_left_alone() -> None:
    never = threading.Event()
    lines = run([Check("stuck", lambda: never.wait()), Check("later")], deadline=0.2)
    never.set()
    assert lines == [
        "FAIL stuck: no end within 0 s",
        "skip later: after stuck ranks may be out of step",
    ]


def test_checks_that_no_time_is_left_for_are_skipped() -> None:
    lines = run([Check("one"), Check("two")], seconds=1.0, deadline=60.0)
    assert lines == ["ok   one: [{}]", "skip two: no time left (--seconds)"]


def test_an_error_is_told_once_with_its_ranks() -> None:
    ended, broke = {"state": "ended", "values": 1}, {"state": "broke", "error": "E: x"}
    stuck = {"state": "stuck", "error": "no end within 5 s"}
    check = Check("c")
    for outcomes, expected in (
        ([stuck, ended, broke], "rank 2: E: x; rank 0: no end within 5 s"),
        ([broke, broke], "all ranks: E: x"),
        ([broke, ended, broke], "ranks 0, 2: E: x"),
    ):
        found = examination.conclude(check, outcomes)
        assert (found.verdict, found.figure) == ("FAIL", expected)


# ------------------------------------------------------------------ meeting


def roll(monkeypatch: pytest.MonkeyPatch, **others: str) -> None:
    monkeypatch.setattr(sites, "MEETING_SECONDS", 0.2)
    store = dist.HashStore()
    for rank, text in others.items():
        store.set(f"doctor/device/{rank[1:]}", text)
    sites.call_roll(Site(0, ((0, 1, 2),), CPU, store=store), "")


def test_the_roll_is_called_before_any_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    there, other, ill = '["cpu", ""]', '["cuda", ""]', '["cuda", "invalid device ordinal"]'
    roll(monkeypatch, r1=there, r2=there)
    with pytest.raises(Fault, match=r"no answer from ranks 1, 2"):
        roll(monkeypatch)
    with pytest.raises(Fault, match=r"device: rank 0 has cpu, rank 1 cuda"):
        roll(monkeypatch, r1=other, r2=there)
    with pytest.raises(Fault, match=r"rank 2: invalid device ordinal"):
        roll(monkeypatch, r1=there, r2=ill)


def test_a_launcher_without_its_other_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sites, "MEETING_SECONDS", 1.0)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 1
    assert capsys.readouterr().out.startswith("FAIL ranks: the ranks did not meet: Timed out")
    (check,) = json.loads((tmp_path / "d.json").read_text())["checks"]
    assert (check["name"], check["verdict"]) == ("ranks", "FAIL")


# ------------------------------------------------------------------ figures


@pytest.mark.parametrize(("which", "told"), [(0, "ell: found"), (1, "residuals: found")])
def test_a_spectrum_that_is_off_is_told(
    which: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = machine.observe

    def observe(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = real(*args)
        found[which].mul_(1.01)
        return found

    monkeypatch.setattr(machine, "observe", observe)
    with pytest.raises(Fault, match=told):
        machine.spectra(ONE)


def test_parameters_may_differ_within_a_tolerance_on_cuda_alone() -> None:
    one = {"plan": [5], "ells": ["0x1"], "twin": 7, "same plan": True, "difference": 0.0}
    near, far, nan = ({**one, "difference": found} for found in (1e-3, 0.1, float("nan")))
    assert optimizer.layout_figure([one, one], exact=True).startswith("the bits of one process")
    assert optimizer.layout_figure([one, near], exact=False).startswith("within 1.0e-03")
    for values, exact in (([near], True), ([one, far], False), ([nan], False)):
        with pytest.raises(Fault, match="parameters differ from one process's by"):
            optimizer.layout_figure(values, exact=exact)
    with pytest.raises(Fault, match=r"plan: found \[5\], expected that of one process"):
        optimizer.layout_figure([{**one, "same plan": False}], exact=True)
    with pytest.raises(Fault, match="ells: rank 0 has"):
        optimizer.layout_figure([one, {**one, "ells": ["0x2"]}], exact=False)


def test_state_that_does_not_come_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer.AMO, "load_state_dict", lambda self, state: None)
    with pytest.raises(Fault, match=r"parameters differ, the first is"):
        optimizer.same_bits(ONE, 5)


def test_a_run_of_other_bits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = optimizer.make_model, []

    def make(*args: Any) -> Any:
        model = real(*args)
        if calls:
            next(model.parameters()).data[0, 0] += 1
        calls.append(model)
        return model

    monkeypatch.setattr(optimizer, "make_model", make)
    with pytest.raises(Fault, match=r"1 parameters differ, the first is tok_embeddings.weight"):
        optimizer.same_bits(ONE, 0)


def test_a_skipped_step_that_is_not_counted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def metrics(_: Any) -> dict[str, float]:
        return {"optimizer/steps_skipped": 0.0}

    monkeypatch.setattr(optimizer.AMO, "metrics", metrics)
    with pytest.raises(Fault, match="steps_skipped: found 0, expected 1"):
        optimizer.skipped(ONE)


def test_a_load_that_should_be_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer.AMO, "load_state_dict", lambda self, state: None)
    with pytest.raises(Fault, match="no JSON was loaded"):
        optimizer.skipped(ONE)


# ------------------------------------------------------------------ the probe


def test_a_newton_schulz_that_is_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    orthogonalize = probe.orthogonalize

    def wrong_in_bfloat16(matrix: torch.Tensor, *args: Any, dtype: torch.dtype) -> torch.Tensor:
        return orthogonalize(matrix, *args, dtype=dtype) * (1.1 if dtype.itemsize == 2 else 1.0)

    monkeypatch.setattr(probe, "orthogonalize", wrong_in_bfloat16)
    with pytest.raises(Fault, match=r"the result differs by 0.1\d* from the CPU's"):
        probe.newton_schulz(ONE)


def test_a_slow_device_is_named() -> None:
    values = [{"difference": 0.01, "seconds": seconds} for seconds in (1.0, 1.1, 2.5, 1.2)]
    with pytest.raises(Fault, match=r"^rank 2: 2\.1 times as slow as the median$"):
        probe.newton_schulz_figure(values, compares=True)
    assert probe.newton_schulz_figure(values, compares=False).startswith("within 1.0e-02 of")


def test_a_disk_that_loses_bytes_fails_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe.disk(ONE, tmp_path) > 0
    with pytest.raises(FileNotFoundError):
        probe.disk(ONE, tmp_path / "missing")
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"")
    with pytest.raises(Fault, match="found other bytes than were written"):
        probe.disk(ONE, tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_the_probe_of_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--probe", str(tmp_path)]) == 0
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["amo doctor", "ok   newton-schulz", "ok   disk", "skip all-reduce"]
    assert main(["doctor", "--probe", str(tmp_path / "missing")]) == 1
    assert "FAIL disk: FileNotFoundError" in capsys.readouterr().out


# ------------------------------------------------------------------ the command


def test_seconds_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--seconds", "0"]) == 2
    assert "--seconds: found 0.0, expected a number > 0" in capsys.readouterr().err


@pytest.mark.slow
def test_one_rank_writes_what_it_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "amo doctor: 1 rank on 1 node, cpu, no group"
    checks = json.loads(file.read_text())["checks"]
    assert [line.split(":")[0][5:] for line in lines[1:]] == [one["name"] for one in checks]
    assert {line[:4] for line in lines[1:]} == {"ok  ", "skip"}
    alone = {"spectra", "layout one", "run twice", "resume", "skipped steps"}
    assert {one["name"] for one in checks if one["verdict"] == "ok"} == alone
