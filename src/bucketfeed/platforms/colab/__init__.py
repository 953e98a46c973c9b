"""Colab, and any other notebook: what the notebook's short cells call, so that its logic is tested code.

>>> from bucketfeed.platforms import colab
>>> access = colab.sign_in("s3")
>>> place = access.place(data="s3://bucket/train/", checkpoint_dir="s3://bucket/run-1/")
>>> colab.train([*place.arguments(), "--epochs", "3"], access.environment, show=print)
"""

from __future__ import annotations

from bucketfeed.platforms.colab.install import install, install_command
from bucketfeed.platforms.colab.pictures import curves, sample_pictures, verdict
from bucketfeed.platforms.colab.place import Place, costs, gpu, machine, on_colab, on_drive, work_dir
from bucketfeed.platforms.colab.run import train
from bucketfeed.platforms.colab.signin import Access, sign_in

__all__ = [
    "Access",
    "Place",
    "costs",
    "curves",
    "gpu",
    "install",
    "install_command",
    "machine",
    "on_colab",
    "on_drive",
    "sample_pictures",
    "sign_in",
    "train",
    "verdict",
    "work_dir",
]
