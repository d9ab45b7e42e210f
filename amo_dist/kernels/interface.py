"""Provisional: the kernels of one device behind one door."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amo_dist.kernels import elementwise
from amo_dist.kernels.backends import check_backend, choose_backend
from amo_dist.kernels.graphs import GraphCache
from amo_dist.kernels.newton_schulz import Orthogonalizer
from amo_dist.kernels.scratch import scratch

BACKENDS = ("standard", "symmetric", "gram", "triton")


class Kernels:
    def __init__(self, device, ns_dtype, ns_backend, cuda_graphs):
        self.device, self.ns_dtype, self.backend = device, ns_dtype, ns_backend
        self.task_elements = 2**21 if device.type == "cpu" else None
        self._graphs = GraphCache() if cuda_graphs else None
        self._n = 0

    update_momentum = staticmethod(elementwise.update_momentum)
    nesterov = staticmethod(elementwise.nesterov)
    apply_update = staticmethod(elementwise.apply_update)
    exceed = staticmethod(elementwise.exceed)

    def begin_step(self):
        if self._graphs is not None:
            self._graphs.begin_step()

    def backend_name(self, shape, coefficients):
        return choose_backend(
            shape,
            coefficients,
            dtype=self.ns_dtype,
            device_type=self.device.type,
            requested=self.backend,
        ).name

    def drop_nonfinite(self, updates):
        if updates.device.type == "cpu" and math.isfinite(updates.sum()):
            return None
        bad = ~torch.isfinite(elementwise.largest_entry(updates))
        updates.masked_fill_(bad, 0.0)
        return bad.view(-1)

    def orthogonalizer(
        self, count, shape, coefficients, norm_scale, preconditioner
    ) -> Callable[[Sequence[Tensor]], Tensor]:
        run = Orthogonalizer(
            count,
            shape,
            coefficients,
            norm_scale=norm_scale,
            preconditioner=preconditioner,
            dtype=self.ns_dtype,
            device_type=self.device.type,
            backend=self.backend,
        )
        self._n += 1
        use = f"result {self._n}"

        def go(matrices):
            inputs = [m.to(self.ns_dtype) for m in matrices]
            out = scratch(use, (count, *shape), self.ns_dtype, self.device)
            run(inputs, out=out)
            return out

        return go


def make_kernels(device, *, ns_dtype, ns_backend, cuda_graphs) -> Kernels:
    if cuda_graphs and device.type != "cuda":
        raise ValueError(
            f"cuda_graphs: found True with parameters on {device.type}, expected them on cuda"
        )
    check_backend("ns_backend", ns_backend, dtype=ns_dtype, device_type=device.type)
    return Kernels(device, ns_dtype, ns_backend, cuda_graphs)
