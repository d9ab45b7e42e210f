"""A live dataset: its commit is that of the first start, and its server may fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchtitan.config import CommConfig

from tests.unit import hub_server
from tests.unit.data_corpus import build
from torchtitan_ext import cli
from torchtitan_ext.data.files import DataError
from torchtitan_ext.data.loader import Streams
from torchtitan_ext.data.packed import PackedSequences
from torchtitan_ext.data.streams import permutation


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


def loader(train_timeout: int = 100, **fields: Any) -> Any:
    options: dict[str, Any] = {"num_streams": 2, "shuffle_buffer": 4, "num_workers": 0, **fields}
    config = Streams.Config(dataset="documents", dataset_path=hub_server.NAME, **options)
    config._comm = CommConfig(train_timeout_seconds=train_timeout)
    return build(config)


def draw(one: Any, num: int) -> list[Any]:
    batches = iter(one)
    return [next(batches)[1].tolist() for _ in range(num)]


# ------------------------------------------------------------------ commits


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resume_goes_on_with_the_commit_of_the_first_start(
    num_workers: int, hub: hub_server.Hub
) -> None:
    expected = draw(loader(), 20)
    first = loader(num_workers=num_workers)
    assert first.commit == f"{10:040x}"
    assert draw(first, 8) == expected[:8]
    hub.commit(11, repository("b", num_files=7))
    second = loader(num_workers=num_workers)
    assert second.commit == f"{11:040x}"
    second.load_state_dict(first.state_dict())
    assert second.commit == f"{10:040x}"
    assert draw(second, 12) == expected[8:]
    # A branch is a name for its latest commit.
    third = loader(revision="main")
    third.load_state_dict(second.state_dict())
    assert third.commit == f"{10:040x}"


def test_another_commit_by_name_is_refused_with_the_option_that_helps(hub: hub_server.Hub) -> None:
    state = loader().state_dict()
    later = hub.commit(11, repository("a"))
    one = loader(revision=later)
    expected = (
        r"data\.revision: found commit 0+b, expected 0+a: `--data\.revision 0+a` goes on with it; "
        r"`--checkpoint\.exclude_from_loading dataloader` starts the data from the beginning"
    )
    with pytest.raises(ValueError, match=expected):
        one.load_state_dict(state)


def test_a_checkpoint_that_names_no_commit_asks_for_it(hub: hub_server.Hub) -> None:
    first = loader()
    expected = draw(first, 8)
    state = first.state_dict()
    source = json.loads(state["source"])
    commit = source.pop("commit")
    old = {**state, "source": json.dumps(source)}
    one = loader()
    one.load_state_dict(old)  # where nothing has changed
    after = draw(one, 3)
    hub.commit(11, repository("a"))
    with pytest.raises(ValueError, match=r"by|`--data\.revision <commit that the run began with>`"):
        loader().load_state_dict(old)
    pinned = loader(revision=commit)
    pinned.load_state_dict(old)
    assert draw(pinned, 3) == after
    assert after != expected[:3]


def test_a_commit_that_is_gone_is_named(hub: hub_server.Hub) -> None:
    state = loader().state_dict()
    hub.commit(11, repository("a"))
    del hub.commits[f"{10:040x}"]
    with pytest.raises(ValueError, match=r"found no commit 0+a, that of the checkpoint: .*exclude"):
        loader().load_state_dict(state)


def test_the_parts_of_a_tokenized_dataset_are_of_one_commit(
    hub: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "packed"
    options = ["-o", str(output), "--tokenizer", "byte", "--seq-len", "8"]

    def tokenize(*more: str) -> int:
        return cli.main(["tokenize", hub_server.NAME, *options, *more])

    assert tokenize("--part", "0/2") == 0
    later = hub.commit(11, repository("b"))
    assert tokenize("--part", "1/2") == 0
    sequences = PackedSequences(str(output))
    assert all(ord("b") not in sequences[i] for i in range(len(sequences)))
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


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("outcome", [429, 503, -9], ids=["too many requests", "down", "cut"])
def test_a_run_goes_on_where_the_server_fails_for_a_while(
    outcome: int, num_workers: int, hub: hub_server.Hub
) -> None:
    expected = draw(loader(), 20)
    faults = Faults(hub, outcome, count=3)
    assert draw(loader(num_workers=num_workers), 20) == expected
    assert faults.hits == 3


@pytest.mark.parametrize("outcome", [429, -9])
def test_a_server_that_keeps_failing_is_one_error(outcome: int, hub: hub_server.Hub) -> None:
    Faults(hub, outcome, count=10**6)
    with pytest.raises(DataError, match=r"^cannot read hf://\S+train-\d\.jsonl: ") as info:
        draw(loader(num_workers=1), 20)
    assert "Traceback" not in str(info.value)


def test_a_server_that_hangs_is_asked_again(
    hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    expected = draw(loader(), 20)
    released = threading.Event()
    faults = Faults(hub, released, count=2)
    try:
        assert draw(loader(num_workers=1), 20) == expected
    finally:
        released.set()
    assert faults.hits == 2


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("train_timeout", [100, 1])
def test_the_present_block_serves_while_the_server_hangs_and_a_wait_ends_before_ranks_give_up(
    train_timeout: int, num_workers: int, hub: hub_server.Hub
) -> None:
    # Two streams of three files each, blocks of 20 documents: one file.
    options: dict[str, Any] = {"shuffle_buffer": 20, "prefetch_factor": 2}
    expected = draw(loader(**options), 20)
    released = threading.Event()

    first = {f"train-{i}.jsonl" for i in permutation(6, 42, 0)[:2]}

    def hang_on_the_second_block(method: str, path: str) -> int | None:
        if path.endswith(".jsonl") and Path(path).name not in first:
            released.wait(30)
        return None

    hub.fault = hang_on_the_second_block
    batches = iter(loader(train_timeout, num_workers=num_workers, **options))
    found = [next(batches)[1].tolist() for _ in range(8)]
    assert not released.is_set()
    if train_timeout == 1:
        with pytest.raises(DataError, match=r"waited .* comm\.train_timeout_seconds"):
            draw(batches, 20)
        released.set()
        return
    released.set()
    found += [next(batches)[1].tolist() for _ in range(12)]
    assert found == expected


@pytest.mark.parametrize("outcome", [429, 503, None], ids=["too many requests", "down", "gone"])
def test_a_server_that_does_not_serve_at_a_start_is_no_mistake(
    outcome: int | None, hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.fault = lambda method, path: outcome
    if outcome is None:
        gone = hub_server.Hub(url="http://127.0.0.1:9")
        hub_server.use(gone, monkeypatch, str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"^cannot find the files of 'owner/name' on the hub now: "):
        loader()
    hub.fault = lambda method, path: 404
    hub_server.use(hub, monkeypatch, str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="nor a dataset that the hub gives"):
        loader()


def test_each_validation_reads_the_commit_of_the_first(hub: hub_server.Hub) -> None:
    config = Streams.Config(
        dataset="documents", dataset_path=hub_server.NAME, num_streams=2, num_workers=0
    )
    config._validates = True
    expected = draw(build(config), 8)
    hub.commit(11, repository("b"))
    assert draw(build(config), 8) == expected
