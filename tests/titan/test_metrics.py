"""Figures of a logged step, from a processor without a run, and of callbacks; its clock."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from torchtitan_ext.config import settings
from torchtitan_ext.plugin import patches, sections
from torchtitan_ext.plugin.callbacks import Callback, CallbackError, Callbacks
from torchtitan_ext.plugin.hyperparameters import sequences_per_step
from torchtitan_ext.runs import run_files
from torchtitan_ext.runs.step_clock import StepClock


def dims(replicate: int = 1, shard: int = 1, cp: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        dp_replicate=replicate, dp_shard=shard, cp=cp, pp_enabled=False, non_data_parallel_size=cp
    )


@pytest.mark.parametrize(
    ("batch", "degrees", "expected"),
    [
        (16, {"shard": 4, "cp": 2}, 16),
        (-1, {"replicate": 2, "shard": 4}, 24),
        (-1, {"shard": 2, "cp": 8}, 6),  # ranks of one context share their sequences
    ],
)
def test_sequences_of_a_step(batch: int, degrees: dict[str, int], expected: int) -> None:
    training = SimpleNamespace(global_batch_size=batch, local_batch_size=3)
    assert sequences_per_step(training, dims(**degrees)) == expected


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a run of 256 tokens a step; ``now`` is what its clock shows."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    options = [f"--dump_folder={tmp_path}", "--tokenizer.kind=byte", "--training.steps=99"]
    options += ["--training.global_batch_size=4", "--training.seq_len=64", "--metrics.log_freq=2"]
    patches.install()
    config = settings.parse(options)
    made: Any = config.metrics.build(
        parallel_dims=dims(shard=4, cp=2),
        dump_folder=config.dump_folder,
        pp_schedule="1F1B",
        config_dict=config.to_dict(),
    )
    made.folder = tmp_path
    made.optimizers = SimpleNamespace(register_step_post_hook=lambda hook: None)
    made.num_flops_per_token, made.data_loading_times = 1, [0.0]
    made.now = made.time_last_log = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: made.now)
    yield made
    made.close()


def log(processor: Any, step: int, seconds: float = 1.0, waits: float = 0.0) -> dict[str, Any]:
    """What is written of a step that ended after some seconds."""
    processor.now += seconds
    processor.data_loading_times = [waits]
    # What torchtitan adds up after a resume on other ranks, with sequences of context twice.
    processor.log(step, 1.0, 1.0, 1.0, {"n_tokens_seen": 12345, "lr/AMO/0": 0.1})
    record: dict[str, Any] = run_files.read_metrics(Path(processor.folder)).steps[-1]
    return record


def test_tokens_follow_from_the_step_wherever_a_run_resumes(processor: Any) -> None:
    written: list[dict[str, Any]] = []
    processor.logger.close()
    processor.logger = SimpleNamespace(log=lambda row, _: written.append(row), close=lambda: None)
    assert not processor.should_log(11)
    assert processor.should_log(12)
    record = log(processor, 12, 10.0)
    assert record["num_tokens"] == 12 * 256
    assert written[-1]["n_tokens_seen"] == 12 * 256
    # Two steps since the start: not the average since step 1.
    assert record["tokens_per_second"] * record["seconds_per_step"] == pytest.approx(256)
    assert record["seconds_per_step"] == 5.0
    # torchtitan's figure is of one of four data-parallel devices, each with two of context.
    processor.ntokens_since_last_log = 2 * 256 // 4
    record = log(processor, 14, 10.0)
    assert record["tokens_per_second"] == 8 * written[-1]["throughput(tps)"]
    assert record["lr"] == 0.1


def test_validations_stand_beside_the_logged_steps(processor: Any, tmp_path: Path) -> None:
    processor.should_log(12)
    log(processor, 12)
    for step, loss in ((12, 1.5), (13, float("nan")), (15, 1.25)):
        processor._end_step()
        processor.now += 1.0
        processor.log_validation(loss, step)
    found = run_files.read_metrics(tmp_path)
    assert [one["step"] for one in found.steps] == [12]
    assert found.validations == [(12, 1.5), (15, 1.25)]
    processor.files.start(14)  # a resume drops those of later steps
    assert run_files.read_metrics(tmp_path).validations == [(12, 1.5)]


@pytest.mark.parametrize(("steps", "expected"), [(3, 6), (-1, -1)])
def test_a_step_of_validation_is_a_global_batch(steps: int, expected: int) -> None:
    sizes: Any = {"dp_world_size": 2, "local_batch_size": 2, "seq_len": 64}
    sizes["metrics_processor"] = SimpleNamespace(tokens_per_step=8 * 64)
    with mock.patch("torchtitan.components.validate.Validator.__init__") as stock:
        sections.Validator.Config(steps=steps).build(**sizes)
    assert stock.call_args.args[0].steps == expected


def test_a_validation_between_two_logs_is_no_time_of_training(processor: Any) -> None:
    processor.should_log(12)
    log(processor, 12)
    processor.now += 50.0
    processor.log_validation(1.0, 12)  # right after a log
    processor.now += 2.0
    processor.ntokens_since_last_log = 7
    processor._end_step()  # of step 13, which is not logged
    processor.now += 50.0
    processor.ntokens_since_last_log += 1000
    processor.log_validation(1.0, 13)
    assert processor.ntokens_since_last_log == 7
    assert processor.should_log(14)
    assert log(processor, 14, 2.0)["seconds_per_step"] == 2.0


@pytest.mark.parametrize(("waits", "is_told"), [(0.0625, False), (0.125, True)])
def test_waits_for_data_are_told_from_one_per_cent_of_a_step_on(
    processor: Any, waits: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    processor.should_log(11)
    with caplog.at_level(logging.INFO, logger="torchtitan_ext.progress"):
        assert log(processor, 12, 10.0, waits)["data_seconds_per_step"] == waits / 2
    assert ("waits for data" in caplog.text) == is_told
    assert "to go: 0:07:15 of 99 steps" in caplog.text  # 87 steps of 5 s


def test_the_slowest_rank_is_named_and_mfu_is_of_all_devices(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor.should_log(11)
    by_rank = torch.tensor([[1.0, 8.0, 0.0], [4.0, 2.0, 0.5]], dtype=torch.float64)
    monkeypatch.setattr(processor, "_seconds_by_rank", lambda *_: by_rank)
    record = log(processor, 12, 10.0)
    assert record["mfu_percent"] is None  # of a CPU
    assert (record["slowest_optimizer_rank"], record["slowest_data_rank"]) == (1, 0)
    assert record["slowest_optimizer_seconds_per_step"] == 4.0
    assert (record["data_seconds_per_step"], record["observe_seconds"]) == (8.0 / 2, 0.5)
    processor.has_quantization, processor.gpu_peak_flops = False, 1000.0
    processor.num_flops_per_token = 50
    record = log(processor, 14, 10.0)  # 512 tokens by two devices
    assert record["mfu_percent"] == pytest.approx(100 * 50 * 51.2 / 2000)


def test_a_resumed_run_shows_its_plan_and_a_new_plan_is_written_with_the_next_log(
    processor: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = SimpleNamespace(to_json=lambda: "{}")
    processor.optimizers.optimizer = SimpleNamespace(plan=plan)
    with caplog.at_level(logging.INFO, logger="torchtitan_ext.progress"):
        processor.should_log(11)
        processor.should_log(12)
    shown = [record.getMessage() for record in caplog.records if record.name.endswith("progress")]
    assert shown == ["training resumes at step 11 of 99", f"the plan of the checkpoint:\n{plan}"]
    assert (tmp_path / "plan.json").read_text() == "{}\n"
    processor.optimizers.optimizer.plan = SimpleNamespace(to_json=lambda: "[]")
    processor.callbacks = SimpleNamespace(run=lambda *_: [], figures=lambda *_: {})
    processor._end_step()
    log(processor, 12)
    assert (tmp_path / "plan.json").read_text() == "[]\n"


# ------------------------------------------------------------------ callbacks of the user


class Rank(Callback):
    def log_metrics(self, step: int, record: Any) -> dict[str, float]:
        return {"of_rank": step / 2}


def test_an_error_of_a_callback_names_rank_and_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callbacks = Callbacks([f"{__name__}.Rank"])
    assert callbacks.figures(3, {}) == {"of_rank": 1.5}
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    match = r"Rank.log_metrics failed on rank 1 at step .*Type"
    with pytest.raises(CallbackError, match=match) as caught:
        callbacks.figures("three", {})  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, TypeError)


# ------------------------------------------------------------------ the clock of optimizer steps


def test_on_a_cpu_the_seconds_of_steps_add_up() -> None:
    clock = StepClock(torch.device("cpu"))
    with mock.patch("time.perf_counter", side_effect=[1.0, 3.0, 10.0, 10.5]):
        for _ in range(2):
            clock.start()
            clock.stop()
    assert clock.take() == 2.5
    assert clock.take() == 0.0


def test_on_cuda_the_device_is_asked_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    events = [mock.Mock() for _ in range(10)]
    for place, event in enumerate(events):  # kernels take a second from one event to the next
        event.elapsed_time = lambda end, place=place: 1e3 * (events.index(end) - place)
    monkeypatch.setattr("torch.cuda.Event", mock.Mock(side_effect=events))
    monkeypatch.setattr("torch.cuda.current_stream", lambda device=None: device)
    clock = StepClock(device)
    for _ in range(5):
        clock.start()
        clock.stop()
    for event in events:
        event.record.assert_called_once_with(device)  # the current device may be another one
    assert not any(event.synchronize.called for event in events)
    assert clock.take() == 5.0
    assert [event.synchronize.call_count for event in events] == [0] * 9 + [1]
    assert clock.take() == 0.0
