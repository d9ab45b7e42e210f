"""What would fail on the machine where a run starts is an error before it does."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from tests.titan.data_corpus import write_packed
from torchtitan_ext.cli import main
from torchtitan_ext.data.tokenizers import HFTokenizer

CONFIGS = Path(__file__).parents[2] / "configs"
WORLDS = {"qwen3_70m": 6, "llama3.1_75m": 6, "debug_qwen3": 2}
WORLDS |= {"qwen3_70m_adamw_paper": 8, "llama3.1_75m_adamw_paper": 8}
LARGE = ("qwen3_1.7b", "llama3.1_1.4b")
WORLDS |= {f"{name}{end}": 32 for name in LARGE for end in ("", "_adamw_paper")}
WORLDS |= {"quickstart": 2, "debug_llama3": 2}


def preflight(
    capsys: pytest.CaptureFixture[str], name: str, *options: str, world: int | None = None
) -> tuple[int, list[str]]:
    """Status and mistakes."""
    world = world or WORLDS.get(name, 16)
    file = str(CONFIGS / f"{name}.toml")
    if "--elsewhere" not in options:
        options = ("--no-elsewhere", *options)
    status = main(["preflight", file, "--world", str(world), "--json", *options])
    return status, json.loads(capsys.readouterr().out)["problems"]


class _Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(404)  # an answer
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a hub that answers."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def make_tokenizer(folder: Path, size: int = 3) -> None:
    """A tokenizer of words."""
    folder.mkdir(parents=True)
    names = ["<|endoftext|>", "<|end_of_text|>", *(f"w{i}" for i in range(size - 2))]
    words = {word: number for number, word in enumerate(names)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>"}')


PACKED = (
    ("fineweb_edu_llama3", "Llama-3.1-8B", ""),
    ("fineweb_edu_qwen3", "Qwen3-0.6B", "<|endoftext|>"),
    ("slimpajama_qwen3", "Qwen3-0.6B", "<|endoftext|>"),
    ("c4_validation_llama3", "Llama-3.1-8B", ""),
    ("c4_validation_qwen3", "Qwen3-0.6B", "<|endoftext|>"),
)
"""Folders of tokens that configs name, the tokenizer of each, and its end token."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that lacks nothing which runs need, and holds some that is broken."""
    folder = tmp_path_factory.mktemp("machine")
    for name in ("Qwen3-0.6B", "Llama-3.1-8B"):
        make_tokenizer(folder / "assets" / "hf" / name)
    for name, path, eos in PACKED:
        tokenizer = HFTokenizer(str(folder / "assets" / "hf" / path), eos)
        write_packed(folder / "data" / name, [["w0 w1"]], tokenizer=tokenizer)
    (folder / "outputs/qwen3_0.6b_60b/checkpoint/step-14300").mkdir(parents=True)
    make_tokenizer(folder / "large", 321)  # one more than the model knows
    (folder / "broken").mkdir()
    (folder / "broken" / "tokenizer.json").write_text("{")
    (folder / "a_file").touch()
    return folder


@pytest.fixture
def place(machine: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where a machine starts runs that lacks nothing."""
    monkeypatch.chdir(machine)
    monkeypatch.setenv("HF_ENDPOINT", server)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10**12))
    return machine


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_every_config_passes_where_nothing_is_lacking(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preflight(capsys, name) == (0, [])


SMALL = ("quickstart", "--training.steps=80")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            (
                *("qwen3_70m", "--memory-gb=80", "--training.local_batch_size=75"),
                "--training.global_batch_size=900",
            ),
            "training.local_batch_size: found 75, whose logits take 93.3 GB a rank with",
        ),
        (
            (
                *("llama3.1_1.4b", "--memory-gb=141", "--training.local_batch_size=1"),
                "--parallelism.data_parallel_replicate_degree=32",
            ),
            None,
        ),
        (
            ("qwen3_0.6b", "--training.local_batch_size=7"),
            "training.global_batch_size: found 2048, expected a multiple of 112",
        ),
        (
            ("qwen3_0.6b", "--hf_assets_path=nowhere"),
            "hf_assets_path: found no tokenizer in nowhere on this machine",
        ),
        (
            ("qwen3_0.6b", "--tokenizer.path=nowhere/tokenizer.json"),
            "tokenizer.path: found no tokenizer in nowhere/tokenizer.json on this machine",
        ),
        ((*SMALL, "--tokenizer.kind=hf", "--hf_assets_path=large"), "model.flavor: found 'quickst"),
        ((*SMALL, "--tokenizer.kind=hf", "--hf_assets_path=broken"), "hf_assets_path: the tokeni"),
        (
            (*SMALL, "--dataloader.dataset=packed", "--dataloader.dataset_path=gone"),
            "dataloader.dataset_path: no tokenize.json in 'gone'",
        ),
        (
            (
                *(*SMALL, "--validator.enable", "--validator.dataloader.dataset=packed"),
                "--validator.dataloader.dataset_path=gone",
            ),
            "validator.dataloader.dataset_path: no tokenize.json in 'gone'",
        ),
        (
            ("cpt_qwen3_0.6b", "--checkpoint.initial_load_path=gone"),
            "checkpoint.initial_load_path: found no checkpoint in ",
        ),
        (
            ("qwen3_1.7b", "--checkpoint.keep_latest_k=0", "--checkpoint.interval=50"),
            "checkpoint.keep_latest_k: found 0, for which 139 checkpoints of ",
        ),
        ((*SMALL, "--dump_folder=a_file"), "dump_folder: found a_file, which cannot be written"),
        (
            (*SMALL, "--dump_folder=.", "--checkpoint.folder=a_file"),
            "checkpoint.folder: found a_file, which cannot be written",
        ),
    ],
)
def test_what_would_fail_is_an_error(
    arguments: tuple[str, ...],
    told: str | None,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, found = preflight(capsys, *arguments)
    if told is None:
        assert (status, found) == (0, [])
        return
    assert status == 1
    assert len(found) == 1
    assert found[0].startswith(told)


def test_chunks_of_the_loss_divide_the_logits(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = ("--memory-gb=80", "--training.local_batch_size=75")
    large += ("--training.global_batch_size=900",)
    assert preflight(capsys, "qwen3_70m", *large, "--loss.num_chunks=3")[0] == 1
    assert preflight(capsys, "qwen3_70m", *large, "--loss.num_chunks=4") == (0, [])


@pytest.mark.parametrize("why", ["offline", "unreachable"])
def test_a_dataset_of_the_hub_needs_the_network(
    why: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if why == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    stock = ("qwen3_0.6b", "--dataloader.dataset=c4", "--dataloader.dataset_path=allenai/c4")
    status, found = preflight(capsys, *stock)
    reason = {"offline": "HF_HUB_OFFLINE = 1 forbids", "unreachable": "cannot be reached at"}[why]
    assert status == 1
    assert len(found) == 1
    dataset = "dataloader.dataset_path: found the dataset 'allenai/c4' on the hub, "
    assert found[0].startswith(f"{dataset}which {reason}")
    assert preflight(capsys, "qwen3_0.6b") == (0, [])  # which reads nothing from there


def test_elsewhere_what_this_machine_lacks_is_noted(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(CONFIGS / "qwen3_0.6b.toml")
    options = ["--world", "16", "--elsewhere", "--hf_assets_path=nowhere"]
    assert main(["preflight", file, *options]) == 0
    assert "note: on this machine: hf_assets_path: found no tokenizer" in capsys.readouterr().out


def test_a_rank_that_has_too_little_memory(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(CONFIGS / "quickstart.toml")
    assert main(["preflight", file, "--world", "2", "--memory-gb", "1"]) == 0
    assert "0.97 GB of 1.00 GB" in capsys.readouterr().out
    status, found = preflight(capsys, "quickstart", "--memory-gb", "1e-3")
    assert status == 1
    assert "expected at most the 0.0 GB that it has" in found[0]


def test_disk_speed_is_a_note(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of 3.2 TB was refused for a disk of 1 GB/s that nobody has."""
    file, slow = str(CONFIGS / "qwen3_1.7b.toml"), "--checkpoint.stop_seconds=9"
    assert main(["preflight", file, "--world", "32", slow]) == 0
    (note,) = re.findall("note: (.*GB/s.*)", capsys.readouterr().out)
    assert re.fullmatch(
        r"checkpoint.stop_seconds = 9: a checkpoint of 15.\d GB needs more than 1.\d GB/s; "
        r"at 1.0 GB/s it takes 1\d s",
        note,
    )
    assert main(["preflight", file, "--world", "32", slow, "--checkpoint.no-enable"]) == 0
    assert "GB/s" not in capsys.readouterr().out
