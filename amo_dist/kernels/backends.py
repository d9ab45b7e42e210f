"""Ways to run the same Newton-Schulz steps, and the cost model that picks one.

- ``standard``: three fused products a step.
- ``symmetric``: ``A = X X^T`` and ``A A`` are symmetric, so only the blocks on and above the
  diagonal are computed and the rest is mirrored: the same sums, hence the same accuracy.
- ``gram``: iterates on the small ``A`` and multiplies into the large X only at restarts and at the
  end. It pays for elongated matrices, and only where `gram_stability` passes the coefficients. In
  bfloat16 the first two steps alone are taken at once, which rounds X once less: where it may be
  taken it is the more exact form, on average.
- ``triton``: ``symmetric`` by tiles in one kernel, on CUDA devices; see `triton_symmetric`.

The choice is a pure function of shape, coefficients, dtype and device type, so that every rank,
and every twin that calls ``orthogonalize``, makes the same. Figures of the cost model were measured
on a CPU (``python -m benchmarks.newton_schulz``). No GPU has been measured, so on CUDA ``auto`` is
``standard``: the others run where they are asked for by name, ``triton`` only so.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amo_dist.config import Triple
from amo_dist.kernels.gram import iterate_deviation, iterate_factor
from amo_dist.kernels.gram_stability import first_pair_is_as_exact, is_stable
from amo_dist.kernels.products import (
    Call,
    results,
    short_side,
    square_like,
    symmetric,
    times,
)

BACKENDS = ("auto", "standard", "symmetric", "gram", "triton")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MEASURED_DEVICES = ("cpu",)

logger = logging.getLogger(__name__)
_logged: set[tuple[object, ...]] = set()


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """How to run the steps of one shape.

    Attributes:
        name: One of ``BACKENDS`` but ``auto``.
        gram_blocks: Blocks (of ``triton``: tiles) along the diagonal of ``X X^T``; 1 computes all
            of it.
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Overhead:
    """Of a product ``(m, k) (k, m)`` by blocks, in flops lost for each block but the first.

    Attributes:
        per_row: Times ``m``.
        per_column: Times ``k``.
    """

    per_row: float = 0.0
    per_column: float = 0.0


# Narrow products are so fast that what a block takes besides, and its thinner shape, weigh more.
_NARROW = _Overhead(per_row=5e4, per_column=1e4)
_WIDE = _Overhead(per_row=6e3, per_column=2e3)
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
"""What a batch of small matrices may keep in use on CPU, for the caches' sake."""
_BATCH_MIN_ROWS = 64
"""Below, oneDNN sums a batch in another order than each of its matrices."""


def choose_backend(
    shape: Sequence[int],
    coefficients: Sequence[Triple],
    *,
    dtype: torch.dtype,
    device_type: str,
    requested: str = "auto",
) -> Backend:
    """The backend that ``orthogonalize`` takes; logged once for each shape and number of steps.

    Args:
        shape: ``(..., m, n)``, either side short.
        coefficients: One triple a step.
        dtype: Of the products.
        device_type: Such as ``cpu``.
        requested: ``auto``, or a backend by name; ``gram`` means ``symmetric`` where the Gram form
            is not stable for these coefficients in this dtype.

    Raises:
        ValueError: an unknown backend, or one that cannot run here; see `check_backend`.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend: found {requested!r}, expected one of {BACKENDS}")
    check_backend("backend", requested, dtype=dtype, device_type=device_type)
    m, n = sorted(shape[-2:])
    return _choose(m, n, _hashable(coefficients), dtype, device_type, requested)


def check_backend(field: str, requested: str, *, dtype: torch.dtype, device_type: str) -> None:
    """Refuse ``triton`` by name where it cannot run; the others run everywhere.

    Args:
        field: What the error names.
        requested: As for `choose_backend`.
        dtype: Of the products.
        device_type: Of the matrices.

    Raises:
        ValueError: They are not on CUDA, or not bfloat16, float16 or float32, or the package
            ``triton`` is not installed.
    """
    if requested != "triton":
        return
    found = expected = ""
    if device_type != "cuda":
        found, expected = f"matrices on {device_type}", "on cuda"
    elif dtype not in TRITON_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in TRITON_DTYPES)
        found, expected = f"{str(dtype).removeprefix('torch.')} products", f"one of {names}"
    elif importlib.util.find_spec("triton") is None:
        found = "no package of this name"
        expected = "the one that comes with CUDA builds of torch"
    if found:
        raise ValueError(f"{field}: found 'triton' with {found}, expected {expected}")


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4


def _hashable(coefficients: Sequence[Triple]) -> tuple[Triple, ...]:
    if isinstance(coefficients, tuple) and all(isinstance(each, tuple) for each in coefficients):
        return coefficients
    return tuple((a, b, c) for a, b, c in coefficients)


@functools.lru_cache(maxsize=4096)
def _choose(
    m: int,
    n: int,
    coefficients: tuple[Triple, ...],
    dtype: torch.dtype,
    device_type: str,
    requested: str,
) -> Backend:
    backend = _cheapest(m, n, coefficients, dtype, device_type, requested)
    # Coefficients change at every step of a transition; what is chosen hardly does.
    event = (m, n, len(coefficients), dtype, device_type, requested, backend)
    if event not in _logged:
        _logged.add(event)
        logger.info(
            "Newton-Schulz of %d x %d, %d steps, %s on %s: %s asked for, %s taken",
            *(m, n, len(coefficients), dtype, device_type, requested, backend),
        )
    return backend


def _cheapest(
    m: int,
    n: int,
    coefficients: tuple[Triple, ...],
    dtype: torch.dtype,
    device_type: str,
    requested: str,
) -> Backend:
    if requested == "standard" or (requested == "auto" and device_type not in _MEASURED_DEVICES):
        return STANDARD
    if requested == "triton":
        return _tiled(m, dtype)
    overhead = _NARROW if _is_narrow(dtype) else _WIDE
    panels = _num_panels(m, n, dtype)

    def in_blocks(among: Sequence[int]) -> Backend:
        of_gram, of_squares = (_num_blocks(m, k, overhead, among) for k in (n, m))
        return Backend("symmetric", of_gram, of_squares, panels=panels)

    def is_worth(backend: Backend, beside: Backend) -> bool:
        found, simpler = (cost(b, m, n, len(coefficients), overhead) for b in (backend, beside))
        return found < _MIN_GAIN * simpler

    if requested == "symmetric":
        return in_blocks(_BLOCKS)
    free = in_blocks((1, *_BLOCKS))
    simple = free if is_worth(free, STANDARD) else STANDARD
    is_small = _is_narrow(dtype) and m < _PAIR_MIN_ROWS
    for backend in _gram_forms(m, n, len(coefficients), dtype, simple):
        if requested == "auto" and (is_small or not is_worth(backend, simple)):
            continue
        if _holds(backend, m, coefficients, dtype):
            return backend
    return simple if requested == "auto" else in_blocks(_BLOCKS)


def _num_blocks(m: int, k: int, overhead: _Overhead, among: Sequence[int]) -> int:
    """Best blocks of a product ``(m, k) (k, m)``."""
    possible = [blocks for blocks in among if blocks <= max(m, 2)]
    return min(possible, key=lambda blocks: _product_cost(m, k, blocks, overhead))


def _num_panels(m: int, n: int, dtype: torch.dtype) -> int:
    if not _is_narrow(dtype) or m < _PANEL_MIN_ROWS or n < _PANEL_MIN_ASPECT * m:
        return 1
    return round(n / _PANEL_SIDE)


def _tiled(m: int, dtype: torch.dtype) -> Backend:
    # Imported here: the package is not everywhere.
    from amo_dist.kernels.triton_symmetric import tiling

    tiles = -(-m // tiling(m, dtype).tile)
    return Backend("triton", tiles, tiles)


def _gram_forms(
    m: int, n: int, steps: int, dtype: torch.dtype, simple: Backend
) -> Sequence[Backend]:
    """The cheapest first; in narrow dtypes ``simple`` with its first two steps taken at once."""
    if _is_narrow(dtype):
        restarts = tuple(range(2, steps))
        return [dataclasses.replace(simple, name="gram", restarts=restarts)] if restarts else []
    of_gram, of_squares = (_num_blocks(m, k, _WIDE, (1, *_BLOCKS)) for k in (n, m))
    forms = (Backend("gram", of_gram, of_squares, restarts) for restarts in _tables(steps))
    return sorted(forms, key=lambda backend: cost(backend, m, n, steps, _WIDE))


def _holds(backend: Backend, m: int, coefficients: tuple[Triple, ...], dtype: torch.dtype) -> bool:
    """Whether a Gram form is exact enough."""
    if _is_narrow(dtype):
        return first_pair_is_as_exact(coefficients, m)
    return is_stable(coefficients, backend.restarts, 2 * torch.finfo(dtype).eps)


def _tables(steps: int) -> Iterator[tuple[int, ...]]:
    """Restarts worth trying: step 2 for up to five steps; every second one."""
    tables = {tuple(range(1, steps, 2)), tuple(range(2, steps, 2))}
    if steps <= 5:
        tables.add((2,) if steps > 2 else ())
    return iter(sorted(tables))


def cost(backend: Backend, m: int, n: int, steps: int, overhead: _Overhead = _WIDE) -> float:
    """Flops of one matrix, with what is lost to copies counted as flops.

    Args:
        backend: What runs.
        m: Short side.
        n: Long side.
        steps: Newton-Schulz steps.
        overhead: Of the dtype.
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


def _product_cost(m: int, k: int, blocks: int, overhead: _Overhead) -> float:
    """Of a symmetric ``(m, k) (k, m)``: the share on and above the diagonal, and what is lost."""
    lost = (blocks - 1) * (overhead.per_row * m + overhead.per_column * k)
    return (blocks + 1) / (2 * blocks) * 2.0 * m * m * k + lost


def executed_flops(backend: Backend, m: int, n: int, steps: int) -> float:
    """As ``cost``, but of the products alone."""
    return cost(backend, m, n, steps, _Overhead())


def batch_size(
    backend: Backend, shape: Sequence[int], *, dtype: torch.dtype, device_type: str
) -> int | None:
    """How many matrices of a shape to run as batched products; None for any number.

    On CPU a call takes as long as some small products in bfloat16, so that a few of these run
    together (0.9 of the time at 256 x 1024, 0.8 at 256 x 256, 0.3 at 64 x 256, where they are as
    many as there are). Elsewhere on CPU a batch gains nothing.

    Args:
        backend: From ``choose_backend``.
        shape: ``(m, n)``, either side short.
        dtype: Of the products.
        device_type: Such as ``cpu``.
    """
    if device_type != "cpu":
        return None
    m, n = sorted(shape)
    is_in_blocks = max(backend.gram_blocks, backend.square_blocks) > 1
    if is_in_blocks or m < _BATCH_MIN_ROWS or not _multiplies_fast(dtype):
        return 1
    in_use = 2 * (m * n + m * m) * dtype.itemsize
    return max(1, _BATCH_BYTES // in_use)


def _multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in this dtype by the instructions of AVX-512.

    Only there was a batch found to equal the loop over its matrices bit for bit.
    """
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and _has_bfloat16()
    )


@functools.cache
def _has_bfloat16() -> bool:
    # Older versions of PyTorch do not tell.
    found: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(found.get("avx512_bf16")) and not found.get("amx_bf16")


def iterate(
    x: Tensor,
    coefficients: Sequence[Triple],
    backend: Backend,
    gram: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Run the steps.

    Args:
        x: ``(m, n)`` or ``(b, m, n)``, contiguous, singular values at most one; m <= n for
            ``triton``.
        coefficients: One triple a step.
        backend: From ``choose_backend``.
        gram: ``A``, the Gram matrix of the short side, where it is at hand, contiguous.
        out: Where the result goes; shape, dtype and device of ``x``, contiguous.

    Returns:
        ``out``, or a new tensor as ``x``.
    """
    out = torch.empty_like(x) if out is None else out
    for call in calls(x, coefficients, backend, gram, out=out):
        call()
    return out


def calls(
    x: Tensor,
    coefficients: Sequence[Triple],
    backend: Backend,
    gram: Tensor | None = None,
    *,
    out: Tensor,
) -> Iterator[Call]:
    """What `iterate` calls, on `scratch` memory: on CPU to be kept while that stays where it is.

    Arguments as for `iterate`. All is laid out anew as the calls are taken one by one, so that
    memory of other devices comes and goes in their order.
    """
    if backend.name != "gram":
        return _standard(x, coefficients, backend, gram, out)
    blocks = backend.gram_blocks, backend.square_blocks
    args = x, coefficients, backend.restarts, blocks, gram
    if _is_narrow(x.dtype):
        return iterate_deviation(*args, panels=backend.panels, out=out)
    return iterate_factor(*args, out=out)


def _standard(
    x: Tensor,
    coefficients: Sequence[Triple],
    backend: Backend,
    gram: Tensor | None,
    out: Tensor,
) -> Iterator[Call]:
    multiply, square = _symmetric_products(backend)
    small, polynomial = (square_like(use, x) for use in ("gram", "polynomial 0"))
    places = results(out, len(coefficients))
    for a, b, c in coefficients:
        if gram is None:
            gram = small
            yield from multiply(short_side(x), out=gram)
        yield from square(gram, gram, b, c, out=polynomial)
        result = next(places)
        yield from times(polynomial, x, a, backend.panels, out=result)
        x, gram = result, None


def _symmetric_products(backend: Backend) -> Iterator[Callable[..., Iterable[Call]]]:
    """For X and for squares, ``(x, added, beta, alpha, *, out)``: ``beta added + alpha x x^T``."""
    if backend.name == "triton":
        from amo_dist.kernels.triton_symmetric import symmetric_product

        def by_tiles(*args: Any, out: Tensor) -> Iterable[Call]:
            return [functools.partial(symmetric_product, *args, out=out)]

        return iter((by_tiles, by_tiles))

    def by_blocks(num_blocks: int) -> Callable[..., Iterable[Call]]:
        return lambda x, *added, out: symmetric(x, x, num_blocks, *added, out=out)

    return map(by_blocks, (backend.gram_blocks, backend.square_blocks))
