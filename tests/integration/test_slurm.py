"""The scripts of launch under stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest

from torchtitan_ext import environment as ranks
from torchtitan_ext.runs.run_files import complete_steps

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
CONFIG = "configs/qwen3_1.7b.toml"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the scripts are bash")


@pytest.mark.parametrize(
    "name", ["setup.sh", "train.slurm", "doctor.sh", "quickstart.sh", "test.sh", "docs.sh"]
)
def test_scripts_are_clean(name: str) -> None:
    assert os.access(LAUNCH / name, os.X_OK)
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run([checker, "-x", str(LAUNCH / name)], cwd=ROOT, check=True)


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def variables(folder: Path, **changes: str) -> dict[str, str]:
    """The environment of a job of two nodes in which a user's environment is active."""
    outside = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    return {
        **outside,
        "PATH": os.pathsep.join(
            [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "VIRTUAL_ENV": sys.prefix,
        "PYTHONPATH": str(ROOT),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "96",
        "SLURM_RESTART_COUNT": "3",
        **changes,
    }


class Job:
    """The Slurm script, in a folder of stand-ins.

    Attributes:
        folder: Folder of the stand-ins; ``calls`` holds what they were asked, a line each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.save(250)
        stub(folder, "sleep", ":")
        # Only the question for the newest step is answered here.
        stub(folder, "python", f'[[ "$*" == *--newest-step ]] && cat {folder}/step')
        stub(
            folder,
            "scontrol",
            f"""
[[ "$*" == "show hostnames n[1-2]" ]] && printf 'n1\\nn2\\n' && exit
[[ "$*" == "show job 123456" ]] && echo "   ReqNodeList=(null) ExcNodeList=(null)" && exit
echo "scontrol $*" >> {folder}/calls
""",
        )
        stub(folder, "scancel", f'echo "scancel $*" >> {folder}/calls; touch {folder}/cancelled')
        self.ranks("exit 0")

    def save(self, step: int) -> None:
        """Have a checkpoint of a step as the newest."""
        (self.folder / "step").write_text(f"{step}\n")

    def ranks(
        self, train: str, *, alone: str = "echo passed n1; echo passed n2", together: str = ":"
    ) -> None:
        """Set what ``srun`` does.

        Args:
            train: Commands in place of ``amo train``.
            alone: Commands in place of the probe of each node.
            together: Commands in place of the probe of all nodes together.
        """
        stub(
            self.folder,
            "srun",
            f"""
if [[ "$*" == *" bash -c "* ]]; then echo probe >> {self.folder}/calls; {alone}; exit; fi
if [[ "$*" == *"doctor.sh --probe"* ]]; then {together}; exit; fi
echo train >> {self.folder}/calls
echo "$PWD $*" > {self.folder}/trained
{train}
""",
        )

    def start(self, **changes: str) -> subprocess.Popen[str]:
        # Slurm runs a copy, from another folder.
        copy = shutil.copy(LAUNCH / "train.slurm", self.folder / "slurm_script")
        return subprocess.Popen(
            ["bash", copy, CONFIG, "--training.steps", "3"],
            env=variables(self.folder, **changes),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, **changes: str) -> tuple[int, str, list[str]]:
        """Run the job; returns its status, what it printed, and the calls."""
        return self.end(self.start(**changes))

    def end(self, job: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
        output, _ = job.communicate(timeout=60)
        calls = self.folder / "calls"
        return job.returncode, output, calls.read_text().splitlines() if calls.exists() else []

    def signal_when_training(self, job: subprocess.Popen[str]) -> None:
        while not (self.folder / "trained").exists():
            assert job.poll() is None, job.communicate()
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


REQUEUE = "scontrol requeue 123456"
SAVES_AT_STOP = (
    "until [[ -e {0}/cancelled ]]; do /bin/sleep 0.05; done; echo 300 > {0}/step; exit 75"
)


def test_every_node_gets_the_same_meeting_point(job: Job) -> None:
    status, _, calls = job.run()
    assert (status, calls) == (0, ["probe", "train"])
    assert (job.folder / "trained").read_text().split() == [
        *(str(ROOT), "--kill-on-bad-exit=0", "--wait=60", "--ntasks-per-node=1", "--nodes=2"),
        *("--cpus-per-task=96", "python", "-m", "torchtitan_ext", "train"),
        *("--nodes", "2", "--head", "n1:23456", "--run-id", "123456-3", "--restarts", "3"),
        *("--ranks", "8", CONFIG, "--training.steps", "3"),
    ]


def test_the_port_lies_below_those_of_any_program(job: Job) -> None:
    job.run(SLURM_JOB_ID="9999")
    assert "--head n1:29999 " in (job.folder / "trained").read_text()


def test_a_mistake_in_the_config_ends_the_job_before_the_probe(job: Job) -> None:
    stub(job.folder, "python", "echo 'error: FILE: found none' >&2; exit 2")
    status, output, calls = job.run()
    assert (status, calls) == (2, [])
    assert "error: FILE: found none" in output


# ------------------------------------------------------------------ the probe


def test_a_bad_node_is_named_and_excluded_at_the_requeue(job: Job) -> None:
    job.ranks("exit 9", alone="echo passed n1; exit 1")
    status, output, calls = job.run()
    assert status == 1
    assert "the probe fails on n2\n" in output
    assert calls == ["probe", REQUEUE, "scontrol update JobId=123456 ExcNodeList=n2"]


def test_nodes_that_the_user_excludes_stay_excluded(job: Job) -> None:
    text = (job.folder / "scontrol").read_text()
    stub(job.folder, "scontrol", text.replace("ExcNodeList=(null)", "ExcNodeList=n[7-9]"))
    job.ranks("exit 9", alone="echo passed n2")
    assert job.run()[2][-1] == "scontrol update JobId=123456 ExcNodeList=n[7-9],n1"


def test_no_node_is_excluded_if_all_fail(job: Job) -> None:
    job.ranks("exit 9", alone="exit 1")
    status, output, calls = job.run()
    assert (status, calls) == (1, ["probe"])
    assert "error: no node passes the probe, so none is excluded" in output


def test_a_network_that_fails_ends_a_job_of_two_nodes(job: Job) -> None:
    job.ranks("exit 9", together="exit 1")
    status, output, calls = job.run()
    assert (status, calls) == (1, ["probe"])
    assert "but not all together: it is the network" in output


@pytest.mark.parametrize(
    ("fails", "calls", "line"),
    [
        (
            '((NODES == 4)) || [[ "$*" == *n3* ]]',
            ["probe", "scontrol requeue 123456", "scontrol update JobId=123456 ExcNodeList=n3"],
            "the probe fails on n3\n",
        ),
        ("((NODES == 4))", ["probe"], "error: every node passes the probe with a neighbour"),
        ("true", ["probe"], "error: no node passes the probe, so none is excluded"),
    ],
)
def test_the_node_that_fails_with_both_neighbours_is_excluded(
    job: Job, fails: str, calls: list[str], line: str
) -> None:
    text = (job.folder / "scontrol").read_text().replace("'n1\\nn2\\n'", "'n1\\nn2\\nn3\\nn4\\n'")
    stub(job.folder, "scontrol", text)
    pairs = f'echo "$NODES $HEAD $*" >> {job.folder}/together\n'
    passed = "; ".join(f"echo passed n{number}" for number in range(1, 5))
    job.ranks("exit 9", alone=passed, together=f"{pairs}if {fails}; then exit 1; fi")
    status, output, asked = job.run()
    assert (status, asked) == (1, calls)
    assert line in output
    first, pair, *others = (job.folder / "together").read_text().splitlines()
    assert first.startswith("4 n1:23456 ")
    assert pair.startswith("2 n4:23456 ")
    assert "--nodes=2 --nodelist=n4,n1 launch/doctor.sh --probe" in pair
    assert len(others) == 3


def test_the_probe_can_be_left_out(job: Job) -> None:
    job.ranks("exit 0", alone="exit 1")
    assert job.run(AMO_PROBE_SECONDS="0")[::2] == (0, ["train"])


@pytest.mark.slow
def test_the_task_of_the_probe_runs_the_doctor(job: Job, tmp_path: Path) -> None:
    """The same command that srun gets, run once per node with the doctor of this machine."""
    real = f'exec {sys.executable} "$@"'
    stub(job.folder, "python", f'[[ "$*" == *--newest-step ]] && cat {job.folder}/step || {real}')
    run_task = 'while [[ "$1" != bash ]]; do shift; done; SLURMD_NODENAME=n{} "$@"'
    nodes = f"( {run_task.format(1)} ); GPUS=none; export GPUS; ( {run_task.format(2)} )"
    job.ranks("exit 9", alone=nodes)
    status, output, calls = job.run(
        GPUS="1", AMO_DEVICE="cpu", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"
    )
    assert status == 1, output
    assert "ok   arithmetic: " in output
    assert calls[-1] == "scontrol update JobId=123456 ExcNodeList=n2", output
    assert not [*ROOT.glob(".probe-*")]


# ------------------------------------------------------------------ ends


def test_the_time_limit_saves_and_queues_the_job_again(job: Job) -> None:
    job.ranks(SAVES_AT_STOP.format(job.folder))
    process = job.start()
    job.signal_when_training(process)
    status, output, calls = job.end(process)
    assert status == 75
    assert calls == ["probe", "train", "scancel --signal=TERM 123456", REQUEUE]
    assert "ended with status 75, saved until step 300" in output


def test_a_failing_scancel_is_tried_again(job: Job) -> None:
    """Under `set -e` it ended the script, without a save and without a requeue."""
    folder = job.folder
    stub(
        folder,
        "scancel",
        f'echo "scancel $*" >> {folder}/calls\n'
        f"(($(grep -c scancel {folder}/calls) == 3)) || exit 1\ntouch {folder}/cancelled",
    )
    job.ranks(SAVES_AT_STOP.format(folder))
    process = job.start()
    job.signal_when_training(process)
    status, output, calls = job.end(process)
    assert status == 75
    assert calls[2:] == 3 * ["scancel --signal=TERM 123456"] + [REQUEUE]
    assert output.count("failed: scancel --signal=TERM 123456; again in") == 2


def test_srun_is_ended_if_scancel_never_works(job: Job) -> None:
    stub(job.folder, "scancel", "exit 1")
    end = f"trap 'echo 300 > {job.folder}/step; exit 143' TERM; while :; do /bin/sleep 0.05; done"
    job.ranks(end)
    process = job.start()
    job.signal_when_training(process)
    status, output, calls = job.end(process)
    assert (status, calls[-1]) == (143, REQUEUE)
    assert "scancel fails: ending srun" in output


def test_a_failing_requeue_is_tried_again_and_reported(job: Job) -> None:
    text = (job.folder / "scontrol").read_text()
    stub(job.folder, "scontrol", f"{text}\nexit 1")
    job.ranks(f"echo 300 > {job.folder}/step; exit 1")
    status, output, calls = job.run()
    assert (status, calls) == (1, ["probe", "train"] + 5 * [REQUEUE])
    assert "error: not queued again: scontrol fails" in output


@pytest.mark.parametrize("status", [1, 75, 137, 143])
def test_a_run_without_progress_is_not_queued_again(job: Job, status: int) -> None:
    job.ranks(f"exit {status}")
    result, output, calls = job.run()
    assert (result, calls) == (status, ["probe", "train"])
    if status != 75:
        assert f"not queued again: status {status}, and no checkpoint after step 250" in output


def test_a_time_limit_without_progress_is_not_queued_again(job: Job) -> None:
    job.ranks(f"until [[ -e {job.folder}/cancelled ]]; do /bin/sleep 0.05; done; exit 143")
    process = job.start()
    job.signal_when_training(process)
    status, output, calls = job.end(process)
    assert (status, calls[-1]) == (143, "scancel --signal=TERM 123456")
    assert "not queued again: status 143, and no checkpoint after step 250" in output


@pytest.mark.parametrize("status", [1, 137, 143])
def test_a_failure_after_progress_is_queued_again(job: Job, status: int) -> None:
    job.ranks(f"echo 251 > {job.folder}/step; exit {status}")
    result, output, calls = job.run()
    assert (result, calls) == (status, ["probe", "train", REQUEUE])
    assert f"ended with status {status}, saved until step 251" in output


@pytest.mark.parametrize(("status", "line"), [(0, ""), (2, ""), (75, "stopped by a signal from")])
def test_an_end_is_an_end(job: Job, status: int, line: str) -> None:
    """Done, a mistake, or a stop by hand, after which there is a new checkpoint, too."""
    job.ranks(f"echo 300 > {job.folder}/step; exit {status}")
    result, output, calls = job.run()
    assert (result, calls) == (status, ["probe", "train"])
    assert line in output


@pytest.mark.slow
def test_a_real_run_is_probed_stopped_queued_again_and_finished(tmp_path: Path) -> None:
    """Nothing stands in for Python here: two CPU ranks train, and the second start resumes."""
    folder, run = tmp_path / "bin", tmp_path / "run"
    folder.mkdir()
    stub(
        folder,
        "scontrol",
        f"""[[ "$2" != hostnames ]] || exec echo localhost
echo "$*" >> {folder}/calls""",
    )
    stub(folder, "scancel", f"kill -TERM $(cat {folder}/pid)")
    stub(
        folder,
        "srun",
        f'''while [[ "$1" == -* ]]; do shift; done
echo $$ > {folder}/pid
export SLURMD_NODENAME=localhost
exec "$@"''',
    )
    environment = variables(
        folder, GPUS="2", AMO_DEVICE="cpu", OMP_NUM_THREADS="1", SLURM_JOB_NODELIST="localhost"
    )
    options = [f"--dump_folder={run}", "--checkpoint.enable", "--metrics.log_freq=1"]
    script = ["bash", str(LAUNCH / "train.slurm"), "configs/debug_llama3.toml", *options]

    def start(steps: int) -> subprocess.Popen[str]:
        command = [*script, f"--training.steps={steps}"]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    job = start(4000)
    while not (run / "metrics.jsonl").exists():
        assert job.poll() is None, job.communicate()
        time.sleep(0.1)
    time.sleep(2)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 75, output
    (step,) = complete_steps(run / "checkpoint")
    for line in (
        "ok   arithmetic: ",
        "[amo] time limit ahead: saving\n",
        f"stopped at step {step}, which is saved",
        "Stopped; the same command goes on.\n",
        f"[amo] ended with status 75, saved until step {step}\n",
    ):
        assert line in output
    assert (folder / "calls").read_text() == "requeue 123456\n"

    last = step + 14  # enough for a plan to lock
    job = start(last)
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output
    assert f"training resumes at step {step + 1} of {last}" in output
    assert (folder / "calls").read_text() == "requeue 123456\n"


def test_requeues_end(job: Job) -> None:
    job.ranks(f"echo 300 > {job.folder}/step; exit 1")
    status, output, calls = job.run(AMO_REQUEUES="3")
    assert (status, calls) == (1, ["probe", "train"])
    assert "not queued again: it was 3 times already (AMO_REQUEUES)" in output


def test_headers() -> None:
    text = (LAUNCH / "train.slurm").read_text()
    headers: Mapping[str, str] = dict(
        re.findall(r"^#SBATCH (--[a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    )
    assert headers["--signal"] == "B:USR1@720"
    assert headers["--mem"] == "0"  # Some clusters give a job little memory per CPU otherwise.
    assert {"--requeue", "--exclusive"} <= headers.keys()


# ------------------------------------------------------------------ the doctor's script


def test_the_doctor_gets_all_cpus_of_each_node(tmp_path: Path) -> None:
    stub(tmp_path, "scontrol", 'echo -e "n1\\nn2"')
    stub(tmp_path, "srun", f'echo "$NODES $HEAD $GPUS $RUN_ID $*" > {tmp_path}/called; exit 7')
    doctor = [str(LAUNCH / "doctor.sh"), "--seconds=60"]
    environment = variables(tmp_path, SLURM_CPUS_PER_TASK="12")
    assert subprocess.run(doctor, env=environment, check=False).returncode == 7
    assert (tmp_path / "called").read_text().split() == [
        *("2", "n1:23456", "8", "doctor-123456", "--kill-on-bad-exit=0", "--wait=60"),
        *("--ntasks-per-node=1", "--nodes=2", "--cpus-per-task=12", *doctor),
    ]


def test_the_doctor_finds_what_training_ranks_find(tmp_path: Path) -> None:
    body = f'[[ "$2" == torch.distributed.run ]] && exec env > {tmp_path}/environment'
    stub(tmp_path, "python", f'{body}; exec {sys.executable} "$@"')
    outside = variables(tmp_path, GPUS="2")
    outside = {name: text for name, text in outside.items() if not name.startswith("SLURM_")}
    outside.pop("OMP_NUM_THREADS", None)
    subprocess.run([str(LAUNCH / "doctor.sh")], env=outside, check=True)
    inside = {*(tmp_path / "environment").read_text().splitlines()}
    with mock.patch.dict(os.environ, outside, clear=True):
        expected = {f"{name}={value}" for name, value in ranks.variables(2).items()}
    assert expected
    assert expected <= inside
