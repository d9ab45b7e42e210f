"""What the engine asks of a device: `Kernels`, made once by `amo_dist.kernels.devices`.

The base classes are the plain form, for any device. `amo_dist.kernels.cpu` and
`amo_dist.kernels.cuda` override what they do faster. A new kernel is a method here, its plain form
beside it, and an override in ``cpu/kernels.py`` or ``cuda/kernels.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amo_dist.config import Triple
from amo_dist.kernels import elementwise
from amo_dist.kernels.cpu.backends import STANDARD, Backend, choose_backend
from amo_dist.kernels.cpu.program import Program
from amo_dist.kernels.cpu.workspace import Workspace
from amo_dist.kernels.plain import Recipe, first_iterate, iterate
from amo_dist.kernels.scratch import Scratch
from amo_dist.kernels.team import Team, orthogonalize_slabs

Tensors = Sequence[Tensor]


def backend_key(shape: Sequence[int], coefficients: Sequence[Triple]) -> str:
    """What the time of Newton-Schulz depends on: ``2048x6144, 5 steps``."""
    m, n = shape
    return f"{m}x{n}, {len(coefficients)} steps"


class Orthogonalizer:
    """Newton-Schulz for matrices of one shape, laid out once and run over and over.

    Args:
        recipe: What is done to each matrix.
        keep: Puts results where they are found again at the next run; None leaves them.
    """

    def __init__(self, recipe: Recipe, keep: Callable[[Tensor], Tensor] | None = None) -> None:
        self.recipe = recipe
        self._keep = keep

    def __call__(self, matrices: Tensors) -> Tensor:
        """Orthogonalize as training does: whatever arrives is first rounded to the dtype.

        Also what came wide to be observed: observing changes no bit of training.

        Args:
            matrices: As many ``(m, n)`` as were laid out for, on one device, in any floating
                dtype; not modified.

        Returns:
            ``(count, m, n)`` in ``recipe.dtype``; lent, see `Kernels.orthogonalizer`.
        """
        return self.run([matrix.to(self.recipe.dtype) for matrix in matrices])

    def run(self, matrices: Tensors) -> Tensor:
        """The same without rounding first: norms are those of the matrices as they come."""
        if self.recipe.backend.name == "single":
            found = torch.stack([self._orthogonalize(matrix) for matrix in matrices])
        else:
            x = matrices[0] if len(matrices) == 1 else torch.stack(list(matrices))
            found = self._orthogonalize(x).view(len(matrices), *x.shape[-2:])
        return found if self._keep is None else self._keep(found)

    def _orthogonalize(self, x: Tensor) -> Tensor:
        """One matrix ``(m, n)`` or one batch ``(b, m, n)``."""
        return self._iterate(*first_iterate(x, self.recipe))

    def _iterate(self, first: Tensor, gram: Tensor | None = None) -> Tensor:
        coefficients, backend = self.recipe.coefficients, self.recipe.backend
        if backend.name in ("standard", "single"):
            return iterate(first, coefficients, gram)
        out, memory, has_gram = torch.empty_like(first), Workspace(first.device), gram is not None
        program = Program(first, out, coefficients, backend, memory, has_gram=has_gram)
        if gram is not None:
            program.gram.copy_(gram)
        program.run()
        return out


class TeamOrthogonalizer(Orthogonalizer):
    """Newton-Schulz for slabs of matrices; see `amo_dist.kernels.team`.

    Args:
        recipe: What is done to each matrix.
        keep: As for `Orthogonalizer`.
        team: Who shares them.
        is_tall: Whether the whole matrices have more rows than columns.
    """

    def __init__(
        self, recipe: Recipe, keep: Callable[[Tensor], Tensor], team: Team, *, is_tall: bool
    ) -> None:
        super().__init__(recipe, keep)
        self._team, self._is_tall = team, is_tall

    def _orthogonalize(self, x: Tensor) -> Tensor:
        return orthogonalize_slabs(x, self.recipe, self._team, is_tall=self._is_tall)


class Kernels:
    """All that an engine computes on tensors of one device, in the plain form.

    Args:
        ns_dtype: Of the products of Newton-Schulz and of its results.
        ns_backend: How its steps are run; see `amo_dist.config.NS_BACKENDS`.
    """

    is_asynchronous = True
    """Whether calls return before their work is done, so that reading a value waits for it."""
    task_elements: int | None = None
    """How many elements to orthogonalize together, so that caches hold them; None for all."""
    _auto = "standard"
    """What ``auto`` means until something is chosen: the cost model knows a CPU alone."""

    def __init__(self, ns_dtype: torch.dtype, ns_backend: str = "auto") -> None:
        self.ns_dtype = ns_dtype
        self.ns_backend = ns_backend
        self.candidates: Sequence[str] = ()
        """What ``auto`` may choose among, ``standard`` first; none where a cost model decides."""
        self.chosen: dict[str, str] = {}
        """What ``auto`` means for a `backend_key`; see `amo_dist.kernels.choice`."""
        self._scratch = Scratch()
        self.bad: Tensor | None = None
        """As told to `begin_step`."""

    def begin_step(self, bad: Tensor | None = None) -> None:
        """Tell that an optimizer step begins.

        Args:
            bad: 0-dim, boolean, on the device: where true, momentum and parameters stay as they
                are, whatever comes in. Only where `is_asynchronous`.
        """
        self.bad = bad

    def fetch(self, values: Tensor) -> Callable[[], list[int]]:
        """Begin to bring a small vector to the host.

        Args:
            values: 1-D, of integers; may change after this returns.

        Returns:
            What waits until it is there, and returns it.
        """
        return values.clone().tolist

    def update_momentum(self, buffers: Tensors, grads: Tensors, momentum: float) -> None:
        """See `elementwise.update_momentum`."""
        elementwise.update_momentum(buffers, grads, momentum, bad=self.bad, scratch=self._scratch)

    def nesterov(self, buffers: Tensors, grads: Tensors, momentum: float, out: Tensors) -> None:
        """See `elementwise.nesterov`."""
        elementwise.nesterov(buffers, grads, momentum, out, scratch=self._scratch)

    def apply_update(
        self,
        params: Tensors,
        updates: Tensors,
        *,
        lr: float | Tensor,
        weight_decay: float,
        scale: Sequence[float],
        cautious: bool = False,
    ) -> None:
        """See `elementwise.apply_update`; one scale for each parameter."""
        elementwise.apply_update(
            params,
            updates,
            lr=lr,
            weight_decay=weight_decay,
            scale=scale,
            cautious=cautious,
            bad=self.bad,
            scratch=self._scratch,
        )

    def exceed(self, tensors: Tensors, bounds: Sequence[float] | Tensor) -> Tensor:
        """See `elementwise.exceed`."""
        return elementwise.exceed(tensors, bounds)

    def drop_nonfinite(self, updates: Tensor, team: Team | None = None) -> Tensor | None:
        """Zero, in place, each matrix that holds NaN or inf: a parameter once NaN stays so.

        Args:
            updates: ``(b, m, n)``, not empty; modified.
            team: Whose slabs these are: each is zeroed on all members, or on none.

        Returns:
            Which did, boolean, ``(b,)``; None where it is known at once that none did.
        """
        bad = ~torch.isfinite(elementwise.largest_entry(updates))
        if team is not None:
            flags = bad.to(torch.float32)
            team.take_greatest(flags)
            bad = flags > 0
        updates.masked_fill_(bad, 0.0)
        return bad.view(-1)

    def backend(self, shape: Sequence[int], coefficients: Sequence[Triple]) -> Backend:
        """What runs these steps on matrices of a shape ``(m, n)``."""
        requested = self.ns_backend
        if requested == "auto":
            requested = self.chosen.get(backend_key(shape, coefficients), self._auto)
        return choose_backend(shape, coefficients, self.ns_dtype, requested)

    def backend_name(self, shape: Sequence[int], coefficients: Sequence[Triple]) -> str:
        """Its name, for metrics."""
        return self.backend(shape, coefficients).name

    def orthogonalizer(
        self,
        count: int,
        shape: Sequence[int],
        coefficients: Sequence[Triple],
        norm_scale: float,
        preconditioner: str,
        *,
        slot: int = 0,
        eps: float = 1e-7,
    ) -> Orthogonalizer:
        """Lay out Newton-Schulz for a batch, to be run for as long as its schedule stays.

        Arguments are those of `amo_dist.kernels.newton_schulz.orthogonalize`, and are not checked.
        Results are lent: the next call of any orthogonalizer of the same slot may overwrite them.
        On CPU ask for the largest first, and no memory is held twice.

        Args:
            count: Of matrices.
            shape: ``(m, n)`` of each, neither 0.
            coefficients: One ``(a, b, c)`` for each step.
            norm_scale: Safety factor.
            preconditioner: ``"frobenius"`` or ``"aol"``.
            slot: Batches whose results are needed at the same time take one each.
            eps: Added to the norm.
        """
        steps, backend = tuple(coefficients), self.backend(shape, coefficients)
        recipe = Recipe(steps, norm_scale, preconditioner, self.ns_dtype, eps, backend)
        return self._lay_out((count, *shape), recipe, slot)

    def team_orthogonalizer(
        self,
        shape: Sequence[int],
        coefficients: Sequence[Triple],
        norm_scale: float,
        preconditioner: str,
        team: Team,
        *,
        slot: int = 0,
        eps: float = 1e-7,
    ) -> Orthogonalizer:
        """As `orthogonalizer`, for slabs of matrices that a team shares.

        Args:
            shape: ``(m, n)`` of each whole matrix.
            coefficients: One ``(a, b, c)`` for each step.
            norm_scale: Safety factor.
            preconditioner: ``"frobenius"`` or ``"aol"``.
            team: Who shares them.
            slot: As there.
            eps: Added to the norm.
        """
        steps = tuple(coefficients)
        recipe = Recipe(steps, norm_scale, preconditioner, self.ns_dtype, eps, STANDARD)
        is_tall = shape[0] > shape[1]
        return TeamOrthogonalizer(recipe, self._keeper(slot), team, is_tall=is_tall)

    def _lay_out(self, shape: Sequence[int], recipe: Recipe, slot: int) -> Orthogonalizer:
        return Orthogonalizer(recipe, self._keeper(slot))

    def _keeper(self, slot: int) -> Callable[[Tensor], Tensor]:
        """Copies results to memory that stays, so that views of them need not be made anew."""

        def keep(found: Tensor) -> Tensor:
            _, (kept,) = self._scratch.take(f"result {slot}", [found], found.dtype)
            return kept.copy_(found)

        return keep
