"""TOML files that extend one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_ext.config import files


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_a_file_says_only_what_differs(tmp_path: Path) -> None:
    write(
        tmp_path,
        base__low="a = 1\n[s]\nx = 1\ny = [1, 2]\n[s.t]\nz = 1\n",
        base__middle="extends = 'low.toml'\nb = 2\n[s]\nx = 2\n",
        top="extends = 'base/middle.toml'\n[s]\ny = [3]\n[s.t]\nw = 3\n",
    )
    top = tmp_path / "top.toml"
    expected = {"a": 1, "b": 2, "s": {"x": 2, "y": [3], "t": {"z": 1, "w": 3}}}
    assert files.read(top) == expected
    # Relative to the file that says it, from wherever it is read.
    assert [path.name for path, _ in files.chain(top)] == ["top.toml", "middle.toml", "low.toml"]
    names = ("a", "b", "s.x", "s.y", "s.t.z", "s.t.w", "s.t", "elsewhere")
    links = files.chain(top)
    stems = [files.origin(links, name).stem for name in names]
    assert stems == ["low", "middle", "middle", "top", "low", "top", "top", "top"]


@pytest.mark.parametrize(
    ("base", "told"),
    [
        ("'none.toml'", r"top\.toml: extends: cannot read .*none\.toml: No such file"),
        ("''", r"top\.toml: extends: cannot read .*: Is a directory"),
        ("3", r"top\.toml: extends: found 3, expected the path of a TOML file"),
        ("['a.toml']", r"top\.toml: extends: found \['a\.toml'\], expected the path"),
        ("'top.toml'", r"top\.toml: extends: found 'top\.toml', which extends this file in turn"),
        ("'ring.toml'", r"ring\.toml: extends: found '\./top\.toml', which extends this file"),
        ("'broken.toml'", r"top\.toml: extends: .*broken\.toml is not TOML"),
    ],
)
def test_a_mistake_names_file_and_field(tmp_path: Path, base: str, told: str) -> None:
    write(tmp_path, top=f"extends = {base}\n", ring="extends = './top.toml'\n", broken="[x\n")
    with pytest.raises(ValueError, match=told):
        files.read(tmp_path / "top.toml")
