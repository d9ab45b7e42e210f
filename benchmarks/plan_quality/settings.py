"""How long a run is, and how its learning rate moves."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The same for all runs of a study, but for what a `Job` names.

    Attributes:
        sequence: Tokens; a step takes ``batch * sequence`` of them.
        rate_decay: Form of the decay after the warm-up: ``cosine`` or ``linear``.
        final_rate: Learning rate at the end, in peaks.
        max_norm: Gradients are clipped to this norm.
        observations: How often, evenly, spectra are taken up to the switch.
    """

    batch: int = 4
    sequence: int = 128
    warmup: int = 20
    rate_decay: str = "cosine"
    final_rate: float = 0.1
    weight_decay: float = 0.1
    max_norm: float = 1.0
    validation_batches: int = 48
    observations: int = 10

    def rate_at(self, step: int, steps: int) -> float:
        """Learning rate at a step of so many, in peaks: a linear warm-up, then the decay."""
        if step <= self.warmup:
            return step / self.warmup
        progress = (step - self.warmup) / (steps - self.warmup)
        if self.rate_decay == "linear":
            return self.final_rate + (1 - self.final_rate) * (1 - progress)
        return self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * progress)) / 2
