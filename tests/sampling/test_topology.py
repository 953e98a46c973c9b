from __future__ import annotations

import subprocess
import sys

import pytest

from bucketfeed.errors import ConfigError
from bucketfeed.sampling.topology import Topology


def test_one_process_where_nothing_says_otherwise():
    assert Topology.detect({}) == Topology() == Topology(0, 1, 0, 1)
    assert Topology.detect({"LOCAL_RANK": "left behind"}) == Topology()


def test_torchruns_variables_are_read():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Topology.detect(environ) == Topology(5, 8, 1, 4)


def test_a_launcher_that_tells_no_local_size_is_enough():
    assert Topology.detect({"RANK": "5", "WORLD_SIZE": "8"}) == Topology(5, 8)
    assert Topology.detect({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}) == Topology(5, 8, 3, 4)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK .*'one'"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank with world_size=2 .* 0 to 1, not 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "local_rank"),
    ],
    ids=str,
)
def test_variables_that_make_no_topology_are_named(environ, name):
    with pytest.raises(ConfigError, match=name):
        Topology.detect(environ)


@pytest.mark.parametrize("arguments", [(1, 1), (-1, 2), (0, 0), (0, 1, 1, 1), ("0", 1), (0.0, 1)], ids=str)
def test_what_is_no_rank_of_a_world_is_refused(arguments):
    with pytest.raises(ConfigError, match="must be a whole number"):
        Topology(*arguments)


def test_an_initialised_process_group_outweighs_the_variables_and_torch_is_not_imported_for_it():
    script = """
import sys
from bucketfeed.sampling.topology import Topology
Topology.detect({})
assert "torch" not in sys.modules
import torch.distributed as dist
assert Topology.detect({"RANK": "1", "WORLD_SIZE": "2"}) == Topology(1, 2)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(Topology.detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}))
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "Topology(rank=0, world_size=1, local_rank=0, local_world_size=2)", done.stderr
