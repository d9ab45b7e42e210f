"""Rules of a user's own: MuonH as CONTRIBUTING.md prints it, on any layout."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from amo_dist import Muon, MuonConfig, Piece, UpdateRule, param_groups
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


def norms(model: torch.nn.Module) -> dict[str, float]:
    named = runs.weights(model)
    return {name: named[name].double().norm().item() for name in models.types()}


def train(
    rank: int, world_size: int, layout: str, device: str = "cpu", **fields: Any
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, float]]:
    """Weights after three steps, of which one follows a resume; norms before and after."""
    model = models.make_model(layout, models.shapes(), device)
    optimizer = muon_h()(param_groups(model), lr=0.05, config=MuonConfig(**fields))
    before = norms(model)
    runs.train(model, optimizer, 1, 2, seed=5)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = muon_h()(param_groups(model), lr=0.05, config=MuonConfig(**fields))
    optimizer.load_state_dict(state)
    weights = runs.train(model, optimizer, 3, 3, seed=5)
    return weights, before, norms(model)


@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4)])
def test_the_printed_rule_keeps_norms_on_any_layout(
    run_on: Ranks, layout: str, world_size: int
) -> None:
    ((expected, _, _),) = run_on(1)(train, "plain")
    for weights, before, after in run_on(world_size)(train, layout):
        assert after == pytest.approx(before, rel=1e-6)
        for name, weight in weights.items():
            # Squares add up in another order: a rounding of float64, then one of float32.
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)


def test_master_weights_keep_norms_below_the_spacing_of_bfloat16() -> None:
    model = models.plain_model(models.shapes()).to(torch.bfloat16)
    config = MuonConfig(bfloat16_params="master")
    optimizer = muon_h()(param_groups(model), lr=1e-4, config=config)
    params = optimizer.params_by_name
    before = {name: params[name].double().norm().item() for name in models.types()}
    runs.train(model, optimizer, 1, 5, seed=5)
    for name, norm in before.items():
        master = params[name].double() + optimizer.state[params[name]]["rounded_off"].double()
        # Five roundings of float32 weights, which move a norm by far less than one of bfloat16.
        assert master.norm().item() == pytest.approx(norm, rel=1e-5), name


def test_a_rate_of_zero_leaves_weights_as_they_are() -> None:
    model = models.plain_model(models.shapes())
    before = copy.deepcopy(model.state_dict())
    optimizer = muon_h()(param_groups(model), lr=0.0)
    runs.train(model, optimizer, 1, 1, seed=5)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=1e-6, atol=0)


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
        model = models.make_model("fsdp", models.shapes(), "cuda")
        config = MuonConfig(nonfinite="skip_step")
        optimizer = muon_h()(param_groups(model), lr=0.05, config=config)
        runs.train(model, optimizer, 1, 2, seed=5)
        before = held(model, optimizer)
        models.set_gradients(model, 5, 3)
        if rank == 0:
            spoil(next(iter(models.types())), torch.nan)(model, optimizer)
        optimizer.step()
        optimizer.check_last_update()
        assert is_unchanged(before)


def test_a_bad_step_changes_no_state_of_a_rule(run_on: Ranks) -> None:
    run_on(2)(bad_step_on_a_device)


class TooMany(UpdateRule):
    """Asks for a sum that it has not declared."""

    def post(
        self, results: Sequence[Tensor], pieces: Sequence[Piece], allsum: AllSum
    ) -> Sequence[Tensor]:
        allsum([None] * len(pieces))
        return results


class TooManyMuon(Muon):
    """Muon with that rule."""

    rule_class = TooMany


def test_a_sum_that_was_not_declared_is_an_error() -> None:
    model = models.plain_model(models.shapes())
    optimizer = TooManyMuon(param_groups(model))
    models.set_gradients(model, 5, 1)
    with pytest.raises(ValueError, match=r"^allsum: found call 1 .*, expected 0 calls"):
        optimizer.step()


def test_weights_without_a_post_that_makes_them_are_refused() -> None:
    rule = type("Bare", (UpdateRule,), {"sets_weights": True})
    model = models.plain_model({"layers.0.attention.wq.weight": (8, 6)})
    with pytest.raises(ValueError, match=r"Bare\.sets_weights: found True without `post`"):
        type("BareMuon", (Muon,), {"rule_class": rule})(param_groups(model))
