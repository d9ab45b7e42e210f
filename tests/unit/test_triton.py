"""The Triton backend without a GPU: run by Triton's interpreter, compiled for GPUs, refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, param_groups
from amo_dist.config import NS_BACKENDS
from amo_dist.kernels.devices import TRITON_DTYPES, check_backend
from amo_dist.kernels.newton_schulz import orthogonalize
from amo_dist.schedule.polar_express import compose
from tests.distributed import models

ROOT = Path(__file__).resolve().parent.parent.parent
COEFFICIENTS = compose(1e-2, 5)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs the package triton, which CUDA builds of torch bring: pip install triton",
)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.triton_interpreted"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def eps_of(case: str) -> float:
    return torch.finfo(getattr(torch, case.rpartition(".")[2])).eps


@needs_triton
def test_products_are_those_of_float64(interpreted: dict[str, dict[str, Any]]) -> None:
    assert len(interpreted["product"]) == 6 * len(TRITON_DTYPES) + 1
    for case, found in interpreted["product"].items():
        # Rounded once, and for bfloat16 the interpreter truncates; in float32 the sums count too,
        # of terms that are up to 3.3 times their difference.
        bound = (4 if "float32" in case else 1) * eps_of(case)
        # Written so that NaN, which marks what no program has written, fails.
        assert found["gram"] <= bound, case
        assert found["polynomial"] <= bound, case


@needs_triton
def test_products_are_symmetric_and_know_nothing_of_the_batch(
    interpreted: dict[str, dict[str, Any]],
) -> None:
    for case, found in interpreted["product"].items():
        assert found["is_symmetric"], case
        assert found["batch_is_loop"], case


@needs_triton
def test_newton_schulz_is_as_exact_as_standard(interpreted: dict[str, dict[str, Any]]) -> None:
    assert len(interpreted["iteration"]) == 3 * len(TRITON_DTYPES)
    for case, found in interpreted["iteration"].items():
        # Two draws of one error differ by tens of percent, and a small matrix may be lucky to have
        # none; the interpreter truncates bfloat16 where torch rounds.
        assert found["triton"] <= 1.5 * found["standard"] + eps_of(case), case


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "m"),
    [
        *((80, torch.bfloat16, 2048), (90, torch.bfloat16, 512)),
        *((80, torch.float32, 512), (90, torch.float16, 2048)),
    ],
)
def test_kernels_compile_for_gpus(
    capability: int, dtype: torch.dtype, m: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from amo_dist.kernels.cuda.triton_symmetric import product_kernel, tiling

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    cut = tiling(m, dtype)
    constants = {"HAS_ADDED": True, "TILE": cut["TILE"], "DEPTH": cut["DEPTH"]}
    types = [*[f"*{name}"] * 3, "i32", "i32", "fp32", "fp32", *["constexpr"] * len(constants)]
    # As a launch finds it: pointers and sizes that 16 divides.
    attributes = {(index,): [["tt.divisibility", 16]] for index in range(5)}
    signature = dict(zip(product_kernel.arg_names, types, strict=True))
    source = ASTSource(product_kernel, signature, constants, attributes)
    options = {
        "num_warps": cut["num_warps"],
        "num_stages": cut["num_stages"],
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    # Bytes that an A100 and an H100 lend to one program.
    assert compiled.metadata.shared <= {80: 163, 90: 227}[capability] * 1024
    if dtype.itemsize == 2:
        assert {80: "mma.sync", 90: "wgmma.mma_async"}[capability] in compiled.asm["ptx"]
    assert "tf32" not in compiled.asm["ptx"]
    # Both tiles, the mirrored one too, are written 16 bytes at a time.
    assert "st.global.v4" in compiled.asm["ptx"]
    assert "st.global.b16" not in compiled.asm["ptx"]


def check(device: str, backend: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Without touching the device."""
    check_backend("ns_backend", backend, dtype, torch.device(device))


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"^backend: found 'triton' with matrices on cpu, expected"
    ):
        orthogonalize(torch.ones(3, 4), COEFFICIENTS, backend="triton")
    with pytest.raises(ValueError, match=r"^ns_backend: found 'triton' with matrices on cpu, exp"):
        check("cpu", "triton")
    with pytest.raises(ValueError, match="with float64 products, expected one of bfloat16, "):
        check("cuda", "triton", torch.float64)
    with pytest.raises(ValueError, match="ns_backend: found 'fast', expected one of"):
        check("cuda", "fast")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="found 'triton' with no package of this name, expected"):
        check("cuda", "triton", torch.float32)
    for other in NS_BACKENDS[:3]:
        check_backend("backend", other, torch.float32, torch.device("cuda"))


def test_an_optimizer_on_cpu_refuses_it_at_construction() -> None:
    groups = param_groups(models.plain_model({"layers.0.attention.wq.weight": (4, 4)}))
    with pytest.raises(ValueError, match="ns_backend: found 'triton' with matrices on cpu"):
        Muon(groups, config=MuonConfig(ns_backend="triton"))


def test_a_checkpoint_that_was_made_with_it_goes_on_without() -> None:
    model = models.plain_model({"layers.0.attention.wq.weight": (4, 4)})
    optimizer = AMO(param_groups(model), config=AMOConfig())
    before = optimizer.control_state_dict()
    state = optimizer.control_state_dict()
    state["config"]["ns_backend"] = "triton"
    optimizer.load_control_state_dict(state)
    assert optimizer.control_state_dict() == before


def test_triton_is_imported_only_when_needed() -> None:
    code = "import sys, torch\nbefore = 'triton' in sys.modules\n"
    code += "import amo_dist, amo_dist.kernels.devices\n"
    code += "print(before or 'triton' not in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "True"


@pytest.mark.cuda
@needs_triton
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("shape", [(1, 9), (3, 130, 333), (2, 512, 512), (2, 2048, 6144)])
def test_products_on_cuda(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from amo_dist.kernels.cuda.triton_symmetric import symmetric_product

    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to("cuda", dtype)
    out = x.new_full((*shape[:-1], shape[-2]), float("nan"))
    gram = symmetric_product(x, out=out.clone())
    exact = x.double() @ x.double().mT
    # Rounded once; in float32 the sums count too, more of them in longer rows.
    bound = (64 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps
    assert ((gram.double() - exact).abs().max() / exact.abs().max()).item() <= bound
    polynomial = symmetric_product(x, gram, -0.7, 1.3, out=out.clone())
    expected = -0.7 * gram.double() + 1.3 * exact
    assert ((polynomial.double() - expected).abs().max() / expected.abs().max()).item() <= bound
    assert torch.equal(gram, gram.mT)
    for _ in range(3):
        assert torch.equal(symmetric_product(x, out=out.clone()), gram)


@pytest.mark.cuda
@needs_triton
@pytest.mark.parametrize("preconditioner", ["frobenius", "aol"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_newton_schulz_on_cuda(dtype: torch.dtype, preconditioner: str) -> None:
    x = torch.randn(3, 300, 130, generator=torch.Generator().manual_seed(0)).cuda()
    exact, standard, found = (
        orthogonalize(x, COEFFICIENTS, preconditioner=preconditioner, dtype=to, backend=name)
        for to, name in ((torch.float64, "standard"), (dtype, "standard"), (dtype, "triton"))
    )
    errors = [((each.double() - exact).norm() / exact.norm()).item() for each in (standard, found)]
    # Two draws of one error differ by tens of percent.
    assert errors[1] < 1.5 * errors[0]
