"""A hub of models and data sets on the loopback address: the requests that huggingface_hub and datasets make."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = "gated"
"""Repositories of this owner ask for a token."""


@dataclass
class Hub:
    """A running server. fetched: for each file of a repository whose content was sent, the number of its bytes."""

    url: str
    fetched: dict[str, int] = field(default_factory=dict)

    def environment(self, home: Path) -> dict[str, str]:
        """The variables with which a process uses this hub alone, with a cache of its own."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def served(folder: Path) -> Iterator[Hub]:
    """Serve `models/OWNER/NAME` and `datasets/OWNER/NAME` of a folder."""
    hub = Hub("")

    class Handler(_Handler):
        root, fetched = folder, hub.fetched

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    root: Path
    fetched: dict[str, int]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        api = re.match(r"/api/(models|datasets)/([^/]+/[^/]+)(/.*)?$", path)
        file = re.match(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)$", path)
        if api is not None:
            self._describe(api[1], api[2], api[3] or "", body)
        elif file is not None:
            self._file("datasets" if file[1] else "models", file[2], file[3])
        else:
            self._send(404, b"{}")

    def _describe(self, kind: str, name: str, rest: str, body: bytes) -> None:
        folder = self.root / kind / name
        if not self._readable(folder, name):
            return
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        if rest.startswith(("/tree/", "/paths-info/")):
            wanted = json.loads(body)["paths"] if rest.startswith("/paths-info/") else files
            entries = [(name, folder / name) for name in files if name in wanted]
            described = [
                {"type": "file", "oid": _digest(path.read_bytes()), "size": path.stat().st_size, "path": name}
                for name, path in entries
            ]
            self._send(200, json.dumps(described).encode())
            return
        facts = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files], "tags": []}
        self._send(200, json.dumps({**facts, "private": False, "gated": False, "downloads": 0, "likes": 0}).encode())

    def _file(self, kind: str, name: str, file: str) -> None:
        if not self._readable(self.root / kind / name, name):
            return
        path = self.root / kind / name / file
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        part = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range") or "")
        code, sent = 200, content
        if part is not None:
            begin, end = int(part[1]), min(int(part[2] or len(content)), len(content) - 1)
            code, sent = 206, content[begin : end + 1]
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
        if self.command == "GET":
            key = f"{name}/{file}"
            self.fetched[key] = self.fetched.get(key, 0) + len(sent)
        self._send(code, sent, headers)

    def _readable(self, folder: Path, name: str) -> bool:
        if name.startswith(f"{GATED}/"):
            self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        elif not folder.is_dir():
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        else:
            return True
        return False

    def _send(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
