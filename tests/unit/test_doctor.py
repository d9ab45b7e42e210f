"""The doctor's parts on one process: verdicts, figures for the preflight, the roll call."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from amo_dist.tools.cli import main
from amo_dist.tools.doctor import command, examination, hardware, models, optimizer
from amo_dist.tools.doctor import site as sites
from amo_dist.tools.doctor.examination import Check, Examination, Verdict
from amo_dist.tools.doctor.site import Fault, Site
from torchtitan_ext.tools import preflight_costs

CPU = torch.device("cpu")
ONE = Site(0, ((0,),), CPU)


def run(checks: list[Check], seconds: float = 60.0, deadline: float = 60.0) -> list[str]:
    said: list[Verdict] = []
    Examination(ONE, seconds=seconds, deadline=deadline, say=said.append).run(checks)
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


def test_a_signal_ends_the_check_under_way() -> None:
    never = threading.Event()
    one = Examination(ONE, seconds=60.0, deadline=60.0, say=lambda _: None)
    one.run([Check("stopped", lambda: (one.stop(), never.wait()))])
    never.set()
    assert str(one.verdicts[0]) == "FAIL stopped: stopped from outside"
    assert one.is_stuck


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


def test_what_ranks_must_have_alike() -> None:
    examination.alike([{"torch": "2"}, {"torch": "2"}])
    with pytest.raises(Fault, match=r"torch: rank 0 has 2, ranks 1, 3 3"):
        examination.alike([{"torch": one} for one in "2323"])


# ------------------------------------------------------------------ meeting


def roll(monkeypatch: pytest.MonkeyPatch, **others: str) -> None:
    monkeypatch.setattr(sites, "MEETING_SECONDS", 0.2)
    store = dist.HashStore()
    for rank, text in others.items():
        store.set(f"doctor/device/{rank[1:]}", text)
    sites._call_roll(store, 0, 3, {"device": "cpu", "problem": ""})


def test_the_roll_is_called_before_any_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    there, other = (json.dumps({"device": name, "problem": ""}) for name in ("cpu", "cuda"))
    ill = json.dumps({"device": "cuda", "problem": "invalid device ordinal"})
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
    assert json.loads((tmp_path / "d.json").read_text())["hardware"] == {}


# ------------------------------------------------------------------ figures


def test_the_table_holds_the_worst_rank() -> None:
    rates = [{"hardware": {"bf16_tflops": rate, "kernel_us": rate}} for rate in (4.0, 8.0)]
    wires = [{"all_to_all": 3.0, "latency_us": 5.0}, {"all_to_all": 2.0, "latency_us": 6.0}]
    schulz = [{"ns_tflops": 3.0, "ns_half_dim": 64.0}, {"ns_tflops": 2.0, "ns_half_dim": 32.0}]
    found = hardware.hardware_table(
        {"products": rates, "bandwidth across nodes": [*wires, {}], "newton-schulz": schulz}
    )
    assert found == {
        "bf16_tflops": 4.0,
        "kernel_us": 8.0,
        "network_gb_per_s": 2.0,
        "network_efficiency": 1.0,
        "collective_us": 6.0,
        "ns_efficiency": 0.5,
        "ns_half_dim": 64.0,
    }


def test_the_model_of_costs_goes_through_both_rates() -> None:
    rates = [3.0 * side / (side + 100) for side in (128, 512)]
    found = hardware._fit((128, 512), rates)
    assert found == {"ns_tflops": pytest.approx(3.0), "ns_half_dim": pytest.approx(100.0)}
    assert hardware._fit((128, 512), (2.0, 1.0)) == {"ns_tflops": 1.0, "ns_half_dim": 1.0}


@pytest.mark.parametrize("error", [0.06, float("nan")])
def test_a_backend_that_is_off_is_named(error: float) -> None:
    good, bad = {"ms": 1.0, "error": 0.01}, {"ms": 1.0, "error": error}
    values = [{"shapes": {"2 x 2": {}, "8 x 8": {"gram": one}}} for one in (good, bad)]
    with pytest.raises(Fault, match=r"gram at 8 x 8 on rank 1: found an error of"):
        hardware.tell_newton_schulz(values)
    assert hardware.tell_newton_schulz(values[:1]) == "8 x 8: gram 1 ms (1.0e-02)"


def test_a_backend_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hardware.orthogonalize

    def run(*args: Any, backend: str, **options: Any) -> torch.Tensor:
        if backend == "symmetric":
            raise KeyError("no tile")
        return real(*args, backend=backend, **options)

    monkeypatch.setattr(hardware, "orthogonalize", run)
    with pytest.raises(Fault, match=r"symmetric at \d+ x \d+: KeyError: 'no tile'"):
        hardware.newton_schulz(ONE)


def test_parameters_may_differ_within_a_tolerance_on_cuda_alone() -> None:
    one = {"plan": [5], "ells": ["0x1"], "twin": 7, "same plan": True, "difference": 0.0}
    near, far, nan = ({**one, "difference": found} for found in (1e-3, 0.1, float("nan")))
    assert optimizer.tell_layout([one, one], exact=True).startswith("the bits of one process")
    assert optimizer.tell_layout([one, near], exact=False).startswith("within 1.0e-03")
    for values, exact in (([near], True), ([one, far], False), ([nan], False)):
        with pytest.raises(Fault, match="parameters differ from one process's by"):
            optimizer.tell_layout(values, exact=exact)
    with pytest.raises(Fault, match=r"plan: found \[5\], expected that of one process"):
        optimizer.tell_layout([{**one, "same plan": False}], exact=True)
    with pytest.raises(Fault, match="ells: rank 0 has"):
        optimizer.tell_layout([one, {**one, "ells": ["0x2"]}], exact=False)


def test_state_that_does_not_come_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer.AMO, "load_state_dict", lambda self, state: None)
    with pytest.raises(Fault, match="differ after loading"):
        optimizer.resume(ONE)


def test_ell_is_compared_with_a_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    real = optimizer.observe
    monkeypatch.setattr(optimizer, "observe", lambda *args: 1.01 * real(*args))
    with pytest.raises(Fault, match=r"ell: found .*, expected"):
        optimizer.observation(ONE, models.SMALL)


# ------------------------------------------------------------------ the command


def test_the_timed_model() -> None:
    assert optimizer.named_model("", ONE)[0] == "a stand-in of two blocks of Qwen3-70M"
    name, shape, steps = optimizer.named_model("Qwen3-1.7B", ONE)
    assert (name, shape.layers, steps["mlp_gate"]) == ("Qwen3-1.7B", 28, 4)


def test_marked_tests_run_in_a_world_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(command.marked_tests(False)) == "skip tests marked cuda: no CUDA device"
    calls: list[Any] = []

    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append((words, options))
        return subprocess.CompletedProcess(words, 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("RANK", "0")
    assert str(command.marked_tests(True)) == "FAIL tests marked cuda: pytest ended with status 1"
    ((words, options),) = calls
    assert words[1:5] == ["-m", "pytest", "-m", "cuda"]
    assert not {"MASTER_ADDR", "RANK"} & set(options["env"])
    assert "PATH" in options["env"]


def test_seconds_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--seconds", "0"]) == 2
    assert "--seconds: found 0.0, expected a number > 0" in capsys.readouterr().err


@pytest.mark.slow
def test_one_rank_writes_what_the_preflight_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--quick", "--json", str(file), "--tests"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "amo doctor: 1 rank on 1 node, cpu, no group"
    found = json.loads(file.read_text())
    assert [line.split(":")[0][5:] for line in lines[1:]] == [
        one["name"] for one in found["checks"]
    ]
    assert {line[:4] for line in lines[1:]} == {"ok  ", "skip"}
    measured = found["hardware"]
    hardware, names = preflight_costs.read_hardware(file, "h100")
    read = dataclasses.asdict(hardware)
    measured.pop("kernel_us")  # of which nothing is computed
    assert measured.items() <= read.items()
    assert names == sorted(measured)
    # What one CPU rank cannot know is that of the project's table.
    table, _ = preflight_costs.read_hardware(preflight_costs.HARDWARE_FILE, "h100")
    assumed = {name for name in read if name not in measured}
    assert assumed == {
        *("nvlink_gb_per_s", "nvlink_efficiency", "network_gb_per_s", "network_efficiency"),
        *("collective_us", "training_mfu", "disk_gb_per_s"),
    }
    assert all(read[name] == getattr(table, name) for name in assumed)


def test_a_json_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for text in ("{", "[]", '{"hardware": 3}'):
        file.write_text(text)
        with pytest.raises(
            ValueError, match=r"--hardware: found .*expected the JSON of `amo doctor"
        ):
            preflight_costs.read_hardware(file, "h100")
