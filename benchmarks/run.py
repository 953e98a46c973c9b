"""Runs every contestant in turn, several rounds, each in its own process: ``python -m benchmarks.run --help``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import memory, report
from benchmarks.ballast import Ballast
from benchmarks.contestants import CONTESTANTS, Place
from benchmarks.material import BUCKET, Size, make
from benchmarks.processes import tree_pss
from benchmarks.server import S3Serve

ROOT = Path(__file__).parents[1]
SAMPLING_SECONDS = 0.25  # each look costs the watched process some milliseconds
START_SECONDS = 120  # for imports, opening and an index, on top of the epochs' own bound


def main() -> None:
    """Make the data, measure, print the table and save it."""
    options = _arguments()
    size = Size(options.samples, options.image_bytes, options.samples_per_shard)
    work: Path = options.work
    print(f"benchmarks: making {size.samples:,} samples of {size.image_bytes:,} bytes in {work}", file=sys.stderr)
    make(work / "objects", size)
    warm(work / "objects")
    results: dict[str, Any] = {"size": asdict(size), "latency_ms": options.latency_ms, "machine": report.machine()}
    with S3Serve(work / "objects", work, options.latency_ms) as server:
        place = Place(
            endpoint_url=server.endpoint_url,
            cache=str(work / "cache"),
            kept=str(work / "kept"),
            shards=len(list((work / "objects" / BUCKET / "tar").iterdir())),
            epoch_seconds=options.epoch_seconds,
        )
        results["runs"] = _rounds(options.only, options.rounds, place, work)
    if not options.no_memory:
        results["memory"] = memory.measure(work, options.memory_samples, options.epoch_seconds)
    text = report.table(results, size)
    report.save(options.results, "loading", results, text)
    print(f"benchmarks: saved in {options.results}", file=sys.stderr)


def parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every measurement has: work, results, rounds, latency_ms."""
    p = argparse.ArgumentParser(prog=prog, description=description)
    p.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "bucketfeed-benchmarks",
        help="folder for data and caches, reused by later runs (8 GB at full size; default: %(default)s)",
    )
    p.add_argument("--results", type=Path, default=Path(__file__).with_name("results"), help="default: %(default)s")
    p.add_argument("--rounds", type=int, default=3, help="times that each contestant runs (default: %(default)s)")
    p.add_argument("--latency-ms", type=float, default=20, help="to the first byte (default: %(default)s)")
    return p


def _arguments() -> argparse.Namespace:
    p = parser("python -m benchmarks.run", __doc__)
    p.add_argument(
        "--only",
        nargs="+",
        choices=CONTESTANTS,
        default=list(CONTESTANTS),
        metavar="NAME",
        help=f"contestants to run, of: {', '.join(CONTESTANTS)}",
    )
    p.add_argument("--epoch-seconds", type=float, default=120, help="break an epoch off (default: %(default)s)")
    p.add_argument("--samples", type=int, default=Size.samples, help="default: %(default)s")
    p.add_argument("--image-bytes", type=int, default=Size.image_bytes, help="default: %(default)s")
    p.add_argument("--samples-per-shard", type=int, default=Size.samples_per_shard, help="default: %(default)s")
    p.add_argument("--no-memory", action="store_true", help="leave out pickled size and growth of forked workers")
    p.add_argument(
        "--memory-samples", type=int, default=5_000_000, help="of the pickled data set (default: %(default)s)"
    )
    return p.parse_args()


def _rounds(names: list[str], rounds: int, place: Place, work: Path) -> list[dict[str, Any]]:
    runs = []
    ready = []
    for name in names:
        package = name.partition("-")[0]
        if package in ("webdataset", "litdata") and importlib.util.find_spec(package) is None:
            print(
                f"benchmarks: {name} left out, since {package} is not installed (pip install '.[bench]')",
                file=sys.stderr,
            )
            continue
        ready.append(name)
        if name in ("bucketfeed", "bucketfeed-raw", "dataloader", "bucketfeed-workers", "litdata-raw"):
            contest(name, replace(place, epochs=0), work)  # makes the index that all its rounds find present
    for number in range(1, rounds + 1):
        for name in ready:
            print(f"benchmarks: round {number} of {rounds}: {name}", file=sys.stderr)
            run = {"contestant": name, "round": number, **contest(name, place, work)}
            print(f"benchmarks:   {report.line(run)}", file=sys.stderr)
            runs.append(run)
    return runs


def contest(name: str, place: Place, work: Path) -> dict[str, Any]:
    """Run one contestant; return its numbers by phase, with the peak PSS of its process tree in each."""
    shutil.rmtree(place.cache, ignore_errors=True)
    Path(place.cache).mkdir(parents=True)
    Path(place.kept).mkdir(parents=True, exist_ok=True)
    log = work / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contestants", name, json.dumps(asdict(place))],
            cwd=ROOT,
            env=_environment(place, work),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    lines: list[dict[str, Any]] = []
    listener = threading.Thread(target=_listen, args=(process, lines), daemon=True)
    listener.start()
    peaks = _watch(process, lines, time.monotonic() + START_SECONDS + place.epochs * place.epoch_seconds * 1.5)
    listener.join(timeout=10)
    if process.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-5:])
        return {"failed": f"exit code {process.returncode}; the end of {log}:\n{tail}"}
    opened = next(line for line in lines if "open_seconds" in line)
    epochs = [{**line, "peak_pss": peaks.get(f"epoch {line['epoch']}", 0)} for line in lines if "epoch" in line]
    return {**opened, "open_peak_pss": peaks.get("open", 0), "epochs": epochs}


def _listen(process: subprocess.Popen[str], lines: list[dict[str, Any]]) -> None:
    assert process.stdout is not None
    assert process.stdin is not None
    with contextlib.ExitStack() as held:
        for text in process.stdout:
            if not text.startswith("{"):
                continue
            lines.append(json.loads(text))
            if "phase" not in lines[-1]:
                continue
            held.close()
            if lines[-1]["phase"] == "epoch 1":
                held.enter_context(Ballast())
            with contextlib.suppress(OSError):  # it waits for this line before it begins
                process.stdin.write("go\n")
                process.stdin.flush()


def _watch(process: subprocess.Popen[str], lines: list[dict[str, Any]], deadline: float) -> dict[str, int]:
    """Wait for the process; return the peak PSS of each phase that it announced. Ends its whole session after it."""
    peaks: dict[str, int] = {}
    while process.poll() is None:
        phase = next((line["phase"] for line in reversed(lines) if "phase" in line), "start")
        peaks[phase] = max(peaks.get(phase, 0), tree_pss(process.pid))
        if time.monotonic() > deadline:
            break
        time.sleep(SAMPLING_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # workers that the contestant left behind, or all of it when late
    process.wait(timeout=30)
    return peaks


def _environment(place: Place, work: Path) -> dict[str, str]:
    return os.environ | {
        "AWS_ENDPOINT_URL": place.endpoint_url,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(work / "home"),
        "TQDM_DISABLE": "1",
    }


def warm(folder: Path) -> None:
    """Read all data once, so that the first contestant's server finds it in the page cache as the last one's does."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


if __name__ == "__main__":
    main()
