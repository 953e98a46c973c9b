"""Measures what chunk size and number of streams cost and give: ``python -m benchmarks.sweep --help``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.contestants import Place
from benchmarks.material import Size, make
from benchmarks.run import contest, warm
from benchmarks.server import S3Serve

MIB = 1 << 20
# chunk_bytes, streams: how large a request is, and from how many places of the data set a batch comes
PAIRS = [(1, 16), (1, 64), (2, 16), (4, 4), (4, 16), (4, 64), (8, 16), (16, 16)]


def main() -> None:
    """Run each pair in turn, several rounds, print a table and save it."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__)
    p.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "bucketfeed-benchmarks")
    p.add_argument("--results", type=Path, default=Path(__file__).with_name("results"), help="default: %(default)s")
    p.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    p.add_argument("--latency-ms", type=float, default=20, help="to the first byte (default: %(default)s)")
    options = p.parse_args()
    work: Path = options.work
    make(work / "objects", Size())
    warm(work / "objects")
    with S3Serve(work / "objects", work, options.latency_ms) as server:
        place = Place(server.endpoint_url, str(work / "cache"), str(work / "kept"), shards=0, epochs=1)
        contest("bucketfeed", replace(place, epochs=0), work)  # makes the index
        runs: list[dict[str, Any]] = []
        for number in range(options.rounds):
            for chunk, streams in PAIRS:
                loader = {"chunk_bytes": chunk * MIB, "streams": streams}
                run = {**loader, "round": number + 1, **contest("bucketfeed", replace(place, loader=loader), work)}
                print(f"{chunk} MiB, {streams} streams: {report.line(run)}", file=sys.stderr)
                runs.append(run)
    results = {"size": asdict(Size()), "latency_ms": options.latency_ms, "machine": report.machine(), "runs": runs}
    text = _table(runs)
    print(text)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "sweep.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.results / "sweep.md").write_text(text)


def _table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "# Chunk size and streams",
        "",
        "Cold epochs of the default Loader over tars, as in [loading.md](loading.md). Medians of the rounds (lowest "
        "to highest).",
        "",
        "| chunk, MiB | streams | samples/s | first batch, s | peak PSS, MB | requests a sample |",
        "|---|---|---|---|---|---|",
    ]
    for chunk, streams in PAIRS:
        found = [
            run["epochs"][0]
            for run in runs
            if (run["chunk_bytes"], run["streams"]) == (chunk * MIB, streams) and "failed" not in run
        ]
        cells = [
            _spread([e["samples"] / e["seconds"] for e in found], ",.0f"),
            _spread([e["first_batch_seconds"] for e in found], ".2f"),
            _spread([e["peak_pss"] / 1e6 for e in found], ",.0f"),
            _spread([e["requests"] / e["samples"] for e in found], ".3f"),
        ]
        lines.append(f"| {chunk} | {streams} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _spread(values: list[float], shown: str) -> str:
    return f"{median(values):{shown}} ({min(values):{shown}} to {max(values):{shown}})" if values else "failed"


if __name__ == "__main__":
    main()
