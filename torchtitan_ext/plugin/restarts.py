"""Restarts by torchrun, whose ranks must not find the addresses of the ranks before them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def own_store() -> Iterator[None]:
    """Have ``init_process_group`` use a part of torchrun's store that this restart alone uses.

    torchrun keeps one store for all of its restarts (PyTorch 2.11 to 2.13). A rank may read there
    under which address another one listened before it was killed, and fails to connect. With one
    agent the number of the restart is the same on all ranks; with several it may differ, and only
    torchrun itself can be told not to share its store.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_shared or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        yield
        return
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        logger.warning(
            "torchrun may fail to restart: ranks find old addresses in the store that it shares; "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment on every node"
        )
        yield
        return
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))  # type: ignore[attr-defined]
    init = functools.partial(
        dist.init_process_group,
        store=dist.PrefixStore(f"restart{restart}", server),  # type: ignore[attr-defined]
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    # torchtitan calls it with arguments of its own alone, and takes no store to hand on.
    with mock.patch.object(dist, "init_process_group", init):
        yield
