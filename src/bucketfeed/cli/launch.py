"""Start training somewhere.

On this machine, in two processes, on your bucket; all options that launch does not know go to train.py:

    python entrypoints/launch.py local --nproc-per-node 2 --data s3://bucket/train/ --epochs 3

The same on handwritten digits in a mocked S3 of its own, without any account:

    python entrypoints/launch.py local --demo --epochs 3

The demonstration: cold, warm, killed in mid-epoch and resumed, with a table and a picture:

    python entrypoints/launch.py demo
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bucketfeed.cli import ray, sagemaker
from bucketfeed.errors import BucketfeedError, ConfigError


def parser(prog: str = "launch.py") -> argparse.ArgumentParser:
    """Return the parser. Each place adds its own, with `run(options, rest) -> exit code` as a default."""
    p = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    places = p.add_subparsers(dest="place", required=True, metavar="PLACE")
    _add_local(places)
    _add_demo(places)
    ray.add_parser(places)
    sagemaker.add_parser(places)
    return p


def main(arguments: Sequence[str] | None = None, *, prog: str = "launch.py") -> int:
    """Start what was asked for; return the exit code of the training."""
    options, rest = parser(prog).parse_known_args(arguments)
    try:
        return int(options.run(options, rest))
    except BucketfeedError as e:
        print(f"{prog}: {e}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1


def _add_local(places: Any) -> None:
    local = places.add_parser(
        "local",
        help="this machine",
        description="Start train.py on this machine; see train.py --help for all other options.",
        epilog="The exit code is train.py's; 75: stopped by SIGTERM or Ctrl-C, goes on when started again.",
        allow_abbrev=False,
    )
    local.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="processes (default: 1)")
    local.add_argument("--demo", action="store_true", help="train on digits in a mocked S3 instead of --data")
    local.set_defaults(run=_run_local)


def _run_local(options: argparse.Namespace, rest: list[str]) -> int:
    from bucketfeed.platforms import local

    if not options.demo:
        return local.run(local.train_command(rest, processes=options.nproc_per_node))
    from bucketfeed.testing.digits import digits_bucket, digits_options

    with digits_bucket() as bucket:
        command = local.train_command([*digits_options(bucket), *rest], processes=options.nproc_per_node)
        return local.run(command, bucket.server.environment)


def _add_demo(places: Any) -> None:
    demo = places.add_parser("demo", help="show all of it on real data in a mocked S3", allow_abbrev=False)
    demo.add_argument("--run-dir", default="runs/demo", metavar="DIR", help="where results go (default: runs/demo)")
    demo.set_defaults(run=_run_demo)


def _run_demo(options: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise ConfigError(f"unknown arguments: {' '.join(rest)}")
    from bucketfeed.testing.demo import demonstrate

    return demonstrate(Path(options.run_dir))
