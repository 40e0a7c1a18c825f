"""Lookups by digest, and lineage: indexes on digests in columns, tables of digests in documents, what lists filter by. Runs that
get no attestation of their own leave the index of those that wait for one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

BATCH: Final = 500  # rows in memory
ENDED: Final = "ended_at IS NOT NULL AND log_index IS NULL"  # what 0002 takes for a run that is to be attested
TO_ATTEST: Final = f"{ENDED} AND kind NOT IN ('audit', 'bisect')"
COLUMNS: Final = ("name", "seed", "model", "init_run", "init_weights")
FILTERS: Final = ("kind", "name", "seed", "model")
LINKS: Final = ("reproduces", "init_run", "init_weights")
SIZES: Final = ("hidden_size", "layers", "heads", "kv_heads", "head_size", "experts", "top_k", "expert_intermediate_size",
                "vocabulary_size")
PRESETS: Final = {  # by their sizes
    (256, 4, 8, 4, 32, 8, 2, 512, 512): "tiny",
    (2048, 16, 16, 16, 128, 64, 8, 1024, 50_304): "olmoe-1b-7b",
    (2048, 48, 32, 4, 128, 128, 8, 768, 151_936): "qwen3-30b-a3b",
}


def upgrade() -> None:
    for column in (sa.Column("name", sa.String(100)), sa.Column("seed", sa.BigInteger()), sa.Column("model", sa.String(40)),
                   sa.Column("init_run", sa.String(40)), sa.Column("init_weights", sa.String(71))):
        op.add_column("runs", column)
    _create_tables()
    connection = op.get_bind()
    for job in _rows(connection, "jobs", ["id"], "id, tenant, name, seed, training, manifest, manifest_digest"):
        _fill_runs(connection, job)
        _fill_manifest(connection, job)
    for row in _rows(connection, "checkpoints", ["run_id", "step"], "run_id, step, tenant, files"):
        _use(connection, row, "checkpoint-file", row["step"], [(f["name"], f"sha256:{f['sha256']}") for f in
                                                               json.loads(row["files"])])
    for row in _rows(connection, "attempts", ["run_id", "attempt"], "run_id, attempt, tenant, environment"):
        code = json.loads(row["environment"] or "{}").get("code") or {}
        _use(connection, row, "native-library", row["attempt"], list((code.get("native") or {}).items()))
    _create_indexes()


def downgrade() -> None:
    for table, name in (("attestations", "digest"), ("checkpoints", "optimizer"),
                        *(("step_records", column) for column in ("optimizer", "weights", "head")),
                        *(("runs", column) for column in LINKS),
                        *(("runs", f"tenant_{column}_created_at_id") for column in FILTERS)):
        op.drop_index(f"ix_{table}_{name}", table)
    op.create_index("ix_runs_head", "runs", ["head"])
    _index_unattested(ENDED)
    for table in ("manifest_files", "digest_uses"):
        op.drop_table(table)
    for column in reversed(COLUMNS):
        op.drop_column("runs", column)


def _create_tables() -> None:
    op.create_table(
        "digest_uses",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("run_id", sa.String(40), nullable=False),
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("place", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("digest", "run_id", "role", "place", "name", name="pk_digest_uses"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_digest_uses_run_id"),
    )
    op.create_table(
        "manifest_files",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("manifest_digest", sa.String(71), nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "manifest_digest", "position", name="pk_manifest_files"),
    )


def _create_indexes() -> None:
    for column in FILTERS:
        op.create_index(f"ix_runs_tenant_{column}_created_at_id", "runs", ["tenant", column, "created_at", "id"])
    for column in LINKS:
        given = sa.text(f"{column} IS NOT NULL")
        op.create_index(f"ix_runs_{column}", "runs", [column], sqlite_where=given, postgresql_where=given)
    op.drop_index("ix_runs_head", "runs")
    _index_unattested(TO_ATTEST)
    for column in ("head", "weights", "optimizer"):
        op.create_index(f"ix_step_records_{column}", "step_records", [sa.text(f"substr({column}, 8, 16)")])
    op.create_index("ix_checkpoints_optimizer", "checkpoints", ["optimizer"])
    op.create_index("ix_attestations_digest", "attestations", ["digest"])
    op.create_index("ix_digest_uses_run_id_role", "digest_uses", ["run_id", "role"])
    op.create_index("ix_manifest_files_tenant_digest", "manifest_files", ["tenant", "digest"])


def _index_unattested(where: str) -> None:
    op.drop_index("ix_runs_unattested", "runs")
    given = sa.text(where)
    op.create_index("ix_runs_unattested", "runs", ["ended_at", "id"], sqlite_where=given, postgresql_where=given)


def _rows(connection: sa.Connection, table: str, key: list[str], columns: str) -> Iterator[dict[str, Any]]:
    """All rows in order of their key, a batch at a time."""
    names, places = ", ".join(key), ", ".join(f":{name}" for name in key)
    batch, last = True, dict[str, Any]()
    while batch:
        after = f"WHERE ({names}) > ({places})" if last else ""
        query = sa.text(f"SELECT {columns} FROM {table} {after} ORDER BY {names} LIMIT {BATCH}")
        found = [dict(row) for row in connection.execute(query, last).mappings()]
        yield from found
        batch = len(found) == BATCH
        last = {name: found[-1][name] for name in key} if found else {}


def _fill_runs(connection: sa.Connection, job: dict[str, Any]) -> None:
    training = json.loads(job["training"])
    start = training["init_from"] or {}
    source = start.get("source", "")
    connection.execute(
        sa.text("UPDATE runs SET name = :name, seed = :seed, model = :model, init_run = :run, init_weights = :weights "
                "WHERE job_id = :job"),
        {"name": job["name"], "seed": job["seed"], "model": PRESETS.get(tuple(training["model"][key] for key in SIZES)),
         "run": source.split("@")[0] if source.startswith("run_") and "@" in source else None,
         "weights": start.get("weights"), "job": job["id"]},
    )


def _fill_manifest(connection: sa.Connection, job: dict[str, Any]) -> None:
    if job["manifest"] is None:
        return
    values = [
        {"tenant": job["tenant"], "manifest": job["manifest_digest"], "position": position, "digest": f"sha256:{file['sha256']}",
         "name": file["name"]}
        for position, file in enumerate(json.loads(job["manifest"])["files"])
    ]
    known = connection.execute(
        sa.text("SELECT 1 FROM manifest_files WHERE tenant = :tenant AND manifest_digest = :manifest LIMIT 1"),
        {"tenant": job["tenant"], "manifest": job["manifest_digest"]},
    )
    if values and known.first() is None:
        connection.execute(sa.text("INSERT INTO manifest_files (tenant, manifest_digest, position, digest, name) "
                                   "VALUES (:tenant, :manifest, :position, :digest, :name)"), values)


def _use(connection: sa.Connection, row: dict[str, Any], role: str, place: int, named: list[tuple[str, str]]) -> None:
    values = [{"tenant": row["tenant"], "digest": digest, "run": row["run_id"], "role": role, "place": place, "name": name}
              for name, digest in named]
    if values:
        connection.execute(sa.text("INSERT INTO digest_uses (tenant, digest, run_id, role, place, name) "
                                   "VALUES (:tenant, :digest, :run, :role, :place, :name)"), values)
