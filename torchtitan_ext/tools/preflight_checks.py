"""Everything that is wrong with a config, at once, before any rank starts."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amo_dist.schedule.schedule_file import read_toml
from torchtitan_ext import learning_rate
from torchtitan_ext.data import loader
from torchtitan_ext.plugin import settings


def load(args: Sequence[str]) -> tuple[Any, list[str]]:
    """Read a config and collect the mistakes in its fields.

    A field with a mistake is left at its default, so that the rest can be looked at too.

    Args:
        args: torchtitan's arguments.

    Returns:
        The config, and one line for each mistake.

    Raises:
        ValueError: If there is no config file, or it is not TOML.
        SystemExit: For a mistake among the arguments, already explained on standard error.
    """
    path = settings.argument(args, "job.config_file")
    if path is None:
        raise ValueError("--job.config_file: found none, expected a TOML file")
    values, problems = _split(read_toml("job.config_file", path))

    class FromValues(settings.Manager):
        def _maybe_load_toml(self, args: list[str]) -> dict[str, Any]:
            return values

    with _quiet():  # torchtitan warns of a folder without a tokenizer; a check tells that too
        config = FromValues().parse_args([*args, *settings.missing_defaults(args, values)])
    return config, problems


def check(config: Any, world_size: int) -> list[str]:
    """Mistakes in how the fields of a config fit together, and with a world.

    Args:
        config: From :func:`load`; its learning rate is resolved.
        world_size: Number of ranks.

    Returns:
        One line for each mistake.
    """
    checks: list[Callable[[], None]] = [
        lambda: learning_rate.resolve(config.optimizer),
        lambda: settings.validate(config),
        lambda: _check_model(config),
        # Where the degrees do not fit, each of these two tells so: once is enough.
        lambda: _check_batch(config, num_data_ranks(degrees(config, world_size))),
        lambda: loader.check_streams(config.data, num_data_ranks(degrees(config, world_size))),
        lambda: _check_schedule(config),
        lambda: _check_checkpoint(config),
    ]
    problems: list[str] = []
    for one in checks:
        try:
            one()
        except ValueError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def notes(config: Any) -> list[str]:
    """What is no mistake, but will be missed on the machine where the run starts."""
    found = []
    field, path = "data.tokenizer_path", config.data.tokenizer_path
    if not path:
        field, path = "model.hf_assets_path", config.model.hf_assets_path
    if config.data.tokenizer != "byte" and not Path(path).expanduser().exists():
        found.append(f"{field}: no tokenizer in {path} on this machine")
    load_path = config.checkpoint.initial_load_path
    if load_path and not Path(load_path).exists():
        found.append(f"checkpoint.initial_load_path: no checkpoint in {load_path} on this machine")
    return found


def degrees(config: Any, world_size: int) -> dict[str, int]:
    """Parallel degrees by name; the degree of sharding is what the others leave.

    Raises:
        ValueError: If the degrees do not multiply to the size of the world.
    """
    parallelism = config.parallelism
    found = {
        "replicate": parallelism.data_parallel_replicate_degree,
        "shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
        "pp": parallelism.pipeline_parallel_degree,
    }
    rest = 1
    for name, degree in found.items():
        if name != "shard":
            rest *= degree
    if found["shard"] == -1:
        found["shard"] = max(world_size // rest, 1)
    if rest * found["shard"] != world_size:
        product = " * ".join(f"{name} {degree}" for name, degree in found.items())
        raise ValueError(f"parallelism: found {product}, expected a product of {world_size} ranks")
    return found


def num_data_ranks(found: Mapping[str, int]) -> int:
    """Ranks that read data of their own, for degrees by name."""
    return found["replicate"] * found["shard"]


# ------------------------------------------------------------------ fields


def _split(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields that are right by themselves, and a line for each other one."""
    cls = _config_class()
    problems: list[str] = []
    kept: dict[str, Any] = {}
    for path, value in _leaves(values):
        try:
            settings.check_values(cls, _nest(path, value))
        except ValueError as error:
            problems.append(str(error))
        else:
            _put(kept, path, value)
    _keep_valid_sections(kept, problems)
    return kept, problems


def _config_class() -> type:
    from torchtitan.config import JobConfig

    from torchtitan_ext import job_config

    merged: type = settings.Manager._merge_configs(JobConfig, job_config.JobConfig)
    return merged


def _leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Any]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return dict(value)


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def _keep_valid_sections(values: dict[str, Any], problems: list[str]) -> None:
    """Drop fields that a section which checks itself refuses, one after the other."""
    from torchtitan_ext.job_config import MuonSection, Optimizer

    optimizer = values.get("optimizer", {})
    for name, cls in (("amo", type(Optimizer().amo)), ("muon", MuonSection)):
        section = optimizer.get(name, {})
        while True:
            try:
                cls(**section)
            except ValueError as error:
                field = str(error).split(":", 1)[0]
                problems.append(f"[optimizer.{name}] {error}")
                if field not in section:  # at odds with a default: nothing to drop
                    section.clear()
                    break
                del section[field]
            else:
                break


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


# ------------------------------------------------------------------ how fields fit together


def _check_model(config: Any) -> None:
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_ext.plugin.registration import MODELS

    model = config.model
    if model.name not in MODELS:
        raise ValueError(f"model.name: found {model.name!r}, expected one of {', '.join(MODELS)}")
    known = get_train_spec(model.name).model_args
    if model.flavor not in known:
        raise ValueError(
            f"model.flavor: found {model.flavor!r}, expected one of {', '.join(known)}"
        )


def _check_batch(config: Any, num_data_ranks: int) -> None:
    training = config.training
    one = training.local_batch_size * num_data_ranks
    if training.global_batch_size >= 0 and training.global_batch_size % one:
        raise ValueError(
            f"training.global_batch_size: found {training.global_batch_size}, expected a multiple "
            f"of {one}: local_batch_size {training.local_batch_size} on {num_data_ranks} "
            "data-parallel ranks"
        )


def _check_schedule(config: Any) -> None:
    schedule, steps = config.lr_scheduler, config.training.steps
    total = schedule.total_steps or steps
    if schedule.warmup_steps > total:
        raise ValueError(
            f"lr_scheduler.warmup_steps: found {schedule.warmup_steps}, expected at most the "
            f"{total} steps of the schedule"
        )


def _check_checkpoint(config: Any) -> None:
    checkpoint = config.checkpoint
    if checkpoint.enable and checkpoint.keep_latest_k == 1:
        raise ValueError(
            "checkpoint.keep_latest_k: found 1, expected 0 (all) or at least 2: the last one may "
            "be incomplete"
        )
