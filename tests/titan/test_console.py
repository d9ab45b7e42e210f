"""What reaches the console of a run of which only the progress is asked for, and how often."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from amo_dist.config import AMOConfig
from amo_dist.schedule.plan import plan_paper
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


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_plan_and_its_warnings_reach_the_console_once(
    rank: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)
    console.brief(folder)
    logger = logging.getLogger("amo_dist.optimizers.muon")  # it announces plans
    plan = plan_paper(AMOConfig.paper(budget_ratio=0.6), {"attn_q": 1e-6, "attn_k": 0.1})
    logger.info("the plan, beside the uniform schedule:\n%s", plan)
    logger.warning("%s", "a remark on it")
    logging.getLogger("amo_dist.kernels").info("a detail")
    shown, log = capsys.readouterr().out, (folder / f"log_rank{rank}.txt").read_text()
    assert "a detail" in log
    assert "a detail" not in shown
    for text, found in ((log, 1), (shown, int(rank == "0"))):
        assert text.count("the plan, beside the uniform schedule:\noperator type") == found
        assert text.count("a remark on it") == found
