"""The ``[activation_checkpoint]`` section: what of a forward pass is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.config import derive
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)

_POLICIES = {"selective": SelectiveAC.Config, "full": FullAC.Config}


class Activations(ActivationCheckpointing):
    """One of torchtitan's policies by its name, as a file has no other way to choose one."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """The section.

        Attributes:
            mode: Keep all activations, the results of costly operations, or the inputs of blocks
                alone.
        """

        mode: Literal["none", "selective", "full"] = "selective"

        def build(self, **options: Any) -> ActivationCheckpointing:
            """The policy."""
            if self.mode == "none":
                return Activations(self, **options)
            config = derive(self, _POLICIES[self.mode])
            policy: ActivationCheckpointing = config.build(**options)
            return policy

    def apply(self, model: Any) -> None:
        """Wrap nothing."""
