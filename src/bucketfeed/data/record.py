"""How far a writing has come, kept beside the shards: what was asked, and which shards are complete."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from bucketfeed.data.packing import Shard
from bucketfeed.errors import ConfigError, ResumeError
from bucketfeed.formats.beside import INDEX, JOURNAL, is_ours, is_shard
from bucketfeed.formats.detect import is_sidecar
from bucketfeed.store.listing import Listed
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.readers import open_reader
from bucketfeed.store.writing import Writer

_VERSION = 1
_SHARE = 20  # between two writes of the record goes so many times as long as one takes: it costs little of the whole
_ANEW = "write to an empty place, or pass force=True (--force) to remove the shards there"


class Record:
    """The complete shards of a destination, by the number of their part; read where a run has left one.

    What a killed run has written and not yet recorded is written again, to the same bytes.

    Attributes:
        cuts: where parts begin, of a planned run.
        parts: the shards of each complete part.

    Raises `ConfigError` where other objects are in the way, and `ResumeError` for shards of a run that asked otherwise.
    """

    def __init__(self, writer: Writer, asked: Mapping[str, Any], options: Mapping[str, Any] | None) -> None:
        self._writer = writer
        self._options = options
        self._asked = dict(asked)
        self._due = 0.0
        self.cuts: list[int] | None = None
        self.parts: dict[int, list[Shard]] = {}

    def begin(self, *, force: bool) -> None:
        """Look at the destination; with `force` remove the shards of an earlier run."""
        listed = self._writer.listed()
        _refuse_others(self._writer.url, listed)
        if force:
            self._writer.delete([name for name in (INDEX, JOURNAL) if name in listed])
            self._writer.delete(sorted(filter(is_shard, listed)))
        elif JOURNAL in listed:
            self._take_over(self._found(listed[JOURNAL]), listed)
        elif ours := sorted(filter(is_ours, listed)):
            raise ResumeError(f"{self._writer.url} holds {ours[0]!r} and no record of what it belongs to; {_ANEW}")
        if JOURNAL in listed:
            self._writer.sweep(is_ours)

    def _found(self, listed: Listed) -> dict[str, Any]:
        url = self._writer.url
        manifest = Manifest.from_objects(url, [(url + JOURNAL, listed.size, listed.etag)])
        text = bytes(open_reader(url, self._options).read([manifest.range(0)])[0])
        try:
            found: dict[str, Any] = json.loads(text)
            if found["version"] != _VERSION:
                raise ValueError(f"version {found['version']}")
        except (ValueError, KeyError, TypeError) as e:
            raise ResumeError(f"{url}{JOURNAL} is no record of this version ({e}); {_ANEW}") from e
        return found

    def _take_over(self, found: dict[str, Any], listed: Mapping[str, Listed]) -> None:
        for name, now in self._asked.items():
            if (before := found["asked"].get(name)) != now:
                raise ResumeError(
                    f"{self._writer.url} holds shards of a run with {name} {before!r}, and now it is {now!r}; {_ANEW}"
                )
        self.cuts = found["cuts"]
        for number, rows in found["parts"].items():
            shards = [Shard(*row) for row in rows]
            if all(shard.name in listed and listed[shard.name].size == shard.size for shard in shards):
                self.parts[int(number)] = shards

    def add(self, number: int, shards: list[Shard]) -> None:
        """Keep that part `number` is complete."""
        self.parts[number] = shards
        if time.monotonic() >= self._due:
            self.save()

    def save(self) -> None:
        """Write the record."""
        began = time.monotonic()
        parts = {number: [shard[:4] for shard in self.parts[number]] for number in sorted(self.parts)}
        record = {"version": _VERSION, "asked": self._asked, "cuts": self.cuts, "parts": parts}
        self._writer.put(JOURNAL, json.dumps(record).encode() + b"\n")
        now = time.monotonic()
        self._due = now + _SHARE * (now - began) if self.parts else now

    def shards(self) -> list[Shard]:
        """Return all complete shards, in the order of their names."""
        return sorted((shard for part in self.parts.values() for shard in part), key=lambda shard: shard.name)


def _refuse_others(url: str, listed: Mapping[str, Listed]) -> None:
    others = sorted(name for name in listed if not is_ours(name) and not is_sidecar(name))
    if others:
        raise ConfigError(f"{url} holds {len(others)} other objects, as {others[0]!r}; write to an empty place")
