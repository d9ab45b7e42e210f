"""AMO, Muon, its family and float8 in any config of torchtitan, by one option.

    torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b \
        --override.imports 'torchtitan_ext.override.amo={"lr": 1e-3}'

An override for an optimizer replaces the sections of optimizer, checkpoints and metrics, and turns
CUDA graphs off. Its arguments are fields of ``[optimizer]``, ``[optimizer.muon]`` and
``[optimizer.amo]`` by their bare names. ``lr``, ``weight_decay``, ``beta1``, ``beta2`` and ``eps``
default to those of the config's AdamW; groups of another rate or without decay are named anew.
``amo_dist`` decides by name and shape which parameter is a matrix. ``callbacks`` of ``[metrics]``,
and ``damaged`` and ``stop_seconds`` of ``[checkpoint]``, are arguments, too.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
from typing import Any

import torchtitan.components.checkpointer.base as checkpointer
import torchtitan.components.checkpointer.dcp as dcp
import torchtitan.components.metrics as metrics
import torchtitan.components.optimizer as optimizer
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import Configurable, ParallelismConfig, TrainingConfig, derive, override
from torchtitan.models.common.linear import Linear

from amo_dist.config import require
from amo_dist.optimizers.named import OPTIMIZER_NAMES
from torchtitan_ext.config.values import fail_unknown, overlay
from torchtitan_ext.plugin import machine, patches, stop
from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.metrics import MetricsProcessor
from torchtitan_ext.plugin.optimizers import OptimizersContainer

logger = logging.getLogger(__name__)

# torchtitan imports this module while it builds its trainer, before it builds a section.
patches.install()
stop.install()


OWN_FIELDS: dict[str, type] = {
    "callbacks": MetricsProcessor.Config,
    **dict.fromkeys(("damaged", "stop_seconds"), CheckpointManager.Config),
}
"""Section of each argument that torchtitan's command line does not know."""


class StockSection(Configurable.Config, metaclass=abc.ABCMeta):
    """Sections that one override replaces or checks: an override names one class of target."""


for _section in (
    optimizer.OptimizersContainer.Config,
    OptimizersContainer.Config,
    checkpointer.BaseCheckpointManager.Config,
    metrics.MetricsProcessor.Config,
    ParallelismConfig,
    TrainingConfig,
):
    StockSection.register(_section)


@override(target=StockSection, description="Adaptive Muon Orthogonalization")
def amo(section: Any, **fields: Any) -> Any:
    """AMO; ``fields`` as above, such as ``{"lr": 1e-3, "observe_until": 400}``."""
    return _replacement(section, "amo", ("AMO",), fields)


@override(target=StockSection, description="Muon with one schedule for all matrices")
def muon(section: Any, **fields: Any) -> Any:
    """Muon, or by ``name`` another of its family: ``{"lr": 1e-3, "name": "Muon-PE"}``."""
    names = tuple(name for name in OPTIMIZER_NAMES if name not in ("AMO", "AdamW"))
    return _replacement(section, "muon", names, fields)


@override(
    target=Linear.Config,
    # All linear modules of blocks but those named `gate`, which are the routers of experts.
    fqns=["layers.*[!e]", "*.layers.*[!e]", "layers.*_gate", "*.layers.*_gate"],
    description="products in float8 (torchao)",
)
def float8(section: Linear.Config, **fields: Any) -> Configurable.Config:
    """Float8 products in the blocks of a model; ``fields`` of torchtitan's Float8LinearConverter.

    Weights, optimizer and routers of experts stay as they are. It needs torchao, an accelerator
    that has float8, and ``[compile]`` to be faster.

    Raises:
        ValueError: For ``filter_fqns``: an override sees no names of modules.
    """
    expected = "none: routers are left out, and torchtitan's own converter filters others"
    text = f"filter_fqns = {fields.get('filter_fqns')!r} for float8"
    require("filter_fqns" not in fields, "override.imports", text, expected)
    converter: Any = Float8LinearConverter.Config(**{"model_compile_enabled": True} | fields)
    converted: Configurable.Config = converter.build().convert(section)
    return converted


def _replacement(
    section: Any, override: str, names: tuple[str, ...], fields: dict[str, Any]
) -> Any:
    """The project's section for one of torchtitan.

    Args:
        section: Section of the config.
        override: Name of the override, for errors.
        names: Optimizers that the override may make; the first is the default.
        fields: Arguments of the override.

    Raises:
        ValueError: For a field that does not exist, a value of a wrong type, or a section that
            cannot be replaced.
    """
    own = {name: fields.pop(name) for name in OWN_FIELDS & fields.keys()}
    try:
        if isinstance(section, TrainingConfig):
            return _without_graphs(section)
        if isinstance(section, ParallelismConfig):
            machine.check_backend(section.spmd_backend)  # torchtitan has built its meshes by now
            return section
        if isinstance(section, metrics.MetricsProcessor.Config):
            return _derived(section, metrics.MetricsProcessor.Config, MetricsProcessor.Config, own)
        if isinstance(section, checkpointer.BaseCheckpointManager.Config):
            return _derived(section, dcp.CheckpointManager.Config, CheckpointManager.Config, own)
        if isinstance(section, OptimizersContainer.Config):
            raise ValueError(
                f"found torchtitan_ext.override.{override} with an [optimizer] of this project, "
                f"expected optimizer.name = {names[0]!r} and its fields there"
            )
        return _optimizer(section, names, fields)
    except ValueError as error:
        raise ValueError(f"override.imports: {error}") from None


def _without_graphs(section: TrainingConfig) -> TrainingConfig:
    if section.disable_cuda_graphs:
        return section
    logger.warning(
        "CUDA graphs are off (training.disable_cuda_graphs = true): no optimizer here was tried "
        "under them yet"
    )
    return dataclasses.replace(section, disable_cuda_graphs=True)


def _derived(section: Any, titan_class: type, amo_class: type, own: dict[str, Any]) -> Any:
    """The project's section with the fields of torchtitan's; a subclass of the project's stays.

    Args:
        section: Section of the config.
        titan_class: Class of torchtitan's section.
        amo_class: Class of the project's section.
        own: Values of :data:`OWN_FIELDS`, of this section and of others.

    Raises:
        ValueError: The section is of another class.
    """
    values = {name: value for name, value in own.items() if OWN_FIELDS[name] is amo_class}
    if isinstance(section, amo_class):
        return overlay(section, values)
    if type(section) is titan_class:
        return overlay(derive(section, amo_class), values)
    raise ValueError(
        f"found a section of {type(section)}, expected one of {titan_class} or a subclass of "
        f"{amo_class}"
    )


def _optimizer(
    section: Any, names: tuple[str, ...], fields: dict[str, Any]
) -> OptimizersContainer.Config:
    config = OptimizersContainer.Config(name=names[0])
    part_by_field = {field.name: "" for field in dataclasses.fields(config)}
    del part_by_field["muon"], part_by_field["amo"]
    for part in ("muon", "amo") if names == ("AMO",) else ("muon",):
        for field in dataclasses.fields(getattr(config, part)):
            part_by_field.setdefault(field.name, part)
    values = _values_of_adamw(section, fields)
    for name, value in fields.items():
        if name not in part_by_field:
            fail_unknown(name, [*part_by_field])
        part = part_by_field[name]
        (values.setdefault(part, {}) if part else values)[name] = value
    replacement: OptimizersContainer.Config = overlay(config, values)
    if replacement.name not in names:
        raise ValueError(f"name: found {replacement.name!r}, expected one of {', '.join(names)}")
    return replacement


def _values_of_adamw(section: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Fields of the config's AdamW that the override leaves open.

    Raises:
        ValueError: For several groups of parameters, where the override gives none itself.
    """
    values: dict[str, Any] = {"implementation": section.implementation}
    groups = section.param_groups
    if len(groups) > 1 and not {"no_decay", "lr_multipliers"} & own.keys():
        names = ", ".join(repr(group.pattern) for group in groups)
        raise ValueError(
            f"found {len(groups)} param_groups in the config ({names}), expected one, or no_decay "
            "and lr_multipliers in the override, which take their place"
        )
    if groups:
        values |= _fields_of(groups[-1])
    return {name: value for name, value in values.items() if name not in own}


def _fields_of(group: Any) -> dict[str, float]:
    """Fields of ``[optimizer]`` that a group of torchtitan sets."""
    options = dict(group.optimizer_kwargs)
    if "betas" in options:
        options["beta1"], options["beta2"] = options.pop("betas")
    shared = ("lr", "weight_decay", "beta1", "beta2", "eps")
    return {field: options[field] for field in shared if field in options}
