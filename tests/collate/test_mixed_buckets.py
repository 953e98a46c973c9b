from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bucketfeed as bf


@pytest.fixture
def mixed(tmp_path: Path) -> bf.MapDataset:
    sources = []
    for name, n in (("a", 40), ("b", 12)):
        path = tmp_path / f"{name}.txt"
        path.write_text("".join(f"{name}{'x' * (i % 7)}\n" for i in range(n)))
        sources.append(bf.open_dataset(path, format="text", cache=None))
    return bf.mix(sources, weights=[1, 1], stop="all")


@pytest.mark.parametrize("given", [True, False])
def test_batches_of_a_mix_are_of_one_length_and_take_what_the_mix_takes(mixed: bf.MapDataset, given: bool):
    lengths = np.array([1 + i % 7 for n in (40, 12) for i in range(n)]) if given else None
    buckets = bf.LengthBuckets(lengths, batch_size=4)
    taken = [text for batch in bf.Loader(mixed, batches=buckets, shuffle=True) for text in batch["text"]]
    drawn = [text for batch in bf.Loader(mixed, 4, shuffle=True) for text in batch["text"]]
    assert sorted(taken) == sorted(drawn)
    spreads = [len({len(t) for t in batch["text"]}) for batch in bf.Loader(mixed, batches=buckets, shuffle=True)]
    assert np.mean(spreads) < 2
