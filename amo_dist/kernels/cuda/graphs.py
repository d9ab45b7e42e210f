"""CUDA graphs of work that repeats from step to step, such as locked Newton-Schulz.

A graph is one launch where a step of Newton-Schulz has a dozen; it pays where matrices are small
beside the time that the host takes to launch. Captured and replayed are the same kernels on the
same values, hence the same bits. Not yet run on a GPU.

What to capture, and for how long, `GraphCache` decides without touching a device.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Capture = Callable[[Function, Tensor], Function]
"""From a function and an example of its input to what replays it on any input of that shape."""

MIN_STEPS = 3
"""Optimizer steps in which the same work must come up before it is captured."""
MAX_IDLE_STEPS = 20
"""Optimizer steps without a use after which work is forgotten, and its graph freed."""
MAX_GRAPHS = 64
"""Graphs held at once; beyond that, work runs as it is."""


@dataclasses.dataclass(slots=True)
class _Entry:
    last_step: int = 0
    num_steps: int = 0
    replay: Function | None = None


class GraphCache:
    """Captures what repeats.

    Work is known by a key. It runs as it is in the first ``MIN_STEPS - 1`` steps that bring its
    key, and is captured in the next one: a transition, whose coefficients change at every step,
    captures nothing. With ``MAX_GRAPHS`` held no more are captured; what idles for more than
    ``MAX_IDLE_STEPS`` steps makes room.

    Args:
        capture: Makes graphs; on CUDA where none is given.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = CudaCapture() if capture is None else capture
        self._entries: dict[Hashable, _Entry] = {}
        self._step = 0

    @property
    def num_graphs(self) -> int:
        """Graphs held now."""
        return sum(entry.replay is not None for entry in self._entries.values())

    def begin_step(self) -> None:
        """Count an optimizer step: one key comes up many times within it."""
        self._step += 1
        oldest = self._step - MAX_IDLE_STEPS
        used = {key: entry for key, entry in self._entries.items() if entry.last_step >= oldest}
        self._entries = used

    def run(self, key: Hashable, function: Function, x: Tensor) -> Tensor:
        """``function(x)``, by replay where it has been captured.

        Args:
            key: Equal keys are the same work: the same function, shape, dtype and device.
            function: Launches the same kernels at every call, and never waits for the device.
            x: Not modified.

        Returns:
            A tensor of its own, which later calls leave alone.
        """
        entry = self._entries.setdefault(key, _Entry())
        entry.num_steps += entry.last_step != self._step
        entry.last_step = self._step
        if entry.replay is None:
            if entry.num_steps < MIN_STEPS or self.num_graphs >= MAX_GRAPHS:
                return function(x)
            entry.replay = self._capture(function, x)
        return entry.replay(x)


class SharedPool:
    """Handle of a memory pool for graphs, made anew once all that lived in the last one are gone.

    PyTorch asserts that a pool which all of its graphs have left is never captured into again.

    Args:
        make: Makes a handle.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._handle: Any = None
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that have been captured into the handle."""

    def handle(self) -> Any:
        """What to capture into."""
        if not self.graphs:
            self._handle = self._make()
        return self._handle


class CudaCapture:
    """Captures on CUDA; all graphs share one pool of memory, and one stream to capture on.

    That is safe because replays follow one another on one stream, and each result is copied out of
    the pool before the next: a graph may overwrite whatever another has left behind. cuBLAS keeps
    a workspace, of 32 MiB on an H100, for each stream it has seen, for good.
    """

    def __init__(self) -> None:
        self._pool = SharedPool(torch.cuda.graph_pool_handle)
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, function: Function, example: Tensor) -> Function:
        """Warm up on a side stream, and capture there; see ``Capture``."""
        with torch.cuda.device(example.device):
            self._stream = side = self._stream or torch.cuda.Stream()
            static = example.clone(memory_format=torch.contiguous_format)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                function(static)  # compiles kernels and makes cuBLAS's workspaces
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as NCCL's watchdog, may go on calling CUDA meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool.handle(), stream=side, capture_error_mode="thread_local"
            ):
                result = function(static)
            self._pool.graphs.add(graph)

        def replay(x: Tensor) -> Tensor:
            static.copy_(x)
            graph.replay()
            return result.clone()

        return replay
