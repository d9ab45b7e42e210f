"""Checks of the optimizer: every layout against one process, skipped steps, no waits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amo_dist.config import AMOConfig
from amo_dist.distributed.layout import local_tensor
from amo_dist.doctor.examination import Check
from amo_dist.doctor.models import LAYOUTS, Run
from amo_dist.doctor.site import Fault, Site

CONFIG = AMOConfig(
    observe_until=4, observe_every=2, sample_size=2, transition_steps=3, bucket_bytes=8192
)
STEPS = 10
"""Steps of a run: four observed, three of transition, three locked."""
TOLERANCE = 0.02
"""Greatest difference of a parameter over the distance that it moved: in another batch a device may
round otherwise, and results of Newton-Schulz in bfloat16 then differ by a few roundings of 2^-8."""


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
    on_cpu = "" if site.is_cuda else "no CUDA device"
    waited = "the host waited for nothing in a locked step"
    return [
        *listed,
        Check("skipped step", functools.partial(skipped, site), "NaN on one rank: skipped on all"),
        Check("no waits", functools.partial(no_waits, site), waited, skip=on_cpu),
    ]


def _run(site: Site, config: AMOConfig = CONFIG) -> Run:
    return Run(site, "fsdp" if site.world_size > 1 else "one", config)


# ------------------------------------------------------------------ layouts


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
    run.train(range(1, STEPS + 1))
    params, plan = run.whole(), run.optimizer.plan
    assert plan is not None
    if layout == "one":
        twin.update(params=params, plan=plan)
    if plan != twin["plan"]:
        raise Fault(f"plan: found {plan.to_json()}, expected {twin['plan'].to_json()}")
    worst = 0.0
    for name in differing(params, twin["params"]):
        expected = twin["params"][name]
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


def differing(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that differ in a bit."""
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])]


def skipped(site: Site) -> None:
    """Take a step with NaN in one rank's gradient, and one more.

    Raises:
        Fault: The step changed a parameter, or was not counted.
    """
    run = _run(site, dataclasses.replace(CONFIG, nonfinite="skip_step"))
    run.train(range(1, 3))
    before = run.whole()
    run.set_gradients(3)
    if site.rank == site.world_size - 1:
        for param in run.model.parameters():
            assert param.grad is not None
            local_tensor(param.grad).fill_(math.nan)
    run.optimizer.step()
    if changed := differing(run.whole(), before):
        raise Fault(f"{len(changed)} parameters took a NaN, the first is {changed[0]}")
    run.train(range(3, 4))
    num_skipped = run.optimizer.metrics()["optimizer/steps_skipped"]
    if num_skipped != 1:
        raise Fault(f"steps_skipped: found {num_skipped:g}, expected 1")


def no_waits(site: Site) -> None:
    """Take a locked step in which PyTorch raises if the host waits for the device."""
    run = _run(site)
    run.train(range(1, STEPS))
    run.set_gradients(STEPS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
