"""What the cluster has, as schedulers report it: so that the API can refuse what can never fit without talking to Ray."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection

from mok_service.db import queries
from mok_service.db.session import Database
from mok_service.errors import Unrunnable
from mok_service.runs.types import Node
from mok_service.spec import ExecutionSpec

NODE_SECONDS_MAX: Final = 120  # a node that wasn't reported for longer says nothing about what the cluster has


def report_nodes(db: Database, worker: str, nodes: Sequence[Node], now: datetime) -> None:
    """Stores the nodes that a scheduler sees; those that it saw before and no longer sees are removed."""
    rows = [{"name": node.name, "worker": worker, "capacity": dict(node.capacity), "labels": dict(node.labels),
             "heartbeat_at": now} for node in nodes]
    with db.write() as tx:
        queries.replace_nodes(tx, worker, rows)


def refuse_what_never_fits(tx: Connection, execution: ExecutionSpec, now: datetime) -> None:
    """Raises Unrunnable when the nodes on record together have fewer devices than the run asks for.

    Without a recent report nothing is known, and the run may queue: its queue deadline speaks then.
    """
    known = [node for node in queries.all_nodes(tx) if node["heartbeat_at"] > now - timedelta(seconds=NODE_SECONDS_MAX)]
    have = sum(node["capacity"].get(execution.device, 0) for node in known)
    if known and have < execution.count:
        raise Unrunnable(
            f"execution.count: this job asks for {execution.count} {execution.device} device(s), and the cluster has {have}",
            field="execution.count", value=execution.count, allowed=have,
        )
