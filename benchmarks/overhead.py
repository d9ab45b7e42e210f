"""What the controller costs a step: planning, the transition, and the hot path around the kernels.

``python -m benchmarks.overhead`` runs AMO on the matrices of one model through observation,
transition and lock in one process. Overhead of a transition step is the time of its new schedules
(composed anew at every step) and their digest, in percent of the median locked step. Observation is
the time that a step of it (8 matrices of each type) takes beyond one without, in turns, shared out
over an interval of 150 steps. A step here is the optimizer's alone: beside forward and backward
every share is smaller.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from amo_dist import AMO, AMOConfig
from amo_dist.engine.observe import coefficient_table
from amo_dist.kernels.spectrum import distances
from amo_dist.operators.groups import param_groups
from amo_dist.schedule.polar_express import SAFETY
from amo_dist.schedule.source import Amo
from amo_dist.schedule.types import Measurement
from benchmarks.measure import CLOCKS, paired, report
from benchmarks.shapes import ELL_BY_TYPE, MODELS, DecoderShape, make_module, matrices

TRANSITION_STEPS, INTERVAL, NEVER = 300, 150, 10**6
ROUNDS = 5
"""Steps that are timed."""


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--model", default="Qwen3-70M", choices=MODELS)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    rows = measure(options)
    report("overhead", rows, options.output, vars(options))
    return 0


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    model = MODELS[options.model]
    settings = AMOConfig(
        observe_until=1,
        observe_every=1,
        transition_steps=TRANSITION_STEPS,
        sample_size=1,
        ns_dtype="bfloat16",
    )
    plan_seconds, transition = _transition(model, settings, options.clock)
    optimizer = AMO(param_groups(make_module(model)), lr=1e-3, config=settings)
    step = _median_seconds(optimizer.step, ROUNDS, options.clock, warmup=3)
    seconds = {
        "step": step,
        "plan, once": plan_seconds,
        "schedules and digest of a transition step": transition,
        "observation, by step at an interval of 150": _observation(model, options) / INTERVAL,
    }
    return [
        {"what": name, "ms": 1e3 * own, "% of a step": 100 * own / step}
        for name, own in seconds.items()
    ]


def _observation(model: DecoderShape, options: argparse.Namespace) -> float:
    """Seconds that observing takes of a step: the median over rounds, two optimizers in turns."""
    steps: dict[str, Callable[[], object]] = {}
    for name, every in (("plain", NEVER), ("observing", 1)):
        settings = AMOConfig(observe_until=NEVER, observe_every=every, ns_dtype="bfloat16")
        steps[name] = AMO(param_groups(make_module(model)), lr=1e-3, config=settings).step
    seconds = paired(steps, ROUNDS, clock=options.clock)
    rounds = zip(seconds["observing"], seconds["plain"], strict=True)
    return statistics.median(observing - plain for observing, plain in rounds)


def _median_seconds(
    run: Callable[[], object], rounds: int, clock: str, *, warmup: int = 0
) -> float:
    return statistics.median(paired({"": run}, rounds, clock=clock, warmup=warmup)[""])


def _transition(model: DecoderShape, settings: AMOConfig, clock: str) -> tuple[float, float]:
    """Plan from unequal types; seconds of the plan, and of a transition step's schedules."""
    source = Amo(settings)
    source.bind(matrices(model))
    types = {info.name: info.operator_type for info in matrices(model)}
    ells = {name: ELL_BY_TYPE[types[name]] for name in source.sample(1)}
    table = coefficient_table(source.candidates())
    observed = {name: Measurement(ell, False, _errors(ell, table)) for name, ell in ells.items()}
    plan_seconds = _median_seconds(lambda: source.record(1, observed), 1, clock)
    steps = itertools.count(2)

    def run() -> None:
        for schedule in source.schedules(next(steps)).values():
            schedule.digest()

    return plan_seconds, _median_seconds(run, settings.transition_steps, clock)


def _errors(ell: float, table: Tensor) -> list[float]:
    """Errors of all candidates on a spectrum that falls evenly in logarithms."""
    sigma = torch.logspace(math.log10(ell), -1, 64, dtype=torch.float64)
    return distances(sigma / SAFETY, table).tolist()


if __name__ == "__main__":
    raise SystemExit(main())
