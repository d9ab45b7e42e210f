"""``[validator]``: the loss on held-out data, of the same sequences on any number of ranks."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torchtitan.components.validate as titan

from torchtitan_ext.data.loader import ValidationLoader


class Validator(titan.Validator):
    """torchtitan's validator, whose steps are of the global batch as those of training are.

    Each validation reads its data from the beginning: a resume has nothing to go on with.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Validator.Config):
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
