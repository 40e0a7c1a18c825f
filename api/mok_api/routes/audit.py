"""The audit log: who wrote what."""

from __future__ import annotations

from fastapi import APIRouter

from mok_api.access import Tenant
from mok_api.answer import Json
from mok_api.parameters import AfterIndex, Db, ItemLimit
from mok_api.schemas import access as schemas
from mok_service import auditlog

router = APIRouter(tags=["audit"])


@router.get("/v1/audit", response_model=schemas.AuditItems)
def list_entries(db: Db, tenant: Tenant, after: AfterIndex = -1, limit: ItemLimit = 1000) -> Json:
    """The tenant's audit log, in order: every write that somebody asked for, each entry with the digest of the one before."""
    found = auditlog.entries(db, tenant, after, limit)
    return Json({"items": found, "next_after": found[-1]["number"] if found else after})


@router.get("/v1/audit/head", response_model=schemas.AuditHead)
def get_head(db: Db, tenant: Tenant) -> Json:
    """How long the tenant's audit log is, and the digest of its last entry. Who keeps it notices later if the log is cut."""
    return Json(auditlog.head(db, tenant))
