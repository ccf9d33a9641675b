"""A stand-in for the hub of models on loopback: a folder's files, by the calls of its clients."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

_COMMIT: Final = "c0" * 20
_API: Final = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?\Z")
_FILE: Final = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)\Z")


@dataclass
class HubModel:
    """One model.

    Attributes:
        files: Its files by their paths.
        gated: Whether its files are refused.
        about: What else the hub says of it, such as `tags`.
    """

    files: Mapping[str, bytes]
    gated: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


class Hub:
    """Models by their ids, and what is to go wrong.

    Attributes:
        url: Its address.
        models: By their ids.
        cut: Paths whose first transfer ends after half of the bytes.
        held: Path whose transfer stops after half of the bytes until `release` is set.
        sent: The transfers, each with its path and the first byte.
        failing: The status with which every call is answered; None for none.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.models: dict[str, HubModel] = {}
        self.cut: set[str] = set()
        self.held: str | None = None
        self.release = threading.Event()
        self.sent: list[tuple[str, int]] = []
        self.failing: int | None = None

    def add(self, name: str, folder: Path | Mapping[str, bytes], **options: Any) -> HubModel:
        """Have a model, of a folder's files or those given."""
        if isinstance(folder, Path):
            folder = {
                str(file.relative_to(folder)): file.read_bytes()
                for file in folder.rglob("*")
                if file.is_file()
            }
        self.models[name] = HubModel(folder, **options)
        return self.models[name]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub without models."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        if hub.failing is not None:
            return self._refuse(hub.failing)
        if found := _API.match(path):
            return self._tell(hub, *found.groups())
        if found := _FILE.match(path):
            return self._send_file(hub, *found.groups())
        return self._refuse(404)

    def _tell(self, hub: Hub, name: str, what: str | None, revision: str | None) -> None:
        model = hub.models.get(name)
        if model is None:  # as the hub answers who may not know whether it is private
            return self._refuse(401, "RepoNotFound")
        if revision not in {None, "main", _COMMIT}:
            return self._refuse(404, "RevisionNotFound")
        if what == "tree":
            return self._json(
                [
                    {"type": "file", "path": path, "size": len(held), "oid": _etag(held)}
                    for path, held in model.files.items()
                ]
            )
        siblings = [{"rfilename": path} for path in model.files]
        return self._json({"id": name, "sha": _COMMIT, "siblings": siblings, **model.about})

    def _send_file(self, hub: Hub, name: str, revision: str, path: str) -> None:
        model = hub.models.get(name)
        refused = self._why_not(model, revision, path)
        if refused is not None or model is None:
            return self._refuse(*refused or (404,))
        content, first = model.files[path], 0
        if found := re.match(r"bytes=(\d+)-\Z", self.headers.get("Range", "")):
            first = int(found[1])
        body = content[first:]
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(body)))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("X-Repo-Commit", _COMMIT)
        self.send_header("ETag", f'"{_etag(content)}"')
        self.end_headers()
        if self.command == "HEAD":
            return None
        hub.sent.append((path, first))
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if path in hub.cut:
            hub.cut.discard(path)
            self.close_connection = True
            self.connection.shutdown(2)
            return None
        if path == hub.held:
            hub.release.wait()
        self.wfile.write(body[half:])
        return None

    def _why_not(self, model: HubModel | None, revision: str, path: str) -> tuple[int, str] | None:
        if model is None:
            return 401, "RepoNotFound"
        if model.gated:
            return 403 if "Authorization" in self.headers else 401, "GatedRepo"
        if revision not in {"main", _COMMIT}:
            return 404, "RevisionNotFound"
        return None if path in model.files else (404, "EntryNotFound")

    def _json(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
