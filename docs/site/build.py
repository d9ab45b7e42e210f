"""Build the site from the pages of the repository: ``python docs/site/build.py OUTPUT``.

The pages keep their places, so the same relative links work here and on a code host. A broken link
or a name that the reference cannot resolve ends the build with an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).resolve().parent
ROOT = SITE.parents[1]
PAGES = ("*.md", "*.png", "*.json", "*.toml", "*.cff", "LICENSE")
"""Files that pages are, show or link to."""


def main(output: Path) -> None:
    """Write the site to a folder, replacing what is there.

    Args:
        output: Folder of the site.

    Raises:
        SystemExit: The build failed, or a docstring does not fit its signature.
    """
    command = ("git", "-C", str(ROOT), "ls-files", "--", *PAGES, ":!tests", ":!docs/site")
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        for name in names:
            (pages / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, pages / name)
        shutil.copyfile(SITE / "reference.md", pages / "docs" / "reference.md")
        shutil.copyfile(SITE / "extra.css", pages / "extra.css")
        config = (SITE / "mkdocs.yml").read_text().replace("REPOSITORY", str(ROOT))
        (Path(folder) / "mkdocs.yml").write_text(config)
        # A cache would be written beside the configuration and go with it.
        build = subprocess.run(
            ("zensical", "build", "--strict"),
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        print(build.stdout, end="")
        if build.returncode or "griffe: " in build.stdout:  # `--strict` lets griffe's warnings pass
            sys.exit("the site was not built: see the messages above")
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(Path(folder) / "site", output)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/site/build.py OUTPUT")
    main(Path(sys.argv[1]))
