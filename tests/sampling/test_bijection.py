from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketfeed.sampling.bijection import key, mixed, permuted

SIZES = [*range(1, 201), 255, 256, 257, 1000, 1023, 1024, 4096, 4097, 9999]


def one(size: int, seed: int = 0) -> np.ndarray:
    return permuted(np.arange(size), np.array([size]), key(seed))


def many(size: int, keys: int, base: int = 0) -> np.ndarray:
    """The permutations of range(size) under `keys` different keys, one a row."""
    words = mixed(np.arange(keys, dtype=np.uint64) + np.uint64(base))
    values = np.tile(np.arange(size), keys)
    return permuted(values, np.array([size]), np.repeat(words, size)).reshape(keys, size)


def deviation(seen: np.ndarray, expected: float, freedom: int) -> float:
    """By how many standard deviations chi-squared exceeds its mean."""
    return float((((seen - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("seed", range(3))
def test_every_size_is_permuted_onto_itself(seed):
    for size in SIZES:
        assert np.array_equal(np.sort(one(size, seed)), np.arange(size)), size


def test_the_words_of_the_permutations_never_change():
    assert mixed(np.array([0, 1, 2**64 - 1], np.uint64)).tolist() == [
        16294208416658607535,
        10451216379200822465,
        16490336266968443936,
    ]
    assert one(1).tolist() == [0]
    assert one(5).tolist() == [1, 2, 3, 4, 0]
    assert one(16, 7).tolist() == [12, 4, 13, 6, 14, 8, 15, 10, 9, 2, 7, 5, 3, 1, 11, 0]
    assert permuted(np.array([0, 1, 2**52]), np.array([2**53]), key(3)).tolist() == [
        351686704613673,
        1056076436110068,
        2265600020230339,
    ]


@given(st.lists(st.tuples(st.integers(1, 2**53), st.integers(0, 2**64 - 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_values_of_different_sizes_and_keys_do_not_mind_each_other(parts):
    sizes = np.array([size for size, _, _ in parts])
    values = np.array([min(int(share * size), size - 1) for size, _, share in parts])
    keys = np.array([word for _, word, _ in parts], np.uint64)
    together = permuted(values, sizes, keys)
    alone = [permuted(values[i : i + 1], sizes[i : i + 1], keys[i : i + 1])[0] for i in range(len(parts))]
    assert together.tolist() == alone
    assert (together >= 0).all()
    assert (together < sizes).all()


def test_blocks_join_without_a_seam():
    whole = one(20_000)
    for start, stop in ((0, 1), (4095, 4097), (8192, 20_000)):
        assert np.array_equal(permuted(np.arange(start, stop), np.array([20_000]), key(0)), whole[start:stop])
    sizes, keys = np.full(20_000, 20_000), np.repeat(key(0), 20_000)
    assert np.array_equal(permuted(np.arange(20_000), sizes, keys), whole)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 12, 15, 16, 31, 33])
def test_each_value_is_equally_likely_at_each_place_and_so_is_each_pair(size):
    keys = 20_000
    rows = many(size, keys, base=size << 32)
    places = np.stack([np.bincount(rows[:, i], minlength=size) for i in range(size)])
    assert deviation(places, keys / size, (size - 1) ** 2) < 5
    pairs = np.bincount(rows[:, 0] * size + rows[:, 1], minlength=size * size).reshape(size, size)
    possible = size * (size - 1)
    assert not pairs.diagonal().any()
    assert deviation(pairs[~np.eye(size, dtype=bool)], keys / possible, possible - 1) < 5


@pytest.mark.parametrize("size", [3, 4, 5, 6])
def test_every_permutation_of_a_few_is_equally_likely(size):
    keys = 60_000
    _, seen = np.unique(many(size, keys) @ size ** np.arange(size), return_counts=True)
    assert len(seen) == math.factorial(size)
    assert deviation(seen, keys / len(seen), len(seen) - 1) < 5


@pytest.mark.parametrize("size", [100_000, 131_071])
def test_a_large_permutation_has_no_more_runs_and_fixed_points_than_chance(size):
    rows = np.stack([one(size, seed) for seed in range(40)])
    # Each count is Poisson with mean 1 a row: 40 +- 6.3 in all.
    assert 15 < (np.diff(rows, axis=1) == 1).sum() < 70
    assert 15 < (np.diff(rows, axis=1) == -1).sum() < 70
    assert 15 < (rows == np.arange(size)).sum() < 70
    between = np.corrcoef(np.concatenate([rows, np.arange(size)[np.newaxis]]))
    assert np.abs(between[~np.eye(41, dtype=bool)]).max() < 5 / math.sqrt(size)
