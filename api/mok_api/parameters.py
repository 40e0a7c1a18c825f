"""The parameters that many routes share, and what the application gives every route."""

from __future__ import annotations

import difflib
from typing import Annotated, Final

from fastapi import Depends, Path, Query, Request
from fastapi.routing import APIRoute
from pydantic import AwareDatetime

from mok_api.errors import InvalidRequest, short
from mok_service.db.session import Database
from mok_service.lifecycle import RunStatus
from mok_service.runs.lineage import DEPTH_MAX
from mok_service.runs.types import RunKind
from mok_service.settings import Settings
from mok_service.spec import SEED_MAX, Preset

INTEGER_MAX: Final = 2**63 - 1
PAGE_MAX: Final = 200
ITEMS_MAX: Final = 1000
_DIGEST: Final = r"^((sha256|blake3):)?[0-9a-f]{64}$"


async def database(request: Request) -> Database:
    found: Database = request.app.state.db
    return found


async def configured(request: Request) -> Settings:
    found: Settings = request.app.state.settings
    return found


async def known_parameters(request: Request) -> None:
    """Refuse query parameters that the route doesn't have, or that come twice: a misspelt filter must not show everything."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = [field.alias for field in route.dependant.query_params]
    seen: set[str] = set()
    for name, value in request.query_params.multi_items():
        if name not in known:
            nearest = next(iter(difflib.get_close_matches(name, known, n=1)), None)
            meant = "" if nearest is None else f", did you mean {nearest}?"
            raise InvalidRequest(
                f"{short(name)} is no parameter of this route{meant} (allowed: {', '.join(known) or 'none'})",
                errors=[{"field": name, "value": short(value), "problem": "is no known parameter", "nearest": nearest}],
            )
        if name in seen:
            raise InvalidRequest(f"{name} is given twice", errors=[{"field": name, "problem": "is given more than once"}])
        seen.add(name)


Db = Annotated[Database, Depends(database)]
Configured = Annotated[Settings, Depends(configured)]
JobId = Annotated[str, Path(description="Id of a job.", examples=["job_0198c0de5e1f7000800000000000c0de"])]
RunId = Annotated[str, Path(description="Id of a run.", examples=["run_0198c0de5e1f7000800000000000c0de"])]
StepNumber = Annotated[str, Path(pattern=r"^[0-9]{1,9}$", description="The checkpoint's step.", examples=["40"])]
Cursor = Annotated[str | None, Query(max_length=500, pattern=r"^[\x21-\x7e]+$", description="`next_cursor` of the page before.")]
PageLimit = Annotated[int, Query(ge=1, le=PAGE_MAX, description="Items in a page.")]
ItemLimit = Annotated[int, Query(ge=1, le=ITEMS_MAX, description="Items in an answer.")]
AfterStep = Annotated[int, Query(ge=-1, le=INTEGER_MAX, description="Only steps after this one; -1 for all.")]
AfterIndex = Annotated[int, Query(ge=-1, le=INTEGER_MAX, description="Only entries after this one; -1 for all.")]
Size = Annotated[int, Query(ge=0, le=INTEGER_MAX, description="Entries in the log that the proof is for.")]
EntryIndex = Annotated[int | None, Query(ge=0, le=INTEGER_MAX, description="Prove that this entry is in it.")]
OldSize = Annotated[int | None, Query(ge=0, le=INTEGER_MAX, description="Prove that it begins with the log of this size.")]
AfterNumber = Annotated[int, Query(ge=0, le=INTEGER_MAX, description="Only what has a higher number; 0 for all.")]
Status = Annotated[RunStatus | None, Query(description="Only runs in this state.")]
OfJob = Annotated[str | None, Query(alias="job", max_length=100, pattern=r"^[\x21-\x7e]+$", description="Only runs of this job.")]
OfDigest = Annotated[str | None, Query(alias="digest", pattern=_DIGEST, description="Only what has this digest.")]
DigestPart = Annotated[str, Path(pattern=_DIGEST, description="A digest; 64 hex digits alone are a sha256.",
                                 examples=["sha256:" + "0" * 64])]
Name = Annotated[str | None, Query(max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$", description="Only jobs of this name.")]
JobName = Annotated[str | None, Query(alias="name", max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$",
                                      description="Only runs of jobs of this name.")]
Kind = Annotated[RunKind | None, Query(description="Only runs of this kind.")]
OfModel = Annotated[Preset | None, Query(alias="model", description="Only runs of models with the sizes of this preset.")]
Seed = Annotated[int | None, Query(ge=0, le=SEED_MAX, description="Only runs with this seed.")]
Parent = Annotated[str | None, Query(max_length=100, pattern=r"^[\x21-\x7e]+$",
                                     description="Only runs that reproduce this one, or started from its weights.")]
Since = Annotated[AwareDatetime | None, Query(description="Only what was made at this time or later.",
                                              examples=["2026-12-01T10:00:00Z"])]
Until = Annotated[AwareDatetime | None, Query(description="Only what was made before this time.",
                                              examples=["2026-12-02T10:00:00Z"])]
Depth = Annotated[int, Query(ge=0, le=DEPTH_MAX, description="How many runs away from this one.")]
