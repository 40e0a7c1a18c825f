"""SQL of lookups by digest, of lineage, and of what lists filter by.

A digest in a column is found by an index on the column; one inside a document by its row in `digest_uses` or `manifest_files`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    Column,
    ColumnElement,
    CompoundSelect,
    Connection,
    Integer,
    Select,
    String,
    Text,
    and_,
    bindparam,
    cast,
    exists,
    func,
    literal_column,
    null,
    select,
    union,
    union_all,
)

from mok_service.db.queries import Key, Row, add_unless_there, all_rows, one_row, page
from mok_service.db.tables import (
    DigestText,
    attempts,
    attestations,
    checkpoints,
    digest_uses,
    jobs,
    manifest_files,
    runs,
    step_records,
    verification_attestations,
    verifications,
)
from mok_service.lifecycle import FINAL, UNCHAINED
from mok_service.provenance.digest import Digest

CHECKPOINT_FILE, NATIVE_LIBRARY = "checkpoint-file", "native-library"
DIGITS: Final = 16  # of a digest, in the indexes of step records


# ---- Filling ---------------------------------------------------------------------------------------------------------

def add_uses(tx: Connection, tenant: str, run_id: str, role: str, place: int, named: Iterable[tuple[str, Digest]]) -> None:
    """What a document of a run names: (name, digest) each. What is there already stays as it is."""
    rows = [{"tenant": tenant, "digest": digest, "run_id": run_id, "role": role, "place": place, "name": name}
            for name, digest in named]
    add_unless_there(tx, digest_uses, rows)


def add_manifest(tx: Connection, tenant: str, manifest: Digest, named: Iterable[tuple[str, Digest]]) -> None:
    """The files of a manifest, in its order; nothing when they are there already."""
    rows = [{"tenant": tenant, "manifest_digest": manifest, "position": position, "digest": digest, "name": name}
            for position, (name, digest) in enumerate(named)]
    t = manifest_files
    known = select(t.c.position).where(t.c.tenant == tenant, t.c.manifest_digest == manifest).limit(1)
    if rows and tx.execute(known).first() is None:
        add_unless_there(tx, t, rows)


# ---- Looking up a digest ---------------------------------------------------------------------------------------------

def _of(column: Column[str], tenant: str | BindParameter[str]) -> ColumnElement[bool]:
    """Rows of a tenant, where another index finds them: the expression keeps SQLite, which has no statistics, from reading all
    rows of the tenant instead."""
    return column.concat("") == tenant


def _step_digest(column: Column[Digest], digest: Any, digits: Any) -> ColumnElement[bool]:
    """A digest column of step records, by its index: the expression is written as the index has it. `digits` are the digest's
    first DIGITS hex digits.

    The whole digest is compared by `between`: after an `=`, SQLite puts the constant into the expression and can't use the index.
    """
    shown: ColumnElement[str] = func.substr(column, literal_column("8"), literal_column(str(DIGITS)), type_=String)
    return and_(shown == digits, column.between(digest, digest))


def uses_of(tx: Connection, tenant: str, digest: Digest, limit: int) -> list[Row]:
    """Every place where a digest stands, as rows of part, role, run_id, job_id, step and name; the newest of a part first.

    One statement, since the way to the database and back costs more than an index: each part of it looks at one index, and gives
    `limit` rows at most. What documents name (files, libraries) is one part.
    """
    values = {"tenant": tenant, "digest": digest, "digits": digest.hex[:DIGITS], "limit": limit}
    return [dict(row) for row in tx.execute(_uses_query(), values).mappings()]


@cache
def _uses_query() -> CompoundSelect[Any]:
    """The statement of `uses_of`; made once, since that takes longer than running it."""
    tenant, digits = (bindparam(name, type_=String) for name in ("tenant", "digits"))
    digest = bindparam("digest", type_=DigestText)
    r, s, c, j = runs.c, step_records.c, checkpoints.c, jobs.c
    u, m, a, v = digest_uses.c, manifest_files.c, attestations.c, verification_attestations.c
    parts = [
        _part("final-weights", _of(r.tenant, tenant), r.weights == digest, run=r.id, step=r.step),
        *(_part(f"step-{role}", s.tenant == tenant, _step_digest(s[column], digest, digits), run=s.run_id, step=s.step)
          for role, column in (("record", "head"), ("weights", "weights"), ("optimizer", "optimizer"))),
        *(_part(f"checkpoint-{column}", c.tenant == tenant, c[column] == digest, run=c.run_id, step=c.step)
          for column in ("weights", "optimizer")),
        _part(u.role, u.tenant == tenant, u.digest == digest, run=u.run_id, step=u.place, name=u.name),
        _part("attestation", a.tenant == tenant, a.digest == digest, run=a.run_id),
        _part("verdict-attestation", v.tenant == tenant, v.digest == digest, name=v.verification_id),
        _part("initial-weights", _of(r.tenant, tenant), r.init_weights == digest, run=r.id),
        *(_part(role, _of(j.tenant, tenant), j[column] == digest, job=j.id)
          for role, column in (("training-spec", "training_digest"), ("data-manifest", "manifest_digest"))),
        _part("data-file", _of(j.tenant, tenant), m.tenant == tenant, m.digest == digest, m.manifest_digest == j.manifest_digest,
              job=j.id, name=m.name),
    ]
    limited = (part.limit(bindparam("limit", type_=Integer)).subquery() for part in parts)
    return union_all(*(select(literal_column(str(number)).label("part"), *part.c) for number, part in enumerate(limited)))


def _part(role: str | Column[str], *found: ColumnElement[bool], run: Column[str] | None = None, job: Column[str] | None = None,
          step: Column[int] | None = None, name: Column[str] | None = None) -> Select[Any]:
    """One place where digests stand, in the columns of all; what it doesn't have is null."""
    said = literal_column(f"'{role}'", String) if isinstance(role, str) else role
    columns = {"run_id": (run, String), "job_id": (job, String), "step": (step, Integer), "name": (name, Text)}
    shown: list[ColumnElement[Any]] = [said.label("role")]
    shown += ((cast(null(), kind) if column is None else column).label(label) for label, (column, kind) in columns.items())
    newest = [column.desc() for column in (run, job) if column is not None]
    return select(*shown).where(*found).order_by(*newest, *(column for column in (step, name) if column is not None))


# ---- Filters of the list of runs -------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class RunFilter:
    """What a list of runs is limited to; None is no limit. Times: `since` is included, `until` isn't."""

    status: str | None = None
    job: str | None = None
    digest: Digest | None = None
    kind: str | None = None
    name: str | None = None
    model: str | None = None
    seed: int | None = None
    parent: str | None = None
    since: datetime | None = None
    until: datetime | None = None


def run_page(tx: Connection, tenant: str, after: Key | None, limit: int, wanted: RunFilter) -> list[Row]:
    """Up to limit + 1 runs, newest first, after a key: the one too many tells that there is a next page.

    A digest or a parent is looked up first, and the runs then by their ids: else a database would read all runs in the order of
    the page until it has met enough of them.
    """
    query = select(runs)
    if wanted.digest is not None:
        query = query.join(found := _with_digest(wanted.digest).subquery("found"), found.c.id == runs.c.id)
    if wanted.parent is not None:
        query = query.join(children := _children(wanted.parent).subquery("children"), children.c.id == runs.c.id)
    looked_up = wanted.digest is not None or wanted.parent is not None
    query = query.where(_of(runs.c.tenant, tenant) if looked_up else runs.c.tenant == tenant)
    for column, value in (("status", wanted.status), ("job_id", wanted.job), ("kind", wanted.kind), ("name", wanted.name),
                          ("model", wanted.model), ("seed", wanted.seed)):
        if value is not None:
            query = query.where(runs.c[column] == value)
    if wanted.since is not None:
        query = query.where(runs.c.created_at >= wanted.since)
    if wanted.until is not None:
        query = query.where(runs.c.created_at < wanted.until)
    return page(tx, query, runs, after, limit)


def _with_digest(digest: Digest) -> CompoundSelect[Any]:
    """Runs by a digest of their job, of a step's record or state, of a checkpoint or of what they started from."""
    t, c = step_records, checkpoints
    return union(
        *(select(runs.c.id).join(jobs, jobs.c.id == runs.c.job_id).where(column == digest)
          for column in (jobs.c.training_digest, jobs.c.manifest_digest)),
        *(select(t.c.run_id).where(_step_digest(column, digest, digest.hex[:DIGITS]))
          for column in (t.c.head, t.c.weights, t.c.optimizer)),
        select(c.c.run_id).where(c.c.weights == digest),
        *(select(runs.c.id).where(column == digest) for column in (runs.c.weights, runs.c.init_weights)),
    )


def _children(run_id: str) -> CompoundSelect[Any]:
    """Reproductions of a run, and runs that went on from its weights."""
    by_weights = select(runs.c.id).join(checkpoints, checkpoints.c.weights == runs.c.init_weights)
    return union(
        select(runs.c.id).where(runs.c.reproduces == run_id), select(runs.c.id).where(runs.c.init_run == run_id),
        by_weights.where(checkpoints.c.run_id == run_id, runs.c.init_run.is_(None)),
    )


# ---- Lineage ---------------------------------------------------------------------------------------------------------

def runs_by_id(tx: Connection, tenant: str, ids: Sequence[str]) -> list[Row]:
    """What a graph shows of runs, with name, training digest and data of their jobs."""
    same = (runs.c.id, runs.c.job_id, runs.c.kind, runs.c.reproduces, runs.c.status, runs.c.verdict, runs.c.step, runs.c.weights,
            runs.c.seed, runs.c.name, runs.c.model, runs.c.init_run, runs.c.init_weights, runs.c.created_at)
    has_data = exists().where(attempts.c.run_id == runs.c.id, attempts.c.running_at.is_not(None)).label("has_data")
    query = select(*same, jobs.c.training_digest, jobs.c.manifest_digest, has_data).join(jobs, jobs.c.id == runs.c.job_id)
    return all_rows(tx, query.where(runs.c.id.in_(ids), _of(runs.c.tenant, tenant)).order_by(runs.c.id))


def reproductions_of(tx: Connection, tenant: str, ids: Sequence[str], limit: int) -> Sequence[str]:
    """Runs that reproduce one of these, the oldest first."""
    query = select(runs.c.id).where(runs.c.reproduces.in_(ids), _of(runs.c.tenant, tenant)).order_by(runs.c.id).limit(limit)
    return tx.execute(query).scalars().all()


def continuations_by_name(tx: Connection, tenant: str, ids: Sequence[str], limit: int) -> Sequence[str]:
    """Runs whose `init_from` names a checkpoint of one of these, the oldest first."""
    query = select(runs.c.id).where(runs.c.init_run.in_(ids), _of(runs.c.tenant, tenant)).order_by(runs.c.id).limit(limit)
    return tx.execute(query).scalars().all()


def continuations_by_weights(tx: Connection, tenant: str, ids: Sequence[str], limit: int) -> list[Row]:
    """(parent, step, child) where `init_from` names no run, and its weights are those of a checkpoint of one of these."""
    query = select(checkpoints.c.run_id.label("parent"), checkpoints.c.step, runs.c.id.label("child"))
    query = query.join(runs, runs.c.init_weights == checkpoints.c.weights).where(
        checkpoints.c.run_id.in_(ids), runs.c.init_run.is_(None), _of(runs.c.tenant, tenant))
    return all_rows(tx, query.order_by(runs.c.id, checkpoints.c.run_id, checkpoints.c.step).limit(limit))


def sources_by_weights(tx: Connection, tenant: str, ids: Sequence[str], limit: int) -> list[Row]:
    """(parent, step, child) where one of these names no run in `init_from`, and its weights are those of a checkpoint."""
    query = select(checkpoints.c.run_id.label("parent"), checkpoints.c.step, runs.c.id.label("child"))
    query = query.join(checkpoints, checkpoints.c.weights == runs.c.init_weights).where(
        runs.c.id.in_(ids), runs.c.init_run.is_(None), _of(checkpoints.c.tenant, tenant))
    return all_rows(tx, query.order_by(runs.c.id, checkpoints.c.run_id, checkpoints.c.step).limit(limit))


def needs_checkpoint(tx: Connection, run_id: str, weights: Digest) -> Row | None:
    """Id and kind of a run that hasn't ended, and audits or bisects the run, or starts from its checkpoint of these weights."""
    v, r = verifications.c, runs.c
    run = select(r.id, r.kind, r.status)
    verifying = (run.join(verifications, v.executed_by == r.id).where(column == run_id, r.kind.in_(UNCHAINED))
                 for column in (v.run_id, v.against))
    starting = run.where(r.init_run == run_id, r.init_weights == weights)
    found = union(*verifying, starting).subquery()
    going = select(found.c.id, found.c.kind).where(found.c.status.not_in(sorted(FINAL)))
    return one_row(tx, going.order_by(found.c.id).limit(1))


def step_of_weights(tx: Connection, run_id: str, weights: Digest | None) -> int | None:
    """The step of a run's checkpoint with these weights."""
    t = checkpoints
    query = select(t.c.step).where(t.c.run_id == run_id, t.c.weights == weights).order_by(t.c.step).limit(1)
    step: int | None = tx.execute(query).scalar()
    return step


def libraries_of(tx: Connection, ids: Sequence[str]) -> list[Row]:
    """Run, name and digest of the native libraries that attempts of these runs have loaded."""
    t = digest_uses
    query = select(t.c.run_id, t.c.name, t.c.digest).where(t.c.run_id.in_(ids), t.c.role == NATIVE_LIBRARY).distinct()
    return all_rows(tx, query.order_by(t.c.run_id, t.c.name, t.c.digest))


def verdicts_on(tx: Connection, ids: Sequence[str], limit: int) -> list[Row]:
    """The verifications of these runs that have ended or are under way, the newest first."""
    t = verifications
    query = select(t.c.id, t.c.run_id, t.c.executed_by, t.c.against, t.c.level, t.c.verdict, t.c.step, t.c.created_at)
    return all_rows(tx, query.where(t.c.run_id.in_(ids)).order_by(t.c.created_at.desc(), t.c.id.desc()).limit(limit))
