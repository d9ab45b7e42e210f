"""Orders that are computed for any place alone, so that a position is one number."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import struct
from collections.abc import Sequence

from amo_dist.config import require

CYCLE = 1000  # Sequences after which a mixture has drawn exactly what its weights say.
_ROUNDS = 6


def shuffled(place: int, size: int, *seeds: int) -> int:
    """The number at a place of a permutation of ``0 .. size - 1`` that ``seeds`` decide.

    A Feistel network over the next power of four, walked until the result is below ``size``
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Nothing is kept and nothing
    computed ahead: a permutation of fifty million sequences takes 400 MB on every rank and seconds
    at each start, and its order depends on the version of the library.

    Args:
        place: Number from 0 to ``size - 1``.
        size: Size of the permutation.
        seeds: Non-negative, such as seed and epoch.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = hashlib.blake2b(struct.pack(f"<{len(seeds)}Q", *seeds), digest_size=32).digest()
    number = place
    while True:
        left, right = number >> half, number & mask
        for turn in range(_ROUNDS):
            message = struct.pack("<BQ", turn, right)
            digest = hashlib.blake2b(message, digest_size=8, key=key).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        number = left << half | right
        if number < size:
            return number


class Mixture:
    """Assigns the sequences of a run to several sources by their weights.

    In each cycle of :data:`CYCLE` sequences a source has its share exactly, rounded to whole
    sequences, at places that the seed decides.

    Args:
        weights: Weights of the sources, positive; they need not add up to one.
        seed: Seed of the places.

    Raises:
        ValueError: If a weight is not positive, or too small to get one sequence of a cycle.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        total = sum(weights)
        is_right = math.inf > min(weights) >= total / CYCLE > 0
        expected = f"each to be at least {1 / CYCLE:g} of their sum"
        require(is_right, "dataloader.dataset_path", f"weights {list(weights)}", expected)
        sums = itertools.accumulate(weights, initial=0.0)
        self._bounds = [int(CYCLE * part / total + 0.5) for part in sums]
        self._seed = seed

    def __call__(self, number: int) -> tuple[int, int]:
        """Source of sequence ``number`` of a run, and the place in the source."""
        if len(self._bounds) == 2:
            return 0, number
        cycle, place = divmod(number, CYCLE)
        slot = shuffled(place, CYCLE, self._seed, cycle)
        source = bisect.bisect_right(self._bounds, slot) - 1
        first, end = self._bounds[source : source + 2]
        return source, cycle * (end - first) + slot - first

    def left(self, number: int) -> list[tuple[int, list[int]]]:
        """Places that the first ``number`` sequences of a run have left in each source.

        Returns:
            A place from which on all are left, and those before it in the order of their turns.
        """
        if len(self._bounds) == 2:
            return [(number, [])]
        cycles = -(-number // CYCLE)
        ends = [cycles * (end - first) for first, end in itertools.pairwise(self._bounds)]
        left: list[tuple[int, list[int]]] = [(end, []) for end in ends]
        for source, place in map(self, range(number, cycles * CYCLE)):
            left[source][1].append(place)
        return left
