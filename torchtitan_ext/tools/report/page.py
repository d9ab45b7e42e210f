"""The report as one HTML file without scripts, fonts or network access."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext.runs import files

TEMPLATE = Path(__file__).with_name("page.html")


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A figure in a section."""

    name: str
    """Name of the PNG file, without its suffix."""
    figure: Any
    caption: str


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table in a section; the first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A part of the report under one title: pictures, then a table, then a note."""

    title: str
    pictures: Sequence[Picture] = ()
    table: Table | None = None
    note: str = ""


def render(title: str, lead: str, sections: Sequence[Section], left_out: Sequence[str]) -> str:
    """The whole page; ``left_out`` are lines at its end."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["image"] = _image
    template = environment.from_string(TEMPLATE.read_text("utf-8"))
    return template.render(title=title, lead=lead, sections=sections, left_out=left_out)


def save_pngs(sections: Sequence[Section], folder: Path) -> int:
    """Write every picture as a PNG file; returns their number."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [picture for section in sections for picture in section.pictures]
    for picture in pictures:
        files.replace(folder / f"{picture.name}.png", _drawn(picture, format="png", dpi=200))
    return len(pictures)


def _image(picture: Picture) -> str:
    """A picture as a data URL: the ids of two inline figures would collide."""
    drawn = _drawn(picture, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(drawn).decode()


def _drawn(picture: Picture, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.figure.savefig(file, **options)
    return file.getvalue()
