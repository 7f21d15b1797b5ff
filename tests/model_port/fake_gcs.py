"""A fake bucket on loopback with fault injection: the part of Google Cloud Storage's JSON API that clients use.

`fault(method, name)` is called for every request. None: answer it. A number: fail with this status. "stall": never
answer. "lost": execute it, then answer 503, as if the network lost the answer.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from model_port import bucket

STALL_S = 30.0
Fault = Callable[[str, str], int | str | None]


class FakeGcs(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[int, bytes]] = {}  # "BUCKET/NAME" -> generation, content
        self.fault: Fault = lambda method, name: None
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self.last = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def names(self, prefix: str = "") -> set[str]:
        return {name.removeprefix(prefix) for name in self.objects if name.startswith(prefix)}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # sends headers and body in one packet
    server: FakeGcs

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        upload = url.path.startswith("/upload")
        holder, _, name = url.path.partition("/b/")[2].partition("/o")
        name = f"{holder}/{query['name'] if upload else unquote(name.removeprefix('/'))}"
        self.server.requests.append((self.command, name))
        fault = self.server.fault(self.command, name)
        if fault == "stall":
            time.sleep(STALL_S)
            self.close_connection = True
            return
        if isinstance(fault, int):
            return self.answer(fault)
        with self.server.lock:
            status, body, generation = self.execute(name, query, content, upload)
        self.answer(503) if fault == "lost" else self.answer(status, body, generation)

    do_GET = do_POST = do_DELETE = handle_any

    def execute(self, name: str, query: dict[str, str], content: bytes, upload: bool) -> tuple[int, bytes, int]:
        objects = self.server.objects
        generation, stored = objects.get(name, (0, b""))
        if upload or self.command == "DELETE":
            if int(query.get("ifGenerationMatch", generation)) != generation:
                return 412, b"", 0
            if self.command == "DELETE":
                return (204 if objects.pop(name, None) else 404), b"", 0
            self.server.last += 1
            objects[name] = self.server.last, content
            return 200, json.dumps(self.metadata(name)).encode(), self.server.last
        if query.get("alt") == "media":
            return self.media(generation, stored, query)
        if not name.endswith("/"):
            return (200, json.dumps(self.metadata(name)).encode(), 0) if generation else (404, b"", 0)
        names = sorted(one for one in objects if one.startswith(name + query.get("prefix", "")))
        return 200, json.dumps({"items": [self.metadata(one) for one in names]}).encode(), 0

    def media(self, generation: int, content: bytes, query: dict[str, str]) -> tuple[int, bytes, int]:
        if not generation:
            return 404, b"", 0
        if query.get("ifGenerationNotMatch") == str(generation):
            return 304, b"", generation
        span = self.headers.get("range")
        if not span:
            return 200, content, generation
        first, last = span.removeprefix("bytes=").split("-")
        if int(first) >= len(content):
            return 416, b"", 0
        last = min(int(last or len(content)), len(content) - 1)
        self.range = f"bytes {first}-{last}/{len(content)}"
        return 206, content[int(first) : last + 1], generation

    def metadata(self, name: str) -> dict[str, str]:
        generation, content = self.server.objects[name]
        return {
            "bucket": name.partition("/")[0],
            "name": name.partition("/")[2],
            "generation": str(generation),
            "size": str(len(content)),
            "metageneration": "1",
            "timeCreated": f"2026-01-01T00:00:00.{generation % 1000:03}Z",
            "updated": "2026-01-01T00:00:00Z",
        }

    def answer(self, status: int, body: bytes = b"", generation: int = 0) -> None:
        if status >= 400:
            body = json.dumps({"error": {"code": status, "message": f"it says {status}"}}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if generation:
            self.send_header("x-goog-generation", str(generation))
        if status == 206:
            self.send_header("content-range", self.range)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fake_gcs(patch: pytest.MonkeyPatch, cache: Path) -> Iterator[FakeGcs]:
    """Redirects this process and its children to a fake bucket, with short timeouts."""
    server = FakeGcs()
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
    patch.setenv("XDG_CACHE_HOME", str(cache))
    for name, seconds in (("DEADLINE_S", 4.0), ("ATTEMPT_S", 0.7), ("PAUSE_S", 0.01), ("MOST_PAUSE_S", 0.05)):
        patch.setattr(bucket, name, seconds)
    bucket._driver.cache_clear()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
