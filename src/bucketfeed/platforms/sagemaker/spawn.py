"""Starts the ranks of one host, stays with them as PID 1 does, and tells which of their errors was the first."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from bucketfeed.platforms.local import STOPPED

_log = logging.getLogger(__name__)

# SageMaker kills two minutes after SIGTERM; what is left after this is ended here, so that the log can say so.
STOP_SECONDS = 105.0
# Between the first rank that failed and the end of the others, which may wait for it in a collective for ever.
FAILED_SECONDS = 10.0
_KEPT_LINES = 200

# What a rank says when another one is gone: never the first error.
_CONSEQUENCE = re.compile(
    r"closed by peer|reset by peer|broken pipe|did not meet the others|remote process exited|ncclRemoteError"
    r"|DistNetworkError|Watchdog caught collective|communicator was aborted|Application timeout caused pair closure",
    re.IGNORECASE,
)

_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # which torch puts before each line of a traceback, once ranks have met


@dataclass
class Rank:
    """A process of this host: its number among all, the last lines that it said, and how it ended."""

    number: int
    process: subprocess.Popen[str]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    readers: list[threading.Thread] = field(default_factory=list)
    code: int | None = None

    @property
    def failed(self) -> bool:
        """Whether it ended, and neither well nor as asked."""
        return self.code not in (None, 0, STOPPED)

    def kill(self, number: signal.Signals) -> None:
        """Send the signal, unless it has ended; SIGKILL to all that it started as well."""
        if self.code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)

    def error(self) -> str:
        """Return its last words: exception and traceback, or the last line, or the signal that ended it."""
        said = last_words(self.lines)
        if self.code is not None and self.code < 0:
            name = signal.Signals(-self.code).name
            cause = "; most often the host's memory was full" if name == "SIGKILL" else ""
            return f"ended by {name}{cause}" + (f"; its last words: {said}" if said else "")
        return said or f"ended with exit code {self.code}, and said nothing"


@dataclass(frozen=True)
class Ended:
    """How all ranks of the host ended: the exit code for the container, and the first error, if any."""

    code: int
    error: str | None = None
    consequence: bool = False  # of an error on another host


def run_ranks(command: Sequence[str], environments: Sequence[Mapping[str, str]], numbers: Sequence[int]) -> Ended:
    """Run `command` once with each environment, to the end of all; return how that was.

    Stops are passed on as SIGTERM, once; who is still there after `STOP_SECONDS` is killed. A rank that fails
    takes the others with it after `FAILED_SECONDS`. Children that others have left behind (as PID 1 this process
    inherits them) are reaped. Runs in the main thread.
    """
    ranks: list[Rank] = []
    with _passing_on(ranks) as told:
        for number, environment in zip(numbers, environments, strict=True):
            ranks.append(_start(number, command, environment))
            if told:
                ranks[-1].kill(signal.SIGTERM)
        ended = _waited(ranks)
    for rank in ranks:
        for reader in rank.readers:
            reader.join(timeout=2.0)  # a process that a rank has left behind may hold its pipe
    return _judged(ended, stopping=bool(told))


@contextlib.contextmanager
def _passing_on(ranks: list[Rank]) -> Iterator[list[int]]:
    """Pass stops on while the block runs; gives the list of the signals received."""
    told: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if len(told) > 1:
            return
        _log.warning("%s: training stops at its next step and saves", signal.Signals(number).name)
        signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS)
        for rank in ranks:
            rank.kill(signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.code is None:
                _log.error("rank %d is still there, and is killed", rank.number)
            rank.kill(signal.SIGKILL)

    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGALRM: end}
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield told
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        for number, handler in before.items():
            signal.signal(number, handler)
        for rank in ranks:
            rank.kill(signal.SIGKILL)  # only where this process itself has failed


def _start(number: int, command: Sequence[str], environment: Mapping[str, str]) -> Rank:
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    rank = Rank(number, process)
    for pipe, out, kept in ((process.stdout, sys.stdout, None), (process.stderr, sys.stderr, rank.lines)):
        reader = threading.Thread(target=_copy, args=(pipe, out, kept), daemon=True)
        reader.start()
        rank.readers.append(reader)
    return rank


def _copy(pipe: IO[str], out: IO[str], kept: deque[str] | None) -> None:
    """Pass lines through, each in one write, so that those of several ranks stay whole."""
    for line in pipe:
        if kept is not None:
            kept.append(line.rstrip("\n"))
        with contextlib.suppress(OSError):  # a log that can't be written must not stop who waits on the pipe
            out.write(line)
            out.flush()


def _waited(ranks: Sequence[Rank]) -> list[Rank]:
    """Wait for all; return them in the order in which they ended."""
    by_pid = {rank.process.pid: rank for rank in ranks}
    ended: list[Rank] = []
    while len(ended) < len(ranks):
        pid, status = os.waitpid(-1, 0)  # goes on by itself after a signal's handler
        rank = by_pid.get(pid)
        if rank is None:
            continue
        rank.code = rank.process.returncode = os.waitstatus_to_exitcode(status)
        ended.append(rank)
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        if rank.failed and (not left or left > FAILED_SECONDS):
            signal.setitimer(signal.ITIMER_REAL, FAILED_SECONDS)
    return ended


def _judged(ended: Sequence[Rank], *, stopping: bool) -> Ended:
    failed = [rank for rank in ended if rank.failed]
    if stopping:  # a rank that was not yet listening ends by the signal itself
        failed = [rank for rank in failed if rank.code != -signal.SIGTERM]
    if not failed:
        stopped = any(rank.code == STOPPED or (stopping and rank.code) for rank in ended)
        return Ended(STOPPED if stopped else 0)
    own = [rank for rank in failed if not _CONSEQUENCE.search(rank.error())]
    first = (own or failed)[0]
    code = first.code or 1
    return Ended(code if code > 0 else 128 - code, f"rank {first.number}: {first.error()}", consequence=not own)


def last_words(lines: Sequence[str] | deque[str]) -> str:
    """Return the last error in what a process wrote: an exception's text first, its traceback after."""
    said = [line for line in (_PREFIX.sub("", line) for line in lines) if line.strip()]
    starts = [n for n, line in enumerate(said) if line.startswith("Traceback (most recent call last)")]
    ours = [line for line in said if line.startswith("train.py: ")]
    if not starts:
        return ours[-1] if ours else said[-1] if said else ""
    frames = said[starts[-1] + 1 :]
    end = next((n for n, line in enumerate(frames) if not line.startswith(" ")), len(frames))
    if end == len(frames):
        return said[-1]
    return "\n".join([frames[end], *said[starts[-1] : starts[-1] + 1 + end]])
