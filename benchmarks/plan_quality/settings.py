"""How long a run is, and how its learning rate moves."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The same for all runs of a study, but for what a `Job` names."""

    batch: int = 4
    sequence: int = 128
    """Tokens; a step takes ``batch * sequence`` of them."""
    warmup: int = 20
    final_rate: float = 0.1
    """Learning rate at the end, in peaks."""
    weight_decay: float = 0.1
    max_norm: float = 1.0
    """Gradients are clipped to this norm."""
    validation_batches: int = 48
    observations: int = 10
    """How often, evenly, spectra are taken up to the switch."""
    later_spectra: int = 5
    """How often, evenly, they are taken after it, of the uniform run."""

    stable_share: float = 0.6
    """Share of a run before the linear decay begins."""

    def rate_at(self, step: int, steps: int, decay: str = "cosine") -> float:
        """Learning rate at a step, counted from 1, in peaks.

        Args:
            step: Number of the step.
            steps: Number of steps of the run.
            decay: Form after the linear warm-up: ``cosine``, ``linear`` after a constant rate, or
                ``constant``.
        """
        if step <= self.warmup:
            return step / self.warmup
        if decay == "constant":
            return 1.0
        if decay == "linear":
            progress = max(step / steps - self.stable_share, 0) / (1 - self.stable_share)
            return 1 - (1 - self.final_rate) * progress
        progress = (step - self.warmup) / (steps - self.warmup)
        return self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * progress)) / 2


def evenly(count: int, first: int, last: int) -> list[int]:
    """About ``count`` steps in ``(first, last]``, the last among them, at one distance."""
    distance = max((last - first) // count, 1)
    return list(range(last, first, -distance))[::-1]
