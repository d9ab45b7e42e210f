"""Several nodes: two launchers on loopback stand for two, stubs for Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest

from tests.integration.titan_ranks import Run
from torchtitan_ext import environment as ranks

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
CONFIG = ROOT / "configs" / "debug_llama3.toml"
STEPS = 40
INTERVAL = 10  # AMO locks at step 14: a run resumed from step 10 is in its transition
SHELL_SCRIPTS = ("setup.sh", "train.slurm", "doctor.sh")

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
    """Two launchers of one rank each, as on two nodes."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self._logs = folder.with_name(folder.name + "-logs")
        self._logs.mkdir(exist_ok=True)
        where = ("--nodes", "2", "--head", f"127.0.0.1:{free_port()}", "--ranks", "1")
        command = [sys.executable, "-m", "torchtitan_ext", "train", str(CONFIG), *where]
        self._command = [*command, f"--dump_folder={folder}", *options]
        self.agents = [self._start(index) for index in range(2)]

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        with (self._logs / f"node{index}.txt").open("wb") as output:
            # A session of its own, so that a node can be killed whole, its ranks included.
            return subprocess.Popen(
                self._command,
                env=environment(AMO_DEVICE="cpu"),
                cwd=ROOT,
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
        return "\n".join(path.read_text(errors="replace") for path in self._logs.glob("node*.txt"))


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
    return Run(folder, 2).losses()


def wait_for(path: Path, run: Nodes) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert all(agent.poll() is None for agent in run.agents), run.output()
        assert time.monotonic() < deadline, run.output()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_of_two_nodes_outlives_a_dead_rank_and_a_stop(tmp_path: Path) -> None:
    """It ends as if nothing had happened, bit for bit: the same kernels, ranks, order of sums."""
    options = (
        f"--training.steps={STEPS}",
        "--checkpoint.enable",
        f"--checkpoint.interval={INTERVAL}",
        "--checkpoint.no-last-save-model-only",
        "--restarts=1",
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with nodes(whole, *options) as run:
        run.finish()
        # Each of the two ranks has a log of its own, though both are "rank 0 of a node".
        assert len([*(whole / "logs").rglob("attempt_0/0/stderr.log")]) == 2
    with nodes(broken, *options) as run:
        # The metadata is written last.
        wait_for(broken / f"checkpoint/step-{INTERVAL}/.metadata", run)
        os.kill(int((broken / "lock").read_text().split()[0]), signal.SIGKILL)
        wait_for(broken / f"checkpoint/step-{2 * INTERVAL}/.metadata", run)
        for agent in run.agents:
            agent.send_signal(signal.SIGTERM)
        run.finish()
        assert f"training resumes at step {INTERVAL + 1} of" in run.output()
        assert f"stopped at step {max(losses(broken))}, which is saved" in run.output()
    assert 2 * INTERVAL <= max(losses(broken)) < STEPS
    with nodes(broken, *options) as run:
        run.finish()
    assert sorted(losses(whole)) == list(range(1, STEPS + 1))
    assert losses(broken) == losses(whole)


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


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
    job = slurm(tmp_path, f'echo "$PWD $*" > {tmp_path}/called; exit 7')
    assert job.wait(timeout=60) == 7  # and a failed run is not queued again
    assert (tmp_path / "called").read_text().split() == [
        *(str(ROOT), "--kill-on-bad-exit=1", "--cpus-per-task=96"),
        *("python", "-m", "torchtitan_ext", "train"),
        *("--nodes", "2", "--head", "n1:23456", "--run-id", "123456-3", "--restarts", "3"),
        *("--ranks", "8", "configs/qwen3_1.7b.toml", "--training.steps", "3"),
    ]
    assert not (tmp_path / "requeued").exists()


def test_slurm_gives_the_doctor_all_cpus_of_each_node(tmp_path: Path) -> None:
    stub(tmp_path, "scontrol", 'echo -e "n1\\nn2"')
    stub(tmp_path, "srun", f'echo "$NODES $HEAD $GPUS $RUN_ID $*" > {tmp_path}/called; exit 7')
    variables = {**slurm_variables(tmp_path), "SLURM_CPUS_PER_TASK": "12"}
    doctor = [str(LAUNCH / "doctor.sh"), "--seconds=60"]
    assert subprocess.run(doctor, env=variables, check=False).returncode == 7
    assert (tmp_path / "called").read_text().split() == [
        *("2", "n1:23456", "8", "doctor-123456", "--kill-on-bad-exit=1", "--cpus-per-task=12"),
        *("--ntasks-per-node=1", "--nodes=2", *doctor),
    ]


def test_the_doctor_finds_what_training_ranks_find(tmp_path: Path) -> None:
    body = f'[[ "$2" == torch.distributed.run ]] && exec env > {tmp_path}/found'
    stub(tmp_path, "python", f'{body}; exec {sys.executable} "$@"')
    variables = environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", GPUS="2")
    del variables["OMP_NUM_THREADS"]
    subprocess.run([str(LAUNCH / "doctor.sh")], env=variables, check=True)
    found = {*(tmp_path / "found").read_text().splitlines()}
    with mock.patch.dict(os.environ, variables, clear=True):
        expected = {f"{name}={value}" for name, value in ranks.variables(2).items()}
    assert expected
    assert expected <= found


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
