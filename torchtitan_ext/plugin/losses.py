"""The loss: cross-entropy, of whole sequences or part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss


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


def validate(config: Any) -> None:
    """Check that sequences can be cut.

    Raises:
        ValueError: Naming the field.
    """
    num_chunks, length = config.loss.num_chunks, config.training.seq_len
    num_cuts = num_chunks * config.parallelism.context_parallel_degree
    if num_chunks < 1 or length % num_cuts:
        raise ValueError(
            f"loss.num_chunks: found {num_chunks}, expected a divisor of a rank's share of "
            f"training.seq_len = {length}"
        )
