"""Ways to run the same Newton-Schulz steps, and the cost model that picks one.

- ``standard``: three fused products a step.
- ``symmetric``: ``A = X X^T`` and ``A A`` are symmetric, so only the blocks on and above the
  diagonal are computed and the rest is mirrored: the same sums, hence the same accuracy.
- ``gram``: iterates on the small ``A`` and multiplies into the large X only at restarts and at the
  end. It pays for elongated matrices, and only where `gram_stability` passes the coefficients.
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
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from amo_dist.kernels.gram_stability import is_stable
from amo_dist.kernels.scratch import scratch

Triple = tuple[float, float, float]

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
_BATCH_BYTES = 2**22
"""What a batch of small matrices may keep in use on CPU, for the caches' sake."""
_BATCH_MIN_ROWS = 64
"""Below, oneDNN sums a batch in another order than each of its matrices."""
# In bfloat16 or float16 the Gram form has up to six times the error of the standard one, and can
# diverge where few singular values stand far above the rest: not an option.
_GRAM_MAX_UNIT = 1e-5


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
    overhead = _NARROW if dtype.itemsize < 4 else _WIDE
    is_free = requested == "auto"
    blocks = (1, *_BLOCKS) if is_free else _BLOCKS
    symmetric = Backend(
        "symmetric",
        _num_blocks(m, n, overhead, blocks),
        _num_blocks(m, m, overhead, blocks),
        panels=_num_panels(m, n, dtype),
    )
    gram = None
    if requested != "symmetric":
        gram = _choose_gram(m, n, coefficients, dtype, overhead)
    if not is_free:
        return gram or symmetric

    def cost_of(backend: Backend) -> float:
        return cost(backend, m, n, len(coefficients), overhead)

    best = STANDARD
    for backend in (symmetric, gram):
        if backend is not None and cost_of(backend) < _MIN_GAIN * cost_of(best):
            best = backend
    return best


def _num_blocks(m: int, k: int, overhead: _Overhead, among: Sequence[int]) -> int:
    """Best blocks of a product ``(m, k) (k, m)``."""
    possible = [blocks for blocks in among if blocks <= max(m, 2)]
    return min(possible, key=lambda blocks: _product_cost(m, k, blocks, overhead))


def _num_panels(m: int, n: int, dtype: torch.dtype) -> int:
    if dtype.itemsize > 2 or m < _PANEL_MIN_ROWS or n < _PANEL_MIN_ASPECT * m:
        return 1
    return round(n / _PANEL_SIDE)


def _tiled(m: int, dtype: torch.dtype) -> Backend:
    # Imported here: the package is not everywhere.
    from amo_dist.kernels.triton_symmetric import tiling

    tiles = -(-m // tiling(m, dtype).tile)
    return Backend("triton", tiles, tiles)


def _choose_gram(
    m: int, n: int, coefficients: tuple[Triple, ...], dtype: torch.dtype, overhead: _Overhead
) -> Backend | None:
    """The cheapest stable one, if any."""
    unit = 2 * torch.finfo(dtype).eps
    if unit > _GRAM_MAX_UNIT:
        return None
    steps = len(coefficients)
    gram_blocks = _num_blocks(m, n, overhead, (1, *_BLOCKS))
    square_blocks = _num_blocks(m, m, overhead, (1, *_BLOCKS))
    candidates = sorted(
        (Backend("gram", gram_blocks, square_blocks, restarts) for restarts in _tables(steps)),
        key=lambda backend: cost(backend, m, n, steps, overhead),
    )
    return next((each for each in candidates if is_stable(coefficients, each.restarts, unit)), None)


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
    if backend.name != "standard" or m < _BATCH_MIN_ROWS or not _multiplies_fast(dtype):
        return 1
    in_use = 2 * (m * n + m * m) * dtype.itemsize
    return max(1, _BATCH_BYTES // in_use)


def _multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes the products of this dtype in the processor's own instructions.

    Only there was a batch found to equal the loop over its matrices bit for bit.
    """
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def even_parts(length: int, count: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of consecutive parts whose lengths differ by one at most.

    Args:
        length: Of all together.
        count: Of parts.
    """
    return itertools.pairwise(length * part // count for part in range(count + 1))


def short_side(x: Tensor) -> Tensor:
    """A view of each matrix with as many rows as its short side: ``x``, or ``x.mT`` where tall."""
    return x.mT if x.shape[-2] > x.shape[-1] else x


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
    run = _iterate_gram if backend.name == "gram" else _iterate
    return run(x, coefficients, backend, gram, torch.empty_like(x) if out is None else out)


def _iterate(
    x: Tensor,
    coefficients: Sequence[Triple],
    backend: Backend,
    gram: Tensor | None,
    last: Tensor,
) -> Tensor:
    multiply, square = _symmetric_products(backend)
    small, polynomial = (_square(use, x) for use in ("gram", "polynomial"))
    results = _results(last, len(coefficients))
    for a, b, c in coefficients:
        gram = multiply(short_side(x), out=small) if gram is None else gram
        square(gram, gram, b, c, out=polynomial)
        x = _times(polynomial, x, a, backend.panels, out=next(results))
        gram = None
    return x


def _square(use: str, x: Tensor) -> Tensor:
    m = min(x.shape[-2:])
    return scratch(use, (*x.shape[:-2], m, m), x.dtype, x.device)


def _results(last: Tensor, count: int) -> Iterator[Tensor]:
    """Where large products go: into two in turn, the last one into what is returned."""
    other = scratch("iterate", last.shape, last.dtype, last.device)
    return (last if remaining % 2 == 0 else other for remaining in range(count)[::-1])


def _times(polynomial: Tensor, x: Tensor, beta: float, panels: int = 1, *, out: Tensor) -> Tensor:
    """``(beta I + polynomial) X`` by panels, X being what `short_side` shows of ``x``."""
    is_tall = x.shape[-2] > x.shape[-1]
    long_dim = x.dim() - 2 if is_tall else x.dim() - 1
    for start, stop in even_parts(x.shape[long_dim], panels):
        part, result = x, out
        if panels > 1:  # slices cost what a small product does not take
            part, result = (each.narrow(long_dim, start, stop - start) for each in (x, out))
        left, right = (part, polynomial) if is_tall else (polynomial, part)
        _fused(part, left, right, beta, out=result)
    return out


def _symmetric_products(backend: Backend) -> Iterator[Callable[..., Tensor]]:
    """For X and for squares, ``(x, added, beta, alpha, *, out)``: ``beta added + alpha x x^T``."""
    if backend.name == "triton":
        from amo_dist.kernels.triton_symmetric import symmetric_product

        return iter((symmetric_product, symmetric_product))

    def by_blocks(num_blocks: int) -> Callable[..., Tensor]:
        return lambda x, *added, out: _symmetric(x, x, num_blocks, *added, out=out)

    return map(by_blocks, (backend.gram_blocks, backend.square_blocks))


def _iterate_gram(
    x: Tensor,
    coefficients: Sequence[Triple],
    backend: Backend,
    gram: Tensor | None,
    last: Tensor,
) -> Tensor:
    """All small matrices are polynomials of one A: they commute, and every product is symmetric."""
    blocks = backend.square_blocks
    bounds = (0, *backend.restarts, len(coefficients))
    for start, stop in itertools.pairwise(bounds):
        short = short_side(x)
        gram = _symmetric(short, short, backend.gram_blocks) if gram is None else gram
        factor: Tensor | None = None
        for step in range(start, stop):
            a, b, c = coefficients[step]
            polynomial = _symmetric(gram, gram, blocks, gram, b, c)
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            factor = polynomial if factor is None else _symmetric(polynomial, factor, blocks)
            if step + 1 < stop:
                half = _symmetric(polynomial, gram, blocks)
                gram = _symmetric(half, polynomial, blocks)
        assert factor is not None
        factors = (x, factor) if x.shape[-2] > x.shape[-1] else (factor, x)
        x, gram = torch.matmul(*factors, out=last if stop == len(coefficients) else None), None
    return x


def _fused(
    added: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float = 1.0, *, out: Tensor
) -> Tensor:
    """``beta * added + alpha * left right`` with one rounding, which halves the bf16 error."""
    fused = torch.addmm if left.dim() == 2 else torch.baddbmm
    return fused(added, left, right, beta=beta, alpha=alpha, out=out)


def _symmetric(
    left: Tensor,
    right: Tensor,
    num_blocks: int,
    added: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``beta * added + alpha * left right^T``, known to be symmetric, by blocks of rows."""
    m = left.shape[-2]
    out = left.new_empty(*left.shape[:-1], m) if out is None else out
    if num_blocks == 1:  # without the slices, which cost what a narrow product does not take
        if added is None:
            return torch.matmul(left, right.mT, out=out)
        return _fused(added, left, right.mT, beta, alpha, out=out)
    for start, stop in even_parts(m, num_blocks):
        rows, columns = left[..., start:stop, :], right[..., start:, :].mT
        upper = out[..., start:stop, start:]
        if added is None:
            torch.matmul(rows, columns, out=upper)
        else:
            _fused(added[..., start:stop, start:], rows, columns, beta, alpha, out=upper)
        if stop < m:
            # Both contiguous: a strided transposed copy takes ten times as long.
            below = upper[..., stop - start :].contiguous().mT.contiguous()
            out[..., stop:, start:stop] = below
    return out
