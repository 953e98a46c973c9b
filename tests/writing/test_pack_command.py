"""`bucketfeed pack` as a person calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gate import gate
from packed import contents, opened, photos

from bucketfeed.cli.main import main
from bucketfeed.cli.pack import _Lines
from bucketfeed.store.writing import Writer
from bucketfeed.testing.moto import MotoBucket

COMMAND = [sys.executable, "-m", "bucketfeed.cli.main", "pack"]


def pack(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_a_folder_becomes_shards_by_threads_and_by_processes_alike(tmp_path: Path) -> None:
    source = photos(tmp_path / "in")
    threads = pack(source, tmp_path / "a", "--max-shard-bytes", "30kB", "--shuffle", 1)
    processes = pack(source, tmp_path / "b", "--max-shard-bytes", "30kB", "--shuffle", 1, "--workers", 2)
    assert (threads.returncode, threads.stderr) == (0, "")
    assert (processes.returncode, processes.stderr) == (0, "")
    count = len(contents(tmp_path / "a"))
    assert threads.stdout.startswith(f"60 samples in {count} shards, ")
    assert threads.stdout.endswith(f"at file://{tmp_path}/a/ ({count} shards written now)\n")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(opened(tmp_path / "a")) == 60


def test_a_dry_run_tells_and_writes_nothing(tmp_path: Path) -> None:
    told = pack(photos(tmp_path / "in"), tmp_path / "out", "--dry-run", "--max-shard-bytes", "30kB")
    assert told.returncode == 0
    assert told.stdout.startswith("would write 60 samples in about ")
    assert not (tmp_path / "out").exists()


def test_errors_are_one_line_and_a_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = photos(tmp_path / "in", count=3)

    def said(code: int, *arguments: object) -> str:
        assert main(["pack", *map(str, arguments)]) == code
        [line] = capsys.readouterr().err.splitlines() or [""]
        return line

    line = said(1, tmp_path / "nowhere", tmp_path / "out")
    assert line.startswith("bucketfeed pack: ")
    assert f"{tmp_path}/nowhere" in line
    assert "max_shard_bytes must be" in said(2, source, tmp_path / "out", "--max-shard-bytes", "large")
    assert said(0, source, tmp_path / "out") == ""
    assert "--force" in said(1, source, tmp_path / "out", "--number-keys")
    assert said(0, source, tmp_path / "out", "--number-keys", "--force") == ""
    assert opened(tmp_path / "out")[1]["__key__"] == "000000000001"


def test_progress_is_a_line_now_and_then_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    often, seldom = _Lines("pack", seconds=0), _Lines("pack", seconds=1000)
    for done in (1 << 20, 3 << 20):
        often(done, 4 << 20)
        seldom(done, None)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"pack: {n} MiB of about 4 MiB written" for n in (1, 3)]


def test_help_says_what_a_rerun_does() -> None:
    told = pack("--help")
    assert told.returncode == 0
    assert "goes on where it was when the same command is given" in told.stdout
    assert "bucketfeed pack photos/ s3://bucket/photos/" in told.stdout


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_stopped_or_killed_goes_on_when_it_is_given_again(
    how: signal.Signals, moto_bucket: MotoBucket, tmp_path: Path
) -> None:
    source = photos(tmp_path / "in", count=60, size=600)
    url, options = f"{moto_bucket.url}out/", moto_bucket.storage_options
    writer = Writer(url, options)

    def command(endpoint_url: str) -> list[str]:
        told = ["--max-shard-bytes", "5kB", "--dst-options", json.dumps(options | {"endpoint_url": endpoint_url})]
        return [*COMMAND, str(source), url, *told]

    with gate(options["endpoint_url"], "shard-000009.tar") as held:
        process = subprocess.Popen(command(held.endpoint_url), stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        assert held.reached.wait(60)
        os.kill(process.pid, how)
        if how is signal.SIGINT:
            assert process.stderr.readline().startswith("bucketfeed pack: stopping")
            held.opened.set()
        stderr = process.communicate(timeout=60)[1]
        assert process.returncode == (75 if how is signal.SIGINT else -signal.SIGKILL), stderr
        if how is signal.SIGINT:
            assert stderr == "bucketfeed pack: stopped; the same command goes on from here\n"
        assert any(name.endswith(".tar") for name in writer.listed())
    again = subprocess.run(command(options["endpoint_url"]), capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    main(["pack", str(source), str(tmp_path / "whole"), "--max-shard-bytes", "5kB"])
    whole = contents(tmp_path / "whole")
    there = {name: found.size for name, found in writer.listed().items() if name.endswith(".tar")}
    assert there == {name: len(data) for name, data in whole.items()}
    reader = opened(url, storage_options=moto_bucket.storage_options, cache=None)
    assert reader.__getitems__(range(60)) == list(opened(tmp_path / "whole"))
