"""The first eight minutes on one GPU: what only a device can show of the optimizer.

``launch/gpu_trial.sh FOLDER`` runs every part in a process of its own, with a time limit, and
writes ``trial.json`` and the page ``trial.md`` into the folder. Needs PyTorch alone. Without a GPU
the parts run small on the CPU, which tests them and says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from amo_dist import Muon, MuonConfig, param_groups
from amo_dist.engine.ballot import fetch
from amo_dist.engine.observe import coefficient_table, measure_spectrum
from amo_dist.kernels.spectrum import ns_residual
from amo_dist.schedule.polar_express import schedule_for
from benchmarks import launches
from benchmarks.measure import machine, synchronize

STEPS_BY_TYPE = {
    "attn_q": 6,
    "attn_k": 5,
    "attn_v": 5,
    "attn_o": 6,
    "mlp_gate": 4,
    "mlp_up": 5,
    "mlp_down": 4,
}
"""Newton-Schulz steps of a locked plan."""
IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")


def parts(folder: Path) -> dict[str, tuple[int, list[str]]]:
    """Time limit in seconds and command of each part, by name."""
    here, module = [sys.executable, "-m", "benchmarks.gpu_trial"], [sys.executable, "-m"]
    doctor = ["amo_dist", "doctor", "--seconds"]
    shared = ["--standalone", "--nproc-per-node", "4", "-m", "benchmarks.gpu_trial", "shared"]
    kernels = ["--rounds", "5", "--dtypes", "bfloat16", "--output", str(folder / "kernels.json")]
    kernels += ["--shapes", *(["1024x2048", "2048x2048", "2048x6144"] if IS_CUDA else ["64x64"])]
    return {
        "doctor": (80, [*module, *doctor, "70"]),
        "collectives": (40, [*here, "collectives"]),
        "step, seven schedules": (60, [*here, "step"]),
        "step, one schedule": (40, [*here, "step", "--schedule", "kj"]),
        "step, master weights": (40, [*here, "step", "--master"]),
        "observation": (60, [*here, "observation"]),
        "kernels": (50, [*module, "benchmarks.newton_schulz", *kernels]),
        "doctor, four ranks of one GPU": (60, [*module, "torch.distributed.run", *shared]),
        "tests": (60, [*module, "pytest", "-q", "-m", "cuda", "tests/unit"]),
    }


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_trial", description=__doc__)
    parser.add_argument("part", choices=("all", "collectives", "step", "observation", "shared"))
    parser.add_argument("--folder", type=Path, default=Path("gpu_trial"))
    parser.add_argument("--only", nargs="+", help="names of parts to run")
    parser.add_argument("--schedule", choices=("types", "kj"), default="types")
    parser.add_argument("--master", action="store_true", help="bfloat16 with master weights")
    options = parser.parse_args(args)
    if options.part == "all":
        return run_all(options.folder, options.only)
    if options.part == "shared":
        return shared_doctor()
    run: Callable[[argparse.Namespace], dict[str, Any]] = globals()[options.part]
    print(json.dumps(run(options)))
    return 0


def run_all(folder: Path, only: Sequence[str] | None) -> int:
    """Run the parts one after the other; 1 if one has failed."""
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for name, (limit, command) in parts(folder).items():
        if only and name not in only:
            continue
        print(f"== {name} (at most {limit} s)", flush=True)
        results[name] = run_part(command, limit)
        print(results[name]["tail"], flush=True)
        content = {"machine": machine(), "parts": results}
        (folder / "trial.json").write_text(json.dumps(content, indent=1) + "\n")
    page = "\n".join(page_of(results))
    (folder / "trial.md").write_text(page + "\n")
    print(f"\n{page}\n\nwritten to {folder}")
    return int(any(result["status"] for result in results.values()))


def run_part(command: Sequence[str], limit: float) -> dict[str, Any]:
    """Status, seconds, the end of what a command printed, and its figures, if it prints any."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, timeout=limit, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        status, output = 124, f"{output}\nended after {limit} s"
    lines = output.strip().splitlines()
    figures = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    tail = "\n".join(lines[-12:])
    seconds = round(time.monotonic() - start, 1)
    return {"status": status, "seconds": seconds, "tail": tail, "figures": figures}


def page_of(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The page: the verdict on each part, then the figures."""
    facts = machine()
    yield f"# Trial on {facts['cuda'] or 'a CPU, which says nothing about GPUs'}"
    yield f"\nPyTorch {facts['torch']}, {time.strftime('%Y-%m-%d')}\n"
    yield "| part | verdict | seconds |\n|---|---|---|"
    for name, result in results.items():
        verdict = {0: "passed", 5: "no such test", 124: "took too long"}.get(result["status"])
        yield f"| {name} | {verdict or 'FAILED'} | {result['seconds']} |"
    for name, result in results.items():
        if result["figures"]:
            yield f"\n## {name}\n\n| figure | value |\n|---|---|"
            yield from (f"| {key} | {value} |" for key, value in result["figures"].items())


# ---------------------------------------------------------------- parts


def collectives(options: argparse.Namespace) -> dict[str, Any]:
    """Every collective that the optimizer calls, in a world of one rank."""
    backend = "nccl" if IS_CUDA else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for dtype in (torch.int64, torch.float32, torch.float64):
        values = torch.ones(5, dtype=dtype, device=DEVICE)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        dist.all_reduce(values)
        assert values.tolist() == [1.0] * 5, values
    sizes = (0, 1, 4097, *([2**31 + 8] if IS_CUDA else ()))  # more bytes than an int counts
    for size in sizes:
        sent = torch.full((size,), 3, dtype=torch.uint8, device=DEVICE)
        received = torch.zeros_like(sent)
        dist.all_to_all_single(received, sent, [size], [size], async_op=True).wait()
        assert torch.equal(sent, received), size
        del sent, received
    sent = torch.arange(32, dtype=torch.uint8, device=DEVICE)
    received = [torch.empty_like(sent)]
    dist.broadcast(sent, group=dist.group.WORLD, group_src=0)
    dist.all_gather(received, sent)
    assert torch.equal(sent, received[0])
    dist.all_reduce(torch.ones(1, device=DEVICE), group=dist.new_group([0]))
    votes = torch.ones(9, dtype=torch.int64, device=DEVICE)
    if IS_CUDA:
        torch.cuda.set_sync_debug_mode("error")
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    read = fetch(votes)  # must not wait
    if IS_CUDA:
        torch.cuda.set_sync_debug_mode("default")
    assert read() == [1] * 9
    dist.destroy_process_group()
    return {"backend": backend, "sizes of all-to-alls": str(sizes)}


def step(options: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of a locked step of one of 32 ranks; collectives move nothing."""
    narrower, num_steps = (1, 20) if IS_CUDA else (launches.NARROWER, 2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=launches.RANKS)
    mesh = init_device_mesh(DEVICE.type, (launches.RANKS,))
    dtype = torch.bfloat16 if options.master else torch.float32
    module = launches.make_module(mesh, dtype, narrower)
    by_type = {kind: schedule_for(1e-3, count) for kind, count in STEPS_BY_TYPE.items()}
    optimizer = Muon(
        param_groups(module),
        lr=1e-3,
        schedule="kj" if options.schedule == "kj" else by_type,
        config=MuonConfig(
            ns_guard_every=0,
            bfloat16_params="master" if options.master else "nearest",
            bucket_bytes=MuonConfig().bucket_bytes // narrower**2,
        ),
    )
    held = torch.cuda.memory_allocated() if IS_CUDA else 0
    host, device = [], []
    for number in range(4 + num_steps):
        launches.renew_gradients(module)
        synchronize()
        if IS_CUDA:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        start = time.perf_counter()
        launches.step(optimizer)
        host.append(1e3 * (time.perf_counter() - start))
        if IS_CUDA:
            torch.cuda.set_sync_debug_mode("default")
        synchronize()
        device.append(1e3 * (time.perf_counter() - start))
    figures: dict[str, Any] = {
        "ms of the host, median": round(statistics.median(host[4:]), 3),
        "ms until the device is done, median": round(statistics.median(device[4:]), 3),
        "ms of the first step": round(device[0], 1),
    }
    if IS_CUDA:
        peak = torch.cuda.max_memory_allocated() - held
        figures["MiB held between steps"] = (torch.cuda.memory_allocated() - held) >> 20
        figures["MiB in a step, at most"] = peak >> 20
        with torch.profiler.profile() as profile:
            launches.step(optimizer)
            synchronize()
        kernels = [e for e in profile.events() if str(e.device_type).endswith("CUDA")]
        figures["kernels of a step"] = len(kernels)
        figures["ms of kernels"] = round(sum(e.self_device_time_total for e in kernels) / 1e3, 3)
    return figures


def observation(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds that an owner takes to measure a matrix, of good and of bad condition."""
    table = coefficient_table([schedule_for(1e-3, 5)])
    figures = {}
    shapes = [(1024, 2048), (2048, 2048), (2048, 6144), (4096, 12288)] if IS_CUDA else [(96, 192)]
    for m, n in shapes:
        x = torch.randn(m, n, device=DEVICE)
        graded = x * torch.logspace(0, -9, m, device=DEVICE).unsqueeze(1)
        calls: dict[str, Callable[[], object]] = {
            "spectrum": lambda x=x: measure_spectrum(x, table, 1.01, exact_norm=True),
            "spectrum, condition 1e9": lambda x=graded: measure_spectrum(
                x, table, 1.01, exact_norm=True
            ),
            "residual": lambda x=x: ns_residual(x),
        }
        for name, call in calls.items():
            call()
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            figures[f"s, {name} of {m} x {n}"] = round(time.perf_counter() - start, 4)
    return figures


def shared_doctor() -> int:
    """The doctor on ranks that share one GPU, over gloo: NCCL refuses that.

    It checks streams, kernels, buffers and layouts on a real device, and not NCCL.
    """
    from amo_dist.__main__ import main as amo

    start = dist.init_process_group

    def over_gloo(backend: str, **arguments: Any) -> None:
        start("cuda:gloo" if backend == "nccl" else backend, **arguments)

    with (
        mock.patch.dict("os.environ", {"LOCAL_RANK": "0"}),
        mock.patch.object(dist, "init_process_group", over_gloo),
    ):
        return amo(["doctor", "--seconds", "45"])


if __name__ == "__main__":
    raise SystemExit(main())
