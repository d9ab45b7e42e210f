"""What trial schedules leave of the spectrum of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from amo_dist.kernels.geometry import ell


@torch.no_grad()
def observe(x: Tensor, coefficients: Tensor, norm_scale: float) -> Tensor:
    """``ell`` of one matrix, then the squared residuals and distances that schedules leave."""
    value = ell(x)
    num = coefficients.shape[0]
    if value.isnan():
        return torch.full((1 + 2 * num,), float("nan"), dtype=torch.float64)
    sigma = torch.linalg.svdvals(x.double())
    y = (sigma / (norm_scale * torch.linalg.vector_norm(sigma))).expand(num, -1)
    for k in range(coefficients.shape[1]):
        a, b, c = coefficients[:, k, :, None].unbind(1)
        sq = y * y
        y = y * (a + sq * (b + sq * c))
    return torch.cat([value.view(1), (y * y - 1).square().mean(1), (y - 1).square().mean(1)])
