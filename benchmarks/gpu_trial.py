"""The first nine minutes on one GPU: what only a device can show of the optimizer.

``launch/gpu_trial.sh FOLDER`` runs every part in a process of its own, with a time limit, and
writes ``trial.json`` and the page ``trial.md`` into the folder after each. Needs PyTorch alone.
Without a GPU the parts run small on the CPU, which tests them and says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from amo_dist import AMOConfig, Muon, MuonConfig, make_optimizer, param_groups
from amo_dist.engine.ballot import fetch
from amo_dist.engine.observe import coefficient_table, measure_spectrum
from amo_dist.kernels.spectrum import ns_residual
from amo_dist.schedule.polar_express import schedule_for
from benchmarks import launches
from benchmarks.measure import machine, synchronize
from benchmarks.shapes import MODELS, shapes_by_name
from tests.distributed import models
from torchtitan_ext.signals import end_with_parent

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
WARMUP = 4
OWN_PARTS = ("equality", "step", "training", "peers", "collectives", "observation")
"""Parts that are functions of this file."""
NOT_RUN = {"status": None, "seconds": 0, "tail": "", "figures": {}}


def parts(folder: Path, dion: Path | None = None) -> dict[str, tuple[int, list[str]]]:
    """Time limit in seconds and command of each part, by name; what tells most comes first."""
    here, module = [sys.executable, "-m", "benchmarks.gpu_trial"], [sys.executable, "-m"]
    shared = ["--standalone", "--nproc-per-node", "4", "-m", "benchmarks.gpu_trial", "shared"]
    kernels = ["--rounds", "5", "--dtypes", "bfloat16", "--output", str(folder / "kernels.json")]
    kernels += ["--shapes", *(["1024x2048", "2048x2048", "2048x6144"] if IS_CUDA else ["64x64"])]
    step = [*here, "step", "--schedule"]
    return {
        "equality": (90, [*here, "equality"]),
        "step, seven schedules": (50, [*step, "types"]),
        "training under FSDP2": (80, [*here, "training"]),
        "peers": (80, [*here, "peers", *(["--dion", str(dion)] if dion else [])]),
        "collectives": (40, [*here, "collectives"]),
        "step, master weights": (40, [*step, "types", "--master"]),
        "step, NorMuon": (40, [*step, "kj", "--optimizer", "NorMuon"]),
        "observation": (40, [*here, "observation"]),
        "doctor, four ranks of one GPU": (60, [*module, "torch.distributed.run", *shared]),
        "kernels": (40, [*module, "benchmarks.newton_schulz", *kernels]),
        "tests": (50, [*module, "pytest", "-q", "-m", "cuda", "tests/unit"]),
    }


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_trial", description=__doc__)
    parser.add_argument("part", choices=("all", *OWN_PARTS, "shared"))
    parser.add_argument("--folder", type=Path, default=Path("gpu_trial"))
    parser.add_argument("--only", nargs="+", choices=parts(Path()), metavar="PART")
    parser.add_argument("--seconds", type=float, default=540, help="of all parts together")
    parser.add_argument("--dion", type=Path, help="checkout of microsoft/dion, a peer")
    parser.add_argument("--schedule", choices=("types", "kj"), default="types")
    parser.add_argument("--optimizer", choices=("Muon", "NorMuon", "AdaMuon"), default="Muon")
    parser.add_argument("--master", action="store_true", help="bfloat16 with master weights")
    options = parser.parse_args(args)
    if options.part == "all":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        commands = parts(options.folder, options.dion)
        chosen = {name: commands[name] for name in options.only or commands}
        return run_all(options.folder, chosen, options.seconds)
    end_with_parent(os.getppid())  # where the trial was killed, nothing keeps the GPU
    if options.part == "shared":
        return shared_doctor()
    run: Callable[[argparse.Namespace], dict[str, Any]] = globals()[options.part]
    print(json.dumps(run(options)), flush=True)
    return 0


def run_all(folder: Path, commands: dict[str, tuple[int, list[str]]], seconds: float) -> int:
    """Run the parts one after the other; 1 if one has failed, or was not run.

    Args:
        folder: Where the page is written, after each part: a machine may be taken away.
        commands: Time limit and command by name of the part.
        seconds: For all of them; a part that is left no time is not run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    results: dict[str, dict[str, Any]] = {name: dict(NOT_RUN) for name in commands}
    for name, (most, command) in commands.items():
        limit = min(most, end - time.monotonic() - KILL_SECONDS)
        print(f"== {name} (at most {limit:.0f} s)", flush=True)
        try:
            if limit > 0:
                results[name]["tail"] = "stopped"
                results[name] = run_part(command, limit)
        finally:  # after a stop, too
            print(results[name]["tail"], flush=True)
            write(folder, results)
    print(f"\n{(folder / 'trial.md').read_text()}\nwritten to {folder}")
    return int(any(result["status"] != 0 for result in results.values()))


def write(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    content = {"machine": machine(), "parts": results}
    (folder / "trial.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "trial.md").write_text("\n".join(page_of(results)) + "\n")


KILL_SECONDS = 8
"""What a part that is asked to end has before it is killed."""


def run_part(command: Sequence[str], limit: float) -> dict[str, Any]:
    """Status, seconds, the end of what a command printed, and its figures, if it prints any."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        part = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = part.wait(limit)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            part.terminate()  # torchrun then ends its ranks, which have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                part.wait(KILL_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGKILL)
            part.wait()
        output.seek(0)
        lines = output.read().strip().splitlines()
    # Warnings may follow the figures, and a part may hang after them.
    figures = [line for line in lines if line.startswith("{")]
    return {
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "tail": "\n".join(lines[-12:]),
        "figures": json.loads(figures[-1]) if figures else {},
    }


def page_of(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The page: the verdict on each part, with the last line of one that failed; the figures."""
    facts = machine()
    yield f"# Trial on {facts['cuda'] or 'a CPU, which says nothing about GPUs'}"
    yield f"\nPyTorch {facts['torch']}, {time.strftime('%Y-%m-%d')}\n"
    yield "| part | verdict | seconds | last line |\n|---|---|---|---|"
    verdicts = {None: "not run", 0: "passed", 5: "no such test", 124: "took too long"}
    for name, result in results.items():
        verdict = verdicts.get(result["status"], "FAILED")
        cause = "" if verdict == "passed" else result["tail"].rpartition("\n")[2][:120]
        yield f"| {name} | {verdict} | {result['seconds']} | {cause.replace('|', ' ')} |"
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
    with never_waits():
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        read = fetch(votes)
    assert read() == [1] * 9
    dist.destroy_process_group()
    return {"backend": backend, "sizes of all-to-alls": str(sizes)}


def step(options: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of a locked step of one of 32 ranks; collectives move nothing."""
    narrower, num_steps = (1, 50) if IS_CUDA else (launches.NARROWER, 2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=launches.RANKS)
    mesh = init_device_mesh(DEVICE.type, (launches.RANKS,))
    dtype = torch.bfloat16 if options.master else torch.float32
    module = launches.make_module(mesh, dtype, narrower)
    config = MuonConfig(
        ns_guard_every=0,
        bfloat16_params="master" if options.master else "nearest",
        bucket_bytes=MuonConfig().bucket_bytes // narrower**2,
    )
    groups = param_groups(module)
    optimizer: Any
    if options.schedule == "types":
        optimizer = Muon(groups, lr=1e-3, schedule=locked_plan(), config=config)
    else:
        optimizer = make_optimizer(options.optimizer, groups, lr=1e-3, config=config)

    def once() -> None:
        launches.renew_gradients(module)
        launches.step(optimizer)

    held = allocated()
    first = timed(once)[1]
    once()
    times = [timed(once, never_waits) for _ in range(WARMUP + num_steps)][WARMUP:]
    host, device = zip(*times, strict=True)
    figures: dict[str, Any] = {
        "ms of the host, median": round(statistics.median(host), 3),
        "ms until the device is done, median": round(statistics.median(device), 3),
        "ms of the first step": round(first, 1),
    }
    if IS_CUDA:
        figures["MiB held between steps"] = (allocated() - held) >> 20
        figures["MiB in a step, at most"] = (peak_of(once) - held) >> 20
        figures |= kernels_of(once)
    dist.destroy_process_group()
    return figures


def locked_plan() -> dict[str, Any]:
    return {kind: schedule_for(1e-3, count) for kind, count in STEPS_BY_TYPE.items()}


def timed(run: Callable[[], object], under: Any = contextlib.nullcontext) -> tuple[float, float]:
    """Milliseconds until a call returns, and until the device is done."""
    synchronize()
    start = time.perf_counter()
    with under():
        run()
    host = 1e3 * (time.perf_counter() - start)
    synchronize()
    return host, 1e3 * (time.perf_counter() - start)


@contextlib.contextmanager
def never_waits() -> Iterator[None]:
    """An error where the host waits for the device inside."""
    if not IS_CUDA:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def allocated() -> int:
    return torch.cuda.memory_allocated() if IS_CUDA else 0


def peak_of(run: Callable[[], object]) -> int:
    """Bytes allocated at most while a call runs; 0 on CPU."""
    if IS_CUDA:
        torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() if IS_CUDA else 0


def kernels_of(run: Callable[[], object], most: int = 12) -> dict[str, Any]:
    """Kernels of a call: their number, milliseconds, and those that take longest."""
    with torch.profiler.profile() as profile:
        run()
        synchronize()
    times, counts = Counter[str](), Counter[str]()
    for event in profile.events():
        # A `record_function` has a span on the device, too, over the kernels inside of it.
        if str(event.device_type).endswith("CUDA") and not event.is_user_annotation:
            times[event.name[:60]] += event.self_device_time_total
            counts[event.name[:60]] += 1
    figures = {"kernels": counts.total(), "ms of kernels": round(times.total() / 1e3, 3)}
    longest = times.most_common(most)
    return figures | {f"ms of {counts[k]} x {k}": round(us / 1e3, 3) for k, us in longest}


# Of the distance that a parameter moved: float32 products are summed in another order.
CLOSE = 5e-3


def equality(options: argparse.Namespace) -> dict[str, Any]:
    """Whole runs on the device beside the same runs on the CPU, in float32."""
    figures = {}
    for name in ("AMO", "Muon", "NorMuon", "AdaMuon"):
        (start, end, plan), (_, other, other_plan) = (run_on(d, name) for d in ("cpu", DEVICE.type))
        plans = [own and own.allocation for own in (plan, other_plan)]
        assert plans[0] == plans[1], (name, plans)
        moved = {key: (end[key] - start[key]).norm() for key in end}
        worst = max(float((other[key] - end[key]).norm() / moved[key]) for key in end)
        figures[f"{name}: greatest difference from the CPU, of the distance moved"] = worst
        assert worst < CLOSE, figures
    return figures


def run_on(device: str, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Parameters before and after ten steps of an optimizer, and its plan, if it makes one."""
    shapes = models.shapes()
    module = models.plain_model(shapes, device)

    def whole() -> dict[str, Tensor]:
        return {key: p.detach().cpu().clone() for key, p in module.named_parameters()}

    config = MuonConfig(ns_dtype="float32")
    if name == "AMO":
        fields = {"observe_until": 4, "observe_every": 2, "transition_steps": 3}
        config = AMOConfig(ns_dtype="float32", **fields)  # type: ignore[arg-type]
    optimizer: Any = make_optimizer(name, param_groups(module), lr=3e-3, config=config)
    start = whole()
    for number in range(10):
        for key, parameter in module.named_parameters():
            parameter.grad = models.gradient(0, number, key, shapes[key]).to(device)
        optimizer.step()
    return start, whole(), getattr(optimizer, "plan", None)


def peers(options: argparse.Namespace) -> dict[str, Any]:
    """A step on all matrices of Qwen3-1.7B, on one GPU: ours, PyTorch's Muon, fused AdamW, Dion."""
    model, rounds = ("Qwen3-1.7B", 10) if IS_CUDA else ("small", 2)
    shapes = shapes_by_name(MODELS[model])
    module = models.build({key: 0.02 * torch.randn(s).to(DEVICE) for key, s in shapes.items()})
    parameters = [*module.parameters()]
    for parameter in parameters:
        parameter.grad = (1e-3 * torch.randn(parameter.shape)).to(DEVICE)
    config = MuonConfig(ns_guard_every=0, ns_dtype="bfloat16")

    def ours(schedule: Any) -> Any:
        return Muon(param_groups(module), lr=1e-3, schedule=schedule, config=config)

    contenders: dict[str, Callable[[], Any]] = {
        "ours, a locked plan": lambda: ours(locked_plan()),
        "ours, kj": lambda: ours("kj"),
        "torch.optim.Muon": lambda: torch.optim.Muon(parameters, lr=1e-3),
        "torch.optim.AdamW, fused": lambda: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    }
    if options.dion:
        sys.path.insert(0, str(options.dion))
        import dion

        contenders["Dion's Muon"] = lambda: dion.Muon(parameters, lr=1e-3)
    figures = {}
    for name, make in contenders.items():
        held, optimizer = allocated(), make()
        for _ in range(3):
            optimizer.step()
        state = allocated() - held
        beside = peak_of(optimizer.step) - held - state
        times = [timed(optimizer.step)[1] for _ in range(rounds)]
        figures[f"{name}: ms"] = round(statistics.median(times), 2)
        figures[f"{name}: MiB of state, in a step"] = f"{state >> 20}, {max(beside, 0) >> 20}"
        print(json.dumps(figures), flush=True)  # the next one may not end in time
        del optimizer
    return figures


class Decoder(nn.Module):
    """A causal decoder of bytes, under names that `param_groups` knows."""

    def __init__(self, dim: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(256, dim)
        options: dict[str, Any] = {"batch_first": True, "norm_first": True, "bias": False}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, 0.0, "gelu", **options)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.output(self.norm(x))
        return logits


def training(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second under FSDP2 in a world of one rank: AdamW beside ours."""
    backend = "nccl" if IS_CUDA else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    sizes, batch, length, num_steps = (
        ((1024, 24, 16), 16, 1024, 30) if IS_CUDA else ((48, 2, 4), 4, 32, 8)
    )
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text[: 2**22]), dtype=torch.uint8).long()
    mask = nn.Transformer.generate_square_subsequent_mask(length).to(DEVICE)
    figures: dict[str, Any] = {}
    config = MuonConfig(ns_guard_every=0)
    optimizers: dict[str, Callable[[nn.Module], Any]] = {
        "AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True),
        "Muon, a locked plan": lambda m: Muon(
            param_groups(m), lr=2e-3, schedule=locked_plan(), config=config
        ),
        "NorMuon": lambda m: make_optimizer("NorMuon", param_groups(m), lr=2e-3, config=config),
    }
    for name, make in optimizers.items():
        torch.manual_seed(0)
        mesh = init_device_mesh(DEVICE.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if IS_CUDA else None)
        model = models.shard(Decoder(*sizes).to(DEVICE), mesh, mp_policy=policy)
        optimizer, losses = make(model), []
        for number in range(num_steps):
            if number == WARMUP:
                synchronize()
                start = time.perf_counter()
            places = torch.arange(batch) * 997 + number * batch * length
            rows = data[(places[:, None] + torch.arange(length + 1)) % len(data)].to(DEVICE)
            logits = model(rows[:, :-1], mask)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            loss.backward()
            with never_waits() if number >= WARMUP else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        synchronize()
        tokens = (num_steps - WARMUP) * batch * length
        figures[f"{name}: tokens a second"] = round(tokens / (time.perf_counter() - start))
        first, last = losses[0].item(), losses[-1].item()
        figures[f"{name}: loss, first and last"] = f"{first:.3f}, {last:.3f}"
        if IS_CUDA:
            figures[f"{name}: MiB at most"] = torch.cuda.max_memory_allocated() >> 20
            torch.cuda.reset_peak_memory_stats()
        print(json.dumps(figures), flush=True)
        assert last < first, figures
        del model, optimizer, logits, loss
    dist.destroy_process_group()
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

    def over_gloo(backend: str | None, **arguments: Any) -> None:
        start(backend or "gloo", **arguments)  # for tensors of the CPU and of the GPU

    with (
        mock.patch.dict("os.environ", {"LOCAL_RANK": "0"}),
        mock.patch.object(dist, "init_process_group", over_gloo),
    ):
        return amo(["doctor", "--seconds", "45"])


if __name__ == "__main__":
    raise SystemExit(main())
