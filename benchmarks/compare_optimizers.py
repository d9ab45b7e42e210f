"""Every optimizer on the quickstart's model, data and seed.

``python -m benchmarks.compare_optimizers``: each name is one run of `torchtitan_ext.train` under
torchrun, on the CPU or on GPUs. It prints for each, and writes as JSON: losses, seconds of the
optimizer per step, bytes of optimizer state per parameter, flops of Newton-Schulz per step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "quickstart.toml"
RESULTS = Path(__file__).resolve().parent / "results" / "compare_optimizers.json"


def main(args: Sequence[str] | None = None) -> int:
    from amo_dist.optimizers.named import OPTIMIZER_NAMES

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_optimizers",
        description=__doc__,
        epilog="Other options go to torchtitan, e.g. --training.local_batch_size 2.",
    )
    names = [name for name in OPTIMIZER_NAMES if name != "Muon"]  # the same as Muon-KJ
    parser.add_argument("--names", nargs="+", default=names, choices=OPTIMIZER_NAMES)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON; the plot lies beside")
    options, overrides = parser.parse_known_args(args)
    arguments = [f"--job.config_file={CONFIG}", f"--training.steps={options.steps}", *overrides]
    results: dict[str, Any] = {}
    for name in options.names:
        results[name] = run(name, arguments, options.ranks)
        print(row(name, results[name]), flush=True)
        # After each: what was measured stays, whatever happens to the next.
        write(options, overrides, results)
    print("\n" + "\n".join(table(results)))
    plot(results, options.output.with_suffix(".png"))
    return 0


def run(name: str, arguments: Sequence[str], num_ranks: int) -> dict[str, Any]:
    """Trains with one optimizer; its losses and costs."""
    with tempfile.TemporaryDirectory() as folder:
        own = [
            f"--optimizer.name={name}",
            f"--dump_folder={folder}",
            "--checkpoint.no_enable",
            "--metrics.no_enable_tensorboard",
            "--metrics.log_freq=5",
            "--optimizer.muon.ns_dtype=bfloat16",  # unlike the quickstart
        ]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), "-m", "torchtitan_ext.train"),
            *arguments,
            *own,
        ]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **os.environ}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        records = [
            json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()
        ]
    return {"loss": curve(records), **costs(records), **state(name, records[-1], arguments)}


def curve(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {str(record["step"]): record["loss"] for record in records}


def costs(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    # Medians over intervals of five steps: other work on the machine comes and goes.
    return {
        key: statistics.median(record[key] for record in records[1:] or records)
        for key in ("optimizer_seconds_per_step", "seconds_per_step")
    }


def state(name: str, last: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Bytes of state and flops of Newton-Schulz, of the model on one process."""
    import torch

    from amo_dist import param_groups
    from amo_dist.optimizers.named import make_optimizer
    from amo_dist.schedule.allocate import ns_step_flops

    groups = param_groups(quickstart_model(arguments))
    optimizer = make_optimizer(name, groups)
    if name == "AdamW":  # which makes its state at the first step only
        for group in groups:
            for _, param in group["params"]:
                param.grad = torch.zeros_like(param)
        optimizer.step()
    num_bytes = sum(
        value.numel() * value.element_size()
        for entry in optimizer.state.values()
        for value in entry.values()
        if torch.is_tensor(value) and value.dim() > 0
    )
    counts = {group["algorithm"]: group["params"] for group in groups}
    sizes = {key: sum(p.numel() for _, p in params) for key, params in counts.items()}
    flops = 0
    for group in groups:
        for parameter, views in group.get("matrix_views", {}).items():
            shape = dict(group["params"])[parameter].shape
            keys = (views[0].operator_type, f"{shape[0]}x{shape[1]}")
            steps = next((k for key in keys if (k := last["num_steps_by_type"].get(key))), 0)
            flops += steps * ns_step_flops(*shape)
    return {
        "matrix_parameters": sizes["muon"],
        "other_parameters": sizes["adamw"],
        "state_bytes": num_bytes,
        "state_bytes_per_parameter": num_bytes / sum(sizes.values()),
        "ns_flops_per_step": flops,
        "num_steps_by_type": last["num_steps_by_type"],
    }


def quickstart_model(arguments: Sequence[str]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own modules warn while torchtitan imports them
        from torchtitan_ext.config import settings
    return settings.parse([*arguments, "--optimizer.name=Muon"]).model_spec.model.build()


def row(name: str, result: dict[str, Any]) -> str:
    losses = list(result["loss"].values())
    return (
        f"{name:<11}  {losses[0]:>7.4f}  {losses[-1]:>7.4f}  "
        f"{1e3 * result['optimizer_seconds_per_step']:>9.1f}  "
        f"{result['state_bytes_per_parameter']:>12.3f}  "
        f"{result['ns_flops_per_step'] / 1e9:>12.3f}"
    )


def table(results: dict[str, Any]) -> list[str]:
    heads = f"{'optimizer':<11}  {'first':>7}  {'last':>7}  {'ms/step':>9}"
    heads += f"  {'state B/param':>12}  {'NS Gflop/step':>12}"
    return [heads, *(row(name, result) for name, result in results.items())]


def write(options: argparse.Namespace, overrides: Sequence[str], results: dict[str, Any]) -> None:
    import torch

    record = {
        "steps": options.steps,
        "ranks": options.ranks,
        "overrides": list(overrides),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}",
        "results": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n")


def plot(results: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is missing (pip install 'amo-dist[plots]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, result in results.items():
        steps = [int(step) for step in result["loss"]]
        axes.plot(steps, list(result["loss"].values()), label=name, linewidth=1.2)
    axes.set(xlabel="optimizer step", ylabel="training loss", title="The quickstart's model")
    axes.legend(ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


if __name__ == "__main__":
    raise SystemExit(main())
