"""For tests, ours and yours: a mocked S3, readers that record, delay and fail, fixtures, SageMaker jobs run here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bucketfeed.testing.jobs import JobResult, run_training_job

__all__ = ["JobResult", "run_training_job"]


def __getattr__(name: str) -> object:
    if name in __all__:  # not before: pytest loads this package in every test run of who has it installed
        from bucketfeed.testing import jobs

        return getattr(jobs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
