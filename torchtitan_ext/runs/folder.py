"""A run's folder: whose it is, how far it got, and whether it may go on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_ext.config.files import fields
from torchtitan_ext.runs import files
from torchtitan_ext.runs.differences import differences
from torchtitan_ext.runs.run_files import (
    LOCK_FILE,
    RUN_FILE,
    START_FILE,
    complete_steps,
    read_config,
    save_config,
)

_NOT_COMPARED = (
    *("description", "dump_folder", "metrics", "geometry", "profiler", "comm", "checkpoint"),
    *("activation_checkpoint", "validator", "debug.print_config", "debug.save_config_file"),
    # Made from other fields, with functions whose text is never the same; and by PyTorch's version.
    *("model_spec", "parallelism.spmd_backend"),
    *(
        "dataloader.tokens",
        "dataloader.tokenize_timeout_seconds",
    ),  # the data itself is compared at a resume
)
"""Fields that may change between two starts of one run: they leave the training as it is."""


LOGS = "logs"
"""Folder of the output of torchrun and of ranks, by start and host, in the dump folder."""


class RunFolder:
    """The dump folder of a run, marked by a file that holds the config of its latest start.

    Args:
        path: ``dump_folder``; need not exist.
        checkpoints: ``checkpoint.folder``, within it.
    """

    def __init__(self, path: Path, checkpoints: str = "checkpoint") -> None:
        self.path = path
        self.checkpoints = path / checkpoints
        self._marker = path / RUN_FILE

    def delete(self) -> None:
        """Delete the folder.

        Raises:
            ValueError: If it holds files and is not a run's: a mistyped path loses nothing.
        """
        self._require_ours()
        shutil.rmtree(self.path, ignore_errors=True)

    def prepare(self, config: Mapping[str, Any]) -> int:
        """Make the folder ready for a run with ``config``, or for going on with it.

        Args:
            config: Sections of fields, JSON values.

        Returns:
            The step of the latest complete checkpoint; 0 where there is none.

        Raises:
            ValueError: If the folder is not a run's, or its run had another config.
        """
        self._require_ours()
        self.require_same(config)
        self.path.mkdir(parents=True, exist_ok=True)
        save_config(self.path, config)
        return self.latest_step()

    def require_same(self, config: Mapping[str, Any]) -> None:
        """Check that the folder's run, if it holds one, has this config; nothing is written.

        Raises:
            ValueError: If it had another one.
        """
        saved = read_config(self.path)
        if saved is None:
            return
        config = json.loads(json.dumps(config))  # a tuple comes back as a list
        if changed := changes(saved, config):
            raise ValueError(
                f"{self.path} holds a run with another config ({'; '.join(changed)}); "
                "use its values, another dump_folder, or --fresh to delete it"
            )

    def latest_step(self) -> int:
        """The step of the latest complete checkpoint; 0 where there is none."""
        return max(complete_steps(self.checkpoints), default=0)

    def _require_ours(self) -> None:
        if not self.path.exists() or self._marker.exists():
            return
        # A start that was killed before it wrote the marker leaves this.
        left = re.compile(
            rf"{LOCK_FILE}|{START_FILE}.*|{RUN_FILE}{files.SCRATCH}|{LOGS}|log_rank\d+\.txt"
        )
        if any(not left.fullmatch(path.name) for path in self.path.iterdir()):
            raise ValueError(
                f"dump_folder: {self.path} holds files, but none of a run of this command; "
                "expected a new or empty folder"
            )


def changes(saved: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Fields that differ between two configs and matter for training, as readable text."""
    lines = differences(dict(fields(saved)), dict(fields(config)))
    prefixes = tuple(f"{name}." for name in _NOT_COMPARED)
    return [line for line in lines if not f"{line.partition(': ')[0]}.".startswith(prefixes)]
