"""Export to Hugging Face's format and evaluation in the harness, on tiny models and offline."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.amo_paper import evaluate
from benchmarks.amo_paper.__main__ import build_parser
from benchmarks.amo_paper.results import PAPER_TASKS, check_examples, read_results
from torchtitan_ext.data.tokenizers import ByteTokenizer, Tokenizer
from torchtitan_ext.plugin import models
from torchtitan_ext.tools import export

ROOT = Path(__file__).resolve().parents[2]

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers (extra `eval`)"
)
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval (extra `eval`)"
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with warnings.catch_warnings():
        # These packages warn of one another's deprecations, at import and in use.
        warnings.simplefilter("ignore")
        yield


def tiny_model(name: str, *, fuse_qkv: bool = False) -> Any:
    """Weights far larger than the first ones, so that every one of them shows in the logits."""
    torch.manual_seed(0)
    spec = models.spec(models.Model(name=name, flavor="tiny", fuse_qkv=fuse_qkv))
    model: Any = spec.model.build()
    with torch.no_grad():
        model.init_states()
        for parameter in model.parameters():
            noise = 0.3 * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return model


def save(model: Any, folder: Path, name: str, assets: str = "", **tokenizer: str) -> Path:
    """A checkpoint in a run's folder, among other state, as torchtitan leaves it."""
    checkpoint = folder / "checkpoint" / "step-7"
    state = {**model.state_dict(), "train_state": {"step": torch.tensor(7)}}
    dcp.save(state, checkpoint_id=str(checkpoint), no_dist=True)
    config = {
        "hf_assets_path": assets,
        "model": {"name": name, "flavor": "tiny"},
        "tokenizer": {"kind": "byte", **tokenizer},
        "optimizer": {"name": "AMO"},
    }
    (folder / "run.json").write_text(json.dumps(config))
    return checkpoint


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("fuse_qkv", [False, True])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_logits_survive_the_export(tmp_path: Path, name: str, fuse_qkv: bool) -> None:
    import transformers

    model = tiny_model(name, fuse_qkv=fuse_qkv)
    checkpoint = save(model, tmp_path, name)
    export.export(checkpoint, tmp_path / "hf", export.find_source(checkpoint))
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    )
    assert exported.config.tie_word_embeddings == (name == "qwen3")
    assert exported.config.eos_token_id == ByteTokenizer().eos_id
    # Long enough for the rotary embedding's scaled frequencies to matter.
    tokens = torch.randint(0, 257, (2, 300), generator=torch.Generator().manual_seed(1))
    expected = logits(model, tokens)
    assert expected.std() > 1  # the tolerance is one of numbers of this size
    # Rotary embeddings in complex against real arithmetic: 2e-5 in float32.
    torch.testing.assert_close(logits(exported, tokens), expected, rtol=0, atol=1e-4)
    # The tolerance would notice a rotary embedding of another base.
    exported.model.rotary_emb.inv_freq.mul_(1.001)
    assert (logits(exported, tokens) - expected).abs().max() > 1e-3


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("is_file", [False, True])
def test_the_tokenizer_is_the_one_of_the_run(tmp_path: Path, is_file: bool) -> None:
    import transformers

    folder = tmp_path / "tokenizer"
    export.byte_tokenizer().save_pretrained(folder)
    path = str(folder / "tokenizer.json" if is_file else folder)
    model = tiny_model("llama3")
    found = []
    # By its own path; without one in the folder of the assets; with an end token of the run's.
    for assets, data in (
        ("nowhere", {"path": path}),
        (path, {}),
        ("nowhere", {"path": path, "eos_token": "z"}),
    ):
        checkpoint = save(model, tmp_path / str(len(found)), "llama3", assets, kind="hf", **data)
        output = tmp_path / str(len(found)) / "hf"
        export.export(checkpoint, output, export.find_source(checkpoint))
        tokens = transformers.AutoTokenizer.from_pretrained(output).encode("naïve")
        assert tokens == ByteTokenizer().encode("naïve")
        found.append(json.loads((output / "config.json").read_text())["eos_token_id"])
    assert found == [ByteTokenizer().eos_id, ByteTokenizer().eos_id, ord("z")]


@needs_transformers
@pytest.mark.parametrize(
    "text", ["", "plain text", " leading, double  spaces\n\n\ttabs ", "naïve 北京 🙂", "a<|eos|>b"]
)
def test_byte_tokenizers_agree(text: str) -> None:
    ours, theirs = ByteTokenizer(), export.byte_tokenizer()
    tokens = theirs.encode(text, add_special_tokens=False)
    assert tokens == ours.encode(text)
    assert theirs.decode(tokens) == text
    assert theirs.eos_token_id == ours.eos_id


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    evaluate.add_commands(subparsers)
    export.add_command(subparsers)
    return parser.parse_args(arguments)


@needs_transformers
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flavor": "huge"}, "model.flavor: found 'huge'"),
        ({"name": "qwen3"}, "lacks .* such as layers.0.attention.k_norm.*another model"),
        ({"flavor": "quickstart"}, "lacks .* keys|Size mismatch"),
        ({"kind": "hf"}, "found no tokenizer in nowhere"),
    ],
)
def test_unfit_checkpoints_are_named(tmp_path: Path, change: dict[str, str], message: str) -> None:
    checkpoint = save(tiny_model("llama3"), tmp_path, "llama3")
    fields: Any = {"name": "llama3", "flavor": "tiny", "kind": "byte", **change}
    tokenizer = Tokenizer.Config(kind=fields.pop("kind"))
    source = export.Source(models.Model(**fields), tokenizer, "nowhere", "AMO")
    with pytest.raises(ValueError, match=message):
        export.export(checkpoint, tmp_path / "hf", source)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lm_eval"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"transformers is not installed.*amo-dist\[eval\]"):
        export.require_transformers()
    with pytest.raises(ValueError, match=r"lm_eval is not installed.*amo-dist\[eval\]"):
        evaluate.evaluate(tmp_path, "m", "o", tasks="sciq")


QUESTIONS = [
    {"question": f"{a} and {b} make", "choices": [f" {a + b}", f" {a * b + 1}"], "answer": a % 2}
    for a in range(1, 5)
    for b in range(1, 4)
]

TASK = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def make_task(folder: Path) -> Path:
    folder.mkdir()
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / "sums.yaml").write_text(TASK.format(data=data))
    return folder


def score_by_hand(model: Any) -> float:
    """Percentage of questions whose right choice the model finds likelier, by its own logits."""
    tokenizer, right = ByteTokenizer(), 0
    for question in QUESTIONS:
        context = tokenizer.encode(str(question["question"]))
        likelihoods = []
        for choice in question["choices"]:  # type: ignore[attr-defined]
            tokens = torch.tensor([context + tokenizer.encode(choice)])
            log_p = logits(model, tokens)[0].log_softmax(-1)
            likelihoods.append(
                sum(log_p[i - 1, tokens[0, i]].item() for i in range(len(context), tokens.shape[1]))
            )
        right += likelihoods.index(max(likelihoods)) == question["answer"]
    return 100 * right / len(QUESTIONS)


@pytest.mark.slow
@needs_harness
def test_the_harness_scores_a_checkpoint(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    checkpoint = save(model, tmp_path, "qwen3")
    include = make_task(tmp_path / "tasks")
    # A process of its own: the harness configures logging and seeds of whoever calls it.
    command = [
        *(sys.executable, "-m", "benchmarks.amo_paper", "score"),
        *(str(checkpoint), "--tasks", "sums"),
        *("--include-path", str(include), "--batch-size", "4", "--max-length", "256"),
        *("--device", "cpu", "--model", "Tiny"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "sums" in done.stdout
    output = tmp_path / "results-step-7.json"
    (result,) = read_results([output])
    assert (result.model, result.optimizer) == ("Tiny", "AMO")
    expected = score_by_hand(model)
    assert 0 < expected < 100
    assert result.tasks == {"sums": pytest.approx(expected, abs=1e-9)}  # a fraction of twelve
    record = json.loads(output.read_text())
    assert record["step"] == 7
    assert record["metrics"] == {"sums": "acc,none"}
    assert record["num_fewshot"] == {"sums": 0}
    assert record["limit"] is None


@pytest.mark.slow  # the harness reads some ten thousand task files
@needs_harness
def test_the_harness_knows_the_tasks_of_the_paper(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    names = ",".join([*(task.name for task in PAPER_TASKS), "not_a_task"])
    with pytest.raises(ValueError, match=r"the harness does not know not_a_task$"):
        evaluate.evaluate(tmp_path, "m", "o", tasks=names)


def harness_results() -> dict[str, Any]:
    """The form in which the harness answers: groups have subtasks, which have the counts."""
    return {
        "results": {
            "mmlu_pro": {"alias": "mmlu_pro", "exact_match,custom-extract": 0.11},
            "sciq": {"acc,none": 0.8, "acc_norm,none": 0.7, "acc_stderr,none": "N/A"},
        },
        "group_subtasks": {"mmlu_pro": ["hard", "mmlu_pro_law"], "hard": ["mmlu_pro_math"]},
        "n-shot": {"mmlu_pro_math": 5, "mmlu_pro_law": 5, "sciq": 0},
    }


def test_metrics_and_examples_of_groups() -> None:
    found = harness_results()
    assert (
        evaluate._metric("mmlu_pro", found["results"]["mmlu_pro"]) == "exact_match,custom-extract"
    )
    assert evaluate._metric("sciq", found["results"]["sciq"]) == "acc,none"
    assert evaluate._num_fewshot(found, "mmlu_pro") == 5
    assert evaluate._num_fewshot(found, "sciq") == 0
    found["n-shot"]["mmlu_pro_law"] = 0
    assert evaluate._num_fewshot(found, "mmlu_pro") is None
    with pytest.raises(ValueError, match="mmlu: the harness gives nothing, expected acc or exact"):
        evaluate._metric("mmlu", {})


def test_the_paper_evaluates_its_twelve_tasks_as_it_did() -> None:
    tasks = build_parser().parse_args(["evaluate", "main"]).tasks
    assert evaluate.task_names(tasks) == [task.name for task in PAPER_TASKS]
    assert len(PAPER_TASKS) == 12
    assert parse("score", "step-7").max_length == 4096  # twice what the models are trained on


def test_an_evaluation_unlike_the_papers_is_named() -> None:
    record = {
        "tasks": {"sciq": 80.0, "mmlu_pro": 11.0},
        "metrics": {"sciq": "acc,none", "mmlu_pro": "exact_match,custom-extract"},
        "num_fewshot": {"sciq": 0, "mmlu_pro": 5},
    }
    assert check_examples(record) == []
    record["num_fewshot"] = {"sciq": 0, "mmlu_pro": 0}
    (message,) = check_examples(record)
    assert message.startswith("mmlu_pro: this version of the harness gives exact_match")
