"""The scripts of launch under stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.processes import CPU, ROOT, Command
from torchtitan_ext.runs.run_files import complete_steps

LAUNCH = ROOT / "launch"
CONFIG = "configs/qwen3_1.7b.toml"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the scripts are bash")


@pytest.mark.parametrize(
    "name", sorted(path.name for path in LAUNCH.glob("*.s[hl]*") if path.name != "lib.sh")
)
def test_scripts_are_clean(name: str) -> None:
    assert os.access(LAUNCH / name, os.X_OK)
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run([checker, "-x", str(LAUNCH / name)], cwd=ROOT, check=True)


SCONTROL = """
[[ "$*" == "show hostnames n[1-2]" ]] && printf 'n1\\nn2\\n' && exit
[[ "$*" == "show job 123456" ]] && echo "   ReqNodeList=(null) ExcNodeList=(null)" && exit
echo "scontrol $*" >> $here/calls
"""
SRUN = """
if [[ "$*" == *" bash -c "* ]]; then echo probe >> $here/calls; {alone}; exit; fi
if [[ "$*" == *"doctor.sh --probe"* ]]; then {together}; exit; fi
echo train >> $here/calls
echo "$PWD $*" > $here/trained
{train}
"""


def stub(folder: Path, name: str, body: str) -> None:
    """A stand-in for a program, which knows its folder as ``$here``."""
    path = folder / name
    path.write_text(f'#!/usr/bin/env bash\nhere="${{0%/*}}"\n{body}\n')
    path.chmod(0o755)


# Not of a job that the tests run in.
OUTSIDE = {name: text for name, text in CPU.items() if not name.startswith("SLURM_")}
JOB = {
    "SLURM_SUBMIT_DIR": str(ROOT),
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_ON_NODE": "96",
    "SLURM_RESTART_COUNT": "3",
}
"""Variables of a job of two nodes."""


def variables(stubs: Path, **more: str) -> dict[str, str]:
    """The environment of a user, who has activated this very one, with stand-ins."""
    path = f"{stubs}{os.pathsep}{CPU['PATH']}"
    return {**OUTSIDE, "PATH": path, "VIRTUAL_ENV": sys.prefix, **more}


class Job:
    """The Slurm script, in a folder of stand-ins.

    Attributes:
        folder: Folder of the stand-ins; ``calls`` holds what they were asked, a line each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "step").write_text("250\n")  # of the newest checkpoint
        stub(folder, "sleep", ":")
        # Only the question for the newest step is answered here.
        stub(folder, "python", '[[ "$*" == *--newest-step ]] && cat $here/step')
        stub(folder, "scontrol", SCONTROL)
        stub(folder, "scancel", 'echo "scancel $*" >> $here/calls; touch $here/cancelled')
        self.ranks("exit 0")

    def ranks(
        self, train: str, *, alone: str = "echo passed n1; echo passed n2", together: str = ":"
    ) -> None:
        """Set what ``srun`` does.

        Args:
            train: Commands in place of ``amo train``.
            alone: Commands in place of the probe of each node.
            together: Commands in place of the probe of all nodes together.
        """
        stub(self.folder, "srun", SRUN.format(train=train, alone=alone, together=together))

    def start(self, **changes: str) -> subprocess.Popen[bytes]:
        # Slurm runs a copy, from another folder.
        copy = shutil.copy(LAUNCH / "train.slurm", self.folder / "slurm_script")
        return subprocess.Popen(
            ["bash", copy, CONFIG, "--training.steps", "3"],
            env=variables(self.folder, **{**JOB, **changes}),
            cwd=self.folder,
        )

    def run(self, **changes: str) -> tuple[int, list[str]]:
        """Run the job; returns its status and the calls."""
        return self.start(**changes).wait(60), self.calls()

    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


REQUEUE = "scontrol requeue 123456"


def test_every_node_gets_the_same_meeting_point(job: Job) -> None:
    assert job.run() == (0, ["probe", "train"])
    assert (job.folder / "trained").read_text().split() == [
        *(str(ROOT), "--kill-on-bad-exit=0", "--wait=60", "--ntasks-per-node=1", "--nodes=2"),
        *("--cpus-per-task=96", "--nodes=2", "--nodelist=n1,n2"),
        *("python", "-m", "torchtitan_ext", "train"),
        *("--nodes", "2", "--run-id", "123456-3", "--restarts", "3", "--ranks", "8"),
        *("--head", "n1:23456", CONFIG, "--training.steps", "3"),
    ]


@pytest.mark.parametrize(("passes", "trains"), [("n1 n2", "n1"), ("n2", "n2")])
def test_a_spare_node_trains_in_place_of_one_that_fails(job: Job, passes: str, trains: str) -> None:
    job.ranks("exit 0", alone=f"for node in {passes}; do echo passed $node; done")
    site = job.folder / "site.sh"
    site.write_text("AMO_SRUN_OPTIONS=(--container-image=amo.sqsh)\nexport FI_PROVIDER=efa\n")
    assert job.run(AMO_SPARES="1", AMO_SITE=str(site)) == (0, ["probe", "train"])
    words = (job.folder / "trained").read_text().split()
    assert {"--container-image=amo.sqsh", f"--nodelist={trains}", f"{trains}:23456"} <= set(words)
    assert words[words.index("train") + 1 :][:2] == ["--nodes", "1"]


def test_a_mistake_that_a_start_would_report_ends_the_job_before_the_probe(job: Job) -> None:
    stub(job.folder, "python", "exit 2")  # to the question for the newest step
    assert job.run() == (2, [])


# ------------------------------------------------------------------ the probe

EXCLUDE = "scontrol update JobId=123456 ExcNodeList="


@pytest.mark.parametrize(
    ("alone", "together", "excluded", "status", "calls"),
    [
        ("echo passed n1; exit 1", ":", "(null)", 1, ["probe", REQUEUE, f"{EXCLUDE}n2"]),
        ("echo passed n2", ":", "n[7-9]", 1, ["probe", REQUEUE, f"{EXCLUDE}n[7-9],n1"]),
        ("exit 1", ":", "(null)", 1, ["probe"]),  # of all nodes: none is excluded
        ("echo passed n1; echo passed n2", "exit 1", "(null)", 1, ["probe"]),  # the network
        ("echo passed n1; echo passed n2", ":", "(null)", 0, ["probe", "train"]),
    ],
)
def test_a_node_that_fails_the_probe_is_excluded(
    job: Job, alone: str, together: str, excluded: str, status: int, calls: list[str]
) -> None:
    text = (job.folder / "scontrol").read_text()
    stub(job.folder, "scontrol", text.replace("ExcNodeList=(null)", f"ExcNodeList={excluded}"))
    job.ranks("exit 0", alone=alone, together=together)
    assert job.run() == (status, calls)
    if status:
        assert job.run(AMO_PROBE_SECONDS="0")[0] == 0  # without probes


def test_a_slow_start_excludes_no_node_and_a_hang_does(tmp_path: Path) -> None:
    """A cold disk makes imports slow; the limit of a hang is that of the start and the checks."""
    stub(
        tmp_path,
        "srun",
        'shift; for node in slow hangs fails; do SLURMD_NODENAME=$node "$@" & done; wait',
    )
    stub(tmp_path, "scontrol", "printf 'slow\\nhangs\\nfails\\n'")
    (tmp_path / "launch").mkdir()
    starts = "slow) sleep 2 ;; hangs) sleep 600 ;; fails) exit 1 ;;"
    stub(tmp_path / "launch", "doctor.sh", f'case "$SLURMD_NODENAME" in {starts} esac')
    script = f"source {LAUNCH}/lib.sh; AMO_SRUN=(srun -q); amo_probe_nodes 1"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=variables(tmp_path, SLURM_JOB_NODELIST="x", AMO_START_SECONDS="9"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout.split() == ["hangs", "fails"]


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ('((NODES == 4)) || [[ "$*" == *n3* ]]', ["probe", REQUEUE, f"{EXCLUDE}n3"]),
        ("((NODES == 4))", ["probe"]),  # no pair fails: none is excluded
        ("true", ["probe"]),  # all pairs do
    ],
)
def test_a_node_is_excluded_by_its_neighbours(job: Job, fails: str, calls: list[str]) -> None:
    text = (job.folder / "scontrol").read_text().replace("'n1\\nn2\\n'", "'n1\\nn2\\nn3\\nn4\\n'")
    stub(job.folder, "scontrol", text)
    pairs = 'echo "$NODES $HEAD $*" >> $here/together\n'
    passed = "; ".join(f"echo passed n{number}" for number in range(1, 5))
    job.ranks("exit 9", alone=passed, together=f"{pairs}if {fails}; then exit 1; fi")
    assert job.run() == (1, calls)
    first, pair, *others = (job.folder / "together").read_text().splitlines()
    assert first.startswith("4 n1:23456 ")
    assert pair.startswith("2 n4:23456 ")
    assert "--nodes=2 --nodelist=n4,n1 launch/doctor.sh --probe" in pair
    assert len(others) == 3


# ------------------------------------------------------------------ ends


SCANCEL = "scancel --signal=TERM 123456"
FAILS_TWICE = "(($(grep -c scancel $here/calls) == 3)) || exit 1; touch $here/cancelled"
SAVE = "echo 300 > $here/step"
SAVES_AT_STOP = f"until [[ -e $here/cancelled ]]; do /bin/sleep 0.05; done; {SAVE}; exit 75"
SAVES_AT_TERM = f"trap '{SAVE}; exit 143' TERM; while :; do /bin/sleep 0.05; done"


@pytest.mark.parametrize(
    ("train", "cancel", "status", "attempts"),
    [
        # Under `set -e` a failing scancel ended the script, without a save and without a requeue.
        (SAVES_AT_STOP, FAILS_TWICE, 75, 3),
        (SAVES_AT_TERM, "exit 1", 143, 5),  # srun itself is ended
    ],
)
def test_the_time_limit_saves_and_queues_the_job_again_though_scancel_fails(
    job: Job, train: str, cancel: str, status: int, attempts: int
) -> None:
    stub(job.folder, "scancel", f'echo "scancel $*" >> $here/calls\n{cancel}')
    job.ranks(train)
    process = job.start()
    while not (job.folder / "trained").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == status
    assert job.calls() == ["probe", "train", *[SCANCEL] * attempts, REQUEUE]


def test_a_failing_requeue_is_tried_again(job: Job) -> None:
    stub(job.folder, "scontrol", (job.folder / "scontrol").read_text() + "exit 1")
    job.ranks(f"{SAVE}; exit 1")
    assert job.run() == (1, ["probe", "train", *[REQUEUE] * 5])


@pytest.mark.parametrize(
    ("saved", "status", "requeues", "is_queued"),
    [
        *((250, status, "20", False) for status in (1, 75, 137, 143)),  # no progress
        *((251, status, "20", True) for status in (1, 137, 143)),
        (300, 1, "3", False),  # it was queued three times already
        # Done, a mistake, or a stop by hand, after which there is a new checkpoint, too.
        *((300, status, "20", False) for status in (0, 2, 75)),
    ],
)
def test_only_a_failure_after_progress_is_queued_again(
    job: Job, saved: int, status: int, requeues: str, is_queued: bool
) -> None:
    job.ranks(f"echo {saved} > $here/step; exit {status}")
    calls = ["probe", "train", *[REQUEUE] * is_queued]
    assert job.run(AMO_REQUEUES=requeues) == (status, calls)


@pytest.mark.slow
def test_a_real_run_is_probed_stopped_queued_again_and_finished(tmp_path: Path) -> None:
    """Nothing stands in for Python here: two CPU ranks train, and the second start resumes."""
    folder, run = tmp_path / "bin", tmp_path / "run"
    folder.mkdir()
    hosts = '[[ "$2" != hostnames ]] || exec echo localhost'
    stub(folder, "scontrol", f'{hosts}\necho "$*" >> $here/calls')
    stub(folder, "scancel", "kill -TERM $(cat $here/pid)")
    words = 'while [[ "$1" == -* ]]; do shift; done'
    stub(folder, "srun", f'{words}\necho $$ > $here/pid\nSLURMD_NODENAME=localhost exec "$@"')
    environment = variables(folder, GPUS="2", **{**JOB, "SLURM_JOB_NODELIST": "localhost"})
    options = [f"--dump_folder={run}", "--checkpoint.enable", "--metrics.log_freq=1"]
    script = ["bash", str(LAUNCH / "train.slurm"), "configs/debug_llama3.toml", *options]

    job = Command([*script, "--training.steps=4000"], tmp_path, environment)
    job.wait_until((run / "metrics.jsonl").exists)
    time.sleep(2)
    output = job.stop(signal.SIGUSR1, 75)
    (step,) = complete_steps(run / "checkpoint")
    for line in (
        "ok   arithmetic: ",
        "[amo] time limit ahead: saving\n",
        f"stopped at step {step}, which is saved",
        "Stopped; the same command goes on.\n",
        f"[amo] ended with status 75, saved until step {step}\n",
    ):
        assert line in output

    last = step + 14  # enough for a plan to lock
    output = Command([*script, f"--training.steps={last}"], tmp_path, environment).end()
    assert f"training resumes at step {step + 1} of {last}" in output
    assert (folder / "calls").read_text() == "requeue 123456\n"
