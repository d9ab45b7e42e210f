"""torchtitan's trainer, which saves and leaves when it is told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.trainer as titan
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig

from amo_dist.distributed.absence import name_absent
from torchtitan_ext import environment
from torchtitan_ext.config import checks
from torchtitan_ext.data.loader import PackedLoader
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.plugin import console, machine, models, patches
from torchtitan_ext.plugin.activations import Activations
from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.geometry import Geometry
from torchtitan_ext.plugin.losses import Loss
from torchtitan_ext.plugin.metrics import MetricsProcessor, progress
from torchtitan_ext.plugin.optimizers import OptimizersContainer, check_last_update
from torchtitan_ext.plugin.validation import Validator

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether this process was told to stop; it then has a limited time to do so.

    Schedulers announce a preemption by SIGTERM, and torchrun passes it on. A thread notices the
    signal even where the main thread waits in a collective for a rank that is gone, and ends the
    process when the time is over.

    Args:
        grace: Seconds from the signal to the end of the process.
    """

    def __init__(self, grace: float) -> None:
        self._is_made = threading.Event()
        self._grace = grace

    def is_made(self) -> bool:
        """Whether a signal has come."""
        return self._is_made.is_set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT for the request while the context lasts; main thread only."""
        inbox, outbox = socket.socketpair()
        outbox.setblocking(False)
        previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        # The interpreter runs handlers between two of its instructions: never, in a collective.
        # It writes a signal's number here at once.
        previous_fd = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
        is_over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(inbox, is_over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            for number, handler in previous.items():
                signal.signal(number, handler)
            is_over.set()
            # A process that reads ahead has a copy, which a close here would leave open.
            outbox.shutdown(socket.SHUT_WR)
            outbox.close()
            thread.join()
            inbox.close()

    def _watch(self, inbox: socket.socket, is_over: threading.Event) -> None:
        while received := inbox.recv(1):
            if received[0] in _SIGNALS:
                self._is_made.set()
                if not is_over.wait(self._grace):
                    os._exit(128 + received[0])
                return


class StopVote:
    """Whether any rank was told to stop; one question at a time.

    Args:
        device: Of the collectives.
    """

    def __init__(self, device: torch.device) -> None:
        self._votes = torch.zeros(1, dtype=torch.int32, device=device)
        self._event: Any = None
        self._result = self._votes
        if device.type != "cpu":
            self._event = torch.get_device_module(device).Event()
            self._result = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def ask(self, is_made: bool) -> None:
        """Ask all ranks, on an accelerator without waiting for them or for the device."""
        self._votes.fill_(int(is_made))  # by a kernel: a copy to the device would wait for it
        dist.all_reduce(self._votes, dist.ReduceOp.MAX)
        if self._event is not None:
            self._result.copy_(self._votes, non_blocking=True)
            self._event.record()

    def answer(self) -> bool:
        """Whether any rank had a request when it was asked; waits for what came before that."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._result.item())


class Trainer(titan.Trainer):
    """torchtitan's trainer, with the project's parts.

    SIGTERM or SIGINT on any rank ends training at the next step, after a checkpoint of it, on all
    ranks alike.

    Raises:
        ValueError: For a config that cannot work.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        """All sections."""

        description: str = ""
        """A line about the run."""

        model: models.Model = field(default_factory=models.Model)
        geometry: Geometry = field(default_factory=Geometry)
        tokenizer: Tokenizer.Config = field(default_factory=Tokenizer.Config)
        dataloader: PackedLoader.Config = field(default_factory=PackedLoader.Config)
        optimizer: OptimizersContainer.Config = field(default_factory=OptimizersContainer.Config)
        metrics: MetricsProcessor.Config = field(default_factory=MetricsProcessor.Config)
        checkpoint: CheckpointManager.Config = field(default_factory=CheckpointManager.Config)
        activation_checkpoint: Activations.Config = field(default_factory=Activations.Config)
        # In a CUDA graph every gradient is there, if zero: none tells of a parameter out of use.
        training: TrainingConfig = field(
            default_factory=lambda: TrainingConfig(disable_cuda_graphs=True)
        )
        parallelism: ParallelismConfig = field(
            default_factory=lambda: ParallelismConfig(spmd_backend=machine.spmd_backend())
        )
        loss: Loss.Config = field(default_factory=Loss.Config)
        validator: Validator.Config = field(default_factory=Validator.Config)
        # Several lines a step and rank; ``metrics.jsonl`` holds what the project's tools read.
        debug: DebugConfig = field(
            default_factory=lambda: DebugConfig(enable_structured_logging=False)
        )

    config: Config
    checkpointer: CheckpointManager

    def __init__(self, config: Config) -> None:
        # Here, where both come by: our own entry point, and torchtitan's with its command line.
        environment.settle(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        patches.install()
        checks.settle(config)
        checks.validate(config)
        if config.metrics.console == "brief":
            console.brief(Path(config.dump_folder))
        super().__init__(config)
        self._request = StopRequest(grace=float(config.checkpoint.stop_seconds))
        self._vote = StopVote(self.device)
        self._stops = False
        self.has_trained = False
        """Whether this process made a step."""

    def train(self) -> None:
        """Train to the end, or until told to stop.

        Raises:
            AbsentRanksError: A collective failed as other ranks are gone or stopped; names them.
        """
        with self._request.listening():
            try:
                super().train()
                self.checkpointer.maybe_wait_for_saving()
                check_last_update(self.optimizers)  # which no further step tells of
            except RuntimeError as error:
                name_absent(error, f"step {self.step}")
                raise
            if self._stops and self.step < self.config.training.steps:
                saves = self.checkpointer.enable and not self.checkpointer.load_only
                what = "saved" if saves else "not saved: checkpoints are off"
                progress.info("stopped at step %d, which is %s", self.step, what)

    def train_step(self, data_iterator: Any) -> None:
        """One step, during which all ranks agree on whether it is the last one."""
        # Asked before, and heard after: a wait here would leave the device idle while data is read.
        self._vote.ask(self._request.is_made())
        super().train_step(data_iterator)
        self._stops = self._vote.answer()
        self.has_trained = True

    def should_continue_training(self) -> bool:
        """Whether there is a next step; where training stops before its end, after a save."""
        is_next: bool = super().should_continue_training()
        if self._stops and is_next:
            self.checkpointer.save_and_wait(self.step)
            return False
        return is_next
