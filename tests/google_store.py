"""A Google Cloud Storage that asks for a token, and the sign-in that gives one: each can end."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import google.auth.credentials
import google.auth.exceptions


class SignIn(google.auth.credentials.Credentials):
    """A user's sign-in: while it has `ended`, tokens are neither renewed nor taken by the store."""

    def __init__(self, *, ended: bool) -> None:
        super().__init__()
        self.ended = ended

    def refresh(self, request: Any) -> None:
        if self.ended:
            raise google.auth.exceptions.RefreshError("invalid_grant: Token has been expired or revoked.")
        self.token = "good"

    def end(self) -> None:
        self.ended = True


class Store:
    """Objects of the bucket "bucket" at `url`; after `reads` reads it takes tokens no longer, until `sign_in`."""

    def __init__(self, objects: dict[str, bytes], signed_in: SignIn, reads: int | None = None) -> None:
        self.objects, self.signed_in, self.reads = objects, signed_in, reads
        self.served: list[str] = []
        self.grants: list[str] = []  # of tokens that were asked for
        self.payers: set[str | None] = set()
        self.url = ""
        self._lock = threading.Lock()

    def sign_in(self) -> None:
        self.signed_in.ended, self.reads = False, None

    def take(self, key: str) -> bool:
        """Return whether a read of `key` is let through."""
        with self._lock:
            if self.reads is not None and len(self.served) >= self.reads:
                self.signed_in.end()
            if not self.signed_in.ended:
                self.served.append(key)
            return not self.signed_in.ended


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # as many as readers ask at the same time

    def handle_error(self, request: Any, address: Any) -> None:
        """Readers that were closed hang up."""


@contextlib.contextmanager
def store(objects: dict[str, bytes], signed_in: SignIn, reads: int | None = None) -> Iterator[Store]:
    served = Store(objects, signed_in, reads)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            is_xml = url.path.startswith("/bucket/")  # as obstore asks; gcsfs asks by the JSON interface
            _, _, name = url.path.partition("/bucket/" if is_xml else "/o/")
            key = urllib.parse.unquote(name)
            served.payers.add(self.headers.get("x-goog-user-project") or query.get("userProject"))
            if self.headers.get("Authorization") != "Bearer good":
                return self.answer(401, {"error": {"code": 401, "message": "Invalid Credentials"}})
            if not key:
                under = [described(k) for k in sorted(served.objects) if k.startswith(query.get("prefix", ""))]
                return self.answer(200, {"kind": "storage#objects", "items": under})
            if key not in served.objects:
                return self.answer(404, {"error": {"code": 404, "message": "no such object"}})
            if not is_xml and query.get("alt") != "media":
                return self.answer(200, described(key))
            if not served.take(key):
                return self.answer(401, {"error": {"code": 401, "message": "Invalid Credentials"}})
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            return self.answer(206, served.objects[key][int(first) : int(last) + 1])

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            served.grants.append(dict(urllib.parse.parse_qsl(body.decode()))["grant_type"])
            self.answer(200, {"access_token": "good", "expires_in": 3600, "token_type": "Bearer"})

        def answer(self, status: int, body: dict[str, Any] | bytes) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if status == 206:
                for name, value in (("ETag", '"one"'), ("x-goog-generation", "1")):
                    self.send_header(name, value)
                self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
                self.send_header("Content-Range", self.headers["Range"].replace("=", " ") + "/10")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def described(key: str) -> dict[str, Any]:
        about = {"kind": "storage#object", "bucket": "bucket", "name": key, "size": str(len(served.objects[key]))}
        return about | {"etag": "one", "generation": "1", "updated": "2026-01-01T00:00:00Z"}

    server = Quiet(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
