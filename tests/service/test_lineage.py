"""Where digests occur, what runs came from and led to, and what lists of runs are filtered by: on both databases."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, event

from mok_service import jobs, runs
from mok_service.db import lineage
from mok_service.db.ids import new_id
from mok_service.db.session import Database
from mok_service.errors import InvalidSpec, NotFound
from mok_service.provenance.digest import Digest
from mok_service.provenance.keys import SigningKey
from mok_service.runs import Run
from mok_service.runs import lineage as graphs
from mok_service.spec import JobSpec, parse_job
from tests.databases import Clock
from tests.service import play


def continuing(source: str, weights: str | None = None, **values: Any) -> JobSpec:
    spec = play.spec(**values).model_dump()
    spec["training"]["init_from"] = {"source": source, "weights": weights}
    return parse_job(spec)


def reproduction(db: Database, clock: Clock, job: jobs.Job) -> Run:
    jobs.create_run(db, job.id, now=clock.now)
    return play.succeed(db, play.start(db, clock), clock, play.records(job))


def places(db: Database, digest: object, tenant: str = "local") -> list[tuple[str, str, str | None, int | None, str | None]]:
    found = runs.find_digest(db, str(digest), tenant)
    assert not found.truncated
    return [(use.role, use.relation, use.run or use.job, use.step, use.name) for use in found.items]


class TestDigests:
    def test_every_digest_of_a_run_is_found(self, db: Database, clock: Clock) -> None:
        job, run = play.trained(db, clock)
        records = {record.step: record for record in play.records(job)}
        state = records[2].state
        assert state is not None and run.weights is not None
        assert places(db, state.weights) == [("step-weights", "produced", run.id, 2, None)]
        assert places(db, state.optimizer) == [("step-optimizer", "produced", run.id, 2, None)]
        assert places(db, records[3].head()) == [("step-record", "produced", run.id, 3, None)]
        assert places(db, run.weights) == [
            ("final-weights", "produced", run.id, 4, None), ("step-weights", "produced", run.id, 4, None),
            ("checkpoint-weights", "produced", run.id, 4, None),
            ("checkpoint-file", "produced", run.id, 4, "weights.safetensors")], "the made-up file has the state's digest"
        assert places(db, play.digest("state", 4)) == [("checkpoint-file", "produced", run.id, 4, "state.json")]
        assert places(db, job.training_digest) == [("training-spec", "used", job.id, None, None)]
        assert places(db, play.MANIFEST.digest()) == [("data-manifest", "used", job.id, None, None)]
        assert places(db, "sha256:" + "b" * 64) == [("data-file", "used", job.id, None, "ast.py")]
        assert places(db, "c" * 64) == [("native-library", "used", run.id, None, "libmok.so")], "bare digits are a sha256"
        assert places(db, play.digest("nothing")) == []

    def test_runs_with_the_same_bits_are_all_found_newest_first(self, db: Database, clock: Clock) -> None:
        job, first = play.trained(db, clock)
        second = reproduction(db, clock, job)
        assert [place[2] for place in places(db, play.state(2).weights)] == [second.id, first.id]
        assert [place[2] for place in places(db, "a" * 64)] == [job.id], "files of a manifest are stored once"
        assert [run.id for run in runs.list_runs(db, digest=str(play.state(2).weights)).items] == [second.id, first.id]
        assert [run.id for run in runs.list_runs(db, digest=str(first.head)).items] == [second.id, first.id]

    def test_an_attestation_is_found(self, db: Database, clock: Clock) -> None:
        _, run = play.trained(db, clock)
        made = runs.attest(db, SigningKey.generate(), run.id)
        assert places(db, made.digest) == [("attestation", "produced", run.id, None, None)]

    def test_another_tenants_digests_are_not_found(self, db: Database, clock: Clock) -> None:
        job, run = play.trained(db, clock)
        for digest in (run.weights, run.head, job.training_digest, play.MANIFEST.digest(), "a" * 64, "c" * 64,
                       play.digest("state", 4)):
            assert places(db, digest, "other") == []

    def test_a_digest_shared_by_many_is_cut_off(self, db: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(graphs, "USES_MAX", 1)
        job, _ = play.trained(db, clock)
        second = reproduction(db, clock, job)
        found = runs.find_digest(db, "c" * 64)
        assert [use.run for use in found.items] == [second.id] and found.truncated

    @pytest.mark.parametrize(("digest", "message"), [("x", "not a digest"), ("blake3:" + "0" * 64, "aren't indexed"),
                                                     ("SHA256:" + "0" * 64, "not a digest"), ("0" * 63, "not a digest")])
    def test_what_is_no_digest_is_refused(self, db: Database, digest: str, message: str) -> None:
        with pytest.raises(InvalidSpec, match=message):
            runs.find_digest(db, digest)

    def test_a_lookup_is_one_statement_of_index_probes(self, db: Database) -> None:
        """Of ten million step records: an expression that isn't written as the index has it reads them all."""
        sent: list[tuple[str, Any]] = []
        with db.engine.connect() as tx:  # never committed
            event.listen(tx, "before_cursor_execute", lambda _, cursor, *told: sent.append((told[0], told[1])))
            lineage.uses_of(tx, "local", WANTED, 5)
            ((statement, values),) = [one for one in sent if one[0] != "BEGIN"]
            probes = _sqlite_probes if db.dialect == "sqlite" else _postgresql_probes
            found = probes(tx, statement, values)
        assert sorted(found) == sorted([
            "ix_runs_weights", "ix_runs_init_weights", "ix_attestations_digest",
            "ix_verification_attestations_digest",
            "ix_step_records_head", "ix_step_records_weights", "ix_step_records_optimizer",
            "ix_checkpoints_weights", "ix_checkpoints_optimizer", "pk_digest_uses",
            "ix_jobs_training_digest", "ix_jobs_manifest_digest",
            "ix_manifest_files_tenant_digest", "ix_jobs_manifest_digest",  # the jobs with such a file
        ])


WANTED = Digest("sha256", "a" * 64)


def _sqlite_probes(tx: Connection, statement: str, values: Any) -> list[str]:
    """The indexes by which the tables are searched. Nothing is read whole, and each search is by a digest."""
    plan = [row[3] for row in tx.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)]
    reads = [line for line in plan if re.match(r"(SCAN|SEARCH) (?!\(|anon)", line)]
    search = r"SEARCH \S+ USING (?:COVERING )?INDEX (\S+) \((?:tenant=\? AND )?(?:<expr>|\w*(?:weights|digest|optimizer))=\?\)"
    found = [re.fullmatch(search, line) for line in reads]
    assert all(found), reads
    return [match[1].replace("sqlite_autoindex_digest_uses_1", "pk_digest_uses") for match in found if match]


def _postgresql_probes(tx: Connection, statement: str, values: Any) -> list[str]:
    """The same. The planner is told not to read whole tables where it needn't, since these have no rows; files of manifests are
    invented, so that it knows which of two indexes is the better one."""
    tx.exec_driver_sql("INSERT INTO manifest_files "
                       "SELECT 'local', 'sha256:' || n / 1000, n, 'sha256:' || n, 'a' FROM generate_series(1, 9999) n")
    tx.exec_driver_sql("ANALYZE manifest_files")
    # Whether the server has looked at the empty tables by itself must not matter: it then may read an empty index as a whole.
    tx.exec_driver_sql("UPDATE pg_class SET reltuples = -1, relpages = 0 WHERE relnamespace = 'public'::regnamespace "
                       "AND relname NOT LIKE '%%manifest_files%%'")
    tx.exec_driver_sql("SET LOCAL enable_seqscan = off")
    (plan,) = tx.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", values).scalar_one()
    waiting, found = [plan["Plan"]], []
    while waiting:
        node = waiting.pop()
        waiting += node.get("Plans", ())
        assert node["Node Type"] != "Seq Scan", node
        if "Index Name" in node:
            condition = node.get("Index Cond", "none")
            assert WANTED.hex[:16] in condition or "= (manifest_files.manifest_digest)" in condition, node
            found.append(node["Index Name"])
    return found


class TestLineage:
    def edges(self, graph: dict[str, Any]) -> set[tuple[str, str, str, int | None]]:
        return {(e["source"], e["relation"], e["target"], e["step"]) for e in graph["edges"]}

    def kinds(self, graph: dict[str, Any], kind: str) -> list[str]:
        return [node["id"] for node in graph["nodes"] if node["kind"] == kind]

    def test_both_directions_from_any_run(self, db: Database, clock: Clock) -> None:
        job, first = play.trained(db, clock)
        second = reproduction(db, clock, job)
        child = jobs.submit(db, continuing(f"{first.id}@4", name="child", seed=8), now=clock.now)
        by_weights = continuing("folder/of/weights", str(play.state(4).weights), name="by weights")
        grandchild = jobs.submit(db, by_weights, now=clock.now)
        everything = [first.id, second.id, child.run.id, grandchild.run.id]
        for start in everything:
            graph = runs.lineage_of(db, start)
            assert sorted(self.kinds(graph, "run")) == sorted(everything) and not graph["truncated"], start
            edges = self.edges(graph)
            assert {(second.id, "reproduces", first.id, None), (child.run.id, "continues", first.id, 4),
                    (grandchild.run.id, "continues", first.id, 4), (grandchild.run.id, "continues", second.id, 4),
                    (first.id, "executes", job.id, None), (second.id, "executes", job.id, None),
                    (first.id, "reads", str(play.MANIFEST.digest()), None),
                    (first.id, "computed with", "sha256:" + "c" * 64, None),
                    (grandchild.run.id, "starts from", str(play.state(4).weights), None)} <= edges
            assert not any(relation == "reads" for source, relation, _, _ in edges if source == child.run.id), "it hasn't started"
            (verdict,) = self.kinds(graph, "verification")
            assert {(verdict, "verifies", first.id, None), (verdict, "executed by", second.id, None)} <= edges
            known = {node["id"] for node in graph["nodes"]}
            assert all(edge["source"] in known and edge["target"] in known for edge in graph["edges"])

    def test_depth_and_size_are_bounded(self, db: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        job, first = play.trained(db, clock)
        others = [reproduction(db, clock, job).id for _ in range(2)]
        alone = runs.lineage_of(db, others[0], depth=0)
        assert self.kinds(alone, "run") == [others[0]] and alone["truncated"]
        near = runs.lineage_of(db, others[0], depth=1)
        assert self.kinds(near, "run") == [others[0], first.id] and near["truncated"]
        assert not runs.lineage_of(db, others[0], depth=2)["truncated"]
        monkeypatch.setattr(graphs, "RUNS_MAX", 2)
        small = runs.lineage_of(db, others[0])
        assert len(self.kinds(small, "run")) == 2 and small["truncated"]
        for depth in (-1, 21):
            with pytest.raises(InvalidSpec, match="allowed: 0 to 20"):
                runs.lineage_of(db, first.id, depth)

    def test_another_tenants_run_is_not_found(self, db: Database, clock: Clock) -> None:
        _, run = play.trained(db, clock)
        for tenant, run_id in (("other", run.id), ("local", new_id("run")), ("local", "x\0")):
            with pytest.raises(NotFound):
                runs.lineage_of(db, run_id, tenant=tenant)

    def test_a_run_by_itself_has_its_job_only(self, db: Database) -> None:
        submitted = play.submit(db)
        graph = runs.lineage_of(db, submitted.run.id)
        assert [node["id"] for node in graph["nodes"]] == [submitted.run.id, submitted.job.id]


class TestFilters:
    def test_each_filter_alone_and_together(self, db: Database, clock: Clock) -> None:
        job, first = play.trained(db, clock)
        clock.tick(60)
        again = reproduction(db, clock, job)
        clock.tick(60)
        child = jobs.submit(db, continuing(f"{again.id}@4", name="child", seed=2**63 - 1), now=clock.now).run

        def ids(**filters: Any) -> list[str]:
            return [run.id for run in runs.list_runs(db, **filters).items]

        assert ids() == [child.id, again.id, first.id]
        assert ids(seed=7) == [again.id, first.id] and ids(seed=2**63 - 1) == [child.id] and ids(seed=0) == []
        assert ids(name="play") == [again.id, first.id] and ids(name="x\0") == []
        assert ids(kind="reproduction") == [again.id] and ids(kind="original", seed=7) == [first.id]
        assert ids(parent=first.id) == [again.id] and ids(parent=again.id) == [child.id] and ids(parent="run_x") == []
        assert ids(since=clock.now) == [child.id] and ids(until=clock.now) == [again.id, first.id]
        assert ids(since=again.created_at, until=again.created_at + timedelta(seconds=1)) == [again.id]
        assert ids(model="tiny") == [] and ids(status="queued", name="child", seed=2**63 - 1) == [child.id]
        page = runs.list_runs(db, seed=7, limit=1)
        assert [run.id for run in runs.list_runs(db, seed=7, limit=1, cursor=page.next_cursor).items] == [first.id]

    def test_a_model_is_known_by_its_sizes(self, db: Database) -> None:
        tiny = play.spec().model_dump()
        tiny["training"] |= {"model": {"preset": "tiny", "norm_epsilon": 1e-5}, "batch": {"sequences": 2}}
        run = jobs.submit(db, parse_job(tiny)).run
        play.submit(db)
        assert [found.id for found in runs.list_runs(db, model="tiny").items] == [run.id]
        tiny["training"]["model"]["experts"] = 4
        jobs.submit(db, parse_job(tiny))
        assert [found.id for found in runs.list_runs(db, model="tiny").items] == [run.id]

    @pytest.mark.parametrize(("filters", "message"), [
        ({"kind": "copy"}, "allowed: original, reproduction"), ({"model": "gpt"}, "allowed: tiny"),
        ({"seed": 2**63}, "allowed: 0 to"),
        ({"status": "done"}, "allowed: queued"), ({"since": Clock().now.replace(tzinfo=None)}, "has no zone"),
    ])
    def test_a_wrong_filter_is_refused(self, db: Database, filters: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidSpec, match=message):
            runs.list_runs(db, **filters)
