"""Builds and runs s3serve, the small S3 look-alike that all contestants read from."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from types import TracebackType

SOURCE = Path(__file__).with_name("s3serve.c")


class S3Serve:
    """An s3serve process on a free loopback port, for the length of a ``with`` block.

    Serves `root/<bucket>/<key>` with `latency_ms` before the first byte of each answer. Its own CPU time and memory
    are outside every contestant's numbers.
    """

    def __init__(self, root: Path, build_folder: Path, latency_ms: float) -> None:
        self._root = root
        self._build_folder = build_folder
        self._latency_ms = latency_ms
        self._process: subprocess.Popen[str] | None = None
        self.endpoint_url = ""

    def __enter__(self) -> S3Serve:
        program = _build(self._build_folder)
        self._process = subprocess.Popen(
            [program, "--root", self._root, "--port", "0", "--latency-ms", str(self._latency_ms)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        greeting = self._process.stdout.readline().split()  # "s3serve: http://127.0.0.1:PORT root=... objects=N"
        if len(greeting) < 2:
            raise RuntimeError(f"s3serve did not start on {self._root} (exit code {self._process.wait(10)})")
        self.endpoint_url = greeting[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(timeout=10)


def read_stats(endpoint_url: str) -> dict[str, float]:
    """Return what the server counted since the last call ("req", "bytes", ...), and start again from zero."""
    with urllib.request.urlopen(f"{endpoint_url}/__stats?reset=1", timeout=10) as answer:
        counted: dict[str, float] = json.load(answer)
    return counted


def _build(folder: Path) -> Path:
    program = folder / "s3serve"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise SystemExit("benchmarks: building s3serve needs a C compiler; none named cc or gcc is in PATH")
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, "-O2", "-o", program, SOURCE, "-lm"], check=True)
    return program
