"""A Hub on this machine: an HTTP server that takes uploads of `huggingface_hub`."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants


class LocalHub:
    """`repos`: by name, whether private; `files`: content by repository and path.

    A request without the token is refused, as on the Hub. Every download is refused with `refusal`,
    a status and an error code of the Hub.
    """

    token = "hf_for_tests"

    def __init__(self) -> None:
        self.repos: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.url = ""
        self.refusal = 404, "RepoNotFound"

    def answer(self, path: str, body: bytes) -> dict:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.repos[name] = asked.get("private") or asked.get("visibility") == "private"
            return {"url": f"{self.url}/{name}", "name": name}
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            as_sent = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": file["path"], **as_sent} for file in files]}
        if path.endswith("/commit/main"):
            repo = path.removeprefix("/api/models/").removesuffix("/commit/main")
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    content = b64decode(value["content"])
                    self.files.setdefault(repo, {})[value["path"]] = content
            url = f"{self.url}/{repo}/commit/{'0' * 40}"
            return {"commitUrl": url, "commitOid": "0" * 40, "success": True}
        return {"errors": [], "warnings": []}


@contextmanager
def local_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """Everything of `huggingface_hub` goes to a `LocalHub`, in place of the network."""
    hub = LocalHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            allowed = self.headers.get("Authorization") == f"Bearer {hub.token}"
            found = hub.answer(self.path.split("?")[0], body) if allowed else {"error": "no token"}
            content = json.dumps(found).encode()
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_HEAD(self) -> None:
            status, code = hub.refusal
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # It looks for its end every 0.01 s, not every 0.5 s.
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
