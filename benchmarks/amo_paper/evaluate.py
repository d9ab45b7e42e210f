"""``score``: the scores of a checkpoint in lm-evaluation-harness.

Needs the extra ``eval``. Tasks, prompts, few-shot examples and decoding are the harness's own. No
leading token goes before a text, because training has none. The model sees up to 4096 tokens:
MMLU-Pro asks for up to 2048 on top of its examples.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.amo_paper.results import SHORT
from benchmarks.tables import markdown
from torchtitan_ext.runs import files
from torchtitan_ext.runs.run_files import checkpoint_step, find_checkpoint
from torchtitan_ext.tools import export

# Metrics that count as a score; the first of them that a task has is taken.
_METRICS = ("acc", "exact_match")


# What to evaluate, and how: type, default and help of each option.
_OPTIONS: Mapping[str, tuple[Callable[[str], Any], Any, str]] = {
    "tasks": (str, ",".join(SHORT), "names of tasks, separated by commas (default the paper's)"),
    "include_path": (str, None, "folder with tasks of your own, instead of the harness's"),
    "limit": (int, None, "only so many questions of each task, to try out"),
    "batch_size": (str, "auto", "a number or 'auto' (default auto)"),
    "max_length": (int, 4096, "the most tokens the model sees (default 4096)"),
}


def evaluate(checkpoint: Path, model: str, optimizer: str, **options: Any) -> dict[str, Any]:
    """Evaluate a checkpoint.

    Args:
        checkpoint: Folder of a distributed checkpoint.
        model: Name of the model in tables.
        optimizer: Name of the row in tables.
        **options: As on the command line, ``max_length=4096``.

    Returns:
        What was evaluated, and ``tasks``: the score of each task in percent.

    Raises:
        ImportError: The extra ``eval`` is not installed.
        ValueError: A task is unknown or gives no score, or as
            :func:`torchtitan_ext.tools.export.export`.
    """
    import lm_eval
    import lm_eval.tasks
    import torch

    defaults = {name: default for name, (_, default, _) in _OPTIONS.items()}
    asked = SimpleNamespace(**defaults | options)
    names = asked.tasks.split(",")
    manager = _task_manager(lm_eval.tasks, names, asked.include_path)
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    with tempfile.TemporaryDirectory(prefix="amo-hf-") as folder:
        export.export(checkpoint, Path(folder), export.find_source(checkpoint))
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={
                "pretrained": folder,
                "dtype": dtype,
                "max_length": asked.max_length,
                "add_bos_token": False,
            },
            tasks=names,
            batch_size=asked.batch_size,
            device=device,
            limit=asked.limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )
    metrics = {name: _metric(name, found["results"].get(name, {})) for name in names}
    scores = {name: 100.0 * found["results"][name][metrics[name]] for name in names}
    num_fewshot = {name: _num_fewshot(found, name) for name in scores}
    return {
        "model": model,
        "optimizer": optimizer,
        "tasks": scores,
        "average": statistics.fmean(scores.values()),
        "checkpoint": str(checkpoint),
        "step": checkpoint_step(checkpoint.name),
        "metrics": metrics,
        "num_fewshot": num_fewshot,
        "limit": asked.limit,
        "max_length": asked.max_length,
        "harness": f"lm_eval {importlib.metadata.version('lm_eval')}",
    }


def _task_manager(tasks: Any, names: Sequence[str], include_path: str | None) -> Any:
    """The harness's index of tasks, or that of a folder alone."""
    manager = tasks.TaskManager(include_path=include_path, include_defaults=include_path is None)
    if unknown := sorted(set(names) - set(manager.all_tasks)):
        raise ValueError(f"--tasks: the harness does not know {', '.join(unknown)}")
    return manager


def _metric(name: str, found: Mapping[str, Any]) -> str:
    """The harness's key of a task's score."""
    # A key is the name of a metric and that of a filter of answers: "acc,none".
    for metric in _METRICS:
        for key, score in found.items():
            if key.partition(",")[0] == metric and isinstance(score, (int, float)):
                return key
    known = ", ".join(found) or "nothing"
    raise ValueError(f"{name}: the harness gives {known}, expected {' or '.join(_METRICS)}")


def _num_fewshot(found: Mapping[str, Any], name: str) -> int | None:
    """Examples of a task, or of all tasks of a group; ``None`` where they differ."""
    subtasks = found.get("group_subtasks", {}).get(name) or [name]
    counts = set()
    for subtask in subtasks:
        if subtask != name and found.get("group_subtasks", {}).get(subtask):
            counts.add(_num_fewshot(found, subtask))
        else:
            counts.add(found.get("n-shot", {}).get(subtask))
    return counts.pop() if len(counts) == 1 else None


def write(record: Mapping[str, Any], output: Path) -> None:
    """Write a results file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    files.replace(output, json.dumps(record, indent=1) + "\n")


def add_commands(subparsers: Any) -> None:
    """Register ``score``."""
    parser = subparsers.add_parser(
        "score",
        help="score a checkpoint in lm-evaluation-harness",
        description="Score a checkpoint on tasks of lm-evaluation-harness, print the scores, and "
        "write them to a results file.",
    )
    parser.add_argument("checkpoint", type=Path, help=export.CHECKPOINT_HELP)
    for name, (kind, default, text) in _OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default, help=text)
    parser.add_argument("--model", help="name of the model in tables (default: its flavor)")
    parser.add_argument("--optimizer", help="name of the row in tables (default: the run's)")
    parser.add_argument("--output", type=Path, help="results file (default: results-step-<n>.json)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate for parsed arguments.

    Raises:
        ValueError: There is no checkpoint, or as :func:`evaluate`.
    """
    checkpoint = find_checkpoint(args.checkpoint)
    source = export.find_source(checkpoint)
    model, optimizer = args.model or source.model.flavor, args.optimizer or source.optimizer
    options = {name: getattr(args, name) for name in _OPTIONS}
    record = evaluate(checkpoint, model, optimizer, **options)
    output = args.output or checkpoint.parent.parent / f"results-{checkpoint.name}.json"
    write(record, output)
    scores = [*record["tasks"].items(), ("average", record["average"])]
    rows = [(name, f"{score:.2f}") for name, score in scores]
    print(f"{model} with {optimizer}\n\n{markdown(['task', 'score'], rows)}")
    print(f"\nwritten to {output}")
    return 0
