"""A way to a store on which one object is held back, so that a run that writes it can't end meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Gate:
    """Forwards bytes, and holds back what names `held` until it is opened."""

    held: bytes
    target: tuple[str, int]
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    server: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.server.getsockname()[1]}"

    def serve(self) -> None:
        with contextlib.suppress(OSError):  # until it is closed
            while True:
                client = self.server.accept()[0]
                store = socket.create_connection(self.target)
                for ends in ((client, store, self.held), (store, client, b"\0never\0")):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, held: bytes) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if held in data:
                    self.reached.set()
                    self.opened.wait(60)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def gate(endpoint_url: str, held: str) -> Iterator[Gate]:
    parts = urlsplit(endpoint_url)
    assert parts.hostname is not None
    assert parts.port is not None
    found = Gate(held.encode(), (parts.hostname, parts.port))
    threading.Thread(target=found.serve, daemon=True).start()
    try:
        yield found
    finally:
        found.opened.set()
        found.server.close()
