"""Keyed permutations of range(n) in closed form: what a shuffle is when no list of n entries may exist.

Power-of-two rounds (flip bits, multiply by an odd key, add, fold the high bits down) permute the next power of two;
values that fall outside [0, n) walk on until they are inside, which takes less than two rounds on average. Built on
integer arithmetic alone, so that the same key gives the same order on every machine and with every numpy.
Source of the constants: splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_ROUNDS = 7
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mixed(words: Words) -> Words:
    """Return each 64-bit word hashed by splitmix64's finaliser: a permutation of all words without visible pattern."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def key(*parts: int) -> Words:
    """Return one word that depends on every part and on their order."""
    word = np.zeros(1, np.uint64)
    for part in parts:
        word = mixed(word ^ mixed(np.array([part & 0xFFFF_FFFF_FFFF_FFFF], np.uint64)))
    return word


def permuted(values: NDArray[np.int64], sizes: NDArray[np.int64], keys: Words) -> NDArray[np.int64]:
    """Return where the permutation of range(size) under `key` sends each value; arrays broadcast element by element."""
    x, n, keys = np.broadcast_arrays(values.astype(np.uint64), sizes.astype(np.uint64), keys)
    # Bits of size - 1; exact, since sizes stay below 2**53.
    bits = np.frexp((n - np.uint64(1)).astype(np.float64))[1].astype(np.uint64)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    fold = np.maximum(np.uint64(1), (bits + np.uint64(1)) >> np.uint64(1))
    x = _rounds(x, mask, fold, keys)
    outside = np.flatnonzero(x >= n)
    while outside.size:
        x[outside] = _rounds(x[outside], mask[outside], fold[outside], keys[outside])
        outside = outside[x[outside] >= n[outside]]
    return x.astype(np.int64)


def _rounds(x: Words, mask: Words, fold: Words, keys: Words) -> Words:
    for _ in range(_ROUNDS):
        keys = mixed(keys)
        x = ((x ^ (keys >> np.uint64(40))) * ((keys >> np.uint64(16)) | np.uint64(1)) + (keys >> np.uint64(28))) & mask
        x = x ^ (x >> fold)
    return x
