"""Runs training in a process of its own, with its output live in the notebook."""

from __future__ import annotations

import collections
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bucketfeed.errors import BucketfeedError
from bucketfeed.platforms.local import STOPPED, start, train_command

_LAST_LINES = 6
_STOP_SECONDS = 120.0
_END_SECONDS = 30.0


def train(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    show: Callable[[str], object],
    processes: int = 1,
) -> dict[str, Any]:
    """Train as `train.py` does with these arguments, give each line to `show` as it comes, return the results.

    The notebook's stop button lets it finish the step, save and end. Raises `BucketfeedError` with its last lines
    where it does not come to the end: a notebook runs on past a failed `!command`, and would show the results of an
    earlier run.
    """
    process = start(
        train_command(arguments, processes=processes),
        {**(environment or {}), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # the stop button interrupts the whole group of the kernel
    )
    last: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
    told = False
    try:
        try:
            _follow(process, show, last)
        except KeyboardInterrupt:
            told = True
            show("stopping: the step under way is finished and saved")
            process.send_signal(signal.SIGTERM)
            waker = threading.Timer(_STOP_SECONDS, process.kill)
            waker.start()
            try:
                _follow(process, show, last)
            finally:
                waker.cancel()
        code = process.wait(timeout=_END_SECONDS)
    finally:
        _end(process)
    if code == 0:
        return _result(last)
    if told or code == STOPPED:
        raise BucketfeedError(f"training was stopped; run this cell again to go on: {' '.join(list(last)[-1:])}")
    raise BucketfeedError(
        f"training ended with exit code {code}; what it said last:\n" + "\n".join(last) + _next_step("\n".join(last))
    )


def _follow(process: subprocess.Popen[Any], show: Callable[[str], object], last: collections.deque[str]) -> None:
    assert process.stdout is not None
    for raw in process.stdout:
        # A progress bar is one line that ends each of its states with "\r": the last one is enough.
        line = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
        if line:
            last.append(line)
        if line and not line.startswith("{"):  # the results, which the caller gets as values
            show(line)


def _result(last: Sequence[str]) -> dict[str, Any]:
    for line in reversed(last):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise BucketfeedError("training ended well, but printed no results: what it said is above")


def _next_step(said: str) -> str:
    if "AccessError" in said or "sign-in" in said:
        return (
            "\nNot signed in, or the sign-in has ended: run the sign-in cell, then this one; it goes on where it was."
        )
    return ""


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait(timeout=_END_SECONDS)
    if process.stdout is not None:
        process.stdout.close()
