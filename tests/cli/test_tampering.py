"""One harm of each kind to what a service stores; each way of asking gives the same verdict, place and exit status.

| harm | verdict | place |
| --- | --- | --- |
| a bit of the weights, of the optimizer's state, of another file of a checkpoint | TAMPERED | file and step |
| the sign of a zero, the payload of a NaN: in a checkpoint, in a step record | TAMPERED | file and step; the next link |
| a step record, the spec, anything else in the record | TAMPERED | the next link; the first; the attested record |
| the envelope's payload, its signature, another run's envelope, another key under the same id | TAMPERED | signature; record |
| an entry of the log | TAMPERED | the proof |
| a chain without its end | TAMPERED | its length; made to look like a run that failed: the attested record |
| a record that names another library | TAMPERED | the attested record |
| all signed anew by a key that nobody knows | INCONCLUSIVE | key |

Asked are the function, REST, the command with a service and without one, and of what was exported the function and the command.
What only computing again can find (a forged segment, a library that was rebuilt) is in test_audits.py.
"""

from __future__ import annotations

import math
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Table, delete, select, update

from mok_service import jobs, runs, verifying
from mok_service.db import tables
from mok_service.db.session import Database
from mok_service.export import verify_export
from mok_service.provenance.digest import Digest
from mok_service.provenance.keys import SigningKey, public_keys, write_public_keys
from mok_service.settings import Settings
from mok_service.spec import parse_job
from tests.cli.conftest import Mok
from tests.services import Worker, flip_a_bit, running_api, spec

EXIT_STATUS = {"INTACT": 0, "TAMPERED": 4, "INCONCLUSIVE": 5}


@dataclass
class Stored:
    """What a service stores, and two of its runs, which are attested. Weights: a NaN at step 2, a zero at every step."""

    db: Database
    settings: Settings
    run: str
    other: str

    def file(self, step: int, name: str) -> Path:
        return self.settings.checkpoints(self.run) / f"step-{step:08d}" / name

    def change(self, table: Table, change: Callable[[dict[str, Any]], dict[str, Any]], **where: Any) -> None:
        """Replace values of one row of a table."""
        row = [table.c[name] == value for name, value in where.items()]
        with self.db.write() as tx:
            (found,) = tx.execute(select(table).where(*row)).mappings()
            tx.execute(update(table).where(*row).values(**change(dict(found))))

    def change_step(self, step: int, **values: Any) -> None:
        self.change(tables.step_records, lambda _: values, run_id=self.run, step=step)

    def change_envelope(self, change: Callable[[dict[str, Any]], None]) -> None:
        def changed(row: dict[str, Any]) -> dict[str, Any]:
            change(row["envelope"])
            return {"envelope": row["envelope"]}

        self.change(tables.attestations, changed, run_id=self.run)

    def change_environment(self, part: str, value: Any) -> None:
        self.change(tables.attempts, lambda row: {"environment": row["environment"] | {part: value}}, run_id=self.run)


@pytest.fixture(scope="module")
def whole(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A data folder that nobody harmed, and its two runs."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copy(migrated_file, folder / "mok.sqlite3")
    settings = Settings(data_dir=folder)
    db = Database(settings.database())
    worker = Worker(db, settings, losses={1: 0.0, 2: math.nan})
    done = []
    for seed in (1000, 2000):
        jobs.submit(db, parse_job(spec(seed=seed)))
        done.append(worker.work())
    worker.sign()
    db.close()
    return folder, done[0], done[1]


@pytest.fixture
def data_dir(whole: tuple[Path, str, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[0], tmp_path / "data"))


@pytest.fixture
def stored(whole: tuple[Path, str, str], database: Database, settings: Settings) -> Stored:
    return Stored(database, settings, whole[1], whole[2])


# ---- Harm ------------------------------------------------------------------------------------------------------------

def flip(path: Path, offset: int, mask: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= mask
    path.write_bytes(bytes(content))


def flip_base64(text: str, offset: int) -> str:
    content = bytearray(b64decode(text))
    content[offset] ^= 1
    return b64encode(content).decode()


def flip_payload(envelope: dict[str, Any]) -> None:
    envelope["payload"] = flip_base64(envelope["payload"], 100)


def flip_signature(envelope: dict[str, Any]) -> None:
    envelope["signatures"][0]["sig"] = flip_base64(envelope["signatures"][0]["sig"], 40)


def sign_by_another_key(envelope: dict[str, Any]) -> None:
    """Under the id of the right one."""
    payload, kind = b64decode(envelope["payload"]), envelope["payloadType"]
    encoded = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    envelope["signatures"][0]["sig"] = b64encode(SigningKey.generate().sign(encoded)).decode()


def swap_attestations(stored: Stored) -> None:
    with stored.db.write() as tx:
        held = {row.run_id: row.envelope for row in tx.execute(select(tables.attestations))}
        for run, other in ((stored.run, stored.other), (stored.other, stored.run)):
            tx.execute(update(tables.attestations).where(tables.attestations.c.run_id == run).values(envelope=held[other]))


def cut_the_chain(stored: Stored) -> None:
    """Still a chain, of a run that seems to have been shorter."""
    with stored.db.write() as tx:
        for table in (tables.step_records, tables.checkpoints):
            tx.execute(delete(table).where(table.c.run_id == stored.run, table.c.step == 3))
    shutil.rmtree(stored.file(3, "x").parent)
    head = runs.steps(stored.db, stored.run)[-1].record.head()
    stored.change(tables.runs, lambda _: {"step": 2, "head": head}, id=stored.run)


def cut_as_if_it_had_failed(stored: Stored) -> None:
    """Nothing in the record contradicts it."""
    cut_the_chain(stored)
    stored.change(tables.runs, lambda _: {"status": "failed", "stop_reason": "internal", "weights": None}, id=stored.run)


def sign_all_anew(stored: Stored) -> None:
    """By a key that nobody knows: the log too. The service's list of keys names the former one."""
    known = runs.signing_keys(stored.db)[0]["pem"]
    with stored.db.write() as tx:
        for table in (tables.attestations, tables.log_entries, tables.signing_keys):
            tx.execute(delete(table))
        tx.execute(update(tables.runs).values(log_index=None))
    stranger = SigningKey.generate()
    for run in (stored.run, stored.other):
        runs.attest(stored.db, stranger, run)
    stored.change(tables.signing_keys, lambda _: {"pem": known}, id=stranger.public.id)


def change_the_spec(stored: Stored) -> None:
    job = runs.get_run(stored.db, stored.run).job_id
    stored.change(tables.jobs, lambda row: {"training": row["training"] | {"seed": 1001}}, id=job)


TAMPERED = "TAMPERED"
HARMS: dict[str, tuple[Callable[[Stored], None], str, str, int | None]] = {
    "a bit of the weights": (lambda s: flip_a_bit(s.file(2, "model.safetensors")), TAMPERED, "model.safetensors", 2),
    "a bit of the optimizer's state": (lambda s: flip_a_bit(s.file(1, "optimizer.safetensors")), TAMPERED,
                                       "optimizer.safetensors", 1),
    "a bit of another file": (lambda s: flip_a_bit(s.file(3, "报告-🚀.txt")), TAMPERED, "报告-🚀.txt", 3),
    "the sign of a zero weight": (lambda s: flip(s.file(1, "model.safetensors"), -1, 0x80), TAMPERED, "model.safetensors", 1),
    "the payload of a NaN weight": (lambda s: flip(s.file(2, "model.safetensors"), -8, 1), TAMPERED, "model.safetensors", 2),
    "a step record": (lambda s: s.change_step(1, tokens=33), TAMPERED, "chain", 2),
    "the sign of a zero in a record": (lambda s: s.change_step(1, loss_bits="80000000"), TAMPERED, "chain", 2),
    "the payload of a NaN in a record": (lambda s: s.change_step(2, loss_bits="7fc00001"), TAMPERED, "chain", 3),
    "the spec": (change_the_spec, TAMPERED, "chain", 0),
    "the record": (lambda s: s.change_environment("hardware", {"host": "i"}), TAMPERED, "record", None),
    "the envelope's payload": (lambda s: s.change_envelope(flip_payload), TAMPERED, "signature", None),
    "the envelope's signature": (lambda s: s.change_envelope(flip_signature), TAMPERED, "signature", None),
    "another key": (lambda s: s.change_envelope(sign_by_another_key), TAMPERED, "signature", None),
    "swapped attestations": (swap_attestations, TAMPERED, "record", None),
    "an entry of the log": (lambda s: s.change(tables.log_entries, lambda _: {"entry": Digest("sha256", "0" * 64)}, log_index=1),
                            TAMPERED, "log.proof", None),
    "a chain without its end": (cut_the_chain, TAMPERED, "chain.length", None),
    "a run that seems to have failed": (cut_as_if_it_had_failed, TAMPERED, "record", None),
    "another library": (lambda s: s.change_environment("code", {"native": {"cpu": "sha256:dd"}}), TAMPERED, "record", None),
    "a right signature by an unknown key": (sign_all_anew, "INCONCLUSIVE", "key", None),
    "nothing": (lambda s: None, "INTACT", "", None),
}


# ---- Asking ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("harm", HARMS)
def test_every_way_of_asking_gives_verdict_place_and_exit_status(mok: Mok, stored: Stored, tmp_path: Path, harm: str) -> None:
    do, *expected = HARMS[harm]
    trusted = tmp_path / "trusted.pem"
    assert mok("keys", "export", trusted).status == 0
    do(stored)
    verdict, field, step = expected[0], expected[1] or None, expected[2]

    def read(step: int, name: str) -> Iterator[bytes]:
        yield stored.file(step, name).read_bytes()

    found = verifying.check(stored.db, stored.run, read)
    assert (found.verdict, found.field, found.step) == (verdict, field, step), f"the function: {found.message}"
    with running_api(stored.db, stored.settings) as service:
        shown = httpx.post(f"{service.url}/v1/verifications", json={"run": stored.run}).json()
        assert (shown["verdict"], shown["field"], shown["step"]) == (verdict, field, step), f"REST: {shown}"
        by_service = mok("verify", stored.run, "--url", service.url, "--key", trusted, "--json")
    by_folder = mok("verify", stored.run, "--key", trusted, "--json")
    assert mok("export", stored.run, "--to", tmp_path / "run").status == 0
    finding = verify_export(tmp_path / "run", public_keys(trusted))
    assert (finding.verdict, finding.field, finding.step) == (verdict, field, step), f"of what was exported: {finding.message}"
    exported = mok("verify", tmp_path / "run", "--key", trusted, "--json")
    for result in (by_service, by_folder, exported):
        assert (result.json["verdict"], result.json["field"], result.json["step"]) == (verdict, field, step), result.out
        assert result.status == EXIT_STATUS[verdict]


def test_no_key_is_known(mok: Mok, stored: Stored, tmp_path: Path) -> None:
    """What is right is not believed by somebody who trusts another key."""
    write_public_keys(tmp_path / "other.pem", [SigningKey.generate().public])
    assert mok("export", stored.run, "--to", tmp_path / "run").status == 0
    for what in (stored.run, tmp_path / "run"):
        result = mok("verify", what, "--key", tmp_path / "other.pem", "--json")
        assert (result.status, result.json["verdict"], result.json["field"]) == (5, "INCONCLUSIVE", "key")
