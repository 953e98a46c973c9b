"""Adds what bucketfeed lacks to a notebook's environment, and changes nothing that the runtime came with."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata

from bucketfeed.errors import BucketfeedError

_log = logging.getLogger(__name__)

# Built for each other, and for the runtime's GPU driver: another version of one breaks the others.
KEPT = ("torch", "torchvision", "torchaudio", "numpy", "fsspec", "gcsfs", "datasets", "pillow", "scikit-learn")
_EXTRAS = {"demo": ("demo",), "gcs": ("gcs",)}
_SECONDS = 600


def install(source: str) -> list[str]:
    """Install what bucketfeed lacks for data from `source`; return pip's arguments, [] where nothing lacks.

    bucketfeed itself is there already: `pip install --no-deps bucketfeed`. Raises `BucketfeedError` with pip's last
    lines where that fails.
    """
    found = {_name(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}
    try:
        requirements = [*(metadata.requires("bucketfeed") or []), "matplotlib"]  # for the curves
    except metadata.PackageNotFoundError:
        _log.warning("bucketfeed is used from a folder, not installed: what it needs must be here already")
        return []
    arguments = install_command(requirements, found, _EXTRAS.get(source, ()))
    if arguments:
        command = [sys.executable, "-m", "pip", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if done.returncode:
            raise BucketfeedError(
                f"pip {' '.join(arguments)} failed: {' '.join(done.stderr.split())[-800:]}; run it by hand in a cell"
            )
        importlib.invalidate_caches()
    return arguments


def install_command(requirements: Sequence[str], found: Mapping[str, str], extras: Collection[str] = ()) -> list[str]:
    """Return pip's arguments that add what of `requirements` is not among `found` (name: version); [] for nothing.

    Packages of `KEPT` that are found are named with the version they have, so that pip keeps them or says why it
    can't. s3fs works with the fsspec of its own version only, so that one is asked for.
    """
    wanted = []
    for text in requirements:
        name, requirement = _applicable(text, extras)
        if name and not _satisfied(name, requirement, found):
            wanted.append(_matching(name, requirement, found))
    if any(w.startswith("s3fs") for w in wanted):  # aiobotocore takes few botocores: pip chooses boto3 to suit
        wanted += [text for text in requirements if _applicable(text, extras)[0] == "boto3" and text not in wanted]
    kept = [f"{name}=={found[name]}" for name in KEPT if name in found]
    return ["install", "--quiet", *wanted, *kept] if wanted else []


def _applicable(text: str, extras: Collection[str]) -> tuple[str, str]:
    """Return name and requirement without its marker; empty where the marker excludes it here."""
    from packaging.requirements import Requirement

    requirement = Requirement(text)
    marker = requirement.marker
    if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
        return "", ""
    return _name(requirement.name), text.partition(";")[0].strip()


def _satisfied(name: str, text: str, found: Mapping[str, str]) -> bool:
    from packaging.requirements import Requirement

    if name not in found:
        return False
    if name == "s3fs":
        return found[name] == found.get("fsspec", found[name])
    if Requirement(text).specifier.contains(found[name], prereleases=True):
        return True
    if name in KEPT:
        _log.warning("%s %s is what this runtime came with and stays, though %s is asked for", name, found[name], text)
        return True
    return False


def _matching(name: str, text: str, found: Mapping[str, str]) -> str:
    if name in ("s3fs", "gcsfs") and "fsspec" in found:
        return f"{name}=={found['fsspec']}"
    return text


def _name(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
