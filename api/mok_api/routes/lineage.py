"""What a run came from, and what came from it."""

from __future__ import annotations

from fastapi import APIRouter

from mok_api.access import Tenant
from mok_api.answer import Json
from mok_api.docs import refusals
from mok_api.parameters import Db, Depth, RunId
from mok_api.schemas import lineage as schemas
from mok_service import runs

router = APIRouter(tags=["lineage"])


@router.get("/v1/runs/{run}/lineage", response_model=schemas.Lineage, responses=refusals(404))
def get_lineage(db: Db, tenant: Tenant, run: RunId, depth: Depth = 5) -> Json:
    """The run, its original, its reproductions and audits, the runs whose weights it started from and those that started from
    its own, as a graph; with their jobs, data, code and verifications. Edges lead to what a node depends on."""
    return Json(runs.lineage_of(db, run, depth, tenant))
