from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bucketfeed.errors import ConfigError
from bucketfeed.sampling import topology as module
from bucketfeed.sampling.topology import Topology

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
OPEN_MPI_NODE = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
# As SLURM sets them: of the allocation (also in the script of sbatch), and of a task that srun has started.
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TASK = ALLOCATION | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
TPU = {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}


def test_one_process_where_nothing_says_otherwise():
    assert Topology.detect({}) == Topology() == Topology(0, 1, 0, 1)
    assert Topology.detect({"LOCAL_RANK": "left behind"}) == Topology()


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
        {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4"},
        OPEN_MPI | OPEN_MPI_NODE,
        {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
        TASK,
        {
            **{"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"},
            **{"PJRT_LOCAL_PROCESS_RANK": "1", "PJRT_LOCAL_PROCESS_COUNT": "4"},
        },
    ],
    ids=["torchrun", "Horovod", "Open MPI", "MPICH", "srun", "TPU"],
)
def test_the_variables_of_each_launcher_are_read(environ):
    assert Topology.detect(environ) == Topology(5, 8, 1, 4)


def test_a_launcher_that_tells_no_local_size_is_enough():
    assert Topology.detect({"RANK": "5", "WORLD_SIZE": "8"}) == Topology(5, 8)
    assert Topology.detect({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}) == Topology(5, 8, 3, 4)
    assert Topology.detect(TPU) == Topology(2, 4)
    assert Topology.detect({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}) == Topology()


@pytest.mark.parametrize(
    ("tasks", "node", "local", "size"),
    [("4(x2)", 1, 1, 4), ("3,5", 1, 1, 5), ("2,1(x2),3", 3, 2, 3), (None, 1, 2, 3), ("4", 1, 2, 3)],
)
def test_a_tasks_node_is_looked_up_where_nodes_have_unequal_numbers(tasks, node, local, size):
    environ = TASK | {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), "SLURM_STEP_TASKS_PER_NODE": tasks or ""}
    assert Topology.detect(environ) == Topology(5, 8, local, size)


def test_a_shell_in_a_slurm_allocation_is_one_process():
    assert Topology.detect(ALLOCATION) == Topology()
    # The shell of salloc, where that is a step of its own.
    assert Topology.detect(ALLOCATION | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}) == Topology()


def test_a_step_smaller_than_its_allocation_counts_its_own_tasks():
    environ = TASK | {"SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert Topology.detect(environ | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}) == Topology(1, 2)


def test_a_rank_above_0_is_a_task_also_where_the_size_of_its_step_was_not_passed_on():
    environ = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "3"}
    assert Topology.detect(environ) == Topology(3, 8, 3, 4)


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK .*'one'"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK .*''"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 and WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 and WORLD_SIZE=0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
            "LOCAL_WORLD_SIZE=4 and WORLD_SIZE=2",
        ),
        ({"HOROVOD_RANK": "0"}, "HOROVOD_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "PMI_RANK=4 and PMI_SIZE=4"),
        ({"SLURM_PROCID": "3"}, "SLURM_NTASKS is not set"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, "SLURM_PROCID is not set"),
        ({"TPU_WORKER_ID": "0"}, "TPU_WORKER_ID=0 and TPU_WORKER_HOSTNAMES=nothing"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID is not set"),
    ],
    ids=str,
)
def test_variables_that_make_no_topology_are_named(environ, names):
    with pytest.raises(ConfigError, match=names) as caught:
        Topology.detect(environ)
    assert "topology=Topology(rank, world_size)" in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "1", **OPEN_MPI},  # every process would train on all the data
        {"RANK": "0", "WORLD_SIZE": "8", **OPEN_MPI},  # every process would be rank 0
        {"RANK": "0", "WORLD_SIZE": "8", **TASK},
        {**OPEN_MPI, "PMI_RANK": "4", "PMI_SIZE": "8"},
    ],
    ids=str,
)
def test_launchers_that_contradict_each_other_are_both_named(environ):
    with pytest.raises(ConfigError, match=r"(RANK|OMPI\w+) says rank \d of \d .*(OMPI|SLURM|PMI)\w+ says rank \d of 8"):
        Topology.detect(environ)


def test_a_launcher_below_another_one_is_believed():
    torchrun = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert Topology.detect(torchrun | TASK) == Topology(9, 16, 1, 8)
    assert Topology.detect(OPEN_MPI | OPEN_MPI_NODE | TASK | {"SLURM_STEP_NUM_TASKS": "6"}) == Topology(5, 8, 1, 4)
    # One run on each task, by torchrun itself.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert Topology.detect(alone | TASK) == Topology()


def test_the_place_on_the_node_comes_from_the_launcher_that_tells_it():
    assert Topology.detect({"RANK": "5", "WORLD_SIZE": "8", **TASK}) == Topology(5, 8, 1, 4)
    assert Topology.detect({"PMI_RANK": "5", "PMI_SIZE": "8", **TASK}) == Topology(5, 8, 1, 4)


@pytest.mark.parametrize("arguments", [(1, 1), (-1, 2), (0, 0), (0, 1, 1, 1), ("0", 1), (0.0, 1)], ids=str)
def test_what_is_no_rank_of_a_world_is_refused(arguments):
    with pytest.raises(ConfigError, match="must be a whole number"):
        Topology(*arguments)


def test_what_was_found_is_told_once(caplog):
    module._tell.cache_clear()
    with caplog.at_level(logging.INFO, logger="bucketfeed"):
        for _ in range(3):
            Topology.detect(OPEN_MPI | OPEN_MPI_NODE)
            Topology.detect({})
    assert caplog.messages == ["this is rank 5 of 8 (1 of 4 on its node), by OMPI_COMM_WORLD_RANK (Open MPI)"]


class Context:
    """The context of a worker of Ray Train."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __call__(self):
        if self.error:
            raise self.error
        values = {"world_rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4}
        return SimpleNamespace(**{f"get_{name}": lambda value=value: value for name, value in values.items()})


def test_a_worker_of_ray_train_is_known_by_its_context_and_other_processes_by_their_variables(monkeypatch):
    torchrun = {"RANK": "1", "WORLD_SIZE": "2"}
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=Context()))
    assert Topology.detect(torchrun) == Topology(5, 8, 1, 4)
    for error in (RuntimeError("outside of a training function"), DeprecationWarning("in a Tune session")):
        monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=Context(error)))
        assert Topology.detect(torchrun) == Topology(1, 2)


@pytest.mark.parametrize("ready", [True, False])
def test_torch_xla_is_asked_once_it_is_initialised_and_never_before(monkeypatch, ready):
    asked = []

    def answer(name, value):
        return lambda: asked.append(name) or value

    values = {"global_ordinal": 5, "world_size": 8, "local_ordinal": 1, "local_process_count": 4}
    runtime = SimpleNamespace(**{name: answer(name, value) for name, value in values.items()})
    xla = SimpleNamespace(_XLAC=SimpleNamespace(_xla_runtime_is_initialized=lambda: ready), runtime=runtime)
    monkeypatch.setitem(sys.modules, "torch_xla", xla)
    assert Topology.detect(TPU) == (Topology(5, 8, 1, 4) if ready else Topology(2, 4))
    assert bool(asked) == ready


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
print(Topology.detect({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}))
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert done.stdout.splitlines() == [
        "Topology(rank=0, world_size=1, local_rank=0, local_world_size=2)",
        "Topology(rank=0, world_size=1, local_rank=1, local_world_size=4)",
    ], done.stderr
