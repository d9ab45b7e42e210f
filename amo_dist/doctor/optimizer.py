"""Checks of the optimizer: every layout against one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amo_dist.config import AMOConfig
from amo_dist.doctor.examination import Check
from amo_dist.doctor.models import LAYOUTS, Run
from amo_dist.doctor.site import Fault, Site

CONFIG = AMOConfig(
    observe_until=4, observe_every=2, sample_size=2, transition_steps=3, bucket_bytes=8192
)
# Steps of a run: four observed, three of transition, three locked.
STEPS = 10
# Greatest difference of a parameter over the distance that it moved: in another batch a device may
# round otherwise, and results of Newton-Schulz in bfloat16 then differ by a few roundings of 2^-8.
TOLERANCE = 0.02


def checks(site: Site) -> list[Check]:
    """List the checks of this file in the order in which they run.

    For each layout a whole run to the lock is compared with one process: the first layout trains on
    each rank alone and is the twin of the others.
    """
    twin: dict[str, Any] = {}
    size, listed = site.world_size, []
    for layout, least in LAYOUTS.items():
        fits = size >= least and (least < 4 or size % 2 == 0)
        skip = "" if fits else f"not with {size} ranks"
        run = functools.partial(against_twin, site, layout, twin)
        listed.append(Check(f"layout {layout}", run, layout_figure, skip=skip))
    return listed


def against_twin(site: Site, layout: str, twin: dict[str, Any]) -> dict[str, Any]:
    """Train in a layout; ``one`` fills ``twin``, and the others compare with it.

    Returns:
        Planned ``steps``, and ``difference`` from the twin's parameters over the distance that
        they moved; 0 for the same bits.

    Raises:
        Fault: The plan is not that of one process.
    """
    run = Run(site, layout, CONFIG)
    start = run.whole()
    run.train(STEPS)
    params, plan = run.whole(), run.optimizer.plan
    assert plan is not None
    if layout == "one":
        twin.update(params=params, plan=plan)
    if plan != twin["plan"]:
        raise Fault(f"plan: found {plan.to_json()}, expected {twin['plan'].to_json()}")
    worst = 0.0
    for name, expected in twin["params"].items():
        if not torch.equal(params[name], expected):
            ratio = (params[name] - expected).norm() / (expected - start[name]).norm()
            worst = max(worst, ratio.nan_to_num(math.inf).item())
    return {"steps": plan.allocation, "difference": worst}


def layout_figure(values: Sequence[Mapping[str, Any]]) -> str:
    """Raise `Fault` if parameters differ from the twin's."""
    worst = max(value["difference"] for value in values)
    if worst > TOLERANCE:
        bound = f"at most {TOLERANCE} of the distance that they moved"
        raise Fault(f"parameters differ from one process's by {worst:.2g}, expected {bound}")
    bits = "the bits of one process" if worst == 0 else f"within {worst:.1e} of one process"
    return f"{bits}, locked at {list(values[0]['steps'])} on all ranks"
