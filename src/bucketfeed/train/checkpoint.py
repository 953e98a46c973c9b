"""Checkpoints: one file each, visible only when whole, in a folder or at any fsspec URL."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash

from bucketfeed.errors import CacheError, ResumeError
from bucketfeed.store.faults import our_error
from bucketfeed.store.fsspec import open_filesystem
from bucketfeed.store.s3 import S3Access
from bucketfeed.store.urls import parse_url

_log = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint-(\d{6})-(\d{14})-([0-9a-f]{16})\.pt")
_KEPT = 2


class Checkpoints:
    """The checkpoints of one run, newest last. The last two are kept, so that a broken one has one before it.

    A name tells epoch, position and checksum: `checkpoint-000001-00000000000640-<xxh3 of the file>.pt`.
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        parsed = parse_url(url)
        self.url = str(parsed).rstrip("/")
        options = storage_options or {}
        if parsed.scheme == "s3":
            options = S3Access.from_options(storage_options).s3fs_options()
        self._files = open_filesystem(parsed.scheme, options)
        self._folder = self._files._strip_protocol(self.url)
        self._local = parsed.scheme == "file"

    def save(self, state: dict[str, Any], epoch: int, position: int) -> str:
        """Write `state` and make it visible at once; then remove all but the last two. Returns its URL."""
        try:
            if self._local:
                os.makedirs(self._folder, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder if self._local else None, prefix=".saving-") as folder:
                written = Path(folder) / "state"
                torch.save(state, written)
                name = f"checkpoint-{epoch:06}-{position:014}-{_digest(written)}.pt"
                if self._local:
                    with written.open("rb") as file:
                        os.fsync(file.fileno())
                    os.replace(written, f"{self._folder}/{name}")
                else:
                    # An object appears when its upload is complete.
                    self._files.put_file(str(written), f"{self._folder}/{name}")
            for old in self._names()[:-_KEPT]:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(f"{self._folder}/{old}")
        except OSError as e:
            raise CacheError(f"the checkpoint could not be written to {self.url}: {e}; free space or move it") from e
        return f"{self.url}/{name}"

    def load(self) -> dict[str, Any] | None:
        """Return the newest state that is whole, or None where there is none at all.

        Raises `ResumeError` where there are checkpoints, but all of them are broken.
        """
        names = self._names()
        for name in reversed(names):
            try:
                return self._read(name)
            except Exception as e:
                _log.warning("checkpoint %s/%s is broken (%s); trying the one before it", self.url, name, e)
        if names:
            raise ResumeError(
                f"none of the {len(names)} checkpoints in {self.url} can be read; start with --resume never"
            )
        return None

    def _read(self, name: str) -> dict[str, Any]:
        match = _NAME.fullmatch(name)
        assert match is not None
        with tempfile.TemporaryDirectory(prefix="bucketfeed-") as folder:
            path = Path(f"{self._folder}/{name}")
            if not self._local:
                path = Path(folder) / "state"
                self._files.get_file(f"{self._folder}/{name}", str(path))
            if _digest(path) != match[3]:
                raise ResumeError(f"the file's checksum is {_digest(path)}")
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            return state

    def _names(self) -> list[str]:
        try:
            self._files.invalidate_cache()
            listed = self._files.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        except Exception as e:
            raise our_error(e, self.url) from e
        return sorted(name for path in listed if _NAME.fullmatch(name := path.rsplit("/", 1)[-1]))


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
