"""Follows a job to its end: what SageMaker does with it, and what its hosts log, as it comes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bucketfeed.errors import NotFoundError
from bucketfeed.platforms.sagemaker.aws import told

_GROUP = "/aws/sagemaker/TrainingJobs"
_OVER = {"Completed", "Failed", "Stopped"}
PROGRESS = re.compile(r"epoch \d+: |resumed at |container: |Traceback|Error")
_SECONDS = 10.0  # between looks; AWS allows few calls a second for all jobs of an account


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: its status (Completed, Failed, Stopped), the reason of a failure, and what it left."""

    status: str
    reason: str
    model_url: str | None
    seconds: int
    billable_seconds: int | None

    def text(self) -> str:
        """Return it in a line."""
        billed = "" if self.billable_seconds is None else f", {self.billable_seconds} s are billed for each host"
        parts = [f"{self.status} after {self.seconds} s{billed}"]
        if self.reason:
            parts.append(self.reason)
        if self.model_url:
            parts.append(f"the model is {self.model_url}")
        return "; ".join(parts)


@dataclass
class _Log:
    """Lines of all hosts of a job, read to where they were read before."""

    client: Any
    job: str
    tokens: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[tuple[str, str]]:
        """Return what is new: host and line, in the order of their times."""
        found: list[tuple[int, str, str]] = []
        for stream in self._streams():
            host = stream.removeprefix(f"{self.job}/").rsplit("-", 1)[0] or stream
            found += [(at, host, line) for at, line in self._new(stream)]
        return [(host, line) for _, host, line in sorted(found, key=lambda entry: entry[0])]

    def _streams(self) -> list[str]:
        names: list[str] = []
        more: dict[str, str] = {}
        try:
            while True:
                with told(f"looking for the log of {self.job}"):
                    reply = self.client.describe_log_streams(
                        logGroupName=_GROUP, logStreamNamePrefix=f"{self.job}/", **more
                    )
                names += [stream["logStreamName"] for stream in reply["logStreams"]]
                if not reply.get("nextToken"):
                    return names
                more = {"nextToken": reply["nextToken"]}
        except NotFoundError:  # no job of the account has ever logged
            return names

    def _new(self, stream: str) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        while True:
            token = self.tokens.get(stream)
            with told(f"reading the log {stream}"):
                reply = self.client.get_log_events(
                    logGroupName=_GROUP,
                    logStreamName=stream,
                    startFromHead=True,
                    **({"nextToken": token} if token else {}),
                )
            found += [(event["timestamp"], event["message"]) for event in reply["events"]]
            self.tokens[stream] = reply["nextForwardToken"]
            if reply["nextForwardToken"] == token or not reply["events"]:
                return found


def follow(
    name: str,
    *,
    session: Any,
    say: Callable[[str], None],
    logs: bool = False,
    pause: Callable[[], None] = lambda: time.sleep(_SECONDS),
) -> Ended:
    """Say what happens to the training job until it has ended, and return how.

    Said are the phases of the job, and of its log the lines on progress and errors; with `logs` all of them.
    """
    client = session.client("sagemaker")
    log = _Log(session.client("logs"), name)
    phases = 0
    while True:
        with told(f"looking at the job {name}"):
            description = client.describe_training_job(TrainingJobName=name)
        phases = _say_phases(description, phases, say)
        for host, line in log.lines():
            if logs or PROGRESS.search(line):
                say(f"{host}: {line}")
        if description["TrainingJobStatus"] in _OVER:
            return _ended(description)
        pause()


def follow_tuning(
    name: str, *, session: Any, say: Callable[[str], None], pause: Callable[[], None] = lambda: time.sleep(_SECONDS)
) -> Ended:
    """Say how many jobs of the tuning have ended, until all have, and return how; the model is the best one's."""
    client = session.client("sagemaker")
    before = None
    while True:
        with told(f"looking at the tuning job {name}"):
            found = client.describe_hyper_parameter_tuning_job(HyperParameterTuningJobName=name)
        counts = found.get("TrainingJobStatusCounters", {})
        if counts != before:
            say(", ".join(f"{count} {state}" for state, count in counts.items()))
        before = counts
        status = found["HyperParameterTuningJobStatus"]
        if status in _OVER:
            best = found.get("BestTrainingJob") or {}
            if best:
                say(f"best: {best['TrainingJobName']} with {best.get('TunedHyperParameters')}")
            seconds = _seconds(found.get("CreationTime"), found.get("HyperParameterTuningEndTime"))
            return Ended(status, found.get("FailureReason", ""), None, seconds, None)
        pause()


def _say_phases(description: Mapping[str, Any], known: int, say: Callable[[str], None]) -> int:
    phases = description.get("SecondaryStatusTransitions") or []
    for phase in phases[known:]:
        said = phase.get("StatusMessage", "")
        say(f"{phase['Status']}: {said}" if said else phase["Status"])
    return len(phases)


def _ended(description: Mapping[str, Any]) -> Ended:
    seconds = _seconds(description.get("CreationTime"), description.get("TrainingEndTime"))
    return Ended(
        status=description["TrainingJobStatus"],
        reason=description.get("FailureReason", ""),
        model_url=(description.get("ModelArtifacts") or {}).get("S3ModelArtifacts"),
        seconds=seconds,
        billable_seconds=description.get("BillableTimeInSeconds"),
    )


def _seconds(start: Any, end: Any) -> int:
    return int((end - start).total_seconds()) if start and end else 0
