"""The launchers: two torchrun agents on loopback stand for two nodes, stubs for Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
CONFIG = ROOT / "configs" / "debug_llama3.toml"
STEPS = 30
INTERVAL = 10  # AMO locks at step 14: a run resumed from step 10 is in its transition
SHELL_SCRIPTS = ("setup.sh", "train_node.sh", "train_nodes.sh", "train.slurm", "doctor.sh")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the scripts are bash")


@pytest.mark.parametrize("name", [*SHELL_SCRIPTS, "quickstart.sh", "test.sh"])
def test_scripts_are_clean(name: str) -> None:
    assert os.access(LAUNCH / name, os.X_OK)
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run([checker, "-x", str(LAUNCH / name)], cwd=ROOT, check=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(**changes: str) -> dict[str, str]:
    # An installed environment, this very one, as a user would have activated it.
    bin_folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    ours = {"VIRTUAL_ENV": sys.prefix, "PATH": bin_folder, "PYTHONPATH": str(ROOT)}
    return {**kept, **ours, "OMP_NUM_THREADS": "1", **changes}


class Nodes:
    """Two agents of one rank each, started by the script as on two nodes."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self._logs = folder.with_name(folder.name + "-logs")
        arguments = [str(CONFIG), f"--dump_folder={folder}", *options]
        variables = environment(
            NODES="2",
            HEAD=f"127.0.0.1:{free_port()}",
            GPUS="1",
            MAX_RESTARTS="0",
            LOGS=str(self._logs),
            AMO_DEVICE="cpu",
        )
        self.agents = [self._start(index, arguments, variables) for index in range(2)]

    def _start(
        self, index: int, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        self._logs.mkdir(exist_ok=True)
        with (self._logs / f"node{index}.txt").open("wb") as output:
            command = [str(LAUNCH / "train_nodes.sh"), *arguments]
            # A session of its own, so that a node can be killed whole, its ranks included.
            return subprocess.Popen(
                command,
                env=dict(variables),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self) -> None:
        for agent in self.agents:
            assert agent.wait(timeout=240) == 0, self.output()

    def kill(self) -> None:
        """End both nodes at once, as a power cut would."""
        for agent in self.agents:
            descendants = processes_below(agent.pid)
            for pid in [agent.pid, *descendants]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait(timeout=30)

    def output(self) -> str:
        tails = [path.read_text(errors="replace")[-3000:] for path in self._logs.glob("node*.txt")]
        return "\n".join(tails)

    def rank_logs(self) -> list[Path]:
        return sorted(self._logs.rglob("std*.log"))


def processes_below(pid: int) -> list[int]:
    """Every process below ``pid``: torchrun gives its ranks sessions of their own."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        found = [int(child) for child in children.read_text().split()]
    except OSError:
        return []
    return found + [below for child in found for below in processes_below(child)]


@contextlib.contextmanager
def nodes(folder: Path, *options: str) -> Iterator[Nodes]:
    started = Nodes(folder, options)
    try:
        yield started
    finally:
        started.kill()


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records}


def wait_for(path: Path, run: Nodes) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert all(agent.poll() is None for agent in run.agents), run.output()
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_run_of_two_nodes_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    options = (
        f"--training.steps={STEPS}",
        "--checkpoint.enable",
        f"--checkpoint.interval={INTERVAL}",
        "--checkpoint.no-last-save-model-only",
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with nodes(whole, *options) as run:
        run.finish()
        # Each of the two ranks has a log of its own, though both are "rank 0 of a node".
        assert len({path.parent for path in run.rank_logs()}) == 2
    with nodes(broken, *options) as run:
        # The metadata is written last.
        wait_for(broken / f"checkpoint/step-{INTERVAL}/.metadata", run)
        run.kill()
    reached = max(losses(broken), default=0)
    assert reached < STEPS
    with nodes(broken, *options) as run:
        run.finish()
    found, expected = losses(broken), losses(whole)
    assert sorted(expected) == list(range(1, STEPS + 1))
    # Bit for bit: the same kernels, the same ranks, the same order of sums.
    assert {step: found[step] for step in expected if step > INTERVAL} == {
        step: loss for step, loss in expected.items() if step > INTERVAL
    }


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("variables", "arguments", "told"),
    [
        ({}, ["configs/debug_llama3.toml"], "usage:"),
        ({"NODES": "2", "HEAD": "localhost:1"}, ["configs/no.toml"], "no config configs/no.toml"),
        (
            {"NODES": "2", "HEAD": "localhost:1", "CUDA_VISIBLE_DEVICES": ""},
            ["configs/debug_llama3.toml"],
            "error: AMO_DEVICE: found no accelerator on ",
        ),
        (
            {"NODES": "2", "HEAD": "localhost:1", "GPUS": "3", "AMO_DEVICE": "cpu"},
            ["configs/debug_llama3.toml", "--training.steps=0", "--training.global_batch_size=4"],
            "error: training.global_batch_size: found 4, expected a multiple of ",
        ),
    ],
    ids=["usage", "no config", "no accelerator", "mistakes"],
)
def test_mistakes_are_told_before_any_rank_starts(
    variables: dict[str, str], arguments: list[str], told: str
) -> None:
    result = subprocess.run(
        [str(LAUNCH / "train_nodes.sh"), *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def test_one_node_meets_itself_on_a_free_port(tmp_path: Path) -> None:
    # Everything but the launcher itself.
    stub(
        tmp_path, "python", f'[[ "$1" == -c ]] || echo "$NODES $HEAD $GPUS $@" > {tmp_path}/called'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [str(LAUNCH / "train_node.sh"), "configs/qwen3_70m.toml", "--training.steps", "3"],
        env=environment(PATH=path, GPUS="6"),
        check=True,
    )
    assert (tmp_path / "called").read_text() == (
        "1 localhost:0 6 -m torchtitan_ext.tools.nodes configs/qwen3_70m.toml --training.steps 3\n"
    )


# ------------------------------------------------------------------ Slurm


def slurm_variables(tmp_path: Path) -> dict[str, str]:
    return environment(
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="123456",
        SLURM_JOB_NODELIST="n[1-2]",
        SLURM_GPUS_ON_NODE="8",
        SLURM_CPUS_ON_NODE="96",
        SLURM_RESTART_COUNT="3",
    )


def slurm(tmp_path: Path, srun: str) -> subprocess.Popen[bytes]:
    stub(
        tmp_path,
        "scontrol",
        f'[[ "$1" == show ]] && echo -e "n1\\nn2" || echo "$@" >> {tmp_path}/requeued',
    )
    stub(tmp_path, "scancel", f'echo "$@" > {tmp_path}/cancelled')
    stub(tmp_path, "srun", srun)
    variables = slurm_variables(tmp_path)
    # A copy, from elsewhere: so does Slurm.
    copy = shutil.copy(LAUNCH / "train.slurm", tmp_path / "slurm_script")
    return subprocess.Popen(
        ["bash", copy, "configs/qwen3_1.7b.toml", "--training.steps", "3"],
        env=variables,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )


def test_slurm_starts_every_node_with_the_same_meeting_point(tmp_path: Path) -> None:
    job = slurm(tmp_path, f'echo "$NODES $HEAD $GPUS $RUN_ID $PWD $*" > {tmp_path}/called; exit 7')
    assert job.wait(timeout=60) == 7  # and a failed run is not queued again
    assert (tmp_path / "called").read_text().split() == [
        *("2", "n1:23456", "8", "123456-3", str(ROOT), "--kill-on-bad-exit=1"),
        *(
            "--cpus-per-task=96",
            "launch/train_nodes.sh",
            "configs/qwen3_1.7b.toml",
            "--training.steps",
            "3",
        ),
    ]
    assert not (tmp_path / "requeued").exists()


def test_slurm_gives_the_doctor_all_cpus_of_each_node(tmp_path: Path) -> None:
    stub(tmp_path, "scontrol", 'echo -e "n1\\nn2"')
    stub(tmp_path, "srun", f'echo "$NODES $HEAD $GPUS $RUN_ID $*" > {tmp_path}/called; exit 7')
    variables = {**slurm_variables(tmp_path), "SLURM_CPUS_PER_TASK": "12"}
    doctor = [str(LAUNCH / "doctor.sh"), "--quick"]
    assert subprocess.run(doctor, env=variables, check=False).returncode == 7
    assert (tmp_path / "called").read_text().split() == [
        *("2", "n1:23456", "8", "doctor-123456", "--kill-on-bad-exit=1", "--cpus-per-task=12"),
        *("--ntasks-per-node=1", "--nodes=2", *doctor),
    ]


def test_the_doctor_finds_what_training_ranks_find(tmp_path: Path) -> None:
    body = f'[[ "$1" == -c ]] || env > {tmp_path}/found'
    stub(tmp_path, "python", body)
    found = []
    for script in ("doctor.sh", "train_nodes.sh"):
        variables = environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        del variables["OMP_NUM_THREADS"]
        subprocess.run([str(LAUNCH / script)], env=variables, check=True)
        lines = (tmp_path / "found").read_text().splitlines()
        found.append({one for one in lines if one.startswith(("NCCL", "PYTORCH", "OMP"))})
    assert found[0] == found[1]
    assert "OMP_NUM_THREADS=4" in found[0]
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in found[0]


def test_slurm_saves_and_queues_the_job_again_before_its_time_is_up(tmp_path: Path) -> None:
    # The ranks are told by scancel alone, and end when they have saved.
    body = f"touch {tmp_path}/started; until [[ -e {tmp_path}/cancelled ]]; do sleep 0.1; done"
    job = slurm(tmp_path, f"{body}; [[ ! -e {tmp_path}/requeued ]] || exit 9; exit 5")
    while not (tmp_path / "started").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == 5
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 123456\n"
    assert (tmp_path / "requeued").read_text() == "requeue 123456\n"


def test_slurm_headers_ask_for_a_requeue() -> None:
    text = (LAUNCH / "train.slurm").read_text()
    headers = re.findall(r"^#SBATCH (--[a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert dict(headers)["--signal"] == "B:USR1@720"
    assert {"--requeue", "--exclusive"} <= {name for name, _ in headers}
