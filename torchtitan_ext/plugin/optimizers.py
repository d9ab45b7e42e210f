"""Optimizers by name, and the container through which torchtitan steps and saves them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
import torchtitan.components.optimizer as titan
from torch import nn
from torch.optim import AdamW, Optimizer
from torchtitan.config import Configurable
from torchtitan.models.common.attention import FusedQKVLinear

from amo_dist.config import AMOConfig, MuonConfig, require
from amo_dist.operators.groups import param_groups
from amo_dist.operators.patterns import check_expressions, clean_name
from amo_dist.operators.views import Fused
from amo_dist.optimizers.muon import Muon
from amo_dist.optimizers.named import MUON_SCHEDULES, OPTIMIZER_NAMES, make_optimizer
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.types import Schedule
from torchtitan_ext.config.schedule_file import load_schedule_file
from torchtitan_ext.plugin import hyperparameters
from torchtitan_ext.runs.step_clock import StepClock

SHARED = tuple(field.name for field in dataclasses.fields(MuonConfig))
"""Fields of ``[optimizer.muon]`` that every optimizer of the Muon family reads, AMO too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSection(MuonConfig):
    """``[optimizer.muon]``: fields of the whole Muon family, AMO too, and a fixed schedule.

    Attributes:
        update_norm: See :class:`amo_dist.config.MuonConfig`; unset, ``exact`` for AMO and ``as_is``
            for all others.
        schedule: Named table of Newton-Schulz coefficients that ``name = "Muon"`` applies to every
            matrix; unset, ``kj``.
        schedule_file: TOML file with a schedule for each operator type, in place of ``schedule``:
            from ``python -m benchmarks.amo_paper static-schedule``, or one of
            ``configs/schedules``.
        per_head: Make a matrix of each head's queries, keys and values.
    """

    update_norm: str = ""
    schedule: str = ""
    schedule_file: str = ""
    per_head: bool = False

    def __post_init__(self) -> None:
        MuonConfig(**self.shared())  # which checks them

    def shared(self) -> dict[str, Any]:
        """Fields shared by the family; unset ones omitted."""
        values = {field: getattr(self, field) for field in SHARED}
        if not self.update_norm:
            del values["update_norm"]
        return values


def validate(config: Any) -> None:
    """Check ``[optimizer]``.

    Raises:
        ValueError: For an unknown name, an expression that is none, a factor that is no rate's, or
            a schedule that the named optimizer does not read; a line for each.
    """
    problems = []
    if config.name not in OPTIMIZER_NAMES:
        known = ", ".join(map(repr, OPTIMIZER_NAMES))
        problems.append(f"optimizer.name: found {config.name!r}, expected one of {known}")
    problems += [
        f"optimizer.lr_multipliers: found {factor} for {expression!r}, expected a number >= 0"
        for expression, factor in config.lr_multipliers.items()
        if not 0 <= factor < math.inf
    ]
    sources = [name for name in ("schedule", "schedule_file") if getattr(config.muon, name)]
    if sources and (config.name != "Muon" or len(sources) > 1):
        problems.append(
            f"optimizer.muon.{sources[-1]}: found {getattr(config.muon, sources[-1])!r}, expected "
            "schedule or schedule_file, and either with optimizer.name = 'Muon' alone"
        )
    checks: list[Callable[[], object]] = [
        functools.partial(check_expressions, f"optimizer.{name}", [expression])
        for name, expression in _expressions(config)
    ]
    if config.name == "Muon" and len(sources) < 2:
        checks.append(lambda: fixed_schedule(config))
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def resolved(config: Any) -> Any:
    """Check ``[optimizer]``, and fill in what follows from its other fields.

    ``[optimizer.amo]`` gets what AMO shares with the family from ``[optimizer.muon]``, and both
    the ``on_config_change`` of ``[optimizer]``.

    Args:
        config: Section; stays as it is.

    Returns:
        The complete section; completing it again changes nothing.

    Raises:
        ValueError: An error of :func:`validate`, or a field that stands in the wrong section.
    """
    validate(config)
    rule = {"use_config": "replan"}.get(config.on_config_change, config.on_config_change)
    shared = {**config.muon.shared(), "on_config_change": rule}
    own_rule = config.muon.on_config_change
    field = "optimizer.muon.on_config_change"
    require(own_rule in ("error", rule), field, repr(own_rule), "it in [optimizer]")
    unset = AMOConfig()
    for name in SHARED:
        value = getattr(config.amo, name)
        is_right = value in (getattr(unset, name), shared.get(name, value))
        require(is_right, f"optimizer.amo.{name}", repr(value), "it in [optimizer.muon]")
    amo = dataclasses.replace(config.amo, **shared)
    norm = amo.update_norm if config.name == "AMO" else config.muon.update_norm
    muon = dataclasses.replace(config.muon, on_config_change=rule, update_norm=norm)
    return dataclasses.replace(config, muon=muon, amo=amo)


def check_lock(source: Any, steps: int) -> None:
    """Check that AMO's plan locks within a run.

    Args:
        source: Section, or container of any class that was built from one.
        steps: ``training.steps``.

    Raises:
        ValueError: If the run ends before that.
    """
    config = getattr(source, "config", source)
    if not isinstance(config, OptimizersContainer.Config):
        return
    amo = config.amo
    is_unlocked = config.name == "AMO" and 0 < steps < amo.lock_step
    require(
        not is_unlocked or config.allow_unlocked,
        *("training.steps", steps),
        f"at least observe_until + transition_steps = {amo.lock_step} of [optimizer.amo], where "
        "the plan locks (or optimizer.allow_unlocked = true)",
    )


def _expressions(config: Any) -> list[tuple[str, str]]:
    """Regular expressions of ``[optimizer]``, each with the name of its field."""
    no_decay = () if isinstance(config.no_decay, bool) else config.no_decay
    fields = {
        "no_decay": no_decay,
        "lr_multipliers": config.lr_multipliers,
        "patterns": config.patterns,
    }
    return [(name, expression) for name, values in fields.items() for expression in values]


def fixed_schedule(config: Any) -> Mapping[str, Schedule] | str:
    """Schedule by operator type, or name of the schedule of all, where it is fixed.

    Args:
        config: ``[optimizer]`` of the Muon family, but for AMO and ROOT.

    Raises:
        ValueError: The name is unknown, or the file cannot be read.
    """
    if config.muon.schedule_file:
        return load_schedule_file(config.muon.schedule_file)
    if config.muon.schedule:
        named_schedule(config.muon.schedule)  # refuses an unknown name
    return config.muon.schedule or MUON_SCHEDULES.get(config.name, MUON_SCHEDULES["Muon"])


def _make(groups: list[dict[str, Any]], config: Any) -> Optimizer:
    """Optimizer of a section over groups of :func:`amo_dist.param_groups`."""
    options = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    if config.name == "AdamW":
        kinds = {kind: config.implementation == kind for kind in ("fused", "foreach")}
        # An implementation is chosen at construction; groups that hold one would overrule it.
        made = make_optimizer(config.name, groups, **options).param_groups
        plain = [{key: group[key] for key in group if key not in kinds} for group in made]
        return AdamW(plain, **options, **kinds)
    own = config.amo if config.name == "AMO" else MuonConfig(**config.muon.shared())
    if config.name == "Muon":
        return Muon(groups, schedule=fixed_schedule(config), config=own, **options)
    return make_optimizer(config.name, groups, config=own, **options)


def require_used(model_parts: Sequence[nn.Module], config: Any) -> None:
    """Check that each expression matches a parameter of some rank; a collective of the world.

    Raises:
        ValueError: On every rank, for an expression that matches nothing.
    """
    expressions = _expressions(config)
    if not expressions:
        return
    names = {clean_name(name) for part in model_parts for name, _ in part.named_parameters()}
    used = [any(re.fullmatch(pattern, name) for name in names) for _, pattern in expressions]
    if dist.is_initialized():
        # A pipeline stage holds its own blocks alone.
        used_by_rank: list[list[bool]] = [[]] * dist.get_world_size()
        dist.all_gather_object(used_by_rank, used)
        used = [any(flags) for flags in zip(*used_by_rank, strict=True)]
    for (name, expression), is_used in zip(expressions, used, strict=True):
        text = f"{expression!r}, which matches no parameter"
        require(is_used, f"optimizer.{name}", text, "one that matches a whole name")


class OptimizersContainer(titan.OptimizersContainer):
    """One optimizer over all model parts of this process.

    One controller per process needs one optimizer, where torchtitan's container has one for each
    part.

    Args:
        config: ``[optimizer]``.
        model_parts: Parts of the model, on their final device with their final placements.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """``[optimizer]``.

        Attributes:
            name: One of :data:`amo_dist.optimizers.named.OPTIMIZER_NAMES`.
            lr: Peak learning rate.
            beta1: AdamW's decay of the first moment.
            beta2: AdamW's decay of the second moment.
            eps: Number that AdamW adds to the denominator.
            weight_decay: Decoupled weight decay, of all parameters.
            implementation: PyTorch's implementation of ``AdamW``; the Muon family picks its own for
                the device.
            allow_unlocked: Accept a run that ends before AMO's plan is locked (otherwise an error
                at start).
            on_config_change: What to do if the checkpoint's settings differ: stop, keep those of
                the checkpoint, or use those of the config. It holds for the rate, weight decay,
                betas and ``eps``, for the fields of ``[optimizer.muon]`` and ``[optimizer.amo]``,
                and for the sizes of the batch, which only the config can set. Changes of
                ``[lr_scheduler]`` and of ``training.steps`` always hold.
            no_decay: Regular expressions of parameters that do not decay: each matches a whole
                name, such as ``.*norm.*``; true for norms, biases and embeddings.
            lr_multipliers: Factors on the learning rate by expression; the first match wins.
            patterns: Operator types by expression of parameters whose names the project does not
                know, where ``adamw`` is no matrix; the first match wins. Read by the Muon family.
            muon: Fields of every ``name`` of the Muon family.
            amo: Fields of ``name = "AMO"``: when to observe, and how to plan. Those that AMO shares
                with the family stand in ``[optimizer.muon]``.
        """

        name: str = "AdamW"
        lr: float = 8e-4
        beta1: float = 0.9
        beta2: float = 0.95
        eps: float = 1e-8
        weight_decay: float = 0.1
        implementation: Literal["for-loop", "foreach", "fused"] = "fused"
        allow_unlocked: bool = False
        on_config_change: Literal["error", "keep_checkpoint", "use_config"] = "error"
        no_decay: bool | tuple[str, ...] = ()
        lr_multipliers: dict[str, float] = field(default_factory=dict)
        patterns: dict[str, str] = field(default_factory=dict)
        muon: MuonSection = field(default_factory=MuonSection)
        amo: AMOConfig = field(default_factory=AMOConfig)

        def build(self, *, model_parts: list[nn.Module]) -> OptimizersContainer:
            """The container.

            Raises:
                ValueError: For what :func:`resolved` finds.
            """
            config = resolved(self)  # a program or an override may have made it
            container: OptimizersContainer
            container = Configurable.Config.build(config, model_parts=model_parts)
            require_used(model_parts, config)
            hyperparameters.install(container, config)
            container.register_step_pre_hook(container.clock.start)
            container.register_step_post_hook(container.clock.stop)
            return container

    config: Config

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.config = config
        self.model_parts = model_parts
        self.optimizers = [_make(groups_of(model_parts, config), config)]
        named = (pair for part in model_parts for pair in part.named_parameters())
        names = {parameter: clean_name(name) for name, parameter in named}
        for group in self.optimizer.param_groups:  # torchtitan's flat state goes by these
            group["param_names"] = [names[parameter] for parameter in group["params"]]
        self.clock = StepClock(next(iter(names)).device)
        self._post_init([*names])

    @property
    def optimizer(self) -> Any:
        """The one optimizer."""
        return self.optimizers[0]


def groups_of_ranks(container: Any) -> set[dist.ProcessGroup]:
    """Process groups in which the container's optimizers of the Muon family communicate."""
    worlds = [getattr(optimizer, "world", None) for optimizer in container.optimizers]
    groups = {g for w in worlds if w is not None for g in (w.group, *w.groups_by_ranks.values())}
    return groups - {None}


def groups_of(model_parts: Sequence[nn.Module], config: Any) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer.

    Args:
        model_parts: Parts of the model on this rank.
        config: ``[optimizer]``.

    Raises:
        ValueError: See :func:`amo_dist.param_groups`.
    """
    # The config's own patterns come before those of the modules: the first match wins. A part may
    # lack what an expression names: another pipeline stage has it.
    is_stock = config.name == "AdamW"  # to which every matrix is as good as another
    return param_groups(
        model_parts,
        patterns={} if is_stock else {**config.patterns, **_fused(model_parts)},
        no_decay=config.no_decay,
        lr_multipliers=config.lr_multipliers,
        allow_unused=True,
        unknown="matrix" if is_stock else "error",
        per_head=config.muon.per_head and not is_stock,
    )


def _fused(model_parts: Sequence[nn.Module]) -> dict[str, Fused]:
    """A pattern for each projection that holds query, key and value by KV group.

    The module knows the sizes, which no shape tells.
    """
    patterns = {}
    for part in model_parts:
        for name, module in part.named_modules():
            if isinstance(module, FusedQKVLinear):
                num_groups = module.wqkv.weight.shape[0] // (module.r_dim * module.head_dim)
                size = num_groups * module.head_dim  # of key and of value
                sizes = (("attn_q", size * module.heads_per_kv), ("attn_k", size), ("attn_v", size))
                pattern = re.escape(clean_name(f"{name}.wqkv.weight"))
                patterns[pattern] = Fused(sizes, groups=num_groups)
    return patterns


def check_last_update(container: Any) -> None:
    """Look for updates that were left out in the last step; a collective over the world.

    Args:
        container: Container of any class; optimizers outside of the Muon family leave nothing out.

    Raises:
        NonFiniteUpdateError: On every rank.
    """
    for optimizer in container.optimizers:
        if isinstance(optimizer, Muon):
            optimizer.check_last_update()
