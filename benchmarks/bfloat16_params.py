"""What each way to write bfloat16 parameters costs in loss: ``config.bfloat16_params``.

``python -m benchmarks.bfloat16_params``. Trains a small llama on the bytes of Python's standard
library, forward and backward in bfloat16, once with each way, on the same data. ``master`` is
mixed precision as usual: its weights are those of float32 parameters that are cast for the model.
The others are compared with it: loss on held-out bytes, distance of the parameters from it over
the distance that training moved it, and which share of entries the last step left as they were.
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from amo_dist import Muon, MuonConfig, param_groups
from benchmarks.measure import report

WAYS = ("master", "nearest")
DIM, HIDDEN, HEADS, LAYERS, LENGTH, BATCH = 128, 352, 4, 2, 64, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.wq, self.wk, self.wv)
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        out: Tensor = self.wo(attended.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.positions = nn.Embedding(256, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False)
        for name, param in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.output(self.norm(x))
        return out


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bfloat16_params")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(args)
    data = read_bytes()
    rows = [row for seed in options.seeds for row in compare(data, seed, options.steps, options.lr)]
    settings = {"steps": options.steps, "lr": options.lr}
    report("bfloat16_params", rows, options.output, settings)
    return 0


def read_bytes() -> Tensor:
    """The library's modules, one after the other; the last tenth is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def compare(data: Tensor, seed: int, steps: int, lr: float) -> list[dict[str, Any]]:
    """Compare all ways on one seed; one row per way."""
    torch.manual_seed(seed)
    start, rows, master = Model().bfloat16(), list[dict[str, Any]](), dict[str, Tensor]()
    initial = weights(start)
    for way in WAYS:
        began, model = time.perf_counter(), copy.deepcopy(start)
        unmoved = train(model, data, way, seed, steps, lr)
        trained = weights(model)
        master = master or trained
        rows.append(
            {
                "seed": seed,
                "way": way,
                "loss": round(held_out_loss(model, data), 4),
                "drift": round(distance(trained, master) / distance(master, initial), 4),
                "unmoved matrices": round(unmoved[0], 4),
                "unmoved rest": round(unmoved[1], 4),
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
    return rows


def train(
    model: nn.Module, data: Tensor, way: str, seed: int, steps: int, lr: float
) -> tuple[float, float]:
    """Train; returns the shares of entries unmoved by the last step, in matrices and in others."""
    config = MuonConfig(bfloat16_params=way, seed=seed)
    optimizer = Muon(param_groups(model), lr=lr, schedule="pe", config=config)
    draw = torch.Generator().manual_seed(seed)
    before = weights(model)
    for step in range(1, steps + 1):
        factor = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = lr * factor * min(step / 20, 1)
        tokens = batch(data[: len(data) * 9 // 10], draw)
        loss_of(model, tokens).backward()
        before = weights(model) if step == steps else before
        optimizer.step()
        optimizer.zero_grad()
    same = {name: (value == before[name]).flatten() for name, value in weights(model).items()}
    matrices, others = (
        [bits for name, bits in same.items() if ("layers" in name and "norm" not in name) == which]
        for which in (True, False)
    )
    return share(matrices), share(others)


def share(flags: list[Tensor]) -> float:
    return torch.cat(flags).double().mean().item()


def batch(data: Tensor, draw: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=draw)
    return torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()]).long()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Tensor) -> float:
    draw = torch.Generator().manual_seed(1)
    held_out = data[len(data) * 9 // 10 :]
    losses = [loss_of(model, batch(held_out, draw)).item() for _ in range(20)]
    return sum(losses) / len(losses)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return math.sqrt(
        sum((left[n].double() - right[n].double()).square().sum().item() for n in left)
    )


if __name__ == "__main__":
    raise SystemExit(main())
