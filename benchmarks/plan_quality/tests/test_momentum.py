"""The study of the momentum's weight, on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.plan_quality import data, momentum, study
from benchmarks.plan_quality.model import ARCHITECTURES, Architecture
from benchmarks.plan_quality.momentum import TODAY, Form, Run

TINY = Architecture(num_heads=2, num_kv_heads=1, dim=16, ffn_dim=24, num_layers=1, head_dim=8)


def test_it_goes_on_where_it_was_stopped_and_compares_best_rates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def f(x):\n    return x + 1\n" * 20
    for i in range(40):
        (tmp_path / f"module{i}.py").write_text(source + f"# {i}\n")
    corpus, output = data.load(tmp_path), tmp_path / "runs.jsonl"
    forms = [
        TODAY,
        Form(weight=0.1),
        Form(first_decay=0.85),
        Form("amo"),
        Form("adamw"),
    ]
    wanted = [Run(form, rate, "grouped", steps=24) for form in forms for rate in (0.01, 0.02)]
    monkeypatch.setitem(ARCHITECTURES, "grouped", TINY)
    monkeypatch.setattr(data, "load", lambda root: corpus)
    monkeypatch.setattr(momentum, "jobs", lambda records: islice(wanted, 4))
    arguments = ["run", "--output", str(output)]
    assert momentum.main(arguments) == 0
    first = output.read_text()
    monkeypatch.setattr(momentum, "jobs", lambda records: iter(wanted))
    assert momentum.main(arguments) == 0
    assert output.read_text().startswith(first)
    records = momentum.read(output)
    assert list(records) == wanted
    assert len({*records.values()}) == len(wanted)  # no option is lost on the way
    best = [min(records[run] for run in wanted[i : i + 2]) for i in (0, 2)]
    like = Run(Form(weight=0.1), 0.0, "grouped", steps=24)
    assert study.differences(records, like, replace(like, form=TODAY)) == [best[1] - best[0]]
    capsys.readouterr()
    assert momentum.main(["report", "--output", str(output)]) == 0
    assert "decay 0.95, weight 0.1" in capsys.readouterr().out


def test_jobs_take_the_best_of_earlier_ones() -> None:
    records = {
        Run(form, rate, "grouped"): 2 - rate - form.weight / 10
        for form in momentum.FORMS
        for rate in momentum.RATES
    }
    later = [run for run in momentum.jobs(records) if run.steps == 2000]
    assert {run.form for run in later} == {TODAY, Form(decay=0.9), momentum.SCEPTIC[-1]}
    assert max(run.rate for run in later) == max(momentum.RATES)
    assert len({*later}) == len(later)
