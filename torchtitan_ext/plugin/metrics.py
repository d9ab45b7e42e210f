"""Metrics of a run: torchtitan's, the optimizer's beside them, and a file to read both from."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torchtitan.components.metrics as titan
from torchtitan.config import derive

from amo_dist.distributed.ranks import control_device, max_over, slowest, world_group
from amo_dist.tools.tracker import GeometryTracker
from torchtitan_ext.batch import sequences_per_step
from torchtitan_ext.imports import import_class
from torchtitan_ext.plugin import geometry, optimizers
from torchtitan_ext.plugin.callbacks import Callbacks
from torchtitan_ext.plugin.console import duration
from torchtitan_ext.plugin.machine import cpu_is_needed, resident_peak
from torchtitan_ext.runs import run_log
from torchtitan_ext.runs.run_files import RunFiles, require_local

progress = logging.getLogger("torchtitan_ext.progress")
"""Lines for the one who watches; see :mod:`torchtitan_ext.plugin.console`."""


OF_DEVICE = {
    "tflops": "tflops",
    "mfu_percent": "mfu(%)",
    "reserved_memory_gib": "memory/max_reserved(GiB)",
}
"""Fields of a record by torchtitan's names: each of one device, ``None`` where there is none."""


class MetricsProcessor(titan.MetricsProcessor):
    """torchtitan's processor, with the optimizer's figures and three files in the dump folder.

    ``metrics.jsonl`` gets one JSON object for each logged step and for each validation (floats in
    full, ``null`` for a NaN or infinity); a resumed run first drops what lies beyond its
    checkpoint. ``plan.json`` holds
    AMO's latest plan once there is one, and ``run.json`` the config from the first step of a start
    on. TensorBoard and W&B get the same figures. torchtitan's line about a step ends with
    phase, Newton-Schulz steps, tokens per second and time to go. Tokens per second are those of
    all ranks, from one log to the next without validation; torchtitan's ``tps`` is one device's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.MetricsProcessor.Config):
        """``[metrics]``."""

        console: Literal["full", "brief"] = "full"
        """
        ``brief`` shows progress and warnings of the logging rank alone; everything else goes to
        ``log_rank<r>.txt`` in the dump folder.
        """

        callbacks: list[str] = field(default_factory=list)
        """Import paths of callbacks, called in this order; see ``docs/extend.md``."""

        processor: str = ""
        """Import path of a class that extends this section's, in its place."""

        def build(self, **options: Any) -> MetricsProcessor:
            """Make the processor.

            Raises:
                ValueError: ``processor`` or ``callbacks`` name no such class.
            """
            owner: Any = self._owner
            config = self
            if self.processor:
                owner = import_class(self.processor, MetricsProcessor, "metrics.processor")
                config = derive(self, owner.Config)
            processor: MetricsProcessor = owner(config, **options)
            return processor

    _optimizers: Any = None
    _tracker: GeometryTracker | None = None

    def __init__(self, config: Config, **options: Any) -> None:
        require_local("dump_folder", options["dump_folder"])
        self.callbacks = Callbacks(config.callbacks)
        super().__init__(config, **options)
        # torchtitan would compare any CPU with an A100; this leaves the share of peak flops out.
        self.has_quantization |= cpu_is_needed()
        self._logged: dict[str, Any] = {}  # by torchtitan, of the latest step
        self.logger: Any = _KeepingLogger(self.logger, self._logged)
        self._tail = ""
        titan.logger.addFilter(self._extend_line)
        config_dict, dump_folder = options["config_dict"], options["dump_folder"]
        # The section says which model it is; all of its modules would take thousands of lines.
        self._config_dict = {k: v for k, v in config_dict.items() if k != "model_spec"}
        if "model" not in config_dict:  # a config of torchtitan, with its own tokenizer
            names = {key: config_dict["model_spec"][key] for key in ("name", "flavor")}
            self._config_dict["model"] = names
            self._config_dict["tokenizer"] = {"kind": "hf", **config_dict["tokenizer"]}
        # Sections as attributes again.
        self._config = SimpleNamespace(
            **{k: SimpleNamespace(**v) for k, v in config_dict.items() if isinstance(v, dict)},
            dump_folder=dump_folder,
        )
        layout = {name: options[name] for name in ("parallel_dims", "pp_schedule")}
        writes = torch.distributed.get_rank() == titan._get_metrics_rank(**layout)
        self._files = RunFiles(Path(dump_folder)) if writes else None
        self._num_steps = int(self._config.training.steps)
        self.tokens_per_step = tokens_per_step(self._config.training, options["parallel_dims"])
        self._first_step: int | None = None
        self._logged_step = 0
        self._step_ended = self.time_last_log
        self._tokens_at_end = 0
        self._observed_step = 0
        self._step = 0
        self._plan: Any = None
        self._data_seconds: list[float] = []  # by step since the last log

    @property
    def optimizers(self) -> Any:
        """The container; torchtitan hands it over before the first step."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, container: Any) -> None:
        self._optimizers = container
        if container is not None:
            optimizers.check_lock(container, self._num_steps)
            self._tracker = geometry.install(container, self._config)
            container.register_step_post_hook(self._end_step)

    def should_log(self, step: int) -> bool:
        """Whether torchtitan logs this step, which asks before it: callbacks run here.

        The first call learns where the run starts.
        """
        self._step = step
        if self._first_step is None:
            self._first_step, self._logged_step = step, step - 1
            self._observed_step = step - 1
            self._plan = getattr(self._optimizer, "plan", None)
            if self._files is not None:
                self._files.start(step, self._config_dict)
                start = f"resumes at step {step}" if step > 1 else "starts anew at step 1"
                progress.info("training %s of %d", start, self._num_steps)
                if self._plan is not None:  # The policy itself announces new ones.
                    self._files.save_plan(self._plan.to_json())
                    progress.info("the plan of the checkpoint:\n%s", self._plan)
        self.callbacks.run("before_step", step)
        # The last step too: a run's final loss is what one looks for.
        return bool(super().should_log(step)) or step == self._num_steps

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log one step everywhere; arguments as in torchtitan."""
        report = run_log.report(self._optimizer)
        seconds = time.perf_counter() - self.time_last_log
        num_steps = max(step - self._logged_step, 1)
        clock = getattr(self.optimizers, "clock", None)
        # torchtitan has read the loss, which comes after the step: there is nothing to wait for.
        optimizer_seconds = 0.0 if clock is None else clock.take() / num_steps
        data_seconds = self._take_data_seconds() / num_steps
        # torchtitan adds up what the ranks have seen, each with its own number in the checkpoint of
        # one: another number of ranks would go on from another sum.
        num_tokens = step * self.tokens_per_step
        extra_metrics = {**(extra_metrics or {}), "n_tokens_seen": num_tokens}
        rates = (rate for name, rate in extra_metrics.items() if name.startswith("lr/"))
        record = {
            "step": step,
            "training_steps": self._num_steps,
            "lock_step": report.lock_step,
            "loss": global_avg_loss,
            "max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "lr": next(rates, None),  # one of all groups
            "num_tokens": num_tokens,
            "tokens_per_second": num_steps * self.tokens_per_step / seconds,
            "seconds_per_step": seconds / num_steps,
            "optimizer_seconds_per_step": optimizer_seconds,
            "data_seconds_per_step": data_seconds,
            "peak_memory_bytes": peak_memory(),
            "observe_seconds": self._observe_seconds(report.metrics),
            "geometry_seconds": None if self._tracker is None else self._tracker.seconds,
            "phase": report.phase,
            "num_steps_by_type": report.num_steps_by_type,
            "changes": run_log.changes(self._optimizer, self._files.last, step)
            if self._files is not None
            else [],
            "optimizer": report.metrics,
            **dict.fromkeys(OF_DEVICE),
        }
        extra_metrics["optimizer/seconds_per_step"] = optimizer_seconds
        extra_metrics["data/seconds_per_step"] = data_seconds
        figures = self.callbacks.figures(step, record)
        record |= figures
        extra_metrics |= {**report.metrics, **figures}
        self._tail = line_tail(record, self._num_steps)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        self._tail = ""
        self._step_ended, self._tokens_at_end = self.time_last_log, 0
        if self._files is not None:
            of_device = {name: self._logged.get(key) for name, key in OF_DEVICE.items()}
            self._files.append({**record, **of_device})
            if report.plan is not None:
                self._files.save_plan(report.plan)
        self._logged_step = step

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log a validation; arguments as in torchtitan.

        Validation time does not count towards step time.
        """
        seconds = self._step_ended - self.time_last_log
        super().log_validation(loss, step, extra_metrics)
        if self._files is not None:
            self._files.append_validation(step, loss)
        self.time_last_log -= seconds
        self.ntokens_since_last_log = self._tokens_at_end

    def close(self) -> None:
        """Close loggers and files."""
        super().close()
        titan.logger.removeFilter(self._extend_line)
        if self._files is not None:
            self._files.close()

    def _extend_line(self, record: logging.LogRecord) -> bool:
        """Append phase and time to go to torchtitan's own line, and mark it as progress."""
        if record.pathname == titan.__file__ and record.funcName in ("log", "log_validation"):
            record.msg = f"{record.msg}{self._tail}"
            if self._files is not None and record.levelno == logging.INFO:
                record.name = progress.name
        return True

    def _end_step(self, *_: object) -> None:
        self._step_ended, self._tokens_at_end = time.perf_counter(), self.ntokens_since_last_log
        self._data_seconds.append(sum(self.data_loading_times) - sum(self._data_seconds))
        plan = getattr(self._optimizer, "plan", None)
        if plan is not None and plan is not self._plan:
            self.callbacks.run("on_plan", self._step, json.loads(plan.to_json()))
        self._plan = plan
        self.callbacks.run("after_step", self._step)

    def _take_data_seconds(self) -> float:
        """Seconds waited for data since the last log, in each step those of its slowest rank.

        A collective over the world, at logged steps alone.
        """
        group = world_group()
        nanoseconds = [round(seconds * 1e9) for seconds in self._data_seconds]
        self._data_seconds = []
        longest = max_over(torch.tensor(nanoseconds, device=control_device(group)), group)
        return float(longest.sum().item()) / 1e9

    def _observe_seconds(self, figures: Mapping[str, float]) -> float | None:
        """Seconds of the slowest rank in the latest observation, if it was made since the last log.

        A collective over the world then: all ranks know of the same observations.
        """
        observations = getattr(self._optimizer, "observations", ())
        if not observations:
            return None
        step = observations[-1].step
        if step <= self._observed_step:
            return None
        self._observed_step = step
        return slowest(figures["optimizer/observe_seconds"], world_group())

    @property
    def _optimizer(self) -> Any:
        """The one of our container; None in torchtitan's own, which holds several."""
        return getattr(self.optimizers, "optimizer", None)


class _KeepingLogger(titan.BaseLogger):
    """Passes the figures of a step on to torchtitan's loggers, and keeps them in a dict.

    Args:
        logger: Logger of torchtitan.
        logged: Figures of the latest step by name.
    """

    def __init__(self, logger: titan.BaseLogger, logged: dict[str, Any]) -> None:
        self._logger, self._logged = logger, logged

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._logged |= metrics
        self._logger.log(metrics, step)

    def close(self) -> None:
        self._logger.close()


def tokens_per_step(training: Any, parallel_dims: Any) -> int:
    """Tokens of an optimizer step, over all ranks and accumulated batches.

    Args:
        training: torchtitan's ``[training]``; without a global batch size there is no accumulation.
        parallel_dims: torchtitan's degrees; ranks of one context share their sequences.
    """
    num_data_ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
    return sequences_per_step(training, num_data_ranks) * int(training.seq_len)


def peak_memory() -> int:
    """Greatest bytes of tensors on this rank's GPU; without a GPU, of the whole process."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else resident_peak()


def line_tail(record: Mapping[str, Any], num_steps: int) -> str:
    """End of torchtitan's line about a step: phase, Newton-Schulz steps, speed, time to go."""
    parts = [""]
    if record["phase"]:
        counts = " ".join(map(str, record["num_steps_by_type"].values()))
        parts += [f"phase: {record['phase']:<11}", f"NS steps: {counts}"]
    if (waits := record["data_seconds_per_step"]) >= 0.01 * record["seconds_per_step"]:
        parts.append(f"waits for data: {waits * 1e3:,.0f} ms per step")
    parts.append(f"tokens/s on all ranks: {record['tokens_per_second']:,.0f}")
    remaining = (num_steps - record["step"]) * record["seconds_per_step"]
    return "  ".join([*parts, f"to go: {duration(remaining)} of {num_steps} steps"])
