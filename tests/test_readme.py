"""What README.md shows works as shown: its Python runs against a real bucket, its commands know their options."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from bucketfeed.cli import launch
from bucketfeed.testing.moto import MotoServer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BUCKET = "my-bucket"
SAMPLES = 80


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def photo(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def tar(numbers: range) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in numbers:
            for suffix, data in (("jpg", photo(number)), ("cls", str(number % 2).encode())):
                member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def fill(server: MotoServer) -> None:
    """Put in place what the README speaks of: photos in a folder for each class, tars, a table."""
    server.create_bucket(BUCKET)
    client = server.client()
    for number in range(SAMPLES):
        key = f"photos/train/{('cat', 'dog')[number % 2]}/{number:04d}.jpg"
        client.put_object(Bucket=BUCKET, Key=key, Body=photo(number))
    for shard in range(2):
        numbers = range(shard * SAMPLES // 2, (shard + 1) * SAMPLES // 2)
        client.put_object(Bucket=BUCKET, Key=f"shards/{shard:05d}.tar", Body=tar(numbers))
    table = io.BytesIO()
    pd.DataFrame({"label": range(10)}).to_parquet(table)
    client.put_object(Bucket=BUCKET, Key="table.parquet", Body=table.getvalue())


def test_the_python_in_the_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks("python")) + "\nassert len(table) == 10\n", encoding="utf-8")
    with MotoServer() as server:
        fill(server)
        options = server.storage_options
        environment = os.environ | {
            "AWS_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "XDG_CACHE_HOME": str(tmp_path / "user-cache"),
        }
        done = subprocess.run(
            [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
        )
    assert done.returncode == 0, done.stderr
    assert "samples=" in done.stdout, done.stdout


def commands() -> list[list[str]]:
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_the_readme_begins_with_its_two_commands() -> None:
    assert commands()[:2] == [["make", "demo"], ["make", "test"]]


@pytest.mark.parametrize("command", [c for c in commands() if "entrypoints/train.py" in c], ids=lambda c: c[0])
def test_train_knows_every_option_that_the_readme_gives_it(command: list[str]) -> None:
    manual = subprocess.run(
        [sys.executable, ROOT / "entrypoints" / "train.py", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    given = [word for word in command[command.index("entrypoints/train.py") :] if word.startswith("--")]
    assert [option for option in given if not re.search(rf"(?<!\S){option}\b", manual)] == []


def test_the_notebook_has_every_parameter_that_the_readme_gives_it() -> None:
    notebook = json.loads((ROOT / "notebooks" / "bucketfeed_colab.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    known = re.findall(r"^(\w+) = ", "".join(cells[0]["source"]), re.MULTILINE)
    given = [word for c in commands() if c[0] == "papermill" for flag, word in pairwise(c) if flag == "-p"]
    assert given
    assert [name for name in given if name not in known] == []


def test_launch_knows_the_demonstration_that_the_readme_shows() -> None:
    command = next(c for c in commands() if "--demo" in c)
    options, rest = launch.parser().parse_known_args(command[command.index("launch") + 1 :])
    assert (options.demo, rest) == ("runs/spot-demo", [])


def test_make_knows_every_word_that_the_documents_give_it() -> None:
    told = set(re.findall(r"`make (\w+)", README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert told | {"demo", "test", "lint", "bench", "docs"} <= targets
