"""Modules and classes of a user, named by their import paths."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any


def import_module(name: str, field: str) -> ModuleType:
    """Module of the current folder, as ``python -m`` finds it, or of an installed package.

    Args:
        name: Name of the module, dotted inside a package.
        field: Field of the config that names it, for errors.

    Raises:
        ValueError: No module has the name, or it imports one that is missing.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{field}: found {name!r}, expected a module of {os.getcwd()} or of an installed "
            f"package ({error})"
        ) from None


def import_class(path: str, base: type, field: str) -> Any:
    """Class of a user.

    Args:
        path: Module and class, such as ``my_module.MyClass``.
        base: Class that it extends.
        field: Field of the config that names it, for errors.

    Raises:
        ValueError: The path names no subclass of ``base``.
    """
    module, _, name = path.rpartition(".")
    found_class = getattr(import_module(module, field), name, None) if module else None
    if not (isinstance(found_class, type) and issubclass(found_class, base)):
        raise ValueError(
            f"{field}: found {path!r}, expected 'MODULE.CLASS' of a subclass of "
            f"{base.__module__}.{base.__qualname__}"
        )
    return found_class
