"""A server in place of the hub, on this machine: one dataset with commits and faults."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NAME = "owner/name"


@dataclasses.dataclass
class Hub:
    """What the server answers.

    Attributes:
        commits: Files of each commit by path; the last one is that of the branch ``main``.
        requests: Method and path of each request, in order.
        fault: Called with method and path before each answer; may wait, or give a status to answer
            with, or a number of bytes below zero to leave out at the end.
    """

    commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    requests: list[str] = dataclasses.field(default_factory=list)
    fault: Callable[[str, str], int | None] = lambda method, path: None
    url: str = ""

    def commit(self, number: int, files: dict[str, bytes]) -> str:
        """Add a commit; returns its name."""
        name = f"{number:040x}"
        self.commits[name] = files
        return name

    def find(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        name = list(self.commits)[-1] if revision == "main" else revision
        return (name, self.commits[name]) if name in self.commits else None


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", cut: int = 0, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) + cut])
        if cut:
            self.close_connection = True

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        fault = self.hub.fault(self.command, path) or 0
        if fault > 0:
            self._answer(fault)
            return
        parts = path.strip("/").split("/")
        if parts[:4] == ["api", "datasets", *NAME.split("/")]:
            self._api(parts[4:], body)
        elif parts[:4] == ["datasets", *NAME.split("/"), "resolve"]:
            self._file(parts[4], "/".join(parts[5:]), fault)
        else:
            self._answer(404, X_Error_Code="RepoNotFound")

    do_GET = do_HEAD = do_POST = _handle

    def _api(self, parts: list[str], body: bytes) -> None:
        kind, revision = parts[0] if parts else "revision", parts[1] if parts[1:] else "main"
        found = self.hub.find(revision)
        if found is None:
            self._answer(404, X_Error_Code="RevisionNotFound")
            return
        commit, files = found
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": NAME, "sha": commit, "siblings": siblings, "private": False})
            return
        entries = [
            {"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40}
            for name in sorted(files)
        ]
        if kind == "paths-info":
            asked = set(urllib.parse.parse_qs(body.decode()).get("paths", []))
            with contextlib.suppress(json.JSONDecodeError):
                asked = set(json.loads(body)["paths"])
            self._json([entry for entry in entries if entry["path"] in asked])
        elif kind == "tree":
            folder = "/".join(parts[2:])
            inside = [
                e for e in entries if str(e["path"]).startswith(f"{folder}/" if folder else "")
            ]
            names = {str(e["path"]).removeprefix(folder).strip("/").split("/")[0] for e in inside}
            direct = [e for e in inside if str(e["path"]).rpartition("/")[0] == folder]
            folders = [
                {"type": "directory", "path": f"{folder}/{name}".strip("/"), "oid": "0" * 40}
                for name in sorted(names - {str(e["path"]).rpartition("/")[2] for e in direct})
            ]
            self._json(inside if "recursive=true" in self.path.lower() else [*folders, *direct])
        else:
            self._answer(404, X_Error_Code="EntryNotFound")

    def _file(self, revision: str, path: str, cut: int) -> None:
        found = self.hub.find(revision)
        if found is None:
            self._answer(404, X_Error_Code="RevisionNotFound")
            return
        commit, files = found
        if path not in files:
            self._answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        content, headers = files[path], {"X_Repo_Commit": commit, "ETag": f'"{commit}"'}
        start, stop = 0, len(content)
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(stop, int(last) + 1 if last else stop)
            headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self._answer(206 if asked else 200, content[start:stop], cut, **headers)


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A hub without commits, on a free port of this machine."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that hung up
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use(hub: Hub, patch: pytest.MonkeyPatch, cache: str) -> None:
    """Have this process take ``hub`` for the hub; its addresses are read at import."""
    import datasets
    import huggingface_hub as client

    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        patch.delenv(name, raising=False)
    patch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    patch.setattr(datasets.config, "HF_MODULES_CACHE", f"{cache}/modules")
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", f"{cache}/datasets")
    patch.setattr(client.constants, "ENDPOINT", hub.url)
    patch.setattr(client.constants, "HF_HUB_CACHE", f"{cache}/hub")
    template = client.constants.HUGGINGFACE_CO_URL_TEMPLATE
    patch.setattr(
        client.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + template[template.index("/{repo_id}") :],
    )
    client.HfFileSystem.clear_instance_cache()
