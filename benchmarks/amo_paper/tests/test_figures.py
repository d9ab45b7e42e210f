"""Numbers behind the paper's figures."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.amo_paper import figures


def record(step: int, layer: int | None, kappa: float | None) -> dict[str, Any]:
    sizes = {"kappa": kappa, "ns_residual": 0.2}
    return {"step": step, "layer": layer, "operator_type": "attn_q", **sizes}


def test_conditioning_leaves_out_what_is_not_finite_or_in_no_layer() -> None:
    records = [record(1, 0, 100.0), record(1, 1, None), record(1, None, 10.0)]
    assert figures.conditioning(records) == [(2.0, 0.2, 0)]


def test_a_median_leaves_out_what_is_not_finite() -> None:
    records = [record(step, 0, kappa) for step in (10, 20) for kappa in (1e2, 1e4, 1e3, None)]
    by_type = figures.medians(records, lambda one: one["operator_type"])
    assert by_type == {"attn_q": [(10, 1e3), (20, 1e3)]}


@pytest.mark.parametrize(("num_layers", "size"), [(8, 3), (5, 2), (2, 1)])
def test_depth_takes_three_layers_and_never_one_twice(num_layers: int, size: int) -> None:
    records = [
        record(step, layer, 100.0 + (layer if step == 30 else -layer))
        for step in (10, 20, 30)
        for layer in range(num_layers)
    ]
    found = figures.shallow_deep(records, "attn_q")
    assert found is not None
    assert (found.num_layers, found.crossing) == (size, 30)
    assert found.shallow[0] == (10, 100.0 - (size - 1) / 2)  # the median of the first layers
    assert figures.shallow_deep([record(1, 0, 1.0)], "attn_q") is None
