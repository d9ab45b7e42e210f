"""Metrics of a run: torchtitan's, the optimizer's beside them, and a file to read both from."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torchtitan.components.metrics as titan

from torchtitan_ext.plugin import optimizers
from torchtitan_ext.plugin.callbacks import Callbacks
from torchtitan_ext.plugin.hyperparameters import sequences_per_step
from torchtitan_ext.plugin.machine import cpu_is_needed, resident_peak
from torchtitan_ext.runs import run_log
from torchtitan_ext.runs.run_files import RunFiles, lock, require_local

progress = logging.getLogger("torchtitan_ext.progress")
"""Lines for the one who watches; see :mod:`torchtitan_ext.plugin.console`."""


class MetricsProcessor(titan.MetricsProcessor):
    """torchtitan's processor, with the optimizer's figures and three files in the dump folder.

    ``metrics.jsonl`` gets one JSON object for each logged step and for each validation (floats in
    full, ``null`` for a NaN or infinity); a resumed run first drops what lies beyond its
    checkpoint. ``plan.json`` holds AMO's latest plan once there is one, and ``run.json`` the config
    from the first step of a start on. TensorBoard and W&B get the same figures. A line for the one
    who watches has phase, Newton-Schulz steps, tokens per second and time to go. Tokens per second
    are those of all ranks, from one log to the next without validation; torchtitan's ``tps`` is one
    device's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.MetricsProcessor.Config):
        """``[metrics]``.

        Attributes:
            console: ``brief`` shows progress and warnings of the logging rank alone; everything
                else goes to ``log_rank<r>.txt`` in the dump folder.
            callbacks: Import paths of callbacks, called in this order; see ``docs/extend.md``.
        """

        console: Literal["full", "brief"] = "full"
        callbacks: list[str] = field(default_factory=list)

    files: RunFiles | None = None
    """Only of the rank that logs."""

    def __init__(self, config: Config, **options: Any) -> None:
        require_local("dump_folder", options["dump_folder"])
        self.callbacks = Callbacks(config.callbacks)
        layout = {name: options[name] for name in ("parallel_dims", "pp_schedule")}
        if dist.get_rank() == titan._get_metrics_rank(**layout):
            folder = Path(options["dump_folder"])
            self.files = RunFiles(folder)
            self._lock = lock(folder)
        super().__init__(config, **options)
        # torchtitan would compare any CPU with an A100; this leaves the share of peak flops out.
        self.has_quantization |= cpu_is_needed()
        config_dict = options["config_dict"]
        self._config_dict = run_config(config_dict)
        training = SimpleNamespace(**config_dict["training"])
        self._num_steps = int(training.steps)
        num_sequences = sequences_per_step(training, options["parallel_dims"])
        self.tokens_per_step = num_sequences * int(training.seq_len)
        self._step = self._logged_step = 0
        self._step_ended = self.time_last_log
        self._tokens_at_end = 0
        self._observe_seconds = 0.0
        self._plan: Any = None

    def should_log(self, step: int) -> bool:
        """Whether torchtitan logs this step, which asks before it: callbacks run here.

        The first call learns where the run starts.
        """
        is_first, self._step = not self._step, step
        if is_first:
            optimizers.check_lock(self.optimizers, self._num_steps)
            self.optimizers.register_step_post_hook(self._end_step)
            self._logged_step = step - 1
            self._plan = getattr(self._optimizer, "plan", None)
            if self.files is not None:
                self.files.start(step, self._config_dict)
                start = f"resumes at step {step}" if step > 1 else "starts anew at step 1"
                progress.info("training %s of %d", start, self._num_steps)
                if self._plan is not None:  # The optimizer itself announces new ones.
                    self.files.save_plan(self._plan)
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
        """Log one step everywhere; arguments as in torchtitan. A collective of the world."""
        latest = run_log.optimizer_fields(self._optimizer)
        seconds = time.perf_counter() - self.time_last_log
        num_steps = max(step - self._logged_step, 1)
        clock = getattr(self.optimizers, "clock", None)
        # torchtitan has read the loss, which comes after the step: there is nothing to wait for.
        optimizer_seconds = 0.0 if clock is None else clock.take() / num_steps
        by_rank = self._seconds_by_rank(optimizer_seconds, latest["optimizer"])
        (slowest, data_seconds, observe_seconds), ranks = by_rank.max(dim=0)
        tokens_per_second = num_steps * self.tokens_per_step / seconds
        flops = self.num_flops_per_token * tokens_per_second
        mfu = None if self.has_quantization else 100 * flops / self.gpu_peak_flops / len(by_rank)
        # torchtitan adds up what the ranks have seen, each with its own number in the checkpoint of
        # one: another number of ranks would go on from another sum.
        num_tokens = step * self.tokens_per_step
        extra_metrics = {**(extra_metrics or {}), "n_tokens_seen": num_tokens}
        rates = (rate for name, rate in extra_metrics.items() if name.startswith("lr/"))
        record = {
            "step": step,
            "training_steps": self._num_steps,
            "loss": global_avg_loss,
            "max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "lr": next(rates, None),  # one of all groups
            "num_tokens": num_tokens,
            "tokens_per_second": tokens_per_second,
            "mfu_percent": mfu,
            "seconds_per_step": seconds / num_steps,
            "optimizer_seconds_per_step": optimizer_seconds,
            "slowest_optimizer_seconds_per_step": slowest.item(),
            "slowest_optimizer_rank": ranks[0].item(),
            "data_seconds_per_step": data_seconds.item() / num_steps,
            "slowest_data_rank": ranks[1].item(),
            "peak_memory_bytes": peak_memory(),
            "observe_seconds": observe_seconds.item() or None,
            **latest,
        }
        extra_metrics["optimizer/seconds_per_step"] = optimizer_seconds
        extra_metrics["data/seconds_per_step"] = record["data_seconds_per_step"]
        figures = self.callbacks.figures(step, record)
        record |= figures
        if self.files is not None:
            self.files.append(record)
            self.files.save_plan(self._plan)
        extra_metrics |= {**latest["optimizer"], **figures}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if self.files is not None:
            progress.info(progress_line(record, self._num_steps))
        self._step_ended, self._tokens_at_end = self.time_last_log, 0
        self._logged_step = step

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log a validation; arguments as in torchtitan.

        Validation time does not count towards step time.
        """
        seconds = self._step_ended - self.time_last_log
        super().log_validation(loss, step, extra_metrics)
        if self.files is not None:
            self.files.append_validation(step, loss)
            progress.info("validation loss after step %d: %.4f", step, loss)
        self.time_last_log -= seconds
        self.ntokens_since_last_log = self._tokens_at_end

    def close(self) -> None:
        """Close loggers, and release the folder."""
        super().close()
        if self.files is not None:
            self._lock.release()

    def _end_step(self, *_: object) -> None:
        self._step_ended, self._tokens_at_end = time.perf_counter(), self.ntokens_since_last_log
        plan = getattr(self._optimizer, "plan", None)
        if plan is not None and plan != self._plan:
            self.callbacks.run("on_plan", self._step, json.loads(plan.to_json()))
        self._plan = plan
        self.callbacks.run("after_step", self._step)

    def _seconds_by_rank(self, step: float, figures: Mapping[str, float]) -> torch.Tensor:
        """Seconds since the last log: (ranks, 3) float64, on the CPU.

        They are of an optimizer step, of all waits for data, and of the observation.

        Args:
            step: Seconds of this rank's optimizer step.
            figures: Figures of the optimizer.
        """
        observed = figures.get("optimizer/observe_seconds", 0.0)
        is_new, self._observe_seconds = observed != self._observe_seconds, observed
        own = [step, sum(self.data_loading_times), observed if is_new else 0.0]
        seconds = torch.tensor([own], dtype=torch.float64)
        if not dist.is_initialized():
            return seconds
        seconds = seconds.to(titan.device_type)
        by_rank = seconds.new_zeros(dist.get_world_size(), len(own))
        dist.all_gather_into_tensor(by_rank, seconds)
        return by_rank.cpu()

    @property
    def _optimizer(self) -> Any:
        """The one of our container; None in torchtitan's own, which holds several."""
        return getattr(self.optimizers, "optimizer", None)


def run_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``run.json`` holds of a config of this project or of torchtitan.

    The paths of the tokenizer are absolute: `amo export` may be called in another folder.
    """
    # The section says which model it is; all of its modules would take thousands of lines.
    kept = {name: value for name, value in config.items() if name != "model_spec"}
    tokenizer = kept["tokenizer"] = {**config["tokenizer"]}
    if "model" not in config:  # a config of torchtitan, with its own tokenizer
        kept["model"] = {key: config["model_spec"][key] for key in ("name", "flavor")}
        tokenizer["kind"] = "hf"
    for section, name in ((kept, "hf_assets_path"), (tokenizer, "path")):
        if section.get(name):
            section[name] = os.path.abspath(os.path.expanduser(section[name]))
    return kept


def peak_memory() -> int:
    """Greatest bytes of tensors on this rank's GPU; without a GPU, of the whole process."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else resident_peak()


def progress_line(record: Mapping[str, Any], num_steps: int) -> str:
    """Line about a step: loss, phase, Newton-Schulz steps, speed, time to go."""
    parts = [f"step: {record['step']:2}  loss: {record['loss']:8.5f}"]
    parts.append(f"grad_norm: {record['grad_norm']:7.4f}")
    if record["phase"]:
        counts = " ".join(map(str, record["num_steps_by_type"].values()))
        parts += [f"phase: {record['phase']:<11}", f"NS steps: {counts}"]
    if (waits := record["data_seconds_per_step"]) >= 0.01 * record["seconds_per_step"]:
        parts.append(f"waits for data: {waits * 1e3:,.0f} ms per step")
    parts.append(f"tokens/s on all ranks: {record['tokens_per_second']:,.0f}")
    seconds = round((num_steps - record["step"]) * record["seconds_per_step"])
    return "  ".join([*parts, f"to go: {timedelta(seconds=seconds)} of {num_steps} steps"])
