"""Which of how many processes this is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from bucketfeed.errors import ConfigError
from bucketfeed.sampling.whole import whole


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
            whole(f"{rank} with {size}={count}", getattr(self, rank), 0, count - 1)

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> Topology:
        """Return the topology of torch.distributed where it is initialised, else that of torchrun's variables.

        One process where neither is found. `environ` stands in for the process's own environment.
        Raises `ConfigError` naming a variable that is missing or no number.
        """
        environ = os.environ if environ is None else environ
        distributed = sys.modules.get("torch.distributed")  # not imported yet: then not initialised either
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world_size = distributed.get_rank(), distributed.get_world_size()
        elif "RANK" in environ or "WORLD_SIZE" in environ:
            rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
        else:
            return cls()
        local_rank = _integer(environ, "LOCAL_RANK", 0)
        # Some launchers tell only LOCAL_RANK: then there are at least so many.
        return cls(rank, world_size, local_rank, _integer(environ, "LOCAL_WORLD_SIZE", local_rank + 1))


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} must be a whole number, not {text!r}; torchrun sets RANK and "
            "WORLD_SIZE together; unset both for one process, or pass topology=Topology(rank, world_size)"
        ) from None
