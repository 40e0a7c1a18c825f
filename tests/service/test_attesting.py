"""Every run that ends is attested once, and the log only grows."""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from typing import Any

import pytest
from alembic import command
from sqlalchemy import event, text

from mok_service import jobs, runs, verifying
from mok_service.db import queries, statistics, tables
from mok_service.db.session import Database, alembic_config, upgrade
from mok_service.errors import InvalidSpec, NotFound
from mok_service.lifecycle import UNCHAINED
from mok_service.provenance import merkle, tree
from mok_service.provenance.attest import BUILD_TYPE, check_statement, open_envelope
from mok_service.provenance.digest import sha256
from mok_service.provenance.keys import SigningKey
from mok_service.provenance.verdict import verdict_statement
from mok_service.runs import Outcome
from mok_workers.signing import Signer
from tests.databases import Clock
from tests.service.play import records, start, submit, succeed, trained

KEY = SigningKey.generate()
TRUSTED = {KEY.public.id: KEY.public}


def statement_of(db: Database, run_id: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(b64decode(runs.get_attestation(db, run_id).envelope["payload"]))
    return document


def test_every_run_that_ends_is_attested_in_the_order_of_the_ends(db: Database, clock: Clock) -> None:
    _, succeeded = trained(db, clock)
    submit(db)
    lease = start(db, clock)
    waiting, cancelled = submit(db).run.id, submit(db).run.id
    clock.tick()
    runs.cancel(db, cancelled, now=clock.now)
    clock.tick()
    failed = runs.finish(db, lease, Outcome("failed", "non_finite", "step 1"), clock.now)
    assert Signer(db, KEY).tick() == 3 and Signer(db, KEY).tick() == 0
    ended = [succeeded.id, cancelled, failed.id]
    assert [entry.run_id for entry in runs.log_entries(db)] == ended
    assert [entry.index for entry in runs.log_entries(db, after=0)] == [1, 2]
    for run_id, status in zip(ended, ("succeeded", "cancelled", "failed"), strict=True):
        document = statement_of(db, run_id)
        assert document["predicate"]["buildDefinition"]["buildType"] == BUILD_TYPE
        assert document["predicate"]["runDetails"]["metadata"]["invocationId"] == run_id
        assert document["predicate"]["runDetails"]["byproducts"][0]["annotations"]["status"] == status
        assert open_envelope(runs.get_attestation(db, run_id).envelope, TRUSTED).signer == KEY.public
        check_statement(runs.provenance(db, run_id), document)
    names = [subject["name"] for subject in statement_of(db, succeeded.id)["subject"]]
    assert names[:4] == ["record", "chain-head", "final-weights", "final-optimizer"] and len(names) == 6
    with pytest.raises(NotFound, match="no attestation"):
        runs.get_attestation(db, waiting)


def test_an_attestation_still_holds_after_what_may_be_added_to_the_record(db: Database, clock: Clock) -> None:
    """A run that was cancelled in the queue has read no data, also when a later run of its job has."""
    job = submit(db)
    runs.cancel(db, job.run.id, now=clock.now)
    runs.attest(db, KEY, job.run.id, now=clock.now)
    again = jobs.create_run(db, job.job.id, execution=None, reproduces=None, now=clock.now)
    succeed(db, start(db, clock), clock, records(job.job))
    runs.attest(db, KEY, again.id, now=clock.now)
    runs.judge(db, again.id, lambda step, name: iter([b""]), now=clock.now)
    runs.checkpoint_deleted(db, again.id, runs.checkpoints(db, again.id)[0].info.step, now=clock.now)
    for run_id in (job.run.id, again.id):
        check_statement(runs.provenance(db, run_id), statement_of(db, run_id))
    assert runs.provenance(db, job.run.id)["data"] is None and runs.provenance(db, again.id)["data"] is not None


def test_many_signers_make_one_attestation(db: Database, clock: Clock) -> None:
    ended = [trained(db, clock, steps=1)[1].id for _ in range(4)]
    threads = [threading.Thread(target=Signer(db, KEY).tick) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.run_id or "" for entry in runs.log_entries(db)) == sorted(ended)
    assert runs.unattested(db) == []


def test_a_run_that_cannot_be_signed_does_not_keep_others_from_it(
    db: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (trained(db, clock, steps=1)[1].id for _ in range(2))
    now, tried = [0.0], list[float]()
    attest, signer = runs.attest, Signer(db, KEY, lambda: now[0])

    def fails_once(database: Database, key: SigningKey, run_id: str, tenant: str) -> Any:
        if run_id == first:
            tried.append(now[0])
            raise ValueError("no canonical bytes")
        return attest(database, key, run_id, tenant)

    monkeypatch.setattr(runs, "attest", fails_once)
    assert (signer.tick(), signer.tick()) == (1, 0)
    for now[0] in range(1, 2000):
        signer.tick()
    assert tried[:6] == [0.0, 2, 6, 14, 30, 62] and tried[-1] - tried[-2] == 600, "less and less often"
    monkeypatch.undo()
    now[0] += 600
    assert signer.tick() == 1, "once it can be signed, it is"
    assert [entry.run_id for entry in runs.log_entries(db)] == [second, first]


def test_heads_and_proofs(db: Database, clock: Clock) -> None:
    with pytest.raises(NotFound, match="the log is empty"):
        runs.log_head(db)
    heads = []
    for size in range(1, 8):
        runs.attest(db, KEY, trained(db, clock, steps=1)[1].id, now=clock.now)
        heads.append(tree.open_head(runs.log_head(db), TRUSTED))
        assert heads[-1].size == size and heads[-1].signer == KEY.public
    leaves = [tree.leaf(entry.entry) for entry in runs.log_entries(db)]
    for size, head in enumerate(heads, 1):
        assert head.root == merkle.root(leaves[:size])
        for index in range(size):
            proof = [bytes.fromhex(node) for node in runs.log_proof(db, size, index=index)]
            assert merkle.verify_inclusion(leaves[index], index, size, proof, head.root)
        for old in range(1, size + 1):
            proof = [bytes.fromhex(node) for node in runs.log_proof(db, size, old_size=old)]
            assert merkle.verify_consistency(old, size, proof, heads[old - 1].root, head.root)
    for arguments in ({"index": 7}, {"index": -1}, {"old_size": 8}, {}, {"index": 0, "old_size": 1}):
        with pytest.raises(InvalidSpec, match="allowed: "):
            runs.log_proof(db, 7, **arguments)
    with pytest.raises(InvalidSpec, match="allowed: 0 to 7"):
        runs.log_proof(db, 8, index=0)


def test_another_key_continues_the_log(db: Database, clock: Clock) -> None:
    other = SigningKey.generate()
    for key in (KEY, other):
        runs.attest(db, key, trained(db, clock, steps=1)[1].id, now=clock.tick())
    assert [key["id"] for key in runs.signing_keys(db)] == [KEY.public.id, other.public.id]
    assert tree.open_head(runs.log_head(db), TRUSTED | {other.public.id: other.public}).signer == other.public
    assert tree.open_head(runs.log_head(db), TRUSTED).signer is None, "an unknown key"


def test_runs_that_ended_before_there_were_attestations_get_theirs(empty_url: str, clock: Clock) -> None:
    upgrade(empty_url)
    db, config = Database(empty_url, clock=clock), alembic_config()
    ended = trained(db, clock)[1]
    with db.write() as tx:
        config.attributes["connection"] = tx
        command.downgrade(config, "0001")
    upgrade(empty_url)
    assert runs.unattested(db) == [(ended.id, "local")] and Signer(db, KEY).tick() == 1
    check_statement(runs.provenance(db, ended.id), statement_of(db, ended.id))
    db.close()


def test_nothing_is_left_of_an_attestation_that_failed(db: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry and attestation are one transaction."""
    run_id = trained(db, clock, steps=1)[1].id
    monkeypatch.setattr(queries, "update_run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runs.attest(db, KEY, run_id, now=clock.now)
    monkeypatch.undo()
    assert runs.log_entries(db) == [] and runs.signing_keys(db) == []
    assert runs.attest(db, KEY, run_id, now=clock.now).log_index == 0


def test_a_verdict_is_attested_once_it_is_there(db: Database, clock: Clock) -> None:
    """A verdict on a run, and the run that came to it, are two entries; what was cancelled is none."""
    job, original = trained(db, clock)
    asked = verifying.verify(db, original.id, "rerun", now=clock.tick())
    cancelled = verifying.verify(db, original.id, "rerun", now=clock.tick())
    rerun = succeed(db, start(db, clock), clock, records(job))
    verifying.cancel_verification(db, cancelled.id, now=clock.tick())
    assert Signer(db, KEY).tick() == 4
    assert [(entry.run_id, entry.verification_id) for entry in runs.log_entries(db)] == [
        (original.id, None), (rerun.id, None), (cancelled.executed_by, None), (original.id, asked.id)]
    signed = runs.get_verdict_attestation(db, asked.id)
    assert runs.get_verification(db, asked.id).log_index == signed.log_index == 3
    document = json.loads(b64decode(signed.envelope["payload"]))
    assert document == verdict_statement(runs.provenance(db, original.id), runs.get_verification(db, asked.id).as_dict())
    (use,) = runs.find_digest(db, str(signed.digest)).items
    assert (use.role, use.name, use.run) == ("verdict-attestation", asked.id, None)
    assert use.place == f"/v1/verifications/{asked.id}/attestation"
    assert runs.find_digest(db, str(signed.digest), "other").items == ()
    with pytest.raises(NotFound, match="has no attestation"):
        runs.get_verdict_attestation(db, cancelled.id)


def test_a_proof_reads_a_few_rows_of_a_long_log(db: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    size, frontier, leaves = 700, list[bytes](), list[bytes]()
    rows = []
    for index in range(size):
        entry = sha256(str(index).encode())
        leaves.append(tree.leaf(entry))
        frontier = merkle.grown(frontier, index, leaves[-1])
        rows.append({"log_index": index, "entry": entry, "frontier": [h.hex() for h in frontier], "head": {},
                     "created_at": clock.now})
    with db.write() as tx:
        queries.add(tx, tables.log_entries, rows)
    reads = list[int]()
    read = queries.log_entries_at
    monkeypatch.setattr(queries, "log_entries_at", lambda tx, indices: reads.append(len(set(indices))) or read(tx, indices))
    for part in (1, 2, 3, 255, 256, 257, 511, 512, 640, 699, 700):
        head = merkle.root(leaves[:part])
        for index in {0, part // 3, part // 2, part - 1}:
            proof = [bytes.fromhex(node) for node in runs.log_proof(db, part, index=index)]
            assert merkle.verify_inclusion(leaves[index], index, part, proof, head)
        for old in {1, part // 3, part // 2, part - 1} - {0}:
            proof = [bytes.fromhex(node) for node in runs.log_proof(db, part, old_size=old)]
            assert merkle.verify_consistency(old, part, proof, merkle.root(leaves[:old]), head)
    assert max(reads) <= 40 and len(reads) > 60, "of 700"


def test_reruns_from_before_verifications_were_tasks(empty_url: str, clock: Clock) -> None:
    """Their verdicts move from the run that came to them to the run that they are about; those that are under way get theirs."""
    upgrade(empty_url)
    db, config = Database(empty_url, clock=clock), alembic_config()
    job, original = trained(db, clock)
    done = jobs.create_run(db, job.id, now=clock.tick())
    succeed(db, start(db, clock), clock, records(job))
    going = jobs.create_run(db, job.id, now=clock.tick())
    with db.write() as tx:
        config.attributes["connection"] = tx
        command.downgrade(config, "0002")
        before = tx.execute(text("SELECT run_id, compares_with FROM verifications"))
        assert [tuple(row) for row in before] == [(done.id, original.id)]
    upgrade(empty_url)
    found = runs.verifications(db, original.id)
    assert [(v.executed_by, v.verdict, v.status) for v in found] == [(done.id, "REPRODUCED", "done"), (going.id, None, "queued")]
    succeed(db, start(db, clock), clock, records(job))
    assert runs.get_verification(db, found[1].id).verdict == "REPRODUCED"
    db.close()


def test_what_is_to_be_signed_is_found_without_reading_what_never_will_be(db: Database) -> None:
    assert tables.RUN_TO_ATTEST.endswith(f"kind NOT IN {UNCHAINED}")
    if db.dialect != "sqlite":
        pytest.skip("PostgreSQL plans by the size of the table")
    sent: list[tuple[str, Any]] = []
    with db.read() as tx:
        index = text("SELECT sql FROM sqlite_master WHERE name = 'ix_runs_unattested'")
        assert tx.execute(index).scalar_one().endswith(f"WHERE {tables.RUN_TO_ATTEST}"), "as the migrations have it"
        event.listen(tx, "before_cursor_execute", lambda _, cursor, statement, values, *more: sent.append((statement, values)))
        queries.unattested_runs(tx, 1)
        queries.unattested_verifications(tx, 1)
        statistics.unsigned(tx)
        plans = [tx.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all() for statement, values in tuple(sent)]
    of_runs = ["SEARCH runs USING INDEX ix_runs_unattested (ended_at>?)"]
    of_verdicts = ["SCAN verifications USING INDEX ix_verifications_unattested"]
    assert [[row[3] for row in plan] for plan in plans] == [of_runs, of_verdicts, of_runs]
