"""What webhooks are told of a run: put into the outbox in the transaction that stores the events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import Connection

from mok_service.db import queries, tables
from mok_service.db import webhooks as sql
from mok_service.db.ids import new_id
from mok_service.lifecycle import FINAL
from mok_service.runs.types import time_text

WebhookEvent = Literal["run.ended", "verification.done"]


def enqueue(tx: Connection, run: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> None:
    """In the transaction that stores events of a run: what its tenant's webhooks are to be told of them."""
    told = [(kind, event) for event in events if (kind := _kind(event)) is not None]
    if not told:
        return
    hooks = sql.webhooks_of(tx, run["tenant"])
    queries.add(tx, tables.deliveries, [_row(hook, kind, run, event) for kind, event in told for hook in hooks
                                        if kind in hook["events"]])


def _kind(event: Mapping[str, Any]) -> WebhookEvent | None:
    payload = event["payload"]
    if event["type"] == "run.status" and payload["status"] in FINAL and payload["from"] not in FINAL:
        return "run.ended"
    if event["type"] == "verification" and payload.get("verdict") is not None:
        return "verification.done"
    return None


def _row(hook: Mapping[str, Any], kind: WebhookEvent, run: Mapping[str, Any], event: Mapping[str, Any]) -> dict[str, Any]:
    at, delivery = event["created_at"], new_id("dlv")
    shown: dict[str, Any] = {name: run[name] for name in ("id", "kind", "status", "stop_reason", "verdict", "step")}
    shown |= {"job": run["job_id"], "head": _text(run["head"]), "weights": _text(run["weights"])}
    data: dict[str, Any] = {"run": shown, "event": event["number"]}
    if kind == "verification.done":
        data["verification"] = event["payload"]
    body = {"id": delivery, "type": kind, "tenant": run["tenant"], "at": time_text(at), "data": data}
    return {"id": delivery, "tenant": run["tenant"], "webhook_id": hook["id"], "type": kind, "status": "pending", "attempts": 0,
            "body": json.dumps(body, separators=(",", ":"), allow_nan=False), "next_at": at, "message": None, "created_at": at,
            "ended_at": None}


def _text(digest: Any) -> str | None:
    return None if digest is None else str(digest)
