"""Checks of the optimizer: layouts against one process, observation, resume, a step by part."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from amo_dist.config import OPERATOR_TYPES, AMOConfig, MuonConfig
from amo_dist.distributed.agreement import text_mark, world_group
from amo_dist.distributed.layout import local_tensor
from amo_dist.distributed.spans import listen
from amo_dist.engine.observer import trial_tensor
from amo_dist.kernels.spectra import observation_flops, observe
from amo_dist.operators.groups import param_groups
from amo_dist.optimizers.amo import AMO
from amo_dist.optimizers.muon import Muon
from amo_dist.schedule.polar_express import composed
from amo_dist.schedule.trials import Trials
from amo_dist.tools.doctor.examination import Check, alike
from amo_dist.tools.doctor.hardware import median_seconds, synchronize
from amo_dist.tools.doctor.models import (
    build,
    make_model,
    normal,
    place_like,
    shapes_of,
    shard,
    train,
)
from amo_dist.tools.doctor.site import Fault, Site
from amo_dist.tools.shapes import MODELS, PLANS, DecoderShape

CONFIG = AMOConfig(
    observe_until=4,
    observe_every=2,
    sample_size=2,
    transition_steps=3,
    bucket_bytes=8192,
    ns_guard_every=0,
)
STEPS = 10
"""Four that are observed, three of transition, three locked."""
TOLERANCE = 0.02
"""Of parameters on CUDA, relative to how far they have moved, where bits differ: results of
Newton-Schulz in bfloat16 by products of another batch differ by some roundings of 2^-8."""
ELL_ERROR = 1e-3
"""What the kernels promise of ``ell``."""
WARMUP, TIMED = 2, 3
"""Steps of a model, before and while it is timed."""
PARTS = ("gather", "orthogonalize", "scatter", "update", "adamw")
VOCABULARY = 32_768
"""Rows of the embedding of a timed model: AdamW has work, too."""

Values = Mapping[str, Any]
Trained = tuple[nn.Module, Muon]


def checks(site: Site, model: str = "") -> list[Check]:
    """All checks of this file, in the order in which they run.

    Args:
        site: Where.
        model: One of `MODELS`; by default the largest of Qwen3 on CUDA, elsewhere a stand-in.
    """
    name, shape, steps = named_model(model, site)
    return [
        *layouts(site),
        Check(
            "observation",
            functools.partial(observation, site, shape),
            tell_observation,
            is_collective=False,
        ),
        Check("resume", functools.partial(resume, site), tell_resume),
        Check(
            "locked step",
            functools.partial(locked_step, site, shape, steps),
            functools.partial(tell_step, name),
        ),
    ]


def named_model(model: str, site: Site) -> tuple[str, DecoderShape, dict[str, int]]:
    """The model to time: its name, its sizes, and its locked Newton-Schulz steps by type."""
    name = model or "Qwen3-1.7B"
    shape = MODELS[name]
    if not model and not (site.is_cuda and site.share):
        shape = dataclasses.replace(MODELS["Qwen3-70M"], layers=2)
        name = "a stand-in of two blocks of Qwen3-70M"
    steps = PLANS.get(name, (5,) * len(OPERATOR_TYPES))
    return name, shape, dict(zip(OPERATOR_TYPES, steps, strict=True))


# ------------------------------------------------------------------ layouts


def layouts(
    site: Site,
    make: Callable[[Site, str], nn.Module] = make_model,
    config: AMOConfig = CONFIG,
) -> list[Check]:
    """A check for each layout: a whole run to the lock, against one process.

    The first trains on each rank alone; the others are compared with it.

    Args:
        site: Where.
        make: The model of a layout.
        config: Of all runs.
    """
    twin: dict[str, Any] = {}
    size = site.world_size
    least_by_layout = {"one": 1, "replicate": 2, "fsdp": 2, "hsdp": 4, "tp x fsdp": 4}
    found = []
    for layout, least in least_by_layout.items():
        skip = f"needs {least} ranks" if size < least else ""
        if size > least == 4 and size % 2:
            skip = "needs an even number of ranks"
        run = functools.partial(against_twin, site, layout, make, config, twin)
        tell = functools.partial(tell_layout, exact=not site.is_cuda)
        found.append(Check(f"layout {layout}", run, tell, skip=skip))
    return found


def against_twin(
    site: Site,
    layout: str,
    make: Callable[[Site, str], nn.Module],
    config: AMOConfig,
    twin: dict[str, Any],
) -> dict[str, Any]:
    """Train in a layout; ``twin`` is filled by ``one``, and read by the others.

    Returns:
        What was planned, ``twin`` (which tells its parameters apart), and ``difference`` from
        it, relative to how far it has moved; 0 for the same bits.
    """
    model = make(site, layout)
    group = world_group() if layout == "replicate" else None
    start = {name: local_tensor(param).clone() for name, param in model.named_parameters()}
    optimizer = AMO(param_groups(model), lr=3e-3, config=config, process_group=group)
    train(model, optimizer, range(1, STEPS + 1))
    plan = optimizer.control_state_dict()["policy"]["plan"]
    if layout == "one":
        params = {name: param.detach() for name, param in model.named_parameters()}
        twin.update(params=params, start=start, plan=plan)
        twin["mark"] = text_mark(str([param.tolist() for param in params.values()]))
    if not twin:
        raise Fault("nothing to compare with: the run on one process failed")
    return {
        "plan": plan["allocation"],
        "ells": plan["ell_target"],
        "twin": twin["mark"],
        "difference": _difference(model, twin),
        "same plan": plan == twin["plan"],
    }


def _difference(model: nn.Module, twin: Mapping[str, Any]) -> float:
    """The largest of this rank's parts of parameters."""
    worst = 0.0
    for name, param in model.named_parameters():
        expected = local_tensor(place_like(twin["params"][name], param))
        if not torch.equal(local_tensor(param), expected):
            moved = expected - local_tensor(place_like(twin["start"][name], param))
            off = (local_tensor(param) - expected).norm() / moved.norm()
            worst = max(worst, math.inf if off.isnan() else off.item())
    return worst


def tell_layout(values: Sequence[Values], *, exact: bool) -> str:
    """Raises `Fault` where ranks hold other parameters or plans, or differ from the twin."""
    alike([{key: one[key] for key in ("plan", "ells", "twin")} for one in values])
    if not all(one["same plan"] for one in values):
        raise Fault(f"plan: found {values[0]['plan']}, expected that of one process")
    worst = max(one["difference"] for one in values)
    bound = 0.0 if exact else TOLERANCE
    if not worst <= bound:
        expected = "the same bits" if exact else f"at most {bound} of their way"
        raise Fault(f"parameters differ from one process's by {worst:.2g}, expected {expected}")
    how = "the bits of one process" if worst == 0 else f"within {worst:.1e} of one process"
    return f"{how}, locked at {values[0]['plan']} on all ranks"


# ------------------------------------------------------------------ observation


def observation(site: Site, shape: DecoderShape) -> dict[str, Any]:
    """Seconds to observe a matrix of each shape of a model, as AMO does, and the rate of them all.

    Raises:
        Fault: ``ell`` of the smallest is not that of a decomposition on the CPU.
    """
    trials, scale = trial_tensor(Trials(range(3, 8), 5, 1e-3).schedules())
    shapes = sorted({info.shape for info in shape.block()}, key=math.prod)
    seconds = {}
    for size in shapes:
        x = normal("observed", size).to(site.device)
        run = functools.partial(observe, x, trials, scale)
        seconds[f"{size[0]} x {size[1]}"] = median_seconds(run, site.device, rounds=1)
        if size == shapes[0]:
            sigma = torch.linalg.svdvals(x.double().cpu())
            expected, found = (sigma[-1] / sigma.norm()).item(), run()[0].item()
            if not abs(found - expected) <= ELL_ERROR * expected:
                raise Fault(f"ell: found {found:.6g}, expected {expected:.6g}")
    rate = 1e-12 * sum(observation_flops(*size) for size in shapes) / sum(seconds.values())
    return {"seconds": seconds, "hardware": {"observe_tflops": rate}}


def tell_observation(values: Sequence[Values]) -> str:
    """Of each shape the slowest rank."""
    found = [one["seconds"] for one in values]
    return ", ".join(f"{name} {max(one[name] for one in found):.3g} s" for name in found[0])


# ------------------------------------------------------------------ resume


def resume(site: Site) -> dict[str, Any]:
    """Train, save, train on; build anew, load, and train on likewise.

    Raises:
        Fault: The two differ in a bit of this rank.
    """
    layout, saved_at = "fsdp" if site.world_size > 1 else "one", STEPS // 2
    first, again = (_make_run(site, layout) for _ in range(2))
    train(*first, range(1, saved_at + 1))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    size = file.tell()
    file.seek(0)
    model_state, optimizer_state = torch.load(file, weights_only=True)
    again[0].load_state_dict(model_state)
    again[1].load_state_dict(optimizer_state)
    for run in (first, again):
        train(*run, range(saved_at + 1, STEPS + 1))
    pairs = zip(first[0].named_parameters(), again[0].parameters(), strict=True)
    wrong = [
        name
        for (name, expected), found in pairs
        if not torch.equal(local_tensor(found), local_tensor(expected))
    ]
    if wrong:
        raise Fault(f"{len(wrong)} parameters differ after loading, the first is {wrong[0]}")
    if first[1].control_state_dict() != again[1].control_state_dict():
        raise Fault("the state of the schedule differs after loading")
    return {"layout": layout, "saved_at": saved_at, "bytes": size}


def _make_run(site: Site, layout: str) -> Trained:
    model = make_model(site, layout)
    return model, AMO(param_groups(model), lr=3e-3, config=CONFIG)


def tell_resume(values: Sequence[Values]) -> str:
    """What was compared."""
    one = values[0]
    return f"{one['layout']}: the bits of a run that goes on, from step {one['saved_at']}"


# ------------------------------------------------------------------ a step by part


class PartTimer:
    """Seconds within the spans of a step, on the device's time line."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: Counter[str] = Counter()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a part; for `listen`."""
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - start  # type: ignore[assignment]

    def seconds(self) -> dict[str, float]:
        """By name."""
        synchronize(self._device)
        found = self._seconds.copy()
        for name, begin, end in self._events:
            found[name] += begin.elapsed_time(end) / 1e3
        return dict(found)


def locked_step(site: Site, shape: DecoderShape, steps: Mapping[str, int]) -> dict[str, Any]:
    """Milliseconds of a step on this rank, whole and by part.

    Args:
        site: Where.
        shape: The model; its entries are drawn anew on each rank, sharded over all.
        steps: Newton-Schulz steps by operator type.
    """
    shapes = shapes_of(shape, VOCABULARY)
    model = build(shapes, lambda name: torch.empty(shapes[name], device="meta"))
    if site.world_size > 1:
        model = shard(model, init_device_mesh(site.device.type, (site.world_size,)))
    model.to_empty(device=site.device)
    for param in model.parameters():
        local_tensor(param).normal_(std=0.02)
        param.grad = torch.empty_like(param)
        local_tensor(param.grad).normal_()
    schedules = {kind: composed(1e-3, count) for kind, count in steps.items()}
    config = MuonConfig(ns_guard_every=0)
    optimizer = Muon(param_groups(model), schedule=schedules, config=config)
    for _ in range(WARMUP):
        optimizer.step()
    whole_step = median_seconds(optimizer.step, site.device, rounds=TIMED)
    timer = PartTimer(site.device)
    with listen(timer):
        for _ in range(TIMED):
            optimizer.step()
        parts = timer.seconds()
    found = {name: 1e3 * parts.get(f"amo::{name}", 0.0) / TIMED for name in PARTS}
    return {"ms": 1e3 * whole_step, "parts": found, "matrices": 7 * shape.layers}


def tell_step(name: str, values: Sequence[Values]) -> str:
    """Of the slowest rank."""
    slow = max(values, key=lambda one: one["ms"])
    parts = ", ".join(f"{part} {found:.3g}" for part, found in slow["parts"].items())
    return f"{name}, {slow['matrices']} matrices: {slow['ms']:.3g} ms ({parts})"
