"""What the benchmark computes itself; the runs are the trainer's."""

from __future__ import annotations

import pytest

from amo_dist.schedule.budget import ns_step_flops
from benchmarks import compare_optimizers as benchmark

ARGUMENTS = [f"--job.config_file={benchmark.CONFIG}"]
TYPES = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_gate", "mlp_up", "mlp_down")


@pytest.mark.parametrize(
    ("name", "values"),
    [("AdamW", (2, 2)), ("AdaMuon", (2, 2)), ("Muon-PE", (1, 2)), ("AMO", (1, 2))],
)
def test_state_bytes_are_those_of_the_class(name: str, values: tuple[int, int]) -> None:
    last = {"num_steps_by_type": dict.fromkeys(TYPES, 0 if name == "AdamW" else 5)}
    found = benchmark.state(name, last, ARGUMENTS)
    matrices, others = found["matrix_parameters"], found["other_parameters"]
    assert found["state_bytes"] == 4 * (values[0] * matrices + values[1] * others)
    assert (found["ns_flops_per_step"] > 0) == (name != "AdamW")


def test_flops_count_steps_by_type_or_by_shape() -> None:
    model = benchmark.quickstart_model(ARGUMENTS)
    by_type = benchmark.state("Muon", {"num_steps_by_type": dict.fromkeys(TYPES, 5)}, ARGUMENTS)
    matrices = [
        tuple(param.shape) for name, param in model.named_parameters() if name.startswith("layers")
    ]
    shapes = [shape for shape in matrices if len(shape) == 2]
    expected = 5 * sum(ns_step_flops(*shape) for shape in shapes)
    assert by_type["ns_flops_per_step"] == expected
    by_shape = {f"{m}x{n}": 5 for m, n in shapes}
    fitted = benchmark.state("ROOT", {"num_steps_by_type": by_shape}, ARGUMENTS)
    assert fitted["ns_flops_per_step"] == expected
