"""AMO: Adaptive Muon Orthogonalization for sharded training.

from amo_dist import AMO, AMOConfig, param_groups

optimizer = AMO(param_groups(model), lr=1.8e-3, weight_decay=0.1, config=AMOConfig())
"""

from amo_dist.config import AMOConfig, MuonConfig, __version__
from amo_dist.distributed.agreement import RankMismatchError
from amo_dist.engine.parameters import Piece
from amo_dist.engine.rule import UpdateRule
from amo_dist.engine.verdict import (
    MissingGradientError,
    NonFiniteGradientError,
    NonFiniteUpdateError,
)
from amo_dist.operators.groups import param_groups
from amo_dist.operators.views import Fused
from amo_dist.optimizers.adamuon import AdaMuon
from amo_dist.optimizers.amo import AMO
from amo_dist.optimizers.foreign import ImportReport, import_state
from amo_dist.optimizers.muon import Muon
from amo_dist.optimizers.named import OPTIMIZER_NAMES, make_optimizer
from amo_dist.optimizers.normuon import NorMuon
from amo_dist.optimizers.qk_clip import qk_clip_
from amo_dist.optimizers.root import ROOT
from amo_dist.schedule.types import Schedule
from amo_dist.state.storage import CheckpointReader, CheckpointWriter

__all__ = [
    "AMO",
    "OPTIMIZER_NAMES",
    "ROOT",
    "AMOConfig",
    "AdaMuon",
    "CheckpointReader",
    "CheckpointWriter",
    "Fused",
    "ImportReport",
    "MissingGradientError",
    "Muon",
    "MuonConfig",
    "NonFiniteGradientError",
    "NonFiniteUpdateError",
    "NorMuon",
    "Piece",
    "RankMismatchError",
    "Schedule",
    "UpdateRule",
    "__version__",
    "import_state",
    "make_optimizer",
    "param_groups",
    "qk_clip_",
]
