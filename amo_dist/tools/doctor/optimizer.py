"""Checks of the optimizer: every layout against one process, equal bits, resume, skipped steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from amo_dist.config import AMOConfig
from amo_dist.operators.groups import param_groups
from amo_dist.optimizers.amo import AMO
from amo_dist.tools.doctor.examination import Check, check_alike
from amo_dist.tools.doctor.models import (
    differing,
    local,
    make_model,
    parts,
    place_like,
    set_gradients,
    train,
)
from amo_dist.tools.doctor.site import Fault, Site

CONFIG = AMOConfig(
    observe_until=4,
    observe_every=2,
    sample_size=2,
    transition_steps=3,
    bucket_bytes=8192,
    ns_guard_every=0,
)
STEPS = 10
"""Steps of a run: four observed, three of transition, three locked."""
TOLERANCE = 0.02
"""Difference of parameters over the distance that they moved, on devices whose bits depend on the
batch: results of Newton-Schulz in bfloat16 then differ by a few roundings of 2^-8."""

Values = Mapping[str, Any]


def checks(site: Site) -> list[Check]:
    """List the checks of this file in the order in which they run."""
    on_cpu = "" if site.is_cuda else "no CUDA device"
    return [
        *layouts(site),
        Check("run twice", functools.partial(same_bits, site, 0), "the same bits"),
        Check(
            "resume",
            functools.partial(same_bits, site, STEPS // 2),
            f"the bits of a run that goes on, from step {STEPS // 2}",
        ),
        Check(
            "skipped steps",
            functools.partial(skipped, site),
            "NaN on one rank: two steps skipped on all, one before a refused load",
        ),
        Check(
            "no waits",
            functools.partial(no_waits, site),
            "the host waited for nothing in a locked step",
            skip=on_cpu,
        ),
    ]


def _run(site: Site, config: AMOConfig = CONFIG) -> tuple[nn.Module, AMO]:
    model = make_model(site, "fsdp" if site.world_size > 1 else "one")
    return model, AMO(param_groups(model), lr=3e-3, config=config)


# ------------------------------------------------------------------ layouts


def layouts(site: Site) -> list[Check]:
    """List a check per layout: a whole run to the lock, compared with one process.

    The first layout trains on each rank alone and is the twin of the others.
    """
    twin: dict[str, Any] = {}
    size = site.world_size
    least_by_layout = {"one": 1, "replicate": 2, "fsdp": 2, "hsdp": 4, "tp x fsdp": 4}
    checks_of_layouts = []
    for layout, least in least_by_layout.items():
        skip = f"needs {least} ranks" if size < least else ""
        if size > least == 4 and size % 2:
            skip = "needs an even number of ranks"
        run = functools.partial(against_twin, site, layout, twin)
        figure = functools.partial(layout_figure, exact=not site.is_cuda)
        checks_of_layouts.append(Check(f"layout {layout}", run, figure, skip=skip))
    return checks_of_layouts


def against_twin(site: Site, layout: str, twin: dict[str, Any]) -> dict[str, Any]:
    """Train in a layout; ``one`` fills ``twin``, and the others compare with it.

    Returns:
        Plan of this rank, checksum of the twin's parameters, and ``difference`` from them over the
        distance that they moved; 0 for the same bits.
    """
    model = make_model(site, layout)
    group = dist.group.WORLD if layout == "replicate" else None
    start = parts(model)
    optimizer = AMO(param_groups(model), lr=3e-3, config=CONFIG, process_group=group)
    train(model, optimizer, range(1, STEPS + 1))
    plan = optimizer.control_state_dict()["policy"]["plan"]
    if layout == "one":
        params = parts(model)
        twin.update(params=params, start=start, plan=plan)
        twin["mark"] = zlib.crc32(str([param.tolist() for param in params.values()]).encode())
    if not twin:
        raise Fault("nothing to compare with: the run on one process failed")
    return {
        "plan": plan["allocation"],
        "ells": plan["ell_target"],
        "twin": twin["mark"],
        "difference": _difference(model, twin["params"], twin["start"]),
        "same plan": plan == twin["plan"],
    }


def _difference(model: nn.Module, params: Mapping[str, Any], start: Mapping[str, Any]) -> float:
    """Greatest difference of this rank's parts over the distance that they moved from ``start``."""
    worst = 0.0
    for name, param in model.named_parameters():
        expected = local(place_like(params[name], param))
        if not torch.equal(local(param), expected):
            moved = expected - local(place_like(start[name], param))
            ratio = (local(param) - expected).norm() / moved.norm()
            worst = max(worst, math.inf if ratio.isnan() else ratio.item())
    return worst


def layout_figure(values: Sequence[Values], *, exact: bool) -> str:
    """Raise `Fault` if ranks hold unlike parameters or plans, or differ from the twin."""
    check_alike([{key: value[key] for key in ("plan", "ells", "twin")} for value in values])
    if not all(value["same plan"] for value in values):
        raise Fault(f"plan: found {values[0]['plan']}, expected that of one process")
    return f"{_compare(values, exact=exact)}, locked at {values[0]['plan']} on all ranks"


def _compare(values: Sequence[Values], *, exact: bool) -> str:
    worst = max(value["difference"] for value in values)
    bound = 0.0 if exact else TOLERANCE
    if not worst <= bound:
        expected = "the same bits" if exact else f"at most {bound} of the distance that they moved"
        raise Fault(f"parameters differ from one process's by {worst:.2g}, expected {expected}")
    return "the bits of one process" if worst == 0 else f"within {worst:.1e} of one process"


# ------------------------------------------------------------------ the same bits


def same_bits(site: Site, saved_at: int) -> None:
    """Train twice, the second time from a checkpoint of the first.

    Args:
        site: Ranks of the runs.
        saved_at: Step of the checkpoint; 0 for none.

    Raises:
        Fault: The two runs differ in a bit of this rank.
    """
    first, again = (_run(site) for _ in range(2))
    train(*first, range(1, saved_at + 1))
    if saved_at:
        file = io.BytesIO()
        torch.save([part.state_dict() for part in first], file)
        file.seek(0)
        model_state, optimizer_state = torch.load(file, weights_only=True)
        again[0].load_state_dict(model_state)
        again[1].load_state_dict(optimizer_state)
    for run in (first, again):
        train(*run, range(saved_at + 1, STEPS + 1))
    if wrong := differing(parts(again[0]), parts(first[0])):
        raise Fault(f"{len(wrong)} parameters differ, the first is {wrong[0]}")
    if first[1].control_state_dict() != again[1].control_state_dict():
        raise Fault("the state of the schedule differs")


# ------------------------------------------------------------------ skipped steps and waits


def skipped(site: Site) -> None:
    """Take steps with NaN in one rank's gradient, one of them before a load that must be refused.

    Raises:
        Fault: Such a step changed a parameter of this rank, was not counted, or left the next step
            without effect; or the load was accepted.
    """
    model, optimizer = _run(site, dataclasses.replace(CONFIG, nonfinite="skip_step"))
    train(model, optimizer, range(1, 3))
    wrong = optimizer.state_dict()
    for group in wrong["param_groups"]:
        group["control"] = "{"
    for count, is_refused in enumerate((False, True), start=1):
        before = parts(model)
        set_gradients(model, 2 + count)
        if site.rank == min(1, site.world_size - 1):
            grad = next(model.parameters()).grad
            assert grad is not None
            local(grad).fill_(math.nan)
        optimizer.step()
        if is_refused:
            with contextlib.suppress(ValueError):
                optimizer.load_state_dict(wrong)
                raise Fault("a state whose control state is no JSON was loaded")
        if changed := differing(parts(model), before):
            raise Fault(f"{len(changed)} parameters took a NaN, the first is {changed[0]}")
        train(model, optimizer, range(2 + count, 3 + count))
        num_skipped = optimizer.metrics()["optimizer/steps_skipped"]
        if num_skipped != count:
            raise Fault(f"steps_skipped: found {num_skipped:g}, expected {count}")
        if not differing(parts(model), before):
            raise Fault("no parameter moved in the next step")


def no_waits(site: Site) -> None:
    """Take a locked step in which PyTorch raises if the host waits for the device."""
    model, optimizer = _run(site)
    train(model, optimizer, range(1, STEPS))
    set_gradients(model, STEPS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
