"""Checkpoints that are kept, loaded or refused; whole runs are integration tests."""

from __future__ import annotations

import errno
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from amo_dist import Muon, Schedule, param_groups
from amo_dist.engine.ballot import NonFiniteUpdateError
from torchtitan_ext.plugin import checkpoints

MODES = checkpoints.titan.AsyncMode


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A manager of a folder, without a run; complete are 2, 4, 6 and 10, of 8 a part is there."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    made: Any = object.__new__(checkpoints.CheckpointManager)
    made.enable, made.folder, made.purge_queue = False, str(tmp_path), queue.Queue()
    made._verifies, made._keep_every = True, 0
    made.save_future = made.purge_thread = made.stager = None
    made.states = {"optimizer": SimpleNamespace(optimizers=[]), "lr_scheduler": []}
    for step in (2, 4, 6, 8, 10):
        (tmp_path / f"step-{step}").mkdir()
        if step != 8:
            (tmp_path / f"step-{step}" / ".metadata").touch()
    (tmp_path / "step-of-another-kind").mkdir()
    return made


@pytest.mark.parametrize(
    ("under_way", "keep", "every", "purged"),
    [
        (12, 2, 0, [2, 4, 6, 8]),  # The save under way may fail, so 10 is kept, and 8 is no help.
        (12, 3, 0, [2, 4, 8]),
        (12, 9, 0, [8]),
        (12, 0, 0, []),
        (8, 2, 0, [2, 4]),  # Later steps belong to another run, or to the user.
        (12, 2, 4, [2, 6, 8]),  # 4 is a milestone; 8 would be one, but was cut short.
        (12, 2, 6, [2, 4, 8]),
    ],
)
def test_only_complete_checkpoints_count(
    manager: Any, under_way: int, keep: int, every: int, purged: list[int]
) -> None:
    manager._step_under_way, manager.keep_latest_k = under_way, keep
    manager._keep_every = every
    manager._purge_stale_checkpoints()
    found = [Path(manager.purge_queue.get()).name for _ in range(manager.purge_queue.qsize())]
    assert found == [f"step-{step}" for step in purged]


def test_a_failure_names_step_reason_rank_and_what_is_left(manager: Any) -> None:
    manager._step_under_way = 10
    failure = OSError(errno.ENOSPC, "No space left on device")
    told = str(manager._explained(CheckpointException("save", {3: (failure, None)})))  # type: ignore[dict-item]
    assert told == (
        f"the checkpoint of step 10 could not be written to {manager.folder}: "
        "OSError: [Errno 28] No space left on device (on rank 3); step 6 is the newest complete one"
    )
    manager._step_under_way, manager.folder = 2, str(Path(manager.folder) / "none")
    assert str(manager._explained(failure)).endswith("No space left on device; there is none")


@pytest.mark.parametrize("mode", MODES)
def test_staging_waits_for_the_device(
    manager: Any, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    calls: list[str] = []
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(
        checkpoints.titan.CheckpointManager, "_save", lambda *_: calls.append("save")
    )
    monkeypatch.setattr(manager, "_should_save", lambda *_: True)
    manager.enable, manager.async_mode = True, mode
    assert manager.save(12)
    stages = mode == MODES.ASYNC_WITH_PINNED_MEM
    assert calls == (["wait", "save"] if stages else ["save"])


@pytest.fixture
def loading(manager: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The manager, telling what it loads: ``loaded`` holds paths, and whether weights alone."""
    manager.enable = True
    manager.initial_load_path, manager.initial_load_model_only = None, True
    manager.initial_load_in_hf = manager.initial_load_in_hf_quantized = False
    manager.loaded = []
    monkeypatch.setattr(manager, "_states_to_load", lambda model_only: model_only)
    monkeypatch.setattr(
        manager,
        "dcp_load",
        lambda model_only, checkpoint_id, **_: manager.loaded.append((checkpoint_id, model_only)),
    )
    alone(monkeypatch)
    monkeypatch.setattr(checkpoints, "find_damage", lambda *_: "")
    manager._skips_damaged = True
    yield manager
    manager.enable = False  # else it would look for threads to end


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of one rank."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr(
        "torch.distributed.all_gather_object", lambda found, one: found.__setitem__(0, one)
    )


def make_incomplete(folder: Path) -> None:
    for path in folder.glob("step-*/.metadata"):
        path.unlink()


def test_a_run_killed_in_its_first_save_starts_from_its_initial_weights(
    loading: Any, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    make_incomplete(Path(loading.folder))
    initial = str(tmp_path_factory.mktemp("initial"))
    loading.initial_load_path = initial
    assert loading.load()
    assert loading.loaded == [(initial, True)]
    assert "step-8, step-10); the run starts anew" in caplog.text


def test_a_complete_checkpoint_goes_before_initial_weights(loading: Any) -> None:
    loading.initial_load_path = "elsewhere"
    (Path(loading.folder) / "step-12").mkdir()
    assert loading.load()
    assert loading.loaded == [(str(Path(loading.folder) / "step-10"), False)]
    assert loading.load(4)
    assert loading.loaded[-1] == (str(Path(loading.folder) / "step-4"), False)


def test_all_ranks_go_by_what_the_first_one_sees(
    loading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    for told, loaded in ((6, "step-6"), (10, "step-10")):

        def tell(found: list[list[int]], src: int, told: int = told) -> None:
            found[0] = [2, told]

        monkeypatch.setattr("torch.distributed.broadcast_object_list", tell)
        assert loading.load()
        assert Path(loading.loaded[-1][0]).name == loaded
    monkeypatch.setattr(
        "torch.distributed.broadcast_object_list", lambda found, src: found.__setitem__(0, [99])
    )
    with pytest.raises(ValueError, match=r"found no step-99 in .* on rank\(s\) 0, expected it as"):
        loading.load()


def test_every_rank_raises_if_one_misses_the_folder(
    loading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that raised alone left the others in the next collective until its timeout."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)

    def gather(damage_by_rank: list[Any], damage: str | None) -> None:
        damage_by_rank[:] = [damage, None, None]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    with pytest.raises(ValueError, match=r"found no step-10 in .* on rank\(s\) 1, 2, expected"):
        loading.load()


def damage(*steps: int) -> dict[str, str]:
    """What `find_damage` finds, by name of the folder."""
    return {f"step-{step}": "__0_0.distcp has 3 bytes, 9 were written" for step in steps}


@pytest.mark.parametrize(
    ("steps", "loaded"), [((), "step-10"), ((10,), "step-6"), ((10, 6, 4), "step-2")]
)
def test_a_damaged_checkpoint_is_named_and_skipped(
    loading: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    steps: tuple[int, ...],
    loaded: str,
) -> None:
    found = damage(*steps)
    monkeypatch.setattr(checkpoints, "find_damage", lambda path, *_: found.get(path.name, ""))
    assert loading.load()
    assert Path(loading.loaded[-1][0]).name == loaded
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(steps)
    for step, line in zip(steps, told, strict=True):
        assert f"step-{step} is damaged: __0_0.distcp has 3 bytes, 9 were written" in line


def test_a_run_may_stop_at_damage_and_never_starts_anew_for_it(
    loading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = damage(2, 4, 6, 10)
    monkeypatch.setattr(checkpoints, "find_damage", lambda path, *_: found.get(path.name, ""))
    with pytest.raises(ValueError, match=r"step-2 is damaged: .*, and no checkpoint before it"):
        loading.load()
    loading._skips_damaged = False
    with pytest.raises(ValueError, match=r"step-10 is damaged: .*; checkpoint.damaged = 'skip'"):
        loading.load()


def test_damage_that_another_rank_finds_counts(
    loading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)

    def tell(found: list[str], one: str) -> None:
        found[:] = [one, "cut" if len(asked) == 1 else ""]

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(checkpoints, "find_damage", lambda _, *part: asked.append(part) or "")
    monkeypatch.setattr("torch.distributed.all_gather_object", tell)
    assert loading.load()
    assert Path(loading.loaded[-1][0]).name == "step-6"
    assert asked == [(0, 2), (0, 2)]


def test_what_left_out_an_update_is_not_saved(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(8, 12, bias=False)
    diverges = Schedule(((1e30, 1e30, 1e30),) * 3)
    groups = param_groups(layer, patterns={"weight": "attn_q"})
    optimizer = Muon(groups, lr=0.1, schedule=diverges)
    manager.states = {"optimizer": SimpleNamespace(optimizers=[optimizer])}
    monkeypatch.setattr(manager, "_should_save", lambda *_: True)
    manager.enable = True
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    with pytest.raises(NonFiniteUpdateError, match="weight"):
        manager.save(10)
    assert (Path(manager.folder) / "step-10" / ".metadata").exists()


def test_a_config_is_checked_without_a_word_about_its_defaults(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = checkpoints.CheckpointManager.Config()
    assert config.initial_load_model_only
    assert not caplog.records
    assert not config.last_save_model_only  # A finished run goes on with more steps.
    assert checkpoints.CheckpointManager.Config(last_save_in_hf=True).last_save_model_only
    with pytest.raises(ValueError, match=r"keep_every: found 30, expected a multiple of checkpo"):
        checkpoints.CheckpointManager.Config(interval=20, keep_every=30)
    with pytest.raises(ValueError, match="interval needs to be at least 1"):
        checkpoints.CheckpointManager.Config(interval=0)


def test_schedules_go_on_from_the_peak_that_was_loaded(loading: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    optimizer.param_groups[0]["initial_lr"] = 4.0  # as a checkpoint may bring it
    loading.states["lr_scheduler"] = [schedule]
    assert loading.load()
    assert (schedule.base_lrs, schedule.get_last_lr()) == ([4.0], [2.0])
    assert optimizer.param_groups[0]["lr"] == 2.0
