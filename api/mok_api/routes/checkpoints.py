"""The files of checkpoints: download, delete."""

from __future__ import annotations

import os
import re
import stat
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, BinaryIO, Final
from urllib.parse import quote

from fastapi import APIRouter, Path
from starlette.responses import StreamingResponse

from mok_api.access import Tenant
from mok_api.answer import Json
from mok_api.body import Nothing
from mok_api.docs import Responses, refusals
from mok_api.errors import Gone
from mok_api.parameters import Configured, Db, RunId, StepNumber
from mok_api.schemas.runs import Checkpoint
from mok_service import checkpoints, runs
from mok_service.errors import NotFound
from mok_service.runs.types import StoredCheckpoint
from mok_service.settings import Settings

router = APIRouter(tags=["checkpoints"])

CHUNK_BYTES: Final = 1 << 20
_PLAIN = re.compile(r"[A-Za-z0-9._ -]+")

FileName = Annotated[str, Path(description="A name in the checkpoint's list of files.", examples=["model.safetensors"])]
_BYTES: Final = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_FILE: Responses = {200: {"description": "The file's bytes; Repr-Digest has their SHA-256.", "content": _BYTES}}


@router.get("/v1/runs/{run}/checkpoints/{step}/files/{name}", response_class=StreamingResponse,
            responses=_FILE | refusals(404, 410))
def download(db: Db, tenant: Tenant, settings: Configured, run: RunId, step: StepNumber, name: FileName) -> StreamingResponse:
    """The bytes of a checkpoint's file. Only files on record are served, and never through a link."""
    checkpoint = next((c for c in runs.checkpoints(db, run, tenant) if c.info.step == int(step)), None)
    file = None if checkpoint is None else next((f for f in checkpoint.info.files if f.name == name), None)
    if checkpoint is None or file is None:
        raise NotFound(f"{run} has no file {name!r} in a checkpoint of step {step}", run=run, step=step, name=name)
    if checkpoint.deleted_at is not None:
        raise Gone(f"the checkpoint of step {step} of {run} is deleted; its digests stay on record", run=run, step=step)
    stream = open_file(settings, checkpoint, name)
    digest = b64encode(bytes.fromhex(file.sha256)).decode()
    headers = {
        "Content-Length": str(os.fstat(stream.fileno()).st_size), "Content-Disposition": disposition(name),
        "Repr-Digest": f"sha-256=:{digest}:",
    }
    return StreamingResponse(pieces(stream), headers=headers, media_type="application/octet-stream")


@router.delete("/v1/runs/{run}/checkpoints/{step}", response_model=Checkpoint, responses=refusals(404, 409, 413, 415))
def delete(db: Db, tenant: Tenant, settings: Configured, run: RunId, step: StepNumber, _: Nothing) -> Json:
    """Delete a checkpoint's bytes; its digests stay on record. Not while its run, or another that may need it, hasn't ended.
    Again changes nothing."""
    return Json(checkpoints.delete_checkpoint(db, settings.checkpoints(run), run, int(step), tenant).as_dict())


def open_file(settings: Settings, checkpoint: StoredCheckpoint, name: str) -> BinaryIO:
    """A checkpoint's file, opened without following a link at any part of its path below the run's folder. Raises NotFound."""
    missing = NotFound(f"{name!r} of the checkpoint of step {checkpoint.info.step} isn't in the store", name=name)
    parts = [checkpoint.info.folder, *name.split("/")]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise missing
    try:
        place = os.open(settings.checkpoints(checkpoint.run_id), os.O_RDONLY | os.O_DIRECTORY)
        for index, part in enumerate(parts):
            kind = os.O_DIRECTORY if index < len(parts) - 1 else os.O_NONBLOCK  # a pipe must not make the service wait
            try:
                inner = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=place)
            finally:
                os.close(place)
            place = inner
    except OSError:
        raise missing from None
    if not stat.S_ISREG(os.fstat(place).st_mode):
        os.close(place)
        raise missing
    return os.fdopen(place, "rb")


def disposition(name: str) -> str:
    """A Content-Disposition that every client reads: names beyond plain ASCII are percent-encoded UTF-8 (RFC 6266)."""
    name = name.rpartition("/")[2]
    if _PLAIN.fullmatch(name):
        return f'attachment; filename="{name}"'
    plain = re.sub(r"[^A-Za-z0-9._ -]", "_", name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"


def pieces(stream: BinaryIO) -> Iterator[bytes]:
    """The bytes of an open file, which is closed at its end."""
    with closing(stream):
        while piece := stream.read(CHUNK_BYTES):
            yield piece
