"""How two records of settings differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The fields that differ, sorted, as readable text."""
    return [
        f"{name}: was {saved.get(name)!r}, is {current.get(name)!r}"
        for name in sorted({*saved, *current})
        if saved.get(name) != current.get(name)
    ]
