"""Training: ``torchrun ... -m torchtitan_ext.train --job.config_file x.toml``.

torchtitan's trainer with the project's models, optimizers and data, on CPU and accelerators alike.
Takes torchtitan's arguments.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext.environment import is_torchruns
from torchtitan_ext.signals import STOPPED, end_with_parent, stop_signal, write_exit_reason

logger = logging.getLogger(__name__)

USER_ERROR = 2
"""Exit status for a mistake in the config."""

FAILED = 1
"""Exit status for a failure that one line explains; torchrun restarts from the last checkpoint."""

UNSAVED = 143
"""Exit status of a run that was stopped and did not save."""

LAUNCHER = "AMO_LAUNCHER"
"""Variable of the environment with the process id of `amo train`, for its ranks."""


def main(args: Sequence[str] | None = None) -> int:
    """Train.

    Args:
        args: torchtitan's arguments; those of the process by default.

    Returns:
        The exit status: 0 at the end, 75 for a stop after which the same command goes on, 143 for
        one that saved nothing, 2 for a mistake of the user, and 1 for a checkpoint that cannot be
        written; each error is explained in one line. Under `amo train` a stop is 0 once a step was
        made, as torchrun would start the rank again; the command reads the outcome.
    """
    if is_first := os.environ.get("RANK", "0") == "0":
        print("loading PyTorch and torchtitan ...", flush=True)
    if is_torchruns():
        end_with_parent(int(os.environ.get(LAUNCHER, os.getppid())))
    with stop_signal() as stop:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler
        from torchtitan.tools.logging import init_logger

        from torchtitan_ext.config import settings
        from torchtitan_ext.plugin.checkpoints import CheckpointError

        init_logger()
        errors = get_error_handler()  # The launcher's last line is the error that is recorded.
        try:
            config = settings.parse(sys.argv[1:] if args is None else args)
        except (ValueError, RecursionError) as error:
            errors.record_exception(error)
            if is_first:  # every rank reads the same config
                print(f"error: {error}", file=sys.stderr, flush=True)
            return USER_ERROR
        try:
            outcome = train(config)
        except Exception as error:
            errors.record_exception(error)
            is_failed_save = isinstance(error, CheckpointError)
            if not (is_failed_save or is_users_mistake(error)):
                raise
            logger.info("", exc_info=error)
            rank = os.environ.get("RANK", "0")
            print(f"error (rank {rank}): {error}", file=sys.stderr, flush=True)
            return FAILED if is_failed_save else USER_ERROR
        write_exit_reason(outcome)
    if LAUNCHER in os.environ:
        if outcome != "done" and not stop.has_come and os.environ["LOCAL_RANK"] == "0":
            # A signal to another node stopped the run, and that node's launcher does not come to
            # the meeting of launchers: this one would wait there for five minutes.
            os.kill(int(os.environ[LAUNCHER]), signal.SIGTERM)
        return 0
    return {"done": 0, "stopped": STOPPED, "unsaved": UNSAVED}[outcome]


def train(config: Any) -> str:
    """Run torchtitan's trainer to its end, or write a seed checkpoint if the config asks for one.

    Args:
        config: A complete config, as of :func:`torchtitan_ext.config.settings.parse`.

    Returns:
        ``done``; or, for a run that a signal stopped before its end, ``stopped`` if the last step
        is saved, else ``unsaved``.

    Raises:
        ValueError: For a config that turns out not to work.
        CheckpointError: On every rank, where one cannot write its part of a checkpoint.
    """
    import torch
    from torchtitan.observability import structured_logger

    from torchtitan_ext.config import checks
    from torchtitan_ext.plugin.metrics import progress
    from torchtitan_ext.plugin.trainer import Trainer

    if not sys.stdout.isatty():  # a log file would hold the codes of colours
        config.metrics.disable_color_printing = True
    if config.debug.enable_structured_logging:
        structured_logger.init_structured_logger(source="training", output_dir=config.dump_folder)
    trainer, outcome = None, "done"
    try:
        if config.checkpoint.create_seed_checkpoint:
            checks.check_batch(config, int(os.environ["WORLD_SIZE"]))
            trainer = Trainer(config)
            trainer.checkpointer.save(curr_step=0, last_step=True)
        elif config.comm.mode != "local_tensor":  # whose models are never initialized
            trainer = Trainer(config)
            trainer.train()
            stop = trainer.stop_signal
            if stop.has_stopped:
                outcome = "stopped" if trainer.checkpointer.saves else "unsaved"
            if not stop.has_trained and outcome == "done" and os.environ["RANK"] == "0":
                progress.info(
                    "the run in %s is complete (its checkpoint is of step %d of %d): nothing was "
                    "trained; a larger training.steps goes on",
                    *(config.dump_folder, trainer.step, config.training.steps),
                )
    finally:
        if trainer is not None:
            trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return outcome


def is_users_mistake(error: Exception) -> bool:
    """Whether an error is a ``ValueError`` of the project itself, and so explains itself.

    One from the depths of another library keeps its traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).resolve().parent
    ours = (package, package.parent / "amo_dist")
    raised_in = Path(frames[-1].filename).resolve() if frames else Path()
    return isinstance(error, ValueError) and any(f in raised_in.parents for f in ours)


if __name__ == "__main__":
    sys.exit(main())
