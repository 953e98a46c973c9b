#!/usr/bin/env python
"""Start training somewhere: `python entrypoints/launch.py --help`, the same as `bucketfeed launch --help`."""

import sys

from bucketfeed.cli.launch import main

if __name__ == "__main__":
    sys.exit(main())
