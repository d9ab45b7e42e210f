"""What reaches the console of a run of which only the progress is asked for, and how often."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from amo_dist.config import OPERATOR_TYPES, AMOConfig
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.types import MatrixInfo
from tests import spectra
from tests.held import Held
from torchtitan_ext.plugin import console


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the log goes, with the root logger set up as for a run, and given back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.setLevel(logging.INFO)  # as torchtitan does
    yield tmp_path
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def starving() -> Held:
    """Observed once; its plan gives attn_o 3 steps, as Qwen3-1.7B's of 32 in all."""
    config = AMOConfig.paper(observe_until=1, observe_every=1, budget_ratio=0.9143, shrinkage=1.0)
    matrices = [MatrixInfo(name, (8, 8), name) for name in OPERATOR_TYPES]
    policy = Held(AMOPolicy(config), matrices)
    ells = (3.00377e-4, 1.26601e-3, 7.42367e-4, 3.00361e-4, 2.05821e-3, 1.73407e-3, 4.25243e-3)
    spectra.record(policy, 1, dict(zip(OPERATOR_TYPES, ells, strict=True)))
    return policy


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_plan_and_its_warnings_reach_the_console_once(
    rank: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)
    console.brief(folder)
    policy = starving()
    policy.adopt_plan(policy.make_plan())
    logging.getLogger("amo_dist.kernels").info("a detail")
    shown, log = capsys.readouterr().out, (folder / f"log_rank{rank}.txt").read_text()
    assert "a detail" in log
    assert "a detail" not in shown
    for text, found in ((log, 1), (shown, int(rank == "0"))):
        assert text.count("the plan, beside the uniform schedule:\noperator type") == found
        assert text.count("(uniform: 2.2") == found
        assert text.count("the plan starves attn_o: 3 Newton-Schulz steps, where") == found
        assert text.count("the plan raises the residual of ") == found
