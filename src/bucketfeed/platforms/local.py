"""Starts training on this machine: one process, or several by torchrun, on a given bucket or a mocked one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from bucketfeed.errors import ConfigError

TRAIN = "bucketfeed.cli.train"  # started by its name: a place needs the package installed, and no script of it
STOPPED = 75  # EX_TEMPFAIL, which train.py returns when it was asked to stop


def train_command(arguments: Sequence[str], *, processes: int = 1) -> list[str]:
    """Return the command that trains in `processes` processes."""
    if processes < 1:
        raise ConfigError(f"--nproc-per-node must be at least 1, not {processes}")
    if processes == 1:
        return [sys.executable, "-m", TRAIN, *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*torchrun, "-m", TRAIN, *arguments]


def start(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start `command` with this process's environment and what `environment` adds; options as `Popen`'s."""
    return subprocess.Popen(command, env={**os.environ, **(environment or {})}, **options)


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run `command` to its end and return its exit code.

    SIGTERM and Ctrl-C reach it once, and are waited for. `STOPPED` is returned where they have ended it: torchrun's
    own exit code tells only that it did not come to the end.
    """
    process: subprocess.Popen[Any] | None = None
    told = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told = True
        if process is not None:
            process.send_signal(signal.SIGTERM)  # for Ctrl-C too: after that torchrun gives its processes little time

    # Before the start, so that no moment is left in which a stop ends this process and leaves the other one behind.
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        process = start(command, environment, start_new_session=True)
        if told:
            process.send_signal(signal.SIGTERM)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return STOPPED if told and code else code
