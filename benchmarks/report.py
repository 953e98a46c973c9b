"""Turns the runs into a table: medians, spread, and each contestant's ratio to bucketfeed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contestants import CONTESTANTS
from benchmarks.material import Size

PACKAGES = ("bucketfeed", "torch", "obstore", "s3fs", "boto3", "numpy", "pyarrow", "webdataset", "litdata", "datasets")


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, memory, kernel, versions, commit."""
    return {
        "processor": _first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def table(results: dict[str, Any], size: Size) -> str:
    """Return all results as Markdown."""
    lines = [
        "# Loading",
        "",
        f"{size.samples:,} samples of {size.image_bytes:,} bytes, {results['latency_ms']:g} ms to the first byte of "
        "each answer (s3serve, loopback), batches of 64, shuffled, undecoded. Medians of the rounds "
        "(lowest to highest).",
        "",
        about(results["machine"]),
        "",
    ]
    names = list(dict.fromkeys(run["contestant"] for run in results.get("runs", [])))
    for title, number in (("Cold: the first epoch", 1), ("Warm: the second epoch of the same process", 2)):
        lines += [f"## {title}", "", *_epoch_table(results["runs"], names, number), ""]
    lines += ["## Contestants", ""]
    for name in names:
        runs = [run for run in results["runs"] if run["contestant"] == name]
        lines.append(f"- **{name}**: {CONTESTANTS[name].__doc__}{_opening(runs)}")
    lines.append("")
    if "memory" in results:
        lines += ["## Memory", "", *(f"- {text}" for text in results["memory"]["texts"]), ""]
    return "\n".join(lines)


def about(machine: dict[str, Any]) -> str:
    """Return what `machine` gave, as a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {versions}, commit {machine['commit']}."
    )


def line(run: dict[str, Any]) -> str:
    """Return one run in short."""
    if "failed" in run:
        return f"failed: {run['failed']}"
    return ", ".join(
        [f"opened in {run['open_seconds']:.2f} s"]
        + [
            f"epoch {e['epoch']}: {_rate(e):,.0f} samples/s, first batch {_first_batch(e):.2f} s, "
            f"{e['peak_pss'] / 1e6:.0f} MB"
            for e in run["epochs"]
        ]
    )


def _rate(epoch: dict[str, Any]) -> float:
    return float(epoch["samples"] / epoch["seconds"])


def _first_batch(epoch: dict[str, Any]) -> float:
    return float(epoch["first_batch_seconds"] or 0)


# column title, value of an epoch, its format
COLUMNS: list[tuple[str, Callable[[dict[str, Any]], float], str]] = [
    ("samples/s", _rate, ",.0f"),
    ("first batch, s", _first_batch, ".2f"),
    ("peak PSS, MB", lambda e: e["peak_pss"] / 1e6, ",.0f"),
    ("requests a sample", lambda e: e["requests"] / max(1, e["samples"]), ".3f"),
    ("bytes fetched per byte given", lambda e: e["bytes_fetched"] / max(1, e["bytes"]), ".3f"),
    ("CPU-s/GB", lambda e: e["cpu_seconds"] / max(1, e["bytes"]) * 1e9, ".2f"),
    ("samples", lambda e: e["samples"], ",.0f"),
]


def _opening(runs: list[dict[str, Any]]) -> str:
    opened = [run for run in runs if "failed" not in run]
    texts = [f" Failed in round {run['round']}: {run['failed'].splitlines()[-1]}." for run in runs if "failed" in run]
    if opened:
        seconds = spread([run["open_seconds"] for run in opened], ".2f")
        requests = spread([run["open_requests"] for run in opened], ",.0f")
        texts.append(f" Opened (with its imports) in {seconds} s by {requests} requests.")
    return "".join(texts)


def _epoch_table(runs: list[dict[str, Any]], names: list[str], number: int) -> list[str]:
    epochs = {
        name: [e for run in runs if run["contestant"] == name for e in run.get("epochs", []) if e["epoch"] == number]
        for name in names
    }
    epochs = {name: found for name, found in epochs.items() if found}
    ours = epochs.get("bucketfeed")
    lines = [
        "| | " + " | ".join(title for title, _, _ in COLUMNS) + " | bucketfeed is |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for name, found in epochs.items():
        cells = [spread([value(e) for e in found], shown) for _, value, shown in COLUMNS]
        ratio = f"{median(map(_rate, ours)) / median(map(_rate, found)):.2f}x" if ours else ""
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {ratio} |")
    return lines


def spread(values: list[float], shown: str) -> str:
    """Return the median of `values`, and their range where they differ."""
    low, middle, high = (format(v, shown) for v in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def save(folder: Path, name: str, results: dict[str, Any], text: str) -> None:
    """Print the text, and write both to `folder`, as `name`.json and `name`.md."""
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text)


def _first(path: str, name: str) -> str:
    for text in Path(path).read_text().splitlines():
        key, _, value = text.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except OSError:
        return "unknown"
    return told.stdout.strip() or "unknown"
