"""The machines of a cluster, as the API shows them and admission asks about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mok_service.placement import NodeSize
from mok_service.runs.types import Node


def describe(sizes: Sequence[NodeSize], here: dict[str, Any], worker: str) -> list[Node]:
    """One row a node: devices by kind, and labels.

    `here` is `environment.hardware()` of this machine; of other machines only sizes are known.
    """
    nodes = []
    for size in sizes:
        labels = {"cpus": str(size.cpus)}
        if size.name == here["host"]:
            labels |= {
                "architecture": here["architecture"], "cpu": here["cpu"]["model"], "memory_bytes": str(here["memory_bytes"]),
            }
            for gpu in here["gpus"]:
                labels[f"gpu{gpu['index']}"] = gpu["name"]
                labels[f"gpu{gpu['index']}_memory_bytes"] = str(gpu["memory_bytes"])
                labels[f"gpu{gpu['index']}_uuid"] = gpu["uuid"]
        nodes.append(Node(size.name, {"cpu": min(size.cpus, 1), "cuda": size.gpus}, labels, worker))
    return nodes
