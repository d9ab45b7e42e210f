"""How much memory a call holds at its worst moment, counted by storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Storages(TorchDispatchMode):
    """Adds up the storages that operations make, for as long as each is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_iter((args, kwargs)) if _is(one)}
        found = function(*args, **(kwargs or {}))
        for one in tree_iter(found):
            if _is(one) and one.untyped_storage()._cdata not in given:
                self._count(one.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.live -= size


def _is(found: object) -> bool:
    return isinstance(found, torch.Tensor)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that a call and what it calls hold at once, its result among them."""
    with Storages() as storages:
        call()
    return storages.peak
