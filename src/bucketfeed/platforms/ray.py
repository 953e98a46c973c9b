"""Runs a function on the workers of a Ray cluster, with restarts and stops, and lends the cluster to index builds."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from bucketfeed.errors import BucketfeedError, ConfigError, NotFoundError

T = TypeVar("T")
Values = dict[str, Any]
Work = Callable[[Values, Callable[[], str | None]], T]

_log = logging.getLogger(__name__)
_STATE = "bucketfeed.json"  # in a Ray checkpoint whose files lie elsewhere
_FINAL = (ConfigError, NotFoundError)  # would come again
_PATIENCE_SECONDS = 10.0  # for all workers to come to the same error


@dataclass(frozen=True, slots=True)
class RayPlace:
    """Where in Ray a run goes, on how much, and what it survives.

    Args:
        workers: processes that train.
        min_workers: how few are enough, to begin with and after a failure; `workers` where None.
        address: of a running cluster, "auto" for the one that this machine belongs to. None: RAY_ADDRESS, or a cluster
            of one's own on this machine, which ends with the run.
        cpus_per_worker: that Ray sets aside for each.
        gpus_per_worker: the same.
        max_failures: restarts after workers have died or raised; -1: any number.
        storage: folder that all nodes share, or URL, where Ray keeps the run's state; `~/ray_results` where None.
        name: of the run; one that is started again under the same name goes on. A new one where None.
        runtime_env: Ray's own (working_dir, pip, env_vars, ...), for all workers.

    Raises `ConfigError` for values that can't work.
    """

    workers: int = 1
    min_workers: int | None = None
    address: str | None = None
    cpus_per_worker: float = 1.0
    gpus_per_worker: int = 0
    max_failures: int = 3
    storage: str | None = None
    name: str | None = None
    runtime_env: Values = field(default_factory=dict, repr=False)  # may hold secrets

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--num-workers must be at least 1, not {self.workers}")
        if self.min_workers is not None and not 1 <= self.min_workers <= self.workers:
            raise ConfigError(
                f"--min-workers must be from 1 to --num-workers, which is {self.workers}, not {self.min_workers}"
            )
        if not self.cpus_per_worker > 0:  # which NaN fails too
            raise ConfigError(f"--cpus-per-worker must be greater than 0, not {self.cpus_per_worker}")
        if self.gpus_per_worker not in (0, 1):
            raise ConfigError(f"--gpus-per-worker must be 0 or 1, not {self.gpus_per_worker}: a rank uses one GPU")
        if self.max_failures < -1:
            raise ConfigError(f"--max-failures must be at least 0, or -1 for any number, not {self.max_failures}")
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigError(
                f"--address {self.address} is of a Ray Client, which Ray Train does not work through; submit the "
                "command to the cluster with `ray job submit`, or run it on one of its nodes with --address auto"
            )

    def folder(self) -> str:
        """Return folder or URL of the run's state. Without a name, one is made of the time: call it once a run."""
        storage = self.storage or str(Path("~/ray_results").expanduser())
        if "://" not in storage:
            storage = os.path.abspath(storage)
        return f"{storage.rstrip('/')}/{self.name or time.strftime('bucketfeed-%Y%m%d-%H%M%S')}"


def run(work: Work[T], values: Values, place: RayPlace, folder: str) -> T:
    """Call `work(values, until_stopped)` on every worker, and return what rank 0's returns.

    `work` is a function of a module that the workers can import, or is sent whole; `until_stopped` returns once this
    process has got SIGTERM or Ctrl-C, with the signal's name: `work` is to save and return then. A second signal ends
    the run at once. Workers that fail are all started again, on as many as `place` allows, but not after an error that
    would come again: `ConfigError` or `NotFoundError`. `folder` is `place.folder()`.

    Raises these two as `work` does, `ConfigError` also where Ray is missing, and `BucketfeedError` where there is no
    cluster or the restarts are used up.
    """
    with connected(place) as ray:
        from ray.train.torch import TorchTrainer

        # Training stays in the folder that it was started in, or in that of the runtime_env.
        os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
        few = place.min_workers or place.workers
        board = _board(ray)
        storage, _, name = folder.rpartition("/")
        make: Any = TorchTrainer  # its annotations are those of the first version's functions and results
        trainer = make(
            partial(_on_worker, work, values, board),  # not train_loop_config, which dashboards show
            scaling_config=ray.train.ScalingConfig(
                num_workers=place.workers if few == place.workers else (few, place.workers),
                use_gpu=place.gpus_per_worker > 0,
                resources_per_worker={"CPU": place.cpus_per_worker}
                | ({"GPU": place.gpus_per_worker} if place.gpus_per_worker else {}),
            ),
            run_config=ray.train.RunConfig(
                name=name,
                storage_path=storage,
                failure_config=ray.train.FailureConfig(max_failures=place.max_failures),
            ),
        )
        try:
            ended = _stoppable(trainer.fit, lambda by: board.stop.remote(by))
        except ray.train.TrainingFailedError as e:
            _raise_first(e, place)
    result: T | _Refused = ended.return_value
    if isinstance(result, _Refused):
        raise result.error
    return result


def report(metrics: Values, checkpoints: str | None) -> None:
    """Give Ray the run's numbers and checkpoints (folder or URL); all workers call it, at the end.

    They become the `Result` and its checkpoint: the folder itself where it lies in the run's own, else a file
    `bucketfeed.json` that names it.
    """
    import ray.train

    context = ray.train.get_context()
    if checkpoints is None or context.get_world_rank() != 0:
        ray.train.report(metrics)
        return
    run = context.get_storage().experiment_fs_path
    if os.path.isabs(checkpoints) and Path(checkpoints).resolve().is_relative_to(Path(run).resolve()):
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint(checkpoints), checkpoint_upload_mode=mode)
        return
    with tempfile.TemporaryDirectory(prefix="bucketfeed-") as folder:
        (Path(folder) / _STATE).write_text(json.dumps({"checkpoint_dir": checkpoints}), encoding="utf-8")
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint(folder))


@contextlib.contextmanager
def connected(place: RayPlace) -> Iterator[Any]:
    """Connect to the place's cluster for the `with` block, which gets the module `ray`.

    A connection that this process has already is used, and left. Raises `ConfigError` where Ray is not installed or
    the cluster has too little, `BucketfeedError` where it does not answer.
    """
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    address = place.address or os.environ.get("RAY_ADDRESS")
    options: Values = {"address": address}
    if address is None:
        # CPUs are a matter of counting, and may be shared by more processes, as they may under torchrun.
        cpus = max(os.cpu_count() or 1, math.ceil(place.workers * place.cpus_per_worker))
        options = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(**options, runtime_env=place.runtime_env or None, logging_level=logging.WARNING)
    except Exception as e:  # ConnectionError, RuntimeError, ValueError: each for several reasons
        said = " ".join(str(e).split())
        raise BucketfeedError(
            f"no Ray cluster at {address or 'this machine'}: {said}; see `ray status` there, start one with "
            "`ray start --head`, or leave --address and RAY_ADDRESS away for one of your own"
        ) from e
    try:
        _check_room(ray.cluster_resources(), place, own=address is None)
        yield ray
    finally:
        ray.shutdown()


def _check_room(resources: dict[str, float], place: RayPlace, *, own: bool) -> None:
    """Tell what Ray would wait for without a word: more than the cluster has."""
    workers = place.min_workers or place.workers
    for name, each in (("CPU", place.cpus_per_worker), ("GPU", place.gpus_per_worker)):
        there = resources.get(name, 0.0)
        if workers * each <= there:
            continue
        text = (
            f"{workers} workers with {each:g} {name} each need {workers * each:g}, and the cluster has {there:g}; "
            f"take fewer --num-workers, or a smaller --min-workers or --{name.lower()}s-per-worker"
        )
        if own:
            raise ConfigError(text)
        _log.warning("%s, unless it grows: waiting for that", text)


def _import_ray() -> Any:
    # One process of Ray Train complains each second where Ray has no dashboard, which does no harm.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "State API may be temporarily unavailable")
    try:
        import ray
        import ray.train
    except ImportError as e:
        raise ConfigError(f"Ray is not here ({e}); install it: pip install 'bucketfeed[ray]'") from e
    return ray


# -- workers


@dataclass(frozen=True, slots=True)
class _Refused:
    """What a worker returns that need not try again."""

    error: BucketfeedError


def _on_worker(work: Work[T], values: Values, board: Any) -> T | _Refused:
    import ray
    import ray.train

    refused = ray.get(board.refused.remote())
    if refused is not None:  # by the workers before, and told to all of these alike
        return _Refused(refused)
    context = ray.train.get_context()
    logging.getLogger("bucketfeed").setLevel(logging.WARNING if context.get_world_rank() else logging.INFO)

    def until_stopped() -> str | None:
        try:
            return ray.get(board.stopped.remote())  # type: ignore[no-any-return]
        except ray.exceptions.RayError:  # the launcher has gone, and takes all with it
            return None

    try:
        return work(values, until_stopped)
    except _FINAL as e:
        if ray.get(board.refuse.remote(e, context.get_world_size(), _PATIENCE_SECONDS)):
            return _Refused(e)
        raise  # which ends the others, for they wait for this one


def _board(ray: Any) -> Any:
    """Return a handle of a new actor on this node, by which launcher and workers tell each other of the run's end."""
    import asyncio

    class Board:
        def __init__(self) -> None:
            self._stopped = asyncio.Event()
            self._by: str | None = None
            self._refused: BucketfeedError | None = None
            self._refusals = 0
            self._all_refused = asyncio.Event()

        async def stop(self, by: str) -> None:
            self._by = by
            self._stopped.set()

        async def stopped(self) -> str | None:
            await self._stopped.wait()
            return self._by

        async def refuse(self, error: BucketfeedError, workers: int, seconds: float) -> bool:
            """Note that a worker gives up; return whether all of them do, once that is known."""
            self._refused = error
            self._refusals += 1
            if self._refusals == workers:
                self._all_refused.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_refused.wait(), seconds)
            return self._all_refused.is_set()

        async def refused(self) -> BucketfeedError | None:
            return self._refused

    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(Board).remote()


def _stoppable(fit: Callable[[], T], stop: Callable[[str], object]) -> T:
    """Return what `fit` returns, called in a thread; a first SIGTERM or Ctrl-C calls `stop`, a second one ends this."""
    done: Future[T] = Future()

    def call() -> None:
        try:
            done.set_result(fit())
        except BaseException as e:
            done.set_exception(e)

    told = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if told:
            raise KeyboardInterrupt
        told = True
        stop(signal.Signals(number).name)

    before = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):  # not in the main thread: then its owner sees to signals
            before[number] = signal.signal(number, note)
    try:
        threading.Thread(target=call, name="bucketfeed-ray", daemon=True).start()
        return done.result()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_first(error: Any, place: RayPlace) -> NoReturn:
    """Raise the error that made the workers fail, as one of ours."""
    failures = [getattr(e, "_base_exc", e) for e in getattr(error, "worker_failures", {}).values()] or [error]
    ours = [e for e in failures if isinstance(e, BucketfeedError)]
    cause = (ours or failures)[0]
    if isinstance(cause, _FINAL):
        raise cause from error
    raise BucketfeedError(
        f"training on Ray failed for good ({place.max_failures} restarts allowed), the last time by "
        f"{type(cause).__name__}: {cause}; what was saved is kept: mend the cause, then start again with the same "
        "--name or --checkpoint-dir"
    ) from error


# -- index builds


def _call(function: Callable[..., T], args: tuple[Any, ...], kwargs: Values) -> T:
    return function(*args, **kwargs)


class RayExecutor(Executor):
    """Runs each call as a task of the Ray cluster that this process is connected to.

        ray.init()
        with RayExecutor() as executor:
            index = build_index(manifest, "tar", reader, executor=executor)

    Workers must have bucketfeed installed. Raises `ConfigError` where Ray is missing or not connected.
    """

    def __init__(self, *, cpus: float = 1.0) -> None:
        self._ray = _import_ray()
        if not self._ray.is_initialized():
            raise ConfigError("RayExecutor needs a cluster: call ray.init(), or ray.init(address=...), first")
        self._remote = self._ray.remote(num_cpus=cpus)(_call)
        self._running: set[Future[Any]] = set()
        self._closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Return the future of `fn(*args, **kwargs)`; cancelling it cancels the task, if it is running too."""
        if self._closed:
            raise RuntimeError("this executor was shut down")
        future: Future[T] = Future()
        task = self._remote.remote(fn, args, kwargs)
        self._running.add(future)

        def ended(future: Future[T]) -> None:
            self._running.discard(future)
            if future.cancelled():
                self._ray.cancel(task)

        future.add_done_callback(ended)
        task.future().add_done_callback(partial(_copy, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; the cluster stays."""
        self._closed = True
        running = list(self._running)
        if cancel_futures:
            for future in running:
                future.cancel()
        if wait:
            wait_for(running)


def _copy(future: Future[Any], task: Future[Any]) -> None:
    """Give `future` what the task has come to: its own error, not one that Ray has wrapped it in."""
    if not future.set_running_or_notify_cancel():
        return
    error = task.exception()
    if error is None:
        future.set_result(task.result())
    else:
        future.set_exception(getattr(error, "cause", None) or error)
