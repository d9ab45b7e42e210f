"""What ``torchtitan.train --module torchtitan_ext --config NAME`` reads: TOML files.

``NAME`` is that of a file of ``configs/`` (``qwen3_1.7b``), or a path. torchtitan lays further
arguments over the result.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDERS = (Path(__file__).resolve().parents[1] / "configs", Path("configs"))
"""Where a name is looked for: beside the package, and in the working directory."""


def __getattr__(name: str) -> Callable[[], Any]:
    """A function that reads the file of a name or path.

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
