"""Two ranks that agree: on numbers, on an error that one of them met, and that they have the same data."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from bucketfeed.errors import BucketfeedError, ConfigError, ResumeError
from bucketfeed.sampling.topology import Topology
from bucketfeed.train.ranks import Ranks, joined


def broken() -> None:
    raise ResumeError("none of the 2 checkpoints is whole")


def agree(rank: int, port: int, folder: str) -> None:
    """Run in each of two processes; leaves a file where all went as it should."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    with joined(Topology(rank, 2), torch.device("cpu")) as ranks:
        assert ranks.summed([1.0, rank]) == [2.0, 1.0]
        assert ranks.largest([rank, -rank]) == [1.0, 0.0]
        assert ranks.gathered({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
        assert ranks.from_first(lambda: f"of rank {rank}") == "of rank 0"
        with pytest.raises(ResumeError, match="none of the 2 checkpoints is whole"):
            ranks.from_first(broken)
        ranks.check_same("the data set", "abc")
        with pytest.raises(ConfigError, match=r"the data set differs .* rank 0 has data 0, rank 1 has data 1"):
            ranks.check_same("the data set", f"data {rank}")
        means = torch.full((2,), float(rank))
        ranks.copy_from_first([means])
        assert means.tolist() == [0.0, 0.0]
        ranks.wait_for_all()
    Path(folder, str(rank)).touch()


def test_two_ranks_agree_on_numbers_errors_and_data(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(agree, (port, str(tmp_path)), nprocs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}, "rank 1 of 2 did not meet the others: .*127.0.0.1, 9"),
        ({"MASTER_PORT": "9"}, "rank 1 of 2 did not meet the others: .*MASTER_ADDR"),
    ],
)
def test_a_rank_whose_others_never_come_says_so_and_ends(
    address: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **address}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(BucketfeedError, match=told),
        joined(Topology(1, 2), torch.device("cpu"), meeting=timedelta(seconds=2)),
    ):
        pass


def test_one_rank_agrees_with_itself() -> None:
    with joined(Topology(), torch.device("cpu")) as ranks:
        assert ranks.is_first
        assert ranks.summed([1.5]) == [1.5]
        assert ranks.gathered("x") == ["x"]
        with pytest.raises(ResumeError):
            ranks.from_first(broken)
    assert not Ranks(Topology(1, 2)).is_first
