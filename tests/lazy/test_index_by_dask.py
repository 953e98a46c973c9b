"""An index whose shards are scanned by a Dask client."""

from __future__ import annotations

from pathlib import Path

from dask.distributed import Client

import bucketfeed as bf


def test_a_client_builds_the_index_that_is_built_here(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for n in range(3):
        (tmp_path / "d" / f"{n}.txt").write_text("a\nbc\n" * (n + 1))
    manifest = bf.Manifest.from_url(tmp_path / "d", folder=tmp_path)
    reader = bf.open_reader(manifest.url)
    own = bf.build_index(manifest, "text", reader, path=tmp_path / "own.idx")
    with Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address=None) as client:
        other = bf.build_index(
            manifest, "text", reader, path=tmp_path / "other.idx", executor=client.get_executor(), progress=False
        )
    assert own.path is not None
    assert other.path is not None
    assert other.path.read_bytes() == own.path.read_bytes()
    assert len(other) == 12
