"""Learning rate, weight decay, betas and eps of a resumed run: the checkpoint's, or the config's.

A checkpoint brings its own, and PyTorch takes them without a word: a weight decay that was changed
for the rest of a run would be logged, and not be used. How the rate develops (``[lr_scheduler]``,
``training.steps``) is no part of a checkpoint and always that of the config. The sizes of a batch
are compared, too: without ``training.global_batch_size`` other ranks would make another batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

logger = logging.getLogger(__name__)

# Keys of a parameter group, and the fields of the config that their values come from.
_FIELDS = {
    "initial_lr": "optimizer.lr",  # `lr` itself is where the schedule stands
    "weight_decay": "optimizer.weight_decay",
    "betas": "optimizer.beta1, optimizer.beta2",
    "eps": "optimizer.eps",
}


def sequences_per_step(training: Any, dims: Any) -> int:
    """Sequences of an optimizer step, over all ranks and accumulated batches.

    Args:
        training: torchtitan's ``[training]``; without a global batch size there is no accumulation.
        dims: torchtitan's ``ParallelDims``; ranks of one context share their sequences.
    """
    batch: int = training.global_batch_size
    return batch if batch > 0 else training.local_batch_size * dims.dp_replicate * dims.dp_shard


class BatchSizes:
    """Sequences of a step and of a rank's forward pass, which a resume compares.

    Args:
        trainer: torchtitan's trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, int]:
        """Sizes by field of ``[training]``."""
        training = self._trainer.config.training
        return {
            "global_batch_size": sequences_per_step(training, self._trainer.parallel_dims),
            "local_batch_size": training.local_batch_size,
        }

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        """Compare the sizes of a checkpoint.

        Raises:
            ValueError: They differ, and ``optimizer.on_config_change`` does not take the config's.
        """
        changes = [
            f"training.{field}: found {saved[field]} in the checkpoint, expected {size} as in this "
            "run"
            for field, size in self.state_dict().items()
            if saved[field] != size
        ]
        if not changes:
            return
        if getattr(self._trainer.config.optimizer, "on_config_change", "error") != "use_config":
            raise ValueError(
                f"{'; '.join(changes)}; set the checkpoint's, or "
                "optimizer.on_config_change = 'use_config' goes on with this run's"
            )
        logger.warning("the batch of this run is in force: %s", "; ".join(changes))


def install(container: Any, config: Any) -> None:
    """Apply the rule of ``[optimizer]`` when the container's optimizers load a state.

    Args:
        container: Container of any class.
        config: ``[optimizer]``, complete.
    """
    hook = functools.partial(_resolve, config.on_config_change)
    for optimizer in container.optimizers:
        optimizer.register_load_state_dict_pre_hook(hook)


def follow(schedulers: Iterable[Any]) -> None:
    """Set the peak rates of schedules to those that their optimizers loaded or kept.

    torchtitan's would leave the checkpoint's rate in force for one step, and then take the config's
    peak whatever the rule says.

    Args:
        schedulers: PyTorch's ``LambdaLR``, after a load.
    """
    for scheduler in schedulers:
        groups = scheduler.optimizer.param_groups
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        for group, factor in zip(groups, scheduler.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in groups]


def _resolve(
    rule: str, optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, Any] | None:
    """A load hook: the state with the values that go on, or ``None`` to take it as it is."""
    saved_groups, groups = state_dict.get("param_groups"), optimizer.param_groups
    if not isinstance(saved_groups, list) or len(saved_groups) != len(groups):
        return None  # which the optimizer itself refuses
    pairs = [*zip(saved_groups, groups, strict=True)]
    changes = dict.fromkeys(change for pair in pairs for change in _differing(*pair))
    if not changes:
        return None
    differences = "; ".join(changes)
    if rule == "error":
        raise ValueError(
            f"{differences}; optimizer.on_config_change = 'keep_checkpoint' or 'use_config' goes "
            "on with one of them"
        )
    kept = "checkpoint" if rule == "keep_checkpoint" else "config"
    logger.warning("the values of the %s are in force: %s", kept, differences)
    if kept == "checkpoint":
        return None
    taken = [
        {**saved, **{key: group[key] for key in _FIELDS if key in saved and key in group}}
        for saved, group in pairs
    ]
    return {**state_dict, "param_groups": taken}


def _differing(saved: Mapping[str, Any], group: Mapping[str, Any]) -> Iterator[str]:
    for key, field in _FIELDS.items():
        if key not in saved or key not in group:
            continue
        old, new = (tuple(v) if isinstance(v, list) else v for v in (saved[key], group[key]))
        if old != new:
            yield f"{field}: found {old!r} in the checkpoint, expected {new!r} as in this config"
