"""Batches are read ahead by a thread: its errors, the position of a checkpoint, a stop."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.titan.data_corpus import build, dataset, write_texts
from torchtitan_ext.data.loader import BATCHES_AHEAD, PackedLoader


@pytest.fixture
def loader(tmp_path: Path) -> Any:
    return build(dataset(write_texts(tmp_path / "text", ["some words, and more"] * 40)))


def test_the_position_is_that_of_the_step_and_not_of_the_thread(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, stock = [], PackedLoader._tokens

    def tokens(self: PackedLoader, number: int) -> Any:
        numbers.append(number)
        return stock(self, number)

    monkeypatch.setattr(PackedLoader, "_tokens", tokens)
    batches = iter(loader)
    next(batches)
    deadline = time.monotonic() + 60
    while len(numbers) < 2 * (1 + BATCHES_AHEAD) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert numbers == [*range(2 * (1 + BATCHES_AHEAD))]
    assert loader.state_dict()["sequence"] == 2


def test_an_error_of_the_thread_is_raised_in_its_step(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = PackedLoader._tokens

    def tokens(self: PackedLoader, number: int) -> Any:
        if number == 5:
            raise OSError("the folder is gone")
        return stock(self, number)

    monkeypatch.setattr(PackedLoader, "_tokens", tokens)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    with pytest.raises(OSError, match="the folder is gone"):
        next(batches)
    assert loader.state_dict()["sequence"] == 4
    with pytest.raises(StopIteration):
        next(batches)


def test_a_stop_does_not_wait_for_a_folder_that_hangs(
    loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, answer = PackedLoader._tokens, threading.Event()

    def tokens(self: PackedLoader, number: int) -> Any:
        if number >= 4:
            answer.wait()
        return stock(self, number)

    monkeypatch.setattr(PackedLoader, "_tokens", tokens)
    batches = iter(loader)
    next(batches)
    batches.close()
    assert not answer.is_set()
    answer.set()
