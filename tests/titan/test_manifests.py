"""The manifests of Kubernetes and SkyPilot start what `amo train` takes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from amo_dist.config import AMOConfig
from tests.examples import ROOT
from torchtitan_ext.config.settings import parse


def manifest(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "launch" / name).read_text())
    return loaded


def test_the_pods_of_a_jobset_meet_and_may_save() -> None:
    jobset = manifest("jobset.yaml")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    args = pod["containers"][0]["args"]
    assert f"--nodes={job['parallelism']}" in args
    assert job["completions"] == job["parallelism"]
    subdomain = jobset["spec"]["network"]["subdomain"]
    host = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{subdomain}"
    assert f"--head={host}:29500" in args
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    config = parse([f"--job.config_file={ROOT / args[1]}"], 32)
    assert pod["terminationGracePeriodSeconds"] > config.checkpoint.stop_seconds + 30


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml", "sky.yaml"])
def test_the_first_run_of_a_cluster_locks(name: str) -> None:
    assert "configs/smoke_h100.toml" in (ROOT / "launch" / name).read_text()
    config = parse([f"--job.config_file={ROOT / 'configs/smoke_h100.toml'}"], 32)
    settings = config.optimizer.amo
    assert isinstance(settings, AMOConfig)
    assert settings.lock_step < config.training.steps == 10
