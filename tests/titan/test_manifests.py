"""The manifests of Kubernetes and SkyPilot start what `amo train` takes."""

from __future__ import annotations

import yaml

from tests.examples import ROOT
from torchtitan_ext.config.settings import parse


def test_the_pods_of_a_jobset_meet_and_may_save() -> None:
    jobset = yaml.safe_load((ROOT / "launch/jobset.yaml").read_text())
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


def test_the_first_run_of_a_cluster_locks() -> None:
    file = "configs/smoke_h100.toml"
    for name in ("jobset.yaml", "trainjob.yaml", "sky.yaml"):
        assert file in (ROOT / "launch" / name).read_text()
    config = parse([f"--job.config_file={ROOT / file}"], 32)
    settings = config.optimizer.amo
    assert settings.lock_step < config.training.steps == 10
