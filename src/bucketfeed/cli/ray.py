"""`launch.py ray`: the training of train.py on the workers of a Ray cluster."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bucketfeed.cli import train as train_line
from bucketfeed.errors import ConfigError
from bucketfeed.platforms.local import STOPPED

MANUAL = """\
Train on a Ray cluster, by Ray Train: the same training as train.py, once on each worker. All options that are not below
go to train.py (see its --help; its --num-workers is called --loader-workers here).

On this machine, in two processes, on a cluster that is made for the run and ends with it:

    launch.py ray --num-workers 2 --data s3://bucket/train/ --epochs 3

On a running cluster, from one of its nodes, or through `ray job submit`; with 4 to 8 GPUs, whatever is free:

    launch.py ray --address auto --num-workers 8 --min-workers 4 --gpus-per-worker 1 --name pictures \\
        --storage s3://bucket/ray --data s3://bucket/train/ --epochs 90

Workers need bucketfeed[ray] installed, and your own --model and --decode where Python finds them: with
--runtime-env '{"working_dir": "."}' Ray brings the folder that you are in.
"""

EPILOG = """\
lasts:  model, optimizer and cursor are saved to --checkpoint-dir, by default in the run's folder, STORAGE/NAME. When
        workers die or fail, all are started again from there, on as many as there is room for, down to --min-workers,
        and each epoch still takes every sample exactly once. The same --name goes on where its last run has stopped.
stops:  SIGTERM or Ctrl-C ends the step under way, saves, and ends with exit code 75. A second one ends at once.
paths:  folders are those of the workers, which are on other nodes: let --run-dir, --storage and --checkpoint-dir be
        shared by all, or URLs where that is possible. The disk cache is each node's own.
result: the last line on stdout is the result as JSON, as train.py prints it. Lines of the workers come before it."""


def add_parser(places: Any) -> None:
    """Add the place `ray` to those of launch.py."""
    ray = places.add_parser(
        "ray",
        help="a Ray cluster",
        description=MANUAL,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    workers = ray.add_argument_group("workers")
    workers.add_argument("--num-workers", type=int, default=1, metavar="N", help="processes that train (default: 1)")
    workers.add_argument(
        "--min-workers", type=int, metavar="N", help="begin and go on with so few (default: all of them)"
    )
    workers.add_argument(
        "--cpus-per-worker", type=float, default=1.0, metavar="X", help="set aside for each (default: 1)"
    )
    workers.add_argument(
        "--gpus-per-worker", type=int, default=0, choices=(0, 1), help="set aside for each (default: 0)"
    )
    workers.add_argument(
        "--max-failures", type=int, default=3, metavar="N", help="restarts; -1: any number (default: 3)"
    )
    workers.add_argument(
        "--loader-workers",
        type=int,
        metavar="N",
        help="train.py's --num-workers: processes that decode, of each worker",
    )
    place = ray.add_argument_group("place")
    place.add_argument(
        "--address",
        metavar="ADDRESS",
        help="of a running cluster; auto: this node's (default: RAY_ADDRESS, or a new cluster on this machine)",
    )
    place.add_argument("--storage", metavar="DIR_OR_URL", help="where runs are kept (default: ~/ray_results)")
    place.add_argument("--name", metavar="NAME", help="of the run (default: one made of the time)")
    place.add_argument(
        "--runtime-env",
        type=train_line.json_object,
        default={},
        metavar="JSON",
        help="Ray's, for the workers: env_vars, pip, ...",
    )
    ray.set_defaults(run=run)


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """Train as told, print the result, and return the exit code."""
    from bucketfeed.platforms import ray

    place = ray.RayPlace(
        workers=options.num_workers,
        min_workers=options.min_workers,
        address=options.address,
        cpus_per_worker=options.cpus_per_worker,
        gpus_per_worker=options.gpus_per_worker,
        max_failures=options.max_failures,
        storage=options.storage,
        name=options.name,
        runtime_env=options.runtime_env,
    )
    if options.loader_workers is not None:
        rest = [*rest, "--num-workers", str(options.loader_workers)]
    folder = place.folder()
    values = configured(rest, place, folder)
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s", stream=sys.stderr)
    ended = ray.run(train_on_worker, values, place, folder)
    if "stopped" in ended:
        print(f"launch.py: {ended['stopped']}", file=sys.stderr)
        return STOPPED
    print(json.dumps(ended["result"]))
    return 0


def configured(arguments: list[str], place: Any, folder: str) -> dict[str, Any]:
    """Return the fields of a `TrainConfig` that hold on every worker, as plain values.

    Paths are made absolute, for workers start elsewhere; checkpoints go into the run's own folder where none is named.
    Raises `ConfigError` for what can be seen not to work before anything is started.
    """
    from bucketfeed.store.urls import parse_url
    from bucketfeed.train.config import TrainConfig

    values = asdict(TrainConfig(**train_line.values(arguments)))
    if values["device"] == "cuda" and not place.gpus_per_worker:
        raise ConfigError(
            "--device cuda with --gpus-per-worker 0: Ray shows the workers no GPU; say --gpus-per-worker 1"
        )
    if values["device"] == "cpu" and place.gpus_per_worker:
        raise ConfigError("--device cpu with --gpus-per-worker 1 would let GPUs stand idle; leave one of them away")
    values["checkpoint_dir"] = values["checkpoint_dir"] or f"{folder}/checkpoints"
    for name in ("data", "test_data", "cache_dir", "checkpoint_dir", "run_dir", "model_dir"):
        if values[name] is not None and parse_url(values[name]).scheme == "file":
            values[name] = parse_url(values[name]).key
    values["progress"] = False  # bars of other machines, line by line, are none
    return values


def train_on_worker(values: dict[str, Any], until_stopped: Callable[[], str | None]) -> dict[str, Any]:
    """Train in a worker of Ray: return the result, or what a stopped run says."""
    from bucketfeed.platforms.ray import report
    from bucketfeed.train.config import TrainConfig
    from bucketfeed.train.loop import Stopped, train
    from bucketfeed.train.ranks import StopSignal

    # A worker's main thread belongs to Ray: no signal arrives here.
    threading.Thread(target=lambda: StopSignal.ask(until_stopped()), daemon=True).start()
    config = TrainConfig(**values)
    try:
        result = train(config)
    except Stopped as e:
        return {"stopped": str(e)}
    report(result, config.checkpoint_dir)
    return {"result": result}
