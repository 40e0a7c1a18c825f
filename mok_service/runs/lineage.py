"""Where a digest occurs, and what a run came from and led to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Literal
from urllib.parse import quote

from sqlalchemy import Connection

from mok_service.db import lineage
from mok_service.db.ids import is_id
from mok_service.db.session import Database
from mok_service.errors import InvalidSpec
from mok_service.provenance.digest import Digest
from mok_service.runs.reading import parse_digest
from mok_service.runs.rows import Row, no_such_run
from mok_service.runs.types import time_text

USES_MAX: Final = 200    # of one role
DEPTH_MAX: Final = 20
RUNS_MAX: Final = 200    # in one graph
VERDICTS_MAX: Final = 400

Relation = Literal["produced", "used"]
_RUN, _JOB = "/v1/runs/{run}", "/v1/jobs/{job}"
_STEP, _CHECKPOINTS = f"{_RUN}/steps?after={{before}}&limit=1", f"{_RUN}/checkpoints"
# Of each role where a digest can stand: what the run or job did with it, and the path that shows it.
_ROLES: Final[dict[str, tuple[Relation, str]]] = {
    "final-weights": ("produced", _RUN),
    "step-record": ("produced", _STEP), "step-weights": ("produced", _STEP), "step-optimizer": ("produced", _STEP),
    "checkpoint-weights": ("produced", _CHECKPOINTS), "checkpoint-optimizer": ("produced", _CHECKPOINTS),
    lineage.CHECKPOINT_FILE: ("produced", f"{_CHECKPOINTS}/{{step}}/files/{{name}}"),
    lineage.NATIVE_LIBRARY: ("used", f"{_RUN}/attempts"),
    "attestation": ("produced", f"{_RUN}/attestation"),
    "verdict-attestation": ("produced", "/v1/verifications/{name}/attestation"),
    "initial-weights": ("used", _RUN),
    "training-spec": ("used", _JOB), "data-manifest": ("used", _JOB), "data-file": ("used", _JOB),
}
_RELATIONS: Final = {"audit": "audits", "bisect": "bisects"}


# ---- Where a digest occurs -------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Use:
    """One place where a digest occurs: in a run, a job, or else a verification. `step` is a step record's or checkpoint's; `name`
    a file's or library's, or the verification's id."""

    role: str
    relation: Relation
    run: str | None
    job: str | None
    step: int | None
    name: str | None
    place: str           # the path, in REST, of what shows it

    def as_dict(self) -> dict[str, Any]:
        return {"role": self.role, "relation": self.relation, "run": self.run, "job": self.job, "step": self.step,
                "name": self.name, "place": self.place}


@dataclass(frozen=True, slots=True)
class Uses:
    """Where a digest occurs, what produced it first. `truncated`: of some role there are more than USES_MAX."""

    digest: Digest
    items: tuple[Use, ...]
    truncated: bool

    def as_dict(self) -> dict[str, Any]:
        return {"digest": str(self.digest), "items": [use.as_dict() for use in self.items], "truncated": self.truncated}


def find_digest(db: Database, digest: str, tenant: str = "local") -> Uses:
    """What produced or used a digest: `sha256:` and 64 hex digits, or the hex digits alone. Of each role the newest come first.

    Raises InvalidSpec for anything else, and for a blake3 digest: those are of single tensors, which aren't indexed.
    """
    wanted = parse_digest(digest)
    assert wanted is not None
    if wanted.algorithm == "blake3":
        raise InvalidSpec("digest: blake3 digests are of single tensors, and aren't indexed; allowed: sha256: digests of states, "
                          "records, files, specs and libraries", field="digest", value=digest)
    with db.read() as tx:
        rows = lineage.uses_of(tx, tenant, wanted, USES_MAX + 1)
    parts = [list(part) for _, part in groupby(sorted(rows, key=itemgetter("part")), key=itemgetter("part"))]
    items = [_use(row) for part in parts for row in part[:USES_MAX]]
    return Uses(wanted, tuple(sorted(items, key=lambda use: use.relation)), any(len(part) > USES_MAX for part in parts))


def _use(row: Row) -> Use:
    role, run, job, step, name = (row[column] for column in ("role", "run_id", "job_id", "step", "name"))
    relation, path = _ROLES[role]
    place = path.format(run=run, job=job, step=step, before=None if step is None else step - 1, name=quote(name or "", safe=""))
    return Use(role, relation, run, job, None if role == lineage.NATIVE_LIBRARY else step, name, place)


# ---- Lineage ---------------------------------------------------------------------------------------------------------

@dataclass
class _Graph:
    """Nodes and edges by their ids: what is found twice is there once."""

    rows: dict[str, Row] = field(default_factory=dict)                    # runs
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    edges: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    truncated: bool = False

    def node(self, node_id: str, kind: str, label: str, **facts: Any) -> None:
        self.nodes.setdefault(node_id, {"id": node_id, "kind": kind, "label": label, "facts": facts})

    def edge(self, source: str, target: str, relation: str, step: int | None = None) -> None:
        edge = {"source": source, "target": target, "relation": relation, "step": step}
        self.edges.setdefault((source, target, relation), edge)


def lineage_of(db: Database, run_id: str, depth: int = 5, tenant: str = "local") -> dict[str, Any]:
    """A run, what it came from and what came from it, as a graph: {"run", "depth", "nodes", "edges", "truncated"}.

    Runs are joined by `reproduces` and `continues` (the weights that it started from are the other's, at `step`), followed in
    both directions up to `depth` times; each has its job, its data, the native libraries that computed it, and its verifications.
    An edge leads from what came later to what it depends on. At most RUNS_MAX runs: `truncated` says that there are more.
    Raises NotFound, and InvalidSpec for a depth out of 0 to DEPTH_MAX.
    """
    if not 0 <= depth <= DEPTH_MAX:
        raise InvalidSpec(f"depth: {depth} isn't allowed; allowed: 0 to {DEPTH_MAX}", field="depth", value=depth)
    if not is_id(run_id, "run"):
        raise no_such_run(run_id)
    graph = _Graph()
    with db.read() as tx:
        _runs(tx, graph, tenant, run_id, depth)
        if run_id not in graph.rows:
            raise no_such_run(run_id)
        _describe(tx, graph)
    known = [edge for edge in graph.edges.values() if edge["source"] in graph.nodes and edge["target"] in graph.nodes]
    return {"run": run_id, "depth": depth, "nodes": list(graph.nodes.values()), "edges": known, "truncated": graph.truncated}


def _runs(tx: Connection, graph: _Graph, tenant: str, run_id: str, depth: int) -> None:
    """Breadth first: a handful of queries for all runs of a distance."""
    wanted = [run_id]
    for distance in range(depth + 1):
        room = RUNS_MAX - len(graph.rows)
        graph.truncated |= len(wanted) > room
        fresh = {row["id"]: row for row in lineage.runs_by_id(tx, tenant, wanted[:room])}
        graph.rows |= fresh
        if not fresh:
            return
        near = _neighbours(tx, graph, tenant, fresh)
        wanted = [near_id for near_id in dict.fromkeys(near) if near_id not in graph.rows]
        if distance == depth:
            graph.truncated |= bool(wanted)


def _neighbours(tx: Connection, graph: _Graph, tenant: str, fresh: Mapping[str, Row]) -> list[str]:
    ids, limit = list(fresh), RUNS_MAX + 1
    near: list[str] = []
    for row in fresh.values():
        if row["reproduces"] is not None:
            near.append(row["reproduces"])
        if row["init_run"] is not None:
            near.append(row["init_run"])
    near += lineage.reproductions_of(tx, tenant, ids, limit)
    near += lineage.continuations_by_name(tx, tenant, ids, limit)
    for row in (*lineage.sources_by_weights(tx, tenant, ids, limit), *lineage.continuations_by_weights(tx, tenant, ids, limit)):
        if row["parent"] != row["child"]:
            graph.edge(row["child"], row["parent"], "continues", row["step"])
            near += [row["parent"], row["child"]]
    return near


def _describe(tx: Connection, graph: _Graph) -> None:
    """Nodes of the runs, and of what belongs to them."""
    for run, row in graph.rows.items():
        graph.node(run, "run", row["name"] or run, run_kind=row["kind"], status=row["status"], verdict=row["verdict"],
                   step=row["step"], seed=row["seed"], weights=_text(row["weights"]), created_at=time_text(row["created_at"]))
    for run, row in graph.rows.items():
        if row["reproduces"] is not None:
            graph.edge(run, row["reproduces"], _RELATIONS.get(row["kind"], "reproduces"))
        if row["init_run"] is not None:
            graph.edge(run, row["init_run"], "continues", lineage.step_of_weights(tx, row["init_run"], row["init_weights"]))
        _job_and_data(graph, run, row)
    for row in lineage.libraries_of(tx, list(graph.rows)):
        graph.node(str(row["digest"]), "code", row["name"])
        graph.edge(row["run_id"], str(row["digest"]), "computed with")
    verdicts = lineage.verdicts_on(tx, list(graph.rows), VERDICTS_MAX + 1)
    graph.truncated |= len(verdicts) > VERDICTS_MAX
    for row in verdicts[:VERDICTS_MAX]:
        graph.node(row["id"], "verification", row["verdict"] or "under way", level=row["level"], verdict=row["verdict"],
                   step=row["step"], created_at=time_text(row["created_at"]))
        graph.edge(row["id"], row["run_id"], "verifies")
        if row["executed_by"] is not None:
            graph.edge(row["id"], row["executed_by"], "executed by")
        if row["against"] in graph.rows:
            graph.edge(row["id"], row["against"], "compares with")


def _job_and_data(graph: _Graph, run: str, row: Row) -> None:
    graph.node(row["job_id"], "job", row["name"] or row["job_id"], training=_text(row["training_digest"]), seed=row["seed"],
               model=row["model"])
    graph.edge(run, row["job_id"], "executes")
    if row["has_data"] and row["manifest_digest"] is not None:
        graph.node(str(row["manifest_digest"]), "data", "data")
        graph.edge(run, str(row["manifest_digest"]), "reads")
    if row["init_weights"] is not None and row["init_run"] is None:
        graph.node(str(row["init_weights"]), "weights", "initial weights")
        graph.edge(run, str(row["init_weights"]), "starts from")


def _text(digest: Digest | None) -> str | None:
    return None if digest is None else str(digest)
