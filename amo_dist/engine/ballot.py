"""The vector of integers that ranks reduce before a step, and what it says.

Its maximum over the ranks carries everything: whose text differs, who has which gradient, whose is
unusable. A rank's mark is its number plus one, so that the greatest mark names a rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import control_device, max_over, text_mark
from amo_dist.engine.parameters import Parameters, gradient_is_foreign, raw_gradient
from amo_dist.engine.world import World, slot_of
from amo_dist.kernels.interface import Kernels

_ABSENT, _PRESENT, _EMPTY, _FOREIGN = range(4)
_MISPLACED = 4
"""Added to what kind of gradient it is."""
_HEAD = 5
"""The mark of the text and its negative, whether a rank waits for the verdict, whether one does
not, whether one has a gradient that counts."""
_MOST_PATTERNS = 64
"""Patterns of gradients, existing and missing, and lists of matrices whose tensors are kept."""


def momentum_bound(dtype: torch.dtype, momentum: float) -> float:
    """Largest gradient entry that can never overflow a momentum buffer of this dtype.

    A sum of gradients below ``bound`` stays below ``bound / (1 - momentum)``, with Nesterov too;
    a factor of two is left for rounding.
    """
    return torch.finfo(dtype).max * (1.0 - momentum) / 2.0


def second_moment_bound(dtype: torch.dtype) -> float:
    """Largest gradient entry whose square AdamW's ``exp_avg_sq`` can hold, with room to round.

    An infinite second moment never recovers: its parameter would stand still for good.
    """
    return math.sqrt(torch.finfo(dtype).max) / 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Marks:
    """What the ranks told.

    Attributes:
        is_unlike: Whether their texts differ.
        is_mixed: Whether some wait for the verdict and some do not.
        has_gradient: Whether any rank has the gradient of any matrix; where the world has no
            matrix, of any parameter.
        clashes: By slot of a parameter, a rank's mark that has its gradient and one that has not.
        foreign: By slot of a parameter, the mark of a rank with a gradient of another form.
        gradients: By slot of a parameter, the mark of a rank with an unusable gradient.
        updates: By place of a matrix in the registry, the mark of a rank with a bad update.
    """

    is_unlike: bool
    is_mixed: bool
    has_gradient: bool
    clashes: dict[int, tuple[int, int]]
    foreign: dict[int, int]
    gradients: dict[int, int]
    updates: dict[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """A ballot that all ranks have cast.

    Attributes:
        vector: Maximum over the ranks.
        grads: This rank's part of each gradient; in placements of its own where it is misplaced.
        is_misplaced: Whether any is.
    """

    vector: Tensor
    grads: list[Tensor | None]
    is_misplaced: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Pattern:
    """What follows from which gradients exist, on the device for as long as that is so."""

    told: Tensor
    """The vector without mark and numbers."""
    held: tuple[int, ...]
    """Parameters with a gradient that has entries here."""
    slots: Tensor
    """Of those."""
    bounds: Tensor | list[float]
    """Of those."""
    is_misplaced: bool
    """Whether a gradient is in placements of its own."""


class Ballot:
    """Casts and counts.

    Its tensors lie on the device of the parameters, unless values there are read at no cost. In a
    step whose gradients exist as they did before, nothing is copied to it from the host: numbers
    come as arguments of kernels.

    Args:
        world: Gives every parameter and matrix of the world its slots.
        parameters: Of this process.
        config: Decides the largest gradient entry that each of them can take.
        kernels: Of the parameters' device.
    """

    def __init__(
        self, world: World, parameters: Parameters, config: MuonConfig, kernels: Kernels
    ) -> None:
        self._group, self._kernels, self._mark = world.group, kernels, world.rank + 1
        self._is_far = kernels.is_asynchronous
        self._num_ranks = 1 + max((max(ranks, default=0) for _, ranks in world.slots), default=0)
        entries = parameters.entries
        self._momentum_dtype = getattr(torch, config.momentum_dtype)
        self._entries = entries
        self._momentum = config.momentum
        self._counts = [bool(entry.views) or not world.registry for entry in entries]
        slot_by_key = {key: slot for slot, key in enumerate(world.slots)}
        keys = [slot_of(entry.name, entry.layout.ranks) for entry in entries]
        self._slots = [slot_by_key[key] for key in keys]
        # A tensor of one rank's own may have a gradient whatever its namesakes have.
        self._is_shared = [bool(ranks) for _, ranks in keys]
        self._place_by_matrix = {matrix.name: i for i, matrix in enumerate(world.registry)}
        self._sizes = [_HEAD, *[len(world.slots)] * 4, len(world.registry)]
        self._device = parameters.device if self._is_far else control_device(world.group)
        self._vector = torch.zeros(sum(self._sizes), dtype=torch.int64, device=self._device)
        head, *self._parts = self._vector.split(self._sizes)
        self._heads = head.split(1)
        self._patterns: dict[tuple[bool, bytes], _Pattern] = {}
        self._places: dict[tuple[str, ...], Tensor] = {}

    def cast(
        self,
        text: str,
        params: Sequence[Tensor | None],
        updates: tuple[tuple[str, ...], Tensor] | None,
        momentum: float = 0.0,
        *,
        waits: bool,
    ) -> Cast:
        """Tell all ranks, and hear from them; a collective over the world.

        Args:
            text: What must be alike on all ranks.
            params: Whose gradients to tell of; None for each that is not asked for.
            updates: Names of matrices, and whether the last update of each was bad, on the device.
            momentum: The greatest of any group, which bounds gradients from now on.
            waits: Whether this rank reads the answer before it goes on.
        """
        if momentum > self._momentum:
            self._momentum = momentum
            self._patterns.clear()
        kinds, grads = bytearray(), []
        for param in params:
            kind, grad = _kind(param)
            kinds.append(kind)
            grads.append(grad)
        pattern = self._pattern(waits, bytes(kinds))
        self._vector.copy_(pattern.told)
        mark = text_mark(text)
        self._heads[0].fill_(mark)
        self._heads[1].fill_(-mark)
        *_, gradients, matrices = self._parts
        if pattern.held:
            is_bad = self._kernels.exceed([grads[i] for i in pattern.held], pattern.bounds)  # type: ignore[misc]
            gradients.index_copy_(0, pattern.slots, self._marks(is_bad))
        if updates is not None:
            names, flags = updates
            matrices.index_copy_(0, self._places_of(names), self._marks(flags))
        vector = max_over(self._vector, self._group)
        return Cast(vector, grads, pattern.is_misplaced)

    def is_bad(self, vector: Tensor) -> Tensor:
        """Whether a vector of `Cast` forbids the step: 0-dim, boolean, on the device."""
        head, present, absent, *rest = vector.split(self._sizes)
        unlike = head[:1] + head[1:2]
        return torch.cat([unlike, torch.minimum(present, absent), *rest]).any()

    def count(self, vector: Sequence[int]) -> Marks:
        """What a vector of `Cast` says, read on the host."""
        parts = _split(vector, self._sizes)
        (
            (mark, negated, waits, defers, has_gradient),
            present,
            absent,
            foreign,
            gradients,
            updates,
        ) = parts
        both = enumerate(zip(present, absent, strict=True))
        return Marks(
            is_unlike=mark != -negated,
            is_mixed=bool(waits and defers),
            has_gradient=bool(has_gradient),
            clashes={slot: pair for slot, pair in both if all(pair)},
            foreign=_set(foreign),
            gradients=_set(gradients),
            updates=_set(updates),
        )

    def _marks(self, flags: Tensor) -> Tensor:
        """This rank's mark where a flag is set, else 0."""
        marks = flags.to(torch.int64).mul_(self._mark)
        return marks if self._is_far else marks.to(self._device)

    def _pattern(self, waits: bool, kinds: bytes) -> _Pattern:
        found = self._patterns.get((waits, kinds))
        if found is None:
            if len(self._patterns) >= _MOST_PATTERNS:
                self._patterns.clear()
            found = self._patterns[waits, kinds] = self._lay_out(waits, kinds)
        return found

    def _lay_out(self, waits: bool, kinds: bytes) -> _Pattern:
        """Copies to the device, and waits for that: once for each pattern of gradients."""
        exists = any(kind != _ABSENT for kind in itertools.compress(kinds, self._counts))
        head = [0, 0, waits, not waits, exists]
        told = [head, *([0] * size for size in self._sizes[1:])]
        _, present, absent, foreign, *_ = told
        for slot, kind, is_shared in zip(self._slots, kinds, self._is_shared, strict=True):
            if kind == _FOREIGN:
                foreign[slot] = self._mark
            if is_shared:
                (absent if kind == _ABSENT else present)[slot] = self._mark
        held = tuple(i for i, kind in enumerate(kinds) if kind & ~_MISPLACED == _PRESENT)
        # Of a sum each rank sees one term.
        bounds = [self._bound(i) / (self._num_ranks if kinds[i] & _MISPLACED else 1) for i in held]
        return _Pattern(
            torch.tensor([*itertools.chain(*told)], dtype=torch.int64, device=self._device),
            held,
            torch.tensor([self._slots[i] for i in held], dtype=torch.int64, device=self._device),
            torch.tensor(bounds, dtype=torch.float64, device=self._device)
            if self._is_far
            else bounds,
            any(kind & _MISPLACED for kind in kinds),
        )

    def _bound(self, index: int) -> float:
        """Largest entry that the gradient of a parameter may have."""
        entry = self._entries[index]
        if entry.views:
            return momentum_bound(self._momentum_dtype, self._momentum)
        return second_moment_bound(entry.param.dtype)

    def _places_of(self, names: tuple[str, ...]) -> Tensor:
        places = self._places.get(names)
        if places is None:
            if len(self._places) >= _MOST_PATTERNS:
                self._places.clear()
            found = [self._place_by_matrix[name] for name in names]
            places = torch.tensor(found, dtype=torch.int64, device=self._device)
            self._places[names] = places
        return places


def _kind(param: Tensor | None) -> tuple[int, Tensor | None]:
    """What kind of gradient a parameter has, and this rank's part of it."""
    if param is None or param.grad is None:
        return _ABSENT, None
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        # As `gradient_is_misplaced` and `raw_gradient`, which take longer, for hundreds.
        kind = 0 if grad._spec.placements == param._spec.placements else _MISPLACED
        local = grad._local_tensor
        grad = local if type(local) is Tensor else raw_gradient(grad)
    elif gradient_is_foreign(param):
        return _FOREIGN, None
    else:
        kind = 0
    return kind + (_PRESENT if grad.numel() else _EMPTY), grad


def _set(marks: Sequence[int]) -> dict[int, int]:
    return {slot: mark for slot, mark in enumerate(marks) if mark}


def _split(values: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    for size in sizes:
        yield values[start : start + size]
        start += size
