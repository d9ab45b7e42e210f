"""The study of plans: its runs, its scores and its report, on models of a few thousand weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from amo_dist import param_groups
from amo_dist.config import OPERATOR_TYPES
from amo_dist.schedule.types import MatrixInfo, Schedule
from benchmarks.plan_quality import __main__ as command
from benchmarks.plan_quality import data, report, score, train
from benchmarks.plan_quality.model import ARCHITECTURES, Architecture, Decoder
from benchmarks.plan_quality.settings import Settings
from benchmarks.plan_quality.variants import VARIANTS, amo_config
from tests.unit import measured_twin

TINY = Architecture(num_heads=2, num_kv_heads=1, dim=16, ffn_dim=24, num_layers=2, head_dim=8)
SHORT = Settings(
    steps=12,
    batch=2,
    sequence=8,
    warmup=2,
    observe_until=4,
    observe_every=2,
    transition_steps=3,
    validation_batches=2,
    validations=2,
    spectra_every=2,
)
needs_scipy = pytest.mark.skipif(
    importlib.util.find_spec("scipy") is None, reason="needs SciPy (extra `stats`)"
)
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib (extra `plots`)"
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


@pytest.fixture
def short_study(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> list[str]:
    """Arguments of ``train`` for a study of two short runs."""
    monkeypatch.setattr(data, "standard_library", lambda: root)
    monkeypatch.setitem(ARCHITECTURES, "grouped", TINY)
    given = {f"{name}={value}" for name, value in dataclasses.asdict(SHORT).items()}
    folders = [f"--output={tmp_path / 'results'}", f"--spectra={tmp_path / 'spectra'}"]
    chosen = ["--architecture", "grouped", "--seed", "0", "1"]
    return [*chosen, *folders, "--set", *sorted(given)]


# ---------------------------------------------------------------- model and data


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_have_the_matrices_of_the_seven_types(name: str) -> None:
    sizes = ARCHITECTURES[name]
    groups = param_groups(Decoder(sizes))
    kinds = [view[0].operator_type for view in groups[0]["matrix_views"].values()]
    assert sorted(kinds) == sorted(4 * OPERATOR_TYPES)
    assert 2e6 < sum(p.numel() for group in groups for _, p in group["params"]) < 2.7e6
    shapes = {p.shape for n, p in groups[0]["params"] if "attention.wv" in n}
    assert shapes == {(sizes.num_kv_heads * 32, 192)}


def test_a_token_sees_none_after_it() -> None:
    torch.manual_seed(0)
    model = Decoder(TINY)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    same = torch.isclose(model(tokens), model(changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_rotary_products_depend_on_the_distance_alone() -> None:
    from benchmarks.plan_quality.model import angles, rotated

    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turn = angles(9, 8)
    products = rotated(q.expand(9, 8), *turn) @ rotated(k.expand(9, 8), *turn).T
    # The angles are float32.
    torch.testing.assert_close(products[1:, 1:], products[:-1, :-1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(products[0, 0], products[0, 3])


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


def test_a_file_stays_on_its_side_when_others_come(root: Path) -> None:
    before = data.load(root)
    (root / "package0" / "another.py").write_text("pass\n")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "installed.py").write_text("pass\n")
    (root / "latin.py").write_bytes(b"# \xe9\n")
    after = data.load(root)
    grown = [getattr(after, part).numel() - getattr(before, part).numel() for part in
             ("train", "validation")]  # fmt: skip
    assert sorted(grown) == [0, 6]
    assert after.description["digest"] != before.description["digest"]


def test_a_folder_without_validation_files_is_refused(tmp_path: Path) -> None:
    name = next(f"{i}.py" for i in range(99) if not data.is_for_validation(f"{i}.py"))
    (tmp_path / name).write_text("pass")
    with pytest.raises(ValueError, match=r"root: found .*'validation': 0"):
        data.load(tmp_path)


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


def test_rates_rise_and_fall() -> None:
    rates = [SHORT.rate_at(step) for step in range(1, SHORT.steps + 1)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] == pytest.approx(SHORT.final_rate)


def run(name: str, root: Path, **changes: Any) -> dict[str, Any]:
    settings = dataclasses.replace(SHORT, **changes)
    result = train.run(TINY, VARIANTS[name], 3, data.load(root), settings)
    del result["seconds"]
    return result


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_is_the_same_twice(name: str, root: Path) -> None:
    first = run(name, root)
    assert first == run(name, root)
    assert len(first["train_loss"]) == SHORT.steps
    assert [*first["validation_loss"]] == ["6", "12"]
    assert len(json.dumps(first)) < 20_000


@pytest.mark.parametrize("name", [n for n, variant in VARIANTS.items() if variant.plan])
def test_a_plan_changes_nothing_before_it_is_made(name: str, root: Path) -> None:
    planned, uniform = run(name, root), run("muon-pe", root)
    # The loss of a step is taken before it.
    until = SHORT.observe_until + 1
    assert planned["train_loss"][:until] == uniform["train_loss"][:until]
    assert planned["train_loss"] != uniform["train_loss"]
    config = amo_config(VARIANTS[name], SHORT)
    assert (config.observe_until, config.lock_step) == (4, SHORT.lock_step)
    assert planned["plan"]["allocation"] == [*planned["allocation"].values()]


def test_flops_are_those_of_the_steps(root: Path) -> None:
    assert [run(name, root)["flops"] for name in ("muon-pe", "muon-kj", "adamw")] == [1, 1, 0]
    paper = run("paper", root)
    costs = paper["plan"]["costs"]
    spent = sum(k * cost for k, cost in zip(paper["allocation"].values(), costs, strict=True))
    assert paper["flops_locked"] == pytest.approx(spent / (5 * sum(costs)))


def test_recording_spectra_changes_nothing(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "spectra.pt"
    result = train.run(TINY, VARIANTS["muon-pe"], 3, data.load(root), SHORT, spectra=path)
    del result["seconds"]
    assert result == run("muon-pe", root)
    spectra, registry = train.load_spectra(path)
    assert [*spectra] == [2, 4, 6, 8, 10, 12]
    assert len(registry) == 14
    for matrix in registry:
        values = spectra[4][matrix.name]
        assert values.dtype == torch.float64
        assert len(values) == min(matrix.shape)
        assert values.square().sum().item() == pytest.approx(1)


def test_a_study_goes_on_where_it_was_stopped(
    short_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--variant", "muon-pe", "adamw", *short_study]
    command.main(arguments)
    runs = tmp_path / "results" / "runs"
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in runs.iterdir()}
    assert {path.name for path in before} == {
        f"grouped-{seed}-{name}.json" for seed in (0, 1) for name in ("muon-pe", "adamw")
    }
    lost = runs / "grouped-1-adamw.json"
    lost.unlink()
    capsys.readouterr()
    command.main(arguments)
    assert capsys.readouterr().out.startswith("1 of 4 runs to do\n1/1 grouped seed 1 adamw: ")
    for path, (content, modified) in before.items():
        old, new = json.loads(content), json.loads(path.read_bytes())
        assert path == lost or path.stat().st_mtime_ns == modified
        assert old.pop("seconds") >= 0 <= new.pop("seconds")
        assert old == new
    assert old["corpus"]["train_files"] > 0
    with pytest.raises(ValueError, match=r"batch: found 2 in .*-muon-pe.json, expected 3"):
        command.main([*arguments, "batch=3"])


def test_a_failed_write_leaves_no_result(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        train.write_whole(tmp_path / "x" / "result.json", fail)
    assert not (tmp_path / "x" / "result.json").exists()
    assert not [name for name in os.listdir(tmp_path / "x") if name.endswith(".json")]


def test_unknown_settings_are_refused() -> None:
    assert command.changed(SHORT, ["lr_muon=1e-2", "steps=7"]).lr_muon == 0.01
    with pytest.raises(ValueError, match="--set: found 'stps=7', expected one of steps"):
        command.changed(SHORT, ["stps=7"])


# ---------------------------------------------------------------- scores

REGISTRY = [MatrixInfo("a", (2, 2), "attn_q"), MatrixInfo("b", (2, 8), "mlp_up")]


def test_a_score_by_hand() -> None:
    # p(x) = 2 x, then x^3: 0.5 -> 1, 0.25 -> 0.125, 0 -> 0.
    one = Schedule(((2.0, 0.0, 0.0), (0.0, 1.0, 0.0)), norm_scale=2.0)
    # p(x) = x: 1 -> 1.
    other = Schedule(((1.0, 0.0, 0.0),), norm_scale=1.0)
    spectra = {
        10: {"a": torch.tensor([1.0, 0.5]).double(), "b": torch.tensor([1.0, 0.0]).double()},
        20: {"a": torch.tensor([1.0, 1.0]).double(), "b": torch.tensor([1.0, 1.0]).double()},
    }
    found = score.score({"a": one, "b": other}, spectra, REGISTRY)
    hard = (0.125**2 - 1) ** 2
    # Means of two directions; of four matrices, two of them exact.
    assert found["residual"] == pytest.approx(math.sqrt((hard / 2 + 1 / 2) / 4))
    assert found["distance"] == pytest.approx(math.sqrt((0.875**2 / 2 + 1 / 2) / 4))
    assert found["by_type"]["attn_q"]["residual"] == pytest.approx(math.sqrt(hard / 4))
    assert found["by_type"]["mlp_up"]["num_steps"] == [1]
    # 2 * 4 * (2 * 2 + 2) = 48 and 2 * 4 * (2 * 8 + 2) = 144 flops a step.
    assert found["flops"] == pytest.approx((2 * 48 + 144) / (5 * (48 + 144)))


def test_scores_are_those_of_the_kernel() -> None:
    """Newton-Schulz of a matrix has the residual that its singular values tell."""
    from amo_dist.kernels.newton_schulz import orthogonalize

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    schedule = score.uniform({}, REGISTRY)["a"]
    options = {"norm_scale": schedule.norm_scale, "dtype": torch.float64, "eps": 0.0}
    result = orthogonalize(matrix, schedule.coefficients, **options)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    residual = (result @ result.mT - torch.eye(6)).square().sum() / 6
    distance = (result - u @ vh).square().sum() / 6
    expected = (residual.item(), distance.item())
    assert score.errors(schedule, values / values.norm()) == pytest.approx(expected, rel=1e-9)


def test_plans_see_the_steps_of_observation_alone() -> None:
    spectra = {step: {} for step in (1, 2, 3, 4, 5, 6, 8)}
    seen, held_out = score.split(spectra, SHORT)
    assert ([*seen], [*held_out]) == ([2, 4], [5, 6, 8])


@pytest.mark.parametrize("unit", ["steps", "flops"])
def test_a_plan_by_measured_residuals_scores_its_objective(unit: str) -> None:
    """On the very spectra it was made from; there it is no worse than uniform."""
    spectra = made_up_spectra()
    schedules, objective = measured_twin.plan(spectra, REGISTRY, unit=unit)
    found = score.score(schedules, spectra, REGISTRY)
    assert found["residual"] ** 2 * len(REGISTRY) == pytest.approx(objective)
    uniform = score.score(score.uniform(spectra, REGISTRY), spectra, REGISTRY)
    assert found["residual"] < uniform["residual"]
    assert unit == "steps" or found["flops"] <= 1


def made_up_spectra() -> dict[int, dict[str, torch.Tensor]]:
    """A hard matrix and an easy one."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for step in (2, 4):
        values = {"a": torch.tensor([1.0, 1e-4]), "b": torch.tensor([1.0, 0.4])}
        noise = {name: 1 + 0.2 * torch.rand(2, generator=generator) for name in values}
        found[step] = {
            name: (v * noise[name] / v.norm() / 1.2).double() for name, v in values.items()
        }
    return found


def test_the_paper_s_plan_is_that_of_the_optimizer(root: Path, tmp_path: Path) -> None:
    """A plan from spectra is the one that the run with AMO made from its own observations."""
    path = tmp_path / "spectra.pt"
    train.run(TINY, VARIANTS["muon-pe"], 3, data.load(root), SHORT, spectra=path)
    spectra, registry = train.load_spectra(path)
    plan = score.PLANNERS["paper, steps"](score.split(spectra, SHORT)[0], registry)
    by_type = {matrix.operator_type: plan[matrix.name].num_steps for matrix in registry}
    assert by_type == run("paper", root)["allocation"]
    assert len(set(by_type.values())) > 1


# ---------------------------------------------------------------- report


def made_up(folder: Path) -> None:
    """Results of two architectures and three seeds."""
    for architecture, gap in (("grouped", 0.2), ("multi-head", -0.1)):
        for seed, base in enumerate((2.0, 2.1, 2.3)):
            losses = {"muon-pe": base, "paper": base - gap - 0.01 * seed, "adamw": base + 1}
            for variant, loss in losses.items():
                record = {
                    "architecture": architecture,
                    "seed": seed,
                    "variant": variant,
                    "validation_loss": {"1": 5.0, "2": loss},
                    "train_loss": [5.0, loss],
                    "flops": 1.0,
                    "flops_locked": 0.9,
                    "allocation": {"attn_q": 5, "attn_k": 4 + (seed == 2)},
                }
                path = folder / "runs" / f"{architecture}-{seed}-{variant}.json"
                train.write_json(path, record)
            plans = {
                "uniform PE": made_up_score(0.4),
                "paper, flops": made_up_score(0.4 + gap),
                "measured, flops 1.0": made_up_score(0.35),
            }
            record = {"architecture": architecture, "seed": seed, "plans": plans}
            train.write_json(folder / "held_out" / f"{architecture}-{seed}.json", record)


def made_up_score(residual: float) -> dict[str, Any]:
    by_type = {"attn_q": {"residual": 0.1}, "attn_v": {"residual": 2 * residual}}
    return {"residual": residual, "distance": residual / 2, "flops": 1.0, "by_type": by_type}


@needs_scipy
def test_a_report_of_made_up_results(tmp_path: Path) -> None:
    made_up(tmp_path)
    lines = report.text(tmp_path).splitlines()
    # t(0.975, 2) = 4.3027; the differences -0.20, -0.21, -0.22 have a standard deviation of 0.01.
    half = 4.3027 * 0.01 / math.sqrt(3)
    (paper,) = (line for line in lines if line.startswith("| grouped | the paper's AMO | 3 "))
    assert f"| -0.2100 ± {half:.4f} | 1.000 | 0.900 | 5 4 (2), 5 5 (1) |" in paper
    (adamw,) = (line for line in lines if line.startswith("| multi-head | AdamW | 3 "))
    assert "| +1.0000 ± 0.0000 |" in adamw
    (row,) = (line for line in lines if line.startswith("| multi-head | paper, flops |"))
    assert "| 0.3000 ± 0.0000 | -0.1000 ± 0.0000 |" in row
    assert "| attn_v: 0.60 |" in row
    assert "- grouped: 5.000, 2.133 at steps 1, 2" in lines
    assert "- paper, flops: greater held-out residual than uniform in 3 of 6 runs" in lines
    assert "- measured, flops 1.0: greater held-out residual than uniform in 0 of 6 runs" in lines
    assert lines[-1].startswith("Found: it has the lower one in 1 of 2 (multi-head). ")
    assert lines[-1].endswith("The default is the measured plan.")


@needs_scipy
def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    assert report.differences({0: 1.0, 2: 5.0}, {0: 0.5, 1: 9.0, 2: 4.0}) == [0.5, 1.0]
    assert report.plus_minus([]) == ""
    assert report.plus_minus([0.5], "+") == "+0.5000"
    with pytest.raises(ValueError, match="output: found no results"):
        report.text(tmp_path)


@needs_scipy
@needs_matplotlib
def test_plots_lie_beside_the_results(tmp_path: Path) -> None:
    made_up(tmp_path)
    found = report.plot(tmp_path)
    names = ["validation_loss.png", "held_out_residual.png", "held_out_distance.png"]
    assert found == [tmp_path / name for name in names]
    assert all(path.stat().st_size > 1000 for path in found)


@needs_scipy
@needs_matplotlib
def test_the_three_commands_follow_each_other(
    short_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(["train", "--variant", "muon-pe", *short_study])
    command.main(["score", *short_study])
    capsys.readouterr()
    command.main(["report", f"--output={tmp_path / 'results'}"])
    told = capsys.readouterr().out
    for plan in score.PLANNERS:
        assert f"| grouped | {plan} | " in told
    assert "held_out_residual.png" in told
