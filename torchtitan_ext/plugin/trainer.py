"""torchtitan's trainer with the project's sections."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torchtitan.trainer as titan
from torchtitan.config import Configurable
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig

from torchtitan_ext import environment
from torchtitan_ext.config import checks
from torchtitan_ext.data.loader import PackedLoader
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.plugin import console, machine, models, patches, stop
from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.metrics import MetricsProcessor
from torchtitan_ext.plugin.optimizers import OptimizersContainer, groups_of_ranks
from torchtitan_ext.plugin.sections import Activations, Loss, Validator
from torchtitan_ext.signals import StopSignal


class Trainer(titan.Trainer):
    """torchtitan's trainer, with the project's parts.

    SIGTERM or SIGINT on any rank ends training at the next step, after a checkpoint of it, on all
    ranks alike.

    Raises:
        ValueError: For a config that cannot work.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        """All sections.

        Attributes:
            description: A line about the run.
        """

        description: str = ""
        model: models.Model = field(default_factory=models.Model)
        tokenizer: Tokenizer.Config = field(default_factory=Tokenizer.Config)
        dataloader: PackedLoader.Config = field(default_factory=PackedLoader.Config)
        optimizer: OptimizersContainer.Config = field(default_factory=OptimizersContainer.Config)
        metrics: MetricsProcessor.Config = field(default_factory=MetricsProcessor.Config)
        checkpoint: CheckpointManager.Config = field(default_factory=CheckpointManager.Config)
        activation_checkpoint: Activations.Config = field(default_factory=Activations.Config)
        # A CUDA graph makes every gradient, if only of zeros: unused parameters would be updated.
        training: TrainingConfig = field(
            default_factory=lambda: TrainingConfig(disable_cuda_graphs=True)
        )
        parallelism: ParallelismConfig = field(
            default_factory=lambda: ParallelismConfig(spmd_backend=machine.spmd_backend())
        )
        loss: Loss.Config = field(default_factory=Loss.Config)
        validator: Validator.Config = field(default_factory=Validator.Config)
        # Several lines per step and rank; ``metrics.jsonl`` holds what the project's tools read.
        debug: DebugConfig = field(
            default_factory=lambda: DebugConfig(enable_structured_logging=False)
        )

        def build(self, **options: Any) -> Trainer:
            """Complete and check the config, and build the trainer.

            Raises:
                ValueError: All fields that do not fit together, a line for each.
            """
            trainer: Trainer = Configurable.Config.build(checks.complete(self), **options)
            return trainer

    config: Config
    checkpointer: CheckpointManager
    stop_signal: StopSignal

    def __init__(self, config: Config) -> None:
        # Both entry points come here: the project's own, and torchtitan's.
        environment.set_variables(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        patches.install()
        stop.install()
        if config.metrics.console == "brief":
            console.brief(Path(config.dump_folder))
        super().__init__(config)
        self._follows_timeout = True

    def train_step(self, data_iterator: Any) -> None:
        """Make one step; the second one begins with the timeout of a trained step everywhere.

        After the first step torchtitan lowers the timeout of its own groups alone.
        """
        if self.stop_signal.has_trained and self._follows_timeout:
            self._follows_timeout = False
            timeout = timedelta(seconds=self.config.comm.train_timeout_seconds)
            for group in groups_of_ranks(self.optimizers):
                dist.set_timeout(timeout, group)  # type: ignore[attr-defined]
        super().train_step(data_iterator)
