"""Static schedules from a geometry log."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from amo_dist.config import OPERATOR_TYPES
from amo_dist.schedule.polar_express import compose, simulate
from amo_dist.schedule.types import Schedule
from benchmarks.amo_paper.__main__ import main
from benchmarks.amo_paper.static_schedule import make_table, read_pool, static_ell
from torchtitan_ext.config.schedule_file import load_schedule_file


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two families of 20 matrices; one type has ells across nine decades."""
    rng, lines = random.Random(0), []
    for index in range(40 * len(OPERATOR_TYPES)):
        name = OPERATOR_TYPES[index % len(OPERATOR_TYPES)]
        ell = 10.0 ** -(1.0 + (9.0 if name == "attn_v" else 1.0) * rng.random())
        record = {"family": ("Qwen3", "Llama-3.1")[index % 2], "operator_type": name}
        sizes = {"sigma_min": 2 * ell, "sigma_max": 1.0, "frobenius": 2.0}
        lines.append(json.dumps(record | sizes))
    lines.append(json.dumps(record | dict.fromkeys(sizes)))  # a NaN in the momentum
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("family", [None, "Qwen3"])
@pytest.mark.parametrize(
    ("rule", "percent"), [("typical", 50), ("conservative", 25), ("floor", 10)]
)
def test_tables_are_what_the_rules_say(
    log: Path, rule: str, percent: int, family: str | None
) -> None:
    pool = read_pool([log], family)
    schedules = make_table(pool, rule, 1e-2)["schedules"]
    assert pool.num_invalid == (1 if family is None else 0)
    for name, ells in pool.ell_by_type.items():
        ordered, rank = sorted(ells), (len(ells) - 1) * percent / 100
        low = math.floor(rank)
        high = ordered[min(low + 1, len(ells) - 1)]
        between = ordered[low] + (rank - low) * (high - ordered[low])
        # The interpolation may round in another order.
        ell = schedules[name]["ell"]
        assert ell == pytest.approx(between, rel=1e-14)
        steps = min([s for s in range(1, 9) if 1 - simulate(ell, s) <= 1e-2], default=8)
        assert (schedules[name]["steps"], schedules[name]["norm_scale"]) == (steps, 1.01)
        assert schedules[name]["coefficients"] == compose(ell, steps)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0.5, 1.0, 2.0), 0.25),
        ((0.0, 1.0, 2.0), 0.5e-10),
        ((1.0 + 1e-9, 1.0 + 1e-9, 1.0), 1.0),  # rank one, rounded upwards
        ((0.0, 0.0, 0.0), None),
        ((math.nan, 1.0, 1.0), None),
    ],
)
def test_static_ell(sizes: tuple[float, float, float], expected: float | None) -> None:
    assert static_ell(*sizes) == expected


def test_the_command_writes_what_the_loader_reads(log: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "schedule.toml"
    options = ["--rule", "floor", "--family", "Qwen3", "-o", str(output)]
    assert main(["static-schedule", str(log), *options]) == 0
    expected = make_table(read_pool([log], "Qwen3"), "floor", 1e-2)["schedules"]
    written = load_schedule_file(output)
    assert list(written) == list(expected)
    for name, schedule in written.items():
        coefficients = expected[name]["coefficients"]
        assert schedule.digest() == Schedule(coefficients, norm_scale=1.01).digest()


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("[]", "line 1"),
        ('{"operator_type": "t"}', "family"),
        ('{"family": "f", "operator_type": "t", "sigma_min": "1"}', "sigma_min"),
    ],
)
def test_malformed_logs_are_named(tmp_path: Path, line: str, field: str) -> None:
    (tmp_path / "log.jsonl").write_text(f"{line}\n{line}\n")
    with pytest.raises(ValueError, match=field):
        read_pool([tmp_path / "log.jsonl"])
