"""Configs of ``torchtitan.train --module torchtitan_ext --config NAME``.

``NAME`` is that of a file of ``configs/`` (``qwen3_1.7b``), the path of a TOML file, or module and
name of a config of torchtitan (``llama3.llama3_debugmodel``) or of yours (``my_module.my_config``),
which then trains on this machine: on CPUs, and with a PyTorch before 2.14. torchtitan lays further
arguments over the result.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FOLDERS = (Path(__file__).resolve().parents[1] / "configs", Path("configs"))
"""Folders of files that ``NAME`` may name: beside the package, and in the working directory."""


def __getattr__(name: str) -> Callable[[], Any]:
    """A function that makes the config of a name or path.

    Raises:
        ValueError: If no file has the name.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    if name.endswith(".toml"):
        return functools.partial(read, Path(name))
    for path in (folder / f"{name}.toml" for folder in FOLDERS):
        if path.is_file():
            return functools.partial(read, path)
    module, dot, function = name.rpartition(".")
    registry = f"{module}.config_registry"
    for source in (f"torchtitan.models.{registry}", registry, module):
        if dot and _exists(source):
            return functools.partial(stock, source, function)
    known = {file.stem for folder in FOLDERS for file in folder.glob("*.toml")}
    near = difflib.get_close_matches(name, known, n=1)
    named = ", ".join(sorted(known)) or "none, as the project's lie in the configs of its sources"
    hint = f"did you mean {near[0]!r}?" if near else f"known: {named}"
    raise ValueError(f"--config: found {name!r}, expected a TOML file or a name of one; {hint}")


def read(path: Path) -> Any:
    """The trainer's config of a file.

    Raises:
        ValueError: For a mistake in it, or an option that has another name.
    """
    # Here, as torchtitan takes an error at the import of this module for a module that is missing.
    from torchtitan_ext.config import names, settings

    names.require_known(names.of_options(sys.argv[1:]))
    return settings.from_file(path, "--config")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def stock(module: str, function: str) -> Any:
    """Config made by a function, for the device and the PyTorch at hand.

    Args:
        module: Module of the function, such as ``torchtitan.models.llama3.config_registry``.
        function: Name of the function.

    Raises:
        ValueError: The module has no such function, or a CPU cannot train its model.
    """
    from torchtitan.models.common.decoder import Decoder

    from torchtitan_ext.plugin import machine, models, patches
    from torchtitan_ext.plugin.parallelize import parallelize

    patches.install()
    make = getattr(importlib.import_module(module), function, None)
    if not callable(make):
        raise ValueError(
            f"--config: found {function!r}, which is no function of {module}, expected one that "
            "makes a config, such as llama3_debugmodel of llama3"
        )
    config: Any = make()
    if machine.IS_OLD:
        config.parallelism.spmd_backend = machine.spmd_backend()
    if machine.cpu_is_needed():
        if isinstance(config.model_spec.model, Decoder.Config):
            logger.warning("on CPUs attention is 'sdpa': documents of one row are not kept apart")
            models.use_sdpa(config.model_spec.model, config.model_spec.name)
        wrapped = functools.partial(parallelize, config.model_spec.parallelize_fn)
        config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=wrapped)
    return config
