"""AMO, Muon, NorMuon and float8 in any config of torchtitan, by one option and no other change.

    torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b \
        --override.imports 'torchtitan_ext.override.amo={"lr": 1e-3}'

An override for an optimizer takes the place of three sections: that, checkpoints and metrics. Its
arguments are fields of ``[optimizer]``, ``[optimizer.muon]`` and ``[optimizer.amo]`` by their bare
names. What they leave open of ``lr``, ``weight_decay``, ``beta1``, ``beta2`` and ``eps`` is that of
the config's AdamW. ``amo_dist`` decides by name and shape which parameter is a matrix; groups of
the config itself are not read.
"""

from __future__ import annotations

import abc
import dataclasses
import difflib
from typing import Any

import torchtitan.components.checkpointer as checkpointer
import torchtitan.components.metrics as metrics
import torchtitan.components.optimizer as optimizer
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import Configurable, derive, override
from torchtitan.models.common.linear import Linear

from torchtitan_ext.plugin.checkpoints import CheckpointManager
from torchtitan_ext.plugin.metrics import MetricsProcessor
from torchtitan_ext.plugin.optimizers import OptimizersContainer


class Replaced(Configurable.Config, metaclass=abc.ABCMeta):
    """The sections that one override takes the place of: an override names one class of target."""


for _section in (
    optimizer.OptimizersContainer.Config,
    checkpointer.CheckpointManager.Config,
    metrics.MetricsProcessor.Config,
):
    Replaced.register(_section)


@override(target=Replaced, description="Adaptive Muon Orthogonalization")
def amo(section: Any, **fields: Any) -> Configurable.Config:
    """AMO; ``fields`` as above, such as ``{"lr": 1e-3, "observe_until": 400}``."""
    return _replace(section, "AMO", fields)


@override(target=Replaced, description="Muon with one schedule for all matrices")
def muon(section: Any, **fields: Any) -> Configurable.Config:
    """Muon, or by ``name`` another of its family: ``{"lr": 1e-3, "name": "Muon-PE"}``."""
    return _replace(section, "Muon", fields)


@override(target=Replaced, description="NorMuon")
def normuon(section: Any, **fields: Any) -> Configurable.Config:
    """NorMuon."""
    return _replace(section, "NorMuon", fields)


@override(
    target=Linear.Config,
    fqns=["layers.*", "*.layers.*"],
    description="products in float8 (torchao)",
)
def float8(section: Linear.Config, **fields: Any) -> Configurable.Config:
    """Float8 products in the blocks of a model; ``fields`` of torchtitan's Float8LinearConverter.

    Weights and optimizer stay as they are. It needs torchao, an accelerator that has float8, and
    ``[compile]`` to be faster.
    """
    converter: Any = Float8LinearConverter.Config(**{"model_compile_enabled": True} | fields)
    found: Configurable.Config = converter.build().convert(section)
    return found


def _replace(section: Any, name: str, fields: dict[str, Any]) -> Configurable.Config:
    """Ours in the place of a section of torchtitan; one that is ours already stays.

    Raises:
        ValueError: For a field that there is not, or one that the config does not tell.
    """
    if isinstance(section, metrics.MetricsProcessor.Config):
        return derive(section, MetricsProcessor.Config)
    if isinstance(section, checkpointer.CheckpointManager.Config):
        return derive(section, CheckpointManager.Config)
    config = OptimizersContainer.Config(name=name)
    inner = ("muon", "amo") if name == "AMO" else ("muon",)
    own = {field.name for field in dataclasses.fields(config)} - {"muon", "amo", "scaling_law"}
    where = dict.fromkeys(own, "")
    for part in inner:
        for field in dataclasses.fields(getattr(config, part)):
            where.setdefault(field.name, part)
    if unknown := sorted(fields.keys() - where.keys()):
        near = difflib.get_close_matches(unknown[0], where, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(own))}"
        raise ValueError(f"override.imports: found the field {unknown[0]!r}; {hint}")
    given = {key: value for key, value in fields.items() if not where[key]}
    for part in inner:
        values = {key: value for key, value in fields.items() if where[key] == part}
        given[part] = dataclasses.replace(getattr(config, part), **values)
    return dataclasses.replace(config, **_of_adamw(section, given) | given)


def _of_adamw(section: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What all groups of a config agree on of the fields that are not given.

    Raises:
        ValueError: For a field on which they do not.
    """
    found: dict[str, set[float]] = {}
    for group in section.param_groups:
        values = {**group.optimizer_kwargs}
        if "betas" in values:
            values["beta1"], values["beta2"] = values.pop("betas")
        for field in ("lr", "weight_decay", "beta1", "beta2", "eps"):
            if field in values and field not in given:
                found.setdefault(field, set()).add(values[field])
    for field, values_of_groups in found.items():
        if len(values_of_groups) > 1:
            told = " and ".join(map(repr, sorted(values_of_groups)))
            raise ValueError(
                f"override.imports: found {field} = {told} in the config's param_groups, expected "
                f"one; give it: {{{field!r}: ...}}"
            )
    return {field: values_of_groups.pop() for field, values_of_groups in found.items()}
