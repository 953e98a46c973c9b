"""Which of how many processes this is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from bucketfeed.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """This process's rank among `world_size`, and among those of its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    def __post_init__(self) -> None:
        for rank, size in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if not 0 <= getattr(self, rank) < getattr(self, size):
                raise ConfigError(
                    f"{rank} must lie in 0 .. {size} - 1, not {rank}={getattr(self, rank)} "
                    f"with {size}={getattr(self, size)}"
                )

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> Topology:
        """Return the topology of torch.distributed where it is initialised, else that of torchrun's variables.

        One process where neither is found. `environ` stands in for the process's own environment.
        """
        environ = os.environ if environ is None else environ
        local = _integer(environ, "LOCAL_RANK", 0), _integer(environ, "LOCAL_WORLD_SIZE", 1)
        distributed = sys.modules.get("torch.distributed")  # not imported yet: then not initialised either
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return cls(distributed.get_rank(), distributed.get_world_size(), *local)
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls()
        return cls(_integer(environ, "RANK"), _integer(environ, "WORLD_SIZE"), *local)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} must be a whole number, not {text!r}; torchrun sets RANK and "
            "WORLD_SIZE together, or pass topology="
        ) from None
