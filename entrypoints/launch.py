#!/usr/bin/env python
"""Start training somewhere.

On this machine, in two processes, on your bucket; all options that launch.py does not know go to train.py:

    python entrypoints/launch.py local --nproc-per-node 2 --data s3://bucket/train/ --epochs 3

The same on handwritten digits in a mocked S3 of its own, without any account:

    python entrypoints/launch.py local --demo --epochs 3

The demonstration: cold, warm, killed in mid-epoch and resumed, with a table and a picture:

    python entrypoints/launch.py demo
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parent / "train.py"


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    p = argparse.ArgumentParser(
        prog="launch.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    places = p.add_subparsers(dest="place", required=True, metavar="PLACE")
    local = places.add_parser(
        "local",
        help="this machine",
        description="Start train.py on this machine; see train.py --help for all other options.",
        epilog="The exit code is train.py's; 75: stopped by SIGTERM or Ctrl-C, goes on when started again.",
        allow_abbrev=False,
    )
    local.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="processes (default: 1)")
    local.add_argument("--demo", action="store_true", help="train on digits in a mocked S3 instead of --data")
    demo = places.add_parser("demo", help="show all of it on real data in a mocked S3")
    demo.add_argument("--run-dir", default="runs/demo", metavar="DIR", help="where results go (default: runs/demo)")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Start what was asked for; return the exit code of the training."""
    p = parser()
    options, rest = p.parse_known_args(arguments)
    if rest and options.place != "local":
        p.error(f"unknown arguments: {' '.join(rest)}")
    from bucketfeed.errors import BucketfeedError, ConfigError
    from bucketfeed.platforms import local

    try:
        if options.place == "demo":
            from bucketfeed.testing.demo import demonstrate

            return demonstrate(TRAIN, Path(options.run_dir))
        if not options.demo:
            return local.run(local.train_command(TRAIN, rest, processes=options.nproc_per_node))
        from bucketfeed.testing.digits import digits_bucket, digits_options

        with digits_bucket() as bucket:
            command = local.train_command(TRAIN, [*digits_options(bucket), *rest], processes=options.nproc_per_node)
            return local.run(command, bucket.server.environment)
    except BucketfeedError as e:
        print(f"launch.py: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
