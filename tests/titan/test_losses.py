"""Which loss a config builds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

from torchtitan_ext.plugin import losses


@pytest.mark.parametrize("num_chunks", [1, 8])
def test_a_config_builds_the_whole_or_parts(num_chunks: int) -> None:
    loss = losses.Loss.Config(num_chunks=num_chunks, global_vocab_size=320).build()
    if isinstance(loss, ChunkedLossWrapper):
        assert loss.num_chunks == num_chunks
        loss = loss.loss_fn
    else:
        assert num_chunks == 1
    assert isinstance(loss, CrossEntropyLoss)
    assert loss.global_vocab_size == 320


@pytest.mark.parametrize(("num_chunks", "ranks"), [(0, 1), (3, 1), (64, 2)])
def test_parts_of_unlike_lengths_are_refused(num_chunks: int, ranks: int) -> None:
    config = SimpleNamespace(
        loss=losses.Loss.Config(num_chunks=num_chunks),
        training=SimpleNamespace(seq_len=64),
        parallelism=SimpleNamespace(context_parallel_degree=ranks),
    )
    with pytest.raises(ValueError, match=f"loss.num_chunks: found {num_chunks}, expected"):
        losses.validate(config)
    config.loss.num_chunks = 32
    losses.validate(config)
