"""Uses the Ray cluster at the address given as users do, in one process, and tells on stdout what came of it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import ray

from bucketfeed.cli.launch import main
from bucketfeed.errors import ConfigError, FormatError, NotFoundError
from bucketfeed.formats.index import build_index
from bucketfeed.platforms.ray import RayExecutor, _board
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.readers import open_reader


def launched(*arguments: str) -> dict[str, Any]:
    """Return exit code and last line of `launch.py ray`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["ray", *arguments])
    lines = out.getvalue().splitlines()
    return {"code": code, "last": lines[-1] if lines else "", "connected": ray.is_initialized()}


def indexed(folder: Path) -> dict[str, Any]:
    """Return what an index that is built on Ray has in common with one that is built here."""
    good, bad = str(folder / "good"), str(folder / "bad")
    found: dict[str, Any] = {}
    with RayExecutor() as executor:
        manifest, here, there = Manifest.from_url(good, folder=folder), open_reader(good), open_reader(good)
        own = build_index(manifest, "tar", here, path=folder / "own.idx")
        other = build_index(manifest, "tar", there, path=folder / "other.idx", executor=executor)
        found["samples"] = len(other)
        found["same bytes"] = other.path.read_bytes() == own.path.read_bytes()
        found["same counts"] = there.counter.counts() == here.counter.counts()
        try:
            build_index(
                Manifest.from_url(bad, folder=folder), "tar", open_reader(bad), folder=folder, executor=executor
            )
        except FormatError as e:
            found["error"] = f"{type(e).__module__}.{type(e).__qualname__}: {e}"
        sleeper = executor.submit(time.sleep, 600)
        found["cancelled"] = sleeper.cancel()
        try:
            sleeper.result(timeout=0)
        except CancelledError:
            found["raises"] = True
        found["works on"] = executor.submit(divmod, 7, 2).result(timeout=60)
    return found


def refusals() -> list[Any]:
    """Return what workers hear that refuse to go on: both of two, then one that is alone with it, then later ones."""
    ours = _board(ray)
    both = ray.get([ours.refuse.remote(NotFoundError("no such bucket"), 2, 60.0) for _ in range(2)], timeout=60)
    another = _board(ray)
    alone = ray.get(another.refuse.remote(ConfigError("no such module"), 2, 0.1), timeout=60)
    return [both, alone, repr(ray.get(another.refused.remote(), timeout=60))]


def all_of_it(address: str, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Return what came of each: a run that loses a node, an index, a run that is stopped in a connection of ours."""
    common = ["--address", address, "--storage", str(folder / "storage"), *arguments]
    elastic = ["--num-workers", "2", "--min-workers", "1", "--max-failures", "1", "--epochs", "4"]
    found = {"falls": launched(*common, *elastic, "--name", "falls", "--run-dir", str(folder / "falls"))}
    ray.init(address=address, log_to_driver=False)
    found["index"] = indexed(folder)
    found["refusals"] = refusals()
    (Path(os.environ["FALLING"]) / "launcher").write_text(str(os.getpid()))
    found["stops"] = launched(*common, "--epochs", "200", "--name", "stops", "--run-dir", str(folder / "stops"))
    ray.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(all_of_it(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
