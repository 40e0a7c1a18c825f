"""Webhooks: who is told when a run has ended or a verification is done."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from mok_api.access import Tenant
from mok_api.answer import Json
from mok_api.body import JsonText, Nothing, parse
from mok_api.docs import created, json_body, refusals
from mok_api.parameters import Configured, Cursor, Db, PageLimit
from mok_api.schemas import access as schemas
from mok_service import webhooks

router = APIRouter(tags=["webhooks"])

WebhookId = Annotated[str, Path(description="Id of a webhook.", examples=["whk_0198c0de5e1f7000800000000000c0de"])]


@router.post("/v1/webhooks", status_code=201, response_model=schemas.NewWebhookAnswer,
             openapi_extra=json_body("NewWebhook", schemas.NEW_WEBHOOK_EXAMPLE),
             responses=created("Location names the webhook.") | refusals(413, 415))
def create_webhook(db: Db, settings: Configured, tenant: Tenant, body: JsonText) -> Json:
    """Have events of this tenant sent to an address. The secret that they are signed with is in this answer and nowhere else."""
    wish = parse(body, schemas.NewWebhook)
    made, secret = webhooks.create_webhook(db, url=wish.url, events=wish.events, tenant=tenant,
                                           allowed=settings.outbound_networks)
    return Json({**made.as_dict(), "secret": secret}, 201, headers={"Location": f"/v1/webhooks/{made.id}"})


@router.get("/v1/webhooks", response_model=schemas.WebhookItems)
def list_webhooks(db: Db, tenant: Tenant) -> Json:
    """The tenant's webhooks, without their secrets."""
    return Json({"items": [hook.as_dict() for hook in webhooks.list_webhooks(db, tenant)]})


@router.get("/v1/webhooks/{webhook}", response_model=schemas.Webhook, responses=refusals(404))
def get_webhook(db: Db, tenant: Tenant, webhook: WebhookId) -> Json:
    """One webhook, without its secret."""
    return Json(webhooks.get_webhook(db, webhook, tenant).as_dict())


@router.delete("/v1/webhooks/{webhook}", response_model=schemas.Webhook, responses=refusals(404, 413, 415))
def delete_webhook(db: Db, tenant: Tenant, webhook: WebhookId, _: Nothing) -> Json:
    """End a webhook. What it hasn't been told yet is given up; answers with what it was."""
    return Json(webhooks.delete_webhook(db, webhook, tenant).as_dict())


@router.get("/v1/webhooks/{webhook}/deliveries", response_model=schemas.DeliveryPage, responses=refusals(404))
def list_deliveries(db: Db, tenant: Tenant, webhook: WebhookId, cursor: Cursor = None, limit: PageLimit = 50) -> Json:
    """What the webhook was and is to be told, newest first: pending, delivered, or given up with the reason."""
    page = webhooks.deliveries(db, webhook, tenant, cursor, limit)
    return Json({"items": [delivery.as_dict() for delivery in page.items], "next_cursor": page.next_cursor})
