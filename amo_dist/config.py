"""What every room shares: the settings of the optimizers, and the names of operator types."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

OPERATOR_TYPES = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_gate", "mlp_up", "mlp_down")
"""The seven types of a dense decoder, in their declared order."""


def sort_operator_types(operator_types: Iterable[str]) -> tuple[str, ...]:
    """Put operator types in the order in which plans and reports list them and break ties.

    Args:
        operator_types: Any names; duplicates are dropped.

    Returns:
        Those of ``OPERATOR_TYPES`` in their declared order, then the others alphabetically. Groups
        of a type, ``attn_q/deep``, stand where the type does, alphabetically too.
    """
    order = {name: index for index, name in enumerate(OPERATOR_TYPES)}
    return tuple(
        sorted(
            set(operator_types),
            key=lambda name: (order.get(name.partition("/")[0], len(order)), name),
        )
    )


Triple: TypeAlias = tuple[float, float, float]
"""Coefficients ``(a, b, c)`` of one Newton-Schulz step, ``p(x) = a x + b x^3 + c x^5``."""

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A region of a tensor: half-open ``(start, stop)`` for each of its dims."""

MOST_STEPS = 100
"""Newton-Schulz steps that a type may get: the error is down to rounding long before."""

PRECONDITIONERS = ("frobenius", "aol")
"""How a matrix is scaled before the first step."""

NS_BACKENDS = (
    *("auto", "standard", "single", "symmetric", "gram"),
    *("triton", "gram_newton_schulz"),
)
"""How Newton-Schulz may be run; see `amo_dist.kernels.cpu.backends`. On CUDA alone: ``triton``,
which is ``symmetric`` by tiles in one kernel, and ``gram_newton_schulz``, a package."""

_ADJUST_LR = ("match_rms_adamw", "original", "spectral")
_BFLOAT16_PARAMS = ("nearest", "stochastic", "master")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Matrices travel before they are scaled, and float16 has not the range: 1e-20 would vanish.
_WIRE_DTYPES = ("bfloat16", "float32", "float64")
_GRANULARITIES = ("operator_type", "layer_group", "shape", "matrix")
_TEAM_BACKENDS = ("auto", "standard")


def _require(condition: bool, field: str, found: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{field}: found {found!r}, expected {expected}")


def _require_choice(field: str, found: object, choices: Sequence[str]) -> None:
    _require(found in choices, field, found, f"one of {', '.join(map(repr, choices))}")


def _require_int(field: str, found: object, minimum: int, maximum: int | None = None) -> None:
    is_int = isinstance(found, int) and not isinstance(found, bool)
    is_within = is_int and minimum <= found and (maximum is None or found <= maximum)  # type: ignore[operator]
    most = "" if maximum is None else f" and <= {maximum}"
    _require(is_within, field, found, f"an integer >= {minimum}{most}")


def _require_real(field: str, found: object, expected: str, low: float, high: float) -> None:
    is_real = isinstance(found, (int, float)) and not isinstance(found, bool)
    _require(is_real and math.isfinite(found) and low <= found <= high, field, found, expected)  # type: ignore[arg-type, operator]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig:
    """What every optimizer of the Muon family shares.

    Each field can be set from TOML under the same name. Errors are ``ValueError`` and name the
    field, what was found and what was expected.
    """

    momentum: float = 0.95
    """Decay of the momentum buffer, ``B = momentum * B + G``; in [0, 1)."""
    nesterov: bool = True
    """Orthogonalize ``G + momentum * B`` instead of ``B``."""
    adjust_lr: str = "match_rms_adamw"
    """What orthogonalized momentum of m outputs and n inputs is multiplied by, so that known
    learning rates carry over: ``match_rms_adamw`` by ``sqrt(max(m, n))``, ``original`` (Jordan's
    Muon) by ``sqrt(max(1, m/n))``, ``spectral`` by ``sqrt(m/n)``; each times ``update_scale``."""
    update_scale: float | None = None
    """Multiplies ``adjust_lr``; None: 0.2 for ``match_rms_adamw``, 1 for the others."""
    cautious_decay: bool = False
    """Decay an entry of a matrix only where its update has the same sign."""
    bfloat16_params: str = "nearest"
    """How bfloat16 parameters, those under AdamW too, take updates: rounded to ``nearest``;
    ``stochastic``, by a hash of seed, step, name and entry, alike in every layout; or as
    ``master`` weights in float32: what rounding takes off is state."""
    ns_dtype: str = "bfloat16"
    """Dtype of the Newton-Schulz products, and of matrices on the wire."""
    ns_backend: str = "auto"
    """How Newton-Schulz is run: ``auto`` (on CPU by a cost model; else measured at the first locked
    step, and kept), ``standard``, ``single`` (one matrix at a time), ``symmetric``, ``gram`` (where
    it is stable, else ``symmetric``), ``triton`` or ``gram_newton_schulz`` (on CUDA)."""
    cuda_graphs: bool = False
    """On CUDA, capture Newton-Schulz of a schedule that stays, and replay it."""
    momentum_dtype: str = "float32"
    """Dtype in which momentum is kept, whatever the dtype of the parameter."""
    ownership: str = "round_robin"
    """How matrices are dealt to ranks: ``round_robin`` or ``balanced`` (longest job first)."""
    owners: str = "mesh"
    """Which ranks may own: any of the ``mesh``, or those of one ``replica`` each."""
    max_team: int = 1
    """Most ranks that share one matrix, where that lowers the greatest load; 1: none do. Shared
    matrices run ``standard`` products, and their bits depend on the number of ranks."""
    bucket_bytes: int = 64 * 2**20
    """Matrices travel in buckets of about this many bytes (a larger matrix has its own)."""
    buckets_in_flight: int = 2
    """How many buckets may be under way at once."""
    nonfinite: str = "error"
    """On a NaN or inf in a gradient on any rank: ``error``, or ``skip_step`` on all ranks."""
    ns_guard_every: int = 100
    """Every so many optimizer steps the residual of one orthogonalized matrix is measured, of all
    matrices in turn; 0: never."""
    ns_guard_bound: float = 1.1
    """A residual ``||X X^T - I||_F / sqrt(min(m, n))`` above this is warned of; > 0. Singular
    values below ``sqrt(2)`` leave at most 1."""
    seed: int = 42
    """Seeds the draw of observed matrices, and stochastic rounding."""
    adamw_implementation: str = "auto"
    """PyTorch's AdamW for the rest of the parameters: ``auto`` (``foreach`` on CPU, else
    ``fused``), ``foreach``, ``fused`` or ``for-loop``."""
    on_config_change: str = "error"
    """Where a checkpoint has other settings that change results: ``error``, ``keep_checkpoint`` (go
    on with those of the checkpoint) or ``replan`` (with those of this run; AMO drops a plan that
    was made with others)."""

    def __post_init__(self) -> None:
        _require_real("momentum", self.momentum, "a number in [0, 1)", 0.0, math.nextafter(1, 0))
        _require_choice("adjust_lr", self.adjust_lr, _ADJUST_LR)
        if self.update_scale is not None:
            _require_real("update_scale", self.update_scale, "a number > 0", 5e-324, math.inf)
        _require_choice("bfloat16_params", self.bfloat16_params, _BFLOAT16_PARAMS)
        _require_choice("ns_dtype", self.ns_dtype, _WIRE_DTYPES)
        _require_choice("ns_backend", self.ns_backend, NS_BACKENDS)
        _require_choice("momentum_dtype", self.momentum_dtype, _DTYPES)
        _require_choice("ownership", self.ownership, ("round_robin", "balanced"))
        _require_choice("owners", self.owners, ("mesh", "replica"))
        _require_int("max_team", self.max_team, 1)
        _require(
            self.max_team == 1 or (self.owners == "mesh" and self.ns_backend in _TEAM_BACKENDS),
            "max_team",
            self.max_team,
            f"1 with owners = {self.owners!r} and ns_backend = {self.ns_backend!r}; teams need "
            "'mesh', and 'auto' or 'standard'",
        )
        _require_int("bucket_bytes", self.bucket_bytes, 1)
        _require_int("buckets_in_flight", self.buckets_in_flight, 1)
        _require_int("ns_guard_every", self.ns_guard_every, 0)
        _require_real("ns_guard_bound", self.ns_guard_bound, "a number > 0", 5e-324, math.inf)
        _require_choice("nonfinite", self.nonfinite, ("error", "skip_step"))
        _require_choice(
            "adamw_implementation",
            self.adamw_implementation,
            ("auto", "foreach", "fused", "for-loop"),
        )
        _require_choice(
            "on_config_change", self.on_config_change, ("error", "keep_checkpoint", "replan")
        )
        _require_int("seed", self.seed, 0)
        for field in ("nesterov", "cuda_graphs", "cautious_decay"):
            found = getattr(self, field)
            _require(isinstance(found, bool), field, found, "true or false")

    @property
    def update_factor(self) -> float:
        """``update_scale``, or what it is by default."""
        default = 0.2 if self.adjust_lr == "match_rms_adamw" else 1.0
        return default if self.update_scale is None else self.update_scale

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values, with the ``update_scale`` in force."""
        return {**dataclasses.asdict(self), "update_scale": self.update_factor}


PAPERS_PLANS: Mapping[str, str] = MappingProxyType(
    {"objective": "projected", "planner": "greedy", "budget_unit": "steps"}
)
"""Fields of ``AMOConfig`` with which plans are those of the AMO paper."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AMOConfig(MuonConfig):
    """Adaptive Muon Orthogonalization: observe, plan, glide to the plan, lock.

    When to observe and how long to glide are by default what the AMO paper has for Qwen3-0.6B and
    Llama-3.1-760M; how to plan is not, see `paper`.
    """

    observe_until: int = 1200
    """``T_obs``: the last observation toward the first plan, and it, come at this step."""
    observe_every: int = 150
    """Observation interval in optimizer steps; must divide ``observe_until``."""
    sample_size: int = 8
    """Matrices of each operator type drawn for one observation (all, where there are fewer)."""
    observe_in_background: bool = False
    """Measure samples on a thread while training goes on; the values are taken in at the next step.
    Saving state in between is then a collective."""
    objective: str = "measured"
    """What a plan minimises: the ``measured`` mean squared residual of the sampled matrices, never
    above the uniform schedule's where ``budget_ratio`` is at least 1; or the ``projected`` error at
    the lower bound ``ell_target``, as in the AMO paper, which can starve a type."""
    shrinkage: float = 0.7
    """``alpha``: ``ell_target = alpha * ell_robust + (1 - alpha) * base_ell``; in [0, 1]. Only for
    the ``projected`` objective."""
    transition_steps: int = 300
    """``Delta``: optimizer steps from the uniform schedule, or the plan before, to a plan; at least
    1."""
    base_steps: int = 5
    """``T_base``: Newton-Schulz steps of every operator type before the first plan."""
    base_ell: float = 1e-3
    """``ell_base``: the lower bound for which the uniform schedule is composed; in (0, 0.99]."""
    budget_ratio: float = 1.0
    """Planned Newton-Schulz work over that of the uniform schedule; > 0."""
    min_steps: int = 3
    """Fewest steps a type may get (relaxed, and logged, only where the budget is infeasible)."""
    max_steps: int = 7
    """Most steps a type may get (relaxed, and logged, only where the budget is infeasible)."""
    planner: str = "exact"
    """``exact`` (dynamic programming) or ``greedy`` (the paper's add, remove, transfer; only for
    the ``projected`` objective and a budget of steps)."""
    budget_unit: str = "flops"
    """What the budget counts: ``flops`` weighted by the matrices' shapes, or ``steps``."""
    granularity: str = "operator_type"
    """What shares a schedule: an ``operator_type``, a ``layer_group`` (type and third of the
    depth), a ``shape`` (short side x long side, whatever the type), or nothing: one for each
    ``matrix``."""
    observe_only: bool = False
    """Observe and record, but never plan: the uniform schedule stays for the whole run."""
    replan_every: int = 0
    """Plan anew so many optimizer steps after each plan, from observations since its lock, and
    glide there from the plan before; 0: plan once."""
    ns_guard_fallback: bool = False
    """An operator type whose residual is above ``ns_guard_bound`` runs the uniform schedule from
    then on, until a new plan."""

    def __post_init__(self) -> None:
        # The zero-argument form of super() fails here: slots=True makes a second class.
        MuonConfig.__post_init__(self)
        _require_int("observe_until", self.observe_until, 1)
        _require_int("observe_every", self.observe_every, 1)
        _require(
            self.observe_until % self.observe_every == 0,
            "observe_every",
            self.observe_every,
            f"a divisor of observe_until = {self.observe_until}",
        )
        _require_int("sample_size", self.sample_size, 1)
        _require_choice("objective", self.objective, ("measured", "projected"))
        _require_real("shrinkage", self.shrinkage, "a number in [0, 1]", 0.0, 1.0)
        _require_int("transition_steps", self.transition_steps, 1)
        _require_int("base_steps", self.base_steps, 1, MOST_STEPS)
        _require_real("base_ell", self.base_ell, "a number in (0, 0.99]", 5e-324, 0.99)
        _require_real("budget_ratio", self.budget_ratio, "a number > 0", 5e-324, math.inf)
        _require_int("min_steps", self.min_steps, 1, MOST_STEPS)
        _require_int("max_steps", self.max_steps, self.min_steps, MOST_STEPS)
        _require_choice("planner", self.planner, ("exact", "greedy"))
        _require_choice("budget_unit", self.budget_unit, ("steps", "flops"))
        _require(
            self.planner != "greedy" or self.plans_as_paper,
            "planner",
            self.planner,
            "'exact', or objective = 'projected' and budget_unit = 'steps' with it, found "
            f"{self.objective!r} and {self.budget_unit!r}",
        )
        _require_choice("granularity", self.granularity, _GRANULARITIES)
        for field in ("observe_in_background", "observe_only", "ns_guard_fallback"):
            found = getattr(self, field)
            _require(isinstance(found, bool), field, found, "true or false")
        self._check_replan()

    def _check_replan(self) -> None:
        _require_int("replan_every", self.replan_every, 0)
        if not self.replan_every:
            return
        _require(
            self.replan_every % self.observe_every == 0
            and self.replan_every >= self.transition_steps,
            "replan_every",
            self.replan_every,
            f"a multiple of observe_every = {self.observe_every}, and no less than "
            f"transition_steps = {self.transition_steps}",
        )
        _require(not self.observe_only, "replan_every", self.replan_every, "0 with observe_only")

    @classmethod
    def paper(cls, **changes: Any) -> AMOConfig:
        """The settings with which plans are those of the AMO paper, ``PAPERS_PLANS``.

        Args:
            changes: Fields with other values.

        Raises:
            ValueError: As for the constructor.
        """
        return cls(**{**PAPERS_PLANS, **changes})

    @property
    def plans_as_paper(self) -> bool:
        """Whether plans are those of the AMO paper."""
        return all(getattr(self, field) == value for field, value in PAPERS_PLANS.items())

    @property
    def lock_step(self) -> int:
        """The step at which the first plan locks, ``observe_until + transition_steps``."""
        return self.observe_until + self.transition_steps
