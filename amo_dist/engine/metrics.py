"""Numbers for a logger that follow from schedules and exchanges."""

from __future__ import annotations

from collections.abc import Sequence

from amo_dist.distributed.exchange import Exchange
from amo_dist.engine.parameters import Parameters
from amo_dist.engine.step import count_backends
from amo_dist.kernels.devices import BACKENDS
from amo_dist.kernels.interface import Kernels
from amo_dist.schedule.policies import Policy
from amo_dist.schedule.types import Schedule


def of_schedules(
    policy: Policy,
    step: int,
    parameters: Parameters,
    schedules: Sequence[Schedule],
    kernels: Kernels,
) -> dict[str, float]:
    """What the policy says of a step, and how many matrices each backend beside the first runs.

    Args:
        policy: Bound to the registry.
        step: Optimizer step.
        parameters: Of this process.
        schedules: Of each matrix at this step.
        kernels: Of their device.
    """
    backends = count_backends(parameters, schedules, kernels)
    counts = {f"newton_schulz/{each}_matrices": float(backends[each]) for each in BACKENDS[1:]}
    return {**policy.metrics(step), **counts}


def of_exchanges(exchanges: Sequence[Exchange]) -> dict[str, float]:
    """What this rank sent of matrices in the last step, in bytes and in elements."""
    return {
        "exchange/sent_bytes": float(sum(each.sent_bytes.total() for each in exchanges)),
        "exchange/sent_elements": float(sum(each.sent_elements.total() for each in exchanges)),
    }
