"""Which shards of a data set are the same as in an earlier index of it: only the others are scanned."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bucketfeed.errors import CacheError
from bucketfeed.formats.build import shards_of
from bucketfeed.formats.format import Format
from bucketfeed.formats.index_files import IndexFile
from bucketfeed.formats.journal import Journal
from bucketfeed.store.manifest import Manifest


@dataclass(frozen=True)
class Changes:
    """How the objects of a manifest differ from those of an earlier one; `str` tells it.

    Attributes:
        same: the number then of each object that is the same version now, by its number now.
        changed: keys of those that are another version, or whose store tells none.
        added: keys of new ones.
        removed: keys of those that are gone.
    """

    same: dict[int, int]
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]

    @classmethod
    def between(cls, then: Manifest, now: Manifest) -> Changes:
        """Return what has become of the objects, by key, size and etag."""
        numbers = {then.key(i): i for i in range(len(then))}
        same: dict[int, int] = {}
        changed: list[str] = []
        added: list[str] = []
        for i in range(len(now)):
            key = now.key(i)
            before = numbers.pop(key, None)
            if before is None:
                added.append(key)
            elif now.etag(i) and (now.etag(i), now.size(i)) == (then.etag(before), then.size(before)):
                same[i] = before
            else:
                changed.append(key)
        return cls(same, tuple(changed), tuple(added), tuple(numbers))

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.removed)

    def __str__(self) -> str:
        kinds = (("changed", self.changed), ("added", self.added), ("removed", self.removed))
        told = [f"{len(keys):,} {kind} (first {keys[0]!r})" for kind, keys in kinds if keys]
        return f"{len(self.same):,} objects unchanged, {', '.join(told) or 'none changed'}"


def take_unchanged(journal: Journal, manifest: Manifest, format: Format, earlier: Iterable[Path]) -> Changes | None:
    """Put into the journal what the first index of `earlier` that fits has of the shards that have not changed.

    Returns what has changed since that one; None where none fits.
    """
    for path in earlier:
        try:
            file = IndexFile.open(path)
        except CacheError:
            continue  # cut short, or of another version
        if not file.fits(manifest, format):
            continue
        with tempfile.TemporaryDirectory(prefix="bucketfeed-") as folder:
            then = Manifest.from_data(file.manifest_data, folder)
        changes = Changes.between(then, manifest)
        if not changes.same:
            continue
        indexed = set(shards_of(then, format))
        for shard, before in changes.same.items():
            if before in indexed and shard not in journal:
                journal.take(shard, *file.samples_of(before))
        return changes
    return None
