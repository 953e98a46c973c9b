#!/usr/bin/env python
"""Train a model on samples that stay in their bucket.

One process:

    python entrypoints/train.py --data s3://bucket/train/ --test-data s3://bucket/test/ --epochs 3

Two processes of this machine, with checkpoints, as often as it takes:

    torchrun --nproc-per-node 2 entrypoints/train.py --data s3://bucket/train/ --epochs 3 --checkpoint-dir checkpoints

Your own model and decode function, from files in the working directory:

    python entrypoints/train.py --data s3://bucket/shards/ --model mine.models:resnet --decode mine.data:decode

Progress and log lines go to standard error; the last line on standard output is the result, one JSON object.
"""

import sys

from bucketfeed.cli.train import main

if __name__ == "__main__":
    sys.exit(main(manual=__doc__))
