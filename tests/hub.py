"""A small Hugging Face Hub on loopback: the endpoints that huggingface_hub calls to read and to commit files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Repository:
    """Commits, oldest first, as files by name; `branches` name commits."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, changes: Mapping[str, bytes], branch: str = "main") -> str:
        """Add files on top of a branch; the hash of the new commit."""
        files = {**self.commits.get(self.branches.get(branch, ""), {}), **changes}
        content = repr((len(self.commits), sorted(files.items()))).encode()
        sha = self.branches[branch] = hashlib.sha1(content).hexdigest()
        self.commits[sha] = files
        return sha


class Hub(ThreadingHTTPServer):
    """Repositories by name, and what was asked for. With `lfs`, files are uploaded next to the commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.lfs, self.broken = False, False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers."""
    hub = Hub()
    Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        """Answer any request."""
        hub, path = self.server, urlsplit(self.path).path
        body = self._body()
        hub.requests.append(f"{self.command} {path}")
        if hub.broken:
            return self._send(503, {"error": "the hub is down"})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if match := re.fullmatch(r"/upload/(\w+)", path):
            hub.objects[match[1]] = body
            return self._send(200, b"")
        routes = {
            r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?": self._info,
            r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)": self._preupload,
            r"/api/models/([^/]+/[^/]+)/commit/([^/]+)": self._commit,
            r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch()": self._batch,
            r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)": self._resolve,
        }
        for pattern, answer in routes.items():
            if match := re.fullmatch(pattern, path):
                name, revision, *rest = match.groups()
                repository = hub.repositories.get(name)
                if repository is None or (repository.private and not self._is_known):
                    return self._send(401, {"error": "Invalid username or password."}, {"X-Error-Code": "RepoNotFound"})
                revision = unquote(revision or "main")
                sha = repository.branches.get(revision, revision)
                if sha not in repository.commits and answer in (self._info, self._resolve):
                    return self._send(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
                return answer(name, repository, sha, *map(unquote, rest), body=body)
        return self._send(404, {"error": "no such endpoint"})

    @property
    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = b""
        while size := int(self.rfile.readline(), 16):
            chunks += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return chunks

    def _send(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _info(self, name: str, repository: Repository, sha: str, body: bytes) -> None:
        siblings = [{"rfilename": file} for file in repository.commits[sha]]
        self._send(200, {"id": name, "modelId": name, "sha": sha, "private": False, "tags": [], "siblings": siblings})

    def _resolve(self, name: str, repository: Repository, sha: str, file: str, body: bytes) -> None:
        if repository.gated and not self._is_known:
            return self._send(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        content = repository.commits[sha].get(file)
        commit = {"X-Repo-Commit": sha}
        if content is None:
            return self._send(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound", **commit})
        return self._send(200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', **commit})

    def _create(self, asked: Mapping[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if not self._is_known:
            return self._send(401, {"error": "Invalid username or password."})
        if asked["organization"] != "me":
            return self._send(403, {"error": f"You may not create {name}"})
        answer = {"url": f"{self.server.url}/{name}"}
        if name in self.server.repositories:
            return self._send(409, {"error": "You already created this repository", **answer})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.server.repositories[name] = Repository(private)
        return self._send(200, answer)

    def _preupload(self, name: str, repository: Repository, sha: str, body: bytes) -> None:
        mode = "lfs" if self.server.lfs else "regular"
        files = [one["path"] for one in json.loads(body)["files"]]
        self._send(200, {"files": [{"path": file, "uploadMode": mode, "shouldIgnore": False} for file in files]})

    def _batch(self, name: str, repository: Repository, sha: str, body: bytes) -> None:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.server.url}/upload/{one['oid']}"}}}
            for one in json.loads(body)["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, sha: str, body: bytes) -> None:
        changes = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                changes[value["path"]] = self.server.objects[value["oid"]]
        commit = repository.commit(changes)
        self._send(200, {"commitOid": commit, "commitUrl": f"{self.server.url}/{name}/commit/{commit}"})
