"""Rules of a user's own: MuonH as CONTRIBUTING.md prints it, on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amo_dist import Muon, Piece, UpdateRule, param_groups
from amo_dist.engine.rule import AllSum
from tests import runs
from tests.distributed import models
from tests.distributed.harness import Ranks
from tests.distributed.test_ballot import held, is_unchanged, on, spoil
from tests.examples import examples


def muon_h() -> type[Muon]:
    """The class that the page prints."""
    _, text = examples(["CONTRIBUTING.md"])["muonh.py"]
    namespace: dict[str, Any] = {}
    exec(text[: text.index("model = ")], namespace)
    return namespace["MuonH"]  # type: ignore[no-any-return]


def make(layout: str = "plain", **options: Any) -> tuple[nn.Module, Muon]:
    return runs.make(layout, muon_h(), shapes=models.shapes(), **options)


def train(rank: int, world_size: int, layout: str) -> dict[str, Tensor]:
    """Weights after three steps, of which the last follows a resume."""
    model, optimizer = make(layout)
    runs.train(model, optimizer, 1, 2)
    return runs.train(*runs.resume(model, optimizer, lambda: make(layout)), 3, 3)


@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4)])
def test_the_printed_rule_keeps_norms_on_any_layout(
    run_on: Ranks, layout: str, world_size: int
) -> None:
    expected = train(0, 1, "plain")
    for name in models.types():
        before = models.initial(name, models.shapes()[name])
        assert not torch.equal(expected[name], before)
        # Weights are rounded to float32 in each step.
        assert expected[name].norm().item() == pytest.approx(before.norm().item(), rel=1e-6)
    for weights in run_on(world_size)(train, layout):
        for name, weight in weights.items():
            # Squares add up in another order: a rounding of float64, then one of float32.
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)


def test_master_weights_keep_norms_below_the_spacing_of_bfloat16() -> None:
    model, optimizer = make(dtype=torch.bfloat16, bfloat16_params="master")
    params = optimizer.params_by_name
    before = {name: params[name].double().norm().item() for name in models.types()}
    runs.train(model, optimizer, 1, 5)
    for name, norm in before.items():
        master = params[name].double() + optimizer.state[params[name]]["rounded_off"].double()
        # Five roundings of float32 weights, which move a norm by far less than one of bfloat16.
        assert master.norm().item() == pytest.approx(norm, rel=1e-5), name


def test_a_rule_without_hyperparameters_of_its_own_checks_groups_with_matrices() -> None:
    model = models.plain_model(models.shapes())
    groups = param_groups(model)
    for group in groups:
        group["weight_decay"] = 0.1 if group["algorithm"] == "adamw" else 0.0
    muon_h()(groups)  # AdamW may decay
    with pytest.raises(ValueError, match=r"groups\[\d\]\.weight_decay: found 0\.1, expected 0"):
        muon_h()(param_groups(model), weight_decay=0.1)


def bad_step_on_a_device(rank: int, world_size: int) -> None:
    """State of a rule and weights that it sets stay as they were."""
    with on("cuda"):
        model, optimizer = make("fsdp", device="cuda", nonfinite="skip_step")
        runs.train(model, optimizer, 1, 2)
        before = held(model, optimizer)
        models.set_gradients(model, 1, 3)
        if rank == 0:
            spoil(next(iter(models.types())), torch.nan)(model, optimizer)
        optimizer.step()
        optimizer.check_last_update()
        assert is_unchanged(before)


def test_a_bad_step_changes_no_state_of_a_rule(run_on: Ranks) -> None:
    run_on(2)(bad_step_on_a_device)


def ask(
    self: UpdateRule, results: Sequence[Tensor], pieces: Sequence[Piece], allsum: AllSum
) -> Sequence[Tensor]:
    """`post` of a rule that asks for a sum which it has not declared."""
    allsum([None] * len(pieces))
    return results


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"post": ask}, r"^allsum: found call 1 .*, expected 0 calls"),
        ({"sets_weights": True}, r"Bad\.sets_weights: found True without `post`"),
    ],
)
def test_a_mistake_in_a_rule_is_named(members: dict[str, Any], message: str) -> None:
    kind = type("BadMuon", (Muon,), {"rule_class": type("Bad", (UpdateRule,), members)})
    with pytest.raises(ValueError, match=message):
        runs.train(*runs.make(kind=kind))
