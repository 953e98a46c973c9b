"""Notebooks run as Jupyter runs them, on a mocked S3, with Colab's package or without it."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "bucketfeed_colab.ipynb"
STUB = Path(__file__).parent / "stub"
SECONDS = 240


@contextlib.contextmanager
def surroundings(colab: bool, folder: Path, **more: str) -> Iterator[None]:
    """Give kernels that are started meanwhile this environment: no credentials, and Colab's package or not."""
    paths = [str(ROOT / "src"), *([str(STUB)] if colab else []), os.environ.get("PYTHONPATH", "")]
    before = dict(os.environ)
    for name in [n for n in os.environ if n.startswith(("AWS_", "GOOGLE_"))]:
        del os.environ[name]
    os.environ.update(
        {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),  # no profile, no credentials of who runs the tests
            "IPYTHONDIR": str(folder / ".ipython"),
            "JUPYTER_PATH": str(this_python(folder)),
            **more,
        }
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def executed(notebook: Any, folder: Path) -> Any:
    """Run all cells in a new kernel whose folder is `folder`; return the notebook with its outputs."""
    client = NotebookClient(copy.deepcopy(notebook), timeout=SECONDS, kernel_name="here")
    return client.execute(cwd=str(folder))


def this_python(folder: Path) -> Path:
    """Return a folder of Jupyter's with one kernel, "here", that is this very Python."""
    kernels = folder / "jupyter" / "kernels" / "here"
    kernels.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "here", "language": "python"}))
    return kernels.parents[1]


def said(notebook: Any) -> str:
    """Return all text that the cells printed."""
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    return "".join(out.get("text", "") for out in outputs)


def pictures(notebook: Any) -> int:
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    return sum("image/png" in out.get("data", {}) for out in outputs)
