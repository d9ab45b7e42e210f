"""Static schedules, their files; ``python -m tests.titan.test_static_schedule`` makes the log."""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from amo_dist.config import OPERATOR_TYPES
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.polar_express import compose, simulate
from amo_dist.schedule.types import Schedule
from benchmarks.amo_paper import static_schedule
from benchmarks.amo_paper.static_schedule import ScheduleTable, make_table, read_pool
from torchtitan_ext.config.schedule_file import load_schedule_file

ROOT = Path(__file__).resolve().parents[2]
LOG = ROOT / "tests" / "golden" / "geometry_log.jsonl"
TABLES = ROOT / "configs" / "schedules"
MODELS = (("Qwen3-70M", "Qwen3"), ("Qwen3-0.6B", "Qwen3"), ("Llama-3.1-75M", "Llama-3.1"))


def make_log() -> list[dict[str, Any]]:
    """Two layers and steps of three models; one type has ells across nine decades."""
    rng = random.Random(0)
    records: list[dict[str, Any]] = []
    for model, family in MODELS:
        for step in (10, 20):
            for layer in range(2):
                for index, operator_type in enumerate(OPERATOR_TYPES):
                    frobenius = 1.0 + rng.random()
                    decades = 9.0 if operator_type == "attn_v" else 1.0
                    ell = 10.0 ** -(1.0 + 0.4 * index + decades * rng.random())
                    records.append(
                        {
                            "step": step,
                            "name": f"layers.{layer}.{operator_type}.weight",
                            "layer": layer,
                            "operator_type": operator_type,
                            "model": model,
                            "family": family,
                            "sigma_min": ell * frobenius,
                            "sigma_max": frobenius * (0.2 + 0.7 * rng.random()),
                            "frobenius": frobenius,
                        }
                    )
    records[3].update(sigma_min=None, sigma_max=None, frobenius=None)  # a NaN in the momentum
    records[4].update(sigma_min=0.0, sigma_max=0.0, frobenius=0.0)  # all zero
    records[5].update(sigma_min=0.0)  # singular: tau counts
    return records


def log_text() -> str:
    return "".join(json.dumps(record) + "\n" for record in make_log())


def brute_percentile(values: list[float], percent: int) -> float:
    """Between the two nearest ranks, by definition."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


def brute_ells(family: str | None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for line in LOG.read_text().splitlines():
        r = json.loads(line)
        if r["frobenius"] and (family is None or r["family"] == family):
            ell = max(r["sigma_min"], 1e-10 * r["sigma_max"]) / r["frobenius"]
            found.setdefault(r["operator_type"], []).append(ell)
    return found


def run_polynomials(triples: tuple[tuple[float, float, float], ...], x: float) -> float:
    for a, b, c in triples:
        x = a * x + b * x * x * x + c * x * x * x * x * x
    return x


def test_the_log_is_the_one_that_is_made() -> None:
    assert LOG.read_text() == log_text()


@pytest.mark.parametrize("family", [None, "Qwen3", "Llama-3.1"])
@pytest.mark.parametrize("tolerance", [1e-2, 5e-2])
@pytest.mark.parametrize(
    ("rule", "percent"), [("typical", 50), ("conservative", 25), ("floor", 10)]
)
def test_tables_are_what_the_rules_say(
    rule: str, percent: int, tolerance: float, family: str | None
) -> None:
    table = make_table(read_pool([LOG], family), rule, tolerance)
    assert tuple(table.schedules) == OPERATOR_TYPES
    for name, ells in brute_ells(family).items():
        # The interpolation may round in another order.
        assert table.ell[name] == pytest.approx(brute_percentile(ells, percent), rel=1e-14)
        errors = {s: 1 - simulate(table.ell[name], s) for s in range(1, 9)}
        enough = [s for s, error in errors.items() if error <= tolerance]
        steps = table.schedules[name].num_steps
        assert steps == (min(enough) if enough else 8)
        # The composer's own claim, against a run of its polynomials over the lower bound.
        reached = run_polynomials(table.schedules[name].coefficients, table.ell[name])
        assert 1 - reached == pytest.approx(errors[steps], abs=1e-12)  # rounding of eight quintics
        assert table.schedules[name] == Schedule(compose(table.ell[name], steps), norm_scale=1.01)


def test_invalid_records_are_counted_and_left_out() -> None:
    pool = read_pool([LOG])
    assert pool.num_invalid == 2
    assert sum(map(len, pool.ell_by_type.values())) == len(make_log()) - 2
    assert pool.models == ("Llama-3.1-75M", "Qwen3-0.6B", "Qwen3-70M")
    assert read_pool([LOG], "Llama-3.1").num_invalid == 0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0.5, 1.0, 2.0), 0.25),
        ((0.0, 1.0, 2.0), 0.5e-10),
        ((1.0 + 1e-9, 1.0 + 1e-9, 1.0), 1.0),  # rank one, rounded upwards
        ((0.0, 0.0, 0.0), None),
        ((math.nan, 1.0, 1.0), None),
        ((1.0, math.inf, math.inf), None),
        ((0.0, 0.0, 1.0), None),
    ],
)
def test_static_ell(sizes: tuple[float, float, float], expected: float | None) -> None:
    assert static_schedule.static_ell(*sizes) == expected


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    static_schedule.add_commands(parser.add_subparsers())
    return parser.parse_args(["static-schedule", *arguments])


def test_the_command_writes_what_the_loader_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "schedule.toml"
    options = ("--rule", "floor", "--family", "Qwen3", "-o", str(output))
    assert static_schedule.run(parse(str(LOG), *options)) == 0
    table = make_table(read_pool([LOG], "Qwen3"), "floor", 1e-2)
    assert load_schedule_file(output) == table.schedules
    shown = capsys.readouterr().out
    assert "warning: 8 steps do not reach the tolerance for attn_v" in shown
    assert "2 records left out" in shown
    assert static_schedule.run(parse(str(LOG), *options[:-2])) == 0
    assert capsys.readouterr().out == output.read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n{}", "line 1: not JSON"),
        ("[]", "expected an object"),
        ('{"model": "m"}', "family: found None"),
        ('{"family": "f"}', "model: found None"),
        ('{"family": "f", "model": "m"}', "operator_type: found None"),
        (
            '{"family": "f", "model": "m", "operator_type": "t", "sigma_min": "1"}',
            "sigma_min: found '1', expected int or float",
        ),
        ("", "found no valid record"),
    ],
)
def test_malformed_logs_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line and line + "\n")
    with pytest.raises(ValueError, match=message):
        read_pool([path])


@pytest.mark.parametrize("name", ["a1", "a2", "a3", "a4", "a5"])
def test_shipped_files_are_the_named_tables(name: str) -> None:
    assert load_schedule_file(TABLES / f"{name}.toml") == dict(named_schedule(name).by_type)


def test_tables_survive_a_file_bit_for_bit(tmp_path: Path) -> None:
    schedule = Schedule(((0.1 + 0.2, -1e-300, 1 / 3),), norm_scale=1.0, preconditioner="aol")
    source = 'a "quoted" \\ name\x7f\nand é'
    table = ScheduleTable({"strange.type [q]": schedule}, source, {"n": 3, "x": 0.1, "s": "t"})
    path = tmp_path / "t.toml"
    path.write_text(table.to_toml(), encoding="utf-8")
    found = load_schedule_file(path)
    assert found == table.schedules
    assert found["strange.type [q]"].digest() == schedule.digest()


VALID = """
format = 1
source = "here"
[schedules.attn_q]
steps = 1
norm_scale = 1
preconditioner = "frobenius"
coefficients = [[1, 0.5, 0.25]]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 1", "format = 2", "format: found 2, expected 1"),
        ("format = 1", "format = true", "format: found True"),
        ('source = "here"', "", "file.source: found 'nothing'"),
        ('source = "here"', 'source = ""', "source: found ''"),
        ("[schedules.attn_q]", "[schedule.attn_q]", "file.schedules: found 'nothing'"),
        ("steps = 1", "steps = 2", "steps: found 2, expected 1, the number of coefficients"),
        ("steps = 1", "stepz = 1", "schedules.attn_q.steps: found 'nothing'"),
        ("steps = 1", "steps = 1\nextra = 1", "schedules.attn_q.extra"),
        ("norm_scale = 1", "norm_scale = 0", "attn_q.norm_scale: found 0.0"),
        ("norm_scale = 1", "norm_scale = nan", "norm_scale: found nan"),
        ('"frobenius"', '"spectral"', "preconditioner: found 'spectral'"),
        ("[[1, 0.5, 0.25]]", "[[1, 0.5]]", r"coefficients\[0\]: found .*, expected a list of 3"),
        ("[[1, 0.5, 0.25]]", "[]", "steps: found 1, expected 0"),
        ("[[1, 0.5, 0.25]]", '[[1, 0.5, "x"]]', "found 'x', expected a finite number"),
        ("steps = 1", "steps = 1\nell = 0.5", "expected those of compose"),
        ("steps = 1", "steps = 1\nell = 0", "ell: found 0.0"),
        ("[schedules", "[parameters]\nx = [1]\n[schedules", "parameters.x"),
        ("format = 1", "format = ", "is not TOML"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "t.toml"
    path.write_text(VALID)
    assert load_schedule_file(path) == {"attn_q": Schedule(((1.0, 0.5, 0.25),), norm_scale=1.0)}
    assert old in VALID
    path.write_text(VALID.replace(old, new))
    with pytest.raises(ValueError, match=rf"(?s)t\.toml.*{message}"):
        load_schedule_file(path)


if __name__ == "__main__":
    LOG.write_text(log_text())
