"""The lines that training logs for people, and the patterns by which a place reads numbers out of them."""

from __future__ import annotations

import math

from bucketfeed.data.stats import STALLED

_NUMBER = r"([0-9.]+(?:e[+-]?[0-9]+)?)"

METRICS = {
    "train:loss": rf"epoch [0-9]+: train loss {_NUMBER}",
    "train:samples_per_second": rf"epoch [0-9]+: train .*, {_NUMBER} samples/s",
    "train:wait_percent": rf"epoch [0-9]+: train .* samples/s, {_NUMBER} % of the time waiting for data",
    "test:loss": rf"epoch [0-9]+: test loss {_NUMBER}",
    "test:accuracy": rf"epoch [0-9]+: test .*accuracy {_NUMBER}",
}
"""Names of what a run logs, each with a regular expression whose one group is the value, as CloudWatch takes them."""


def epoch_line(epoch: int, loss: float | None, samples_per_second: float, wait_share: float) -> str:
    """Return what is said of an epoch of training, with a verdict on who waited for whom."""
    verdict = "it kept up" if wait_share < STALLED else "it is the bottleneck"
    return (
        f"epoch {epoch}: train {_loss(loss)}, {samples_per_second:.1f} samples/s, "
        f"{100 * wait_share:.1f} % of the time waiting for data: {verdict}"
    )


def evaluation_line(epoch: int, loss: float | None, accuracy: float | None) -> str:
    """Return what is said of an evaluation after an epoch; models that reckon their own loss have no accuracy."""
    return f"epoch {epoch}: test {_loss(loss)}" + (f", accuracy {accuracy:.4f}" if accuracy is not None else "")


def pace_line(epoch: int, batches: int, of: int, samples_per_second: float, wait_share: float) -> str:
    """Return what is said in mid-epoch, of rank 0: nothing in it is one of `METRICS`."""
    return (
        f"epoch {epoch}: {batches} of {of} batches, {samples_per_second:.1f} samples/s on rank 0, "
        f"{100 * wait_share:.1f} % of the time waiting for data"
    )


def _loss(loss: float | None) -> str:
    return f"loss {loss if loss is not None else math.nan:.4g}"
