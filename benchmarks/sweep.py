"""Measures what chunk size and number of streams cost and give: ``python -m benchmarks.sweep --help``."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.contestants import Place
from benchmarks.material import Size, make
from benchmarks.run import contest, parser, warm
from benchmarks.server import S3Serve

MIB = 1 << 20
# chunk_bytes, streams: how large a request is, and from how many places of the data set a batch comes
PAIRS = [(1, 16), (1, 64), (2, 16), (4, 4), (4, 16), (4, 64), (8, 16), (16, 16)]


def main() -> None:
    """Run each pair in turn, several rounds, print a table and save it."""
    options = parser("python -m benchmarks.sweep", __doc__).parse_args()
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
    report.save(options.results, "sweep", results, _table(runs))


def _table(runs: list[dict[str, Any]]) -> str:
    columns = report.COLUMNS[:4]  # speed, first batch, memory, requests
    lines = [
        "# Chunk size and streams",
        "",
        "Cold epochs of the default Loader over tars, as in [loading.md](loading.md). Medians of the rounds (lowest "
        "to highest).",
        "",
        f"| chunk, MiB | streams | {' | '.join(title for title, _, _ in columns)} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for chunk, streams in PAIRS:
        found = [
            run["epochs"][0]
            for run in runs
            if (run["chunk_bytes"], run["streams"]) == (chunk * MIB, streams) and "failed" not in run
        ]
        cells = [report.spread([value(e) for e in found], shown) if found else "failed" for _, value, shown in columns]
        lines.append(f"| {chunk} | {streams} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
