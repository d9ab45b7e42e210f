"""What is compared: one line for each variant."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from amo_dist import AMO, AMOConfig, Muon, MuonConfig
from amo_dist.optimizers.named import make_optimizer
from amo_dist.schedule.polar_express import composed
from benchmarks.plan_quality.settings import Settings

BASELINE = "muon-pe"
"""What every difference is taken against. Its spectra are recorded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """One optimizer of the study."""

    title: str
    optimizer: str
    """``AdamW``, ``Muon`` or ``AMO``."""
    schedule: str = ""
    """Of ``Muon``: ``kj``, or ``uniform``, which is what AMO runs while it observes."""
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of ``AMO``: fields of `AMOConfig`."""


PAPER = {"objective": "projected", "planner": "greedy", "budget_unit": "steps"}
MEASURED = {"objective": "measured", "planner": "exact", "budget_unit": "flops"}

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "muon-pe": Variant("Muon-PE, uniform", "Muon", "uniform"),
        "muon-kj": Variant("Muon-KJ", "Muon", "kj"),
        "adamw": Variant("AdamW", "AdamW"),
        "paper": Variant("the paper's AMO", "AMO", plan=PAPER),
        "measured-1.0": Variant("measured AMO, flops 1.0", "AMO", plan=MEASURED),
        "measured-0.9": Variant(
            "measured AMO, flops 0.9", "AMO", plan={**MEASURED, "budget_ratio": 0.9}
        ),
        "measured-0.8": Variant(
            "measured AMO, flops 0.8", "AMO", plan={**MEASURED, "budget_ratio": 0.8}
        ),
        "shape": Variant(
            "measured AMO by shape, flops 1.0", "AMO", plan={**MEASURED, "granularity": "shape"}
        ),
    }
)
"""By name, in the order in which they run."""


def amo_config(variant: Variant, settings: Settings) -> AMOConfig:
    """When to observe and to lock, of the study; how to plan, of the variant."""
    return AMOConfig(
        ns_dtype="float32",
        observe_until=settings.observe_until,
        observe_every=settings.observe_every,
        transition_steps=settings.transition_steps,
        **variant.plan,
    )


def learning_rate(variant: Variant, settings: Settings) -> float:
    """AdamW's own; one for all of the Muon family."""
    return settings.lr_adamw if variant.optimizer == "AdamW" else settings.lr_muon


def build(
    variant: Variant, groups: list[dict[str, Any]], settings: Settings
) -> torch.optim.Optimizer:
    """The optimizer of a variant, for what `amo_dist.param_groups` returned."""
    rate, decay = learning_rate(variant, settings), settings.weight_decay
    if variant.optimizer == "AdamW":
        return make_optimizer("AdamW", groups, rate, decay)
    config = amo_config(variant, settings)
    if variant.optimizer == "AMO":
        return AMO(groups, rate, decay, config=config)
    uniform = composed(config.base_ell, config.base_steps)
    schedule = uniform if variant.schedule == "uniform" else variant.schedule
    return Muon(groups, rate, decay, schedule=schedule, config=MuonConfig(ns_dtype="float32"))
