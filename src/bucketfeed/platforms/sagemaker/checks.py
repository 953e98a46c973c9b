"""What is wrong with a job, or looks so, before it costs anything; all of it from the request alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from bucketfeed.errors import ConfigError
from bucketfeed.platforms.sagemaker import prices
from bucketfeed.platforms.sagemaker.job import Job
from bucketfeed.store.sizes import format_size
from bucketfeed.store.urls import parse_url

_SECRET_OPTIONS = ("secret", "token", "password", "sas", "account_key", "private_key")
_SECRET_EXACT = {"key"}
_CLEARTEXT = "anyone who may describe the job reads it; let the role have the permission instead"


def warnings(job: Job, image: str) -> list[str]:
    """Return what looks wrong and may yet be meant. Needs no account."""
    return [*_of_image(job, image), *_of_disk(job), *_of_time(job), *_of_ranks(job), *_of_secrets(job)]


def known_instance_type(instance_type: str) -> None:
    """Raise `ConfigError` unless the installed botocore knows the type for training."""
    known = _service().shape_for("TrainingInstanceType").enum
    if instance_type in known:
        return
    near = [name for name in known if name.split(".")[1] == instance_type.removeprefix("ml.").split(".")[0]]
    hint = f"ml.{instance_type}" if f"ml.{instance_type}" in known else ", ".join(near) or ", ".join(known)
    raise ConfigError(
        f"--instance-type {instance_type} is none that SageMaker trains on; did you mean: {hint}? "
        "(a newer boto3 knows newer types)"
    )


def against_model(operation: str, request: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what SageMaker's API would refuse by its own patterns, lengths and lists of values."""
    found = list(_violations(_service().operation_model(operation).input_shape, request, ""))
    if found:
        raise ConfigError(f"SageMaker would refuse the job: {'; '.join(found)}")


@functools.cache
def _service() -> Any:
    import botocore.session

    return botocore.session.get_session().get_service_model("sagemaker")


def _violations(shape: Any, value: Any, where: str) -> Iterator[str]:
    limits = shape.metadata
    if shape.type_name == "structure":
        for name in value:
            if name not in shape.members:
                yield f"{where}.{name} is not known to the installed boto3; upgrade it".lstrip(".")
            else:
                yield from _violations(shape.members[name], value[name], f"{where}.{name}".lstrip("."))
        return
    size = len(value) if shape.type_name in ("string", "list", "map") else value
    if ("min" in limits and size < limits["min"]) or ("max" in limits and size > limits["max"]):
        yield f"{where} is {_short(value)}, and {size} is not in {limits.get('min', 0)} to {limits.get('max', 'any')}"
    if shape.type_name == "list":
        for number, item in enumerate(value):
            yield from _violations(shape.member, item, f"{where}[{number}]")
    elif shape.type_name == "map":
        for key, item in value.items():
            yield from _violations(shape.key, key, f"{where} key {key}")
            yield from _violations(shape.value, item, f"{where}[{key}]")
    elif shape.type_name == "string":
        if getattr(shape, "enum", None) and value not in shape.enum:
            yield f"{where} is {_short(value)}, which is none of its {len(shape.enum)} known values"
        if "pattern" in limits and not _fits(limits["pattern"], value):
            yield f"{where} is {_short(value)}, which does not fit {limits['pattern']}"


def _fits(pattern: str, value: str) -> bool:
    try:
        return re.fullmatch(pattern, value, re.ASCII) is not None
    except re.error:  # the service's own dialect
        return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _of_image(job: Job, image: str) -> Iterator[str]:
    gpu_image = re.search(r"gpu|cu\d{2,3}|cuda", image.rpartition("/")[2]) is not None
    has_gpu = prices.gpus(job.instance_type) > 0
    if gpu_image and not has_gpu:
        yield f"the image {image} is for GPUs, and {job.instance_type} has none: it trains on the CPU, or not at all"
    if has_gpu and re.search(r"cpu", image.rpartition("/")[2]):
        yield f"the image {image} is for CPUs: the GPUs of {job.instance_type} would stand idle"
    region = re.search(r"\.ecr\.([a-z0-9-]+)\.amazonaws", image)
    if region and region[1] != job.region:
        yield f"the image lies in {region[1]} and the job runs in {job.region}: SageMaker pulls from its own alone"
    if job.hyperparameters.get("device") == "cuda" and not has_gpu:
        yield f"--device cuda on {job.instance_type}, which has no GPU: training will refuse"


def _of_disk(job: Job) -> Iterator[str]:
    limit = job.cache_limit_bytes
    volume = job.volume_gb * 2**30
    if limit is not None and limit > volume and not prices.has_instance_store(job.instance_type):
        yield (
            f"--cache-limit {format_size(limit)} is more than the volume of {job.volume_gb} GiB: the cache would run "
            "into a full disk; raise --volume-gb or lower it"
        )


def _of_time(job: Job) -> Iterator[str]:
    if job.spot and float(job.hyperparameters.get("save-seconds", 0)) > 1800:
        yield "--save-seconds above half an hour with --spot: a lost host loses what it has done since the last one"
    if job.checkpoint_url:
        yield f"jobs that are given {job.checkpoint_url} at the same time overwrite each other's checkpoints"


def _of_ranks(job: Job) -> Iterator[str]:
    count = prices.gpus(job.instance_type)
    if isinstance(job.processes, int) and count and job.processes != count:
        yield f"--nproc-per-node {job.processes} on {job.instance_type}, which has {count} GPU(s): give auto"
    for name in ("data", "test-data"):
        url = str(job.hyperparameters.get(name, ""))
        if url and url not in job.channels and parse_url(url).scheme == "file":
            yield f"--{name} {url} is a path of this machine, which the job does not see: give a URL, or a channel"


def _of_secrets(job: Job) -> Iterator[str]:
    options = job.hyperparameters.get("storage-options") or {}
    for name in _keys(options):
        if name.lower() in _SECRET_EXACT or any(word in name.lower() for word in _SECRET_OPTIONS):
            yield f"--storage-options has {name!r}, which is sent as a hyperparameter: {_CLEARTEXT}"
    for name in job.environment:
        if re.search(r"SECRET|PASSWORD|TOKEN|ACCESS_KEY|CREDENTIALS", name):
            yield f"--env {name} is kept in the job's description: {_CLEARTEXT}"


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _keys(item)
