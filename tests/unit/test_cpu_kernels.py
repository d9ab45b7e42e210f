"""Newton-Schulz on CPU, laid out once and run over and over on memory that stays."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from amo_dist.kernels.cpu.workspace import Workspace
from amo_dist.kernels.newton_schulz import orthogonalize
from tests.unit.test_newton_schulz import CPU, KJ, cpu_kernels, generator


def test_the_default_device_has_no_part() -> None:
    x = torch.randn(9, 7, generator=generator())
    expected = orthogonalize(x, KJ)
    with torch.device("meta"):
        assert torch.equal(orthogonalize(x, KJ), expected)


@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(9, 20), (64, 200), (200, 64)])
def test_what_is_laid_out_once_runs_on_other_values(
    shape: tuple[int, int], dtype: torch.dtype, preconditioner: str
) -> None:
    kernels, random = cpu_kernels(dtype), generator()
    run = kernels.orthogonalizer(3, shape, KJ, 1.01, preconditioner)

    def check() -> None:
        matrices = torch.randn(3, *shape, generator=random)
        narrow = matrices.to(dtype)
        expected = [
            orthogonalize(x, KJ, dtype=dtype, preconditioner=preconditioner) for x in narrow
        ]
        assert torch.equal(run(list(narrow)), torch.stack(expected))
        # What comes wide is rounded first.
        assert torch.equal(run(list(matrices)), torch.stack(expected))

    check()
    check()
    # What needs more memory takes it elsewhere, and leaves this where it lies.
    large = kernels.orthogonalizer(4, (400, 500), KJ, 1.01, preconditioner)
    large(list(torch.randn(4, 400, 500)))
    check()
    with ThreadPoolExecutor(1) as other:
        other.submit(check).result()
    check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_of_other_slots_stay(dtype: torch.dtype) -> None:
    kernels, shapes = cpu_kernels(dtype), [(64, 200), (30, 40), (64, 200)]
    matrices = [torch.randn(2, *shape, generator=generator(i)) for i, shape in enumerate(shapes)]
    runs = [
        kernels.orthogonalizer(2, shape, KJ, 1.01, "frobenius", slot=slot)
        for slot, shape in enumerate(shapes)
    ]
    for _ in range(2):
        found = [run(list(x)) for run, x in zip(runs, matrices, strict=True)]
        for result, x in zip(found, matrices, strict=True):
            assert torch.equal(result, orthogonalize(x.to(dtype), KJ, dtype=dtype))


def test_two_kernels_share_no_memory() -> None:
    shape, rounds = (64, 200), 40
    x = torch.randn(4, *shape, generator=generator())
    expected = [orthogonalize(each.bfloat16(), KJ) for each in x]

    def repeat(each: int) -> bool:
        run = cpu_kernels().orthogonalizer(1, shape, KJ, 1.01, "frobenius")
        found = [torch.equal(run([x[each]])[0], expected[each]) for _ in range(rounds)]
        return all(found)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(repeat, range(4)))


def test_a_workspace_hands_out_the_same_memory_for_the_same_use() -> None:
    workspace = Workspace(CPU)
    small = workspace.take("a", (2, 3), torch.float32)
    assert workspace.take("a", (6,), torch.float32).data_ptr() == small.data_ptr()
    assert workspace.take("b", (6,), torch.float32).data_ptr() != small.data_ptr()
    assert workspace.take("a", (6,), torch.bfloat16).dtype == torch.bfloat16
    small.fill_(7.0)
    large = workspace.take("a", (4, 3), torch.float32).zero_()
    assert small.eq(7.0).all()
    assert workspace.take("a", (2, 3), torch.float32).data_ptr() == large.data_ptr()


RUN_MANY_SCHEDULES = """
import torch
from amo_dist.kernels.newton_schulz import orthogonalize
for number in [*range(150), 0]:
    print("schedule", number, flush=True)
    triples = [(2.0 + number / 1024, -1.5 - number / 1024, 0.5)]
    orthogonalize(torch.ones(32, 48), triples, dtype=torch.bfloat16)
"""


def test_compiled_products_of_past_schedules_are_given_up() -> None:
    names = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", RUN_MANY_SCHEDULES],
        env={**environment, "ONEDNN_VERBOSE": "profile_create"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *_, again = [
        part.count("create:cache_miss") for part in done.stdout.split("schedule")[1:]
    ]
    if not first:
        pytest.skip("oneDNN does not run these products here")
    # Two products a schedule have a beta of their own.
    assert again >= 2
