"""Tracking geometry: the right figures, of every matrix once, and no bit of training changed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from amo_dist import AMOConfig, param_groups
from amo_dist.kernels.geometry import SPECTRAL_METRICS, spectral_metrics
from amo_dist.optimizers.named import make_optimizer
from amo_dist.tools.tracker import GeometryTracker, layer_index
from tests.distributed import models
from tests.distributed.harness import Ranks
from torchtitan_ext.plugin import geometry as plugin
from torchtitan_ext.runs.records import read_records
from torchtitan_ext.runs.run_files import GEOMETRY_FILE

SHAPES = models.shapes()
AMO_FIELDS: dict[str, Any] = {
    "observe_until": 2,
    "observe_every": 1,
    "sample_size": 2,
    "transition_steps": 2,
    "bucket_bytes": 256,  # several buckets, some of them wide
}


def run(
    rank: int, world_size: int, layout: str, what: str | None, ns_dtype: str = "bfloat16"
) -> tuple[dict[str, Tensor], list[dict[str, Any]], list[tuple[int, int]]]:
    """Weights after six steps, the last records, and what the sink of this rank was given."""
    model = models.make_model(layout, SHAPES)
    config = AMOConfig(**AMO_FIELDS, ns_dtype=ns_dtype)
    optimizer = make_optimizer("AMO", param_groups(model), 3e-3, 0.1, config=config)
    told: list[tuple[int, int]] = []
    if what is not None:
        optimizer.tracker = GeometryTracker(
            2, what, lambda step, records: told.append((step, len(records)))
        )
    for step in range(1, 7):
        models.set_gradients(model, 11, step)
        optimizer.step()
    records = optimizer.tracker.records if what is not None else []
    return {name: models.whole(p) for name, p in model.named_parameters()}, records, told


@pytest.mark.parametrize(
    ("layout", "world_size", "ns_dtype"), [("fsdp", 2, "bfloat16"), ("tp", 2, "float32")]
)
def test_tracking_changes_no_bit_of_training(
    run_on: Ranks, layout: str, world_size: int, ns_dtype: str
) -> None:
    plain = run_on(world_size)(run, layout, None, ns_dtype)
    tracked = run_on(world_size)(run, layout, "both", ns_dtype)
    for (expected, _, _), (found, _, _) in zip(plain, tracked, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_every_matrix_is_measured_once_and_rank_0_alone_is_told(run_on: Ranks) -> None:
    (_, records, told), (_, others, nothing) = run_on(2)(run, "fsdp", "both")
    names = [record["name"] for record in records]
    assert names == sorted(models.types())
    assert told == [(2, len(names)), (4, len(names)), (6, len(names))]
    assert nothing == []
    assert json.dumps(others) == json.dumps(records)  # NaN is not equal to itself
    for record in records:
        assert record["step"] == 6
        assert record["operator_type"] == models.types()[record["name"]]
        assert record["layer"] == layer_index(record["name"])
        assert set(SPECTRAL_METRICS) == set(record["orthogonalized"])


def test_records_do_not_depend_on_the_world(run_on: Ranks) -> None:
    [(_, alone, _)] = run_on(1)(run, "fsdp", "residual")
    (_, split, _), _ = run_on(2)(run, "fsdp", "residual")
    # Injected gradients: the same momentum bits, gathered wide and measured whole.
    assert json.dumps(alone) == json.dumps(split)


def test_what_is_left_out() -> None:
    [(_, records, _)] = [run(0, 1, "plain", "momentum")]
    assert not {"ns_residual", "update_norm"} & {*records[0]}
    [(_, records, _)] = [run(0, 1, "plain", "residual")]
    assert "ns_residual" in records[0]
    assert "orthogonalized" not in records[0]


def test_the_norm_of_an_update_is_that_of_a_polar_factor_times_a_factor() -> None:
    tracker = GeometryTracker(1, "residual")
    factor = torch.linalg.qr(torch.randn(40, 24, dtype=torch.float64))[0]
    for name, result in (("tall", 0.8 * factor), ("wide", (1.1 * factor.mT).bfloat16())):
        tracker.measure(name, torch.randn(result.shape), result)
    found = {name: record["update_norm"] for name, record in tracker._measured.items()}
    assert found["tall"] == pytest.approx(0.8, rel=1e-12)
    assert found["wide"] == pytest.approx(1.1, rel=2**-8)  # a rounding of bfloat16


def test_a_skipped_step_leaves_no_records() -> None:
    model = models.plain_model(SHAPES)
    config = AMOConfig(**AMO_FIELDS, nonfinite="skip_step")
    optimizer = make_optimizer("AMO", param_groups(model), 3e-3, 0.1, config=config)
    told: list[int] = []
    optimizer.tracker = GeometryTracker(1, sink=lambda step, _: told.append(step))
    for step in range(1, 4):
        models.set_gradients(model, 11, step)
        if step == 2:
            next(p for p in model.parameters() if p.dim() == 2).grad.fill_(float("nan"))
        optimizer.step()
    assert told == [1, 3]


# ---------------------------------------------------------------- the log of a run


def config(**changes: Any) -> SimpleNamespace:
    values = {"enable": True, "interval": 5, "what": "both", "name": "AMO", **changes}
    return SimpleNamespace(
        geometry=SimpleNamespace(**{k: values[k] for k in ("enable", "interval", "what")}),
        optimizer=SimpleNamespace(name=values["name"]),
        model=SimpleNamespace(name="llama3", flavor=values.get("flavor", "tiny")),
        dump_folder=values.get("folder", "unused"),
    )


def test_the_log_starts_where_the_process_does(tmp_path: Path) -> None:
    path = tmp_path / GEOMETRY_FILE
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (2, 4, 6)) + '{"step": 8, "cu')
    log = plugin.GeometryLog(tmp_path, model="m", family="f")
    log.append([{"step": 6, "kappa": float("nan"), "orthogonalized": {"ell": math.inf}}], 5)
    log.append([{"step": 8}], 5)
    records = read_records(path)
    assert [record["step"] for record in records] == [2, 4, 6, 8]
    assert records[2]["kappa"] is None
    assert records[2]["orthogonalized"] == {"ell": None}
    assert (records[3]["model"], records[3]["family"]) == ("m", "f")


@pytest.mark.parametrize(
    "changes",
    [{"interval": 0}, {"name": "AdamW"}],
    ids=["interval", "optimizer"],
)
def test_mistakes_in_the_section(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"geometry\.\w+: found"):
        plugin.validate(config(**changes))


def test_only_where_it_is_asked_for(tmp_path: Path) -> None:
    container = SimpleNamespace(optimizer=SimpleNamespace(tracker=None))
    assert plugin.install(container, config(enable=False)) is None
    assert container.optimizer.tracker is None
    tracker = plugin.install(container, config(folder=str(tmp_path)))
    assert container.optimizer.tracker is tracker is not None
    assert tracker.sink is not None
    assert list(tmp_path.iterdir()) == []  # nothing is written before there are records


@pytest.mark.cuda
def test_metrics_do_without_kernels_that_are_not_deterministic() -> None:
    x = torch.randn(12, 8, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        found = spectral_metrics(x)
    finally:
        torch.use_deterministic_algorithms(False)
    # The two decompositions agree to a few roundings of float64.
    assert torch.allclose(found, spectral_metrics(x.cpu()), rtol=1e-9, atol=0.0)
