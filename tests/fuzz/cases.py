"""Random cases: what ranks end with, one process, and the slow twin."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from amo_dist import AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.optimizers.named import OPTIMIZER_NAMES, make_optimizer
from amo_dist.schedule.plan import Plan
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.twin import (
    LR,
    NORMED,
    PATTERNS,
    WEIGHT_DECAY,
    Twin,
    by_matrix,
    set_gradients,
    views_of,
)

LAYOUTS = {
    1: ("plain",),
    2: ("plain", "fsdp", "tp", "experts_1", "experts_2"),
    3: ("plain", "fsdp", "tp", "experts_1", "experts_2"),
    4: ("plain", "fsdp", "hsdp", "tp", "tp_fsdp"),
}
NAMES = tuple(name for name in OPTIMIZER_NAMES if name != "AdamW")
SIZES = (1, 2, 3, 5, 8, 13, 24)
EVEN = (2, 4, 8, 16, 24)  # FSDP over TP: torch pads nothing there
ADJUSTMENTS = ("match_rms_adamw", "original", "spectral")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its layout, its optimizer.

    Attributes:
        world_size: Number of ranks.
        layout: See `tests.distributed.models.make_model`; ``experts_<dim>`` shards experts there;
            or what makes a model on the ranks, or a model and its process group.
        name: Of the optimizer.
        shapes: By parameter.
        dtype: Of parameters.
        fields: Of the configuration.
        has_twin: Whether the twin knows all of the fields.
        head_dim: Rows of a head, each of which is a matrix; 0 for none.
        steps: Steps to train.
    """

    world_size: int
    layout: str | Callable[[], Any]
    name: str
    shapes: dict[str, tuple[int, ...]]
    dtype: str
    fields: dict[str, Any]
    has_twin: bool
    head_dim: int = 0
    steps: int = 6

    @property
    def config(self) -> MuonConfig:
        """Settings of the optimizer."""
        return (AMOConfig if self.name == "AMO" else MuonConfig)(**self.fields)

    @property
    def events(self) -> list[str]:
        """What it is, to be counted."""
        return [
            f"{self.name}",
            f"{self.layout} on {self.world_size}",
            "with twin" if self.has_twin else "without twin",
            f"wire {self.config.wire_dtype} of {self.config.ns_dtype}",
            "by head" if self.head_dim and any(map(_has_heads, self.shapes)) else "whole",
        ]


def draw(rng: random.Random) -> Case:
    """A random case."""
    world_size, name = rng.randint(1, 4), rng.choice(NAMES)
    layout = rng.choice(LAYOUTS[world_size])
    fields: dict[str, Any] = {
        "momentum": rng.choice((0.0, 0.5, 0.95)),
        "nesterov": rng.choice((True, False, 0.0, 0.5, 2.0)),
        # As printed, the coefficients of CANS diverge in bfloat16.
        "ns_dtype": "float32" if name == "Muon-CANS" else rng.choice(("auto", "bfloat16")),
        "wire_dtype": rng.choice((None, "float32", "bfloat16")),
        "ownership": rng.choice(("round_robin", "balanced")),
        "bucket_bytes": rng.choice((1, 256, 4096)),
        "ns_guard_every": rng.choice((0, 1, 2)),
    }
    if name == "AMO":
        fields |= _amo_fields(rng)
    has_twin = rng.random() < 0.7
    if not has_twin:
        fields |= {
            "adjust_lr": rng.choice(ADJUSTMENTS),
            "cautious_decay": rng.random() < 0.5,
            "bfloat16_params": rng.choice(("nearest", "master")),
        }
    dtype, shapes = rng.choice(("float32", "float32", "bfloat16")), _shapes(rng, layout)
    head_dim = rng.choice((0, 2, 3))
    for name_of, shape in shapes.items():
        if _has_heads(name_of) and head_dim:
            shapes[name_of] = (head_dim * min(shape[0], 8), shape[1])
        # Twice the rows of values would be queries and gates in turn.
        values = shapes.get(name_of.replace("wq", "wo"), (0, 0))[-1]
        if name_of.endswith("wq.weight") and shapes[name_of][0] == 2 * values:
            shapes[name_of] = (4 * values, shape[1])
    return Case(world_size, layout, name, shapes, dtype, fields, has_twin, head_dim)


def _has_heads(name: str) -> bool:
    return models.TYPES.get(name.split(".", 2)[-1]) in ("attn_q", "attn_k", "attn_v")


def _amo_fields(rng: random.Random) -> dict[str, Any]:
    planner: dict[str, Any] = rng.choice(({}, {}, {"planner": "paper"}))
    every = rng.choice((1, 2))
    return planner | {
        "observe_until": 2,
        "observe_every": every,
        "sample_size": rng.randint(1, 3),
        "transition_steps": rng.randint(1, 2),
        "budget_ratio": rng.choice((1.0, 1.2)),
        "shrinkage": rng.choice((0.5, 0.7)),
        "seed": rng.randrange(1000),
    }


def _shapes(rng: random.Random, layout: str) -> dict[str, tuple[int, ...]]:
    sizes = EVEN if layout == "tp_fsdp" else SIZES

    def draw_shape(num_dims: int) -> tuple[int, ...]:
        return tuple(rng.choice(sizes) for _ in range(num_dims))

    shapes: dict[str, tuple[int, ...]] = {}
    # Three types at most: the twin tries all allocations.
    for name in rng.sample(list(models.TYPES), rng.randint(1, 3)):
        for layer in range(rng.randint(1, 3)):
            shapes[f"layers.{layer}.{name}"] = draw_shape(2)
    if layout.startswith("experts") or (layout != "tp_fsdp" and rng.random() < 0.3):
        shapes["layers.0.moe.experts.w1"] = (rng.randint(1, 5), *draw_shape(2))
    if rng.random() < 0.7:
        shapes["norm.weight"] = draw_shape(1)
    if rng.random() < 0.5:
        empty = layout in ("plain", "fsdp") and rng.random() < 0.3
        shapes["tok_embeddings.weight"] = (0, 8) if empty else draw_shape(2)
    return shapes


End = tuple[dict[str, Tensor], dict[str, Any], float]
"""Whole parameters after the last step, the control state, bytes that were sent in that step."""


def _model(case: Case) -> tuple[nn.Module, Any]:
    """The model on this rank, and its process group."""
    if callable(case.layout):
        made = case.layout()
        return made if isinstance(made, tuple) else (made, None)
    if case.layout.startswith("experts"):
        placements = {"experts": [Shard(int(case.layout[-1]))], "": [Shard(0)]}
        mesh = models.world_mesh()
        model = models.build(models.place_all(case.shapes, placements, mesh))
    else:
        model = models.make_model(case.layout, case.shapes)
    is_ddp = case.layout == "plain" and dist.is_initialized()
    return model.to(getattr(torch, case.dtype)), dist.group.WORLD if is_ddp else None


def train(rank: int, world_size: int, case: Case) -> End:
    """The case of the harness."""
    logging.disable(logging.WARNING)  # plans of random models starve types, and say so
    try:
        return _train(case)
    finally:
        logging.disable(logging.NOTSET)


def _train(case: Case) -> End:
    model, group = _model(case)
    heads = case.head_dim or False
    optimizer = make_optimizer(
        case.name,
        param_groups(model, patterns=PATTERNS, per_head=heads, allow_unused=True),
        LR,
        WEIGHT_DECAY,
        config=case.config,
        process_group=group,
    )
    assert isinstance(optimizer, Muon)
    for step in range(1, case.steps + 1):
        set_gradients(model, step)
        optimizer.step()
    sent = optimizer.metrics()["exchange/sent_bytes"]
    return runs.weights(model), optimizer.control_state_dict(), sent


def check(case: Case, run_on: Ranks) -> dict[str, Any]:
    """Run a case; returns the control state in the end.

    Raises:
        AssertionError: Ranks, one process and the twin do not end alike.
    """
    alone = train(0, 1, dataclasses.replace(case, layout="plain"))
    ends = {"one process": alone}
    if case.world_size > 1 or callable(case.layout):
        results = run_on(case.world_size)(train, case)
        ends |= {f"rank {rank}": result for rank, result in enumerate(results)}
    expected: dict[str, Tensor] = {}
    first, control, _ = alone
    if case.has_twin:
        dtype = getattr(torch, case.dtype)
        twin = Twin(case.shapes, case.config, case.name, case.head_dim, dtype)
        for step in range(1, case.steps + 1):
            twin.step(step)
        expected = twin.oracle.params
        if twin.oracle.source is not None:
            assert Plan.from_dict(control["source"]["plan"]) == twin.oracle.source.plan
    assert first.keys() == case.shapes.keys()
    # A rank of a pipeline has some of them.
    assert first.keys() == set().union(*(params for params, *_ in [*ends.values()][1:] or [alone]))
    for who, (params, own, _) in ends.items():
        assert own == control, (who, case)
        for name, found in params.items():
            assert found.isfinite().all(), (who, name, case)
            is_matrix = views_of(name, case.shapes[name]) is not None
            _assert_alike(found, first[name], not is_matrix, case, f"{who}, {name}")
            if expected:
                # The factor to a norm may differ in its last bit in each step.
                rounds = not is_matrix or case.name in NORMED
                for key, matrix in by_matrix(name, found, case.head_dim).items():
                    _assert_alike(matrix, expected[key], rounds, case, f"{who} and twin, {key}")
    return control


def _assert_alike(found: Tensor, expected: Tensor, rounds: bool, case: Case, what: str) -> None:
    """To the bit; or within a rounding a step: AdamW's kernel rounds the end of a shard anew."""
    if not rounds or not found.numel():
        assert torch.equal(found, expected), (what, case)
        return
    scale = expected.abs().max().float() * torch.finfo(expected.dtype).eps
    difference = (found.float() - expected.float()).abs().max()
    assert difference <= case.steps * scale, (what, case)


def trial(rng: random.Random, run_on: Ranks) -> list[str]:
    """Check a random case; returns what it was."""
    case = draw(rng)
    check(case, run_on)
    return case.events
