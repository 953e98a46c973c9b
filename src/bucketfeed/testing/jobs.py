"""Runs a SageMaker training job on this machine as its description says, without docker and without an account.

Each host of the job gets namespaces of its own: /opt/ml, /etc/hosts, a host name, and process 1, which is the job's
container command. Channels come from the bucket, which may be a mocked one; results go back to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bucketfeed.errors import BucketfeedError, ConfigError
from bucketfeed.platforms.sagemaker.job import Job
from bucketfeed.testing.image import make_image
from bucketfeed.testing.job_files import download_checkpoints, lay_out, sync_checkpoints, upload_results

_log = logging.getLogger(__name__)

GRACE_SECONDS = 120.0  # which SageMaker gives between SIGTERM and SIGKILL
_OTHERS_SECONDS = 5.0  # between the host that failed and the end of the others
_ROOT = "/opt/ml"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAMESPACES = ("--mount", "--pid", "--fork", "--kill-child", "--uts")
# $1: the host's /opt/ml, $2: its /etc/hosts, $3: its name; the rest is the container's command.
_INSIDE = """\
set -e
mount --make-rprivate /
mkdir -p /opt/ml
mount --bind "$1" /opt/ml
mount --bind "$2" /etc/hosts
mount -t proc proc /proc
hostname "$3"
shift 3
cd /
exec "$@"
"""


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    `status` is Completed, Failed, Stopped (by MaxRuntimeInSeconds) or Interrupted (by `stop_when`, as a spot instance
    is: run the job again to go on). `folders` holds each host's /opt/ml, `seconds` the time from the first start to
    the last end, `stop_seconds` that from SIGTERM to the last end.
    """

    status: str
    exit_codes: Mapping[str, int]
    failure_reason: str
    logs: tuple[tuple[str, str], ...]
    folders: Mapping[str, Path]
    seconds: float
    stop_seconds: float | None
    output_url: str

    def text(self) -> str:
        """Return the log of all hosts, a line each, as it came."""
        return "\n".join(f"{host}: {line}" for host, line in self.logs)

    def result(self) -> dict[str, Any]:
        """Return the JSON object that train.py printed last."""
        for _, line in reversed(self.logs):
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    found: dict[str, Any] = json.loads(line)
                    if "order_hash" in found:
                        return found
        raise BucketfeedError(f"the job ({self.status}) printed no result; its last lines:\n{self.text()[-2000:]}")


def run_training_job(
    description: Mapping[str, Any],
    folder: str | os.PathLike[str] | None = None,
    *,
    s3: Any = None,
    environment: Mapping[str, str] | None = None,
    on_log: Callable[[str, str], None] | None = None,
    stop_when: Callable[[str, str], bool] | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> JobResult:
    """Run the job to its end and return how it ended.

    Args:
        description: what CreateTrainingJob was given, or DescribeTrainingJob gives.
        folder: an empty one, or a new one; takes what the hosts have on disk. A new temporary one where None.
        s3: a boto3 client for channels and results; one of your own configuration where None.
        environment: for the containers, beside the job's own: credentials, `AWS_ENDPOINT_URL`.
        on_log: called with host and line, as they come.
        stop_when: called likewise; once it is true the job is interrupted, as spot instances are.
        grace_seconds: between SIGTERM and SIGKILL.

    Linux only. Raises `ConfigError` where this machine gives no namespaces, or the job needs what is not here.
    """
    check_allowed()
    if s3 is None:
        import boto3

        s3 = boto3.client("s3")
    folder = Path(folder or tempfile.mkdtemp(prefix="bucketfeed-job-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: name a new folder for each run of a job")
    count = int(description["ResourceConfig"].get("InstanceCount", 1))
    names = [f"algo-{n + 1}" for n in range(count)]
    own = _environment(description, environment)
    hosts = []
    for name in names:
        lay_out(description, s3, folder / name, name, names)
        programs = make_image(folder / f"{name}.image")  # its own: what one host installs the other must not see
        hosts.append(_Host(name, folder / name, programs, download_checkpoints(description, s3, folder / name)))
    etc = folder / "hosts"
    etc.write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.{n + 1} {name}\n" for n, name in enumerate(names)))
    run = _Run(description, hosts, on_log, stop_when, grace_seconds)
    run.start(_command(description), own, etc)
    run.wait()
    result = run.result()
    for host in hosts:
        sync_checkpoints(description, s3, host.folder, host.downloaded)
    if result.status != "Interrupted":
        upload_results(s3, [host.folder for host in hosts], result.output_url)
    return result


def submitted(job: Job, session: Any) -> dict[str, Any]:
    """Submit `job` and return what DescribeTrainingJob says of it, with the Environment, which moto forgets."""
    from bucketfeed.platforms.sagemaker.submit import submit

    sent: dict[str, Any] = {}
    event = "provide-client-params.sagemaker.CreateTrainingJob"
    session.events.register(event, lambda params, **_: sent.update(params))
    name = submit(job, session=session)
    described = session.client("sagemaker").describe_training_job(TrainingJobName=name)
    return {**described, "Environment": sent["Environment"]}


def check_allowed() -> None:
    """Raise `ConfigError` where namespaces can't be made here."""
    try:
        done = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, timeout=30, check=False)
        said = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError as e:
        said = f"{e.filename} is not installed"
    if not said and os.geteuid() and not os.path.isdir(_ROOT):
        raise ConfigError(f"{_ROOT}, where a job has its files, is not there to be mounted on: sudo mkdir -p {_ROOT}")
    if said:
        raise ConfigError(
            f"a job can't be run on this machine, for it gives no namespaces: {said}; run as root on Linux with "
            "util-linux (in a container: with --privileged), or submit the job to SageMaker"
        )


def _unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["setpriv", "--pdeathsig", "KILL", "unshare", *user, *_NAMESPACES]


def _command(description: Mapping[str, Any]) -> list[str]:
    algorithm = description["AlgorithmSpecification"]
    command = [*algorithm.get("ContainerEntrypoint", []), *algorithm.get("ContainerArguments", [])]
    if not command:
        raise ConfigError(
            "the job has no ContainerEntrypoint, and the one of its image can't be known without the image"
        )
    return command


def _environment(description: Mapping[str, Any], more: Mapping[str, str] | None) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # two jobs on one machine share its network
    return {
        "LANG": "C.UTF-8",
        "TRAINING_JOB_NAME": description["TrainingJobName"],
        "TRAINING_JOB_ARN": description.get("TrainingJobArn", ""),
        "MASTER_PORT": str(port),
        # Nothing is fetched: what the image has must do.
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        **(description.get("Environment") or {}),
        **(more or {}),
    }


@dataclass
class _Host:
    name: str
    folder: Path
    programs: Path
    downloaded: dict[str, tuple[int, int]]
    process: subprocess.Popen[str] | None = None
    reader: threading.Thread | None = None
    code: int | None = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the container's process 1, or end all of it by SIGKILL."""
        if self.process is None or self.code is not None:
            return
        with contextlib.suppress(OSError):
            if number == signal.SIGKILL:
                self.process.kill()  # and, by --kill-child, all that is in its namespace
                return
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            for pid in children:
                os.kill(int(pid), number)


@dataclass
class _Run:
    description: Mapping[str, Any]
    hosts: list[_Host]
    on_log: Callable[[str, str], None] | None
    stop_when: Callable[[str, str], bool] | None
    grace_seconds: float
    events: queue.SimpleQueue[tuple[_Host, str | None]] = field(default_factory=queue.SimpleQueue)
    logs: list[tuple[str, str]] = field(default_factory=list)
    ended: list[_Host] = field(default_factory=list)
    stopped_by: str | None = None
    stopped_at: float | None = None
    began: float = field(default_factory=time.monotonic)
    kill_at: float | None = None
    over_at: float = 0.0

    def start(self, command: list[str], environment: Mapping[str, str], etc: Path) -> None:
        """Start all hosts."""
        for host in self.hosts:
            temporary = host.folder.with_name(f"{host.name}.tmp")
            temporary.mkdir()
            inside = ["/bin/sh", "-c", _INSIDE, "sh", str(host.folder), str(etc), host.name, *command]
            host.process = subprocess.Popen(
                [*_unshare(), *inside],
                env={
                    "PATH": f"{host.programs}:{_PATH}",
                    "HOME": str(temporary),
                    "TMPDIR": str(temporary),
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # a Ctrl-C is this process's to pass on
            )
            host.reader = threading.Thread(target=self._read, args=(host,), daemon=True)
            host.reader.start()

    def _read(self, host: _Host) -> None:
        assert host.process is not None
        assert host.process.stdout is not None
        for line in host.process.stdout:
            self.events.put((host, line.rstrip("\n")))
        host.process.wait()
        self.events.put((host, None))

    def wait(self) -> None:
        """Return when all hosts have ended; none is left behind, whatever happens."""
        try:
            while len(self.ended) < len(self.hosts):
                try:
                    self._step()
                except KeyboardInterrupt:
                    self._stop("Interrupted")
        finally:
            for host in self.hosts:
                host.signal(signal.SIGKILL)
                if host.reader is not None:
                    host.reader.join(timeout=10)
            self.over_at = time.monotonic()

    def _step(self) -> None:
        runtime_over = self.began + float(self.description["StoppingCondition"]["MaxRuntimeInSeconds"])
        due = self.kill_at if self.kill_at is not None else runtime_over
        try:
            host, line = self.events.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            if self.kill_at is None:
                self._stop("Stopped")
            else:
                self.kill_at += 60.0
                for host in self.hosts:
                    host.signal(signal.SIGKILL)
            return
        if line is None:
            self._end(host)
            return
        self.logs.append((host.name, line))
        if self.on_log is not None:
            self.on_log(host.name, line)
        if self.stopped_by is None and self.stop_when is not None and self.stop_when(host.name, line):
            self._stop("Interrupted")

    def _end(self, host: _Host) -> None:
        assert host.process is not None
        host.code = host.process.returncode
        self.ended.append(host)
        if host.code and self.stopped_by is None:  # a host that fails is the end of the job
            self.kill_at = min(self.kill_at or float("inf"), time.monotonic() + _OTHERS_SECONDS)

    def _stop(self, why: str) -> None:
        if self.stopped_by is not None:
            return
        self.stopped_by, self.stopped_at = why, time.monotonic()
        self.kill_at = self.stopped_at + self.grace_seconds
        for host in self.hosts:
            host.signal(signal.SIGTERM)

    def result(self) -> JobResult:
        """Return how it ended."""
        failed = [host for host in self.ended if host.code]
        status = self.stopped_by or ("Failed" if failed else "Completed")
        if self.stopped_by and not failed:
            status = "Completed"  # it came to its end before the signal
        reason = ""
        if status == "Failed":
            written = failed[0].folder / "output/failure"
            text = written.read_text(encoding="utf-8", errors="replace")[:1024] if written.exists() else ""
            reason = f"AlgorithmError: {text}, exit code: {failed[0].code}"
        output = self.description["OutputDataConfig"]["S3OutputPath"].rstrip("/")
        return JobResult(
            status=status,
            exit_codes={host.name: int(host.code or 0) for host in self.hosts},
            failure_reason=reason,
            logs=tuple(self.logs),
            folders={host.name: host.folder for host in self.hosts},
            seconds=self.over_at - self.began,
            stop_seconds=self.over_at - self.stopped_at if self.stopped_at is not None else None,
            output_url=f"{output}/{self.description['TrainingJobName']}/output/",
        )
