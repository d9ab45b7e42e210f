"""What ``amo watch`` shows, on a terminal and elsewhere."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_ext.runs import files, run_files
from torchtitan_ext.runs.records import append_records, drop_from
from torchtitan_ext.runs.run_files import Metrics, MetricsReader
from torchtitan_ext.tools import watch

TYPES = ("attn_q", "mlp_down")


def record(step: int, **changes: Any) -> dict[str, Any]:
    figures = {f"amo/ell/{name}": 3.25e-4 for name in TYPES}
    figures |= {f"amo/ell_target/{name}": 5.5e-4 for name in TYPES}
    figures |= {"newton_schulz/residual": 0.125}
    return {
        "step": step,
        "training_steps": 200,
        "lock_step": 70,
        "loss": 6.0 - step / 100,
        "grad_norm": 1.25,
        "lr": 0.02,
        "data_seconds_per_step": 0.2 if step == 40 else 0.05,
        "tokens_per_second": 1000.0,
        "seconds_per_step": 2.0,
        "optimizer_seconds_per_step": 0.5,
        "peak_memory_bytes": 3 * 2**20,
        "tflops": 412.3,
        "mfu_percent": 41.69,
        "phase": "observation",
        "num_steps_by_type": {"mlp_down": 4, "attn_q": 6},
        "optimizer": figures,
        **changes,
    }


def view(name: str, *records: dict[str, Any], **options: Any) -> list[str]:
    return watch.view(name, Metrics([*records], [(20, 5.75)]), **options)


def watched(folder: Path, **options: Any) -> int:
    defaults = {"run_folder": str(folder), "follow": False, "interval": 0.01}
    return watch.run(argparse.Namespace(**{**defaults, **options}))


def write(folder: Path, *records: dict[str, Any]) -> None:
    files.replace(folder / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in records))


def test_the_view_says_how_far_and_how_long() -> None:
    lines = view("a-run", *(record(step) for step in (10, 20, 30, 40)))
    text = "\n".join(lines)
    assert lines[0] == "a-run  phase: observation"
    assert "40/200" in text
    assert "0:05:20 to go" in text  # 160 steps of two seconds
    assert "40/70" in text
    assert "0:01:00 to go" in text
    assert "loss        5.6000" in text
    assert "validation  5.7500  after step 20" in text
    assert "rate        0.02  residual of the guard 0.125" in text
    assert "optimizer 25.0%  data 5.0%" in text
    assert "tokens/s    1,000  on all ranks  2,000 ms per step  optimizer 25.0%  data 5.0%" in text
    assert "peak MiB    3  of memory" in text
    assert "TFLOP/s     412  per device  41.7% of its peak (MFU)" in text
    rows = [line.split() for line in lines[-4:]]
    assert rows[0] == ["type", "NS", "steps", "observed", "ell"]  # nothing is composed yet
    assert rows[1] == ["attn_q", "6", "3.25e-04"]
    assert rows[3] == ["total", "10"]
    assert max(map(len, lines)) <= 80


def test_after_the_plan_it_says_what_it_is_composed_for_and_at_the_lock_no_time_to_go() -> None:
    text = "\n".join(view("r", record(70, phase="locked", mfu_percent=None)))
    header, row = text.splitlines()[-4:-2]
    assert header.endswith("observed ell   composed for")
    assert row.split() == ["attn_q", "6", "3.25e-04", "5.50e-04"]
    assert "TFLOP/s     412  per device\n" in text  # This device's peak is not known.
    assert "70/70           done" in text


def test_a_run_without_schedule_or_horizon() -> None:
    bare = record(
        7, training_steps=None, lock_step=None, phase="", num_steps_by_type={}, optimizer={}
    )
    text = "\n".join(view("adamw", bare))
    assert "training    7  steps" in text
    assert "NS steps" not in text
    assert "phase" not in text


@pytest.mark.parametrize("records", [[], [record(40)], [record(200)]])
def test_plain_text_once_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: list[dict[str, Any]]
) -> None:
    write(tmp_path, *records)
    assert watched(tmp_path) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count(tmp_path.name) == 1
    assert ("no step is logged yet" in out) == (not records)


def test_following_prints_each_new_step_until_the_run_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, record(40))
    coming = iter([[record(40)], [record(40), record(50)], [record(40), record(200)]])
    monkeypatch.setattr(watch.time, "sleep", lambda _: write(tmp_path, *next(coming)))
    watched(tmp_path, follow=True)
    out = capsys.readouterr().out
    assert [f"{step}/200" in out for step in (40, 50, 200)] == [True] * 3
    assert out.count(tmp_path.name) == 3  # the view that shows nothing new is left out
    assert next(coming, None) is None


def test_only_new_lines_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of 10,000 records parsed all of them again, every two seconds."""
    parsed: list[bytes] = []
    loads = json.loads
    monkeypatch.setattr(run_files.json, "loads", lambda line: (parsed.append(line), loads(line))[1])
    file, reader = tmp_path / "metrics.jsonl", MetricsReader(tmp_path)
    assert reader.read() == Metrics([], [])
    write(tmp_path, *(record(step) for step in range(1, 1001)))
    assert len(reader.read().steps) == len(parsed) == 1000
    with file.open("a") as stream:
        stream.write(json.dumps(record(1001)) + "\n" + json.dumps(record(1002))[:9])
    assert [one["step"] for one in reader.read().steps[-2:]] == [1000, 1001]
    with file.open("a") as stream:
        stream.write(json.dumps(record(1002))[9:] + '\n{"step": 1002, "validation_loss": 2.5}\n')
    metrics = reader.read()
    assert (metrics.steps[-1]["step"], metrics.validations) == (1002, [(1002, 2.5)])
    assert len(parsed) == 1003
    with file.open("a") as stream:
        stream.write("{\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1004: not JSON"):
        reader.read()


def test_a_resumed_run_is_read_anew(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path)
    write(tmp_path, *(record(step) for step in (10, 20, 30)))
    assert len(reader.read().steps) == 3
    drop_from(tmp_path / "metrics.jsonl", 20)
    append_records(tmp_path / "metrics.jsonl", [record(step, loss=1.0) for step in (20, 30, 40)])
    steps = {one["step"]: one["loss"] for one in reader.read().steps}
    assert steps == {10: 5.9, 20: 1.0, 30: 1.0, 40: 1.0}


def test_a_terminal_is_refreshed_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, record(40))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(watch.sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(watch.time, "sleep", lambda _: write(tmp_path, record(200)))
    watched(tmp_path)
    assert capsys.readouterr().out.count("\x1b[H\x1b[J") == 2
