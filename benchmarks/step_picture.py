"""Draw the picture of the README: what one optimizer step takes and sends, beside other Muons.

``python -m benchmarks.step_picture`` reads the times of `benchmarks.optimizer_step`. The bytes of
Qwen3-1.7B follow from plans, and those of the others from the formulas of ``docs/compare.md``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.shapes import MODELS, matrices
from benchmarks.step_cost import StepCost, lay_out

RESULTS = Path(__file__).with_name("results") / "optimizer_step.json"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "step.png"
RANKS = (8, 16, 32, 64, 128, 256)
PEERS = {"torch Muon": "torch.optim.Muon", "dion Muon": "Dion's Muon"}


def times(path: Path = RESULTS) -> list[tuple[str, float]]:
    """What was compared, and our time over the peer's, of locked steps in bfloat16."""
    rows = json.loads(path.read_text())["rows"]
    return [
        (f"{PEERS[row['peer']]}, {row['model']}, ranks: {row['ranks']}", row["ratio"])
        for row in rows
        if row["ours"] == "ours locked" and row["ns_dtype"] == "bfloat16"
    ]


def megabytes() -> dict[str, list[float]]:
    """Megabytes that a rank sends in a step of Qwen3-1.7B under FSDP2, for each number of ranks."""
    registry = matrices(MODELS["Qwen3-1.7B"])
    entries = sum(m.shape[0] * m.shape[1] for m in registry)
    steps = dict.fromkeys({matrix.operator_type for matrix in registry}, 5)
    ours = [StepCost(registry, lay_out(registry, n), steps, n).sent for n in RANKS]
    others = {
        "DistMuon, float32": [8 * entries * (n - 1) / n**2 for n in RANKS],
        "Megatron, in place of FSDP's gather": [2 * entries * (n - 1) / n for n in RANKS],
        "DeepSpeed, ZeRO 3": [6 * entries * (n - 1) / n for n in RANKS],
    }
    return {name: [x / 1e6 for x in sent] for name, sent in {"ours": ours, **others}.items()}


def draw(path: Path = PICTURE) -> None:
    """Write the picture."""
    import matplotlib.pyplot as plt

    plt.rcParams["font.size"] = 8
    figure: Any
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    names, ratios = zip(*sorted(times(), key=lambda pair: -pair[1]), strict=True)
    left.barh(names, ratios)
    left.axvline(1.0, color="black", linewidth=1)
    left.set(
        title="measured: our time of a step over that of", xlabel="CPU, locked schedules, bfloat16"
    )
    for name, sent in megabytes().items():
        right.loglog(RANKS, sent, label=name, linewidth=2 if name == "ours" else 1)
    right.set(title="computed: MB sent by a rank, Qwen3-1.7B", xlabel="ranks")
    right.set_xticks(RANKS, [str(n) for n in RANKS], minor=False)
    right.minorticks_off()
    right.set_ylim(10, 3e5)  # room for the legend above the lines
    right.legend(loc="upper left", fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw()
