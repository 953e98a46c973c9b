"""What the demonstration shows of its runs: a table of text and a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketfeed.store.sizes import format_size

_NAMES = {"cold": "cold", "warm": "warm", "killed": "killed, resumed"}
_COLOURS = {"cold": "#3b6fb6", "warm": "#e08a2e", "killed": "#4c9a62"}


@dataclass(frozen=True)
class Run:
    """A finished run: its name, results, and the records it wrote, also those before it was killed."""

    name: str
    result: dict[str, Any]
    records: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind: "start", "epoch", "evaluation"."""
        return [record for record in self.records if record["kind"] == kind]


def table(runs: list[Run]) -> str:
    """Return the runs side by side; what is counted by epoch begins with what opening the data took."""

    def by_epoch(name: str, show: Callable[[int], str]) -> Callable[[Run], str]:
        def cell(run: Run) -> str:
            opening = sum(start.get(name, 0) for start in run.of("start"))
            return f"{show(opening)} + " + " / ".join(show(epoch[name]) for epoch in run.of("epoch"))

        return cell

    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("", lambda run: _NAMES[run.name]),
        ("test accuracy", lambda run: f"{run.result['accuracy']:.4f}"),
        ("seconds", lambda run: f"{run.result['seconds']:.1f}"),
        ("samples/s", lambda run: f"{run.result['samples_per_second']:,.0f}"),
        ("bytes from the bucket *", by_epoch("bytes_fetched", format_size)),
        ("requests to the bucket *", by_epoch("requests", "{:,}".format)),
        ("cache hits, by epoch", lambda run: " / ".join(f"{epoch['cache_hits']:,}" for epoch in run.of("epoch"))),
        ("waited for data", lambda run: f"{run.result['wait_share']:.1%}"),
        ("peak PSS, all processes", lambda run: f"{run.result['peak_pss_mb']:.0f} MB"),
        ("processes", lambda run: " -> ".join(str(start["world_size"]) for start in run.of("start"))),
        ("order hash", lambda run: run.result["order_hash"]),
    ]
    cells = [[name, *(cell(run) for run in runs)] for name, cell in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "   ".join([first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))])
        for first, *rest in cells
    ]
    rule = "-" * len(lines[0])
    notes = [
        "* at opening + in epochs 1 / 2 / 3; what is read ahead for the next epoch counts where it happens",
        "  killed, resumed: seconds, samples/s, waiting and memory are of the part after the kill",
    ]
    return "\n".join([lines[0], rule, *lines[1:], rule, *notes, ""])


def draw(runs: list[Run], path: Path, *, aim: float) -> None:
    """Write a picture of the runs by epoch: loss and accuracy as curves, speed and cache hits as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {"font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False}
    with pyplot.rc_context(style | {"axes.spines.right": False, "axes.axisbelow": True}):
        figure, ((loss, accuracy), (speed, hits)) = pyplot.subplots(2, 2, figsize=(11, 7))
        _curves(loss, runs, "epoch", "loss")
        loss.set_title("Training loss")
        loss.set_ylim(bottom=0)
        _curves(accuracy, runs, "evaluation", "accuracy")
        accuracy.set_title("Test accuracy")
        accuracy.axhline(aim, color="#888888", linewidth=1, linestyle="--")
        accuracy.text(1.0, aim, f"aim {aim} ", transform=accuracy.get_yaxis_transform(), ha="right", va="bottom")
        accuracy.set_ylim(top=1.005)
        _bars(speed, runs, lambda epoch: float(epoch["samples_per_second"]), "{:,.0f}")
        speed.set_title("Samples per second")
        _bars(hits, runs, _hit_rate, "{:.0%}")
        hits.set_title("Cache hit rate, reading ahead included")
        hits.yaxis.set_major_formatter("{x:.0%}")
        for axis in (loss, accuracy, speed, hits):
            axis.set_xticks(range(1, 1 + max(len(run.of("epoch")) for run in runs)))
            axis.set_xlabel("epoch")
            axis.grid(axis="y", alpha=0.25)
        figure.suptitle("bucketfeed: 1,797 handwritten digits, read from a mocked S3", fontsize=13)
        handles, labels = loss.get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.955), ncols=len(runs), frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.935), h_pad=2, w_pad=2)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _hit_rate(epoch: dict[str, Any]) -> float:
    looked_up = epoch["cache_hits"] + epoch["cache_misses"]
    return float(epoch["cache_hits"] / looked_up) if looked_up else 0.0


def _curves(axis: Any, runs: list[Run], kind: str, name: str) -> None:
    # Cold and warm are the same to the last bit: rings around dots show both.
    for run, (marker, size, face) in zip(runs, (("o", 10, "none"), ("o", 5, None), ("^", 7, None)), strict=True):
        points = run.of(kind)
        axis.plot(
            [point["epoch"] + 1 for point in points],
            [point[name] for point in points],
            color=_COLOURS[run.name],
            marker=marker,
            markersize=size,
            markerfacecolor=face or _COLOURS[run.name],
            markeredgewidth=1.5,
            linewidth=1.2,
            label=_NAMES[run.name],
        )


def _bars(axis: Any, runs: list[Run], value: Callable[[dict[str, Any]], float], shown: str) -> None:
    width = 0.26
    for place, run in enumerate(runs):
        epochs = run.of("epoch")
        centres = [epoch["epoch"] + 1 + (place - 1) * width for epoch in epochs]
        bars = axis.bar(centres, [value(epoch) for epoch in epochs], width * 0.9, color=_COLOURS[run.name])
        axis.bar_label(bars, [shown.format(value(epoch)) for epoch in epochs], fontsize=8, padding=2)
    axis.margins(y=0.12)
