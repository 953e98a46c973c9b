"""An S3 of one object that misbehaves by script: each request takes the next act, and the last act stays."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BODY = bytes(range(256)) * 64
ETAG = '"e1"'


@dataclass
class Script:
    acts: list[Callable[[Any], None]]
    endpoint_url: str = ""
    requests: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def storage_options(self) -> dict[str, Any]:
        return {"key": "a", "secret": "b", "region": "us-east-1", "endpoint_url": self.endpoint_url}

    def next_act(self, request: str) -> Callable[[Any], None]:
        with self.lock:
            self.requests.append(request)
            return self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]


def serve(handler: Any, *, etag: str = ETAG, upto: int | None = None, body: bytes = BODY, ranged: bool = True) -> None:
    start, stop = 0, len(body)
    if ranged:
        first, last = handler.headers["Range"].removeprefix("bytes=").split("-")
        start, stop = int(first), int(last) + 1
    handler.send_response(206 if ranged else 200)
    handler.send_header("Content-Length", str(stop - start))
    if ranged:
        handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(body)}")
    handler.send_header("ETag", etag)
    handler.send_header("Last-Modified", "Tue, 01 Dec 2026 10:00:00 GMT")
    handler.end_headers()
    handler.wfile.write(body[start:stop][:upto])


def good(handler: Any) -> None:
    serve(handler)


def another_version(handler: Any) -> None:
    serve(handler, etag='"e2"')


def all_of_it(handler: Any) -> None:
    serve(handler, ranged=False)


def cut_body(handler: Any) -> None:
    serve(handler, upto=100)
    handler.close_connection = True


def reset(handler: Any) -> None:
    # Linger of 0 s: close with a reset.
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    handler.close_connection = True
    handler.connection.close()


def silent(handler: Any) -> None:
    serve(handler, upto=100)
    handler.server.script.released.wait(60)


def refuse(status: int, code: str, message: str = "as scripted") -> Callable[[Any], None]:
    def act(handler: Any) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/xml")
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text if handler.command == "GET" else b"")

    return act


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # Who signs: the access key stands in the header's credential.
        signer = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        self.server.script.next_act(signer)(self)  # type: ignore[attr-defined]

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        pass  # clients that hang up are part of the play


@contextmanager
def scripted_store(*acts: Callable[[Any], None]) -> Iterator[Script]:
    server = _Server(("127.0.0.1", 0), _Handler)
    script = Script(list(acts), f"http://127.0.0.1:{server.server_port}")
    server.script = script  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        script.released.set()
        server.shutdown()
        server.server_close()
