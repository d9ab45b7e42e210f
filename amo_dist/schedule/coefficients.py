"""Named schedules: the fixed coefficient tables AMO is compared with, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from amo_dist.config import OPERATOR_TYPES, Triple, fail
from amo_dist.schedule.polar_express import SAFETY, compose, for_input_over
from amo_dist.schedule.types import Schedule


class NamedSchedule(NamedTuple):
    """A schedule known by name, fixed for a whole run.

    Attributes:
        schedule: Schedule of every operator type that ``by_type`` does not name.
        by_type: Operator types with a schedule of their own.
    """

    schedule: Schedule
    by_type: Mapping[str, Schedule] = {}


def named_schedule(name: str) -> NamedSchedule:
    """Look up a fixed schedule.

    Args:
        name: A key of ``NAMED_SCHEDULES``.

    Raises:
        ValueError: There is no schedule of this name; the message lists those there are.
    """
    if not isinstance(name, str) or name not in NAMED_SCHEDULES:
        fail("schedule", name, f"one of {', '.join(NAMED_SCHEDULES)}")
    return NAMED_SCHEDULES[name]


# Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
_KJ_TRIPLE: Triple = (3.4445, -4.7750, 2.0315)

# You (2025), gist.github.com/YouJiacheng/393c90cbdc23b09d5688815ba382288b
_YOU_TRIPLES: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# DeepSeek-AI, "DeepSeek-V4" (2026), section 2.4, Algorithm 1: eight steps of Jordan et al. converge
# fast to about 1, then two exactly.
_DEEPSEEK_TRIPLES: tuple[Triple, ...] = (_KJ_TRIPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2

# Grishina et al., "Accelerating Newton-Schulz Iteration for Orthogonalization via Chebyshev-type
# Polynomials" (2025).
_CANS_TRIPLES: tuple[Triple, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
# Each step after the first ends its interval, with a slope of up to 13, where the step before
# peaks. Rounding in bfloat16 lifts singular values beyond (by 1.4 % at most where two rows were
# searched for the worst, by a few tenths in larger matrices), and 0.2 % in each of the steps
# suffices to send 1.1 to 4e6. So each takes its input to be this much larger, as in `compose`.
CANS_GUARD = 1.02
_GUARDED = (_CANS_TRIPLES[0], *(for_input_over(t, CANS_GUARD) for t in _CANS_TRIPLES[1:]))

# Steps of each of OPERATOR_TYPES in the AMO paper's table of static operator-wise NS allocations.
_STEP_TABLES = {
    "a1": (5, 4, 5, 5, 4, 4, 4),
    "a2": (6, 4, 6, 6, 4, 4, 4),
    "a3": (6, 5, 6, 6, 5, 5, 5),
    "a4": (4, 7, 7, 4, 4, 4, 4),
    "a5": (4, 6, 6, 4, 5, 5, 4),
}


def _kj(steps: int) -> Schedule:
    # The original divides by the Frobenius norm alone, without a safety factor.
    return Schedule((_KJ_TRIPLE,) * steps, norm_scale=1.0)


# Every fixed schedule by the name that configurations call it.
NAMED_SCHEDULES: Mapping[str, NamedSchedule] = {
    "kj": NamedSchedule(_kj(5)),
    "you": NamedSchedule(Schedule(_YOU_TRIPLES, norm_scale=1.0)),
    # Amsel et al., "The Polar Express" (2025), regenerated, not transcribed. Ten steps are
    # composed, so that each of the five kept carries the safety factor, which the composer leaves
    # out of the very last step alone.
    "pe": NamedSchedule(Schedule(compose(1e-3, 10)[:5], norm_scale=SAFETY)),
    "cans": NamedSchedule(Schedule(_GUARDED, norm_scale=SAFETY)),
    # Boissin et al., "Turbo-Muon" (2025): AOL brings the spectrum close to one, which saves You's
    # first step; without it these triples diverge on the largest singular values.
    "turbo": NamedSchedule(Schedule(_YOU_TRIPLES[1:], norm_scale=1.0, preconditioner="aol")),
    "deepseek_v4": NamedSchedule(Schedule(_DEEPSEEK_TRIPLES, norm_scale=1.0)),
    # Types that a table does not name keep five steps.
    **{
        name: NamedSchedule(_kj(5), dict(zip(OPERATOR_TYPES, map(_kj, steps), strict=True)))
        for name, steps in _STEP_TABLES.items()
    },
}
