"""Settings of the optimizers, and the names of operator types."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

__version__ = "0.2.0"

# Types of a dense decoder, in their declared order.
OPERATOR_TYPES = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_gate", "mlp_up", "mlp_down")


def sort_operator_types(operator_types: Iterable[str]) -> tuple[str, ...]:
    """Put operator types in the order in which plans and reports list them and break ties.

    Args:
        operator_types: Names; duplicates are dropped.

    Returns:
        The types of ``OPERATOR_TYPES`` in their declared order, then the others alphabetically.
    """
    order = {name: index for index, name in enumerate(OPERATOR_TYPES)}
    return tuple(sorted(set(operator_types), key=lambda name: (order.get(name, len(order)), name)))


# Coefficients ``(a, b, c)`` of one Newton-Schulz step, ``p(x) = a x + b x^3 + c x^5``.
Triple: TypeAlias = tuple[float, float, float]

# Region of a tensor: half-open ``(start, stop)`` per dim.
Box: TypeAlias = tuple[tuple[int, int], ...]

# Most Newton-Schulz steps of a type; rounding dominates the error long before.
MOST_STEPS = 100

# Values of ``nesterov``, for errors.
NESTEROV = "true, false or a number in [0, 10]"

# Scalings of a matrix before the first step.
PRECONDITIONERS = ("frobenius", "aol")

# Values of the settings that have few.
_CHOICES: Mapping[str, Sequence[object]] = {
    "ns_dtype": ("auto", "bfloat16", "float16", "float32", "float64"),
    "update_norm": ("as_is", "exact"),
    "adjust_lr": ("match_rms_adamw", "original", "spectral"),
    "cautious_decay": (False, True),
    "bfloat16_params": ("nearest", "master"),
    # Matrices travel before they are scaled, when 1e-20 would vanish in float16.
    "wire_dtype": (None, "bfloat16", "float32", "float64"),
    "ownership": ("balanced", "round_robin"),
    "ns_kernels": ("auto", "torch", "quack"),
    "nonfinite": ("error", "skip_step"),
    "on_config_change": ("error", "keep_checkpoint", "replan"),
    "planner": ("measured", "paper"),
}


# Bounded in length and depth: the state of a damaged file may be long, or nested past recursion.
_bounded = reprlib.Repr()
_bounded.maxlevel, _bounded.maxstring, _bounded.maxother = 3, 120, 120
_bounded.maxdict = _bounded.maxlist = _bounded.maxtuple = 16


def fail(field: str, value: object, expected: str) -> NoReturn:
    """Raise the ``ValueError`` for one field: what was found and what was expected."""
    raise ValueError(f"{field}: found {_bounded.repr(value)}, expected {expected}")


def require(condition: bool, field: str, value: object, expected: str) -> None:
    """Raise the ``ValueError`` of a field, unless a condition holds; prints the value as it is."""
    if not condition:
        raise ValueError(f"{field}: found {value}, expected {expected}")


def _require_int(field: str, value: object, minimum: int, maximum: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    most = "" if maximum is None else f" and <= {maximum}"
    if not (is_int and minimum <= value and (maximum is None or value <= maximum)):  # type: ignore[operator]
        fail(field, value, f"an integer >= {minimum}{most}")


def _require_real(field: str, value: object, expected: str, low: float, high: float) -> None:
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_real and math.isfinite(value) and low <= value <= high):  # type: ignore[arg-type, operator]
        fail(field, value, expected)


_Config = TypeVar("_Config", bound="MuonConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Settings of every optimizer of the Muon family: the update, the exchange and the guards.

    Each field can be set from TOML under the same name. A parameter group may set its own
    ``momentum`` and ``nesterov``.

    Attributes:
        momentum: Decay of the momentum buffer B, which takes the gradient G: ``B = momentum * B +
            G``; in [0, 1).
        nesterov: Matrix to orthogonalize: ``G + c * B`` for a number ``c`` in [0, 10], which true
            sets to ``momentum``; ``B`` for false.
        ns_dtype: Dtype of the Newton-Schulz iterates and products, a name or PyTorch's own.
            ``auto``: ``bfloat16``, or ``float32`` on a CPU without units for bfloat16 (AVX512-BF16,
            AMX-BF16, Arm's BF16), which takes many times as long for it; a run that resumes keeps
            that of its checkpoint.
        update_norm: Frobenius norm of the orthogonalized matrix: ``as_is`` keeps the result of
            Newton-Schulz, which is smaller after fewer steps; ``exact`` scales it to the norm of an
            exact polar factor, ``sqrt(min(m, n))``, by a factor of at most 2. AMO's default is
            ``exact``: with ``as_is``, fewer steps also shrink the update, like a lower learning
            rate. AdaMuon and NorMuon normalize their update again after that.
        adjust_lr: Scale of the update of a matrix with m outputs and n inputs, for learning rates
            tuned for another optimizer: ``match_rms_adamw`` = ``0.2 * sqrt(max(m, n))``;
            ``original`` (Jordan's Muon) = ``sqrt(max(1, m/n))``; ``spectral`` = ``sqrt(m/n)``.
        cautious_decay: Whether to decay a weight of a matrix only if its update has the sign of the
            weight.
        bfloat16_params: Rounding of updated bfloat16 parameters, those of AdamW included.
            ``nearest``: round to the nearest value; ``master``: keep float32 master weights, whose
            difference from the parameter is optimizer state.
        wire_dtype: Dtype in which ranks send matrices: momentum to the owner, and results back; a
            name or PyTorch's own. None: ``ns_dtype``, or ``bfloat16`` if ``ns_dtype`` is
            ``float16``, because momentum can overflow float16.
        ownership: Assignment of matrices to owner ranks. ``balanced``: in the order of their flops,
            the greatest first, each to the rank with the least work so far; ``round_robin``: to the
            ranks in turn.
        bucket_bytes: Bytes of the matrices, about, that one owner gathers at once; with r replicas
            (HSDP, DDP) an r-th of them, as it receives the results of all. A larger matrix is sent
            alone. Smaller buckets need less memory and overlap better, larger ones need fewer
            launches.
        ns_kernels: Library that computes the matrix products of Newton-Schulz on CUDA: ``torch``;
            ``quack``, the symmetric products of quack-kernels (install the extra ``quack``), for
            bfloat16 or float16 and compute capability 9.0 or newer; ``auto``: ``quack`` if it can
            run, else ``torch``. Not run on a GPU yet.
        nonfinite: Reaction to a NaN or inf in a gradient on any rank: all ranks raise an error
            (``error``) or skip the step (``skip_step``).
        ns_guard_every: Optimizer steps between two measurements of a residual. Each measures one
            orthogonalized matrix: in step 1 the largest, then all in turn. AMO warns of a residual
            above 1.1. 0: no measurements.
        on_config_change: Reaction if a checkpoint was saved with other settings, and they change
            results: ``error``; ``keep_checkpoint`` continues with the settings of the checkpoint,
            but cannot keep another ``bfloat16_params``; ``replan`` continues with those of this
            run, and AMO drops a plan that other settings made.

    Raises:
        ValueError: A field has an invalid value; the message has the field, the value found and the
            expected ones.
    """

    momentum: float = 0.95
    nesterov: bool | float = True
    ns_dtype: str = "auto"
    update_norm: str = "as_is"
    adjust_lr: str = "match_rms_adamw"
    cautious_decay: bool = False
    bfloat16_params: str = "nearest"
    wire_dtype: str | None = None
    ownership: str = "balanced"
    bucket_bytes: int = 128 * 2**20
    ns_kernels: str = "auto"
    nonfinite: str = "error"
    ns_guard_every: int = 100
    on_config_change: str = "error"

    def __post_init__(self) -> None:
        _require_real("momentum", self.momentum, "a number in [0, 1)", 0.0, math.nextafter(1, 0))
        if not isinstance(self.nesterov, bool):
            _require_real("nesterov", self.nesterov, NESTEROV, 0.0, 10.0)
        for field in ("ns_dtype", "wire_dtype"):  # PyTorch's own dtypes stand for their names
            if (value := getattr(self, field)) is not None:
                object.__setattr__(self, field, str(value).removeprefix("torch."))
        for field, choices in _CHOICES.items():
            value = getattr(self, field, choices[0])
            # Identity tells true from 1, and equality names that were read from a file.
            is_name = isinstance(value, str) and value in choices
            if not is_name and not any(value is choice for choice in choices):
                fail(field, value, f"one of {', '.join(map(repr, choices))}")
        _require_int("bucket_bytes", self.bucket_bytes, 1)
        if self.wire_dtype == "float64" and self.ns_dtype != "float64":
            expected = f"no wider than float32 with ns_dtype = {self.ns_dtype!r}"
            fail("wire_dtype", self.wire_dtype, expected)
        _require_int("ns_guard_every", self.ns_guard_every, 0)

    @property
    def update_factor(self) -> float:
        """Factor of the update besides the one that ``adjust_lr`` takes from its shape."""
        return 0.2 if self.adjust_lr == "match_rms_adamw" else 1.0

    def in_force(self: _Config, *, has_bfloat16: bool) -> _Config:
        """Settings with the dtypes in force, in place of ``auto`` and None.

        Args:
            has_bfloat16: Whether the device computes in bfloat16.
        """
        ns_dtype = self.ns_dtype
        if ns_dtype == "auto":
            ns_dtype = "bfloat16" if has_bfloat16 else "float32"
        wire_dtype = self.wire_dtype or ("bfloat16" if ns_dtype == "float16" else ns_dtype)
        return dataclasses.replace(self, ns_dtype=ns_dtype, wire_dtype=wire_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AMOConfig(MuonConfig):
    """Settings of Adaptive Muon Orthogonalization: observe, plan, transition, lock.

    The defaults of observation and transition are the AMO paper's for Qwen3-0.6B and
    Llama-3.1-760M; that of ``planner`` is not.

    Attributes:
        update_norm: Norm of the orthogonalized matrix, as in `MuonConfig`; with another default.
        observe_until: ``T_obs``: optimizer step of the last observation, in which AMO also makes
            the plan.
        observe_every: Optimizer steps between observations, a divisor of ``observe_until``. None:
            AMO makes eight observations, or, if 8 does not divide ``observe_until``, the number
            from 4 to 15 closest to eight that does.
        sample_size: Matrices of each operator type in one observation, or all if there are fewer.
        planner: Objective of the plan. ``measured``: least squared error of the update, computed
            from the singular values of the sampled matrices, within a budget of flops; with a
            ``budget_ratio`` of 1 or more this error is never above that of the uniform schedule.
            ``paper``: least error at one singular value per type, ``ell_target``, within a budget
            of steps, by the greedy search of the AMO paper, which can give a hard type too few
            steps.
        shrinkage: ``alpha``: ``ell_target = alpha * ell_robust + (1 - alpha) * base_ell``, where
            ``ell_robust`` is the median of the observed ``ell``; in [0, 1]. Only ``planner =
            paper`` reads it.
        transition_steps: ``Delta``: optimizer steps of the transition from the uniform schedule to
            the plan; at least 1.
        base_steps: ``T_base``: Newton-Schulz steps of every operator type before the plan.
        base_ell: ``ell_base``: smallest singular value for which the coefficients of the uniform
            schedule are made; in (0, 0.99].
        budget_ratio: Budget of the plan as a multiple of the uniform schedule: of its flops with
            ``planner = measured``, of its steps with ``paper``; in (0, 20].
        min_steps: Fewest Newton-Schulz steps of a type. If the budget or the uniform schedule needs
            fewer, AMO lowers the limit and warns.
        max_steps: Most Newton-Schulz steps of a type. If the budget or the uniform schedule needs
            more, AMO raises the limit and warns.
        seed: Seed of the random choice of observed matrices.
    """

    update_norm: str = "exact"
    observe_until: int = 1200
    observe_every: int | None = None
    sample_size: int = 8
    planner: str = "measured"
    shrinkage: float = 0.7
    transition_steps: int = 300
    base_steps: int = 5
    base_ell: float = 1e-3
    budget_ratio: float = 1.0
    min_steps: int = 3
    max_steps: int = 7
    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_int("observe_until", self.observe_until, 1)
        if self.observe_every is not None:
            _require_int("observe_every", self.observe_every, 1)
            if self.observe_until % self.observe_every:
                expected = f"a divisor of observe_until = {self.observe_until}"
                fail("observe_every", self.observe_every, expected)
        elif 4 * self.interval > max(self.observe_until, 4):
            expected = "a multiple of a number from 4 to 15, or a value of observe_every beside it"
            fail("observe_until", self.observe_until, expected)
        _require_int("sample_size", self.sample_size, 1)
        _require_real("shrinkage", self.shrinkage, "a number in [0, 1]", 0.0, 1.0)
        _require_int("transition_steps", self.transition_steps, 1)
        _require_int("base_steps", self.base_steps, 1, MOST_STEPS)
        _require_real("base_ell", self.base_ell, "a number in (0, 0.99]", 5e-324, 0.99)
        _require_real("budget_ratio", self.budget_ratio, "a number in (0, 20]", 5e-324, 20.0)
        _require_int("min_steps", self.min_steps, 1, MOST_STEPS)
        _require_int("max_steps", self.max_steps, self.min_steps, MOST_STEPS)
        _require_int("seed", self.seed, 0)

    @property
    def interval(self) -> int:
        """``observe_every``, or its default."""
        if self.observe_every is not None:
            return self.observe_every
        counts = (count for count in range(1, 16) if self.observe_until % count == 0)
        return self.observe_until // min(counts, key=lambda count: abs(count - 8))

    @property
    def lock_step(self) -> int:
        """Step at which the plan locks, ``observe_until + transition_steps``."""
        return self.observe_until + self.transition_steps

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, with the interval in force as ``observe_every``."""
        return {**super().to_dict(), "observe_every": self.interval}

    @classmethod
    def for_run(cls, num_steps: int, **changes: Any) -> AMOConfig:
        """Make settings that fit a run's length.

        As in the AMO paper, eight observations fill two fifths of the run, and the transition takes
        a tenth, at most 300 steps.

        Args:
            num_steps: Optimizer steps of the run, at least 20.
            changes: Values of other fields.

        Raises:
            ValueError: A field has an invalid value.
        """
        _require_int("num_steps", num_steps, 20)
        fitting = {
            "observe_until": 8 * (num_steps // 20),
            "transition_steps": min(300, num_steps // 10),
        }
        return cls(**{**fitting, **changes})

    @classmethod
    def paper(cls, **changes: Any) -> AMOConfig:
        """Make settings whose plans are those of the AMO paper.

        Args:
            changes: Values of other fields.

        Raises:
            ValueError: A field has an invalid value.
        """
        return cls(**{"planner": "paper", "update_norm": "as_is", **changes})
