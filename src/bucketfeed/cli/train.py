"""The command line of training, which every place starts: options, log, result and exit code."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from bucketfeed.platforms.local import STOPPED

EXIT_ERROR = 1
EXIT_USAGE = 2

EPILOG = """\
exit codes: 0 done; 1 an error that the last lines tell; 2 wrong arguments; 75 stopped by SIGTERM or Ctrl-C: the step
        under way is finished and saved to --checkpoint-dir, and the same command goes on there. torchrun's own exit
        code is 1 for all of these but the first; launch.py's is 75 for the last.

model:  a function that returns a torch.nn.Module; gets num_classes if it has such a parameter. The module is given
        batch["image"] and trained by cross entropy on batch["label"]; if it has training_step(batch), that gives the
        loss instead.
decode: a function of one sample, a dict of "__key__" and fields of bytes. Without one, pictures are resized to
        --image-size and labelled by the field cls, or by the folder that their key lies in.

files in --run-dir: metrics.jsonl (one line an epoch and evaluation), audit-rank*.jsonl (with --audit), and curves for
        TensorBoard where that is installed."""


def parser(manual: str | None = None) -> argparse.ArgumentParser:
    """Return the parser, whose names are those of `TrainConfig`; `manual` begins its `--help`."""
    from bucketfeed.train.config import TrainConfig

    defaults: dict[str, Any] = {f.name: f.default for f in fields(TrainConfig) if f.default is not MISSING}
    p = argparse.ArgumentParser(
        prog="train.py",
        description=manual or "Train a model on samples that stay in their bucket.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def option(group: Any, name: str, help: str, **more: Any) -> None:
        default = defaults.get(name[2:].replace("-", "_"))
        if default is not None and default is not False:
            help += f" (default: {default})"
        group.add_argument(name, help=help, default=default, **more)

    data = p.add_argument_group("data")
    data.add_argument(
        "--data", required=True, metavar="URL", help="training samples: s3://, gs://, a path, any fsspec URL"
    )
    option(data, "--test-data", "samples to evaluate on after each epoch", metavar="URL")
    option(data, "--format", "raw, tar, or auto: by the names found")
    option(
        data, "--storage-options", "JSON object for the store, as fsspec spells it", type=json_object, metavar="JSON"
    )
    data.add_argument(
        "--endpoint-url", metavar="URL", help="address of an S3 that is not AWS's (or set AWS_ENDPOINT_URL)"
    )
    option(data, "--decode", "your own function of one sample", metavar="MODULE:FUNCTION")
    option(data, "--image-size", "side of the square that pictures are resized to", type=int, metavar="N")
    option(data, "--num-classes", "needed for tars; folders are counted", type=int, metavar="N")
    cache = p.add_argument_group("cache and reading")
    option(
        cache, "--cache-dir", "folder of the node's disk cache (default: in the user's cache directory)", metavar="DIR"
    )
    option(cache, "--cache-limit", "its size, such as 50GB (default: half of the free disk)", metavar="SIZE")
    option(cache, "--num-workers", "decode in so many processes; 0: in threads", type=int, metavar="N")
    option(cache, "--streams", "how many chunks the order interleaves (default: 16)", type=int, metavar="N")
    option(cache, "--read-ahead-bytes", "bound on bytes held ahead of the loop (default: 128MiB)", metavar="SIZE")
    training = p.add_argument_group("training")
    option(training, "--epochs", "how often all samples are seen", type=int, metavar="N")
    option(training, "--batch-size", "samples a batch, on each rank", type=int, metavar="N")
    option(training, "--seed", "of order, weights and random draws", type=int, metavar="N")
    option(training, "--model", "your own model (default: a small convolutional network)", metavar="MODULE:FUNCTION")
    option(training, "--lr", "highest learning rate of AdamW", type=float, metavar="X")
    option(training, "--weight-decay", "of AdamW", type=float, metavar="X")
    option(training, "--warmup-steps", "steps of linear rise before the cosine", type=int, metavar="N")
    option(training, "--grad-accum", "batches a step of the optimizer", type=int, metavar="N")
    option(training, "--clip-norm", "largest norm of the gradient", type=float, metavar="X")
    option(training, "--amp", "mixed precision: auto is bf16 or fp16 on a GPU", choices=("auto", "off", "bf16", "fp16"))
    option(training, "--device", "auto is a GPU where there is one", choices=("auto", "cpu", "cuda"))
    saving = p.add_argument_group("saving")
    option(saving, "--checkpoint-dir", "where to save: a folder or an fsspec URL", metavar="DIR_OR_URL")
    option(saving, "--resume", "go on from the newest checkpoint there, or not", choices=("auto", "never"))
    option(saving, "--save-seconds", "save at least this often", type=float, metavar="SECONDS")
    option(saving, "--save-steps", "save every so many steps as well", type=int, metavar="N")
    option(saving, "--run-dir", "folder for metrics and records", metavar="DIR")
    option(saving, "--model-dir", "folder for the trained model: model.pt (weights) and model.json", metavar="DIR")
    option(saving, "--audit", "record which samples each step took", action="store_true")
    saving.add_argument(
        "--no-progress", dest="progress", action="store_false", help="show no bars, and no line a minute"
    )
    return p


def values(arguments: Sequence[str] | None = None, *, manual: str | None = None) -> dict[str, Any]:
    """Return the fields of `TrainConfig` that `arguments` give; ends the process where they are wrong."""
    given = vars(parser(manual).parse_args(arguments))
    endpoint_url = given.pop("endpoint_url")
    if endpoint_url is not None:
        given["storage_options"] = {**(given["storage_options"] or {}), "endpoint_url": endpoint_url}
    return given


def main(arguments: list[str] | None = None, *, manual: str | None = None) -> int:
    """Parse, train, print; return the exit code."""
    from bucketfeed.errors import BucketfeedError, ConfigError
    from bucketfeed.sampling.topology import Topology

    given = values(arguments, manual=manual)
    try:
        rank = str(Topology.detect().rank)
    except ConfigError as e:
        print(f"train.py: {e}", file=sys.stderr)
        return EXIT_USAGE
    for library in ("botocore", "aiobotocore"):  # they tell at INFO where they found credentials, each time
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.basicConfig(
        level=logging.INFO if rank == "0" else logging.WARNING,
        format="%(levelname).1s %(name)s: %(message)s" if rank == "0" else f"rank {rank} %(levelname).1s %(message)s",
        stream=sys.stderr,
    )
    from bucketfeed.train.config import TrainConfig
    from bucketfeed.train.loop import Stopped, train

    try:
        result = train(TrainConfig(**given))
    except ConfigError as e:
        print(f"train.py: {e}", file=sys.stderr)
        return EXIT_USAGE
    except BucketfeedError as e:
        print(f"train.py: {type(e).__name__}: {e}", file=sys.stderr)
        return EXIT_ERROR
    except Stopped as e:
        if rank == "0":
            print(f"train.py: {e}", file=sys.stderr)
        return STOPPED
    if rank == "0":
        print(json.dumps(result))
    return 0


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that an option gives, or raise as argparse wants it."""
    try:
        value = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"not JSON: {e}") from e
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, such as '{{\"anon\": true}}', not {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
