"""Make the checkpoints that every later version must load, and what this version did after them.

Run it with the package of a version to add that version's folder, from the root of the repository::

    PYTHONPATH=/path/to/that/version python tests/checkpoints/make.py tests/checkpoints/0.2.0

It uses the public interface alone. For each case ``CASE.pt`` holds the state at ``saved_at`` steps
and the parameters ``STEPS_AFTER`` steps later; ``CASE.json`` the control state and, for each of
those steps, the phase and the schedules (null: as in the step before). Gradients are a function of
the step and the name.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amo_dist import AMO, AMOConfig, Muon, MuonConfig, make_optimizer, param_groups

SHAPES: dict[str, tuple[int, ...]] = {
    "layers.0.attention.wq.weight": (8, 8),
    "layers.1.attention.wq.weight": (8, 8),
    "layers.0.attention.wo.weight": (8, 12),
    "layers.0.feed_forward.w2.weight": (16, 24),
    "norm.weight": (8,),
}
FIELDS: dict[str, Any] = {
    "observe_until": 4,
    "observe_every": 2,
    "sample_size": 2,
    "transition_steps": 3,
    "ns_dtype": "float32",
}
AGAIN = {**FIELDS, "replan_every": 6}
"""Plans at steps 4, 10 and 16; the second locks at 13, the third at 19."""
BY_DEPTH = {**FIELDS, "granularity": "layer_group", "budget_ratio": 0.9}
MEASURED = {**FIELDS, "planner": "measured"}
STEPS_AFTER = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer by name, its settings, and after how many steps it is saved."""

    optimizer: str
    saved_at: int
    fields: Mapping[str, Any]


CASES = {
    "observation": Case("AMO", 3, FIELDS),
    "plan": Case("AMO", 4, FIELDS),
    "transition": Case("AMO", 5, FIELDS),
    "locked": Case("AMO", 8, FIELDS),
    "second_transition": Case("AMO", 11, AGAIN),
    "third_plan_pending": Case("AMO", 15, AGAIN),
    # In version 0.1.0 with types that had given up the plan.
    "fallback": Case("AMO", 6, {**FIELDS, "ns_guard_every": 1}),
    "observe_only": Case("AMO", 6, {**FIELDS, "observe_only": True}),
    # In version 0.1.0 within a budget of flops.
    "by_depth_and_flops": Case("AMO", 5, BY_DEPTH),
    "measured_observation": Case("AMO", 3, MEASURED),
    "measured_transition": Case("AMO", 5, MEASURED),
    "measured_again": Case("AMO", 15, {**AGAIN, **MEASURED}),
    "kj": Case("Muon-KJ", 2, {"ns_dtype": "float32"}),
    "table": Case("a2", 2, {"ns_dtype": "float32"}),
    "root": Case("ROOT", 2, {"ns_dtype": "float32"}),
    "adamuon": Case("AdaMuon", 2, {"ns_dtype": "float32"}),
}


def make(case: Case) -> tuple[nn.Module, Muon]:
    """A model and its optimizer, before the first step."""
    model = nn.Module()
    for name, shape in SHAPES.items():
        *parents, last = name.split(".")
        module = model
        for part in parents:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(numbers(f"initial {name}", shape) / 8))
    groups = param_groups(model)
    if case.optimizer == "AMO":
        # The first version planned by projected errors alone.
        return model, AMO(groups, lr=1e-2, config=AMOConfig.paper(**case.fields))
    settings = MuonConfig(**case.fields)
    if case.optimizer == "a2":
        return model, Muon(groups, lr=1e-2, schedule="a2", config=settings)
    optimizer = make_optimizer(case.optimizer, groups, lr=1e-2, config=settings)
    assert isinstance(optimizer, Muon)
    return model, optimizer


def numbers(key: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [-1, 1], the same on every machine."""
    size = int(torch.Size(shape).numel())
    words = [zlib.crc32(f"{key} {i}".encode()) for i in range(size)]
    return torch.tensor([word % 2047 / 1023 - 1 for word in words]).reshape(shape)


def train(model: nn.Module, optimizer: Muon, last: int) -> list[dict[str, Any]]:
    """Train up to a step; of each step the phase, new schedules, and what is known after it."""
    done: list[dict[str, Any]] = []
    last_schedules: object = None
    for step in range(optimizer.num_steps_taken + 1, last + 1):
        for name, param in model.named_parameters():
            # Rows fade, by name and unlike in later steps, and gradients grow: plans differ.
            fade = 1 + 3 * (zlib.crc32(f"{name} {step // 6}".encode()) % 3)
            scale = torch.tensor([4.0**step / 2 ** (i * fade // 4) for i in range(len(param))])
            rows = [-1, *[1] * (param.dim() - 1)]
            param.grad = numbers(f"{step} {name}", tuple(param.shape)) * scale.reshape(rows)
        optimizer.step()
        found = optimizer.schedules_by_group(step)
        schedules = {name: dataclasses.asdict(schedule) for name, schedule in found.items()}
        policy = optimizer.control_state_dict()["policy"]
        done.append(
            {
                "step": step,
                "phase": optimizer.phase,
                "schedules": None if schedules == last_schedules else schedules,
                "num_observations": len(policy.get("observations", ()))
                + len(policy.get("observations_since_plan", ())),
                "allocation": (policy.get("plan") or {}).get("allocation"),
            }
        )
        last_schedules = schedules
    return done


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def write(folder: Path) -> None:
    """Write all cases to a folder; a version without a setting has not those that need it."""
    known = {field.name for field in dataclasses.fields(AMOConfig)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        if not case.fields.keys() <= known:
            continue
        model, optimizer = make(case)
        train(model, optimizer, case.saved_at)
        saved = {
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "model": parameters(model),
        }
        control = copy.deepcopy(optimizer.control_state_dict())
        then = train(model, optimizer, case.saved_at + STEPS_AFTER)
        torch.save({**saved, "model_after": parameters(model)}, folder / f"{name}.pt")
        text = json.dumps({"control": control, "then": then}, separators=(",", ":"))
        (folder / f"{name}.json").write_text(text + "\n")


def main() -> None:
    """Write all cases to the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
