"""One start, which several rows share, and their ends."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from amo_dist import Muon, MuonConfig, Schedule, param_groups
from amo_dist.schedule.polar_express import schedule_for
from benchmarks.plan_quality.data import Corpus, batches
from benchmarks.plan_quality.model import Architecture, Decoder
from benchmarks.plan_quality.rows import BASE_ELL, BASE_STEPS
from benchmarks.plan_quality.settings import Settings
from benchmarks.plan_quality.spectra import momentum_spectra

VALIDATION_SEED = 2**31 - 1

Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """What all runs have in common that share a beginning.

    Attributes:
        architecture: Name of the model's architecture.
        seed: Seed of the weights and of the batches.
        norm: ``update_norm`` of `amo_dist.MuonConfig`.
        rate: Peak learning rate.
        switch: The last step of the uniform schedule.
        steps: Steps of the whole run.
        order: Sequences of a batch are added up in another order for each number but 0.
        ns_dtype: ``ns_dtype`` of `amo_dist.MuonConfig`; the model itself trains in float32.
    """

    architecture: str
    seed: int
    norm: str = "exact"
    rate: float = 8e-3
    switch: int = 100
    steps: int = 250
    order: int = 0
    ns_dtype: str = "float32"

    @property
    def key(self) -> str:
        """For names of files."""
        order = f"-order{self.order}" if self.order else ""
        steps = f"{self.steps}at{self.switch}"
        dtype = "" if self.ns_dtype == "float32" else f"-{self.ns_dtype}"
        return f"{self.architecture}-{self.seed}-{self.norm}-{self.rate:g}-{steps}{order}{dtype}"


@dataclasses.dataclass(slots=True)
class Snapshot:
    """A run at the switch.

    Attributes:
        state: State of the optimizer.
        spectra: At the steps observed, the last of them the switch.
    """

    start: Start
    model: Decoder
    state: Mapping[str, Any]
    spectra: dict[int, dict[str, Tensor]]


def matrix_shapes(model: Decoder) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Shapes and operator types of the matrices that Muon trains, by name."""
    (views, shapes) = ({}, {})
    for group in param_groups(model):
        for name, param in group["params"]:
            if name in group.get("matrix_views", {}):
                views[name] = group["matrix_views"][name][0].operator_type
                shapes[name] = (param.shape[0], param.shape[1])
    return shapes, views


def build(
    model: Decoder, schedules: Mapping[str, Schedule], start: Start, settings: Settings
) -> Muon:
    """Muon with a schedule for each matrix: each is an operator type of its own."""
    groups = param_groups(model, patterns={re.escape(name): name for name in schedules})
    config = MuonConfig(ns_dtype=start.ns_dtype, update_norm=start.norm, ns_guard_every=0)
    return Muon(groups, start.rate, settings.weight_decay, schedule=schedules, config=config)


def begin(start: Start, architecture: Architecture, corpus: Corpus, settings: Settings) -> Snapshot:
    """Train up to the switch with the uniform schedule."""
    torch.set_num_threads(1)
    torch.manual_seed(start.seed)
    model = Decoder(architecture)
    uniform = schedule_for(BASE_ELL, BASE_STEPS)
    optimizer = build(model, dict.fromkeys(matrix_shapes(model)[0], uniform), start, settings)
    spectra = _train(
        *(model, optimizer, start, corpus, settings),
        steps=range(1, start.switch + 1),
        order=start.order,
    )
    return Snapshot(start, model, optimizer.state_dict(), spectra)


def finish(
    snapshot: Snapshot,
    schedules: Mapping[str, Schedule],
    corpus: Corpus,
    settings: Settings,
    *,
    order: int = 0,
) -> Decoder:
    """Train on from a snapshot, which stays as it is, with other schedules.

    Args:
        snapshot: At the switch.
        schedules: Schedules by name of the matrix.
        corpus: Text of the snapshot's run.
        settings: Settings of the snapshot's run.
        order: Other than that of the start from the switch on, for noise.

    Returns:
        The trained model.
    """
    start, model = snapshot.start, copy.deepcopy(snapshot.model)
    optimizer = build(model, schedules, start, settings)
    for index, param in enumerate(optimizer.params_by_name.values()):
        for key, value in snapshot.state["state"][index].items():
            optimizer.state[param][key].copy_(value)
    _train(
        *(model, optimizer, start, corpus, settings),
        steps=range(start.switch + 1, start.steps + 1),
        order=order or start.order,
    )
    return model


def _train(
    model: Decoder,
    optimizer: Muon,
    start: Start,
    corpus: Corpus,
    settings: Settings,
    *,
    steps: range,
    order: int,
) -> dict[int, dict[str, Tensor]]:
    """Take some steps; returns spectra at even distances up to the switch."""
    observed = range(start.switch, 0, -max(start.switch // settings.observations, 1))
    stream = islice(
        batches(corpus.train, settings.batch, settings.sequence, start.seed),
        steps.start - 1,
        steps.stop - 1,
    )
    spectra = {}
    for step, batch in zip(steps, reordered(stream, order), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = start.rate * settings.rate_at(step, start.steps)
        take_step(model, optimizer, batch, settings)
        if step in observed:
            spectra[step] = momentum_spectra(momenta(optimizer))
        optimizer.zero_grad()
    return spectra


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Tensor], settings: Settings
) -> float:
    """Take one step with clipped gradients, which stay; returns ``model.loss`` before it."""
    loss: Tensor = model.loss(*batch)  # type: ignore[operator]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
    optimizer.step()
    return loss.item()


def reordered(stream: Iterator[Batch], order: int) -> Iterator[Batch]:
    """The same batches with their sequences in another order: sums are rounded otherwise."""
    generator = torch.Generator().manual_seed(order)
    for tokens, targets in stream:
        if order:
            places = torch.randperm(len(tokens), generator=generator)
            yield tokens[places], targets[places]
        else:
            yield tokens, targets


def momenta(optimizer: Muon) -> dict[str, Tensor]:
    """What the last step orthogonalized, by name: momentum with Nesterov's step."""
    by_name = {}
    for name, param in optimizer.params_by_name.items():
        state = optimizer.state[param]
        if "momentum_buffer" in state:
            assert param.grad is not None
            by_name[name] = param.grad + optimizer.config.momentum * state["momentum_buffer"]
    return by_name


def evaluate(model: Decoder, corpus: Corpus, settings: Settings) -> float:
    """Mean loss a token on batches that are the same for every run."""
    stream = batches(corpus.validation, settings.batch, settings.sequence, VALIDATION_SEED)
    return mean_loss(model, islice(stream, settings.validation_batches))


@torch.no_grad()
def mean_loss(model: nn.Module, stream: Iterable[Sequence[Tensor]]) -> float:
    """Mean of ``model.loss`` over batches."""
    return statistics.fmean(model.loss(*batch).item() for batch in stream)  # type: ignore[operator]


def digest(model: Decoder) -> str:
    """Digest of the bits of all parameters."""
    hasher = hashlib.sha256()
    for param in model.parameters():
        hasher.update(param.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()[:16]
