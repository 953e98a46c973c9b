"""Measures rows of JSONL, Parquet and .npy beside Hugging Face datasets and memmap: ``python -m benchmarks.rows``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.contestants import BATCH, SEED, WORKERS, Epoch, Place
from benchmarks.material import BUCKET
from benchmarks.run import contest, parser, warm
from benchmarks.server import S3Serve

FILES = 8
ROW_BYTES = 300  # of a line of JSON, about
COLUMNS = 64  # of the array: rows of 256 bytes
BUFFER = 1_000  # rows, the shuffle buffer of datasets' own documentation
_WORDS = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor " * 4


def jsonl(place: Place) -> Epoch:
    """bucketfeed: JSONL, Loader as it comes, index present."""
    return _bucketfeed(place, "jsonl")


def jsonl_datasets(place: Place) -> Epoch:
    """datasets: JSONL, streaming with a shuffle buffer of 1,000 rows, stock DataLoader in this process."""
    return _datasets(place, "jsonl", workers=0)


def jsonl_datasets_workers(place: Place) -> Epoch:
    """datasets: the same with 2 worker processes."""
    return _datasets(place, "jsonl", workers=WORKERS)


def parquet(place: Place) -> Epoch:
    """bucketfeed: Parquet, Loader as it comes: a dict a row, collated."""
    return _bucketfeed(place, "parquet")


def parquet_batches(place: Place) -> Epoch:
    """bucketfeed: Parquet, batch_format="torch": whole batches without an object a row."""
    import bucketfeed as bf

    return _bucketfeed(place, "parquet", format=bf.Parquet(batch_format="torch"))


def parquet_datasets(place: Place) -> Epoch:
    """datasets: Parquet, streaming with a shuffle buffer of 1,000 rows, stock DataLoader in this process."""
    return _datasets(place, "parquet", workers=0)


def parquet_datasets_workers(place: Place) -> Epoch:
    """datasets: the same with 2 worker processes."""
    return _datasets(place, "parquet", workers=WORKERS)


def npy(place: Place) -> Epoch:
    """bucketfeed: a local .npy, Loader as it comes."""
    import bucketfeed as bf

    loader = bf.Loader(bf.open_dataset(_npy_path(place)), BATCH, shuffle=True, seed=SEED)
    return lambda: ((len(batch["array"]), batch["array"].nbytes) for batch in loader)


def npy_memmap(place: Place) -> Epoch:
    """np.memmap: the same file, a row at a time, in the stock DataLoader of this process."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset[Any]):
        def __init__(self) -> None:
            self.rows = np.load(_npy_path(place), mmap_mode="r")

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, i: int) -> Any:
            return torch.from_numpy(np.array(self.rows[i]))

    loader = DataLoader(Rows(), BATCH, shuffle=True)
    return lambda: ((len(batch), batch.nbytes) for batch in loader)


CONTESTANTS: dict[str, Callable[[Place], Epoch]] = {
    "jsonl": jsonl,
    "jsonl-datasets": jsonl_datasets,
    "jsonl-datasets-workers": jsonl_datasets_workers,
    "parquet": parquet,
    "parquet-batches": parquet_batches,
    "parquet-datasets": parquet_datasets,
    "parquet-datasets-workers": parquet_datasets_workers,
    "npy": npy,
    "npy-memmap": npy_memmap,
}
TABLES = {
    "JSONL, cold": ("jsonl", 1),
    "Parquet, cold": ("parquet", 1),
    "A local .npy in the page cache": ("npy", 2),
}


def _bucketfeed(place: Place, folder: str, **options: Any) -> Epoch:
    import bucketfeed as bf

    cache = bf.DiskCache(place.cache, limit_bytes="100GB")
    index = f"{place.kept}/{folder}.index" if folder == "jsonl" else None
    data = bf.open_dataset(f"s3://{BUCKET}/{folder}/", cache=cache, index=index, **options)
    loader = bf.Loader(data, BATCH, shuffle=True, seed=SEED)
    return lambda: map(_size, loader)


def _datasets(place: Place, kind: str, workers: int) -> Epoch:
    from datasets import load_dataset
    from torch.utils.data import DataLoader

    data = load_dataset(
        "json" if kind == "jsonl" else kind,
        data_files=[f"s3://{BUCKET}/{kind}/{number:02}.{kind}" for number in range(FILES)],
        split="train",
        streaming=True,
        storage_options={"endpoint_url": place.endpoint_url},
    )
    loader = DataLoader(data.shuffle(seed=SEED, buffer_size=BUFFER), BATCH, num_workers=workers)
    return lambda: map(_size, loader)


def _size(batch: dict[str, Any]) -> tuple[int, int]:
    return len(batch["id"]), len(batch["id"]) * ROW_BYTES


def _npy_path(place: Place) -> str:
    return str(Path(place.kept).parent / "rows" / BUCKET / "npy" / "rows.npy")


def make(folder: Path, rows: int) -> None:
    """Fill `folder` (the server's root) with the same rows as JSONL and Parquet and with an array, once."""
    note = folder / ".made.json"
    wanted = json.dumps([rows, FILES, COLUMNS])
    if note.exists() and note.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    for kind in ("jsonl", "parquet", "npy"):
        (folder / BUCKET / kind).mkdir(parents=True)
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(FILES):
        part = list(_rows(range(number * rows // FILES, (number + 1) * rows // FILES)))
        with (folder / BUCKET / "jsonl" / f"{number:02}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in part)
        pq.write_table(pa.Table.from_pylist(part), folder / BUCKET / "parquet" / f"{number:02}.parquet")
    array = np.random.default_rng(SEED).random((rows // 2, COLUMNS), dtype=np.float32)
    np.save(folder / BUCKET / "npy" / "rows.npy", array)
    note.write_text(wanted)


def _rows(numbers: range) -> Iterator[dict[str, Any]]:
    for number in numbers:
        start = number * 7919 % 83
        yield {"id": number, "label": number % 10, "score": number / 7, "text": _WORDS[start : start + 222]}


def main() -> None:
    """Make the data, measure, print the tables and save them."""
    options = _arguments()
    work: Path = options.work
    print(f"benchmarks: making {options.rows:,} rows in {work}", file=sys.stderr)
    make(work / "rows", options.rows)
    warm(work / "rows")
    runs: list[dict[str, Any]] = []
    with S3Serve(work / "rows", work, options.latency_ms) as server:
        place = Place(server.endpoint_url, str(work / "cache"), str(work / "kept"), FILES, 2, options.epoch_seconds)
        names = [n for n in options.only if "datasets" not in n or importlib.util.find_spec("datasets")]
        for number in range(options.rounds + 1):
            for name in names:
                if number == 0:
                    contest(name, replace(place, epochs=0), work)  # makes the index that all rounds find present
                    continue
                run = {"contestant": name, "round": number, **contest(name, place, work)}
                print(f"benchmarks: round {number} of {options.rounds}: {name}: {report.line(run)}", file=sys.stderr)
                runs.append(run)
    results = {"rows": options.rows, "latency_ms": options.latency_ms, "machine": report.machine(), "runs": runs}
    report.save(options.results, "rows", results, _text(results))


def _arguments() -> argparse.Namespace:
    p = parser("python -m benchmarks.rows", __doc__)
    p.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME")
    p.add_argument("--epoch-seconds", type=float, default=15, help="break an epoch off (default: %(default)s)")
    p.add_argument("--rows", type=int, default=2_000_000, help="default: %(default)s")
    return p.parse_args()


def _text(results: dict[str, Any]) -> str:
    lines = [
        "# Rows",
        "",
        f"{results['rows']:,} rows of about {ROW_BYTES} bytes in {FILES} files, {results['latency_ms']:g} ms to the "
        f"first byte of each answer, and half as many rows of {COLUMNS} float32 in a local .npy; batches of {BATCH}, "
        "shuffled, collated to tensors. Medians of the rounds (lowest to highest); an epoch is broken off after some "
        "seconds and counts by what it gave.",
        "",
        report.about(results["machine"]),
        "",
    ]
    shown = [column for column in report.COLUMNS if column[0] in ("samples/s", "first batch, s", "peak PSS, MB")]
    for title, (ours, epoch) in TABLES.items():
        found = {
            name: [e for run in results["runs"] if run["contestant"] == name for e in run.get("epochs", [])]
            for name in CONTESTANTS
            if name.partition("-")[0] == ours
        }
        found = {name: [e for e in epochs if e["epoch"] == epoch] for name, epochs in found.items()}
        lines += [f"## {title}", "", "| | " + " | ".join(column[0] for column in shown) + f" | {ours} is |"]
        lines.append("|---" * (len(shown) + 2) + "|")
        rate = shown[0][1]
        for name, epochs in found.items():
            if not epochs:
                continue
            cells = [report.spread([value(e) for e in epochs], form) for _, value, form in shown]
            ratio = f"{median(map(rate, found[ours])) / median(map(rate, epochs)):.2f}x" if found[ours] else ""
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {ratio} |")
        lines.append("")
    lines += ["## Contestants", ""]
    for name in dict.fromkeys(run["contestant"] for run in results["runs"]):
        lines.append(f"- **{name}**: {CONTESTANTS[name].__doc__}")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
