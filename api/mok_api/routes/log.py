"""The append-only log of attestations, and the keys that signed them."""

from __future__ import annotations

from fastapi import APIRouter

from mok_api.access import Who
from mok_api.answer import Json
from mok_api.docs import refusals
from mok_api.parameters import AfterIndex, Db, EntryIndex, ItemLimit, OldSize, Size
from mok_api.schemas import log as schemas
from mok_service import runs

router = APIRouter(tags=["log"])


@router.get("/v1/log/head", response_model=schemas.Envelope, responses=refusals(404))
def get_head(db: Db) -> Json:
    """The log's size and Merkle root, signed. 404 while no run has ended."""
    return Json(runs.log_head(db))


@router.get("/v1/log/entries", response_model=schemas.LogEntryItems)
def list_entries(db: Db, who: Who, after: AfterIndex = -1, limit: ItemLimit = 1000) -> Json:
    """The log's entries, in order. Whose they are is shown of the tenant's own; to an operator, of all."""
    found = runs.log_entries(db, after, limit, None if "operate" in who.permissions else who.tenant)
    return Json({"items": [entry.as_dict() for entry in found], "next_after": found[-1].index if found else after})


@router.get("/v1/log/proof", response_model=schemas.LogProof)
def get_proof(db: Db, size: Size, index: EntryIndex = None, old_size: OldSize = None) -> Json:
    """Proof by RFC 6962 that an entry is in the log (`index`), or that an older log is its beginning (`old_size`)."""
    proof = runs.log_proof(db, size, index=index, old_size=old_size)
    return Json({"size": size, "index": index, "old_size": old_size, "proof": proof})


@router.get("/v1/keys", response_model=schemas.SigningKeyItems)
def list_keys(db: Db) -> Json:
    """The public keys that have signed here. To trust one, get it another way than from whom you check."""
    return Json({"items": runs.signing_keys(db)})
