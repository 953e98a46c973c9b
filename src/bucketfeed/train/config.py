"""All that a training run is told, as one value: whoever starts one (a shell, SageMaker, a notebook) builds this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bucketfeed.errors import ConfigError

Amp = Literal["auto", "off", "bf16", "fp16"]
Resume = Literal["auto", "never"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Options of `train`; `entrypoints/train.py --help` explains each."""

    data: str
    test_data: str | None = None
    epochs: int = 1
    batch_size: int = 64
    seed: int = 0
    format: str = "auto"
    storage_options: dict[str, Any] | None = field(default=None, repr=False)
    cache_dir: str | None = None
    cache_limit: int | str | None = None
    checkpoint_dir: str | None = None
    resume: Resume = "auto"
    save_seconds: float = 300.0
    save_steps: int | None = None
    model: str | None = None
    decode: str | None = None
    num_classes: int | None = None
    image_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 20
    grad_accum: int = 1
    clip_norm: float | None = 1.0
    amp: Amp = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_workers: int = 0
    streams: int | None = None
    read_ahead_bytes: int | str | None = None
    run_dir: str = "runs/train"
    audit: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        for name, least in (
            ("epochs", 1),
            ("batch_size", 1),
            ("grad_accum", 1),
            ("image_size", 1),
            ("warmup_steps", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name, known in (("amp", get_args(Amp)), ("resume", get_args(Resume)), ("device", ("auto", "cpu", "cuda"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.lr <= 0 or self.save_seconds <= 0 or (self.save_steps is not None and self.save_steps < 1):
            raise ConfigError("lr, save_seconds and save_steps must be greater than 0")
