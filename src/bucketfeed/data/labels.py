"""Class labels from the folders that objects lie in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bucketfeed.data.dataset import MapDataset
from bucketfeed.data.parts import DecodedIndex
from bucketfeed.data.views import check_fixed, unchanged, with_fields
from bucketfeed.errors import ConfigError
from bucketfeed.formats.samples import AnyIndex
from bucketfeed.store.ranges import Buffer

_BLOCK = 1 << 20


class FolderIndex(DecodedIndex):
    """A `DecodedIndex` whose samples also have the number of their object's folder."""

    def __init__(
        self, base: AnyIndex, decode: Callable[[Any], Any] | None, classes: tuple[str, ...], level: int, field: str
    ) -> None:
        super().__init__(base, decode)
        self._made = (base, decode, classes, level, field)
        self._numbers = {name: number for number, name in enumerate(classes)}

    @property
    def classes(self) -> tuple[str, ...]:
        """The folders' names, in the order that labels count."""
        return self._made[2]

    def sample(self, i: int, buffer: Buffer) -> Any:
        """Return sample `i` with its label."""
        *_, level, field = self._made
        key = self.manifest.key(int(self.locate(np.array([i]))[0][0]))
        label = self._numbers[_folder(key, level) or ""]
        return with_fields(super().sample(i, buffer), {field: label}, "folder_labels")

    def __reduce__(self) -> tuple[Callable[..., FolderIndex], tuple[Any, ...]]:
        return type(self), self._made


def folder_labels(
    dataset: MapDataset, *, level: int = 0, classes: Sequence[str] | None = None, field: str = "label"
) -> MapDataset:
    """Return `dataset` with a field more: the number of the folder that each sample's object lies in, from 0 on.

    The folders' names, sorted, are `classes` of the result; they are taken from all objects listed, so that parts of a
    data set have the same labels. A sample that is no dict becomes field `value`. Looks at each key once, and reads
    nothing.

    Args:
        dataset: of any format: of an object that holds several samples, all have the same label.
        level: which folder of the key, as in a list: 0 is the first one under the data set's URL, -1 the innermost.
        classes: the names in the order that labels shall count, instead: as the training data has them, say.
        field: the label's name.

    Raises `ConfigError` where a sample's object lies in no such folder.

    >>> pets = bf.folder_labels(bf.open_dataset("s3://bucket/pets/", decode=bf.decoders.auto))
    """
    check_fixed(dataset.index, "folder_labels")
    if isinstance(level, bool) or not isinstance(level, int):
        raise ConfigError(f"level must be a whole number, not {level!r}")
    manifest = dataset.manifest
    found: dict[str | None, int] = {}
    numbers = (found.setdefault(_folder(manifest.key(i), level), len(found)) for i in range(len(manifest)))
    folders = np.fromiter(numbers, np.int32, len(manifest))
    names = tuple(sorted(name for name in found if name is not None) if classes is None else classes)
    if len(set(names)) < len(names):
        raise ConfigError(f"classes must be different names, not {classes!r}")
    bad = np.array([name not in names for name in found], bool)[folders]
    n = len(dataset)
    for at in range(0, n, _BLOCK):
        shards = dataset.index.locate(np.arange(at, min(at + _BLOCK, n)))[0]
        if bad[shards].any():
            shard = int(shards[bad[shards].argmax()])
            folder = _folder(manifest.key(shard), level)
            why = f"no folder at level {level}" if folder is None else f"folder {folder!r}, none of the classes given"
            raise ConfigError(
                f"folder_labels: {manifest.object_url(shard)} has {why}, and so {int(bad.sum()):,} of "
                f"{len(manifest):,} objects; give another level or more classes, or leave them out by select"
            )
    index = FolderIndex(dataset.index, dataset.decode, names, level, field)
    return dataset._with(index=index, decode=None if dataset.decode is None else unchanged)


def _folder(key: str, level: int) -> str | None:
    folders = key.split("/")[:-1]
    return folders[level] if -len(folders) <= level < len(folders) else None
