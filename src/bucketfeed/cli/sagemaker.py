"""`launch.py sagemaker`: the training of train.py as a SageMaker training job."""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

from bucketfeed.cli import train as train_line
from bucketfeed.errors import ConfigError
from bucketfeed.platforms.local import STOPPED

MANUAL = """\
Train on SageMaker, with the same options as train.py: all that are not below go to it (see train.py --help).

Look first: the request, the files, the cost, and what looks wrong. This needs no AWS account and uploads nothing:

    launch.py sagemaker --dry-run --bucket my-bucket --role bucketfeed-role --region eu-west-1 \\
        --instance-type ml.g5.2xlarge --data s3://my-bucket/train/ --epochs 10

Start it on two spot instances, and see its log until it ends:

    launch.py sagemaker --bucket my-bucket --role bucketfeed-role --instance-type ml.g5.2xlarge --instance-count 2 \\
        --spot --max-run 8h --logs --data s3://my-bucket/train/ --epochs 10

With a model and a decode function of your own, from a folder of modules (its requirements.txt is installed as well):

    launch.py sagemaker ... --source . --model mymodel:build --decode mymodel:decode

Try learning rates and batch sizes, 20 jobs of which 4 run at a time:

    launch.py sagemaker ... --tune lr=1e-4:1e-2:log --tune batch-size=32:256 --tune-jobs 20 --tune-parallel 4 \\
        --test-data s3://my-bucket/test/

Run here what would be submitted, in namespaces of its own (Linux, root), with the data from the real or a mocked S3:

    launch.py sagemaker ... --local-container

See a spot job's life without AWS, in a minute: digits in a mocked S3, submitted, interrupted, restarted, checked:

    launch.py sagemaker --demo

See a job that was started before (with --logs: all its lines); stop it, which saves first:

    launch.py sagemaker --follow bucketfeed-20260102030405
    launch.py sagemaker --stop bucketfeed-20260102030405
"""

EPILOG = """\
where:  --bucket takes all that is not told otherwise: what is uploaded goes to jobs/, which may expire, models and
        records to outputs/NAME/output/, checkpoints to checkpoints/NAME/. infra/training.yaml makes such a bucket, the
        role, and a policy for those who launch.
spot:   a job that is interrupted is started again by SageMaker and goes on from its checkpoint; --checkpoint-url of an
        earlier job lets a new one go on from there.
upload: code only. Never .git, environments, data, weights, or what looks like a secret; --dry-run lists what is left
        out and why. A secret within a module is refused. PyTorch is the image's, and never installed again.
sizes:  times as 90s, 30m, 8h or 2d; --cache-limit and others as train.py has them.
exit codes: 0 done, or submitted without --wait; 1 the job failed, or AWS refused; 2 wrong options; 75 stopped."""

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "": 1}


def add_parser(places: Any) -> None:
    """Add the place `sagemaker` to those of launch.py."""
    p = places.add_parser(
        "sagemaker",
        help="a SageMaker training job",
        description=MANUAL,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_doing(p.add_argument_group("what to do"))
    _add_hosts(p.add_argument_group("hosts"))
    _add_places(p.add_argument_group("account and places"))
    _add_source(p.add_argument_group("code"))
    _add_time(p.add_argument_group("time and money"))
    _add_network(p.add_argument_group("network, keys and tags"))
    _add_tuning(p.add_argument_group("tuning"))
    p.set_defaults(run=lambda options, rest: run(options, rest) if options.demo is None else _demo(p, options, rest))


def _add_doing(group: Any) -> None:
    group.add_argument("--dry-run", action="store_true", help="show what would be done; no account is needed")
    group.add_argument("--local-container", action="store_true", help="run what would be submitted on this machine")
    group.add_argument(
        "--demo",
        nargs="?",
        const="runs/spot-demo",
        metavar="DIR",
        help="a spot job's life without AWS; its model goes to DIR (default: runs/spot-demo)",
    )
    group.add_argument("--wait", action="store_true", help="stay until the job has ended, and show its progress")
    group.add_argument("--logs", action="store_true", help="as --wait, with all lines of the hosts' logs")
    group.add_argument("--follow", metavar="NAME", help="show the progress of a training job that was started before")
    group.add_argument("--stop", metavar="NAME", help="stop this training or tuning job")


def _add_hosts(group: Any) -> None:
    group.add_argument("--instance-type", default="ml.m5.xlarge", metavar="TYPE", help="(default: ml.m5.xlarge)")
    group.add_argument("--instance-count", type=int, default=1, metavar="N", help="hosts (default: 1)")
    group.add_argument(
        "--nproc-per-node",
        type=_processes,
        default="auto",
        metavar="N",
        help="ranks a host (default: one a GPU, or one)",
    )
    group.add_argument("--volume-gb", type=int, default=100, metavar="N", help="size of a host's disk (default: 100)")
    group.add_argument("--image", metavar="URI", help="training image of your own, with PyTorch 2.6 or newer")
    group.add_argument(
        "--framework-version", metavar="X.Y", help="PyTorch of AWS's training image (default: the newest that is known)"
    )


def _add_places(group: Any) -> None:
    group.add_argument("--bucket", metavar="NAME", help="for uploads, outputs and checkpoints (needed)")
    group.add_argument("--role", metavar="NAME_OR_ARN", help="which the job runs under (needed)")
    group.add_argument("--region", metavar="REGION", help="of the job (default: that of your AWS configuration)")
    group.add_argument("--profile", metavar="NAME", help="of your AWS configuration")
    group.add_argument("--name", default="bucketfeed", metavar="PREFIX", help="of the job's name (default: bucketfeed)")
    group.add_argument("--output-url", metavar="URL", help="where results go (default: s3://BUCKET/outputs)")
    group.add_argument(
        "--checkpoint-url", metavar="URL", help="where checkpoints go (default: s3://BUCKET/checkpoints/JOB)"
    )
    group.add_argument(
        "--channel",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=URL",
        help="bring this to the hosts' "
        "disks before the start, and let --data NAME read it there; not needed: training reads buckets itself",
    )


def _add_source(group: Any) -> None:
    group.add_argument("--source", type=Path, metavar="DIR", help="folder with your own modules and requirements.txt")
    group.add_argument("--source-limit", default="50MB", metavar="SIZE", help="more is not uploaded (default: 50MB)")
    group.add_argument("--force-source", action="store_true", help="upload it nevertheless")


def _add_time(group: Any) -> None:
    group.add_argument("--spot", action="store_true", help="spare capacity: cheaper, and may be interrupted")
    group.add_argument("--max-run", type=_seconds, default=86400, metavar="TIME", help="longest run (default: 24h)")
    group.add_argument(
        "--max-wait", type=_seconds, metavar="TIME", help="with --spot: waiting and running (default: twice --max-run)"
    )
    group.add_argument("--keep-alive", type=_seconds, default=0, metavar="TIME", help="warm pool after the job, to 1h")


def _add_network(group: Any) -> None:
    group.add_argument("--subnet", action="append", default=[], metavar="ID", help="of your VPC; may be repeated")
    group.add_argument("--security-group", action="append", default=[], metavar="ID", help="of your VPC")
    group.add_argument("--encrypt-traffic", action="store_true", help="between the hosts; slower")
    group.add_argument("--kms-key", metavar="ID_OR_ARN", help="for disks, uploads and results")
    group.add_argument("--tag", action="append", default=[], type=_pair, metavar="KEY=VALUE", help="may be repeated")
    group.add_argument("--env", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="for the hosts")


def _add_tuning(group: Any) -> None:
    group.add_argument(
        "--tune",
        action="append",
        default=[],
        type=_pair,
        metavar="OPTION=RANGE",
        help="let SageMaker choose: lr=1e-4:1e-2:log, batch-size=32:256, amp='off|bf16'",
    )
    group.add_argument("--tune-jobs", type=int, default=10, metavar="N", help="how many are tried (default: 10)")
    group.add_argument("--tune-parallel", type=int, default=2, metavar="N", help="at a time (default: 2)")
    group.add_argument(
        "--tune-objective", default="test:accuracy", metavar="METRIC", help="what is best (default: test:accuracy)"
    )


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """Do what was asked for; return the exit code."""
    from bucketfeed.platforms.sagemaker import aws, submit

    logging.basicConfig(level=logging.WARNING, format="launch.py: %(message)s", stream=sys.stderr)
    session = aws.session(options.region, options.profile)
    if options.stop:
        submit.stop(options.stop, session=session, say=_say)
        return 0
    if options.follow:
        return _followed(options.follow, session, logs=options.logs)
    job, tuning = configured(options, rest, session.region_name)
    if options.dry_run:
        return _shown(job, tuning)
    if options.local_container:
        return _run_here(job, tuning, session)
    _warn(job)
    name = submit.submit(job, session=session, tuning=tuning)
    print(name)
    if not (options.wait or options.logs):
        _say(f"see it: launch.py sagemaker --region {job.region} --follow {name}; stop it: with --stop {name}")
        return 0
    _say(f"cost: {_cost(job, tuning)}")
    return _followed(name, session, logs=options.logs, tuning=tuning is not None)


def _demo(p: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str]) -> int:
    """Show the life of a spot job; whatever else is given contradicts it."""
    given = [a.option_strings[-1] for a in p._actions if getattr(options, a.dest, a.default) not in (a.default, None)]
    others = [*(name for name in given if name != "--demo"), *rest]
    if others:
        raise ConfigError(f"--demo has a bucket, a role, data and options of its own: leave away {' '.join(others)}")
    from bucketfeed.testing.spot_demo import live

    return live(Path(options.demo))


def configured(options: argparse.Namespace, rest: list[str], region: str) -> tuple[Any, Any]:
    """Return the job, and what is tuned or None; raises `ConfigError`, or ends as argparse does, for wrong options."""
    from bucketfeed.platforms.sagemaker.job import Job
    from bucketfeed.platforms.sagemaker.tuning import Tuning
    from bucketfeed.store.sizes import parse_size
    from bucketfeed.train.lines import METRICS

    for option in ("bucket", "role"):
        if not getattr(options, option):
            raise ConfigError(f"--{option} is needed; infra/README.md tells how to get one")
    tuning = None
    if options.tune:
        tuning = Tuning(dict(options.tune), options.tune_objective, options.tune_jobs, options.tune_parallel)
    given = hyperparameters(rest, tuning.examples if tuning else {})
    job = Job(
        bucket=options.bucket.removeprefix("s3://").rstrip("/"),
        role=options.role,
        region=region,
        hyperparameters=given,
        name=options.name,
        instance_type=options.instance_type,
        instance_count=options.instance_count,
        processes=options.nproc_per_node,
        image=options.image,
        framework_version=options.framework_version,
        output_url=options.output_url,
        checkpoint_url=options.checkpoint_url,
        spot=options.spot,
        max_run_seconds=options.max_run,
        max_wait_seconds=options.max_wait,
        keep_alive_seconds=options.keep_alive,
        volume_gb=options.volume_gb,
        subnets=tuple(options.subnet),
        security_groups=tuple(options.security_group),
        encrypt_traffic=options.encrypt_traffic,
        kms_key=options.kms_key,
        tags=dict(options.tag),
        environment=dict(options.env),
        channels=dict(options.channel),
        metrics=METRICS,
        source=options.source,
        source_limit_bytes=parse_size(options.source_limit, "--source-limit"),
        force=options.force_source,
    )
    return job, tuning


def hyperparameters(arguments: list[str], tried: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of train.py that were given, by name without dashes, with the types they have there.

    `tried` are values of those that are tuned; they are checked as if given, and left out. Ends the process where
    train.py would, and raises `ConfigError` as it would.
    """
    from bucketfeed.platforms.sagemaker.hyperparameters import arguments as written
    from bucketfeed.train.config import TrainConfig

    whole = [*arguments, *written(tried or {})]
    TrainConfig(**train_line.values(whole))
    parser = train_line.parser()
    names = {action.dest: action.option_strings[-1].removeprefix("--") for action in parser._actions}
    switches = {action.dest: action.const for action in parser._actions if action.nargs == 0}
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    parsed = vars(parser.parse_args(whole))
    given = {names[dest]: True if dest in switches else value for dest, value in parsed.items()}
    return {name: value for name, value in given.items() if name not in (tried or {})}


def _shown(job: Any, tuning: Any) -> int:
    from bucketfeed.platforms.sagemaker import submit
    from bucketfeed.store.sizes import format_size

    made = submit.checked(job, tuning)
    print(json.dumps({made.operation: made.request}, indent=2))
    total = sum(len(item.data) for item in made.uploads)
    _say(f"would upload {len(made.uploads)} objects, {format_size(total)}, below s3://{job.bucket}/jobs/:")
    for item in made.uploads:
        _say(f"  {format_size(len(item.data)):>12}  {item.url}")
    _say("source.tar.gz holds:")
    for name, size in made.source.files:
        _say(f"  {format_size(size):>12}  {name}")
    if made.source.left_out:
        _say("left out:")
        for name, reason in made.source.left_out:
            _say(f"  {reason:>20}  {name}")
    _warn(job)
    _say(f"cost: {_cost(job, tuning)}")
    if job.role != made.request.get("RoleArn", job.role):
        _say(f"the account in the role's ARN is not known yet; it is looked up for the role {job.role} on submission")
    _say("nothing was uploaded and nothing was started")
    return 0


def _cost(job: Any, tuning: Any) -> str:
    from bucketfeed.platforms.sagemaker import prices

    return prices.cost(job, *((tuning.jobs, tuning.parallel) if tuning else ())).text


def _warn(job: Any) -> None:
    from bucketfeed.platforms.sagemaker import checks, plan

    plan.check_sdk()
    for warning in checks.warnings(job, plan.image_uri(job)):
        _say(f"warning: {warning}")


def _followed(name: str, session: Any, *, logs: bool, tuning: bool = False) -> int:
    from bucketfeed.platforms.sagemaker import follow

    try:
        if tuning:
            ended = follow.follow_tuning(name, session=session, say=_say)
        else:
            ended = follow.follow(name, session=session, say=_say, logs=logs)
    except KeyboardInterrupt:
        _say(f"the job goes on; stop it: launch.py sagemaker --stop {name}")
        return STOPPED
    _say(f"{name}: {ended.text()}")
    return _exit_code(ended.status)


def _run_here(job: Any, tuning: Any, session: Any) -> int:
    """Run the job's containers on this machine, with what they would get: the source from the bucket, and the data."""
    import tempfile

    from bucketfeed.platforms.sagemaker import aws, submit
    from bucketfeed.testing import jobs

    if tuning is not None:
        raise ConfigError("--local-container runs one job; leave --tune away")
    jobs.check_allowed()
    _warn(job)
    made = submit.checked(job)
    submit.upload(made, session, job.kms_key)
    folder = Path(tempfile.mkdtemp(prefix=f"{made.name}-"))
    done = jobs.run_training_job(
        made.request,
        folder / "run",
        s3=session.client("s3"),
        environment=aws.variables(session),
        on_log=lambda host, line: _say(f"{host}: {line}"),
    )
    _say(f"{made.name}: {done.status} after {done.seconds:.0f} s; {done.failure_reason or done.output_url}")
    _say(f"what its hosts had on disk: {folder}")
    return _exit_code(done.status)


def _exit_code(status: str) -> int:
    """Return what a job's status is for a shell; only one that runs here is ever Interrupted."""
    if status == "Completed":
        return 0
    return STOPPED if status in ("Stopped", "Interrupted") else train_line.EXIT_ERROR


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text}")
    return name, value


def _processes(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d+)([smhd]?)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a time such as 90s, 30m, 8h or 2d, not {text}")
    return int(match[1]) * _UNIT_SECONDS[match[2]]
