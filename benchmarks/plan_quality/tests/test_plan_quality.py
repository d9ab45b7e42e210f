"""The study of plans: runs that share a start and go on where they were stopped, on tiny models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from amo_dist.schedule.polar_express import schedule_for
from benchmarks.plan_quality import data, jobs, train
from benchmarks.plan_quality.jobs import Job
from benchmarks.plan_quality.model import ARCHITECTURES, Architecture
from benchmarks.plan_quality.settings import Settings
from benchmarks.plan_quality.train import Start

TINY = Architecture(num_heads=2, num_kv_heads=1, dim=16, ffn_dim=24, num_layers=3, head_dim=8)
SHORT = Settings(batch=2, sequence=8, warmup=2, validation_batches=2, observations=2)
START = Start("grouped", 3, switch=4, steps=9)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Sources of which the rule keeps some for validation."""
    folder = tmp_path / "sources"
    for i in range(40):
        path = folder / f"package{i % 3}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f{i}(x):\n    return x + {i}\n" * 3)
    return folder


@pytest.mark.parametrize("norm", ["exact", "as_is"])
def test_an_end_with_the_uniform_schedule_is_the_uninterrupted_run(norm: str, root: Path) -> None:
    """Rows share a start to the bit, and nothing is lost at the switch."""
    corpus, start = data.load(root), dataclasses.replace(START, norm=norm)
    snapshot = train.begin(start, TINY, corpus, SHORT)
    uniform = dict.fromkeys(train.matrix_shapes(snapshot.model)[0], schedule_for(1e-3, 5))
    before = train.digest(snapshot.model)
    end = train.finish(snapshot, uniform, corpus, SHORT)
    assert train.digest(snapshot.model) == before
    whole = train.begin(dataclasses.replace(start, switch=9), TINY, corpus, SHORT)
    assert train.digest(end) == train.digest(whole.model)
    other = train.finish(snapshot, dict.fromkeys(uniform, schedule_for(1e-3, 2)), corpus, SHORT)
    assert train.digest(other) != train.digest(end)


def study(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> list[Job]:
    monkeypatch.setitem(ARCHITECTURES, "grouped", TINY)
    wanted = [Job(START, ("uniform-5", "uniform-5~1", "distance-0.6-from-1"))]
    jobs.work(wanted, tmp_path, data.load(root), SHORT)
    return wanted


def test_a_study_goes_on_where_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path
) -> None:
    wanted = study(monkeypatch, root, tmp_path)
    paths = [jobs.record_path(tmp_path, START, row) for row in wanted[0].rows]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}
    assert sorted(paths) == sorted((tmp_path / "runs").iterdir())
    paths[2].unlink()
    assert jobs.missing(tmp_path, wanted[0]) == ["distance-0.6-from-1"]
    study(monkeypatch, root, tmp_path)
    for path, (content, modified) in before.items():
        assert path == paths[2] or path.stat().st_mtime_ns == modified
        assert path.read_bytes() == content
    plain, moved, planned = (json.loads(path.read_text()) for path in paths)
    assert plain["digest"] != moved["digest"]
    assert (plain["flops_after"], plain["plan"]) == (1, {})
    assert planned["flops_after"] <= 0.6
    assert len(planned["plan"]) == 7
