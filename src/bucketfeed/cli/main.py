"""The command `bucketfeed`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bucketfeed.cli import launch, pack

_COMMANDS = {"launch": launch.main, "pack": pack.main}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that is named first, with all that follows it; return its exit code."""
    p = argparse.ArgumentParser(prog="bucketfeed", description="Feed a PyTorch training loop straight from a bucket.")
    p.add_argument(
        "command", choices=sorted(_COMMANDS), help="launch: start training somewhere; pack: write samples as shards"
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = p.parse_args(given[:1]).command
    return _COMMANDS[command](given[1:], prog=f"bucketfeed {command}")


if __name__ == "__main__":
    sys.exit(main())
