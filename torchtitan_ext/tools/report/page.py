"""The report as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext import files

_CSS = """
:root { color-scheme: light; }
body { margin: 0; background: #f4f5f7; color: #1c2430;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-bottom: .3rem;
  border-bottom: 2px solid #0072B2; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
.lead { color: #56606e; margin: 0 0 1rem; }
nav { display: flex; flex-wrap: wrap; gap: .1rem 1rem; }
nav a { color: #0072B2; text-decoration: none; white-space: nowrap; }
nav a:hover, nav a:focus { text-decoration: underline; }
figure { margin: .75rem 0 1.25rem; padding: 1rem; background: #fff; border: 1px solid #dde1e7;
  border-radius: 8px; }
figure img { display: block; width: 100%; height: auto; margin: 0 auto; }
figcaption { margin-top: .6rem; font-size: .9rem; color: #414b58; }
.scroll { overflow-x: auto; background: #fff; border: 1px solid #dde1e7; border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: .92rem; }
th, td { padding: .45rem .7rem; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { background: #eef1f5; font-weight: 600; vertical-align: bottom; }
tbody tr + tr td { border-top: 1px solid #eceff3; }
.missing { padding: .7rem 1rem; background: #fff; border: 1px dashed #b8c0cb; border-radius: 8px;
  color: #56606e; font-size: .92rem; }
.note { font-size: .9rem; color: #414b58; }
@media print { body { background: #fff; font-size: 11pt; } nav { display: none; }
  main { padding: 0; max-width: none; } figure, .scroll { border: 0; padding: 0; }
  figure, table { break-inside: avoid; } h2, h3 { break-after: avoid; } }
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """A figure in a section."""

    name: str
    """Of the PNG file, without its ending."""
    figure: Any
    caption: str


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table in a section; the first column is left-aligned."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """What a section cannot show, and why."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Heading:
    """A run's name above its figures, where there are several runs."""

    text: str


Part = Picture | Table | Missing | Heading


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A part of the report under one title."""

    title: str
    parts: Sequence[Part]


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    links = "".join(
        f'<a href="#s{number}">{_text(section.title)}</a>'
        for number, section in enumerate(sections, start=1)
    )
    body = "".join(
        f'<section id="s{number}"><h2>{_text(section.title)}</h2>'
        f"{''.join(map(_part, section.parts))}</section>\n"
        for number, section in enumerate(sections, start=1)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{_text(title)}</h1>\n<p class="lead">{_text(lead)}</p>\n'
        f"<nav>{links}</nav>\n{body}</main>\n</body>\n</html>\n"
    )


def save_pngs(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Write every picture as a PNG; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for section in sections:
        for part in section.parts:
            if isinstance(part, Picture):
                picture = io.BytesIO()
                part.figure.savefig(picture, format="png", dpi=150)
                paths.append(folder / f"{part.name}.png")
                files.replace(paths[-1], picture.getvalue())
    return paths


def _part(part: Part) -> str:
    if isinstance(part, Heading):
        return f"<h3>{_text(part.text)}</h3>\n"
    if isinstance(part, Missing):
        return f'<p class="missing">{_text(part.reason)}</p>\n'
    if isinstance(part, Table):
        return _table(part)
    caption = _text(part.caption)
    width = part.figure.get_figwidth() / 9.0 * 100
    return (
        f'<figure><img src="{_image(part.figure)}" alt="{caption}" style="max-width:{width:.0f}%">'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )


def _table(table: Table) -> str:
    header = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in table.header)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    note = f'<p class="note">{_text(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}\n"
    )


def _image(figure: Any) -> str:
    """As an image of its own: inline, the ids of two figures would collide."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def _text(value: str) -> str:
    return html.escape(value, quote=True)
