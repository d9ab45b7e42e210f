"""The slow twin: AMO on one process, written as the algorithm reads, without any exchange.

It shares with the package the kernels and the composer, which have tests of their own, and nothing
else: phases, draws, medians, plan and transition are spelled out again.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.kernels.spectrum import distances, spectrum
from amo_dist.schedule.polar_express import compose, simulate
from amo_dist.schedule.types import Schedule

SAFETY = 1.01
ORDER = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_gate", "mlp_up", "mlp_down")


def plain_greedy(
    curves: Sequence[Mapping[int, float]], budget: int, base_steps: int
) -> tuple[int, ...]:
    """The passes as the AMO paper has them: the best of all pairs, the first of equal ones.

    Args:
        curves: The error of each operator type by number of steps.
        budget: Steps of all types together.
        base_steps: Where each type begins.
    """
    low, high = min(curves[0]), max(curves[0])
    steps = [min(max(base_steps, low), high)] * len(curves)

    def gain(i: int) -> float:
        return curves[i][steps[i]] - curves[i][steps[i] + 1]

    def loss(j: int) -> float:
        return curves[j][steps[j] - 1] - curves[j][steps[j]]

    def takers() -> list[int]:
        return [i for i in range(len(curves)) if steps[i] < high]

    def givers() -> list[int]:
        return [j for j in range(len(curves)) if steps[j] > low]

    while sum(steps) < budget:
        steps[max(takers(), key=gain)] += 1
    while sum(steps) > budget:
        steps[min(givers(), key=loss)] -= 1
    while True:
        pairs = [(gain(i) - loss(j), i, j) for i in takers() for j in givers() if i != j]
        best = max(pairs, key=lambda pair: pair[0], default=(0.0, 0, 0))
        if not best[0] > 1e-12:
            return tuple(steps)
        steps[best[1]] += 1
        steps[best[2]] -= 1


class Oracle:
    """Trains a dict of plain tensors in place."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        types: Mapping[str, str],
        config: MuonConfig,
        *,
        lr: float,
        weight_decay: float,
        coefficients: tuple[tuple[float, float, float], ...] = (),
        schedules: Mapping[str, Schedule] | None = None,
    ) -> None:
        self.params = dict(params)
        self.types = dict(types)
        self.config = config.on_device("cpu")
        self.lr, self.weight_decay = lr, weight_decay
        self.fixed = coefficients
        self.schedules = dict(schedules or {})  # of each matrix, where they are fixed
        self.buffers = {name: torch.zeros_like(params[name], dtype=torch.float32) for name in types}
        rest = [param for name, param in params.items() if name not in types]
        self.adamw = (
            torch.optim.AdamW(
                rest, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay, foreach=False
            )
            if rest
            else None
        )
        self.step_number = 0
        self.observations: list[dict[str, float]] = []
        self.distances: list[dict[str, list[float]]] = []  # of all trials, by observation
        self.allocation: dict[str, int] = {}
        self.targets: dict[str, float] = {}
        self.planned_at: int | None = None
        found = set(types.values())
        self.order = [t for t in ORDER if t in found] + sorted(found - set(ORDER))

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor | None]) -> None:
        self.step_number += 1
        schedules = self._schedules()
        sample = self._sample()
        sampled: dict[str, Tensor] = {}
        for name, operator_type in self.types.items():
            grad = grads.get(name)
            if grad is None:
                continue
            momentum = self._momentum(name, grad)
            if name in sample:
                sampled[name] = momentum
            dtype, wire = (
                getattr(torch, name) for name in (self.config.ns_dtype, str(self.config.wire_dtype))
            )
            norm_scale = 1.0 if self.fixed else SAFETY
            schedule = self.schedules.get(name) or Schedule(schedules[operator_type], norm_scale)
            update = orthogonalize(
                self._direction(momentum).to(wire),
                schedule.coefficients,
                dtype=dtype,
                norm_scale=schedule.norm_scale,
                preconditioner=schedule.preconditioner,
            )
            param = self.params[name]
            update, scale = self._scaled(name, self._sized(update).to(wire).float())
            new = param.float() * (1 - self.lr * self.weight_decay)
            param.copy_(new - update * (self.lr * scale))
        self._step_adamw(grads)
        if sample:
            self._observe(sampled)

    def _direction(self, momentum: Tensor) -> Tensor:
        return momentum

    def _sized(self, update: Tensor) -> Tensor:
        if self.config.update_norm == "exact":
            for one in update.unbind() if update.dim() == 3 else [update]:
                wide = torch.promote_types(one.dtype, torch.float32)
                norm = torch.linalg.vector_norm(one, dtype=wide)
                exact = math.sqrt(min(one.shape))
                one *= exact / max(norm, torch.tensor(exact / 2, dtype=wide))
        return update

    def _scaled(self, name: str, update: Tensor) -> tuple[Tensor, float]:
        return update, self.config.update_factor * math.sqrt(max(update.shape))

    def _momentum(self, name: str, grad: Tensor) -> Tensor:
        buffer = self.buffers[name]
        wide = torch.float64 if buffer.dtype == torch.float64 else torch.float32
        buffer.copy_(buffer.to(wide) * self.config.momentum + grad.to(wide))  # rounded once
        if self.config.nesterov is False:
            return buffer
        nesterov = self.config.nesterov
        coefficient = self.config.momentum if nesterov is True else nesterov
        return buffer.to(wide) * coefficient + grad.to(wide)

    def _step_adamw(self, grads: Mapping[str, Tensor | None]) -> None:
        if self.adamw is None:
            return
        for name, param in self.params.items():
            if name not in self.types:
                param.grad = grads.get(name)
        self.adamw.step()

    # -- what AMO adds

    def _sample(self) -> set[str]:
        config = self.config
        if not isinstance(config, AMOConfig):
            return set()
        step = self.step_number
        if step % config.interval or step > config.observe_until:
            return set()
        drawn: set[str] = set()
        for operator_type in self.order:
            names = sorted(name for name, kind in self.types.items() if kind == operator_type)
            key = hashlib.sha256(f"{config.seed}/{step}/{operator_type}".encode()).digest()
            generator = random.Random(int.from_bytes(key, "big"))
            for _ in range(min(config.sample_size, len(names))):
                # The rest of a Fisher-Yates shuffle: the gap is filled from the front.
                index = int(generator.random() * len(names))
                drawn.add(names[index])
                names[index] = names[0]
                names = names[1:]
        return drawn

    def _trials(self, config: AMOConfig) -> list[tuple[int, float]]:
        """Every number of steps with every ell: ten a decade, to three digits, and the base."""
        decades = {
            float(f"{10 ** (i / 10):.3g}e{power}") for power in range(-5, -1) for i in range(10)
        }
        ells = sorted({*decades, 0.1, config.base_ell})
        return [(k, ell) for k in range(config.min_steps, config.max_steps + 1) for ell in ells]

    def _observe(self, sampled: Mapping[str, Tensor]) -> None:
        config = self.config
        assert isinstance(config, AMOConfig)
        trials = self._trials(config)
        table = torch.zeros(len(trials), config.max_steps, 3, dtype=torch.float64)
        table[:, :, 0] = 1.0
        for i, (k, ell) in enumerate(trials):
            table[i, :k] = torch.tensor(compose(min(SAFETY * ell, 1.0), k), dtype=torch.float64)
        by_type: dict[str, list[list[float]]] = {}
        for name in sorted(sampled):
            exact = config.update_norm == "exact"
            ell, sigma, _ = spectrum(sampled[name])
            errors = distances(sigma / SAFETY, table, exact_norm=exact)
            row = [self._weight(name), ell.item(), *errors.tolist()]
            by_type.setdefault(self.types[name], []).append(row)
        self.observations.append(
            {kind: statistics.median(v[1] / SAFETY for v in rows) for kind, rows in by_type.items()}
        )
        self.distances.append({kind: self._mean(rows) for kind, rows in by_type.items()})
        if self.step_number < config.observe_until:
            return
        for kind in self.order:
            robust = statistics.median(found[kind] for found in self.observations)
            alpha = Fraction(str(config.shrinkage))  # exact, and rounded once
            target = alpha * Fraction(robust) + (1 - alpha) * Fraction(config.base_ell)
            self.targets[kind] = float(target)
        if config.planner == "measured":
            self.allocation, self.targets = self._brute_force_measured(config)
        else:
            budget = Fraction(str(config.budget_ratio)) * len(self.order) * config.base_steps
            curves = [
                {
                    k: 1 - simulate(SAFETY * self.targets[kind], k)
                    for k in range(config.min_steps, config.max_steps + 1)
                }
                for kind in self.order
            ]
            steps = plain_greedy(curves, math.floor(budget + Fraction(1, 2)), config.base_steps)
            self.allocation = dict(zip(self.order, steps, strict=True))
        self.planned_at = self.step_number

    def _weight(self, name: str) -> float:
        """The squared norm of an exact update, but for the learning rate."""
        shape = self.params[name].shape
        scale = self.config.update_factor * math.sqrt(max(shape))
        return scale * scale * min(shape)

    def _mean(self, rows: list[list[float]]) -> list[float]:
        """Of the distances of some matrices, each by its weight over the greatest of these."""
        most = max(row[0] for row in rows)
        shares = [row[0] / most for row in rows]
        return [
            math.fsum(share * value for share, value in zip(shares, column, strict=True))
            / math.fsum(shares)
            for column in list(zip(*rows, strict=True))[2:]
        ]

    def _brute_force_measured(self, config: AMOConfig) -> tuple[dict[str, int], dict[str, float]]:
        """Of all allocations within the budget the best, and the best ell of each type."""
        trials, best = self._trials(config), dict[str, dict[int, tuple[float, float]]]()
        for kind in self.order:
            sums = [0.0] * len(trials)
            for found in self.distances:  # in the order of steps: sums of floats depend on it
                sums = [a + b for a, b in zip(sums, found[kind], strict=True)]
            best[kind] = {}
            for (k, ell), total in zip(trials, sums, strict=True):
                pair = total / len(self.distances), -ell  # of equal ones the greater ell
                best[kind][k] = min(best[kind].get(k, pair), pair)
        members = [[n for n, kind in self.types.items() if kind == one] for one in self.order]
        costs = [sum(self._flops(name) for name in names) for names in members]
        ceiling = Fraction(str(config.budget_ratio)) * config.base_steps * sum(costs)
        weights = [math.fsum(map(self._weight, names)) for names in members]
        shares = [weight / math.fsum(weights) for weight in weights]
        ranked: list[tuple[float, tuple[int, ...]]] = []
        steps = range(config.min_steps, config.max_steps + 1)
        losses = [
            {k: share * best[kind][k][0] for k in steps}
            for kind, share in zip(self.order, shares, strict=True)
        ]
        for choice in itertools.product(steps, repeat=len(self.order)):
            if sum(k * cost for k, cost in zip(choice, costs, strict=True)) <= ceiling:
                ranked.append((math.fsum(map(dict.__getitem__, losses, choice)), choice))
        # Some differ by less than a rounded sum can tell.
        best_loss = min(ranked)[0]
        near = [choice for loss, choice in ranked if loss <= best_loss + 1e-12]

        def exact(choice: tuple[int, ...]) -> Fraction:
            return sum(map(Fraction, map(dict.__getitem__, losses, choice)), Fraction(0))

        least = min(near, key=lambda choice: (exact(choice), choice))
        allocation = dict(zip(self.order, least, strict=True))
        return allocation, {kind: -best[kind][k][1] for kind, k in allocation.items()}

    def _flops(self, name: str) -> int:
        short, long = sorted(self.params[name].shape)
        return 2 * short * short * (2 * long + short)

    def _schedules(self) -> dict[str, tuple[tuple[float, float, float], ...]]:
        config = self.config
        if not isinstance(config, AMOConfig):
            return dict.fromkeys(self.order, self.fixed or ((1.0, 0.0, 0.0),))
        state = self._state(config)
        return {kind: compose(SAFETY * ell, count) for kind, (count, ell) in state.items()}

    def _state(self, config: AMOConfig) -> dict[str, tuple[int, float]]:
        """Newton-Schulz steps and ell of each type at this step."""
        if self.planned_at is None or self.step_number <= self.planned_at:
            return dict.fromkeys(self.order, (config.base_steps, config.base_ell))
        u = min(self.step_number - self.planned_at, config.transition_steps)
        p = Fraction(u, config.transition_steps)
        base = config.base_steps
        exact = {kind: base + p * (self.allocation[kind] - base) for kind in self.order}
        ell = Fraction(config.base_ell)
        total = math.floor(sum(exact.values()) + Fraction(1, 2))
        counts = {kind: math.floor(value) for kind, value in exact.items()}
        by_remainder = sorted(self.order, key=lambda kind: counts[kind] - exact[kind])
        for kind in by_remainder[: total - sum(counts.values())]:
            counts[kind] += 1
        if config.planner == "measured":
            for kind, value in exact.items():
                to_end = abs(self.allocation[kind] - value) % 1  # to the next integer
                end = math.ceil if self.allocation[kind] > value else math.floor
                far = math.floor if self.allocation[kind] > value else math.ceil
                counts[kind] = (end if to_end <= Fraction(1, 2) else far)(value)
        return {
            kind: (
                counts[kind],
                float(ell + p * (Fraction(self.targets[kind]) - ell)),
            )
            for kind in self.order
        }


class NormedOracle(Oracle):
    """An update of a given Frobenius norm.

    The norm comes from a correctly rounded sum, the package's from one in integers: they agree to
    about ten digits, so that a factor in float32 may differ in its last bit.
    """

    moments: dict[str, Tensor]

    def _sized(self, update: Tensor) -> Tensor:
        return update

    def _moment(self, name: str, like: Tensor) -> Tensor:
        return self.__dict__.setdefault("moments", {}).setdefault(name, torch.zeros_like(like))

    def _normed(self, update: Tensor) -> tuple[Tensor, float]:
        norm = math.sqrt(math.fsum((update.double() ** 2).flatten().tolist()))
        wanted = self.config.update_factor * math.sqrt(update.numel())
        return update * (wanted / norm if norm else 0.0), 1.0


class AdaMuonOracle(NormedOracle):
    """AdaMuon: signs in, an elementwise second moment out."""

    def _direction(self, momentum: Tensor) -> Tensor:
        return momentum.sign()

    def _scaled(self, name: str, update: Tensor) -> tuple[Tensor, float]:
        decay, moment = self.config.momentum, self._moment(name, update)
        moment.copy_(moment * decay + update * update * (1 - decay))
        return self._normed(update / (moment.sqrt() + 1e-8))


class NorMuonOracle(NormedOracle):
    """NorMuon: a second moment of each row."""

    def _scaled(self, name: str, update: Tensor) -> tuple[Tensor, float]:
        moment = self._moment(name, update[:, :1])
        # In the unit of the package's exact sums, which shows where a row is almost nothing.
        unit = 2.0 ** (math.ceil(math.log2(4 * update.shape[1])) - 62)
        rows = update.double().tolist()
        means = [sum(round(x * x / unit) for x in row) * unit / len(row) for row in rows]
        moment.copy_(moment * 0.95 + torch.tensor(means).unsqueeze(1) * (1 - 0.95))
        return self._normed(update / (moment.sqrt() + 1e-8))
