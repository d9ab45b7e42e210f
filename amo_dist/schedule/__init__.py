"""Schedules: which Newton-Schulz coefficients each operator type uses at each optimizer step.

Pure Python: neither tensors nor process groups.
"""

from __future__ import annotations

from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.budget import allocate, ns_step_flops
from amo_dist.schedule.coefficients import SCHEDULE_NAMES, named_schedule
from amo_dist.schedule.plan import Plan, plan_allocation
from amo_dist.schedule.polar_express import SAFETY, compose, error_curve, simulate
from amo_dist.schedule.policies import Policy, TablePolicy, UniformPolicy, named_policy
from amo_dist.schedule.types import MatrixInfo, Schedule

__all__ = [
    "SAFETY",
    "SCHEDULE_NAMES",
    "AMOPolicy",
    "MatrixInfo",
    "Plan",
    "Policy",
    "Schedule",
    "TablePolicy",
    "UniformPolicy",
    "allocate",
    "compose",
    "error_curve",
    "named_policy",
    "named_schedule",
    "ns_step_flops",
    "plan_allocation",
    "simulate",
]
