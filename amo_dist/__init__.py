"""AMO: Adaptive Muon Orthogonalization for sharded training.

from amo_dist import AMO, AMOConfig, param_groups

optimizer = AMO(param_groups(model), lr=1.8e-3, weight_decay=0.1, config=AMOConfig())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from amo_dist.config import AMOConfig, MuonConfig, __version__

if TYPE_CHECKING:
    from amo_dist.distributed.ranks import RankMismatchError as RankMismatchError
    from amo_dist.engine.ballot import MissingGradientError as MissingGradientError
    from amo_dist.engine.ballot import NonFiniteGradientError as NonFiniteGradientError
    from amo_dist.engine.ballot import NonFiniteUpdateError as NonFiniteUpdateError
    from amo_dist.engine.parameters import Piece as Piece
    from amo_dist.engine.rule import UpdateRule as UpdateRule
    from amo_dist.operators.groups import param_groups as param_groups
    from amo_dist.operators.views import Fused as Fused
    from amo_dist.optimizers.adamuon import AdaMuon as AdaMuon
    from amo_dist.optimizers.amo import AMO as AMO
    from amo_dist.optimizers.muon import Muon as Muon
    from amo_dist.optimizers.named import OPTIMIZER_NAMES as OPTIMIZER_NAMES
    from amo_dist.optimizers.named import make_optimizer as make_optimizer
    from amo_dist.optimizers.normuon import NorMuon as NorMuon
    from amo_dist.optimizers.qk_clip import qk_clip_ as qk_clip_
    from amo_dist.optimizers.root import ROOT as ROOT
    from amo_dist.schedule.types import Schedule as Schedule

# Modules of the names that are imported when they are first read: commands that only plan, print or
# read files do not wait for torch.
_MODULES = {
    "RankMismatchError": "distributed.ranks",
    "Piece": "engine.parameters",
    "UpdateRule": "engine.rule",
    "MissingGradientError": "engine.ballot",
    "NonFiniteGradientError": "engine.ballot",
    "NonFiniteUpdateError": "engine.ballot",
    "param_groups": "operators.groups",
    "Fused": "operators.views",
    "AdaMuon": "optimizers.adamuon",
    "AMO": "optimizers.amo",
    "Muon": "optimizers.muon",
    "OPTIMIZER_NAMES": "optimizers.named",
    "make_optimizer": "optimizers.named",
    "NorMuon": "optimizers.normuon",
    "qk_clip_": "optimizers.qk_clip",
    "ROOT": "optimizers.root",
    "Schedule": "schedule.types",
}

__all__ = ["AMOConfig", "MuonConfig", "__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
