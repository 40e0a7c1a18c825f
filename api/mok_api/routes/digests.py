"""Where a digest occurs."""

from __future__ import annotations

from fastapi import APIRouter

from mok_api.access import Tenant
from mok_api.answer import Json
from mok_api.parameters import Db, DigestPart
from mok_api.schemas import lineage as schemas
from mok_service import runs

router = APIRouter(tags=["lineage"])


@router.get("/v1/digests/{digest}", response_model=schemas.Uses)
def find_digest(db: Db, tenant: Tenant, digest: DigestPart) -> Json:
    """What produced or used a digest: weights, optimizer state, step records, checkpoints and their files, data files and
    manifests, training specs, native libraries, attestations. An empty list says that nothing here did."""
    return Json(runs.find_digest(db, digest, tenant).as_dict())
