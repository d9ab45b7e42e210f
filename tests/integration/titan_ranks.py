"""Training runs through torchtitan, whose ranks are forked and not started."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from amo_dist import Muon
from tests.examples import ROOT, assert_same, whole
from tests.faults.damage import fail_in_save
from tests.integration.processes import CPU
from torchtitan_ext.runs.run_files import complete_steps, read_metrics

CONFIG = str(ROOT / "configs" / "debug_llama3.toml")
OPTIONS = (
    "--training.seq_len=64",
    "--training.global_batch_size=4",
    "--training.local_batch_size=1",
    "--training.steps=10",
    "--optimizer.amo.observe_every=2",
    "--optimizer.amo.observe_until=4",
    "--optimizer.amo.transition_steps=4",
    "--metrics.console=brief",
)
"""AMO observes until step 4, and is locked from step 8 on."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        world_size: Number of ranks.
        arguments: torchtitan's, behind :data:`OPTIONS`.
        config: The file.
        die_at: ``(rank, step, how)``: that rank sends itself the signal ``how`` after the step, or
            fails in the step's save, see :func:`tests.faults.damage.fail_in_save`.
        fake_world: Ranks of a world whose first one alone is real, as torchtitan fakes it: without
            :data:`OPTIONS`, and with models of the paper that are cut.
        stock: A function of :mod:`tests.integration.stock_configs` instead of a file: a config of
            torchtitan, started by torchtitan's entry point with these arguments alone.
    """

    world_size: int
    folder: str
    arguments: tuple[str, ...] = ()
    config: str = CONFIG
    die_at: tuple[int, int, str] | None = None
    fake_world: int = 0
    stock: str = ""


# ------------------------------------------------------------------ in the test


class Server:
    """Forks ranks from one process that has imported torchtitan, by Python's own fork server.

    An import costs more than a run of a tiny model. Ranks meet through a file, without ports.
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.integration.preloaded"])

    def start(self, job: Job) -> list[BaseProcess]:
        """Fork the ranks."""
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        store = Path(tempfile.mkdtemp(dir=job.folder), "store").absolute()
        ranks: list[BaseProcess] = []
        with mock.patch.dict(os.environ, {**CPU, "GLOO_SOCKET_IFNAME": "lo"}):
            for rank in range(job.world_size):
                ranks.append(self._context.Process(target=_rank, args=(job, rank, store)))
                ranks[-1].start()
        return ranks

    def wait(self, ranks: Sequence[BaseProcess], timeout: float = 600.0) -> list[int | None]:
        """Exit codes, ``-n`` for a signal; ``None`` where a rank had not ended and was killed."""
        deadline = time.monotonic() + timeout
        exits: list[int | None] = []
        for rank in ranks:
            rank.join(max(deadline - time.monotonic(), 0))
            exits.append(rank.exitcode)
        for rank in ranks:
            rank.kill()
            rank.join()
        return exits

    def run(self, job: Job) -> Run:
        """A whole run, which must end well."""
        exits = self.wait(self.start(job))
        run = Run(Path(job.folder), job.world_size)
        assert exits == [0] * job.world_size, (exits, run.output())
        return run


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left in its folder."""

    folder: Path
    world_size: int

    def output(self) -> str:
        """What each rank printed, or the end of it."""
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("rank*.txt"))]
        return "\n".join(text[-20000:] for text in texts)

    def records(self) -> list[dict[str, Any]]:
        """The logged steps of ``metrics.jsonl``."""
        return read_metrics(self.folder).steps

    def losses(self) -> dict[int, float]:
        """By step; JSON keeps every bit."""
        return {record["step"]: record["loss"] for record in self.records()}

    def traces(self) -> list[list[dict[str, Any]]]:
        """By rank, what its optimizer did at each step."""
        paths = [self.folder / f"trace{rank}.jsonl" for rank in range(self.world_size)]
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]

    def state(self, step: int) -> Any:
        """Everything in the checkpoint of a step, in whole tensors."""
        return whole(self.folder / "checkpoint" / f"step-{step}", self.folder / "whole.pt")

    def first_rank(self) -> int:
        """Process of the rank that holds the folder."""
        return int((self.folder / "lock.holder").read_text().split()[1])

    def complete(self) -> list[int]:
        """Steps of the complete checkpoints."""
        return complete_steps(self.folder / "checkpoint")


def assert_same_end(found: Run, expected: Run, step: int) -> None:
    """Losses and the last checkpoint are alike to the last bit."""
    assert found.losses() == expected.losses()
    states = found.state(step), expected.state(step)
    assert any(key.endswith("control") for key in states[0]["optimizer"])
    assert_same(*states)


# ------------------------------------------------------------------ in a rank


def _rank(job: Job, rank: int, store: Path) -> None:
    import torchtitan.trainer

    from torchtitan_ext import train
    from torchtitan_ext.plugin import models, trainer

    folder = Path(job.folder)
    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    world_size = str(job.fake_world or job.world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world_size, NGPU=world_size)
    if job.fake_world:
        # One layer and few tokens, for time; width is kept.
        for flavors in models.FLAVORS.values():
            for name in models.MODELS & flavors.keys():
                flavors[name] = dataclasses.replace(flavors[name][0], layers=1), 4096
    else:
        torch.distributed.init_process_group = functools.partial(
            torch.distributed.init_process_group,
            init_method=f"file://{store}",
            rank=rank,
            world_size=job.world_size,
        )
    # torchtitan's first rank waits two seconds at the end, for stores that live in it.
    clock = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _seconds: None)
    setattr(torchtitan.trainer, "time", clock)  # noqa: B010
    torch.set_num_threads(1)
    trace = folder / f"trace{rank}.jsonl"
    stock: Any = torchtitan.trainer.Trainer
    stock.Config._owner = _traced(stock, trace, job, rank)  # torchtitan builds its own by it
    own: Any = _traced(trainer.Trainer, trace, job, rank)
    setattr(trainer, "Trainer", own)  # noqa: B010
    if job.die_at is not None and job.die_at[0] == rank and not job.die_at[2].startswith("SIG"):
        fail_in_save(*job.die_at[1:])
    if job.stock:
        from torchtitan.train import main

        sys.argv[1:] = ["--module=tests.integration.stock_configs", f"--config={job.stock}"]
        sys.argv += [f"--dump_folder={folder}", *job.arguments]
        main()
        return
    options = () if job.fake_world else OPTIONS
    where = (f"--job.config_file={job.config}", f"--dump_folder={folder}")
    sys.exit(train.main([*where, *options, *job.arguments]))


def _traced(trainer_class: Any, path: Path, job: Job, rank: int) -> Any:
    """A trainer that writes down each step of its optimizer."""

    class Traced(trainer_class):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            path.unlink(missing_ok=True)
            if isinstance(self.optimizers.optimizer, Muon):
                self.optimizers.register_step_post_hook(lambda *_: self._trace())

        def _trace(self) -> None:
            optimizer = self.optimizers.optimizer
            step = optimizer.num_steps_taken
            schedules = optimizer.schedules_by_type(step)
            record = {
                "step": step,
                "phase": optimizer.phase,
                "schedules": {name: one.digest() for name, one in schedules.items()},
                "sent_bytes": optimizer.metrics()["exchange/sent_bytes"],
                "lrs": [group["lr"] for group in optimizer.param_groups],
                "types": sorted(set(optimizer.operator_types)),
                "observations": optimizer.control_state_dict()["source"].get("observations"),
                "expert_bias": [
                    value.abs().max().item()
                    for part in self.model_parts
                    for name, value in part.named_buffers()
                    if name.endswith("expert_bias_E")
                ],
            }
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            who, when, how = job.die_at or (-1, -1, "")
            if (who, when) == (rank, step) and how.startswith("SIG"):
                os.kill(os.getpid(), signal.Signals[how])

    return Traced
