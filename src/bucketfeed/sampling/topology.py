"""Which of how many processes this is."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bucketfeed.errors import ConfigError
from bucketfeed.store.whole import whole

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Topology:
    """This process's rank among `world_size`, and among those of its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        for rank, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            count = whole(size, getattr(self, size), 1)
            own = whole(f"{rank} with {size}={count}", getattr(self, rank), 0, count - 1)
            object.__setattr__(self, size, count)  # numpy's numbers would not go into JSON
            object.__setattr__(self, rank, own)

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> Topology:
        """Return what has started this process says of it; one process where nothing does.

        Asked are, in this order: torch.distributed where it is initialised, Ray Train where this is a worker of it,
        torch_xla where it is initialised; then the variables of torchrun, Horovod, Open MPI, MPICH and Intel MPI, srun
        and TPU hosts. What was found is logged once. `environ` stands in for the process's own environment.

        Raises `ConfigError` naming the variables that are missing, no number, or contradict each other: where two
        launchers speak, the first must not see fewer processes than the other, nor as many and another rank.
        """
        environ = os.environ if environ is None else environ
        for name, ask in _LIVE.items():  # what runs can't be left over from another process, as variables can
            if (topology := ask(environ)) is not None:
                return _told(topology, name)
        found = [launcher for launcher in _LAUNCHERS if launcher.speaks(environ)]
        if not found:
            return cls()
        topologies = {launcher: launcher.topology(environ) for launcher in found}
        topology = topologies[found[0]]
        for other in found[1:]:
            if "TORCHELASTIC_RUN_ID" not in environ:  # torchrun itself deals out ranks anew, and may start many runs
                _check_agree(found[0], topology, other, topologies[other])
        local = next((one for one in found if one.local_rank in environ and _same(topologies[one], topology)), found[0])
        return _told(topologies[local], f"{found[0].rank} ({found[0].name})")


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables by which a launcher tells its processes which ones they are."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str

    def speaks(self, environ: Mapping[str, str]) -> bool:
        """Whether it has started this process, be it that it says only half."""
        return self.rank in environ or self.world_size in environ

    def world(self, environ: Mapping[str, str]) -> tuple[int, int]:
        """Return rank and number of processes."""
        return _integer(environ, self.rank), _integer(environ, self.world_size)

    def local(self, environ: Mapping[str, str]) -> tuple[int, int]:
        """Return rank and number of processes on the node. Where only the rank is told, there are at least so many."""
        if self.local_rank not in environ and self.local_world_size not in environ:
            return 0, 1
        rank = _integer(environ, self.local_rank)
        return rank, _integer(environ, self.local_world_size, rank + 1)

    def topology(self, environ: Mapping[str, str]) -> Topology:
        """Return what the variables say. Raises `ConfigError` naming those that can't be."""
        (rank, size), (local_rank, local_size) = self.world(environ), self.local(environ)
        for first, one, second, other in (
            (self.rank, rank + 1, self.world_size, size),
            (self.local_rank, local_rank + 1, self.local_world_size, local_size),
            (self.local_world_size, local_size, self.world_size, size),
        ):
            if not 0 < one <= other:
                said = " and ".join(f"{name}={environ.get(name, 'nothing')}" for name in (first, second))
                raise ConfigError(f"{said} can't be: ranks go from 0 to below the number of processes; {_NEXT}")
        return Topology(rank, size, local_rank, local_size)


class _Srun(_Launcher):
    """The tasks of a SLURM step, which only `srun` starts."""

    __slots__ = ()

    def speaks(self, environ: Mapping[str, str]) -> bool:
        """Whether this is a task of a step.

        A shell in an allocation, and the script of `sbatch`, are one process each, though SLURM_NTASKS and a
        SLURM_PROCID of 0 are set there too. The number of tasks of a step is not, and no rank above 0.
        """
        return self.world_size in environ or environ.get(self.rank, "0") != "0"

    def world(self, environ: Mapping[str, str]) -> tuple[int, int]:
        """Return rank and number of tasks: of the step, or of the allocation where only that is told."""
        size = self.world_size if self.world_size in environ else "SLURM_NTASKS"
        return _integer(environ, self.rank), _integer(environ, size)

    def local(self, environ: Mapping[str, str]) -> tuple[int, int]:
        """Return rank and number of tasks on the node: "4(x2),3" is told of three nodes."""
        rank = _integer(environ, self.local_rank, 0)
        groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get(self.local_world_size, ""))
        sizes = [int(size) for size, times in groups for _ in range(int(times or 1))]
        node = _integer(environ, "SLURM_NODEID", 0)
        return rank, sizes[node] if node < len(sizes) else rank + 1


class _TpuHosts(_Launcher):
    """The hosts of a TPU slice, each with one process or with those that torch_xla started there."""

    __slots__ = ()

    def world(self, environ: Mapping[str, str]) -> tuple[int, int]:
        """Return rank and number of processes: those of one host follow each other."""
        local_rank, local_size = self.local(environ)
        hosts = [host for host in environ.get(self.world_size, "").split(",") if host]
        return _integer(environ, self.rank) * local_size + local_rank, len(hosts) * local_size


_LAUNCHERS: tuple[_Launcher, ...] = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    _Launcher("Open MPI", *(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Srun("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    _TpuHosts("TPU", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT"),
)

_NEXT = "correct or unset them, or pass topology=Topology(rank, world_size)"


def _distributed(environ: Mapping[str, str]) -> Topology | None:
    distributed = sys.modules.get("torch.distributed")  # not imported yet: then not initialised either
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    local = next((one.local(environ) for one in _LAUNCHERS if one.local_rank in environ), (0, 1))
    return Topology(distributed.get_rank(), distributed.get_world_size(), *local)


def _ray(environ: Mapping[str, str]) -> Topology | None:
    ray_train = sys.modules.get("ray.train")
    if ray_train is None:
        return None
    try:
        context = ray_train.get_context()
        world = context.get_world_rank(), context.get_world_size()
        return Topology(*world, context.get_local_rank(), context.get_local_world_size())
    except (RuntimeError, Warning):  # outside of a training function; a Tune session says so by a warning
        return None


def _xla(environ: Mapping[str, str]) -> Topology | None:
    xla = sys.modules.get("torch_xla")
    # Its runtime remembers what it answers: asked before it is initialised, it would stay one process.
    if xla is None or not xla._XLAC._xla_runtime_is_initialized():
        return None
    runtime = xla.runtime
    local_size = max(runtime.local_process_count(), runtime.local_ordinal() + 1)
    return Topology(runtime.global_ordinal(), runtime.world_size(), runtime.local_ordinal(), local_size)


_LIVE: dict[str, Callable[[Mapping[str, str]], Topology | None]] = {
    "torch.distributed": _distributed,
    "Ray Train": _ray,
    "torch_xla": _xla,
}


def _same(one: Topology, other: Topology) -> bool:
    return (one.rank, one.world_size) == (other.rank, other.world_size)


def _check_agree(one: _Launcher, first: Topology, other: _Launcher, second: Topology) -> None:
    """Raise where two launchers contradict each other. That the first starts more processes below is fine."""
    if first.world_size < second.world_size or (first.world_size == second.world_size and first.rank != second.rank):
        raise ConfigError(
            f"{one.rank} says rank {first.rank} of {first.world_size} ({one.name}), {other.rank} says rank "
            f"{second.rank} of {second.world_size} ({other.name}); unset what is left over of the other launcher, or "
            "pass topology=Topology(rank, world_size)"
        )


@functools.cache
def _tell(text: str) -> None:
    _log.info("%s", text)


def _told(topology: Topology, source: str) -> Topology:
    """Return `topology`; say once in this process where it comes from."""
    local = f"{topology.local_rank} of {topology.local_world_size} on its node"
    if _log.isEnabledFor(logging.INFO):  # else once it is: a command line looks for its rank to set up its log
        _tell(f"this is rank {topology.rank} of {topology.world_size} ({local}), by {source}")
    return topology


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        was = (
            "is not set, though others of its launcher are" if text is None else f"must be a whole number, not {text!r}"
        )
        raise ConfigError(f"the environment variable {name} {was}; {_NEXT}") from None
