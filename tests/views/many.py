"""What the samples of these tests are, and what loaders gave of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import bucketfeed as bf

SAMPLES = 100


def payload(number: int) -> bytes:
    return f"sample {number} ".encode() * (1 + number % 7)


def number_of(sample: dict[str, Any]) -> int:
    """Which of the samples written this is, by its contents."""
    return sample["number"] if "number" in sample else int(sample["bin"].split()[1])


def numbers(samples: Iterable[dict[str, Any]]) -> list[int]:
    return [number_of(sample) for sample in samples]


def fed(loader: bf.Loader) -> list[int]:
    """One epoch's samples, in order; the data set is mapped to `number_of` before."""
    return [number for batch in loader for number in batch.tolist()]


def rest(datasets: bf.MapDataset, cut: int, before: int, after: int, **options: Any) -> tuple[list[int], list[int]]:
    """Take `cut` batches on `before` ranks, go on with `after` ranks: what came before and after, by position."""

    def run(world_size: int, batches: int | None, state: dict[str, Any] | None) -> tuple[list[int], dict[str, Any]]:
        shares, states = [], []
        for rank in range(world_size):
            loader = bf.Loader(datasets, 12 // world_size, topology=bf.Topology(rank, world_size), **options)
            if state is not None:
                loader.load_state_dict(state)
            share: list[int] = []
            for number, batch in enumerate(loader, start=1):
                share += batch.tolist()
                if number == batches:
                    break
            shares.append(share)
            states.append(loader.state_dict())
            loader.close()
        assert all(found == states[0] for found in states)
        longest = max(map(len, shares))
        return [share[i] for i in range(longest) for share in shares if i < len(share)], states[0]

    first, state = run(before, cut, None)
    return first, run(after, None, state)[0]
