"""Batches built by worker processes: each runs the reading-ahead of `pipeline` on every n-th batch of the plan.

Workers start by forkserver (obstore's threads do not survive a fork) and live as long as the loader. Batches come
back as bytes through a pipe, not through /dev/shm, which is 64 MiB in many containers.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from bucketfeed.data.assemble import Assembled, Assembler
from bucketfeed.data.feed import Taken, Task
from bucketfeed.data.pipeline import BatchBytes
from bucketfeed.data.plan import BatchPlan
from bucketfeed.errors import BucketfeedError

_KILLED = "exited unexpectedly"  # what torch says of a worker that is gone
_LOOK_SECONDS = 0.05
_PREFETCH = 2  # batches a worker has finished before they are asked for; the pipeline itself reads further ahead


class WorkerFeed:
    """An iterator of `Taken` over worker processes, in the order of the plan."""

    def __init__(self, task: Task, num_workers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bucketfeed.data.preload"])
        self._start = context.Array("q", 2)
        self._loader = DataLoader(
            _WorkerStream(cloudpickle.dumps(task), self._start, os.getpid()),
            batch_size=None,
            num_workers=num_workers,
            multiprocessing_context=context,
            persistent_workers=True,
            prefetch_factor=_PREFETCH,
            generator=torch.Generator(),  # its draws for worker seeds must not move the training's own generator
        )
        self._batches: Iterator[bytes] = iter(())
        self._watch: _Watch | None = None

    def start(self, epoch: int, position: int) -> None:
        """Begin at `position` of `epoch`, in the workers that are there already where there are any."""
        with self._start.get_lock():
            self._start[:] = [epoch, position]
        try:
            self._batches = self._started()
        except RuntimeError as e:
            if _KILLED not in str(e):
                raise
            self.close()  # since the last epoch, by a Ctrl-C that reached them too, say: new ones
            self._batches = self._started()

    def _started(self) -> Iterator[bytes]:
        with _main_module_hidden():
            batches = iter(self._loader)
        if self._watch is None:
            self._watch = _Watch(batches)
        return batches

    def __next__(self) -> Taken:
        """Return the next batch, or raise the error that its worker met, with its own type."""
        error: Exception | None = None
        try:
            taken = pickle.loads(next(self._batches))
        except Exception as e:
            error = e
        # What comes after a worker was lost may be torn: none of it is used.
        if (self._watch is not None and self._watch.lost) or (error is not None and _KILLED in str(error)):
            self.close()
            raise BucketfeedError(
                "a worker process exited unexpectedly: something killed it, most often the kernel for want of memory; "
                "try fewer num_workers, or none, or a smaller read_ahead_bytes"
            ) from error
        if error is not None:
            raise error
        if isinstance(taken, BucketfeedError):
            raise taken
        assert isinstance(taken, Taken)
        return taken

    def close(self) -> None:
        """End the workers."""
        self._batches = iter(())
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


class _Watch:
    """Looks out for workers that are killed, from a thread of its own.

    One that is killed in the middle of a batch leaves half a message in the pipe, and the loop in a read without end,
    for this process has the writing end open as well. Zeros complete the message; nothing that comes then is used.
    """

    def __init__(self, batches: Any) -> None:
        self.lost = False
        self._stopped = threading.Event()
        self._sentinels = [worker.sentinel for worker in batches._workers]
        self._writer = batches._worker_result_queue._writer.fileno()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """End looking: the workers are about to be ended."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if multiprocessing.connection.wait(self._sentinels, timeout=_LOOK_SECONDS):
                break
        while not self._stopped.wait(_LOOK_SECONDS):
            self.lost = True
            while not self._stopped.is_set() and select.select([], [self._writer], [], 0)[1]:
                os.write(self._writer, bytes(select.PIPE_BUF))


class _WorkerStream(IterableDataset[bytes]):
    """The dataset inside a worker: endless pickled batches from the start that the loader last set."""

    def __init__(self, payload: bytes, start: SynchronizedArray[int], owner: int) -> None:
        self._payload = payload
        self._owner = owner
        self._start = start
        self._task: Task | None = None

    def __iter__(self) -> Iterator[bytes]:
        if self._task is None:
            threading.Thread(target=end_with, args=(self._owner,), daemon=True).start()
            self._task = cloudpickle.loads(self._payload)
            self._payload = b""
        task = self._task
        worker = get_worker_info()
        assert task is not None
        assert worker is not None
        epoch, position = self._start[:]
        plans = itertools.islice(task.plan.batches(epoch, position), worker.id, None, worker.num_workers)
        counter = task.assembler.dataset.reader.counter
        pipeline = task.pipeline(plans, _Seeded(task.assembler))
        counted = counter.counts()
        try:
            while True:
                try:
                    plan, made = next(pipeline)
                except StopIteration:
                    return
                except BucketfeedError as e:
                    yield pickle.dumps(e)
                    continue
                now = counter.counts()
                yield _dumps(Taken(made, plan.consumed, now - counted))
                counted = now
        finally:
            pipeline.close()


def end_with(owner: int) -> None:
    """End this process when its loader's process ends in any way: torch watches the forkserver, which stays."""
    try:
        select.select([os.pidfd_open(owner)], [], [])
    except ProcessLookupError:
        pass  # it has ended already
    except (AttributeError, OSError):  # not every kernel can tell
        return
    os._exit(1)


@dataclass(frozen=True, slots=True)
class _Seeded:
    """Seeds the process's global generators for each batch, so that augmentations repeat neither by worker nor epoch.

    Deterministic with one decoding thread, the default in workers; `bucketfeed.rng` is so with any number.
    """

    assembler: Assembler

    def __call__(self, plan: BatchPlan, bodies: BatchBytes) -> Assembled:
        words = np.random.SeedSequence((self.assembler.seed, plan.epoch, int(plan.samples[0]))).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(words[1])
        torch.manual_seed(int(words[2]))
        return self.assembler(plan, bodies)


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep the workers from importing the user's script: what they need of it travels by value.

    So a script without `if __name__ == "__main__"` works, and a notebook too.
    """
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    main.__spec__ = None
    main.__dict__.pop("__file__", None)
    try:
        yield
    finally:
        vars(main).update(kept)


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes: torch's own way makes a zip archive of each."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided:
            raw = obj.detach().contiguous()
            return _tensor, (raw.flatten().view(torch.uint8).numpy(), raw.dtype, tuple(raw.shape))
        return NotImplemented


def _tensor(raw: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def _dumps(value: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=5).dump(value)
    return out.getvalue()
