"""Configs of ``torchtitan.train --module torchtitan_ext --config NAME``.

``NAME`` is that of a file of ``configs/`` (``qwen3_1.7b``), the path of a TOML file, or module and
name of a config of torchtitan (``llama3.llama3_debugmodel``), which then trains on this machine: on
CPUs, and with a PyTorch before 2.14. torchtitan lays further arguments over the result.
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
"""Folders of named configs: beside the package, and in the working directory."""


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
    if dot and importlib.util.find_spec(f"torchtitan.models.{module}") is not None:
        return functools.partial(stock, module, function)
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


def stock(module: str, function: str) -> Any:
    """A config of torchtitan, for the device and the PyTorch at hand.

    Args:
        module: Name of torchtitan's model, such as ``llama3``.
        function: Name of the config in its ``config_registry``.

    Raises:
        ValueError: For a name that torchtitan does not have, or a model that a CPU cannot train.
    """
    from torchtitan_ext.plugin import machine, models, patches
    from torchtitan_ext.plugin.parallelize import parallelize

    patches.install()
    try:
        registry = importlib.import_module(f"torchtitan.models.{module}.config_registry")
        config = getattr(registry, function)()
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"--config: found '{module}.{function}', expected a config of torchtitan such as "
            f"llama3.llama3_debugmodel ({error})"
        ) from error
    config.parallelism.spmd_backend = machine.spmd_backend()
    if machine.cpu_is_needed():
        logger.warning("on CPUs attention is 'sdpa': documents of one row are not kept apart")
        models.use_sdpa(config.model_spec.model, config.model_spec.name)
        wrapped = functools.partial(parallelize, config.model_spec.parallelize_fn)
        config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=wrapped)
    return config
