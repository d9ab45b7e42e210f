"""A live dataset: its commit is that of the first start, and its server may fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.titan import hub_server
from torchtitan_ext import cli
from torchtitan_ext.data.files import DataError, Hub, find_files
from torchtitan_ext.data.rows import RETRIES, read_rows
from torchtitan_ext.data.shards import Corpus

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    """Of one commit with six files; nobody waits before a second try."""
    with hub_server.serve() as served:
        served.commit(10, repository("a"))
        hub_server.use(served, monkeypatch, str(tmp_path / "cache"))
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield served


def repository(letter: str, num_files: int = 6) -> dict[str, bytes]:
    def lines(file: int) -> bytes:
        texts = (letter * (3 + (file + 2 * i) % 7) + str(i) for i in range(20))
        return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()

    files = {f"data/train-{i}.jsonl": lines(i) for i in range(num_files)}
    return {"README.md": b"A dataset.\n", **files}


def rows() -> list[object]:
    """All rows of the latest commit."""
    files = find_files(hub_server.NAME, hub=Hub())
    return [row for url in files.urls for _, row in read_rows(url, ("text",))]


# ------------------------------------------------------------------ commits


def test_the_parts_of_a_tokenized_dataset_are_of_one_commit(
    hub: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "packed"
    options = ["-o", str(output), "--tokenizer", "byte", "--processes=1"]

    def tokenize(*more: str) -> int:
        return cli.main(["tokenize", hub_server.NAME, *options, *more])

    assert tokenize("--part", "0/2") == 0
    later = hub.commit(11, repository("b"))
    assert tokenize("--part", "1/2") == 0
    corpus = Corpus(output)
    assert ord("b") not in corpus.sequence(0, corpus.num_tokens - 1)
    assert tokenize("--part", "1/2", "--revision", later) != 0
    assert f"commit: was '{10:040x}', is '{later}'" in capsys.readouterr().err


# ------------------------------------------------------------------ a server that fails


class Faults:
    """Fails the first ``count`` requests for content after those that opened the dataset."""

    def __init__(self, hub: hub_server.Hub, outcome: int | threading.Event, count: int) -> None:
        self.left, self.outcome, self.hits = count, outcome, 0
        hub.fault = self

    def __call__(self, method: str, path: str) -> int | None:
        if method != "GET" or not path.endswith(".jsonl") or not self.left:
            return None
        self.left -= 1
        self.hits += 1
        if isinstance(self.outcome, int):
            return self.outcome
        self.outcome.wait(30)
        return None


@pytest.mark.parametrize("outcome", [429, 503, -9], ids=["too many requests", "down", "cut"])
def test_reading_goes_on_where_the_server_fails_for_a_while(
    outcome: int, hub: hub_server.Hub
) -> None:
    expected = rows()
    faults = Faults(hub, outcome, count=3)
    assert rows() == expected
    assert faults.hits == 3


@pytest.mark.parametrize("outcome", [429, -9])
def test_a_server_that_keeps_failing_is_one_error(outcome: int, hub: hub_server.Hub) -> None:
    Faults(hub, outcome, count=10**6)
    with pytest.raises(DataError, match=r"^cannot read hf://\S+train-\d\.jsonl: "):
        rows()


def test_a_corrupt_file_is_an_error_at_once(
    hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit(11, {"README.md": b"A dataset.\n", "data/train-0.parquet": b"PAR1 and no more"})
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(ValueError, match=r"cannot read hf://\S+train-0\.parquet"):
        rows()
    assert len(waits) < RETRIES  # those of the hub's own client, at most


def test_a_server_that_hangs_is_asked_again(
    hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    expected = rows()
    released = threading.Event()
    faults = Faults(hub, released, count=2)
    try:
        assert rows() == expected
    finally:
        released.set()
    assert faults.hits == 2


@pytest.mark.parametrize("outcome", [429, 503, None], ids=["too many requests", "down", "gone"])
def test_a_server_that_does_not_serve_at_a_start_is_no_mistake(
    outcome: int | None, hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.fault = lambda method, path: outcome
    if outcome is None:
        gone = hub_server.Hub(url="http://127.0.0.1:9")
        hub_server.use(gone, monkeypatch, str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"^cannot find the files of 'owner/name' on the hub now: "):
        rows()
    hub.fault = lambda method, path: 404
    hub_server.use(hub, monkeypatch, str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="nor a dataset that the hub gives"):
        rows()
