"""The harness scores a checkpoint as the model's own logits do, offline."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.amo_paper.resolve import ROOT
from benchmarks.amo_paper.results import read_results
from torchtitan_ext.data.tokenizers import ByteTokenizer
from torchtitan_ext.plugin import models

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


def tiny_model() -> Any:
    """Weights far larger than the first ones, so that every one of them shows in the logits."""
    torch.manual_seed(0)
    model: Any = models.spec(models.Model(name="qwen3", flavor="tiny")).model.build()
    with torch.no_grad():
        model.init_states()
        for parameter in model.parameters():
            noise = 0.3 * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return model


def score_by_hand(model: Any) -> float:
    """Percentage of questions whose right choice the model finds likelier, by its own logits."""
    tokenizer, right = ByteTokenizer(), 0
    for question in QUESTIONS:
        context = tokenizer.encode(str(question["question"]))
        likelihoods = []
        for choice in question["choices"]:  # type: ignore[attr-defined]
            tokens = torch.tensor([context + tokenizer.encode(choice)])
            with torch.no_grad():
                log_p = model(tokens)[0].log_softmax(-1)
            answer = range(len(context), tokens.shape[1])
            likelihoods.append(sum(log_p[i - 1, tokens[0, i]].item() for i in answer))
        right += likelihoods.index(max(likelihoods)) == question["answer"]
    return 100 * right / len(QUESTIONS)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval")
def test_the_harness_scores_a_checkpoint(tmp_path: Path) -> None:
    model = tiny_model()
    checkpoint, tasks = tmp_path / "checkpoint" / "step-7", tmp_path / "tasks"
    state = {**model.state_dict(), "train_state": {"step": torch.tensor(7)}}
    save(state, checkpoint_id=str(checkpoint), no_dist=True)
    config = {
        "hf_assets_path": "",
        "model": {"name": "qwen3", "flavor": "tiny"},
        "tokenizer": {"kind": "byte"},
        "optimizer": {"name": "AMO"},
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    tasks.mkdir()
    (tasks / "sums.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    (tasks / "sums.yaml").write_text(TASK.format(data=tasks / "sums.jsonl"))
    # A process of its own: the harness configures logging and seeds of whoever calls it.
    command = [sys.executable, "-m", "benchmarks.amo_paper", "score", str(checkpoint)]
    command += ["--tasks", "sums", "--include-path", str(tasks), "--batch-size", "4"]
    command += ["--max-length", "256", "--model", "Tiny"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | offline
    )
    assert done.returncode == 0, done.stderr
    (result,) = read_results([tmp_path / "results-step-7.json"])
    assert (result.model, result.optimizer) == ("Tiny", "AMO")
    expected = score_by_hand(model)
    assert 0 < expected < 100
    assert result.tasks == {"sums": pytest.approx(expected, abs=1e-9)}  # a fraction of twelve
