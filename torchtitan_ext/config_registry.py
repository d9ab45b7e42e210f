"""Configs of ``torchtitan.train --module torchtitan_ext --config NAME``.

``NAME`` is that of a file of ``configs/`` (``qwen3_1.7b``), the path of a TOML file, or module and
name of a config of torchtitan (``llama3.llama3_debugmodel``) or of yours (``my_module.my_config``),
which then trains on this machine: on CPUs, and with a PyTorch before 2.14. torchtitan lays further
arguments over the result.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FOLDERS = (Path(__file__).resolve().parents[1] / "configs", Path("configs"))
"""Folders of files that ``NAME`` may name: beside the package, and in the working directory."""


def __getattr__(name: str) -> Callable[[], Any]:
    """A function that makes the config of a name or path.

    Raises:
        AttributeError: No file and no function has the name.
    """
    for path in (Path(name), *(folder / f"{name}.toml" for folder in FOLDERS)):
        if path.suffix == ".toml" and path.is_file():
            return functools.partial(_read, path)
    module, _, function = name.rpartition(".")
    registry = f"{module}.config_registry"
    for source in (f"torchtitan.models.{registry}", registry, module) if module else ():
        if make := _function(source, function):
            return functools.partial(stock, make)
    raise AttributeError(f"found no config {name!r}")


def __dir__() -> list[str]:
    """Names of the files, which torchtitan lists where it finds no config of a name."""
    return sorted({file.stem for folder in FOLDERS for file in folder.glob("*.toml")})


def _read(path: Path) -> Any:
    # torchtitan takes an error at the import of this module for a module that is missing.
    from torchtitan_ext.config import settings

    config, problems = settings.from_file(path, "--config")
    if problems:
        raise ValueError("\n".join(problems))
    return config


def _function(module: str, name: str) -> Any:
    """Function of a module; None where module or function does not exist."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of a module that this one imports
        return None


def stock(make: Callable[[], Any]) -> Any:
    """Config made by a function, for the device and the PyTorch at hand.

    Args:
        make: Function such as torchtitan's ``llama3_debugmodel``.

    Raises:
        ValueError: A CPU cannot train its model.
    """
    from torchtitan.models.common.decoder import Decoder

    from torchtitan_ext.plugin import machine, models, patches
    from torchtitan_ext.plugin.parallelize import parallelize

    patches.install()
    config = make()
    if machine.IS_OLD:
        config.parallelism.spmd_backend = machine.spmd_backend()
    if machine.cpu_is_needed():
        if isinstance(config.model_spec.model, Decoder.Config):
            logger.warning("on CPUs attention is 'sdpa': documents of one row are not kept apart")
            models.use_sdpa(config.model_spec.model, config.model_spec.name)
        wrapped = functools.partial(parallelize, config.model_spec.parallelize_fn)
        config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=wrapped)
    return config
