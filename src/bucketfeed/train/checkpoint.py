"""Checkpoints: one file each, visible only when whole, in a folder or at any fsspec URL."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash

from bucketfeed.errors import AccessError, BucketfeedError, CacheError, NotFoundError, ResumeError
from bucketfeed.store.access import bucket_access
from bucketfeed.store.faults import Fault, fault_of, our_error
from bucketfeed.store.fsspec import open_filesystem
from bucketfeed.store.urls import parse_url

_log = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint-(\d{6,})\.epoch-\d+\.sample-\d+\.([0-9a-f]{16})\.pt")
_KEPT = 2
_SAVING = ".saving-"


class Checkpoints:
    """The checkpoints of one run. The last two are kept, so that a broken one has one before it.

    A name tells how many were saved before it, where the run stood, and the file's xxh3:
    `checkpoint-000007.epoch-1.sample-640.<16 hex digits>.pt`. The number, not the epoch, says which is newest: a run
    that starts anew in the same place comes after what it finds there. One process of a run uses this.
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        parsed = parse_url(url)
        self.url = str(parsed).rstrip("/")
        access = bucket_access(parsed.scheme, storage_options)
        protocol, options = access.fsspec() if access else (parsed.scheme, storage_options or {})
        self._files = open_filesystem(protocol, options)
        self._folder = self._files._strip_protocol(self.url.replace(parsed.scheme, protocol, 1))
        self._local = parsed.scheme == "file"

    def save(self, state: dict[str, Any], epoch: int, position: int) -> str:
        """Write `state` and make it visible at once; then remove all but the last two. Returns its URL.

        Raises `CacheError`, `AccessError` or `NotFoundError` where that cannot be done.
        """
        try:
            if self._local:
                os.makedirs(self._folder, exist_ok=True)
                for left in Path(self._folder).glob(f"{_SAVING}*"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=self._folder if self._local else None, prefix=_SAVING) as folder:
                written = Path(folder) / "state"
                torch.save(state, written)
                number = max(map(_number, self._names()), default=-1) + 1
                name = f"checkpoint-{number:06}.epoch-{epoch}.sample-{position}.{_digest(written)}.pt"
                self._publish(written, name)
            for old in self._names()[:-_KEPT]:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(f"{self._folder}/{old}")
        except BucketfeedError:
            raise
        except Exception as e:  # torch says a full disk by RuntimeError
            raise _unwritable(self.url, e) from e
        return f"{self.url}/{name}"

    def load(self) -> dict[str, Any] | None:
        """Return the newest state that is whole, or None where there is none at all.

        A broken one is passed over with a warning. Raises `ResumeError` where there are only broken ones, and
        `AccessError` or `ReadError` where the store can't be read: an older state must not replace a newer one
        because of the network.
        """
        names = self._names()
        for name in reversed(names):
            try:
                return self._read(name)
            except (ResumeError, NotFoundError) as e:
                _log.warning("%s; trying the checkpoint before it", e)
        if names:
            raise ResumeError(
                f"none of the {len(names)} checkpoints in {self.url} is whole; start anew with --resume never"
            )
        return None

    def _publish(self, written: Path, name: str) -> None:
        if not self._local:
            self._files.put_file(str(written), f"{self._folder}/{name}")  # appears when its upload is complete
            return
        with written.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(written, f"{self._folder}/{name}")
        directory = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(directory)  # the name too must outlive a power cut before older ones go
        finally:
            os.close(directory)

    def _read(self, name: str) -> dict[str, Any]:
        match = _NAME.fullmatch(name)
        assert match is not None
        with tempfile.TemporaryDirectory(prefix="bucketfeed-") as folder:
            path = Path(f"{self._folder}/{name}")
            if not self._local:
                path = Path(folder) / "state"
                try:
                    self._files.get_file(f"{self._folder}/{name}", str(path))
                except Exception as e:
                    raise our_error(e, f"{self.url}/{name}") from e
            found = _digest(path)
            if found != match[2]:
                raise ResumeError(f"{self.url}/{name} is broken: its checksum is {found}")
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
        names = (path.rsplit("/", 1)[-1] for path in listed)
        return sorted(filter(_NAME.fullmatch, names), key=_number)


def save_model(folder: Path, model: torch.nn.Module, about: dict[str, Any]) -> None:
    """Write `model.pt`, the weights as `load_state_dict` takes them, and `model.json` beside it; each appears whole.

    Raises `CacheError` or `AccessError` where that cannot be done.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_SAVING) as saving:
            weights, described = Path(saving, "model.pt"), Path(saving, "model.json")
            torch.save(model.state_dict(), weights)
            described.write_text(json.dumps(about) + "\n", encoding="utf-8")
            for written in (weights, described):
                os.replace(written, folder / written.name)
    except Exception as e:  # torch says a full disk by RuntimeError
        raise _unwritable(str(folder), e, "the model") from e


def _number(name: str) -> int:
    return int(name.split("-")[1].split(".")[0])


def _unwritable(url: str, error: Exception, what: str = "the checkpoint") -> BucketfeedError:
    said = " ".join(str(error).split()) or type(error).__name__
    match fault_of(error):
        case Fault.MISSING:
            return NotFoundError(f"{what} can't be written to {url}: {said}; make the bucket, or name another")
        case Fault.REFUSED:
            return AccessError(f"{what} may not be written to {url}: {said}; allow it, or name another place")
    return CacheError(f"{what} could not be written to {url}: {said}; free space, or name another place")


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
