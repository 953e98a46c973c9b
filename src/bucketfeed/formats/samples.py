"""What loading asks of an index and of its chunks: an `Index`, or anything that stands for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Range, RangeReader

Ints = NDArray[np.int64]


class AnyChunks(Protocol):
    """Consecutive samples that are read together."""

    @property
    def counts(self) -> Ints | int:
        """Samples in each chunk; as an int, how many chunks there are where each holds one sample."""
        ...

    def __len__(self) -> int: ...

    def of(self, samples: Ints) -> Ints:
        """Return the chunk that each of `samples` lies in."""
        ...

    def range(self, c: int) -> Range:
        """Return the range that holds all samples of chunk `c`."""
        ...

    def size(self, c: int) -> int:
        """Return the bytes of that range."""
        ...


class Bodies(Protocol):
    """The bytes of a batch's samples."""

    @property
    def length(self) -> int:
        """How many there are."""
        ...

    def each(self) -> list[Buffer]:
        """Return the bytes of each sample."""
        ...

    def joined(self) -> memoryview:
        """Return the bytes of all samples, one behind the other, in writable memory of their own."""
        ...


class AnyIndex(Protocol):
    """Samples by number: where each is, and what it is once its bytes are there. Pickles small."""

    @property
    def manifest(self) -> Manifest:
        """The objects that samples lie in."""
        ...

    @property
    def format(self) -> str:
        """The name of how they lie there."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex; equal where the same samples have the same numbers."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that labels count, if it is known."""
        ...

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...

    def name(self, i: int) -> str | None:
        """Return the key of the object that is sample `i`; None where objects hold several samples."""
        ...

    def locate(self, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Return of each of `samples` the number of its object in the manifest, and its start and length there."""
        ...

    def range(self, i: int) -> Range:
        """Return the range of sample `i`."""
        ...

    def ranges(self, samples: Ints) -> Sequence[Range]:
        """Return the range of each of `samples`."""
        ...

    def sample(self, i: int, buffer: Buffer) -> Any:
        """Return sample `i` made from its bytes."""
        ...

    @property
    def batches(self) -> bool | str:
        """Whether `batch` makes many samples at once; as text, in which format the user wants no other."""
        ...

    def batch(self, samples: Ints, bodies: Bodies) -> Any:
        """Return many samples at once, made from their bytes, where `batches` is true."""
        ...

    def line(self, i: int, reader: RangeReader) -> int | None:
        """Return the line, from 1 on, that sample `i` begins in; None without lines."""
        ...

    def chunks(self, chunk_bytes: int) -> AnyChunks:
        """Return the chunks that the samples form."""
        ...
