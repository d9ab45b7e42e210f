"""Results of evaluations: the tasks of the AMO paper, the file format, and tables of scores.

A results file holds one JSON object, or a list of them, each one evaluated model::

    {"model": "Qwen3-0.6B", "optimizer": "AMO", "tasks": {"arc_easy": 63.17, "sciq": 82.6}}

``model`` names what the rows that are compared have in common, ``optimizer`` the row, and
``tasks`` has the score of each task in percent, by the name of the harness. ``score``
writes further keys (checkpoint, step, few-shot counts, metrics, the harness's version), which
readers ignore.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic

from benchmarks.tables import markdown


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A benchmark as the AMO paper uses it.

    Attributes:
        name: The harness's name.
        short: Heading of its column.
        num_fewshot: Examples before each question.
        metric: The harness's name of the metric and of the filter of answers.
    """

    name: str
    short: str
    num_fewshot: int = 0
    metric: str = "acc,none"


PAPER_TASKS: tuple[Task, ...] = (
    Task("arc_easy", "AE"),
    Task("arc_challenge", "AC"),
    Task("sciq", "SciQ"),
    Task("mmlu", "MM"),
    Task("mmlu_pro", "MM-P", num_fewshot=5, metric="exact_match,custom-extract"),
    Task("hellaswag", "HS"),
    Task("openbookqa", "OBQA"),
    Task("piqa", "PIQA"),
    Task("race", "RACE"),
    Task("winogrande", "WG"),
    Task("commonsense_qa", "CSQA"),
    Task("agieval_en", "AGI"),
)
"""The twelve tasks whose unweighted average is the paper's main metric, in its order."""

SHORT = {task.name: task.short for task in PAPER_TASKS}
"""Heading of a column by the name of its task."""


Score = Annotated[float, pydantic.Field(ge=0, le=100, strict=True)]


@pydantic.dataclasses.dataclass(frozen=True)
class Result:
    """The scores of one model.

    Attributes:
        model: What the compared rows have in common, e.g. ``Qwen3-0.6B``.
        optimizer: The row, e.g. ``AMO``.
        tasks: Score of each task in percent, at least one.
    """

    model: Annotated[str, pydantic.Field(min_length=1)]
    optimizer: Annotated[str, pydantic.Field(min_length=1)]
    tasks: Annotated[dict[str, Score], pydantic.Field(min_length=1)]

    @property
    def average(self) -> float:
        """The unweighted average over the tasks, in percent."""
        return statistics.fmean(self.tasks.values())


_RESULT = pydantic.TypeAdapter(Result)


def sort_tasks(names: Iterable[str]) -> tuple[str, ...]:
    """The paper's tasks in its order, then the others alphabetically."""
    found = set(names)
    known = tuple(task.name for task in PAPER_TASKS if task.name in found)
    return known + tuple(sorted(found.difference(known)))


def read_results(paths: Iterable[str | Path]) -> list[Result]:
    """Read results files.

    Args:
        paths: Files of the format of this module.

    Returns:
        The results in the order of the files.

    Raises:
        ValueError: A file cannot be read or is malformed, a pair of model and optimizer comes
            twice, or the results have not all the same tasks.
    """
    found: dict[tuple[str, str], Result] = {}
    for path in paths:
        try:
            content = json.loads(Path(path).read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        for index, record in enumerate(content if isinstance(content, list) else [content]):
            try:
                result = _RESULT.validate_python(record)
            except ValueError as error:
                raise ValueError(f"{path}[{index}]: {error}") from None
            name = (result.model, result.optimizer)
            if name in found:
                raise ValueError(f"results: found {' with '.join(name)} twice, expected it once")
            found[name] = result
    if not found:
        raise ValueError("results: found none, expected at least one")
    # An average over other tasks is another quantity, and nobody would see it in the table.
    expected = next(iter(found.values())).tasks.keys()
    for result in found.values():
        if differs := sorted(expected ^ result.tasks.keys()):
            raise ValueError(
                f"{result.model} with {result.optimizer}: tasks differ from those of the first "
                f"result: {', '.join(differs)}; expected the same tasks everywhere"
            )
    return [*found.values()]


def check_examples(record: Mapping[str, Any]) -> list[str]:
    """Compare an evaluation with the paper's: another version of the harness has other defaults.

    Args:
        record: Record of `benchmarks.amo_paper.evaluate.evaluate`.

    Returns:
        One sentence for each task that was evaluated otherwise than in the paper.
    """
    messages = []
    for task in PAPER_TASKS:
        if task.name in record["tasks"]:
            metric, num_fewshot = record["metrics"][task.name], record["num_fewshot"][task.name]
            if (metric, num_fewshot) != (task.metric, task.num_fewshot):
                messages.append(
                    f"{task.name}: this version of the harness gives {metric} with {num_fewshot} "
                    f"examples, the paper has {task.metric} with {task.num_fewshot}"
                )
    return messages


def score_table(results: Sequence[Result]) -> str:
    """A Markdown table for each model: a row for each optimizer, tasks and average.

    Args:
        results: All with the same tasks.

    Returns:
        The tables; the best average of each is bold.
    """
    tasks = sort_tasks(results[0].tasks)
    header = ["optimizer", *(SHORT.get(name, name) for name in tasks), "Avg"]
    tables = []
    for model in dict.fromkeys(result.model for result in results):
        rows = [result for result in results if result.model == model]
        best = max(row.average for row in rows)
        cells = [
            [
                row.optimizer,
                *(f"{row.tasks[name]:.2f}" for name in tasks),
                f"**{row.average:.2f}**" if row.average == best else f"{row.average:.2f}",
            ]
            for row in rows
        ]
        tables.append(f"{model}\n\n{markdown(header, cells)}")
    return "\n\n".join(tables)
