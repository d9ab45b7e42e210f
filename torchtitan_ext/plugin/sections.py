"""Small sections of a config: ``[activation_checkpoint]``, ``[loss]`` and ``[validator]``."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan.components import validate
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import derive
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)

from amo_dist.config import require
from torchtitan_ext.data.loader import ValidationLoader

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


class Loss(CrossEntropyLoss):
    """Cross-entropy, of which a config may hold the logits of a part of each sequence alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """``[loss]``.

        Attributes:
            num_chunks: Parts of each sequence whose logits are computed one after the other,
                forward and backward: memory for logits falls to a part of it. It divides
                ``training.seq_len``.
        """

        num_chunks: int = 1

        def build(self, **options: Any) -> BaseLoss:
            """The loss, in parts where there is more than one."""
            config: BaseLoss.Config
            config = CrossEntropyLoss.Config(global_vocab_size=self.global_vocab_size)
            if self.num_chunks > 1:
                config = ChunkedLossWrapper.Config(num_chunks=self.num_chunks, loss_fn=config)
            return config.build(**options)


def check_chunks(config: Any) -> None:
    """Check that sequences can be cut.

    Raises:
        ValueError: Naming the field.
    """
    num_chunks, length = config.loss.num_chunks, config.training.seq_len
    num_cuts = num_chunks * config.parallelism.context_parallel_degree
    expected = f"a divisor of a rank's share of training.seq_len = {length}"
    is_right = num_chunks > 0 and num_cuts != 0 and length % num_cuts == 0
    require(is_right, "loss.num_chunks", num_chunks, expected)


class Validator(validate.Validator):
    """torchtitan's validator, whose steps are of the global batch as those of training are.

    Each validation reads its data from the beginning: a resume has nothing to go on with.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(validate.Validator.Config):
        """``[validator]``.

        Attributes:
            steps: Global batches of a validation; -1 for all sequences of the data, each once.
            dataloader: Held-out data; the fields are those of ``[dataloader]``.
        """

        steps: int = -1
        dataloader: ValidationLoader.Config = field(default_factory=ValidationLoader.Config)

        def __post_init__(self) -> None:
            """Check nothing: `config.checks` has all ranges, and torchtitan's check names none."""

    def __init__(self, config: Config, **options: Any) -> None:
        if config.steps > 0:
            sizes = ("dp_world_size", "local_batch_size", "seq_len")
            batch = math.prod(options[name] for name in sizes)
            steps = config.steps * options["metrics_processor"].tokens_per_step // batch
            config = dataclasses.replace(config, steps=steps)
        super().__init__(config, **options)
