"""Ranks that differ before a step: every rank raises, and names what differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist import AMO, Fused, Muon, MuonConfig, param_groups
from amo_dist.distributed.ranks import (
    gather_json,
)
from amo_dist.optimizers import muon
from amo_dist.schedule.coefficients import named_schedule
from amo_dist.schedule.source import Fixed
from amo_dist.schedule.types import MatrixInfo
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks, raised

WQ, WK = "layers.0.attention.wq.weight", "layers.0.attention.wk.weight"


def tensors_of(fault: str) -> dict[str, Tensor]:
    tensors = {name: models.initial(name, shape) for name, shape in models.shapes().items()}
    if fault == "name":
        tensors["layers.9.attention.wk.weight"] = tensors.pop(WK)
    elif fault == "missing":
        del tensors[WK]
    elif fault == "dtype":
        tensors[WK] = tensors[WK].to(torch.bfloat16)
    elif fault == "shape":
        tensors[WK] = tensors[WK].repeat(2, 1)
    return tensors


MISMATCHES = {
    "config": ["momentum = 0.95", "momentum = 0.9"],
    "cpu": ['ns_dtype = "float32"', 'ns_dtype = "bfloat16"'],
    "name": [f"rank 0 has {WK}", "rank 1 has layers.9.attention.wk"],
    "missing": [f"rank 0 has {WK}", "rank 1 has nothing"],
    "dtype": ["torch.float32", f"rank 1 has {WK}", "torch.bfloat16"],
    "shape": ["(3, 8)", f"rank 1 has {WK}", "(6, 8)"],
    "type": ["attn_k", f"rank 1 has {WK}", "attn_other"],
    "cut": ["attn_q", f"rank 1 has {WQ}", "cut by"],
    "layout": [f"rank 0 has {WQ}", "rank 1 has nothing"],
    "schedule": ["rank(s) 1 differ from rank 0"],
}
"""Parts of the error by what differs on the second rank."""


def disagree(rank: int, world_size: int) -> dict[str, str]:
    """Error of the first step of ranks of which the second one is at fault."""
    errors = {}
    for fault in MISMATCHES:
        own = fault if rank == 1 else ""
        model = models.build(tensors_of(own))
        patterns = {WK: "attn_other"} if own == "type" else {}
        if fault == "cut":
            parts = (("attn_q", 8), ("attn_v", 4))
            patterns = {WQ: Fused(parts, groups=2 if own else 1)}
        groups = param_groups(model, patterns=patterns)
        with mock.patch.object(muon, "has_bfloat16", lambda _, own=own: own == "cpu"):
            optimizer = Muon(
                groups,
                schedule="you" if own == "schedule" else "kj",
                config=MuonConfig(momentum=0.9 if own == "config" else 0.95),
                process_group=None if own == "layout" else dist.group.WORLD,
            )
        before = runs.weights(model)
        errors[fault] = raised(lambda m=model, o=optimizer: runs.train(m, o, 1, 1))  # type: ignore[misc]
        assert runs.equal(before, runs.weights(model))
    return errors


def test_what_differs_on_one_rank_is_named_on_all(run_on: Ranks) -> None:
    errors, *others = run_on(3)(disagree)
    assert others == [errors] * 2
    for fault, parts in MISMATCHES.items():
        assert errors[fault].startswith("RankMismatchError")
        assert [part for part in parts if part not in errors[fault]] == [], fault


def load_alone(rank: int, world_size: int) -> list[str]:
    """Errors of steps after one rank alone went to another state of the schedule."""
    (model, optimizer), (_, new) = (runs.make("fsdp", AMO) for _ in range(2))
    runs.train(model, optimizer, 1, 1)
    early = optimizer.control_state_dict()
    runs.train(model, optimizer, 2, 5)
    late = optimizer.control_state_dict()
    errors = []
    for own, state, ranks in (
        (optimizer, early, [1]),
        (optimizer, late, [1]),  # the same state; one rank alone would plan its exchange anew
        (optimizer, late, [0, 1]),
        (new, late, [1]),  # it has taken no step yet
        (new, late, [0]),
    ):
        if rank in ranks:
            own.load_control_state_dict(state)
        errors.append(raised(own.step))
    return errors


def test_a_load_on_one_rank_alone_is_an_error_not_a_hang(run_on: Ranks) -> None:
    errors, others = run_on(2)(load_alone)
    assert errors == others
    stale, anew, alike, first, second = errors
    assert all(error.startswith("RankMismatchError: ") for error in (stale, anew, first))
    assert "rank 0 has step 6; rank 1 has step 2" in stale
    assert "exchange plan" in anew
    assert (alike, second) == ("", "")


def no_matrices(rank: int, world_size: int, shapes: dict[str, tuple[int, ...]]) -> str:
    """As between stages of a pipeline: a rank may have none."""
    model = models.plain_model({"norm.weight": (8,)} if rank else shapes)
    optimizer = Muon(param_groups(model))
    return raised(lambda: runs.train(model, optimizer, 1, 1))


def test_a_rank_may_have_no_matrix_and_the_world_may_not(run_on: Ranks) -> None:
    assert run_on(2)(no_matrices, {WQ: (12, 8)}) == ["", ""]
    for error in run_on(2)(no_matrices, {"tok_embeddings.weight": (5, 8)}):
        assert "params: found no matrix among 1 parameters (" in error
        assert "allow_no_matrices=True" in error


class FailingSource(Fixed):
    """It cannot run on one rank."""

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("no fit")
        super().bind(registry)


def fail_to_bind(rank: int, world_size: int) -> str:
    model = models.make_model("fsdp", models.shapes())
    source = FailingSource({}, named_schedule("kj").schedule)
    optimizer = Muon(param_groups(model), schedule=source)
    return raised(lambda: runs.train(model, optimizer, 1, 1))


def test_a_source_that_fails_on_one_rank_fails_on_all(run_on: Ranks) -> None:
    errors = run_on(3)(fail_to_bind)
    assert errors[0].startswith("RuntimeError: ")
    assert "the schedules of these matrices failed on rank 1 in " in errors[0]
    assert errors[0].endswith(": ZeroDivisionError: no fit")
    assert errors == errors[:1] * 3


# ---------------------------------------------------------------- small messages


def texts(rank: int, world_size: int, own: list[str]) -> dict[int, Any]:
    same = gather_json({"of": "all"}, dist.group.WORLD)
    assert all(value is same[0] for value in same.values())  # parsed once
    return gather_json([own[rank]], dist.group.WORLD)


@pytest.mark.parametrize("own", [["", "b", ""], ["a", "bb" * 1000, "ü€\n\0"], ["x", "y", "x"]])
def test_texts_of_any_length_arrive(run_on: Ranks, own: list[str]) -> None:
    assert run_on(3)(texts, own) == [{rank: [text] for rank, text in enumerate(own)}] * 3
