"""Ways to run the same Newton-Schulz steps, and the cost model that picks one on a CPU.

- ``standard``: three fused products a step; batched, where there are several matrices.
- ``single``: the same, one matrix after the other.
- ``symmetric``: ``A = X X^T`` and ``A A`` are symmetric, so only the blocks on and above the
  diagonal are computed and the rest is mirrored: the same sums, hence the same accuracy.
- ``gram``: iterates on the small ``A`` and multiplies into the large X only at restarts and at the
  end. It pays for elongated matrices, and only where `gram_stability` passes the coefficients. In
  bfloat16 the first two steps alone are taken at once, which rounds X once less: where it may be
  taken it is the more exact form, on average.

The choice is a pure function of shape, coefficients and dtype, so that every rank, and every twin
that calls ``orthogonalize``, makes the same. Figures of the cost model were measured on a CPU
(``python -m benchmarks.newton_schulz``). Other devices run ``symmetric`` and ``gram`` cut as for a
CPU, and choose by measuring: see `amo_dist.kernels.choice`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence

import torch

from amo_dist.config import Triple
from amo_dist.kernels.cpu.gram_stability import first_pair_is_as_exact, is_stable

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """How to run the steps of one shape.

    Attributes:
        name: One of `amo_dist.config.NS_BACKENDS`, but for ``auto``.
        gram_blocks: Blocks along the diagonal of ``X X^T``; 1 computes all of it.
        square_blocks: Likewise of the products of small symmetric matrices.
        restarts: Steps before which the Gram form begins anew.
        panels: Parts of the long side that are multiplied into one after the other.
    """

    name: str
    gram_blocks: int = 1
    square_blocks: int = 1
    restarts: tuple[int, ...] = ()
    panels: int = 1


STANDARD = Backend("standard")

Overhead = tuple[float, float]
"""Flops that a product ``(m, k) (k, m)`` loses for each block but the first: by ``m``, by ``k``."""
# Narrow products are so fast that what a block takes besides, and its thinner shape, weigh more.
_NARROW: Overhead = (5e4, 1e4)
_WIDE: Overhead = (6e3, 2e3)
_BLOCKS = (2, 4, 8)
_MIN_GAIN = 0.95
"""Of the cost of a simpler way, above which it is taken: the model is no better than that."""
# A panel of narrow numbers that stays in the cache; where X is small or short, that gains nothing.
_PANEL_SIDE = 384
_PANEL_MIN_ROWS = 768
_PANEL_MIN_ASPECT = 2
_PAIR_MIN_ROWS = 128
"""Below, the small products of two steps at once take longer than the large ones they save."""
_BATCH_BYTES = 2**22
"""What a batch of small matrices may keep in use, for the caches' sake."""
_BATCH_MIN_ROWS = 64
"""Below, oneDNN sums a batch in another order than each of its matrices."""


def choose_backend(
    shape: Sequence[int],
    coefficients: Sequence[Triple],
    dtype: torch.dtype,
    requested: str = "auto",
) -> Backend:
    """What runs a shape; logged once for each shape and number of steps.

    Args:
        shape: ``(..., m, n)``, either side short.
        coefficients: One triple a step.
        dtype: Of the products.
        requested: ``auto``, or a backend by name; ``gram`` means ``symmetric`` where the Gram form
            is not stable for these coefficients in this dtype.
    """
    m, n = sorted(shape[-2:])
    backend = _choose(m, n, tuple((a, b, c) for a, b, c in coefficients), dtype, requested)
    # Coefficients change at every step of a transition; what is chosen hardly does.
    _log_once(m, n, len(coefficients), dtype, requested, backend)
    return backend


@functools.cache
def _log_once(*event: object) -> None:
    logger.info("Newton-Schulz of %d x %d, %d steps, %s: %s asked for, %s taken", *event)


@functools.lru_cache(maxsize=4096)
def _choose(
    m: int, n: int, coefficients: tuple[Triple, ...], dtype: torch.dtype, requested: str
) -> Backend:
    if requested not in ("auto", "symmetric", "gram"):
        return Backend(requested)
    steps, overhead = len(coefficients), _NARROW if is_narrow(dtype) else _WIDE

    def in_blocks(among: Sequence[int]) -> Backend:
        of_gram, of_squares = (_num_blocks(m, k, overhead, among) for k in (n, m))
        return Backend("symmetric", of_gram, of_squares, panels=_num_panels(m, n, dtype))

    def is_worth(backend: Backend, beside: Backend) -> bool:
        found, simpler = (cost(b, m, n, steps, overhead) for b in (backend, beside))
        return found < _MIN_GAIN * simpler

    if requested == "symmetric":
        return in_blocks(_BLOCKS)
    free = in_blocks((1, *_BLOCKS))
    simple = free if is_worth(free, STANDARD) else STANDARD
    is_small = is_narrow(dtype) and m < _PAIR_MIN_ROWS
    for backend in _gram_forms(m, n, steps, dtype, simple):
        if requested == "auto" and (is_small or not is_worth(backend, simple)):
            continue
        if _holds(backend, m, coefficients, dtype):
            return backend
    return simple if requested == "auto" else in_blocks(_BLOCKS)


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a dtype has 16 bits or fewer."""
    return dtype.itemsize < 4


def _num_blocks(m: int, k: int, overhead: Overhead, among: Sequence[int]) -> int:
    """Best blocks of a product ``(m, k) (k, m)``."""
    possible = [blocks for blocks in among if blocks <= max(m, 2)]
    return min(possible, key=lambda blocks: _product_cost(m, k, blocks, overhead))


def _num_panels(m: int, n: int, dtype: torch.dtype) -> int:
    if not is_narrow(dtype) or m < _PANEL_MIN_ROWS or n < _PANEL_MIN_ASPECT * m:
        return 1
    return round(n / _PANEL_SIDE)


def _gram_forms(
    m: int, n: int, steps: int, dtype: torch.dtype, simple: Backend
) -> Sequence[Backend]:
    """The cheapest first; in narrow dtypes ``simple`` with its first two steps taken at once."""
    if is_narrow(dtype):
        restarts = tuple(range(2, steps))
        return [dataclasses.replace(simple, name="gram", restarts=restarts)] if restarts else []
    of_gram, of_squares = (_num_blocks(m, k, _WIDE, (1, *_BLOCKS)) for k in (n, m))
    forms = (Backend("gram", of_gram, of_squares, restarts) for restarts in _tables(steps))
    return sorted(forms, key=lambda backend: cost(backend, m, n, steps, _WIDE))


def _holds(backend: Backend, m: int, coefficients: tuple[Triple, ...], dtype: torch.dtype) -> bool:
    """Whether a Gram form is exact enough."""
    if is_narrow(dtype):
        return first_pair_is_as_exact(coefficients, m)
    return is_stable(coefficients, backend.restarts, 2 * torch.finfo(dtype).eps)


def _tables(steps: int) -> Iterator[tuple[int, ...]]:
    """Restarts worth trying: step 2 for up to five steps; every second one."""
    tables = {tuple(range(1, steps, 2)), tuple(range(2, steps, 2))}
    if steps <= 5:
        tables.add((2,) if steps > 2 else ())
    return iter(sorted(tables))


def cost(backend: Backend, m: int, n: int, steps: int, overhead: Overhead = (0.0, 0.0)) -> float:
    """Flops of one matrix, with what is lost to copies counted as flops.

    Args:
        backend: What runs.
        m: Short side.
        n: Long side.
        steps: Newton-Schulz steps.
        overhead: Lost for each block; none where only the products count.
    """
    large = 2.0 * m * m * n
    gram = _product_cost(m, n, backend.gram_blocks, overhead)
    square = _product_cost(m, m, backend.square_blocks, overhead)
    if backend.name != "gram":
        return steps * (gram + square + large)
    segments = len(backend.restarts) + 1
    # A step squares A, carries the factor on (not the first of a segment) and A (not the last).
    squares = steps + (steps - segments) + 2 * (steps - segments)
    return segments * (gram + large) + squares * square


def _product_cost(m: int, k: int, blocks: int, overhead: Overhead) -> float:
    """Of a symmetric ``(m, k) (k, m)``: the share on and above the diagonal, and what is lost."""
    lost = (blocks - 1) * (overhead[0] * m + overhead[1] * k)
    return (blocks + 1) / (2 * blocks) * 2.0 * m * m * k + lost


def batch_size(backend: Backend, shape: Sequence[int], dtype: torch.dtype) -> int:
    """How many matrices of a shape to run as batched products.

    A call takes as long as some small products in bfloat16, so that a few of these run together
    (0.9 of the time at 256 x 1024, 0.8 at 256 x 256, 0.3 at 64 x 256, where they are as many as
    there are). Otherwise a batch gains nothing.

    Args:
        backend: From ``choose_backend``.
        shape: ``(m, n)``, either side short.
        dtype: Of the products.
    """
    m, n = sorted(shape)
    is_in_blocks = max(backend.gram_blocks, backend.square_blocks) > 1
    is_single = is_in_blocks or backend.name == "single"
    if is_single or m < _BATCH_MIN_ROWS or not _multiplies_fast(dtype):
        return 1
    in_use = 2 * (m * n + m * m) * dtype.itemsize
    return max(1, _BATCH_BYTES // in_use)


def _multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in this dtype by the instructions of AVX-512.

    Only there was a batch found to equal the loop over its matrices bit for bit.
    """
    is_used = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(is_used) and dtype == torch.bfloat16 and _has_bfloat16()


@functools.cache
def _has_bfloat16() -> bool:
    # Older versions of PyTorch do not tell.
    found: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(found.get("avx512_bf16")) and not found.get("amx_bf16")
