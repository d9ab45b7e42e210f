"""Checkpoints that are kept, loaded or refused, by a manager on one rank."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer

from amo_dist.engine.ballot import NonFiniteUpdateError
from torchtitan_ext.plugin import checkpoints, storage
from torchtitan_ext.plugin.optimizers import OptimizersContainer
from torchtitan_ext.runs.stores import store_of

pytestmark = pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Trainer:
    """What a manager saves of a trainer, and asks it for."""

    config = SimpleNamespace(training=SimpleNamespace(global_batch_size=8, local_batch_size=4))
    config.optimizer = SimpleNamespace(on_config_change="error")
    parallel_dims = SimpleNamespace(dp_replicate=1, dp_shard=1)
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Run:
    """A run that saves after steps 2, 4, 6 and 10; a save after 8 was cut short."""

    def __init__(
        self, folder: Path, *, rates: Any = None, store: str = "checkpoint", **checkpoint: Any
    ) -> None:
        self.model, self.trainer = nn.Linear(3, 2, bias=False), Trainer()
        fields = {"name": "Muon", "patterns": {"weight": "attn_q"}, **(rates or {})}
        section = OptimizersContainer.Config(**fields)
        self.optimizers = section.build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(
            optimizers=self.optimizers, training_steps=99
        )
        settings: dict[str, Any] = {"enable": True, "interval": 2, "keep_latest_k": 0}
        settings["folder"] = store
        config = checkpoints.CheckpointManager.Config(**settings | checkpoint)
        self.manager = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.trainer},
            sd_adapter=None,
            base_folder=str(folder),
        )
        self.folder = folder / "checkpoint"

    def save(self, *steps: int) -> None:
        for step in steps:
            self.model.weight.data.fill_(step)
            self.trainer.step = step
            self.manager.save(step)

    def load(self, step: int = -1) -> int:
        """The step that was loaded, 0 where nothing was."""
        return int(self.model.weight[0, 0]) if self.manager.load(step) else 0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Run(tmp_path) as run:
        run.save(2, 4, 6, 8, 10)
        (run.folder / "step-8" / ".metadata").unlink()
        (run.folder / "step-of-another-kind").mkdir()
    return tmp_path


def flip(shard: Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def damage(folder: Path, *steps: int) -> None:
    for step in steps:
        flip(folder / "checkpoint" / f"step-{step}" / "__0_0.distcp")


@pytest.mark.parametrize(
    ("step", "keep", "every", "left"),
    [
        (12, 2, 0, [10, 12]),  # The save of 12 may fail, so 10 is kept; 8 is no help.
        (12, 3, 0, [6, 10, 12]),
        (12, 0, 0, [2, 4, 6, 8, 10, 12]),
        (8, 2, 0, [6, 8, 10]),  # Later steps belong to another run, or to the user.
        (12, 2, 4, [4, 10, 12]),  # 4 is a milestone; 8 would be one, but was cut short.
    ],
)
def test_only_complete_checkpoints_count(
    saved: Path, step: int, keep: int, every: int, left: list[int]
) -> None:
    with Run(saved, keep_latest_k=keep, keep_every=every) as run:
        run.save(step)
        deadline = time.monotonic() + 60
        while checkpoints.checkpoints(run.folder) != left and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread deletes them
        assert checkpoints.checkpoints(run.folder) == left


def test_the_newest_complete_checkpoint_goes_before_initial_weights(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    initial = saved / "checkpoint" / "step-2"
    with Run(saved, initial_load_path=str(initial)) as run:
        assert [run.load(), run.load(4)] == [10, 4]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "checkpoint" / "step-6").mkdir(parents=True)  # killed in its first save
    with Run(elsewhere, initial_load_path=str(initial)) as run:
        assert run.load() == 2
        assert run.trainer.step == 0  # weights alone
    assert "step-6); the run starts anew" in caplog.text


@pytest.mark.parametrize(("steps", "loaded"), [((), 10), ((10,), 6), ((10, 6, 4), 2)])
def test_a_damaged_checkpoint_is_named_and_skipped(
    saved: Path, caplog: pytest.LogCaptureFixture, steps: tuple[int, ...], loaded: int
) -> None:
    damage(saved, *steps)
    with Run(saved) as run:
        assert run.load() == loaded
    lines = [one.getMessage() for one in caplog.records if "is damaged" in one.getMessage()]
    assert len(lines) == len(steps)
    for step, line in zip(steps, lines, strict=True):
        assert f"step-{step} is damaged: __0_0.distcp" in line


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_checkpoints_in_an_object_store_are_found_kept_and_skipped(
    tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{scheme}://{tmp_path}/bucket"
    store = store_of(url)
    with Run(tmp_path / "run", store=url) as run:
        run.save(2, 4, 6)
    store.rm_file("step-6/.metadata")
    store.pipe_file("step-4/__0_0.distcp", store.cat_file("step-4/__0_0.distcp")[:-1])
    with Run(tmp_path / "run", store=url, keep_latest_k=2) as run:
        assert run.load() == 2
        assert f"{url}/step-4 is damaged: __0_0.distcp has" in caplog.text
        run.save(8)
        deadline = time.monotonic() + 60
        while len(checkpoints.checkpoints(url)) > 2 and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread deletes them
        assert checkpoints.checkpoints(url) == [4, 8]
    with Run(tmp_path / "other", initial_load_path=f"{url}/step-8") as run:
        assert run.load() == 8


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("initial", [True, False])
def test_a_checkpoint_is_verified_once_and_only_where_asked(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, verify: bool, initial: bool
) -> None:
    """The newest one before it is chosen, initial weights as they are read."""
    folder = tmp_path_factory.mktemp("elsewhere") if initial else saved
    path = str(saved / "checkpoint" / "step-2") if initial else None
    with (
        mock.patch.object(checkpoints, "find_damage", return_value="") as chosen,
        mock.patch.object(storage, "find_damage", return_value="") as read,
        Run(folder, initial_load_path=path, verify=verify) as run,
    ):
        assert run.load() == (2 if initial else 10)
        assert (chosen.called, read.called) == (verify and not initial, verify and initial)


def test_a_run_may_stop_at_damage_and_never_starts_anew_for_it(saved: Path) -> None:
    damage(saved, 10)
    with Run(saved, verify=False) as run:
        assert run.manager._agree_on_latest_step() == 10
    with (
        Run(saved, damaged="error") as run,
        pytest.raises(ValueError, match=r"step-10 is damaged: .*; checkpoint\.damaged = 'skip'"),
    ):
        run.load()
    damage(saved, 2, 4, 6)
    with (
        Run(saved) as run,
        pytest.raises(ValueError, match=r"step-2 is damaged: .*, and no checkpoint before it"),
    ):
        run.load()


@pytest.mark.parametrize(("damage", "loaded"), [("", 10), ("cut", 6), (None, None)])
def test_what_another_rank_finds_counts_on_all(
    saved: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None, loaded: int | None
) -> None:
    """A rank that raised alone left the others in the next collective until its timeout."""
    whole = dist.all_gather_object
    others = [damage]

    def gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
        if obj == "" and others:
            object_list[:] = [obj, others.pop()]
        else:
            whole(object_list, obj, group)

    with Run(saved) as run:
        monkeypatch.setattr(dist, "all_gather_object", gather)
        if loaded is None:
            with pytest.raises(ValueError, match=r"found no step-10 in .* on rank\(s\) 1, "):
                run.load()
        else:
            assert run.load() == loaded


def test_a_failed_save_names_step_and_reason(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with Run(saved) as run:
        monkeypatch.setattr("torchtitan_ext.plugin.storage.CheckpointWriter.write_data", full)
        with pytest.raises(
            checkpoints.CheckpointError,
            match=r"step 12 could not .*No space left.* \(on rank 0\); step 10 is the newest",
        ):
            run.save(12)


def test_staging_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: calls.append("wait"))
    stock = checkpoints.titan.CheckpointManager
    monkeypatch.setattr(stock, "_save", lambda *_: calls.append("save"))
    with Run(tmp_path) as run:
        run.manager.async_mode = checkpoints.titan.AsyncMode.ASYNC_WITH_PINNED_MEM
        run.save(2)
        run.manager.async_mode = checkpoints.titan.AsyncMode.DISABLED
    assert calls == ["wait", "save"]


def test_a_step_without_an_update_is_not_saved(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = mock.Mock(side_effect=NonFiniteUpdateError("weight"))
    with Run(saved) as run:
        monkeypatch.setattr(run.optimizers.optimizer, "check_last_update", left_out)
        with pytest.raises(NonFiniteUpdateError):
            run.save(12)
        assert not (run.folder / "step-12").exists()


def test_schedules_go_on_from_the_peak_that_was_loaded(saved: Path) -> None:
    with Run(saved, rates={"lr": 1e-3, "on_config_change": "keep_checkpoint"}) as run:
        assert run.load() == 10
        assert run.schedulers.schedulers[0].base_lrs == [8e-4]


@pytest.mark.parametrize(
    ("field", "rule", "is_refused"),
    [
        ("global_batch_size", "error", True),
        ("local_batch_size", "keep_checkpoint", True),  # only the config can set it
        ("global_batch_size", "use_config", False),
    ],
)
def test_a_resume_with_another_batch_is_refused(
    saved: Path, monkeypatch: pytest.MonkeyPatch, field: str, rule: str, is_refused: bool
) -> None:
    monkeypatch.setattr(Trainer.config.training, field, 2)
    monkeypatch.setattr(Trainer.config.optimizer, "on_config_change", rule)
    refusal = pytest.raises(ValueError, match=rf"^training\.{field}: ")
    with Run(saved) as run, refusal if is_refused else contextlib.nullcontext():
        assert run.load() == 10
