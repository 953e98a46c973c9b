"""Write samples as WebDataset tars with their index: in parallel, resumable, each shard whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from typing import Any

from bucketfeed.data.dataset import MapDataset
from bucketfeed.data.packing import Keys, Packing, Shard, numbered, write_all
from bucketfeed.data.progress import Progress, shown
from bucketfeed.data.record import Record
from bucketfeed.data.shards import Plan, planned
from bucketfeed.errors import ConfigError, ResumeError
from bucketfeed.formats.beside import publish_index
from bucketfeed.store.ranges import Buffer
from bucketfeed.store.sizes import format_size, parse_size
from bucketfeed.store.uploads import Upload
from bucketfeed.store.whole import whole
from bucketfeed.store.writing import Writer

_THREADS = 4  # shards at a time, each with a few parts in flight
_MOST_SHARDS = 1_000_000  # whose names still sort when nobody knows how many there will be
_MOST_WORD = 2**64 - 1


@dataclass(frozen=True)
class Written:
    """What lies at `url` now. `new_shards` of them were written by this call, the others by earlier ones."""

    url: str
    shards: int
    samples: int
    total_bytes: int
    new_shards: int

    def __str__(self) -> str:
        return f"{self.samples:,} samples in {self.shards:,} shards, {format_size(self.total_bytes)}, at {self.url}"


def write_shards(
    samples: MapDataset | Iterable[Mapping[str, Any]],
    url: str | os.PathLike[str],
    *,
    max_shard_bytes: int | str = "256MB",
    shuffle: int | None = None,
    keys: Keys = "own",
    executor: Executor | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: Progress = True,
    force: bool = False,
) -> Written:
    """Write samples as WebDataset tars `shard-000000.tar`, ... under `url`, with their index beside them.

    Each shard appears whole. The same call after an interruption goes on: complete shards are not written again, and
    the result is that of a run without one. `open_dataset(url)` takes the index from there.

    Args:
        samples: a data set of `open_dataset`, whose shards are planned and then written in parallel: objects and
            fields of tars as they are, objects `a.jpg` and `a.json` as one sample, a row or line as field `json`. Or
            any dicts of `"__key__"` and fields, in their order: bytes as they are; `.txt` str, `.json` what JSON can
            say, `.cls` int, `.npy` NumPy array, `.png` and `.jpg` Pillow images.
        url: `s3://bucket/prefix/`, `gs://`, a folder, or any other fsspec URL; empty, or with shards of the same call.
        max_shard_bytes: a shard holds at least one sample and, if that is not larger, not more than this.
        shuffle: a seed: a data set's samples are written in a random order, the same for the same seed.
        keys: "own", or "number" to call samples by their place. Own keys of a data set get "_" for dots in their last
            part, where tars have the field's name begin.
        executor: writes the shards of a data set instead of threads of this process: a `ProcessPoolExecutor`, Dask's,
            Ray's, or any other whose workers see this machine's files. It is left running.
        storage_options: for `url`, as fsspec spells them.
        progress: show a bar where it takes longer than a second; or a function, called with the bytes that are done and
            of all (None where nobody knows).
        force: remove the shards of an earlier run first.

    Raises `ConfigError` for samples that can't be written, which it names, `ResumeError` where arguments or samples are
    not those of the shards that are there, `WriteError`, `AccessError` or `NotFoundError` where the store fails.

    >>> bf.write_shards(bf.open_dataset("photos/"), "s3://bucket/photos/", max_shard_bytes="256MB", shuffle=0)
    """
    asked = _Asked.of(samples, url, max_shard_bytes, shuffle, keys, storage_options)
    writer, max_bytes = asked.writer, asked.max_bytes
    record = Record(writer, asked.told(samples), storage_options)
    if isinstance(samples, MapDataset):
        record.begin(force=force)
        packing = Packing(samples, writer, max_bytes, keys)
        plan = planned(packing, asked.shuffle, record.cuts)
        record.cuts = plan.cuts
        new = _write_planned(packing, plan, record, executor, progress)
    else:
        if executor is not None or shuffle is not None:
            raise ConfigError(
                "executor= and shuffle= need a data set of open_dataset, whose samples can be read in any order; write "
                "these without, and then the data set of their shards with"
            )
        record.begin(force=force)
        new = _write_in_order(numbered(samples, keys), writer, max_bytes, record, progress)
    shards = record.shards()
    publish_index(writer, [shard.where for shard in shards], storage_options)
    return Written(
        writer.url, len(shards), sum(shard.samples for shard in shards), sum(shard.size for shard in shards), new
    )


def plan_shards(
    dataset: MapDataset,
    url: str | os.PathLike[str],
    *,
    max_shard_bytes: int | str = "256MB",
    shuffle: int | None = None,
    keys: Keys = "own",
    storage_options: dict[str, Any] | None = None,
) -> str:
    """Return in words what `write_shards` would write; raises as it does for what can be seen before."""
    asked = _Asked.of(dataset, url, max_shard_bytes, shuffle, keys, storage_options)
    plan = planned(Packing(dataset, asked.writer, asked.max_bytes, keys), asked.shuffle)
    there = len(asked.writer.listed())
    return (
        f"{len(plan.first) - 1:,} samples in about {len(plan):,} shards, about {format_size(plan.total_bytes)}, to "
        f"{asked.writer.url}, which holds {there:,} objects"
    )


@dataclass(frozen=True)
class _Asked:
    """Arguments that have been checked."""

    writer: Writer
    max_bytes: int
    shuffle: int | None
    keys: Keys

    @classmethod
    def of(
        cls,
        samples: Any,
        url: str | os.PathLike[str],
        max_shard_bytes: int | str,
        shuffle: int | None,
        keys: Keys,
        options: dict[str, Any] | None,
    ) -> _Asked:
        max_bytes = parse_size(max_shard_bytes, "max_shard_bytes")
        if not max_bytes:
            raise ConfigError("max_shard_bytes must be at least 1")
        if keys not in ("own", "number"):
            raise ConfigError(f"keys must be 'own' or 'number', not {keys!r}")
        seed = None if shuffle is None else whole("shuffle", shuffle, 0, _MOST_WORD)
        writer = Writer(url, options)
        if isinstance(samples, MapDataset):
            manifest = samples.manifest
            within = writer.url.startswith(manifest.url) and len(manifest) > 1  # one alone may have been named itself
            if within or manifest.object_url(0).startswith(writer.url):
                raise ConfigError(f"{writer.url} and the samples at {manifest.url} lie in one another; write elsewhere")
        return cls(writer, max_bytes, seed, keys)

    def told(self, samples: Any) -> dict[str, Any]:
        """Return what a resumed run must ask again."""
        named = _named(samples) if isinstance(samples, MapDataset) else None  # of others the bytes are compared
        return {"samples": named, "max_shard_bytes": self.max_bytes, "shuffle": self.shuffle, "keys": self.keys}


def _named(samples: MapDataset) -> list[Any]:
    decode, index = samples.decode, samples.index
    name = None if decode is None else getattr(decode, "__qualname__", type(decode).__qualname__)
    code = getattr(getattr(decode, "__code__", None), "co_code", b"")
    return [
        *(index.manifest.url, index.manifest.version, index.fingerprint, len(samples)),
        *(name, hashlib.blake2b(code, digest_size=8).hexdigest()),
    ]


def _write_planned(
    packing: Packing,
    plan: Plan,
    record: Record,
    executor: Executor | None,
    progress: Progress,
) -> int:
    """Write the parts that are not complete; return how many shards that were."""
    todo = [number for number in range(len(plan)) if number not in record.parts]
    done = sum(shard.size for shard in record.shards())
    record.save()
    new = 0

    def keep(number: int, shards: list[Shard]) -> None:
        nonlocal new
        new += len(shards)
        record.add(number, shards)
        if executor:
            advance(sum(shard.size for shard in shards))

    with (
        shown(packing.writer.url, done, plan.total_bytes, progress) as advance,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="bucketfeed-write") as pool,
    ):
        packing.advance = advance
        call = packing.elsewhere() if executor else packing
        running: dict[Future[list[Shard]], int] = {}
        try:
            for number in todo:
                running[(executor or pool).submit(call, plan.part(number))] = number
            for future in as_completed(running.copy()):
                shards = future.result()
                keep(running.pop(future), shards)
        except BaseException:
            packing.stopped = True
            for future in running:
                future.cancel()
            wait(running)  # what is under way elsewhere is completed, and kept as well
            for future, number in running.items():
                if not future.cancelled() and future.exception() is None:
                    keep(number, future.result())
            raise
        finally:
            record.save()
    return new


def _write_in_order(
    samples: Iterator[Any],
    writer: Writer,
    max_bytes: int,
    record: Record,
    progress: Progress,
) -> int:
    """Write samples as they come; of shards that are there the bytes are compared. Return how many were written."""
    there = {shard.name: shard for shard in record.shards()}
    names = (f"shard-{number:06}.tar" for number in range(_MOST_SHARDS))

    @contextlib.contextmanager
    def opened(name: str) -> Iterator[Upload]:
        if name in there:
            yield _Unwritten()
        else:
            with writer.open(name) as upload:
                yield upload

    new = 0
    came = set()
    with shown(writer.url, 0, None, progress) as advance:
        try:
            record.save()
            for number, shard in enumerate(write_all(samples, names, max_bytes, opened)):
                if there.get(shard.name, shard)[:4] != shard[:4]:
                    raise ResumeError(
                        f"{writer.url}{shard.name} would become other bytes than are there: the samples have changed; "
                        "pass force=True to remove the shards and write all anew"
                    )
                new += shard.name not in there
                came.add(shard.name)
                advance(shard.size)
                record.add(number, [shard])
            if extra := sorted(there.keys() - came):
                raise ResumeError(
                    f"the samples end before {writer.url}{extra[0]}, which is there: they have changed; pass "
                    "force=True to remove the shards and write all anew"
                )
            if not came:
                raise ConfigError(f"there are no samples to write to {writer.url}")
        finally:
            record.save()
    return new


class _Unwritten:
    """Takes the bytes of a shard that is there."""

    def write(self, data: Buffer) -> None:
        pass

    commit = abort = lambda self: None
