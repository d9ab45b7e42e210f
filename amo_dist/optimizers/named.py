"""Optimizers by name: all that the AMO paper compares, and NorMuon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amo_dist.config import AMOConfig, MuonConfig, fail, require
from amo_dist.distributed.ranks import GroupLike
from amo_dist.engine.hyperparameters import check_hyperparameters, check_keys
from amo_dist.optimizers.adamuon import AdaMuon
from amo_dist.optimizers.amo import AMO
from amo_dist.optimizers.muon import Muon
from amo_dist.optimizers.normuon import NorMuon
from amo_dist.optimizers.root import ROOT

# Fixed schedules by name, of the optimizers that differ in nothing else. The printed coefficients
# of ``Muon-CANS`` diverge in bfloat16, most often for matrices of few rows; here each step after
# the first divides its input by 1.02.
MUON_SCHEDULES: Mapping[str, str] = {
    "Muon": "kj",
    "Muon-KJ": "kj",
    "Muon-You": "you",
    "Muon-PE": "pe",
    "Muon-CANS": "cans",
    "Muon-Turbo": "turbo",
}

_CLASSES: dict[str, type[Muon]] = {"AdaMuon": AdaMuon, "NorMuon": NorMuon, "ROOT": ROOT, "AMO": AMO}

OPTIMIZER_NAMES: tuple[str, ...] = ("AdamW", *MUON_SCHEDULES, *_CLASSES)
"""Names of `make_optimizer`."""


def make_optimizer(
    name: str,
    params: Sequence[Mapping[str, Any]],
    lr: float | Tensor = 1e-3,
    weight_decay: float = 0.1,
    *,
    config: MuonConfig | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    process_group: GroupLike = None,
    allow_no_matrices: bool = False,
) -> torch.optim.Optimizer:
    """Build an optimizer by its name.

    PyTorch's ``AdamW`` has no ``muon_lr_factor``, so construction multiplies it into the learning
    rate of its group. A scheduler that multiplies the first rate of each group, such as
    ``LambdaLR``, keeps it; one that sets the same absolute rate for all groups overwrites it.

    Args:
        name: One of ``OPTIMIZER_NAMES``, in any case of letters. ``AdamW`` is PyTorch's, for
            matrices too.
        params: Groups from `amo_dist.param_groups`.
        lr: Learning rate of groups that do not name their own.
        weight_decay: Decoupled weight decay of such groups.
        config: An `AMOConfig` for ``AMO``, a `MuonConfig` for the rest of the family, None for
            ``AdamW``.
        betas: Betas of AdamW.
        eps: Epsilon of AdamW.
        process_group: Argument of `Muon`; ``AdamW`` ignores it.
        allow_no_matrices: Argument of `Muon`; ``AdamW`` ignores it.

    Raises:
        ValueError: The name is unknown, the configuration is that of another optimizer, or `Muon`
            refuses the arguments.
    """
    names = {known.casefold(): known for known in OPTIMIZER_NAMES}
    if str(name).casefold() not in names:
        fail("name", name, f"one of {', '.join(map(repr, OPTIMIZER_NAMES))}")
    name = names[name.casefold()]
    expected = {"AdamW": type(None), "AMO": AMOConfig}.get(name, MuonConfig)
    is_expected = config is None or type(config) is expected
    require(is_expected, "config", f"{type(config).__name__} for {name}", expected.__name__)
    options: dict[str, Any] = {"weight_decay": weight_decay, "betas": betas, "eps": eps}
    if name == "AdamW":
        return _adamw(params, lr, **options)
    options |= {"config": config, "process_group": process_group}
    if name in MUON_SCHEDULES:
        options["schedule"] = MUON_SCHEDULES[name]
    return _CLASSES.get(name, Muon)(params, lr, allow_no_matrices=allow_no_matrices, **options)


def _adamw(
    params: Sequence[Mapping[str, Any]], lr: float | Tensor, **defaults: Any
) -> torch.optim.AdamW:
    check_keys(params)
    groups = []
    for index, group in enumerate(params):
        check_hyperparameters(group, f"groups[{index}].")
        # PyTorch has no keys for parameter names and algorithm.
        own = {key: group[key] for key in ("lr", *defaults) if key in group}
        if "muon_lr_factor" in group:
            own["lr"] = own.get("lr", lr) * group["muon_lr_factor"]
        groups.append({"params": [param for _, param in group["params"]], **own})
    return torch.optim.AdamW(groups, lr, **defaults)
