"""Indexes at URLs: fetched whole, put whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketfeed.errors import CacheError
from bucketfeed.formats.index_files import HEAD_BYTES, check_replaceable, version_in
from bucketfeed.store.ahead import read_through
from bucketfeed.store.listing import find_object
from bucketfeed.store.ranges import Range
from bucketfeed.store.readers import open_reader
from bucketfeed.store.urls import parse_url
from bucketfeed.store.writing import Writer

_STEP_BYTES = 4 << 20


@dataclass(frozen=True)
class Place:
    """Where an index is kept: a URL of any store."""

    url: str
    storage_options: Mapping[str, Any] | None = None

    def version(self) -> str | None:
        """Return the version of the index that lies here; None where none does, or one that can't be read any more.

        Raises `ConfigError` where something else lies here.
        """
        found = self._whole()
        if found is None:
            return None
        head = bytes(self._reader().read([found._replace(stop=min(HEAD_BYTES, found.stop))])[0])
        check_replaceable(head, self.url)
        return version_in(head)

    def fetch(self, path: Path) -> None:
        """Publish the index that lies here at `path`. Raises `CacheError` where there is none, or no room for it."""
        found = self._whole()
        if found is None:
            raise CacheError(f"there is no index at {self.url}; check the URL, or build it with build_index")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
                for buffer in read_through(self._reader(), found, _STEP_BYTES):
                    file.write(buffer)
            os.replace(file.name, path)
        except OSError as e:
            raise CacheError(f"the index {self.url} can't be fetched to {path}: {e}; make room there") from e

    def put(self, path: Path) -> None:
        """Make the file at `path` what lies here. Raises `AccessError` or `WriteError`."""
        folder, _, name = self.url.rpartition("/")
        with (
            Writer(f"{folder}/" if folder else ".", self.storage_options).open(name) as upload,
            path.open("rb") as file,
        ):
            while data := file.read(_STEP_BYTES):
                upload.write(data)

    def _whole(self) -> Range | None:
        found = find_object(parse_url(self.url), self.storage_options)
        return None if found is None else Range(self.url, 0, found.size, found.etag or None)

    def _reader(self) -> Any:
        return open_reader(self.url, self.storage_options)
