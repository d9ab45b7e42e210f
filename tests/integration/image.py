"""Images and containers without Docker: a Debian root, in which a Dockerfile's instructions run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.integration.processes import ROOT, Command

SUITE = {(3, 11): "bookworm", (3, 13): "trixie"}.get(sys.version_info[:2])
"""The Debian whose Python this one is, so that wheels for one fit the other; else None."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = ("unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child")
ENTER = """
set -e
root="$1"; scratch="$2"; name="$3"; directory="$4"; shift 4
if [ -n "$scratch" ]; then # writes end with the container, those to volumes aside
  mount -t tmpfs tmpfs "$scratch"
  mkdir "$scratch/upper" "$scratch/work" "$scratch/root"
  layers="lowerdir=$root,upperdir=$scratch/upper,workdir=$scratch/work"
  root="$scratch/root"
  mount -t overlay overlay -o "$layers" "$root"
fi
hostname "$name"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs dev "$root/dev" # its own: a compiler that writes to /dev/null as root may replace it
for device in null:3 zero:5 full:7 random:8 urandom:9; do
  mknod --mode=666 "$root/dev/${device%:*}" c 1 "${device#*:}"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir --mode=1777 "$root/dev/shm"
while [ "$1" != -- ]; do
  mkdir -p "$root$2"
  mount --bind "$1" "$root$2"
  shift 2
done
shift
exec chroot "$root" env -i --chdir="$directory" "$@"
"""


@dataclasses.dataclass
class Image:
    """A root with what its instructions say of containers.

    Attributes:
        root: Folder of the root.
        environment: Variables of every process.
        directory: Folder in which processes start.
        entrypoint: First words of a container's command.
        command: Words after them, unless a container has others.
        volumes: Folders that are no part of the root.
        mounts: Folders of this machine, by folder of the root.
    """

    root: Path
    environment: dict[str, str] = dataclasses.field(default_factory=lambda: {"PATH": PATH})
    directory: str = "/"
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    volumes: Sequence[str] = ()
    mounts: dict[str, Path] = dataclasses.field(default_factory=dict)

    def build(self, context: Path) -> None:
        """Run the instructions of launch/Dockerfile, with this root as the base."""
        arguments: dict[str, str] = {}
        for name, text in instructions((ROOT / "launch" / "Dockerfile").read_text()):
            known = {**arguments, **self.environment}
            if name in ("ARG", "ENV"):
                values = arguments if name == "ARG" else self.environment
                for word in shlex.split(text):
                    key, _, value = word.partition("=")
                    values[key] = string.Template(value).substitute(known)
            elif name == "WORKDIR":
                self.directory = text
                (self.root / text[1:]).mkdir(parents=True, exist_ok=True)
            elif name == "COPY":
                assert text == ". .", text
                target = self.root / self.directory[1:]
                shutil.copytree(context, target, dirs_exist_ok=True)
            elif name == "RUN":
                self.run(text)
            elif name in ("VOLUME", "ENTRYPOINT", "CMD"):
                fields = {"VOLUME": "volumes", "ENTRYPOINT": "entrypoint", "CMD": "command"}
                setattr(self, fields[name], json.loads(text))
            else:
                assert name == "FROM", name

    def run(self, script: str) -> None:
        """Run a script of the shell in the root itself, which keeps what it writes."""
        words = self.words(["sh", "-ec", script])
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout.decode()[-4000:]

    def words(
        self,
        command: Sequence[str],
        volumes: Mapping[str, Path] | None = None,
        variables: Mapping[str, str] | None = None,
        name: str = "container",
        scratch: Path | None = None,
    ) -> list[str]:
        """Words that run a command as process 1, in the root or in a layer over it in a folder."""
        mounts = {**self.mounts, **(volumes or {})}
        enter = [*NAMESPACES, "sh", "-c", ENTER, "enter"]
        enter += [str(self.root), str(scratch or ""), name, self.directory]
        for inside, outside in mounts.items():
            enter += [str(outside), inside]
        environment = {**self.environment, **(variables or {})}
        return [*enter, "--", *(f"{key}={value}" for key, value in environment.items()), *command]


class Container(Command):
    """A container, whose process 1 gets the signals; its output goes to a file of the folder."""

    def __init__(
        self,
        image: Image,
        folder: Path,
        command: Sequence[str] = (),
        volume: Path | None = None,
        variables: Mapping[str, str] | None = None,
        *,
        entrypoint: Sequence[str] | None = None,
        name: str = "container",
    ) -> None:
        folder.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder))
        volumes = {path: volume or Path(tempfile.mkdtemp(dir=folder)) for path in image.volumes}
        first = image.entrypoint if entrypoint is None else entrypoint
        words = image.words(
            [*first, *(command or image.command)], volumes, variables, name, scratch
        )
        super().__init__(words, folder)

    def stop(self, number: signal.Signals, status: int) -> str:
        """Send process 1 a signal, as from outside of its container, and wait for the end."""
        os.kill(self.first_process(), number)
        return self.end(status)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Name and text of each instruction of a Dockerfile."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n", " ", lines).splitlines():
        if line.strip():
            name, rest = line.split(maxsplit=1)
            yield name, rest.strip()


def checkout(folder: Path) -> Path:
    """A clone, without what git ignores, as .dockerignore leaves it out too."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listing, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder
