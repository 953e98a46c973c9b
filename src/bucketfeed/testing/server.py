"""A server of one's own: a process on a free port of this machine, which lives as long as its `with` block."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from types import TracebackType
from typing import Self

from bucketfeed.errors import ReadError

_START_SECONDS = 60.0


class ServerProcess:
    """A started server that answers; loopback only.

    Args:
        command: returns the command line for a port.
        answers_at: path that it answers once it is up.
        name: for the error where it does not start.
    """

    def __init__(self, command: Callable[[int], list[str]], answers_at: str, name: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.endpoint_url = f"http://127.0.0.1:{port}"
        self._command = command(port)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt is for who uses it: a notebook's stop button hits the whole group
        )
        try:
            self._wait_until_it_answers(self.endpoint_url + answers_at, name)
        except BaseException:  # of a Ctrl-C too nothing is left
            self.stop()
            raise

    def stop(self) -> None:
        """End the server; its contents are gone."""
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)

    def _wait_until_it_answers(self, url: str, name: str) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url, timeout=5).close()
                return
            time.sleep(0.05)
        code = self._process.poll()
        state = f"ended with {code}" if code is not None else f"did not answer within {_START_SECONDS:.0f} s"
        raise ReadError(f"{name} at {self.endpoint_url} {state}; try by hand: {' '.join(self._command)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
