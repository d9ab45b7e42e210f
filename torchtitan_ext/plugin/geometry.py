"""``[geometry]``: a log of every matrix's geometry in the run's folder.

``geometry.jsonl`` holds one JSON object for each matrix and tracked step, as
:mod:`benchmarks.amo_paper.static_schedule` reads them: ``step``, ``name``, ``layer`` (``null``
outside of the blocks), ``operator_type``, ``model``, ``family``, ``shape``, the figures of
:data:`amo_dist.kernels.geometry.SPECTRAL_METRICS` of momentum, ``ns_residual`` of the
orthogonalized result, ``update_norm``, its norm over that of an exact polar factor, and under
``orthogonalized`` the same figures for the result. ``null`` stands for a value that is
not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from amo_dist.tools.tracker import GeometryTracker, Record
from torchtitan_ext.plugin.optimizers import STOCK
from torchtitan_ext.runs.records import append_records, drop_from
from torchtitan_ext.runs.run_files import GEOMETRY_FILE

_FAMILIES = {"llama3": "Llama-3.1", "qwen3": "Qwen3"}
"""Names that the AMO paper gives to torchtitan's models."""


@dataclass(kw_only=True, slots=True)
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


class GeometryLog:
    """Appends records to ``geometry.jsonl``; used by one rank.

    Args:
        folder: The dump folder.
        labels: Further fields of every record.
    """

    def __init__(self, folder: Path, **labels: str) -> None:
        self._path = folder / GEOMETRY_FILE
        self._labels = labels
        self._has_started = False

    def append(self, records: Sequence[Record], first_step: int) -> None:
        """Append the records of one step.

        Args:
            records: Records of all matrices.
            first_step: First step of this process; the first call drops what earlier runs wrote for
                it and for later steps.
        """
        if not self._has_started:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            drop_from(self._path, first_step)
            self._has_started = True
        append_records(self._path, [{**record, **self._labels} for record in records])


def validate(config: Any) -> None:
    """Check ``[geometry]``.

    Raises:
        ValueError: For an interval out of range, or an optimizer without matrices.
    """
    section = config.geometry
    if section.enable and config.optimizer.name in STOCK:
        raise ValueError(
            f"geometry.enable: found true with optimizer.name = {config.optimizer.name!r}, which "
            "orthogonalizes nothing; expected a name of the Muon family"
        )
    if section.interval < 1:
        raise ValueError(f"geometry.interval: found {section.interval!r}, expected an integer >= 1")


def install(container: Any, config: Any) -> GeometryTracker | None:
    """Track the geometry of an optimizer's matrices where ``[geometry] enable`` asks for it.

    Args:
        container: The optimizers, before the first step.
        config: Config that :func:`validate` accepts.

    Returns:
        The tracker; ``None`` where none is asked for.
    """
    section = getattr(config, "geometry", None)  # torchtitan's own configs have none
    if section is None or not section.enable:
        return None
    tracker = GeometryTracker(section.interval, section.what)
    folder = Path(config.dump_folder)
    log = GeometryLog(folder, model=model_label(config), family=family_label(config))
    tracker.sink = lambda _, records: log.append(records, tracker.first_step or 1)
    container.optimizer.tracker = tracker
    return tracker


def model_label(config: Any) -> str:
    """The flavor, with its family in front where it does not tell it: ``Llama-3.1-quickstart``."""
    flavor: str = config.model.flavor
    return flavor if flavor[:1].isupper() else f"{family_label(config)}-{flavor}"


def family_label(config: Any) -> str:
    """The paper's name of the family, or torchtitan's."""
    name: str = config.model.name
    return _FAMILIES.get(name, name)
