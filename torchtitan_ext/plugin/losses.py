"""The loss: cross-entropy, of whole sequences or part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss

from amo_dist.config import require


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
    expected = f"a divisor of a rank's share of training.seq_len = {length}"
    is_right = num_chunks > 0 and num_cuts != 0 and length % num_cuts == 0
    require(is_right, "loss.num_chunks", num_chunks, expected)
