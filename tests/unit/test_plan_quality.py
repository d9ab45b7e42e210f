"""The study of plans: its runs, its plans and its report, on models of a few thousand weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.schedule.polar_express import composed
from benchmarks.plan_quality import data, jobs, report, train
from benchmarks.plan_quality.jobs import Job
from benchmarks.plan_quality.model import ARCHITECTURES, Architecture, Decoder
from benchmarks.plan_quality.rows import ELLS, ROWS, Planner, Row, relative_flops
from benchmarks.plan_quality.settings import Settings
from benchmarks.plan_quality.spectra import momentum_spectra, scores
from benchmarks.plan_quality.train import Start

pytestmark = pytest.mark.slow

TINY = Architecture(num_heads=2, num_kv_heads=1, dim=16, ffn_dim=24, num_layers=3, head_dim=8)
SHORT = Settings(batch=2, sequence=8, warmup=2, validation_batches=2, observations=2)
START = Start("grouped", 3, switch=4, steps=9)
needs_scipy = pytest.mark.skipif(
    importlib.util.find_spec("scipy") is None, reason="needs SciPy (extra `stats`)"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Sources of which the rule keeps some for validation."""
    folder = tmp_path / "sources"
    for i in range(40):
        path = folder / f"package{i % 3}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f{i}(x):\n    return x + {i}\n" * 3)
    return folder


# ---------------------------------------------------------------- model and data


def test_a_token_sees_none_after_it() -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    same = torch.isclose(model(tokens), model(changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_validation_files_are_none_of_the_training_files(root: Path) -> None:
    corpus = data.load(root)
    parts = [
        set(bytes(tokens[tokens != data.END].tolist()).split(b"def "))
        for tokens in (corpus.train, corpus.validation)
    ]
    assert parts[0] & parts[1] == {b""}
    found = corpus.description
    assert found["train_files"] + found["validation_files"] == 40
    assert 0 < found["validation_files"] < 20
    assert found["train_tokens"] == corpus.train.numel()


def test_batches_follow_from_the_seed() -> None:
    tokens = torch.arange(1000, dtype=torch.int16)
    first, again, other = (data.batches(tokens, 3, 7, seed) for seed in (1, 1, 2))
    for _ in range(3):
        x, y = next(first)
        assert x.shape == y.shape == (3, 7)
        assert torch.equal(x + 1, y)
        assert torch.equal(x, next(again)[0])
        assert not torch.equal(x, next(other)[0])


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("norm", ["exact", "as_is"])
def test_an_end_with_the_uniform_schedule_is_the_uninterrupted_run(norm: str, root: Path) -> None:
    """To the bit: what rows share is a start, and nothing is lost at the switch."""
    corpus, start = data.load(root), dataclasses.replace(START, norm=norm)
    snapshot = train.begin(start, TINY, corpus, SHORT)
    uniform = dict.fromkeys(train.matrix_shapes(snapshot.model)[0], composed(1e-3, 5))
    before = train.digest(snapshot.model)
    end = train.finish(snapshot, uniform, corpus, SHORT)
    assert train.digest(snapshot.model) == before
    whole = train.begin(dataclasses.replace(start, switch=9), TINY, corpus, SHORT)
    assert train.digest(end.model) == train.digest(whole.model)
    assert [*snapshot.train_loss, *end.train_loss] == whole.train_loss
    other = train.finish(snapshot, dict.fromkeys(uniform, composed(1e-3, 2)), corpus, SHORT)
    assert train.digest(other.model) != train.digest(end.model)


def study(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> list[Job]:
    monkeypatch.setitem(ARCHITECTURES, "grouped", TINY)
    wanted = [Job(START, ("uniform-5", "uniform-5~1", "distance-0.6-from-1"))]
    jobs.work(wanted, tmp_path, tmp_path / "spectra", data.load(root), SHORT, lambda line: None)
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
        old, new = json.loads(content), json.loads(path.read_bytes())
        assert path == paths[2] or path.stat().st_mtime_ns == modified
        assert old.pop("seconds") >= 0 <= new.pop("seconds")
        assert old == new
    plain, moved, planned = (json.loads(path.read_text()) for path in paths)
    assert plain["digest"] != moved["digest"]
    assert (plain["flops_after"], plain["plan"]) == (1, {})
    assert planned["flops_after"] <= 0.6
    assert planned["flops"] == pytest.approx(4 / 9 + 5 / 9 * planned["flops_after"])
    assert len(planned["plan"]) == 7
    assert set(planned["scores_after"]) == set(plain["scores_at_switch"])
    assert not [*(tmp_path / "spectra").glob("*.claim")]


# ---------------------------------------------------------------- measures and plans

SHAPES = {"layers.0.q": (4, 4), "layers.1.q": (4, 4), "layers.2.up": (4, 12), "layers.2.v": (3, 4)}
TYPES = {name: name.split(".")[2] for name in SHAPES}


def made_up_spectra() -> dict[int, dict[str, torch.Tensor]]:
    """Hard matrices and easy ones."""
    generator = torch.Generator().manual_seed(0)
    found: dict[int, dict[str, torch.Tensor]] = {}
    for step in (2, 4):
        found[step] = {}
        for name, (m, n) in SHAPES.items():
            values = torch.logspace(0, -3 if m == n else -1, m) * torch.rand(m, generator=generator)
            values = values.sort(descending=True).values.double()
            found[step][name] = values / values.norm()
    return found


def test_scores_are_those_of_the_kernel() -> None:
    """Newton-Schulz of a matrix has the errors that its singular values tell."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    schedule = composed(1e-3, 3)
    options = {"norm_scale": schedule.norm_scale, "dtype": torch.float64, "eps": 0.0}
    result = orthogonalize(matrix, schedule.coefficients, **options)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    spectra = {1: momentum_spectra({"a": matrix})}
    found = scores({"a": schedule}, spectra, {"a": (6, 9)})
    exact = result * math.sqrt(6) / result.norm()
    expected = {
        "residual": ((result @ result.mT - torch.eye(6)).square().sum() / 6).item(),
        "distance": ((result - u @ vh).square().sum() / 6).item(),
        "direction": ((exact - u @ vh).square().sum() / 6).item(),
        "gain": (result.norm() / math.sqrt(6)).item(),
        "low": (torch.linalg.svdvals(result) < 0.5).double().mean().item(),
    }
    for measure, value in expected.items():
        for weighting in ("alike", "entries"):
            assert found[f"{measure} {weighting}"] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("measure", ["residual", "distance", "direction"])
@pytest.mark.parametrize("weighting", ["alike", "entries"])
def test_a_plan_is_the_best_of_all_within_its_flops(measure: str, weighting: str) -> None:
    """Every allocation is tried, each with the best ell of each type."""
    spectra, row = made_up_spectra(), Row("", measure=measure, weighting=weighting, ratio=0.8)
    chosen = Planner(spectra, SHAPES, TYPES).choose(row)
    entries = {n: m * k if weighting == "entries" else 1 for n, (m, k) in SHAPES.items()}

    def total(schedules: dict[str, Any]) -> float:
        return sum(
            entries[n] * scores({n: s}, spectra, {n: SHAPES[n]})[f"{measure} alike"]
            for n, s in schedules.items()
        )

    groups = {kind: [n for n in SHAPES if TYPES[n] == kind] for kind in TYPES.values()}
    curves = [
        {k: min(total(dict.fromkeys(some, composed(e, k))) for e in ELLS) for k in range(3, 8)}
        for some in groups.values()
    ]
    costs = [
        relative_flops(dict.fromkeys(some, composed(0.1, 1)), {n: SHAPES[n] for n in some})
        * sum(min(SHAPES[n]) ** 2 * (2 * max(SHAPES[n]) + min(SHAPES[n])) for n in some)
        for some in groups.values()
    ]
    best = min(
        sum(curve[k] for curve, k in zip(curves, steps, strict=True))
        for steps in itertools.product(range(3, 8), repeat=len(curves))
        if sum(c * k for c, k in zip(costs, steps, strict=True)) <= 0.8 * 5 * sum(costs) + 1e-9
    )
    assert total(dict(chosen.schedules)) == pytest.approx(best)
    assert relative_flops(chosen.schedules, SHAPES) <= 0.8
    assert [*chosen.plan] == ["q", "up", "v"]


# ---------------------------------------------------------------- report


def made_up(folder: Path) -> None:
    """Results of three models and three seeds: three steps are as good, today's plan is worse."""
    gaps = {"uniform-5": 0.0, "uniform-4": 0.0, "uniform-3": 0.0005, "residual-alike-0.8": 0.02}
    gaps |= {"residual-0.8": 0.001, "distance-0.8": 0.0, "distance-0.6": 0.0}
    flops = {"uniform-5": 1.0, "uniform-3": 0.6, "distance-0.6": 0.6}
    for order in range(1, 4):
        write(folder, Start("grouped", 0, order=order), "uniform-5", 2.0 + 0.001 * order, 1.0)
    for place, name in enumerate(ARCHITECTURES):
        for seed, base in enumerate((2.0, 2.1, 2.3)):
            for row, gap in gaps.items():
                loss = base + gap * (1 + 0.1 * seed) + place
                write(folder, Start(name, seed), row, loss, flops.get(row, 0.8))
        for rate in jobs.RATES:
            for row in jobs.CONTENDERS:
                loss = 2 + abs(math.log(rate / 8e-3))
                write(folder, Start(name, jobs.RATE_SEED, rate=rate), row, loss, 1.0)
    write(folder, Start("grouped", 0, switch=12), "uniform-3", 2.5, 0.6)
    write(folder, Start("grouped", 0, switch=800, steps=2000), "uniform-5", 1.5, 1.0)


def write(folder: Path, start: Start, row: str, loss: float, flops: float) -> None:
    plan = {"attn_q": (3, 0.1), "mlp_up": (4, 0.1)} if ROWS[row].measure else {}
    values = {"residual alike": loss, "gain alike": -loss}
    record = {**dataclasses.asdict(start), "row": row, "validation_loss": loss, "plan": plan}
    record |= {"flops_after": flops, "scores_at_switch": values, "scores_after": None}
    train.write_json(jobs.record_path(folder, start, row), record)


@needs_scipy
def test_a_report_of_made_up_results(tmp_path: Path) -> None:
    made_up(tmp_path)
    lines = report.text(tmp_path).splitlines()
    # t(0.975, 2) = 4.3027; the differences 0.020, 0.022, 0.024 have a deviation of 0.002.
    half = 4.3027 * 0.002 / math.sqrt(3)
    gap = f"2.1553, +0.0220 ± {half:.4f}"
    (today,) = (line for line in lines if line.startswith("| residual, alike, 0.8 | 0.800 | 2"))
    assert today.startswith(f"| residual, alike, 0.8 | 0.800 | {gap} | 3.1553")
    assert today.endswith(" | 3.1553 | +0.0220 ± 0.0013 | 3 |")
    assert any(line.startswith("| distance, entries, 0.6 | uniform 3 | -0.0006") for line in lines)
    assert "| uniform 3 | 0.600 | 1.9662 | 3.1339 | 9 | 0 of 9 |" in lines
    assert any("| residual alike | +1.00 (9)" in line for line in lines)
    (rates,) = (x for x in lines if x.startswith("| grouped | exact | uniform 3 |"))
    assert rates.count("**") == 2
    assert "| 2.6931 | **2.0000** |" in rates
    # The seed that both switches have: 2.5 against 2.0, where step 100 has three.
    assert any("+0.5000 (1)" in x for x in lines if x.startswith("| grouped | uniform 3 |"))
    assert "| grouped | 2000 | uniform 5 | 1.000 | 1.5000 |  |" in lines
    assert any("3 4 (3)" in line for line in lines)
