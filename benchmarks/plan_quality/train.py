"""One run: a model of an architecture, from a seed, with an optimizer."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from amo_dist import Muon, param_groups
from amo_dist.config import sort_operator_types
from amo_dist.engine.world import World
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.budget import ns_step_flops
from amo_dist.schedule.types import MatrixInfo
from benchmarks.plan_quality.data import Corpus, batches
from benchmarks.plan_quality.model import Architecture, Decoder
from benchmarks.plan_quality.settings import Settings
from benchmarks.plan_quality.variants import Variant, build, learning_rate

BASE_STEPS = 5
"""Flops are told relative to so many Newton-Schulz steps of every matrix."""
_VALIDATION_SEED = 2**31 - 1

Batch = tuple[Tensor, Tensor]


class SpectraTracker:
    """Keeps the singular values of every matrix's momentum; a tracker of `amo_dist.Muon`.

    Args:
        interval: Optimizer steps from one record to the next.
    """

    def __init__(self, interval: int) -> None:
        self.spectra: dict[int, dict[str, Tensor]] = {}
        """By step and name: float64, descending, over the Frobenius norm."""
        self.registry: tuple[MatrixInfo, ...] = ()
        self._interval = interval
        self._measured: dict[str, Tensor] = {}

    def is_due(self, step: int) -> bool:
        return step % self._interval == 0

    def measure(self, name: str, momentum: Tensor, result: Tensor) -> None:
        values = torch.linalg.svdvals(momentum.double())
        self._measured[name] = values / torch.linalg.vector_norm(values)

    def collect(self, step: int, world: World) -> None:
        self.registry = tuple(world.registry)
        self.spectra[step], self._measured = self._measured, {}

    def save(self, path: Path) -> None:
        registry = [dataclasses.astuple(matrix) for matrix in self.registry]
        record = {"registry": registry, "spectra": self.spectra}
        write_whole(path, lambda part: torch.save(record, part))


def load_spectra(path: Path) -> tuple[dict[int, dict[str, Tensor]], list[MatrixInfo]]:
    """What `SpectraTracker.save` wrote: singular values by step and name, and the registry."""
    record = torch.load(path, weights_only=True)
    registry = [MatrixInfo(name, tuple(shape), kind) for name, shape, kind in record["registry"]]
    return record["spectra"], registry


def run(
    architecture: Architecture,
    variant: Variant,
    seed: int,
    corpus: Corpus,
    settings: Settings,
    *,
    spectra: Path | None = None,
) -> dict[str, Any]:
    """Train once, on one thread.

    Args:
        architecture: Of the model.
        variant: The optimizer.
        seed: Of the weights and of the batches.
        corpus: Training and validation tokens.
        settings: Length and rates.
        spectra: File for the singular values of momentum; none are taken without it.

    Returns:
        JSON values: losses, flops, the plan. All but ``seconds`` are the same in each run.
    """
    start = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Decoder(architecture)
    optimizer = build(variant, param_groups(model), settings)
    tracker = None
    if spectra is not None:
        assert isinstance(optimizer, Muon)
        optimizer.tracker = tracker = SpectraTracker(settings.spectra_every)
    held_out = validation_set(corpus, settings)
    stream = batches(corpus.train, settings.batch, settings.sequence, seed)
    train_loss, validation_loss, flops = [], {}, []
    for step, batch in enumerate(islice(stream, settings.steps), start=1):
        set_rate(optimizer, learning_rate(variant, settings) * settings.rate_at(step))
        train_loss.append(train_step(model, optimizer, batch, settings.max_norm))
        flops.append(relative_flops(optimizer, step))
        if settings.validates(step):
            validation_loss[str(step)] = evaluate(model, held_out)
    if tracker is not None and spectra is not None:
        tracker.save(spectra)
    locked = flops[settings.lock_step - 1 :]
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "learning_rate": learning_rate(variant, settings),
        "validation_loss": validation_loss,
        "flops": sum(flops) / len(flops),
        "flops_locked": sum(locked) / len(locked),
        **plan_of(optimizer, settings.steps),
        "train_loss": [round(loss, 5) for loss in train_loss],
    }


def train_step(
    model: Decoder, optimizer: torch.optim.Optimizer, batch: Batch, max_norm: float
) -> float:
    """One step; the loss before it."""
    loss = loss_of(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def loss_of(model: Decoder, batch: Batch) -> Tensor:
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def validation_set(corpus: Corpus, settings: Settings) -> list[Batch]:
    """The same batches for every run."""
    stream = batches(corpus.validation, settings.batch, settings.sequence, _VALIDATION_SEED)
    return list(islice(stream, settings.validation_batches))


@torch.no_grad()
def evaluate(model: Decoder, held_out: Sequence[Batch]) -> float:
    """Mean loss a token."""
    return sum(loss_of(model, batch).item() for batch in held_out) / len(held_out)


def relative_flops(optimizer: torch.optim.Optimizer, step: int) -> float:
    """Newton-Schulz flops of one step over those of `BASE_STEPS` steps of every matrix."""
    if not isinstance(optimizer, Muon):
        return 0.0
    assert optimizer.world is not None
    policy, spent, base = optimizer.policy, 0, 0
    schedules = policy.schedules(step)
    for matrix in optimizer.world.registry:
        cost = ns_step_flops(*matrix.shape)
        spent += schedules[policy.group_of(matrix.name)].num_steps * cost
        base += BASE_STEPS * cost
    return spent / base


def plan_of(optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Newton-Schulz steps by group at a step, and AMO's plan."""
    if not isinstance(optimizer, Muon):
        return {"allocation": {}, "plan": None}
    schedules, policy = optimizer.policy.schedules(step), optimizer.policy
    plan = policy.plan if isinstance(policy, AMOPolicy) else None
    return {
        "allocation": {name: schedules[name].num_steps for name in sort_operator_types(schedules)},
        "plan": None if plan is None else plan.to_dict(),
    }


def write_whole(path: Path, write: Any) -> None:
    """Call ``write`` with a path beside, then rename: the file is there whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    write(part)
    part.replace(path)


def write_json(path: Path, record: Any) -> None:
    text = json.dumps(record, indent=1)
    write_whole(path, lambda part: part.write_text(text + "\n"))
