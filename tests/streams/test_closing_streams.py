"""A source that waits without end holds up neither the end of a loader nor that of its process; states of workers."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bucketfeed as bf
from bucketfeed.store.ahead import read_through
from bucketfeed.store.ranges import Range
from bucketfeed.testing.readers import MemoryReader

PROGRAM = """
import os, socket, sys
import bucketfeed as bf
from torch.utils.data import DataLoader

def source(shard):
    yield shard
    one, other = socket.socketpair()
    one.recv(1)

stream = bf.StreamDataset.from_generator(source, shards=range(2))
workers = {"num_workers": int(sys.argv[2]), "multiprocessing_context": sys.argv[3] or None}
samples = iter(DataLoader(stream, batch_size=None, **workers))
print(next(samples), flush=True)
if sys.argv[1] == "close":
    del samples
    print("closed", flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("end", "num_workers", "method", "said"),
    [
        ("close", 1, "fork", "0\nclosed\n"),
        ("exit", 0, "", "0\n"),
        ("kill", 2, "fork", "0\n"),
        ("kill", 1, "forkserver", "0\n"),
    ],
)
def test_a_source_that_blocks_ends_with_its_loader_or_its_process(
    tmp_path: Path, end: str, num_workers: int, method: str, said: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text("if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in PROGRAM.splitlines()))
    # Every process of it holds the pipe: it is read to its end only once the last of them has ended.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program, end, str(num_workers), method],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.stdout == said


def test_reading_on_is_given_up_without_waiting_for_requests_under_way() -> None:
    answer = threading.Event()

    class Waiting(MemoryReader):
        def read(self, ranges: Any) -> Any:
            if ranges[0].start:
                assert answer.wait(60)
            return super().read(ranges)

    buffers = read_through(Waiting({"memory://a": bytes(100)}), Range("memory://a", 0, 100), 10)
    assert len(next(buffers)) == 10
    buffers.close()  # type: ignore[attr-defined]
    answer.set()


def test_the_state_of_each_worker_is_its_own() -> None:
    """As a loader that keeps a state for each worker does it: one copy of the stream a worker, each with a state."""

    def hundred() -> Iterator[int]:
        yield from range(100)

    def worker(rank: int) -> bf.StreamDataset:
        return bf.StreamDataset(hundred, topology=bf.Topology(rank, 2), shuffle_buffer=8).repeat(2)

    whole = [list(worker(rank)) for rank in range(2)]
    first = [worker(rank) for rank in range(2)]
    got = [list(itertools.islice(stream, stop)) for stream, stop in zip(first, (30, 70), strict=True)]
    rest = [worker(rank) for rank in range(2)]
    for old, new in zip(first, rest, strict=True):
        new.load_state_dict(old.state_dict())
    assert [some + list(stream) for some, stream in zip(got, rest, strict=True)] == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdatas_loader_resumes_it(num_workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        stream = bf.StreamDataset(lambda: range(100), shuffle_buffer=16).take(60).repeat(2)
        return torchdata.StatefulDataLoader(stream, batch_size=4, num_workers=num_workers)

    whole = [batch.tolist() for batch in loader()]
    first = loader()
    got = [batch.tolist() for batch in itertools.islice(first, 7)]
    rest = loader()
    rest.load_state_dict(first.state_dict())
    assert got + [batch.tolist() for batch in rest] == whole
