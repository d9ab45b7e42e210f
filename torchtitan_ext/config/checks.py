"""What follows from the fields of a config, and whether they fit together and this machine."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.distributed import ParallelDims

from amo_dist.config import require
from torchtitan_ext.config.values import overlay, unchecked
from torchtitan_ext.data import loader
from torchtitan_ext.plugin import machine, models, optimizers, sections
from torchtitan_ext.plugin.callbacks import Callbacks
from torchtitan_ext.plugin.checkpoints import STATES
from torchtitan_ext.runs.run_files import complete_steps, require_local
from torchtitan_ext.runs.stores import join, store_of

_T = TypeVar("_T")

_POSITIVE = (
    "training.steps training.seq_len training.local_batch_size training.gc_freq metrics.log_freq "
    "parallelism.data_parallel_replicate_degree parallelism.tensor_parallel_degree validator.freq "
    "parallelism.context_parallel_degree parallelism.pipeline_parallel_degree "
    "parallelism.expert_parallel_degree parallelism.pipeline_parallel_layers_per_stage "
    "profiler.profile_freq "
    "comm.init_timeout_seconds comm.train_timeout_seconds profiler.profiler_active "
    "profiler.memory_snapshot_freq profiler.memory_snapshot_max_entries dataloader.prefetch_factor "
    "validator.dataloader.prefetch_factor lr_scheduler.total_steps loss.global_vocab_size"
)
_NOT_NEGATIVE = (
    "optimizer.lr optimizer.weight_decay optimizer.eps lr_scheduler.warmup_steps "
    "parallelism.pipeline_parallel_first_stage_less_layers "
    "parallelism.pipeline_parallel_last_stage_less_layers comm.trace_buf_size "
    "profiler.profiler_warmup profiler.profiler_repeat profiler.profiler_skip_first "
    "profiler.profiler_skip_first_wait dataloader.num_workers validator.dataloader.num_workers"
)
_SEEDS = "dataloader.seed validator.dataloader.seed debug.seed"
_RATIOS = "lr_scheduler.decay_ratio lr_scheduler.min_lr_factor"
_COUNTS = "validator.steps parallelism.data_parallel_shard_degree training.global_batch_size"
_RANGES: list[tuple[str, str, Callable[[Any], bool]]] = [
    (_POSITIVE, "a number >= 1", lambda number: 1 <= number < math.inf),
    (_NOT_NEGATIVE, "a number >= 0", lambda number: 0 <= number < math.inf),
    (_SEEDS, "a number >= 0 and < 2^63", lambda number: 0 <= number < 2**63),
    ("optimizer.beta1 optimizer.beta2", "a number >= 0 and < 1", lambda number: 0 <= number < 1),
    (_RATIOS, "a number >= 0 and <= 1", lambda number: 0 <= number <= 1),
    ("training.max_norm", "a number > 0", lambda number: number > 0),
    ("checkpoint.load_step", "a number >= -1", lambda number: number >= -1),
    (_COUNTS, "-1, or a number >= 1", lambda number: number == -1 or number >= 1),
]
"""Fields, and what is expected of their numbers; unset ones may stay so."""


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
        lambda: _check_numbers(config),
        lambda: sections.check_chunks(config),
        lambda: optimizers.check_lock(config.optimizer, config.training.steps),
        lambda: loader.check(config.dataloader),
        *_check_names(config),
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


def _check_numbers(config: Any, section: str = "") -> None:
    """Check all numbers, or those of a section."""
    problems = []
    for names, expected, is_right in _RANGES:
        for field in names.split():
            value = operator.attrgetter(field)(config)
            is_asked = value is not None and field.startswith(section)
            if is_asked and not is_right(value):  # nor is NaN
                problems.append(f"{field}: found {value!r}, expected {expected}")
    if problems:
        raise ValueError("\n".join(problems))


def _check_names(config: Any) -> Iterator[Callable[[], object]]:
    """Checks of names and numbers that torchtitan looks up on the ranks."""
    for name in config.checkpoint.exclude_from_loading:
        field, expected = "checkpoint.exclude_from_loading", f"of {', '.join(STATES)}"
        yield functools.partial(require, name in STATES, field, name, expected)
    if config.parallelism.pipeline_parallel_degree > 1:
        yield lambda: _check_schedule(config.parallelism)
    if config.compile.enable:
        backend, backends = config.compile.backend, torch._dynamo.list_backends(None)
        yield lambda: require(backend in backends, "compile.backend", backend, f"of {backends}")
    if config.profiler.enable_profiling:
        every = config.profiler.profile_freq
        least = config.profiler.profiler_warmup + config.profiler.profiler_active
        expected = f"at least profiler_warmup + profiler_active = {least}"
        yield lambda: require(not 0 < every < least, "profiler.profile_freq", every, expected)
    for path in config.metrics.callbacks:
        yield functools.partial(Callbacks, [path])


def _check_schedule(section: Any) -> None:
    try:
        if not section.pipeline_parallel_schedule_csv:
            get_schedule_class(section.pipeline_parallel_schedule)
    except ValueError as error:
        raise ValueError(f"parallelism.pipeline_parallel_schedule: {error}") from None


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
        _check_numbers(config, "parallelism")
        section = dataclasses.asdict(config.parallelism)
        section.pop("expert_parallel_degree")  # of ranks that are counted by the others
        text = ", ".join(f"{k} {section[k]}" for k in section if k.endswith("degree"))
        require(False, "parallelism", text, f"a product of {world_size}, the number of ranks")
        raise


def check_batch(config: Any, world_size: int) -> None:
    """Check that the parallel degrees and the batch fit a number of ranks.

    Raises:
        ValueError: Naming the field.
    """
    dims, training = degrees(config, world_size), config.training
    num_data_ranks = dims.dp_replicate * dims.dp_shard
    size, least = training.global_batch_size, training.local_batch_size * num_data_ranks
    require(
        size < 1 or least < 1 or size % least == 0,
        *("training.global_batch_size", size),
        f"a multiple of {least}: local_batch_size {training.local_batch_size} on {num_data_ranks} "
        "data-parallel ranks, or -1 for just that",
    )
    cuts = dims.tp if config.parallelism.enable_sequence_parallel else 1
    cuts *= 2 * dims.cp if dims.cp > 1 else 1
    expected = f"a multiple of {cuts}, into which tensor and context parallelism cut a sequence"
    require(training.seq_len % cuts == 0, "training.seq_len", training.seq_len, expected)
    is_on, is_seed = config.checkpoint.enable, config.checkpoint.create_seed_checkpoint
    text = f"{world_size} ranks and checkpoint.enable = {str(is_on).lower()}"
    is_right = not is_seed or (is_on and world_size == 1)
    require(is_right, "checkpoint.create_seed_checkpoint", text, "one rank and true")


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
    steps, step = complete_steps(join(config.dump_folder, section.folder)), section.load_step
    expected = f"one of {steps} in {config.dump_folder}"
    require(step < 0 or step in steps, "checkpoint.load_step", step, expected)
    path = section.initial_load_path
    is_right = not path or bool(steps) or store_of(path).isdir("")
    require(is_right, "checkpoint.initial_load_path", path, "a folder")


def _check_device(config: Any) -> None:
    """Check what this machine's device and PyTorch can train."""
    machine.check_backend(config.parallelism.spmd_backend)
    attention = config.model.attention
    is_right = attention == "sdpa" or not machine.cpu_is_needed()
    require(is_right, "model.attention", attention, "sdpa on a CPU")


def _tokenizer(config: Any) -> Any:
    """The tokenizer, which must be there and fit the model.

    Raises:
        ValueError: Otherwise.
    """
    section, model = config.tokenizer, config.model_spec.model
    path = section.path or config.hf_assets_path
    is_here = section.kind != "hf" or Path(path).expanduser().exists()
    field = "tokenizer.path" if section.path else "hf_assets_path"
    require(is_here, field, f"no tokenizer in {path} on this machine", "one")
    tokenizer = section.build(tokenizer_path=config.hf_assets_path)
    text = f"{config.model.flavor!r} with a vocabulary of {model.vocab_size} tokens"
    num_tokens = tokenizer.get_vocab_size()
    expected = f"at least the {num_tokens} of the tokenizer ({section.kind!r})"
    require(num_tokens <= model.vocab_size, "model.flavor", text, expected)
    return tokenizer
