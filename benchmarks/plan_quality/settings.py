"""How long a run is, and at which learning rates."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The same for all runs of a study."""

    steps: int = 250
    batch: int = 4
    sequence: int = 128
    """Tokens; a step takes ``batch * sequence`` of them."""
    warmup: int = 20
    lr_muon: float = 8e-3
    lr_adamw: float = 5e-4
    final_rate: float = 0.1
    """Learning rate at the end, in peaks."""
    weight_decay: float = 0.1
    max_norm: float = 1.0
    """Gradients are clipped to this norm."""
    observe_until: int = 100
    observe_every: int = 10
    transition_steps: int = 25
    validation_batches: int = 48
    validations: int = 5
    """How often, evenly, the validation loss is taken; the last time at the end."""
    spectra_every: int = 10

    def rate_at(self, step: int) -> float:
        """Learning rate at a step, counted from 1, in peaks: linear warm-up, then cosine."""
        if step <= self.warmup:
            return step / self.warmup
        progress = (step - self.warmup) / (self.steps - self.warmup)
        return self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * progress)) / 2

    @property
    def lock_step(self) -> int:
        """The first step of the locked plan."""
        return self.observe_until + self.transition_steps

    def validates(self, step: int) -> bool:
        """Whether the validation loss is taken after a step."""
        return step == self.steps or step % max(self.steps // self.validations, 1) == 0
