"""The vote of this rank on its gradients, in a small integer vector that all ranks reduce.

The reduction is a maximum. A flag holds the number of a rank plus one, so the greatest rank that
raised it shows. A fingerprint stands in the vector together with its negative, so that unlike
fingerprints show in the maximum, too.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from amo_dist.compat import local_of, placements_of
from amo_dist.distributed.agreement import control_device, fingerprint56, max_over
from amo_dist.engine.parameters import Param, Parameters
from amo_dist.engine.world import World, sharing_ranks

ABSENT, PRESENT, EMPTY, FOREIGN = range(4)
"""Kinds of gradients: none, with entries on this rank, without, and in no form of the parameter."""
MISPLACED = 4
"""Addend for the kind of a gradient whose placements differ from those of its parameter."""
_EXISTS, _FOREIGN, _GRADIENT, _UPDATE, _MARKS = range(5)
"""Positions in the vector. ``_EXISTS`` is 1 if any gradient exists, and 2 if one of a matrix does.
From ``_MARKS`` on come fingerprints: of waiting, of the text, and, for each set of ranks that
shares parameters, of which gradients exist; then the negatives of all of them."""
_TEXT = _MARKS + 1
_ABSTAIN = -(2**60)
"""Identity of the maximum: fingerprint, and negative, for a set of ranks without this one."""
_MAX_PATTERNS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """Constants of a vote that follow from which gradients exist, on the device.

    Attributes:
        kinds: Kind of each parameter's gradient.
        vector: This rank's vote, but for the text and the values.
        nonempty: Indices of parameters whose gradient has entries on this rank.
        bounds: Largest entry that each gradient of ``nonempty`` may have.
        is_misplaced: Whether a gradient has placements of its own.
    """

    kinds: bytes
    vector: Tensor
    nonempty: tuple[int, ...]
    bounds: Tensor
    is_misplaced: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """Result of a vote, the same on all ranks.

    Attributes:
        exists: 0 if no gradient exists on any rank, 1 if one exists, 2 if one of a matrix does.
        foreign: Rank plus one with a gradient of a foreign kind; 0 for none.
        gradient: Rank plus one with a gradient that is NaN, inf or too large; 0 for none.
        update: Rank plus one whose last update was NaN or inf; 0 for none.
        waits_differ: Whether only some ranks wait for this tally.
        texts_differ: Whether ranks have unlike texts.
        gradients_differ: Whether ranks that share a parameter have unlike sets of gradients.
    """

    exists: int
    foreign: int
    gradient: int
    update: int
    waits_differ: bool
    texts_differ: bool
    gradients_differ: bool

    @property
    def is_bad(self) -> bool:
        """Whether the step must change nothing."""
        differ = self.waits_differ or self.texts_differ or self.gradients_differ
        return differ or bool(self.foreign or self.gradient or self.update)


class Vote:
    """Holds the vector of this rank, and reduces it.

    A vote whose gradients exist as before copies nothing from the host to the device.

    Args:
        world: All ranks, and the sets of them that share parameters.
        parameters: Parameters of this process.
        momentum: Greatest momentum of any group, which bounds gradients.
    """

    def __init__(self, world: World, parameters: Parameters, momentum: float) -> None:
        self._world, self._params, self._momentum = world, parameters.params, momentum
        is_on_device = parameters.device.type != "cpu"
        self._device = parameters.device if is_on_device else control_device(world.group)
        self._bounds_device = parameters.device
        self._num_marks = 2 + len(world.rank_sets)
        size = _MARKS + 2 * self._num_marks
        self._vector = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._slots = self._vector.unbind()
        self._patterns: dict[tuple[bool, bytes], Pattern] = {}

    def reduce(
        self, pattern: Pattern, text: str, exceeds: Tensor | None, updates: Tensor | None
    ) -> Tensor:
        """The maximum of all ranks' votes, on the device; a collective over the world.

        Args:
            pattern: Gradients of this rank.
            text: Lines that must be alike on all ranks.
            exceeds: Whether each gradient of ``pattern.nonempty`` is unusable.
            updates: Whether the last update of each matrix was NaN or inf.
        """
        fingerprint, own_flag = fingerprint56(text), self._world.rank + 1
        self._vector.copy_(pattern.vector)
        self._slots[_TEXT].fill_(fingerprint)
        self._slots[_TEXT + self._num_marks].fill_(-fingerprint)
        for position, flags in ((_GRADIENT, exceeds), (_UPDATE, updates)):
            if flags is not None:
                self._slots[position].masked_fill_(flags.any().to(self._device), own_flag)
        return max_over(self._vector, self._world.group)

    def tally(self, values: Sequence[int]) -> Tally:
        """The meaning of a reduced vector that was read on the host."""
        marks, negatives = values[_MARKS : _MARKS + self._num_marks], values[-self._num_marks :]
        waits, text, *by_set = map(operator.ne, marks, map(operator.neg, negatives))
        exists, foreign, gradient, update = values[:_MARKS]
        return Tally(exists, foreign, gradient, update, waits, text, any(by_set))

    def is_bad(self, vector: Tensor) -> Tensor:
        """`Tally.is_bad` of a reduced vector, 0-dim, without reading the device."""
        flags, marks, negatives = vector[_FOREIGN:].split(
            [_MARKS - _FOREIGN, self._num_marks, self._num_marks]
        )
        return torch.cat([flags, marks + negatives]).any()

    def pattern(self, waits: bool, kinds: bytes, momentum: float = 0.0) -> Pattern:
        """Constants of these kinds of gradients; copied to the device once, which waits.

        Args:
            waits: Whether this rank waits for the tally.
            kinds: Kind of each parameter's gradient.
            momentum: Greatest momentum of any group, which bounds gradients from now on.
        """
        if momentum > self._momentum:
            self._momentum = momentum
            self._patterns.clear()
        if (waits, kinds) in self._patterns:
            return self._patterns[waits, kinds]
        if len(self._patterns) >= _MAX_PATTERNS:
            self._patterns.clear()
        pairs, world = list(zip(self._params, kinds, strict=True)), self._world
        exists = max(
            (2 if param.views or not world.registry else 1 for param, kind in pairs if kind),
            default=0,
        )
        marks = [int(waits), 0]
        for ranks in world.rank_sets:
            own = [bool(kind) for p, kind in pairs if sharing_ranks(p.layout.ranks) == ranks]
            marks.append(fingerprint56(str(own)) if world.rank in ranks else _ABSTAIN)
        negatives = [mark if mark == _ABSTAIN else -mark for mark in marks]
        flags = [exists, (world.rank + 1) * (FOREIGN in kinds), 0, 0]
        nonempty = [i for i, k in enumerate(kinds) if k & ~MISPLACED == PRESENT]
        # A misplaced gradient is a sum over ranks, of which this rank sees one term.
        num_terms = max([len(ranks) for ranks in world.rank_sets], default=1)
        bounds = [
            gradient_bound(self._params[i], self._momentum)
            / (num_terms if kinds[i] & MISPLACED else 1)
            for i in nonempty
        ]
        pattern = self._patterns[waits, kinds] = Pattern(
            kinds,
            torch.tensor([*flags, *marks, *negatives], dtype=torch.int64, device=self._device),
            tuple(nonempty),
            torch.tensor(bounds, dtype=torch.float64, device=self._bounds_device),
            any(kind & MISPLACED for kind in kinds),
        )
        return pattern


def local_gradients(params: Sequence[Param]) -> tuple[bytes, list[Tensor | None]]:
    """Kind of each parameter's gradient, and this rank's part of it."""
    kinds = bytearray(len(params))
    grads: list[Tensor | None] = [None] * len(params)
    for index, param in enumerate(params):
        tensor, grad = param.tensor, param.tensor.grad
        if grad is None:
            continue  # ABSENT
        is_sharded = isinstance(tensor, DTensor)
        if grad.is_sparse or (is_sharded and not isinstance(grad, DTensor)):
            kinds[index] = FOREIGN
            continue
        if isinstance(grad, DTensor) and isinstance(tensor, DTensor):
            if placements_of(grad) != placements_of(tensor):
                kinds[index] = MISPLACED
            local: Tensor = local_of(grad)
            grad = local.wait() if hasattr(local, "wait") else local
        kinds[index] += PRESENT if grad.numel() else EMPTY
        grads[index] = grad
    return bytes(kinds), grads


def place_gradients(params: Sequence[Param], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Local gradients in the placements of their parameters; a collective if one must move."""
    placed = list(grads)
    for index, param in enumerate(params):
        tensor, grad = param.tensor, param.tensor.grad
        if not isinstance(grad, DTensor) or not isinstance(tensor, DTensor):
            continue
        if grad.placements != tensor.placements:
            placed[index] = grad.redistribute(placements=tensor.placements).to_local()
    return placed


def gradient_bound(param: Param, momentum: float) -> float:
    """Largest entry of a gradient that the state of its parameter can take."""
    if param.views:
        return momentum_bound(torch.float32, momentum)
    return second_moment_bound(param.tensor.dtype)


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


def fetch(values: Tensor) -> Callable[[], list[int]]:
    """Begin to bring a small vector to the host; the returned function waits until it is there.

    On CUDA it is copied to pinned memory behind the work of the stream. Each vector has memory of
    its own: the last one may not have been read yet.
    """
    if values.device.type != "cuda":
        return values.clone().tolist
    landing, event = torch.empty_like(values, device="cpu", pin_memory=True), torch.cuda.Event()
    landing.copy_(values, non_blocking=True)
    event.record(torch.cuda.current_stream(values.device))

    def read() -> list[int]:
        event.synchronize()
        numbers: list[int] = landing.tolist()
        return numbers

    return read
