"""What a training job costs, roughly: a table of prices with its date, for a look before anything is started."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bucketfeed.platforms.sagemaker.job import Job

# On-demand prices of SageMaker training in us-east-1, USD an hour: an estimate; no value was compared with AWS's
# own list. About half of them agree with copies of it from about 2024; the rest have no source but experience. Types
# whose price has changed much since, or of which copies disagree (ml.p4d, ml.p5), are left out.
AS_OF = "about 2024"
REGION = "us-east-1"
SOURCE = "https://aws.amazon.com/sagemaker/pricing/"
_PRICES = {
    "ml.m5": {"large": 0.115, "xlarge": 0.23, "2xlarge": 0.461, "4xlarge": 0.922, "12xlarge": 2.765, "24xlarge": 5.53},
    "ml.c5": {"xlarge": 0.204, "2xlarge": 0.408, "4xlarge": 0.816, "9xlarge": 1.836, "18xlarge": 3.672},
    "ml.g4dn": {
        **{"xlarge": 0.7364, "2xlarge": 0.94, "4xlarge": 1.505, "8xlarge": 2.72},
        **{"12xlarge": 4.89, "16xlarge": 5.44},
    },
    "ml.g5": {
        **{"xlarge": 1.408, "2xlarge": 1.515, "4xlarge": 2.03, "8xlarge": 3.06},
        **{"12xlarge": 7.09, "16xlarge": 5.12, "24xlarge": 10.18, "48xlarge": 20.36},
    },
    "ml.g6": {"2xlarge": 1.222, "12xlarge": 5.752, "16xlarge": 4.246, "24xlarge": 8.344},
    "ml.p3": {"2xlarge": 3.825, "8xlarge": 14.688, "16xlarge": 28.152},
    "ml.p3dn": {"24xlarge": 35.894},
}
VOLUME_GB_MONTH = 0.14
_HOURS_A_MONTH = 730
_GPU = re.compile(r"ml\.(?:g|p)\d")  # families; ml.trn and ml.inf are of another kind
_GPUS = {
    "ml.g4dn.12xlarge": 4,
    **dict.fromkeys(("ml.g5.12xlarge", "ml.g5.24xlarge", "ml.g6.12xlarge", "ml.g6.24xlarge"), 4),
    **dict.fromkeys(("ml.g6e.12xlarge", "ml.g6e.24xlarge", "ml.p3.8xlarge"), 4),
    **dict.fromkeys(("ml.g5.48xlarge", "ml.g6.48xlarge", "ml.g6e.48xlarge"), 8),
    **dict.fromkeys(("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p4de.24xlarge"), 8),
    **dict.fromkeys(("ml.p5.48xlarge", "ml.p5e.48xlarge", "ml.p5en.48xlarge", "ml.p6-b200.48xlarge"), 8),
}
_INSTANCE_STORE = re.compile(r"ml\.(?:g4dn|g5|g6|g6e|p3dn|p4d|p4de|p5|p5e|p5en|p6-b200|p6-b300|[a-z]\d+i?d)\.")


@dataclass(frozen=True, slots=True)
class Cost:
    """US dollars: an hour of all hosts, and the job if it runs as long as it may. None: no price is known."""

    hour: float | None
    at_most: float | None
    text: str


def cost(job: Job, runs: int = 1, parallel: int = 1) -> Cost:
    """Return what `job` costs on demand; `runs` of it, `parallel` at a time, where it is tuned."""
    price = hourly(job.instance_type)
    hours = job.max_run_seconds / 3600
    if price is None:
        return Cost(None, None, f"no price of {job.instance_type} is known here; see {SOURCE}")
    volume = 0.0 if has_instance_store(job.instance_type) else job.volume_gb * VOLUME_GB_MONTH / _HOURS_A_MONTH
    hour = (price + volume) * job.instance_count
    at_most = hour * hours * runs + price * job.instance_count * job.keep_alive_seconds / 3600
    text = (
        f"${hour * parallel:,.2f} an hour, ${at_most:,.2f} at most ({hours:g} h"
        + (f" x {runs} jobs" if runs > 1 else "")
        + f"); an estimate from on-demand prices of {REGION} of {AS_OF}, not compared with AWS's list: see {SOURCE}"
    )
    if job.spot:
        text += "; spot is not counted in, and usually costs less"
    return Cost(hour, at_most, text)


def hourly(instance_type: str) -> float | None:
    """Return the price of one instance for an hour, if it is in the table."""
    family, _, size = instance_type.rpartition(".")
    return _PRICES.get(family, {}).get(size)


def gpus(instance_type: str) -> int:
    """Return how many GPUs an instance has: 1 where the table knows none of several."""
    return _GPUS.get(instance_type, 1) if _GPU.match(instance_type) else 0


def has_instance_store(instance_type: str) -> bool:
    """Whether the type comes with local disks, beside which SageMaker ignores the volume's size."""
    return _INSTANCE_STORE.match(instance_type) is not None
