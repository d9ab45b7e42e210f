"""What users install: a source release and a wheel that need torch alone, of one version."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import amo_dist
from tests.examples import ROOT, examples

FOLDERS = ("amo_dist", "torchtitan_ext", "benchmarks", "configs", "docs", "launch", "tests")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "results")
BUILD = """
import sys
sys.modules["torch"] = None  # pip builds in an environment without it
from setuptools import build_meta
print(build_meta.build_{kind}({folder!r}))
"""
WHO = (
    "import amo_dist, importlib.metadata as m; "
    "print(amo_dist.__file__, amo_dist.__version__, m.version('amo-dist'))"
)


def build(kind: str, source: Path, folder: Path) -> Path:
    """What the build backend of ``pyproject.toml`` makes, as pip asks it to; without network."""
    code = BUILD.format(kind=kind, folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def requirements(name: str, seen: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """A distribution that is installed here, and those that it requires."""
    if name not in seen:
        seen.add(name)
        found = importlib.metadata.distribution(name)
        yield found
        for needed in map(Requirement, found.requires or ()):
            if not needed.marker or needed.marker.evaluate():
                yield from requirements(needed.name, seen)


def environment_with_torch(folder: Path) -> Path:
    """A new environment that sees torch and what torch requires, and nothing else.

    Returns:
        Its interpreter.
    """
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for found in requirements("torch", set()):
        for top in sorted({path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}):
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    return folder / "bin" / "python"


def test_one_version_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", amo_dist.__version__)
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [amo_dist.__version__]
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'version = { attr = "amo_dist.config.__version__" }' in project
    (license_name,) = re.findall(r'^license = "(.*)"$', project, re.MULTILINE)
    assert f"\nlicense: {license_name}\n" in citation


def test_the_torch_of_nvidias_images_is_new_enough() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (line,) = re.findall(r'^    "(torch>=.*)",$', project, re.MULTILINE)
    versions = ["2.10.0", "2.11.0a0+eb65b36914", "2.14.0a0+ecf3bae40a", "2.13.0+cpu"]
    accepted = [Requirement(line).specifier.contains(one, prereleases=True) for one in versions]
    assert accepted == [False, True, True, True]


@pytest.mark.slow
def test_the_wheel_runs_the_first_example_beside_torch_alone(tmp_path: Path) -> None:
    source, dist = tmp_path / "source", tmp_path / "dist"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=NOT_COPIED)
    for path in (each for each in ROOT.iterdir() if each.is_file()):
        shutil.copy(path, source)
    dist.mkdir()
    with tarfile.open(build("sdist", source, dist)) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("amo_dist-*")
    for name in ("LICENSE", "CITATION.cff", "configs/quickstart.toml", "tests/test_package.py"):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()
    wheel = build("wheel", unpacked, dist)
    assert "torchtitan_ext/tools/report/page.html" in zipfile.ZipFile(wheel).namelist()

    python = environment_with_torch(tmp_path / "empty")
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    # pip looks for the requirements, torch among them, and may fetch none.
    install = ["-m", "pip", "--python", python, "install", "--quiet", "--no-index", wheel]
    subprocess.run([sys.executable, *install], env=own, check=True)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    own["PATH"] = f"{python.parent}{os.pathsep}{own['PATH']}"
    own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=folder, env=own, capture_output=True, text=True, timeout=300, check=False
        )

    place, *versions = run("python", "-c", WHO).stdout.split()
    assert Path(place).is_relative_to(tmp_path / "empty")
    assert versions == [amo_dist.__version__] * 2
    command, text = examples(["README.md"])["fsdp2.py"]
    (folder / command[-1]).write_text(text)
    assert command[0] == "torchrun"
    done = run("python", "-m", "torch.distributed.run", *command[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("20") == done.stdout.count("locked") == 2, done.stdout
    told = run("amo", "train", "llama3.1_75m")
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()[-1:]
    assert "pip install 'amo-dist[titan]'" in line
