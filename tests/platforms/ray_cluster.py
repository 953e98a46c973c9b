"""Starts a Ray cluster of two nodes with a CPU each, tells address and second node on stdout, ends it with stdin."""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster


def main() -> None:
    # Deaths of nodes are noticed within two seconds, not fifteen.
    noticing = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": noticing}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        node = cluster.add_node(num_cpus=1)
        print(json.dumps({"address": cluster.address, "second": node.node_id}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
