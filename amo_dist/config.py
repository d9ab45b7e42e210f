"""What every room shares: the settings of the optimizers, and the names of operator types."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

__version__ = "0.1.0"

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

BUDGET_RATIO = 1.0
"""Planned Newton-Schulz work over that of the uniform schedule, where nothing else is asked for."""

MOST_STEPS = 100
"""Newton-Schulz steps that a type may get: the error is down to rounding long before."""

PRECONDITIONERS = ("frobenius", "aol")
"""How a matrix is scaled before the first step."""

_ADJUST_LR = ("match_rms_adamw", "original", "spectral")
_UPDATE_NORMS = ("as_is", "exact")
_BFLOAT16_PARAMS = ("nearest", "stochastic", "master")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Matrices travel before they are scaled, and float16 has not the range: 1e-20 would vanish.
_WIRE_DTYPES = ("bfloat16", "float32", "float64")
_GRANULARITIES = ("operator_type", "layer_group", "shape")


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
    Muon) by ``sqrt(max(1, m/n))``, ``spectral`` by ``sqrt(m/n)``; and the first by 0.2."""
    update_norm: str = "as_is"
    """Size of what Newton-Schulz gives: ``as_is``, which fewer steps leave smaller; or ``exact``,
    scaled to the Frobenius norm of an exact polar factor, ``sqrt(min(m, n))``. AMO has ``exact``;
    AdaMuon and NorMuon scale what they make of it once more, to a size of their own."""
    cautious_decay: bool = False
    """Decay an entry of a matrix only where its update has the same sign."""
    bfloat16_params: str = "nearest"
    """How bfloat16 parameters, those under AdamW too, take updates: rounded to ``nearest``;
    ``stochastic``, by a hash of seed, step, name and entry, alike in every layout; or as
    ``master`` weights in float32: what rounding takes off is state."""
    ns_dtype: str = "bfloat16"
    """Dtype of the Newton-Schulz products and iterates."""
    wire_dtype: str | None = None
    """Dtype of matrices on the wire, momentum and results; None: that of ``ns_dtype``, with
    ``float16``, whose range momentum leaves, ``bfloat16``."""
    ownership: str = "round_robin"
    """How matrices are dealt to ranks: ``round_robin`` or ``balanced`` (longest job first)."""
    max_team: int = 1
    """Most ranks that share one matrix, where that lowers the greatest load; 1: none do. Shared
    matrices run ``standard`` products, and their bits depend on the number of ranks."""
    bucket_bytes: int = 64 * 2**20
    """Matrices travel in buckets of about this many bytes (a larger matrix has its own)."""
    nonfinite: str = "error"
    """On a NaN or inf in a gradient on any rank: ``error``, or ``skip_step`` on all ranks."""
    ns_guard_every: int = 100
    """Optimizer steps between measurements of the residual of one orthogonalized matrix; all
    matrices take turns. Above 1.1 it is warned of. 0: never."""
    seed: int = 42
    """Seeds the draw of observed matrices, and stochastic rounding."""
    on_config_change: str = "error"
    """Where a checkpoint has other settings that change results: ``error``, ``keep_checkpoint`` (go
    on with those of the checkpoint) or ``replan`` (with those of this run; AMO drops a plan that
    was made with others)."""

    def __post_init__(self) -> None:
        _require_real("momentum", self.momentum, "a number in [0, 1)", 0.0, math.nextafter(1, 0))
        _require_choice("adjust_lr", self.adjust_lr, _ADJUST_LR)
        _require_choice("update_norm", self.update_norm, _UPDATE_NORMS)
        _require_choice("bfloat16_params", self.bfloat16_params, _BFLOAT16_PARAMS)
        _require_choice("ns_dtype", self.ns_dtype, _DTYPES)
        if self.wire_dtype is not None:
            _require_choice("wire_dtype", self.wire_dtype, _WIRE_DTYPES)
            _require(
                not (self.wire_dtype == "float64" and self.ns_dtype != "float64"),
                "wire_dtype",
                self.wire_dtype,
                f"no wider than float32 with ns_dtype = {self.ns_dtype!r}",
            )
        _require_choice("ownership", self.ownership, ("round_robin", "balanced"))
        _require_int("max_team", self.max_team, 1)
        _require_int("bucket_bytes", self.bucket_bytes, 1)
        _require_int("ns_guard_every", self.ns_guard_every, 0)
        _require_choice("nonfinite", self.nonfinite, ("error", "skip_step"))
        _require_choice(
            "on_config_change", self.on_config_change, ("error", "keep_checkpoint", "replan")
        )
        _require_int("seed", self.seed, 0)
        for field in ("nesterov", "cautious_decay"):
            found = getattr(self, field)
            _require(isinstance(found, bool), field, found, "true or false")

    @property
    def wire(self) -> str:
        """``wire_dtype``, or what it is by default."""
        default = "bfloat16" if self.ns_dtype == "float16" else self.ns_dtype
        return self.wire_dtype or default

    @property
    def update_factor(self) -> float:
        """What updates are multiplied by beside ``adjust_lr`` of their shape."""
        return 0.2 if self.adjust_lr == "match_rms_adamw" else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values, with what is in force where a field is None."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AMOConfig(MuonConfig):
    """Adaptive Muon Orthogonalization: observe, plan, glide to the plan, lock.

    When to observe and how long to glide are by default what the AMO paper has for Qwen3-0.6B and
    Llama-3.1-760M; how to plan is not, see `paper`.
    """

    update_norm: str = "exact"
    """See `MuonConfig`; ``as_is``, a plan of fewer steps would also be a lower learning rate."""
    observe_until: int = 1200
    """``T_obs``: step of the last observation and of the plan."""
    observe_every: int | None = None
    """Observation interval in optimizer steps; must divide ``observe_until``. None: the divisor
    that makes eight observations, or as near to eight as there is."""
    sample_size: int = 8
    """Matrices of each operator type in one observation; all, where there are fewer."""
    planner: str = "measured"
    """What a plan minimises. ``measured``: the squared error of the update on the spectra of the
    sampled matrices, exactly, within a budget of flops; with a ``budget_ratio`` of 1 or more it is
    never above the uniform schedule's. ``paper``: the projected error at a lower bound
    ``ell_target``, within a budget of steps, by the AMO paper's greedy passes, which can starve a
    type."""
    shrinkage: float = 0.7
    """``alpha``: ``ell_target = alpha * ell_robust + (1 - alpha) * base_ell``; in [0, 1]. For
    ``planner = paper`` alone."""
    transition_steps: int = 300
    """``Delta``: optimizer steps from the uniform schedule, or the last plan, to the new plan; at
    least 1."""
    base_steps: int = 5
    """``T_base``: Newton-Schulz steps of every operator type before the first plan."""
    base_ell: float = 1e-3
    """``ell_base``: the lower bound for which the uniform schedule is composed; in (0, 0.99]."""
    budget_ratio: float = BUDGET_RATIO
    """Planned Newton-Schulz work over that of the uniform schedule; > 0."""
    as_good_as: str | None = None
    """Instead of a budget: plan for the fewest flops whose error is no greater than that of this
    schedule on the same spectra. ``uniform``, or the name of a fixed schedule such as ``kj``."""
    min_steps: int = 3
    """Fewest steps a type may get (relaxed, and logged, only where the budget is infeasible)."""
    max_steps: int = 7
    """Most steps a type may get (relaxed, and logged, only where the budget is infeasible)."""
    granularity: str = "operator_type"
    """What shares a schedule: an ``operator_type``, a ``layer_group`` (type and third of the
    depth) or a ``shape`` (short side x long side, whatever the type)."""
    observe_only: bool = False
    """Observe and record, but never plan: the uniform schedule stays for the whole run."""
    replan_every: int = 0
    """Optimizer steps from one plan to the next, which is made from the observations since the
    lock; 0: plan once."""

    def __post_init__(self) -> None:
        # The zero-argument form of super() fails here: slots=True makes a second class.
        MuonConfig.__post_init__(self)
        _require_int("observe_until", self.observe_until, 1)
        if self.observe_every is not None:
            _require_int("observe_every", self.observe_every, 1)
            _require(
                self.observe_until % self.observe_every == 0,
                "observe_every",
                self.observe_every,
                f"a divisor of observe_until = {self.observe_until}",
            )
        _require_int("sample_size", self.sample_size, 1)
        _require_choice("planner", self.planner, ("measured", "paper"))
        _require_real("shrinkage", self.shrinkage, "a number in [0, 1]", 0.0, 1.0)
        _require_int("transition_steps", self.transition_steps, 1)
        _require_int("base_steps", self.base_steps, 1, MOST_STEPS)
        _require_real("base_ell", self.base_ell, "a number in (0, 0.99]", 5e-324, 0.99)
        _require_real("budget_ratio", self.budget_ratio, "a number > 0", 5e-324, math.inf)
        if self.as_good_as is not None:
            _require(isinstance(self.as_good_as, str), "as_good_as", self.as_good_as, "a name")
            for field, expected in (("planner", "measured"), ("budget_ratio", BUDGET_RATIO)):
                found, told = getattr(self, field), f"{expected!r} with as_good_as"
                _require(found == expected, field, found, told)
        _require_int("min_steps", self.min_steps, 1, MOST_STEPS)
        _require_int("max_steps", self.max_steps, self.min_steps, MOST_STEPS)
        _require_choice("granularity", self.granularity, _GRANULARITIES)
        only = self.observe_only
        _require(isinstance(only, bool), "observe_only", only, "true or false")
        self._check_replan()

    def to_dict(self) -> dict[str, Any]:
        """See `MuonConfig.to_dict`."""
        return {**MuonConfig.to_dict(self), "observe_every": self.interval}

    def _check_replan(self) -> None:
        _require_int("replan_every", self.replan_every, 0)
        if not self.replan_every:
            return
        _require(
            self.replan_every % self.interval == 0 and self.replan_every >= self.transition_steps,
            "replan_every",
            self.replan_every,
            f"a multiple of observe_every = {self.interval}, and no less than "
            f"transition_steps = {self.transition_steps}",
        )
        _require(not self.observe_only, "replan_every", self.replan_every, "0 with observe_only")

    @classmethod
    def for_run(cls, num_steps: int, **changes: Any) -> AMOConfig:
        """Settings for a run of so many steps: it observes for two fifths, and glides for a tenth.

        Eight observations, and a transition of at most 300 steps, as in the AMO paper.

        Args:
            num_steps: Optimizer steps of the run, at least 20.
            changes: Fields with other values.

        Raises:
            ValueError: As for the constructor.
        """
        _require_int("num_steps", num_steps, 20)
        fitting = {
            "observe_until": 8 * (num_steps // 20),
            "transition_steps": min(300, num_steps // 10),
        }
        return cls(**{**fitting, **changes})

    @classmethod
    def paper(cls, **changes: Any) -> AMOConfig:
        """The settings with which plans are those of the AMO paper.

        Args:
            changes: Fields with other values.

        Raises:
            ValueError: As for the constructor.
        """
        return cls(**{"planner": "paper", "update_norm": "as_is", **changes})

    @property
    def interval(self) -> int:
        """``observe_every``, or what it is by default."""
        if self.observe_every is not None:
            return self.observe_every
        counts = (count for count in range(1, 16) if self.observe_until % count == 0)
        return self.observe_until // min(counts, key=lambda count: abs(count - 8))

    @property
    def lock_step(self) -> int:
        """The step at which the first plan locks, ``observe_until + transition_steps``."""
        return self.observe_until + self.transition_steps
