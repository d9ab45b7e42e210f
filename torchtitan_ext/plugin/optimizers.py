"""Optimizers by name, and the container through which torchtitan steps and saves them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
import torchtitan.components.optimizer as titan
from torch import nn
from torch.optim import Optimizer
from torchtitan.config import Configurable
from torchtitan.models.common.attention import FusedQKVLinear

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.operators.groups import param_groups
from amo_dist.operators.patterns import clean_name
from amo_dist.operators.views import Fused
from amo_dist.optimizers.amo import AMO
from amo_dist.optimizers.muon import Muon
from amo_dist.optimizers.named import MUON_SCHEDULES, OPTIMIZER_NAMES, make_optimizer
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.types import Schedule
from torchtitan_ext.config.names import SHARED, STOCK
from torchtitan_ext.config.schedule_file import load_schedule_file
from torchtitan_ext.plugin import hyperparameters
from torchtitan_ext.plugin.step_clock import StepClock


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSection(MuonConfig):
    """``[optimizer.muon]``: fields of the whole Muon family, AMO too, and a fixed schedule."""

    update_norm: str = ""
    """See :class:`amo_dist.config.MuonConfig`; unset, ``exact`` for AMO and ``as_is`` for all
    others."""

    schedule: str = ""
    """Named table of Newton-Schulz coefficients that ``name = "Muon"`` applies to every matrix;
    unset, ``kj``."""

    schedule_file: str = ""
    """
    TOML file with a schedule for each operator type, in place of ``schedule``: from
    ``python -m benchmarks.amo_paper static-schedule``, or one of ``configs/schedules``.
    """

    per_head: bool = False
    """Make a matrix of each head's queries, keys and values."""

    def __post_init__(self) -> None:
        MuonConfig(**self.shared())  # which checks them

    def shared(self) -> dict[str, Any]:
        """Fields shared by the family; unset ones omitted."""
        values = {field: getattr(self, field) for field in SHARED}
        if not self.update_norm:
            del values["update_norm"]
        return values


DEFAULT_LR = 8e-4
"""``optimizer.lr`` where nobody sets it, as torchtitan had it."""

_UNSET = AMOConfig()


def _common(config: Any) -> dict[str, Any]:
    return {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }


def _make(groups: list[dict[str, Any]], config: Any) -> Optimizer:
    """An optimizer of the Muon family over groups."""
    options = _common(config)
    if config.name == "AMO":
        return AMO(groups, config=config.amo, **options)
    muon = MuonConfig(**config.muon.shared())
    if config.name != "Muon":
        return make_optimizer(config.name, groups, config=muon, **options)
    schedule: str | Mapping[str, Schedule] = config.muon.schedule or MUON_SCHEDULES["Muon"]
    if config.muon.schedule_file:
        schedule = load_schedule_file(config.muon.schedule_file)
    return Muon(groups, schedule=schedule, config=muon, **options)


def _stock(config: Any, model_parts: Sequence[nn.Module]) -> titan.OptimizersContainer.Config:
    """The section of torchtitan for one optimizer over all parameters."""
    groups = []
    undecayed = "|".join(f"(?:{expression})" for expression in config.no_decay)
    common = _common(config)
    for expression, factor in [*lr_multipliers(config).items(), (".*", 1.0)]:
        options = {**common, "lr": config.lr * factor}
        if undecayed:  # torchtitan searches, and takes the first group that matches
            pattern = f"^(?=(?:{expression})$)(?:{undecayed})$"
            groups.append((pattern, {**options, "weight_decay": 0.0}))
        groups.append((f"^(?:{expression})$", options))
    # torchtitan refuses a group without parameters.
    names = [name for part in model_parts for name, _ in part.named_parameters()]
    matches = {next(pattern for pattern, _ in groups if re.search(pattern, name)) for name in names}
    return titan.OptimizersContainer.Config(
        param_groups=[
            titan.ParamGroupConfig(
                pattern=pattern, optimizer_name=config.name, optimizer_kwargs=options
            )
            for pattern, options in groups
            if pattern in matches
        ],
        implementation=config.implementation,
    )


def lr_multipliers(config: Any) -> dict[str, float]:
    """Factors on the learning rate by expression.

    Raises:
        ValueError: For an entry that is none.
    """
    factors = {}
    for expression, text in _pairs(config, "lr_multipliers", "FACTOR"):
        try:
            factor = float(text)
        except ValueError:
            factor = math.nan
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(
                f"optimizer.lr_multipliers: found {text!r} for {expression!r}, expected a "
                "number > 0"
            )
        factors[expression] = factor
    return factors


def patterns(config: Any) -> dict[str, str]:
    """Operator types by expression, for :func:`amo_dist.param_groups`.

    Raises:
        ValueError: For an entry that is none.
    """
    return dict(_pairs(config, "patterns", "TYPE"))


def _pairs(config: Any, field: str, right: str) -> Iterator[tuple[str, str]]:
    for entry in getattr(config, field):
        expression, equals, value = entry.rpartition("=")  # an expression may hold the sign
        if not (equals and expression and value):
            raise ValueError(f"optimizer.{field}: found {entry!r}, expected 'EXPRESSION={right}'")
        _check_expression(field, expression, entry)
        yield expression, value


def _check_expression(field: str, expression: str, entry: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(
            f"optimizer.{field}: found {entry!r}, expected a regular expression ({error})"
        ) from None


def require_used(model_parts: Sequence[nn.Module], config: Any) -> None:
    """Check that each expression matches a parameter of some rank; a collective of the world.

    Raises:
        ValueError: On every rank, for an expression that matches nothing.
    """
    expressions = [
        *(("no_decay", expression) for expression in config.no_decay),
        *(("lr_multipliers", expression) for expression in lr_multipliers(config)),
        *(("patterns", expression) for expression in patterns(config)),
    ]
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
        if not is_used:
            raise ValueError(
                f"optimizer.{name}: found {expression!r}, which matches no parameter, expected "
                "one that matches a whole name"
            )


OPTIMIZERS = (
    *("AMO", "Muon"),
    *(name for name in OPTIMIZER_NAMES if name not in ("AMO", "Muon", "AdamW")),
    *reversed(STOCK),
)
"""Values of ``optimizer.name``; those of :data:`STOCK` are torchtitan's own."""


def validate(config: Any) -> None:
    """Check ``[optimizer]``.

    Raises:
        ValueError: For an unknown name, or a schedule that the named optimizer does not read.
    """
    if config.name not in OPTIMIZERS:
        known = ", ".join(map(repr, OPTIMIZERS))
        raise ValueError(f"optimizer.name: found {config.name!r}, expected one of {known}")
    lr_multipliers(config)
    patterns(config)
    for expression in config.no_decay:
        _check_expression("no_decay", expression, expression)
    if config.name not in STOCK:
        _check_schedule(config)


def resolved(config: Any) -> Any:
    """Check ``[optimizer]``, and fill in what follows from its other fields.

    ``[optimizer.amo]`` gets what AMO shares with the family from ``[optimizer.muon]``. Of
    ``[optimizer] on_config_change`` and that of ``[optimizer.muon]``, the one that is not
    ``error`` holds for both.

    Args:
        config: Section; stays as it is.

    Returns:
        The complete section; completing it again changes nothing.

    Raises:
        ValueError: An error of :func:`validate`, or a shared field in ``[optimizer.amo]``.
    """
    validate(config)
    action, rule = config.on_config_change, config.muon.on_config_change
    if action == "error":
        action = "use_config" if rule == "replan" else rule
    elif rule == "error":
        rule = "replan" if action == "use_config" else action
    shared = {**config.muon.shared(), "on_config_change": rule}
    for name in SHARED:
        value = getattr(config.amo, name)
        if value not in (getattr(_UNSET, name), shared.get(name, value)):
            raise ValueError(
                f"[optimizer.amo] {name}: found {value!r}, expected it in [optimizer.muon]"
            )
    amo = dataclasses.replace(config.amo, **shared)
    norm = amo.update_norm if config.name == "AMO" else config.muon.update_norm
    return dataclasses.replace(
        config,
        lr=DEFAULT_LR if config.lr is None else config.lr,
        on_config_change=action,
        muon=dataclasses.replace(config.muon, on_config_change=rule, update_norm=norm),
        amo=amo,
    )


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
    if config.name != "AMO" or config.allow_unlocked or amo.observe_only or steps >= amo.lock_step:
        return
    raise ValueError(
        f"training.steps: found {steps}, expected at least observe_until + transition_steps = "
        f"{amo.lock_step} of [optimizer.amo], where the plan locks "
        "(or optimizer.allow_unlocked = true)"
    )


def _check_schedule(config: Any) -> None:
    """At most one source of the schedule, and that one readable."""
    named = {field: getattr(config.muon, field) for field in ("schedule", "schedule_file")}
    sources = {field: source for field, source in named.items() if source}
    if config.name != "Muon" and sources:
        field, source = next(iter(sources.items()))
        raise ValueError(
            f"[optimizer.muon] {field}: found {source!r}, but optimizer.name = "
            f"{config.name!r} has schedules of its own; expected optimizer.name = 'Muon' with it"
        )
    if len(sources) > 1:
        raise ValueError(
            f"[optimizer.muon]: found both schedule = {sources['schedule']!r} and schedule_file = "
            f"{sources['schedule_file']!r}, expected one"
        )
    if config.muon.schedule_file:
        load_schedule_file(config.muon.schedule_file)
    elif config.muon.schedule:
        named_schedule(config.muon.schedule)


class OptimizersContainer(titan.OptimizersContainer):
    """One optimizer over all model parts of this process.

    One controller per process needs one optimizer, where torchtitan's container has one for each
    part.

    Args:
        config: ``[optimizer]`` with a ``name`` of the Muon family.
        model_parts: Parts of the model, on their final device with their final placements.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """``[optimizer]``."""

        name: str = "AdamW"
        """One of :data:`OPTIMIZERS`."""

        lr: float | None = None
        """Peak learning rate; 8e-4 where none is set."""

        beta1: float = 0.9
        """AdamW's decay of the first moment."""

        beta2: float = 0.95
        """AdamW's decay of the second moment."""

        eps: float = 1e-8
        """Number that AdamW adds to the denominator."""

        weight_decay: float = 0.1
        """Decoupled weight decay, of all parameters."""

        implementation: Literal["for-loop", "foreach", "fused"] = "fused"
        """PyTorch's implementation of ``AdamW``; the Muon family picks its own for the device."""

        allow_unlocked: bool = False
        """Accept a run that ends before AMO's plan is locked (otherwise an error at start)."""

        on_config_change: Literal["error", "keep_checkpoint", "use_config"] = "error"
        """
        Action at a resume whose checkpoint has other values than the config: stop, keep those of
        the checkpoint, or use those of the config. It holds for ``lr``, ``weight_decay``,
        ``beta1``, ``beta2`` and ``eps``, and for the fields of ``[optimizer.muon]`` and
        ``[optimizer.amo]`` unless ``[optimizer.muon] on_config_change`` is set (its word for
        ``use_config`` is ``replan``), which likewise holds for all if this is not set. Changes of
        ``[lr_scheduler]`` and of ``training.steps`` always hold.
        """

        no_decay: tuple[str, ...] = ()
        """Regular expressions of parameters that do not decay: each matches a whole name, such as
        ``.*norm.*``."""

        lr_multipliers: tuple[str, ...] = ()
        """Factors on the learning rate, as ``EXPRESSION=FACTOR``; the first match wins."""

        patterns: tuple[str, ...] = ()
        """Operator types of parameters whose names the project does not know, as
        ``EXPRESSION=TYPE``, where ``adamw`` is no matrix; the first match wins. Read by the Muon
        family."""

        muon: MuonSection = field(default_factory=MuonSection)
        """Fields of every ``name`` of the Muon family."""

        amo: AMOConfig = field(default_factory=AMOConfig)
        """Fields of ``name = "AMO"``: when to observe, and how to plan. Those that AMO shares with
        the family stand in ``[optimizer.muon]``."""

        def build(self, *, model_parts: list[nn.Module]) -> titan.OptimizersContainer:
            """The container of the named optimizer, which is torchtitan's for its own names.

            Raises:
                ValueError: For what :func:`validate` finds.
            """
            config = resolved(self)  # a program or an override may have made it
            require_used(model_parts, config)
            if config.name in STOCK:
                container = _stock(config, model_parts).build(model_parts=model_parts)
            else:
                container = OptimizersContainer(config, model_parts=model_parts)
            hyperparameters.install(container, config)
            parameter = next(p for part in model_parts for p in part.parameters())
            container.clock = StepClock(parameter.device)
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
        self._post_init([*names])

    @property
    def optimizer(self) -> Any:
        """The one optimizer."""
        return self.optimizers[0]


def groups_of(model_parts: Sequence[nn.Module], config: Any) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer of the Muon family.

    Args:
        model_parts: Parts of the model on this rank.
        config: ``[optimizer]``.

    Raises:
        ValueError: See :func:`amo_dist.param_groups`.
    """
    # The config's own patterns come before those of the modules: the first match wins. A part may
    # lack what an expression names: another pipeline stage has it.
    targets: dict[str, Any] = {**patterns(config), **_fused(model_parts)}
    return param_groups(
        model_parts,
        patterns=targets,
        no_decay=config.no_decay,
        lr_multipliers=lr_multipliers(config),
        allow_unused=True,
        per_head=config.muon.per_head,
    )


def _fused(model_parts: Sequence[nn.Module]) -> dict[str, Fused]:
    """A pattern for each projection that holds several matrices in turn.

    Those are query, key and value by KV group, or query and its gate by head (qwen3_5). The module
    knows the sizes, which no shape tells.
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
            heads, size = getattr(module, "n_heads", 0), getattr(module, "head_dim", 0)
            query = getattr(module, "wq", None)
            if query is not None and query.weight.shape[0] == 2 * heads * size:
                pattern, rows = re.escape(clean_name(f"{name}.wq.weight")), heads * size
                patterns[pattern] = Fused((("attn_q", rows), ("attn_gate", rows)), groups=heads)
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
