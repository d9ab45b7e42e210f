"""Fields that the project adds to torchtitan's job config.

Named in ``[job] custom_config_module = "torchtitan_ext.job_config"``; torchtitan merges
:class:`JobConfig` into its own, section by section.
"""

# No `from __future__ import annotations` here: torchtitan's merge reads the types of fields as
# types, and would take a section whose type is a string for a plain value.

from dataclasses import dataclass, field
from typing import Literal

import torchtitan_ext
from amo_dist.config import AMOConfig, MuonConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSection(MuonConfig):
    """``[optimizer.muon]``: fields of :class:`amo_dist.config.MuonConfig`, and the schedule."""

    schedule: str = "kj"
    """Named table of Newton-Schulz coefficients that ``name = "Muon"`` applies to every matrix."""

    schedule_file: str = ""
    """
    TOML file with a schedule for each operator type, in place of ``schedule``: from
    ``amo static-schedule``, or one of ``configs/schedules``.
    """


@dataclass
class ScalingLaw:
    """``[optimizer.scaling_law]``: what the peak learning rate is computed from."""

    params_b: float = 0.0
    """Nominal size of the model in billions: 0.6 for Qwen3-0.6B."""

    tokens_b: float = 0.0
    """Tokens of the training run in billions."""


@dataclass
class Optimizer:
    """Additions to ``[optimizer]``."""

    lr_from: Literal["value", "scaling_law"] = "value"
    """
    ``value`` takes ``lr``; ``scaling_law`` computes it, see
    :func:`torchtitan_ext.learning_rate.scaling_law_lr`.
    """

    scaling_law: ScalingLaw = field(default_factory=ScalingLaw)
    """Read with ``lr_from = "scaling_law"``."""

    allow_unlocked: bool = False
    """Accept a run that ends before AMO's plan is locked (otherwise an error at start)."""

    on_config_change: Literal["error", "keep_checkpoint", "use_config"] = "error"
    """
    Where a checkpoint has another ``lr``, ``weight_decay``, ``beta1``, ``beta2`` or ``eps``: stop,
    go on with those of the checkpoint, or with those of the config. With ``error`` and
    ``name = "AMO"`` the field of the same name in ``[optimizer.amo]`` decides about these too
    (``replan`` takes over the config's). Changes of ``[lr_scheduler]`` and of ``training.steps``
    always hold.
    """

    muon: MuonSection = field(default_factory=MuonSection)
    """
    Read by every ``name`` of the Muon family but ``"AMO"``. What is left open here and named in
    ``[optimizer.amo]`` is taken from there, so that ``name`` can be changed alone.
    """

    amo: AMOConfig = field(default_factory=AMOConfig)
    """Read by ``name = "AMO"``."""


@dataclass
class Metrics:
    """Additions to ``[metrics]``."""

    console: Literal["full", "brief"] = "full"
    """
    ``brief`` shows progress and warnings of the logging rank alone; everything else goes to
    ``log_rank<r>.txt`` in the dump folder.
    """


@dataclass
class Data:
    """``[data]``: tokenizer and streams."""

    tokenizer: Literal["hf", "byte", "tiktoken"] = "hf"
    """
    ``hf`` reads ``tokenizer.json``, ``tiktoken`` Llama's ``tokenizer.model`` or Qwen's
    ``qwen.tiktoken``; ``byte`` (one token a byte) is built in code.
    """

    tokenizer_path: str = ""
    """Folder or file of the tokenizer; by default ``model.hf_assets_path``."""

    eos_token: str = ""
    """
    The token after each document, such as ``<|endoftext|>``. By default the one that
    ``tokenizer_config.json`` names (``hf``; for a chat model that is the end of a turn), or that of
    the family's pre-training (``tiktoken``).
    """

    pattern: str = "**/*.txt"
    """Files taken from ``training.dataset_path`` when that is a folder (``dataset = "text"``)."""

    num_streams: int = 96
    """
    Streams into which the documents are dealt. A multiple of the data-parallel degree; a checkpoint
    holds the position of each, so that the degree may change on resume.
    """

    seed: int = 42
    """Seeds the order of documents."""

    undecodable: Literal["error", "skip"] = "error"
    """What to do with a file that cannot be read or is not UTF-8: stop, or leave it out."""

    # From here on: dataset = "documents", "fineweb_edu", "slimpajama" or "pool".

    bad_rows: Literal["error", "skip"] = "error"
    """
    What to do with a row whose text is missing, not text, not UTF-8 or empty: stop and name it, or
    count it and leave it out.
    """

    text_field: str = "text"
    """Field of a row that holds the text."""

    shuffle_buffer: int = 10_000
    """
    Documents that each stream reads, shuffles and draws before it reads on. One of them is about
    five kilobytes of web text, and a rank has ``num_streams`` over its number of ranks of these.
    """

    order: Literal["uniform", "ascend", "descend"] = "uniform"
    """
    Order of ``dataset = "pool"``: shuffled as a whole in each epoch, or by ``score_field`` from the
    lowest or the highest on.
    """

    score_field: str = ""
    """
    Field of a row of ``dataset = "pool"`` that holds a finite number to order by; ``score`` by
    default with the orders that need one. Where it is named a row without is a bad one in the order
    ``uniform`` too, so that all orders draw the same documents.
    """

    hub_config: str = ""
    """Subset of a dataset on the hub, such as ``sample-100BT``; by default that of the hub."""

    split: str = "train"
    """Split of a dataset on the hub."""

    revision: str = ""
    """
    Commit of a dataset on the hub; by default the latest. A resume refuses another one than that of
    the checkpoint.
    """


@dataclass
class Geometry:
    """``[geometry]``: what momentum looks like, and what Newton-Schulz makes of it."""

    enable: bool = False
    """Write ``geometry.jsonl`` into the dump folder; training goes on as without, bit for bit."""

    interval: int = 10
    """Steps from one measurement of all matrices to the next."""

    what: Literal["momentum", "residual", "both"] = "both"
    """
    Spectrum of momentum alone; with the residual of the orthogonalized result; or with the
    result's spectrum too, which costs a second decomposition.
    """


@dataclass
class JobConfig:
    """Sections with additions."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    metrics: Metrics = field(default_factory=Metrics)
    data: Data = field(default_factory=Data)
    geometry: Geometry = field(default_factory=Geometry)


# The config module is loaded by every run, whatever imported this package before torchtitan.
torchtitan_ext.register()
