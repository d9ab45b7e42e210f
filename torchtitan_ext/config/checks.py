"""What follows from the fields of a config, and whether they fit together and this machine."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.distributed import ParallelDims

from torchtitan_ext.config.values import overlay, unchecked
from torchtitan_ext.data import loader
from torchtitan_ext.plugin import losses, machine, models, optimizers
from torchtitan_ext.plugin.callbacks import Callbacks
from torchtitan_ext.plugin.checkpoints import STATES
from torchtitan_ext.runs.run_files import complete_steps, require_local
from torchtitan_ext.runs.stores import folder_of

_T = TypeVar("_T")

# Fields by what is expected of their numbers, those of a section together. Unset ones may stay so.
_RANGES: list[tuple[str, Callable[[Any], bool], tuple[str, ...]]] = [
    (
        "a number >= 1",
        lambda number: 1 <= number < math.inf,
        (
            "training: steps seq_len local_batch_size gc_freq",
            "parallelism: data_parallel_replicate_degree tensor_parallel_degree",
            "parallelism: context_parallel_degree pipeline_parallel_degree expert_parallel_degree",
            "parallelism: pipeline_parallel_layers_per_stage",
            "comm: init_timeout_seconds train_timeout_seconds",
            "profiler: profile_freq profiler_active",
            "profiler: memory_snapshot_freq memory_snapshot_max_entries",
            "metrics: log_freq",
            "validator: freq",
            "dataloader: prefetch_factor",
            "validator.dataloader: prefetch_factor",
            "lr_scheduler: total_steps",
            "loss: global_vocab_size",
        ),
    ),
    (
        "a number >= 0",
        lambda number: 0 <= number < math.inf,
        (
            "optimizer: lr weight_decay eps",
            "lr_scheduler: warmup_steps",
            "parallelism: pipeline_parallel_first_stage_less_layers",
            "parallelism: pipeline_parallel_last_stage_less_layers",
            "comm: trace_buf_size",
            "profiler: profiler_warmup profiler_repeat",
            "profiler: profiler_skip_first profiler_skip_first_wait",
            "dataloader: num_workers",
            "validator.dataloader: num_workers",
        ),
    ),
    (
        "a number >= 0 and < 2^63",
        lambda number: 0 <= number < 2**63,
        ("dataloader: seed", "validator.dataloader: seed", "debug: seed"),
    ),
    ("a number >= 0 and < 1", lambda number: 0 <= number < 1, ("optimizer: beta1 beta2",)),
    (
        "a number >= 0 and <= 1",
        lambda number: 0 <= number <= 1,
        ("lr_scheduler: decay_ratio min_lr_factor",),
    ),
    ("a number > 0", lambda number: number > 0, ("training: max_norm",)),
    ("a number >= -1", lambda number: number >= -1, ("checkpoint: load_step",)),
    (
        "-1, or a number >= 1",
        lambda number: number == -1 or number >= 1,
        (
            "validator: steps",
            "parallelism: data_parallel_shard_degree",
            "training: global_batch_size",
        ),
    ),
]


def complete(config: _T, world_size: int | None = None, problems: Sequence[str] = ()) -> _T:
    """Fill in what follows from other fields, and check that all fit together.

    Args:
        config: Config of :class:`torchtitan_ext.plugin.trainer.Trainer`; stays as it is.
        world_size: Number of ranks; None leaves out what depends on it.
        problems: Mistakes that are known, a line for each.

    Returns:
        The complete config; completing it again changes nothing.

    Raises:
        ValueError: Every mistake, a line for each, with its field, what was found and what was
            expected.
    """
    config, problems = validate_config(config, world_size, problems)
    if problems:
        raise ValueError("\n".join(problems))
    return config


def validate_config(
    config: Any, world_size: int | None = None, problems: Sequence[str] = ()
) -> tuple[Any, list[str]]:
    """Complete a config as far as possible.

    Args:
        config: Config of the trainer; stays as it is.
        world_size: Number of ranks; None leaves out what depends on it.
        problems: Mistakes that are known.

    Returns:
        The config, and a line for each mistake.
    """
    problems = [*problems]
    optimizer = collect(problems, lambda: optimizers.resolved(config.optimizer)) or config.optimizer
    spec = config.model_spec or collect(problems, lambda: models.spec(config.model))
    loader_fields = {"positions": config.model.attention != "sdpa"}
    derived: dict[str, Any] = {
        "dataloader": loader_fields,
        "validator": {"dataloader": loader_fields},
    }
    if spec is not None and config.loss.global_vocab_size is None:
        derived["loss"] = {"global_vocab_size": spec.model.vocab_size}
    with unchecked(config):  # The config may hold a mistake that is known.
        config = overlay(dataclasses.replace(config, optimizer=optimizer, model_spec=spec), derived)
    checks: list[Callable[[], object]] = [
        lambda: require_local("dump_folder", config.dump_folder),
        lambda: _check_ranges(config),
        lambda: losses.validate(config),
        lambda: optimizers.check_lock(config.optimizer, config.training.steps),
        lambda: loader.check(config.dataloader),
        lambda: _check_names(config),
        lambda: _check_profiler(config.profiler),
        *(functools.partial(Callbacks, [path]) for path in config.metrics.callbacks),
    ]
    if config.validator.enable:
        checks.append(lambda: loader.check(config.validator.dataloader))
    if world_size is not None:
        checks.append(lambda: check_batch(config, world_size))
    for check in checks:
        collect(problems, check)
    if not problems:
        collect(problems, config.__post_init__)  # torchtitan's check of sections against another
    return config, list(dict.fromkeys(problems))


def _check_ranges(config: Any, sections: str = "") -> None:
    """Check numbers, of the sections whose names start with a text."""
    problems = []
    for expected, is_right, lines in _RANGES:
        for section, _, names in (line.partition(": ") for line in lines):
            for name in names.split():
                value = getattr(operator.attrgetter(section)(config), name)
                is_asked = value is not None and section.startswith(sections)
                if is_asked and not is_right(value):  # nor is NaN
                    problems.append(f"{section}.{name}: found {value!r}, expected {expected}")
    if problems:
        raise ValueError("\n".join(problems))


def _check_names(config: Any) -> None:
    """Check names that torchtitan looks up on the ranks."""
    problems = [
        f"checkpoint.exclude_from_loading: found {name!r}, expected of {', '.join(STATES)}"
        for name in config.checkpoint.exclude_from_loading
        if name not in STATES
    ]
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree > 1 and not parallelism.pipeline_parallel_schedule_csv:
        name = parallelism.pipeline_parallel_schedule
        try:
            get_schedule_class(name)
        except ValueError as error:
            problems.append(f"parallelism.pipeline_parallel_schedule: found {name!r}: {error}")
    if config.compile.enable:
        backends = torch._dynamo.list_backends(None)
        if config.compile.backend not in backends:
            problems.append(
                f"compile.backend: found {config.compile.backend!r}, expected one of "
                f"{', '.join(backends)}"
            )
    if problems:
        raise ValueError("\n".join(problems))


def _check_profiler(section: Any) -> None:
    least = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and 0 < section.profile_freq < least:
        raise ValueError(
            f"profiler.profile_freq: found {section.profile_freq}, expected at least "
            f"profiler_warmup + profiler_active = {least}"
        )


def collect(problems: list[str], check: Callable[[], Any]) -> Any:
    """Run a check; append the lines of its ``ValueError``, and return None then."""
    try:
        return check()
    except ValueError as error:
        problems += str(error).splitlines()
    return None


def degrees(config: Any, world_size: int) -> ParallelDims:
    """Parallel degrees; that of sharding is what the others leave.

    Raises:
        ValueError: A degree is below 1, or their product is not the size of the world.
    """
    try:
        return ParallelDims.from_config(config.parallelism, world_size)
    except (AssertionError, ZeroDivisionError):
        _check_ranges(config, "parallelism")
        names = [f"{name}_parallel" for name in ("tensor", "context", "pipeline")]
        names += ["data_parallel_replicate", "data_parallel_shard"]
        degrees = {name: getattr(config.parallelism, f"{name}_degree") for name in names}
        texts = ", ".join(f"{name}_degree {degree}" for name, degree in degrees.items())
        raise ValueError(
            f"parallelism: found {texts}, expected a product of {world_size}, the number of ranks"
        ) from None


def check_batch(config: Any, world_size: int) -> None:
    """Check that the parallel degrees and the batch fit a number of ranks.

    Raises:
        ValueError: Naming the field.
    """
    dims, training = degrees(config, world_size), config.training
    num_data_ranks = dims.dp_replicate * dims.dp_shard
    size, least = training.global_batch_size, training.local_batch_size * num_data_ranks
    if size > 0 and least > 0 and size % least:
        raise ValueError(
            f"training.global_batch_size: found {size}, expected a multiple of {least}: "
            f"local_batch_size {training.local_batch_size} on {num_data_ranks} data-parallel "
            "ranks, or -1 for just that"
        )
    cuts = dims.tp if config.parallelism.enable_sequence_parallel else 1
    cuts *= 2 * dims.cp if dims.cp > 1 else 1
    if training.seq_len % cuts:
        raise ValueError(
            f"training.seq_len: found {training.seq_len}, expected a multiple of {cuts}, into "
            "which tensor and context parallelism cut a sequence"
        )
    if config.checkpoint.create_seed_checkpoint and (
        world_size != 1 or not config.checkpoint.enable
    ):
        raise ValueError(
            f"checkpoint.create_seed_checkpoint: found {world_size} ranks and checkpoint.enable = "
            f"{str(config.checkpoint.enable).lower()}, expected one rank and true"
        )


def missing_on_this_machine(config: Any) -> list[str]:
    """Check that the machine that starts a run has its tokenizer and data; a line for each lack.

    Args:
        config: A checked config.
    """
    problems: list[str] = []
    for check in (_check_start, _check_device):
        collect(problems, functools.partial(check, config))
    tokenizer = collect(problems, lambda: _tokenizer(config))
    loaders = [config.dataloader]
    if config.validator.enable:
        loaders.append(config.validator.dataloader)
    for section in loaders:
        if section.dataset == "packed" and tokenizer is not None:
            collect(problems, functools.partial(loader.open_corpora, section, tokenizer))
    return problems


def _check_start(config: Any) -> None:
    """Check that the checkpoint from which the run starts is here."""
    section = config.checkpoint
    if not section.enable:
        return
    steps = complete_steps(folder_of(config.dump_folder, section.folder))
    if section.load_step >= 0 and section.load_step not in steps:
        raise ValueError(
            f"checkpoint.load_step: found {section.load_step}, expected one of {steps} in "
            f"{config.dump_folder}"
        )
    path = section.initial_load_path
    if path and not steps and not folder_of(path).is_dir():
        raise ValueError(f"checkpoint.initial_load_path: found no folder {path}")


def _check_device(config: Any) -> None:
    """Check what this machine's device and PyTorch can train."""
    if machine.IS_OLD and config.parallelism.spmd_backend == "spmd_types":
        raise ValueError(
            "parallelism.spmd_backend: found 'spmd_types' with a PyTorch before 2.14, expected "
            "'partial_dtensor'"
        )
    if machine.cpu_is_needed() and config.model.attention != "sdpa":
        raise ValueError(
            f"model.attention: found {config.model.attention!r}, expected 'sdpa' on a CPU"
        )


def _tokenizer(config: Any) -> Any:
    """The tokenizer, which must be there and fit the model.

    Raises:
        ValueError: Otherwise.
    """
    section, model = config.tokenizer, config.model_spec.model
    path = section.path or config.hf_assets_path
    if section.kind == "hf" and not Path(path).expanduser().exists():
        field = "tokenizer.path" if section.path else "hf_assets_path"
        raise ValueError(f"{field}: found no tokenizer in {path} on this machine, expected one")
    tokenizer = section.build(tokenizer_path=config.hf_assets_path)
    if (num_tokens := tokenizer.get_vocab_size()) > model.vocab_size:
        raise ValueError(
            f"model.flavor: found {config.model.flavor!r} with a vocabulary of {model.vocab_size} "
            f"tokens, expected at least the {num_tokens} of the tokenizer ({section.kind!r})"
        )
    return tokenizer
