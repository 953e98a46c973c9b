"""What the samples of these tests are, and what loaders gave of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import bucketfeed as bf

RAW = range(0, 30)
TARS = range(1000, 1100)
LINES = range(2000, 2050)
LINES_IN_ORDER = [*LINES[0::2], *LINES[1::2]]


def payload(number: int) -> bytes:
    return f"sample {number} ".encode() * (1 + number % 7)


def number_of(sample: dict[str, Any]) -> int:
    """Which of the samples written this is, by its contents."""
    return int(sample["number"] if "number" in sample else sample["bin"].split()[1])


def numbers(samples: Iterable[dict[str, Any]]) -> list[int]:
    return [number_of(sample) for sample in samples]


def fed(loader: bf.Loader) -> list[int]:
    """One epoch's samples, in order; the data set is mapped to `number_of` before."""
    return [number for batch in loader for number in batch.tolist()]


def source_of(number: int) -> int:
    return number // 1000


def in_order(shares: Sequence[Sequence[int]]) -> list[int]:
    """The global order, of what each rank was given of it."""
    return [number for turn in zip_longest(*shares) for number in turn if number is not None]


def fed_to_ranks(
    dataset: bf.MapDataset,
    world_size: int,
    state: dict[str, Any] | None = None,
    batches: int | None = None,
    **options: Any,
) -> tuple[list[int], dict[str, Any]]:
    """What all ranks were given in an epoch, or in some batches of it, in the global order; and where they stand."""
    shares, states = [], []
    for rank in range(world_size):
        topology = bf.Topology(rank, world_size)
        with bf.Loader(dataset, 30 // world_size, topology=topology, tail="uneven", **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            share: list[int] = []
            for number, batch in enumerate(loader, start=1):
                share += batch.tolist()
                if number == batches:
                    break
            shares.append(share)
            states.append(loader.state_dict())
    assert all(found == states[0] for found in states)
    return in_order(shares), states[0]
