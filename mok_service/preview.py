"""What submitting a spec would do, without submitting it; and the machine that admission asks about."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from mok_service.runs.clusters import NODE_SECONDS_MAX
from mok_service.runs.types import Node
from mok_service.spec import CudaDevice, JobSpec, Machine, estimate, resolve, training_digest


def preview(job: JobSpec) -> dict[str, Any]:
    """{"spec", "training_digest", "estimate"}: the resolved spec, the job's identity and what it costs, as JSON values.

    A seed that submitting would draw stays null, and the digest with it.
    """
    drawn = job.training.seed is None
    resolved = resolve(job, draw_seed=lambda: 0)
    shown = resolved.model_dump(mode="json")
    if drawn:
        shown["training"]["seed"] = None
    return {
        "spec": shown, "training_digest": None if drawn else training_digest(resolved.training),
        "estimate": estimate(resolved).model_dump(mode="json"),
    }


def largest_machine(nodes: Sequence[Node], device: str, now: datetime) -> Machine | None:
    """Of the machines that schedulers have reported lately the one with most memory for a kind of device; None if not known."""
    recent = [n for n in nodes if n.heartbeat_at is not None and n.heartbeat_at > now - timedelta(seconds=NODE_SECONDS_MAX)]
    if any(node.capacity.get(device) and "memory_bytes" not in node.labels for node in recent):
        return None  # of that one only its devices are known
    machines = [_machine(node) for node in recent if "memory_bytes" in node.labels]
    if device == "cuda":
        return max(machines, key=lambda m: max((d.memory_bytes for d in m.cuda_devices), default=-1), default=None)
    return max(machines, key=lambda m: m.memory_bytes, default=None)


def _machine(node: Node) -> Machine:
    labels = node.labels
    numbers = [index for index in range(node.capacity.get("cuda", 0)) if f"gpu{index}" in labels]
    devices = tuple(CudaDevice(name=labels[f"gpu{i}"], memory_bytes=int(labels[f"gpu{i}_memory_bytes"])) for i in numbers)
    return Machine(cpu_count=int(labels["cpus"]), memory_bytes=int(labels["memory_bytes"]), cuda_devices=devices)
