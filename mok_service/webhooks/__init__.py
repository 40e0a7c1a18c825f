"""Webhooks: who is told what, the outbox of what is to be sent, and the signature by which a receiver knows that it's from us."""

from mok_service.webhooks.hooks import (
    Delivery,
    Webhook,
    create_webhook,
    delete_webhook,
    deliveries,
    get_webhook,
    list_webhooks,
)
from mok_service.webhooks.outbox import Outbox
from mok_service.webhooks.signature import InvalidSignature, sign, verify

__all__ = [
    "Delivery", "InvalidSignature", "Outbox", "Webhook", "create_webhook", "delete_webhook",
    "deliveries", "get_webhook", "list_webhooks", "sign", "verify",
]
