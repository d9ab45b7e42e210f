"""Schedules: which Newton-Schulz coefficients each operator type uses at each optimizer step.

Pure Python: neither tensors nor process groups.
"""

from __future__ import annotations

from amo_dist.config import Triple
from amo_dist.schedule.budget import allocate, flop_budget, ns_step_flops, step_budget
from amo_dist.schedule.coefficients import (
    NAMED_SCHEDULES,
    SCHEDULE_NAMES,
    NamedSchedule,
    named_schedule,
)
from amo_dist.schedule.controller import Controller
from amo_dist.schedule.observation import Observation
from amo_dist.schedule.plan import Plan, composed, make_plan
from amo_dist.schedule.polar_express import CUSHION, SAFETY, compose, error_curve, simulate
from amo_dist.schedule.policies import (
    AMOPolicy,
    Policy,
    TablePolicy,
    UniformPolicy,
    named_policy,
)
from amo_dist.schedule.types import MatrixInfo, Schedule

__all__ = [
    "CUSHION",
    "NAMED_SCHEDULES",
    "SAFETY",
    "SCHEDULE_NAMES",
    "AMOPolicy",
    "Controller",
    "MatrixInfo",
    "NamedSchedule",
    "Observation",
    "Plan",
    "Policy",
    "Schedule",
    "TablePolicy",
    "Triple",
    "UniformPolicy",
    "allocate",
    "compose",
    "composed",
    "error_curve",
    "flop_budget",
    "make_plan",
    "named_policy",
    "named_schedule",
    "ns_step_flops",
    "simulate",
    "step_budget",
]
