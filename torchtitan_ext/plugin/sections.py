"""What one optimizer takes from the sections of another, so that a name can be changed alone.

A config names an optimizer and holds its section; ``--optimizer.name Muon`` on a config for AMO
shall train with the same momentum and precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from amo_dist.config import MuonConfig

SHARED = tuple(field.name for field in dataclasses.fields(MuonConfig))
"""Fields that ``[optimizer.muon]`` and ``[optimizer.amo]`` have in common."""

STOCK = ("Adam", "AdamW")
"""Optimizers of torchtitan, which orthogonalize nothing."""


def given_here(given: Collection[str] | None) -> set[str] | None:
    """Of fields that somebody gave those of ``[optimizer]``, by names such as ``amo.ns_dtype``."""
    if given is None:
        return None
    head = "optimizer."
    return {name.removeprefix(head) for name in given if name.startswith(head)}


def settle(config: Any, given: Collection[str] | None = None) -> None:
    """Have the section of the named optimizer say what other fields say about it; idempotent.

    An optimizer of the Muon family takes from ``[optimizer.amo]`` what both sections have and
    ``[optimizer.muon]`` leaves open. Of ``[optimizer] on_config_change`` and that of the section,
    the one that is not ``error`` holds for both.

    Args:
        config: The ``[optimizer]`` section.
        given: See :func:`given_here`; ``None`` for a config that a program made: then what does not
            have its default value.
    """
    if config.name in STOCK:
        return
    if given is None:
        given = _changed_fields(config)
    if config.name != "AMO":
        inherited = {f for f in SHARED if f"muon.{f}" not in given and f"amo.{f}" in given}
        config.muon = _with(config.muon, config.amo, inherited)
        # Both sections agree from here on: a value that was given and is the default stays.
        config.amo = _with(config.amo, config.muon, set(SHARED))
    sections = ("amo",) if config.name == "AMO" else ("muon", "amo")
    own = getattr(config, sections[0])
    if config.on_config_change == "error":
        rule = own.on_config_change
        config.on_config_change = "use_config" if rule == "replan" else rule
    elif own.on_config_change == "error":
        rule = "replan" if config.on_config_change == "use_config" else config.on_config_change
        for name in sections:
            section = dataclasses.replace(getattr(config, name), on_config_change=rule)
            setattr(config, name, section)


def _with(section: Any, other: Any, fields: Collection[str]) -> Any:
    return dataclasses.replace(section, **{field: getattr(other, field) for field in fields})


def _changed_fields(config: Any) -> set[str]:
    found: set[str] = set()
    for name in ("muon", "amo"):
        section, unset = getattr(config, name), type(getattr(config, name))()
        found |= {
            f"{name}.{field}"
            for field in SHARED
            if getattr(section, field) != getattr(unset, field)
        }
    return found
