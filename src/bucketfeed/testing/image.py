"""A Python that stands for a training image: the packages of this one without bucketfeed, and a place for more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bucketfeed.errors import ConfigError

_PIP = '#!/bin/sh\nexec "{python}" -m pip "$@"\n'
_SECONDS = 60.0


def make_image(folder: Path) -> Path:
    """Make a Python environment in `folder` and return its folder of programs, to be put first on the PATH.

    What pip installs there stays there, comes before the packages of this Python, and never replaces them on disk.
    Those are all there but bucketfeed: a job has to bring its own, as on a real image.
    """
    packages = folder / "packages"
    packages.mkdir(parents=True)
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder / "python")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if made.returncode:
        raise ConfigError(f"no Python environment can be made in {folder}: {made.stderr.strip()}; see `python -m venv`")
    programs = folder / "python" / "bin"
    for own in _package_folders():
        for entry in own.iterdir():
            if not entry.name.startswith(("bucketfeed", "__pycache__")) and entry.suffix != ".pth":
                link = packages / entry.name
                if not link.exists():
                    link.symlink_to(entry)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "python" / "lib" / version / "site-packages" / "image.pth").write_text(f"{packages}\n", encoding="utf-8")
    for name in ("pip", "pip3"):
        (programs / name).write_text(_PIP.format(python=programs / "python"), encoding="utf-8")
        (programs / name).chmod(0o755)
    return programs


def _package_folders() -> list[Path]:
    """Of this Python, in its order; one may have been added by a .pth file of another."""
    found = dict.fromkeys(Path(entry) for entry in sys.path)
    return [path for path in found if path.name in ("site-packages", "dist-packages") and path.is_dir()]
