"""Results that cross to each other node once: the same bits, in fewer bytes across nodes."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist import AMO, AMOConfig, param_groups
from tests.distributed import models
from tests.distributed.harness import Ranks

SEED, STEPS = 7, 8
FIELDS: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 2,
    "transition_steps": 2,
    "bucket_bytes": 256,
}


def train(
    rank: int, world_size: int, layout: str, nodes: tuple[int, ...]
) -> tuple[dict[str, Tensor], dict[str, Any], dict[int, int], dict[int, int]]:
    """Parameters, control state, bytes sent in the last step, and what it knows of nodes.

    As if torchrun had started each rank on the node that ``nodes`` gives.
    """
    model = models.make_model(layout, models.shapes())
    group = dist.group.WORLD if layout == "plain" else None
    config = AMOConfig(**FIELDS)
    optimizer = AMO(param_groups(model), lr=3e-3, config=config, process_group=group)
    with mock.patch.dict(os.environ, GROUP_RANK=str(nodes[rank])):
        for step in range(1, STEPS + 1):
            models.set_gradients(model, SEED, step)
            optimizer.step()
    assert optimizer.world is not None
    params = {name: models.whole(param) for name, param in model.named_parameters()}
    sent, node_by_rank = optimizer.sent_bytes_by_peer(), dict(optimizer.world.node_by_rank)
    return params, optimizer.control_state_dict(), sent, node_by_rank


@pytest.mark.parametrize(
    ("layout", "nodes", "ratio"),
    [
        # One copy for two ranks of the other node.
        pytest.param("plain", (0, 0, 1, 1), (1, 2), id="ddp"),
        # The other half of a matrix comes across, and goes back once, not twice.
        pytest.param("hsdp", (0, 1, 0, 1), (2, 3), id="hsdp"),
        # Each node is a replica: nothing to save.
        pytest.param("hsdp", (0, 0, 1, 1), (1, 1), id="hsdp-of-whole-nodes"),
    ],
)
def test_relays_change_no_bit(
    run_on: Ranks, layout: str, nodes: tuple[int, ...], ratio: tuple[int, int]
) -> None:
    direct = run_on(4)(train, layout, (0, 0, 0, 0))
    relayed = run_on(4)(train, layout, nodes)
    for (expected, control, *_), (params, found, *_) in zip(direct, relayed, strict=True):
        assert found == control
        for name, value in expected.items():
            assert torch.equal(params[name], value), name

    def sent(results: list[Any]) -> tuple[int, int]:
        """Bytes to other nodes, and in all."""
        sizes = [(rank, *one) for rank, found in enumerate(results) for one in found[2].items()]
        across = [size for rank, peer, size in sizes if nodes[rank] != nodes[peer]]
        return sum(across), sum(size for *_, size in sizes)

    (across, total), (direct_across, direct_total) = sent(relayed), sent(direct)
    assert total == direct_total
    assert across * ratio[1] == direct_across * ratio[0] > 0


def test_ranks_know_the_first_rank_of_each_node(run_on: Ranks) -> None:
    for *_, found in run_on(4)(train, "fsdp", (1, 0, 1, 2)):
        assert found == {0: 0, 1: 1, 2: 0, 3: 3}
