"""launch/Dockerfile in a Debian root, and the commands of the cluster's files in its containers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.image import SUITE, Container, Image, checkout
from tests.integration.processes import ROOT
from tests.integration.titan_ranks import Run
from torchtitan_ext.runs.run_files import complete_steps

CAN_BUILD = SUITE and os.geteuid() == 0 and shutil.which("mmdebstrap")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CAN_BUILD, reason="needs root, mmdebstrap, and the Python of Debian 12 or 13"
    ),
]
CPU = {"AMO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
RUN = "outputs/quickstart"
SHORT = ("--metrics.log_freq=1", "--optimizer.allow_unlocked")
NODES = 4


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a clone, a Debian root, and the wheels of all that is installed."""
    folder = tmp_path_factory.mktemp("debian")
    checkout(folder / "clone")
    root = folder / "root"
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", str(SUITE), root], check=True)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    names = [f"amo-node-0-{index}" for index in range(NODES)]
    hosts = [f"127.0.0.{index + 1} {name} {name}.amo" for index, name in enumerate(names)]
    (root / "etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
    (root / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    (torch,) = re.findall(r"AMO_TORCH_VERSION:-([\d.]+)", (ROOT / "launch/lib.sh").read_text())
    wanted = [f"torch=={torch}", "setuptools>=77.0.3", f"{folder}/clone[titan,plots]"]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder / "wheels"]
    subprocess.run([*download, *wanted], check=True)
    yield folder
    shutil.rmtree(folder)


def base(debian: Path, name: str) -> Image:
    """A copy of the root, in which pip has these wheels alone."""
    subprocess.run(["cp", "--archive", debian / "root", debian / name], check=True)
    return Image(debian / name, mounts={"/wheels": debian / "wheels"})


@pytest.fixture(scope="module")
def plain(debian: Path) -> Image:
    """The image on a base without Python, as a plain CUDA image is one."""
    image = base(debian, "plain")
    image.build(debian / "clone")
    return image


def test_a_fresh_volume_trains_stops_and_goes_on(plain: Image, tmp_path: Path) -> None:
    assert "check a config and train it" in Container(plain, tmp_path).end()
    volume, run = tmp_path / "volume", tmp_path / "volume" / RUN
    volume.mkdir()
    words = ["train", "/opt/amo/configs/quickstart.toml", *SHORT]
    container = Container(plain, tmp_path, words, volume, CPU)
    container.wait_until(lambda: 2 in Run(run, 2).losses())
    output = container.stop(signal.SIGTERM, 75)
    (step,) = complete_steps(run / "checkpoint")
    assert f"stopped at step {step}, which is saved" in output
    last = step + 10
    output = Container(plain, tmp_path, [*words, f"--training.steps={last}"], volume, CPU).end()
    assert f"training resumes at step {step + 1} of {last}" in output
    assert complete_steps(run / "checkpoint")[-1] == last


OLD_DRIVER = """
mount -t tmpfs driver /proc/driver
mkdir /proc/driver/nvidia
echo 'NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15' > /proc/driver/nvidia/version
touch /dev/nvidiactl
cd /opt/amo
for command in 'amo train configs/quickstart.toml' launch/{doctor,setup,quickstart}.sh; do
  $command && echo passed
done
"""


def test_no_command_trains_on_cpus_where_the_driver_is_too_old(
    plain: Image, tmp_path: Path
) -> None:
    output = Container(plain, tmp_path, ["-c", OLD_DRIVER], entrypoint=["bash"]).end(2)
    assert output.count("error: AMO_DEVICE: found NVIDIA's driver 570.86.15 on container") == 4
    assert "passed" not in output


NVIDIAS = "2.13.0a0+0123456789.nv26.10"


def test_nvidias_torch_and_pins_are_kept(debian: Path, tmp_path: Path) -> None:
    """A Python in /usr/local with a torch whose version is an alpha's; and pins of all of it."""
    if sys.base_prefix == "/usr":
        pytest.skip("needs a Python that is not the system's, to copy it")
    image = base(debian, "nvidia")
    image.run("apt-get update && apt-get install -y python3")  # for the libraries that it needs
    left_out = shutil.ignore_patterns("site-packages", "__pycache__", "test")
    for name in ("bin", "lib"):
        target = image.root / "usr/local" / name
        source = Path(sys.base_prefix, name)
        shutil.copytree(source, target, symlinks=True, ignore=left_out, dirs_exist_ok=True)
    image.run("ldconfig && python3 -m ensurepip && python3 -m pip install torch")
    (package,) = (image.root / "usr/local/lib").glob("python*/site-packages/torch")
    (info,) = package.parent.glob("torch-*.dist-info")
    for file in (info / "METADATA", package / "version.py"):
        file.write_text(re.sub(r"2\.\d+\.\d+\+cpu", NVIDIAS, file.read_text()))
    info.rename(info.with_name(f"torch-{NVIDIAS}.dist-info"))
    image.run(
        "mkdir /etc/pip; python3 -m pip freeze > /etc/pip/constraint.txt"
        "; echo setuptools==65.5.0 >> /etc/pip/constraint.txt"
    )
    image.environment["PIP_CONSTRAINT"] = "/etc/pip/constraint.txt"
    image.build(debian / "clone")
    (tmp_path / "volume").mkdir()
    code = "import torch; print(torch.__version__, torch.__file__)"
    output = Container(image, tmp_path, ["-c", code], entrypoint=["python"]).end()
    assert output.split()[0] == NVIDIAS
    assert output.split()[1].startswith("/usr/local/lib/python3")
    words = ["train", "/opt/amo/configs/quickstart.toml", "--training.steps=2", *SHORT]
    Container(image, tmp_path, words, tmp_path / "volume", CPU).end()
    assert complete_steps(tmp_path / "volume" / RUN / "checkpoint") == [2]


# ------------------------------------------------------------------ the cluster's files


def small(command: str) -> str:
    """A printed command with ten steps of the quickstart, on one CPU rank a node."""
    options = "--ranks=1 --training.local_batch_size=4 --training.steps=4000 "
    options += " ".join(SHORT)
    assert command.count("configs/smoke_h100.toml") == 1
    return command.replace("configs/smoke_h100.toml", f"configs/quickstart.toml {options}")


def pods_of_jobset() -> Iterator[dict[str, Any]]:
    """Arguments of each pod's container; JobSet sets the host's name, the image the entry point."""
    jobset = yaml.safe_load((ROOT / "launch/jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    for index in range(job["parallelism"]):
        command = shlex.split(small(shlex.join(container["args"])))
        more = {"JOB_COMPLETION_INDEX": str(index)}
        yield {"command": command, "variables": {**CPU, **variables, **more}}


def pods_of_trainjob() -> Iterator[dict[str, Any]]:
    """Likewise; the variables are those of Kubeflow Trainer's runtime for PyTorch."""
    trainer = yaml.safe_load((ROOT / "launch/trainjob.yaml").read_text())["spec"]["trainer"]
    (script,) = trainer["args"]
    variables = {each["name"]: each["value"] for each in trainer["env"]}
    variables |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "8"}
    variables |= {"PET_MASTER_ADDR": "amo-node-0-0.amo", "PET_MASTER_PORT": "29400"}
    for index in range(trainer["numNodes"]):
        more = {"PET_NODE_RANK": str(index)}
        yield {
            "command": [small(script)],
            "entrypoint": trainer["command"],
            "variables": {**CPU, **variables, **more},
        }


@pytest.mark.parametrize("pods", [pods_of_jobset, pods_of_trainjob])
def test_pods_meet_save_when_one_is_stopped_and_go_on(
    plain: Image, tmp_path: Path, pods: Callable[[], Iterator[dict[str, Any]]]
) -> None:
    volume, run = tmp_path / "volume", tmp_path / "volume" / RUN
    volume.mkdir()

    def start() -> list[Container]:
        places = [tmp_path / f"amo-node-0-{index}" for index in range(NODES)]
        pairs = zip(places, pods(), strict=True)
        return [Container(plain, at, volume=volume, name=at.name, **pod) for at, pod in pairs]

    started = start()
    started[0].wait_until(lambda: 2 in Run(run, 2).losses())
    started[-1].stop(signal.SIGTERM, 75)
    outputs = [container.end(75) for container in started[:-1]]
    (step,) = complete_steps(run / "checkpoint")
    assert "timed out" not in "".join(outputs)
    assert (
        sum(f"stopped at step {step}, which is saved" in output for output in outputs) == NODES - 1
    )
    started = start()
    started[0].wait_until(lambda: step + 2 in Run(run, 2).losses())
    started[0].stop(signal.SIGTERM, 75)  # the node at whose address the others meet
    for container in started[1:]:
        assert f"stopped at step {complete_steps(run / 'checkpoint')[-1]}" in container.end(75)


def test_skypilots_commands_run_in_the_environment_that_it_activates(
    plain: Image, debian: Path, tmp_path: Path
) -> None:
    task = yaml.safe_load((ROOT / "launch/sky.yaml").read_text())
    shutil.copytree(debian / "clone", tmp_path / "clone")
    lines = [
        "export HOME=/root PYTHONUNBUFFERED=1 SKYPILOT_NUM_NODES=1 SKYPILOT_NODE_IPS=127.0.0.1",
        *(f"export {name}={value}" for name, value in CPU.items()),
        "python3 -m venv ~/sky-user-env && source ~/sky-user-env/bin/activate",
        "cd ~/sky_workdir",
        f"( {task['setup']}\n) || exit",
        small(task["run"]).replace("steps=4000", "steps=10"),
    ]
    image = Image(plain.root, mounts={**plain.mounts, "/root/sky_workdir": tmp_path / "clone"})
    Container(image, tmp_path, ["bash", "-c", "\n".join(lines)]).end()
    assert complete_steps(tmp_path / "clone" / RUN / "checkpoint")[-1] == 10
