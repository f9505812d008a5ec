"""A model hub on the loopback interface: as much of the hub's HTTP interface as a snapshot download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """Files by revision (branch, tag or commit); `gated` lets its page be seen but none of its files."""

    revisions: Mapping[str, Mapping[str, bytes]]
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """40 hex digits of a revision, None when there is no such revision."""
        for name, files in self.revisions.items():
            digest = hashlib.sha1(repr(sorted((path, data) for path, data in files.items())).encode()).hexdigest()
            if revision in (name, digest):
                return digest
        return None

    def files(self, commit: str) -> Mapping[str, bytes]:
        return next(files for name, files in self.revisions.items() if self.commit(name) == commit)


@dataclass
class Hub:
    """A running hub. `requests` lists every (method, path); `failing` makes every answer an HTTP 503."""

    repos: dict[str, Repo]
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    failing: bool = False

    def fetched(self) -> list[str]:
        """File names whose bytes were asked for, each once."""
        return sorted(
            {path.rsplit("/", 1)[1] for method, path in self.requests if method == "GET" and "/resolve/" in path}
        )


@contextmanager
def loopback_hub(repos: dict[str, Repo]) -> Iterator[Hub]:
    """Serve `repos` ({"org/name": Repo}) on a free port until the block ends."""
    hub = Hub(repos)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            status, headers, content = _route(hub, path)
            self.send_response(status)
            for key, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Answer = tuple[int, dict[str, str], bytes]


def _route(hub: Hub, path: str) -> Answer:
    if hub.failing:
        return 503, {}, b"{}"
    parts = path.strip("/").split("/")
    api = parts[:2] == ["api", "models"]
    name = "/".join(parts[2:4] if api else parts[:2])
    rest = parts[4:] if api else parts[2:]
    repo = hub.repos.get(name)
    if repo is None:
        return _refuse(404, "RepoNotFound", "Repository not found")
    kind, revision, file = [*rest, ""][0], [*rest, "", "main"][1], "/".join(rest[2:])
    commit = repo.commit(revision if kind else "main")
    if commit is None:
        return _refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    files = repo.files(commit)
    if api and kind in ("", "revision"):
        siblings = [{"rfilename": file} for file in files]
        return _json({"id": name, "sha": commit, "siblings": siblings, "gated": "manual" if repo.gated else False})
    if api and kind == "tree":
        return _json(
            [{"type": "file", "path": file, "size": len(data), "oid": _oid(data)} for file, data in files.items()]
        )
    if kind == "resolve" and repo.gated:
        return _refuse(403, "GatedRepo", f"Access to model {name} is restricted")
    if kind == "resolve" and file in files:
        return 200, {"ETag": f'"{_oid(files[file])}"', "X-Repo-Commit": commit, "Accept-Ranges": "none"}, files[file]
    return _refuse(404, "EntryNotFound", "Entry not found")


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _json(value: object) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _refuse(status: int, code: str, message: str) -> Answer:
    return status, {"X-Error-Code": code, "X-Error-Message": message}, b"{}"
