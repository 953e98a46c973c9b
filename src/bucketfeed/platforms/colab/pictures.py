"""Pictures for a notebook: samples before training, curves after it, and whether data kept up."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bucketfeed.data.stats import STALLED
from bucketfeed.errors import ConfigError

_TRAIN, _TEST = "#3b6fb6", "#e08a2e"
_DPI = 110


def sample_pictures(dataset: Any, count: int = 10) -> bytes:
    """Return a PNG of samples from all over `dataset` (a `MapDataset`), with their keys."""
    from matplotlib.figure import Figure

    count = min(count, len(dataset))
    if count < 1:
        raise ConfigError(f"{dataset!r} has no samples to show")
    columns = min(count, 5)
    rows = -(-count // columns)
    figure = Figure(figsize=(2 * columns, 2.2 * rows), layout="constrained")
    places = [i * len(dataset) // count for i in range(count)]
    for number, place in enumerate(places):
        axis = figure.add_subplot(rows, columns, number + 1)
        axis.set_axis_off()
        sample = dataset[place]
        label = f": {sample['cls'].decode(errors='replace')}" if isinstance(sample.get("cls"), bytes) else ""
        axis.set_title(_shortened(f"{sample['__key__']}{label}"), fontsize=8)
        pixels = _picture(sample)
        if pixels is None:
            axis.text(0.5, 0.5, ", ".join(f for f in sample if f != "__key__"), ha="center", fontsize=8)
        else:
            axis.imshow(pixels, cmap="gray")
    return _png(figure)


def curves(run_dir: Path) -> bytes:
    """Return a PNG of loss, accuracy and speed by epoch, from the `metrics.jsonl` of a run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    records = _records(run_dir)
    trained, tested = _of(records, "epoch"), _of(records, "evaluation")
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    loss, accuracy, speed = figure.subplots(1, 3)
    for axis, title in ((loss, "Loss"), (accuracy, "Accuracy"), (speed, "Samples per second")):
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis, name in ((loss, "loss"), (accuracy, "accuracy")):
        for points, colour, label in ((trained, _TRAIN, "train"), (tested, _TEST, "test")):
            kept = {epoch: point[name] for epoch, point in points.items() if point.get(name) is not None}
            if kept:
                axis.plot([e + 1 for e in kept], list(kept.values()), "o-", color=colour, label=label)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=False)
    loss.set_ylim(bottom=0)
    bars = speed.bar([e + 1 for e in trained], [p["samples_per_second"] for p in trained.values()], color=_TRAIN)
    speed.bar_label(bars, [f"{p['wait_share']:.0%} waiting" for p in trained.values()], fontsize=8, padding=2)
    speed.margins(y=0.12)
    return _png(figure)


def verdict(run_dir: Path) -> str:
    """Return in a sentence whether training waited for data in its last epoch, and what to do if so."""
    trained = list(_of(_records(run_dir), "epoch").values())
    if not trained:
        return "No epoch is finished yet."
    share, hits, misses = (trained[-1][name] for name in ("wait_share", "cache_hits", "cache_misses"))
    told = f"{share:.1%} of the last epoch was spent waiting for data"
    if share < STALLED:
        return f"Data kept up: {told}."
    if misses > hits:
        return (
            f"Training waited for data: {told}. Most came from the bucket: a second epoch, from the cache, is faster."
        )
    return f"Training waited for data: {told}, though most came from the cache: decoding is slow; try --num-workers."


def _of(records: Sequence[Mapping[str, Any]], kind: str) -> dict[int, Mapping[str, Any]]:
    """Return the last record of each epoch: one that was resumed has an earlier one of its first part."""
    return {record["epoch"]: record for record in records if record["kind"] == kind}


def _records(run_dir: Path) -> list[dict[str, Any]]:
    path = Path(run_dir) / "metrics.jsonl"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise ConfigError(f"{path} is not there: train first, with --run-dir {run_dir}") from e
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _picture(sample: Mapping[str, Any]) -> Any:
    from bucketfeed.errors import DecodeError
    from bucketfeed.formats import decoders

    for name, data in sample.items():
        if name not in ("__key__", "cls") and isinstance(data, bytes):
            try:
                return decoders.image(data)
            except (DecodeError, ValueError, OSError):
                continue  # another field
    return None


def _shortened(key: str) -> str:
    return key if len(key) <= 18 else "..." + key[-17:]


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_DPI)
    return out.getvalue()
