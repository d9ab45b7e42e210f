"""Trains small models and prints hashes of what came out: same hashes, same bits.

``python -m tests.bits``; ``--json FILE`` writes the hashes, ``--against FILE`` compares with those
of an earlier run and exits with 1 where one differs. A refactoring shows with it that it changed no
bit: run this very file with the code before and the code after on ``PYTHONPATH``, on one machine.
It uses only what ``amo_dist`` exports, and nothing of ``tests``.

Each run has three SHA-256:

- ``parameters``: of the whole parameters by name, with dtype, shape and bytes.
- ``state``: likewise of the tensors in ``optimizer.state_dict()``, by place of the parameter.
- ``control``: of what `CONTROL_FIELDS` names in ``optimizer.control_state_dict()``, by value,
  wherever it stands there. Other fields may come and go.

Gradients are a function of (seed, step, name), so that no model is evaluated and no loss reduced.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import json
import logging
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import amo_dist
from amo_dist import AMO, ROOT, AdaMuon, AMOConfig, Fused, Muon, MuonConfig, param_groups

NUM_RANKS = 3
NUM_STEPS = 12
CONTROL_FIELDS = {
    "steps_taken": (),
    "steps_skipped": (),
    "observations": ("step", "ell", "num_sampled", "num_invalid"),
    "plan": (
        *("operator_types", "allocation", "base_steps", "base_ell", "planner", "budget"),
        *("min_steps", "max_steps", "costs", "curves"),
    ),
    "fits": ("triple", "objective", "calibration"),
}
"""What is hashed of the control state, and of records below it; no names: all that is there."""


def shapes(table: str) -> dict[str, tuple[int, ...]]:
    """``name rows columns``, between commas."""
    entries = [entry.split() for entry in table.split(",")]
    return {name: tuple(map(int, sizes)) for name, *sizes in entries}


# Grouped-query attention; tall, wide and square; rows that 3 ranks do not divide, fewer rows than
# ranks, one row, and one shape in both layers, so that batches have more than one matrix.
LLAMA = shapes("""
    tok_embeddings.weight 50 32, layers.0.attention_norm.weight 32,
    layers.0.attention.wq.weight 48 32, layers.0.attention.wk.weight 16 32,
    layers.0.attention.wv.weight 16 32, layers.0.attention.wo.weight 32 48,
    layers.0.feed_forward.w1.weight 88 32, layers.0.feed_forward.w2.weight 32 88,
    layers.0.feed_forward.w3.weight 88 32, layers.1.attention_norm.weight 31,
    layers.1.attention.wq.weight 31 31, layers.1.attention.wk.weight 2 31,
    layers.1.attention.wv.weight 1 31, layers.1.attention.wo.weight 31 31,
    layers.1.feed_forward.w1.weight 88 32, layers.1.feed_forward.w2.weight 32 88,
    layers.1.feed_forward.w3.weight 67 31, norm.weight 2, output.weight 50 32
""")
GPT = shapes("""
    wte.weight 40 24, wpe.weight 16 24, h.0.ln_1.weight 24, h.0.attn.c_attn.weight 72 24,
    h.0.attn.c_attn.bias 72, h.0.attn.c_proj.weight 24 24, h.0.mlp.c_fc.weight 96 24,
    h.0.mlp.c_proj.weight 24 96, h.1.attn.c_attn.weight 24 80, h.1.attn.c_proj.weight 24 48,
    h.1.moe.experts.w1 4 20 24, h.1.moe.experts.w2 4 24 20, ln_f.weight 24
""")
# Large enough for the Gram form.
WIDE = shapes("""
    layers.0.attention.wq.weight 512 512, layers.0.attention.wk.weight 128 512,
    layers.0.attention.wv.weight 128 512, layers.0.attention.wo.weight 512 512,
    layers.0.feed_forward.w1.weight 1536 512, layers.0.feed_forward.w2.weight 512 1536,
    layers.0.feed_forward.w3.weight 1536 512
""")
GROUPED_QUERY = Fused(
    (("attn_q", 48), ("attn_k", 16), ("attn_v", 16)), dim=1, groups=2, heads={"attn_q": 4}
)
PATTERNS: dict[str, dict[str, str | Fused | None]] = {
    "llama": {},
    "gpt": {r"h\.1\.attn\.c_attn\.weight": GROUPED_QUERY},
    "wide": {},
}
SHAPES = {"llama": LLAMA, "gpt": GPT, "wide": WIDE}

AMO_FIELDS = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 1,
    "transition_steps": 4,
    "ns_guard_every": 3,
    "bucket_bytes": 8192,
}
"""Two observations, a plan at step 4, the lock at step 8, four locked steps after it."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        model: ``llama``, ``gpt`` or ``wide``.
        optimizer: ``kj``, another schedule's name for `Muon`, ``amo``, ``adamuon`` or ``root``.
        layout: ``one`` process, or ``NUM_RANKS`` as ``fsdp`` or ``ddp``.
        fields: Of the configuration.
        num_steps: Optimizer steps.
        param_dtype: Of the parameters.
        resumes_at: After this step a new optimizer goes on with the saved state; 0: never.
        nan_at: At this step one gradient holds a NaN; 0: never.
        missing_at: At this step one matrix has no gradient; 0: never.
    """

    model: str
    optimizer: str
    layout: str = "one"
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_steps: int = NUM_STEPS
    param_dtype: torch.dtype = torch.float32
    resumes_at: int = 0
    nan_at: int = 0
    missing_at: int = 0


def amo(model: str, layout: str = "one", **fields: Any) -> Run:
    of_run = {name: fields.pop(name) for name in tuple(fields) if name in Run.__annotations__}
    return Run(model, "amo", layout, {**AMO_FIELDS, **fields}, **of_run)


FP32 = {"ns_dtype": "float32"}
RUNS: dict[str, Run] = {
    "llama uniform bf16": Run("llama", "kj"),
    "llama uniform fp32": Run("llama", "kj", fields=FP32, missing_at=3),
    "llama paper bf16": amo("llama"),
    "llama paper bf16, resumed": amo("llama", resumes_at=6, param_dtype=torch.bfloat16),
    "llama paper fp32": amo("llama", sample_size=2, **FP32),
    "llama adamuon bf16": Run("llama", "adamuon", missing_at=3),
    "llama root fp32": Run("llama", "root", fields=FP32),
    "gpt uniform bf16": Run("gpt", "kj"),
    "gpt pe fp32, no Nesterov": Run("gpt", "pe", fields={**FP32, "nesterov": False}),
    "gpt paper bf16, a step skipped": amo("gpt", sample_size=3, nonfinite="skip_step", nan_at=5),
    "wide paper bf16": amo("wide"),
    "wide paper fp32": amo("wide", **FP32),
    "llama uniform bf16, fsdp": Run("llama", "kj", "fsdp", {"bucket_bytes": 8192}),
    "llama paper bf16, fsdp": amo("llama", "fsdp", missing_at=7),
    "llama paper fp32, fsdp, resumed": amo("llama", "fsdp", resumes_at=6, **FP32),
    "llama adamuon fp32, fsdp": Run("llama", "adamuon", "fsdp", FP32),
    "gpt paper fp32, fsdp": amo("gpt", "fsdp", ownership="balanced", **FP32),
    "gpt root bf16, fsdp": Run("gpt", "root", "fsdp"),
    "gpt paper bf16, ddp": amo("gpt", "ddp"),
    "llama adamuon bf16, ddp": Run("llama", "adamuon", "ddp"),
    "wide paper bf16, fsdp": amo("wide", "fsdp"),
    "llama measured bf16": amo("llama", planner="measured"),
    "llama measured bf16, fsdp": amo("llama", "fsdp", planner="measured", resumes_at=3),
    "llama measured fp32, fsdp": amo("llama", "fsdp", planner="measured", **FP32),
}


# ---------------------------------------------------------------- tensors


def generator(*key: object) -> torch.Generator:
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def gradient(seed: int, step: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Rows of unequal size, by name, so that ``ell`` differs between matrices."""
    grad = torch.randn(shape, generator=generator("gradient", seed, step, name))
    if len(shape) < 2:
        return grad
    decay = torch.rand((), generator=generator("decay", name), dtype=torch.float64).item()
    sizes = [(1 + row) ** (-3 * decay) for row in range(shape[-2])]
    return grad * torch.tensor(sizes).unsqueeze(-1)


def make_model(name: str, dtype: torch.dtype, layout: str) -> nn.Module:
    """A tree of modules whose parameters have the names and shapes of the model."""
    root = nn.Module()
    for dotted, shape in SHAPES[name].items():
        *path, leaf = dotted.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        value = torch.randn(shape, generator=generator("initial", dotted)) * 0.1
        module.register_parameter(leaf, nn.Parameter(value.to(dtype)))
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        blocks = root.get_submodule("h" if name == "gpt" else "layers")
        for block in blocks.children():
            fully_shard(block, mesh=mesh)
        fully_shard(root, mesh=mesh)
    return root


def placed(grad: Tensor, param: Tensor) -> Tensor:
    """A whole gradient as the parameter is placed: plain, or rows over one axis."""
    if not isinstance(param, DTensor):
        return grad
    chunks = grad.chunk(dist.get_world_size())
    rank = dist.get_rank()
    return DTensor.from_local(
        chunks[rank] if rank < len(chunks) else grad[:0],
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().contiguous()


# ---------------------------------------------------------------- hashes


def hash_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        value = whole(tensor)
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_of_control(control: Mapping[str, Any]) -> str:
    text = json.dumps(kept_control(control), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def kept_control(control: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the control state that are hashed, floats as their value's ``float.hex()``."""
    kept: dict[str, Any] = {}
    for field, value in control.items():
        if field in CONTROL_FIELDS:
            kept[field] = _by_value(_records(value, CONTROL_FIELDS[field]))
        elif isinstance(value, Mapping) and field != "config":
            kept |= kept_control(value)
    return kept


def _records(value: Any, names: Sequence[str]) -> Any:
    """``value`` with its records cut to ``names``: itself, those in a list or under other keys."""
    if not names or value is None:
        return value
    if isinstance(value, Mapping):
        if names[0] in value:
            return {name: value[name] for name in names}
        return {key: _records(one, names) for key, one in value.items()}
    return [_records(one, names) for one in value]


def _by_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _by_value(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_by_value(one) for one in value]
    if isinstance(value, str) and value.startswith(("0x", "-0x")):  # not a group "20x24"
        return float.fromhex(value).hex()
    return value.hex() if isinstance(value, float) else value


# ---------------------------------------------------------------- training


def make_optimizer(run: Run, model: nn.Module) -> Muon:
    groups = param_groups(
        model,
        patterns=PATTERNS[run.model],
        no_decay=[r".*(norm|ln_\w+)\.weight"] if run.model != "wide" else [],
        lr_multipliers={r".*(attention\.wo|attn\.c_proj)\.weight": 0.5},
    )
    ranks = {"process_group": dist.group.WORLD} if run.layout == "ddp" else {}
    if run.optimizer == "amo":
        kind = AMOConfig if "planner" in run.fields else AMOConfig.paper
        settings = kind(**{"ns_dtype": "bfloat16", **run.fields})
        return AMO(groups, 1e-2, 0.1, config=settings, **ranks)
    config = MuonConfig(**{"ns_dtype": "bfloat16", **run.fields})
    if run.optimizer in ("adamuon", "root"):
        kind = AdaMuon if run.optimizer == "adamuon" else ROOT
        return kind(groups, 1e-2, 0.1, config=config, **ranks)
    return Muon(groups, 1e-2, 0.1, schedule=run.optimizer, config=config, **ranks)


def set_gradients(run: Run, model: nn.Module, step: int) -> None:
    for name, param in model.named_parameters():
        grad = gradient(7, step, name, tuple(param.shape)).to(param.dtype)
        is_chosen = name.endswith(("0.attention.wq.weight", "0.mlp.c_fc.weight"))
        if step == run.nan_at and is_chosen:
            grad[0, 0] = torch.nan
        is_missing = step == run.missing_at and is_chosen
        param.grad = None if is_missing else placed(grad, param)


def hashes(run: Run) -> dict[str, str]:
    """Train one run; on every rank of its world."""
    model = make_model(run.model, run.param_dtype, run.layout)
    optimizer = make_optimizer(run, model)
    for step in range(1, run.num_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / step
        set_gradients(run, model, step)
        optimizer.step()
        if step == run.resumes_at:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make_optimizer(run, model)
            optimizer.load_state_dict(saved)
    control = optimizer.control_state_dict()
    if run.optimizer == "amo":
        assert kept_control(control)["plan"] is not None
    state = optimizer.state_dict()["state"]
    return {
        "parameters": hash_of_tensors(dict(model.named_parameters())),
        "state": hash_of_tensors(
            {
                f"{index} {field}": torch.as_tensor(tensors[field])
                for index, tensors in state.items()
                for field in sorted(tensors)
            }
        ),
        "control": hash_of_control(control),
    }


# ---------------------------------------------------------------- processes


def _rank(rank: int, folder: str, names: Sequence[str]) -> None:
    """The life of a rank: every run, and its hashes into a file of its own."""
    _prepare()
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    try:
        found = {name: timed(name) for name in names}
    finally:
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def on_ranks(names: Sequence[str]) -> dict[str, tuple[dict[str, str], float]]:
    """Runs on ``NUM_RANKS`` processes, all of which must end with the same hashes."""
    if not names:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, tuple(names)), nprocs=NUM_RANKS)
        found = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(NUM_RANKS)]
    for name in names:
        alike = {json.dumps(of_rank[name][0], sort_keys=True) for of_rank in found}
        if len(alike) != 1:
            raise AssertionError(f"{name}: ranks ended with different bits")
    return found[0]


def timed(name: str) -> tuple[dict[str, str], float]:
    start = time.perf_counter()
    return hashes(RUNS[name]), time.perf_counter() - start


def _prepare() -> None:
    torch.set_num_threads(1)
    logging.getLogger("amo_dist").setLevel(logging.ERROR)


def _show(name: str, found: Mapping[str, str], seconds: float) -> None:
    short = "  ".join(f"{field} {value}" for field, value in found.items())
    print(f"{name:40s} {short}  {seconds:4.1f} s", flush=True)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bits", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the hashes here")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with these hashes")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose name contains it")
    options = parser.parse_args(args)
    _prepare()
    names = [name for name in RUNS if options.only in name]
    print(f"{amo_dist.__file__}, torch {torch.__version__}, {platform.machine()}", flush=True)
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if RUNS[name].layout == "one":
            found[name], seconds = timed(name)
            _show(name, found[name], seconds)
    for name, (of_run, seconds) in on_ranks([n for n in names if n not in found]).items():
        found[name] = of_run
        _show(name, of_run, seconds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.against:
        return compare(json.loads(options.against.read_text()), found)
    return 0


def compare(before: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]]) -> int:
    """Print what differs; 1 where anything does."""
    differing = [
        f"{name}: {field} differs"
        for name in found
        for field in found[name]
        if found[name][field] != before.get(name, {}).get(field)
    ]
    print("\n".join(differing) or f"all {len(found)} runs have the same bits")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
