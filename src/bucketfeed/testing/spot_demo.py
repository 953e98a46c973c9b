"""The life of a spot training job without AWS: submitted, interrupted in mid-epoch, restarted, and checked."""

from __future__ import annotations

import contextlib
import re
import signal
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bucketfeed.errors import BucketfeedError
from bucketfeed.platforms.local import STOPPED
from bucketfeed.platforms.sagemaker.follow import PROGRESS
from bucketfeed.platforms.sagemaker.job import Job
from bucketfeed.platforms.sagemaker.plan import check_sdk
from bucketfeed.sampling.topology import Topology
from bucketfeed.store.sizes import format_size
from bucketfeed.store.urls import parse_url
from bucketfeed.testing.demo import emptied, near, reached, say
from bucketfeed.testing.digits import digits_bucket
from bucketfeed.testing.job_files import download
from bucketfeed.testing.jobs import JobResult, check_allowed, run_training_job, submitted
from bucketfeed.testing.moto import MotoBucket
from bucketfeed.train.checkpoint import Checkpoints
from bucketfeed.train.compute import Sums
from bucketfeed.train.config import TrainConfig
from bucketfeed.train.data import RunData
from bucketfeed.train.loop import Stopped, train
from bucketfeed.train.model import Step
from bucketfeed.train.ranks import Ranks
from bucketfeed.train.records import audit

EPOCHS = 3
SEED = 17
SAMPLES = 1437
_HOSTS, _PROCESSES, _BATCH = 2, 2, 8
_RANKS = _HOSTS * _PROCESSES
_SEEN = SAMPLES - SAMPLES % (_RANKS * _BATCH)  # what fills no batch is left out of an epoch
_ACCURACY = 0.95
_NEAR = 0.03  # ranks normalise their own parts of a batch: the same samples give not quite the same model
_RUN_DIR = "/opt/ml/checkpoints/run"  # so that the audit's records outlive an interruption, as checkpoints do
_TESTED = "epoch 0: test"  # in the log, just before the second epoch
_REACH_SECONDS = 60.0
_RESUMED = re.compile(r"resumed at sample (\d+) of epoch (\d+)")

Place = tuple[int, int]
"""Epoch and sample, of a cursor."""


@dataclass(frozen=True)
class Life:
    """What was seen of a job and of a run on this machine; audits tell by epoch how often each sample was taken."""

    interrupted: Place
    resumed: Place | None
    result: dict[str, Any]
    seen: dict[int, Counter[str]]
    model_accuracy: float | None  # of the model fetched, tested here
    local: dict[str, Any]
    local_seen: dict[int, Counter[str]]


def live(run_dir: Path) -> int:
    """Show the life of a job, leave its model and records in `run_dir`, return 0 if all held, 1 if not.

    Raises `ConfigError` before anything is started where this machine can't run a job.
    """
    check_allowed()
    check_sdk()
    run_dir = emptied(run_dir)
    try:
        with _stops(), tempfile.TemporaryDirectory(prefix="bucketfeed-spot-") as hosts:
            return _Demo(run_dir, Path(hosts)).run()
    except (_Stop, Stopped):
        say("\nstopped; nothing is left running")
        return STOPPED


class _Stop(BaseException):
    """Ctrl-C or SIGTERM. No `KeyboardInterrupt`: a job would take it for its own, and save first."""


@contextlib.contextmanager
def _stops() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stop

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Demo:
    def __init__(self, run_dir: Path, hosts: Path) -> None:
        self._run_dir, self._hosts = run_dir, hosts

    def run(self) -> int:
        began = time.monotonic()
        say("1 of 6  a mocked AWS on this machine: S3 with 1,797 handwritten digits in tars, IAM, SageMaker")
        with digits_bucket(only_shards=True) as bucket:
            options = _options(bucket)
            say(f"\n2 of 6  submit a spot job: {_HOSTS} instances, {_PROCESSES} processes each")
            description, uploaded = self._submitted(bucket, options)
            name = description["TrainingJobName"]
            say(f"        {name}: uploaded {uploaded}")
            say("\n3 of 6  run it: each host installs what was uploaded, and trains until AWS takes it back by SIGTERM")
            first = self._job(bucket, description, "first", stop=True)
            checkpoints = description["CheckpointConfig"]["S3Uri"]
            interrupted = _cursor(bucket, checkpoints)
            say(f"        interrupted at {_at(interrupted)}, saved {first.stop_seconds or 0:.1f} s after SIGTERM")
            say(f"\n4 of 6  start it again, on new instances with what is in {checkpoints}")
            second = self._job(bucket, description, "second")
            resumed = _resumed(second)
            say("\n5 of 6  fetch the model and the records from the bucket, and test the model here")
            model, seen = self._fetched(bucket, second.output_url, checkpoints)
            say("\n6 of 6  train here in one process, with the same data, seed and global batch")
            config = TrainConfig(
                **options,
                batch_size=_BATCH * _RANKS,
                storage_options=bucket.storage_options,
                cache_dir=str(self._hosts / "cache"),
                run_dir=str(self._run_dir / "local"),
                progress=False,
            )
            torch.set_num_threads(1)  # as in the job: two lose much where others use the cores
            local = train(config, Topology())
            life = Life(
                interrupted=interrupted,
                resumed=resumed,
                result=second.result(),
                seen=seen,
                model_accuracy=_tested(model, config),
                local=local,
                local_seen=audit(config.run_dir),
            )
        code = concluded(life, f"{name}: {uploaded}", near(model))
        say(f"{time.monotonic() - began:.0f} s in all; {near(self._run_dir)} has the logs and records too")
        return code

    def _submitted(self, bucket: MotoBucket, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Submit the job as a user does; return its description, and what was uploaded."""
        given = {**options, "batch_size": _BATCH, "run_dir": _RUN_DIR}
        job = Job(
            bucket=bucket.name,
            role=bucket.server.create_role("spot-demo"),
            region="us-east-1",
            hyperparameters={name.replace("_", "-"): value for name, value in given.items()},
            name="bucketfeed-spot-demo",
            instance_count=_HOSTS,
            processes=_PROCESSES,
            spot=True,
            max_run_seconds=600,
            environment={"OMP_NUM_THREADS": "1"},  # the hosts share this machine's cores
        )
        description = submitted(job, bucket.server.session())
        place = f"jobs/{description['TrainingJobName']}/"
        found = bucket.client.list_objects_v2(Bucket=bucket.name, Prefix=place)["Contents"]
        size = format_size(sum(entry["Size"] for entry in found))
        return description, f"{len(found)} objects, {size}, to {bucket.url}{place}"

    def _job(self, bucket: MotoBucket, description: dict[str, Any], name: str, *, stop: bool = False) -> JobResult:
        """Run the job on new instances, to its end or into the midst of its second epoch."""

        def reaches(host: str, line: str) -> bool:
            return stop and _TESTED in line and self._reaches(self._hosts / name / host)

        done = run_training_job(
            description,
            self._hosts / name,
            s3=bucket.client,
            environment=bucket.server.environment,
            on_log=lambda host, line: say(f"        {host}: {line}") if PROGRESS.search(line) else None,
            stop_when=reaches,
        )
        (self._run_dir / f"{name}.log").write_text(done.text() + "\n", encoding="utf-8")
        wanted = "Interrupted" if stop else "Completed"
        if done.status != wanted:
            raise BucketfeedError(
                f"the job should be {wanted} now and is {done.status}: {done.failure_reason}; its log: "
                f"{self._run_dir / f'{name}.log'}"
            )
        return done

    @staticmethod
    def _reaches(host: Path) -> bool:
        """Wait until a rank has records of the second epoch's middle; where that takes too long, be content."""
        records = host / "checkpoints" / Path(_RUN_DIR).name / "audit-rank00000.jsonl"
        end = time.monotonic() + _REACH_SECONDS
        while not reached(records) and time.monotonic() < end:
            time.sleep(0.02)
        return True

    def _fetched(self, bucket: MotoBucket, output_url: str, checkpoints: str) -> tuple[Path, dict[int, Counter[str]]]:
        """Bring model.tar.gz and the audit's records here; return the weights' file and the audit."""
        archive = self._run_dir / "model.tar.gz"
        bucket.client.download_file(bucket.name, parse_url(output_url).key + archive.name, str(archive))
        with tarfile.open(archive) as tar:
            tar.extractall(self._run_dir / "model", filter="data")
        download(bucket.client, f"{checkpoints}/{Path(_RUN_DIR).name}/", self._run_dir / "records")
        return self._run_dir / "model" / "model.pt", audit(self._run_dir / "records")


def _options(bucket: MotoBucket) -> dict[str, Any]:
    """Return the fields of `TrainConfig` that are the same in the job and here."""
    return {
        "data": f"{bucket.url}shards/train/",
        "test_data": f"{bucket.url}shards/test/",
        "num_classes": 10,
        "image_size": 16,
        "epochs": EPOCHS,
        "lr": 3e-3,
        "seed": SEED,
        "cache_limit": "100MB",
        "audit": True,
    }


def _cursor(bucket: MotoBucket, checkpoints: str) -> Place:
    """Return where the newest checkpoint in the bucket stands."""
    state = Checkpoints(checkpoints, bucket.storage_options).load()
    if state is None:
        raise BucketfeedError(f"the interrupted job has left no checkpoint in {checkpoints}")
    return state["cursor"]["epoch"], state["cursor"]["position"]


def _resumed(done: JobResult) -> Place | None:
    match = _RESUMED.search(done.text())
    return (int(match[2]), int(match[1])) if match else None


def _tested(weights: Path, config: TrainConfig) -> float | None:
    """Return the accuracy of the weights in a file, on the test samples of `config`."""
    data, alone = RunData(config), Topology()
    step = Step(data.model())
    step.model.load_state_dict(torch.load(weights, weights_only=True))
    step.eval()
    sums = Sums(torch.device("cpu"))
    loader = data.test_loader(alone, pin_memory=False)
    assert loader is not None
    with loader, torch.inference_mode():
        for batch in loader:
            sums.add(step(batch))
    return sums.means(Ranks(alone))[1]


def concluded(life: Life, submitted: str, model: Path) -> int:
    """Print the closing table and whether all of it holds; return the exit code."""
    say("\n" + table(life, submitted, model))
    found = problems(life)
    for problem in found:
        say(f"NOT AS IT SHOULD BE: {problem}")
    if not found:
        say("all of it holds")
    return 1 if found else 0


def problems(life: Life) -> list[str]:
    """Return what is not as it should be."""
    found = []
    epoch, sample = life.interrupted
    if not (0 < sample < _SEEN and epoch < EPOCHS):
        found.append(f"the job was interrupted at {_at(life.interrupted)}, which is not in the midst of an epoch")
    if life.resumed != life.interrupted:
        found.append(f"it was interrupted at {_at(life.interrupted)} and resumed at {_at(life.resumed)}")
    for epoch in range(EPOCHS):
        seen, local = life.seen.get(epoch, Counter()), life.local_seen.get(epoch, Counter())
        again = sum(times > 1 for times in seen.values())
        if again or len(seen) != _SEEN:
            found.append(f"epoch {epoch}: {again} samples more than once, {len(seen):,} of {_SEEN:,} seen")
        if seen != local:
            found.append(f"epoch {epoch}: the job took other samples than the local run")
    if life.result["order_hash"] != life.local["order_hash"]:
        found.append(f"the job's order is {life.result['order_hash']}, the local run's {life.local['order_hash']}")
    accuracy, local_accuracy = life.result["accuracy"], life.local["accuracy"]
    if accuracy < _ACCURACY or abs(accuracy - local_accuracy) > _NEAR:
        found.append(f"the job's accuracy is {accuracy:.4f}: below {_ACCURACY}, or far from {local_accuracy:.4f} here")
    if life.model_accuracy is None or abs(life.model_accuracy - accuracy) > 1e-6:
        found.append(f"the model fetched has an accuracy of {life.model_accuracy}, the job's was {accuracy}")
    return found


def table(life: Life, submitted: str, model: Path) -> str:
    """Return the closing table."""
    counts = (f"{list(life.seen.get(epoch, Counter()).values()).count(1):,}" for epoch in range(EPOCHS))
    rows = {
        "submitted": submitted,
        "interrupted": f"at {_at(life.interrupted)}",
        "restarted": f"at {_at(life.resumed)}, on {life.result['world_size']} ranks",
        "finished": f"{life.result['epochs']} epochs, {life.result['steps']} steps",
        "accuracy": f"{life.result['accuracy']:.4f} (local run {life.local['accuracy']:.4f})",
        "seen exactly once": f"{', '.join(counts)} samples in epochs 0 to {EPOCHS - 1}; {SAMPLES - _SEEN} of "
        f"{SAMPLES:,} fill no batch",
        "model": f"{model}, tested here: {life.model_accuracy or 0:.4f}",
        "order hash": f"job {life.result['order_hash']}, local run {life.local['order_hash']}",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows.items())


def _at(place: Place | None) -> str:
    return "no sample" if place is None else f"sample {place[1]:,} of epoch {place[0]}"
