"""Results of Newton-Schulz at the size of an exact polar factor.

Where Newton-Schulz stops early, small singular values stay below one, and the update is smaller
than that of an exact polar factor: fewer steps are a lower learning rate too. Scaled to the exact
norm, a schedule decides the direction of an update alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amo_dist.kernels.team import Team


def scale_to_exact_norm(updates: Tensor, shape: Sequence[int], team: Team | None = None) -> None:
    """Scale each matrix, in place, to the Frobenius norm of an exact polar factor.

    That is ``sqrt(min(m, n))``. Norms and factors are float32, of float64 updates float64, and a
    factor is multiplied in that dtype and rounded once. An all-zero matrix stays zero. On CPU a
    matrix gets the same bits alone and in a batch, but for teams, whose sums depend on the number
    of members.

    Args:
        updates: Finite, ``(b, m, n)``, not empty, any floating dtype; modified.
        shape: ``(m, n)`` of each whole matrix.
        team: Whose slabs these are; adds up the squared norms.
    """
    wide = torch.promote_types(updates.dtype, torch.float32)
    if team is None and updates.device.type == "cpu":
        # One by one: a reduction over a batch need not add in the order of one over a matrix.
        for update in updates.unbind():
            update.mul_(_factor(torch.linalg.vector_norm(update, dtype=wide), shape))
        return
    norms = torch.linalg.vector_norm(updates, dim=(-2, -1), keepdim=True, dtype=wide)
    if team is not None:
        team.add(norms.square_())
        norms.sqrt_()
    updates.mul_(_factor(norms, shape))


def _factor(norms: Tensor, shape: Sequence[int]) -> Tensor:
    return math.sqrt(min(shape)) / norms.masked_fill_(norms == 0, 1.0)
