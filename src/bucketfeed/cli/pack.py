"""Write what lies at SRC as WebDataset tars, with their index, to DST.

Files in a folder or bucket: each is a field of a sample, `a.jpg` and `a.cls` are two fields of sample `a`:

    bucketfeed pack photos/ s3://bucket/photos/

Lines of JSONL or rows of CSV, each a sample with field `json`; tars in another order and size:

    bucketfeed pack s3://bucket/rows/ s3://bucket/shards/ --shuffle 0 --max-shard-bytes 512MB --workers 8
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from typing import Any

from bucketfeed.cli import train as train_line
from bucketfeed.errors import BucketfeedError, ConfigError
from bucketfeed.platforms.local import STOPPED
from bucketfeed.store.sizes import format_size

EPILOG = """\
again:  a run that was stopped, failed or was killed goes on where it was when the same command is given: shards that
        are complete are not written again, and the result is that of one run. Other arguments, or a SRC that has
        changed, are refused; --force removes the shards that are there and begins anew.
names:  where objects have dots in their names, as in img.01.jpg, the sample is called img_01: in a tar the field begins
        at the first dot.
result: one line on stdout. bucketfeed.open_dataset(DST) takes the index from there.
exit codes: 0 done; 1 a store failed, or the data; 2 wrong arguments; 75 stopped by SIGTERM or Ctrl-C."""

_LINE_SECONDS = 30.0  # between lines about progress where nobody watches


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser."""
    p = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("src", metavar="SRC", help="s3://, gs://, a folder or file, or any other fsspec URL")
    p.add_argument("dst", metavar="DST", help="an empty place for the shards; also a URL or folder")
    p.add_argument("--max-shard-bytes", default="256MB", metavar="SIZE", help="of a shard at most (default: 256MB)")
    p.add_argument("--format", default="auto", metavar="NAME", help="of SRC: raw, tar, jsonl, csv, ... (default: auto)")
    p.add_argument("--shuffle", type=int, metavar="SEED", help="write in a random order, the same for the same seed")
    p.add_argument("--number-keys", action="store_true", help="call samples by their place instead of their own names")
    p.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: threads of this one)")
    for name in ("src", "dst"):
        p.add_argument(
            f"--{name}-options",
            type=train_line.json_object,
            metavar="JSON",
            help=f"storage_options of {name.upper()}",
        )
    p.add_argument("--dry-run", action="store_true", help="tell what would be written, and write nothing")
    p.add_argument("--force", action="store_true", help="remove shards of an earlier run from DST first")
    return p


def main(arguments: Sequence[str] | None = None, *, prog: str = "bucketfeed pack") -> int:
    """Write the shards; return the exit code."""
    options = parser(prog).parse_args(arguments)
    try:
        with _interruptible(prog):
            return _pack(options, prog)
    except KeyboardInterrupt:
        print(f"{prog}: stopped; the same command goes on from here", file=sys.stderr)
        return STOPPED
    except BrokenExecutor as e:
        print(f"{prog}: a worker has died ({e}); was it killed for memory? try fewer --workers", file=sys.stderr)
        return 1
    except BucketfeedError as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1


def _pack(options: argparse.Namespace, prog: str) -> int:
    from bucketfeed.data.dataset import open_dataset
    from bucketfeed.data.writing import plan_shards, write_shards

    if options.workers < 0:
        raise ConfigError(f"--workers must be 0 or more, not {options.workers}")
    watched = sys.stderr.isatty()
    dataset = open_dataset(options.src, format=options.format, storage_options=options.src_options, progress=watched)
    asked: dict[str, Any] = {
        "max_shard_bytes": options.max_shard_bytes,
        "shuffle": options.shuffle,
        "keys": "number" if options.number_keys else "own",
        "storage_options": options.dst_options,
    }
    if options.dry_run:
        print(f"would write {plan_shards(dataset, options.dst, **asked)}")
        return 0
    with _workers(options.workers) as executor:
        written = write_shards(
            dataset,
            options.dst,
            **asked,
            executor=executor,
            force=options.force,
            progress=True if watched else _Lines(prog),
        )
    print(f"{written} ({written.new_shards:,} shards written now)")
    return 0


class _Lines:
    """Tells of progress by a line now and then."""

    def __init__(self, prog: str, seconds: float = _LINE_SECONDS) -> None:
        self._prog, self._seconds = prog, seconds
        self._told_at = time.monotonic()
        self._told = 0

    def __call__(self, done: int, total: int | None) -> None:
        """Take note of the bytes that are done."""
        now = time.monotonic()
        if now - self._told_at <= self._seconds:
            return
        speed = format_size(int((done - self._told) / (now - self._told_at)))
        of = "" if total is None else f" of about {format_size(total)}"
        print(f"{self._prog}: {format_size(done)}{of} written, {speed}/s", file=sys.stderr, flush=True)
        self._told_at, self._told = now, done


@contextlib.contextmanager
def _workers(count: int) -> Iterator[Executor | None]:
    if not count:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_begin_worker) as pool:
        yield pool


def _begin_worker() -> None:
    """Leave Ctrl-C to the process that began this one, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began_by = multiprocessing.parent_process()
    assert began_by is not None

    def end_too() -> None:
        began_by.join()
        os._exit(1)

    threading.Thread(target=end_too, daemon=True).start()


@contextlib.contextmanager
def _interruptible(prog: str) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM end the run in order, and the second at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, lambda *_: os._exit(STOPPED))
        print(f"{prog}: stopping; what is under way is brought to an end", file=sys.stderr, flush=True)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
