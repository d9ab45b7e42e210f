"""The ``[activation_checkpoint]`` section: what of a forward pass is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)


class Activations(ActivationCheckpointing):
    """One of torchtitan's policies, chosen by two fields of a file."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """The section."""

        mode: Literal["none", "selective", "full"] = "selective"
        """Keep all activations, some of them, or the inputs of blocks alone."""

        selective_ac_option: str = "op"
        """With ``selective``: ``op`` keeps the results of costly operations, every second matrix
        product among them; a number n keeps all but those of every n-th block."""

        def __post_init__(self) -> None:
            option = self.selective_ac_option
            if option != "op" and not (option.isdecimal() and int(option)):
                raise ValueError(
                    f"selective_ac_option: found {option!r}, expected 'op' or a number of blocks"
                )

    config: Config

    def apply(self, model: nn.Module) -> None:
        """Wrap the blocks of a model, in place."""
        if self.config.mode != "none":
            super().apply(model)

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        assert base_fqn is not None
        config, block = self.config, int(base_fqn.rpartition(".")[2])
        common = {
            "preserve_rng_state": config.preserve_rng_state,
            "determinism_check": config.determinism_check,
            "debug": config.debug,
        }
        policy: ActivationCheckpointing
        if config.mode == "selective" and config.selective_ac_option == "op":
            policy = SelectiveAC.Config(**common).build()
        elif config.mode == "full" or (block + 1) % int(config.selective_ac_option) == 0:
            policy = FullAC.Config(**common).build()
        else:
            return module
        wrapped: nn.Module = policy._wrap_block(module, base_fqn=base_fqn)
        return wrapped
