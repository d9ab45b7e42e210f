"""Which checkpoints are kept, and what a failed one says; whole runs are integration tests."""

from __future__ import annotations

import errno
import queue
import warnings
from pathlib import Path
from typing import Any

import pytest

import torchtitan_ext

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
    torchtitan_ext.register()

from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_ext.plugin import checkpoints


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A manager of a folder, without a run; complete are 2, 4, 6 and 10, of 8 a part is there."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    made: Any = object.__new__(checkpoints.CheckpointManager)
    made.enable, made.folder, made.purge_queue = False, str(tmp_path), queue.Queue()
    for step in (2, 4, 6, 8, 10):
        (tmp_path / f"step-{step}").mkdir()
        if step != 8:
            (tmp_path / f"step-{step}" / ".metadata").touch()
    (tmp_path / "step-of-another-kind").mkdir()
    return made


@pytest.mark.parametrize(
    ("under_way", "keep", "purged"),
    [
        (12, 2, [2, 4, 6, 8]),  # what is under way may fail: 10 is to be kept, and not for 8
        (12, 3, [2, 4, 8]),
        (12, 9, [8]),
        (12, 0, []),
        (8, 2, [2, 4]),  # beyond it lies another run's, or a user's
    ],
)
def test_only_complete_checkpoints_count(
    manager: Any, under_way: int, keep: int, purged: list[int]
) -> None:
    manager._step_under_way, manager.keep_latest_k = under_way, keep
    manager._purge_stale_checkpoints()
    found = [Path(manager.purge_queue.get()).name for _ in range(manager.purge_queue.qsize())]
    assert found == [f"step-{step}" for step in purged]


def test_a_failure_names_step_reason_rank_and_what_is_left(manager: Any) -> None:
    manager._step_under_way = 10
    failure = OSError(errno.ENOSPC, "No space left on device")
    told = str(manager._explained(CheckpointException("save", {3: (failure, None)})))  # type: ignore[dict-item]
    assert told == (
        f"the checkpoint of step 10 could not be written to {manager.folder}: "
        "No space left on device (on rank 3); step 6 is the newest complete one"
    )
    manager._step_under_way, manager.folder = 2, str(Path(manager.folder) / "none")
    assert str(manager._explained(failure)).endswith("No space left on device; there is none")


@pytest.mark.parametrize("stages", [False, True])
def test_staging_waits_for_the_device(
    manager: Any, monkeypatch: pytest.MonkeyPatch, stages: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(
        checkpoints.titan.CheckpointManager, "save", lambda *_: calls.append("save")
    )
    monkeypatch.setattr(manager, "_should_save", lambda *_: True)
    monkeypatch.setattr(manager, "_async_wait", lambda: None)
    manager.enable_staging = stages
    manager.save(12)
    assert calls == (["wait", "save"] if stages else ["save"])
