"""`python -m tests.chaos --kills 100 --seed 1`: kill a real service's processes at random moments, while it trains small jobs.

Afterwards every run must have succeeded with the digests that the same job has undisturbed, the database must keep its own
rules (`mok db check`), and a submit that was sent again must have made nothing twice. The seed decides what is killed and when;
the machine decides what that meets. Exit status 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import httpx
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from mok_service import runs
from mok_service.db.session import Database
from mok_service.db.tables import attempts, jobs, step_records
from mok_service.db.tables import runs as run_rows
from mok_service.environment import hardware
from mok_service.integrity import inspect
from tests.chaos.forms import Form, embedded, production
from tests.operating.installation import ROOT, job, plain_environment, until

JOBS: Final = [(seed, 40 + 40 * seed) for seed in range(1, 7)]  # seed and steps
BACKLOG: Final = 4                # runs that have not ended, at any time
RECOVERY_SECONDS_MAX: Final = 120.0
OVERLAP: Final = 0.25             # how often the next kill doesn't wait for the service to recover
OFTEN: Final = {"actor that trains": 3, "actor that waits": 2, "raylet": 2}  # by weight: machines fail more often than services
PAUSE_SECONDS_MAX: Final = 3.0    # before a kill
RETRY_SECONDS: Final = 0.3
SETTLED_SECONDS: Final = 1.0


@dataclass
class Story:
    """What happened to one form."""

    form: str
    recovery: dict[str, list[float]] = field(default_factory=dict)  # seconds, by what was killed
    overlapping: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)          # what submits met
    submitted: list[tuple[str, int]] = field(default_factory=list)  # run, and which job
    attempts: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)         # what attempts that failed said, and no process was blamed
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(map(len, self.recovery.values())) + self.overlapping.total()


class Chaos:
    """Submits, kills and watches one form."""

    def __init__(self, form: Form, seed: int, undisturbed: dict[int, dict[str, Any]]) -> None:
        self._form, self._random, self._undisturbed = form, random.Random(f"{seed} {form.name}"), undisturbed
        self._db = Database(form.settings.database(), read_only=True)
        self.story = Story(form.name)

    def go(self, kills: int, until_monotonic: float) -> Story:
        began = time.monotonic()
        try:
            until(lambda: self._step_count() > 0, "the first step", RECOVERY_SECONDS_MAX)
            while self.story.kills < kills and time.monotonic() < until_monotonic:
                self._one_kill()
            until(self._all_ended, "every run ends", 600.0)
            until(lambda: not runs.unattested(self._db), "every run is attested", RECOVERY_SECONDS_MAX)
            self._judge()
        except AssertionError as error:
            self.story.faults.append(str(error))
        finally:
            self._db.close()
        self.story.seconds = time.monotonic() - began
        return self.story

    # ---- killing -------------------------------------------------------------------------------------------------------------

    def _one_kill(self) -> None:
        kinds = self._form.kills(self._pids)
        names = sorted(kinds)
        kind = self._random.choices(names, [OFTEN.get(name, 1) for name in names])[0]
        self._live(self._random.uniform(0.0, PAUSE_SECONDS_MAX))
        idle_until = time.monotonic() + RECOVERY_SECONDS_MAX
        while not (trained := self._training()):
            self._live(0.1)
            assert time.monotonic() < idle_until, "nothing trains"
        killed_at = time.monotonic()
        if not kinds[kind]():
            return
        if self._random.random() < OVERLAP:
            self.story.overlapping[kind] += 1
            print(f"{self.story.kills}: {kind}, and on", flush=True)
            return
        self._live(SETTLED_SECONDS)  # what was on its way when the kill came is on record by now
        before: dict[str, int] | None = None
        while before is None or not self._further_than(before) or not self._answers():
            self._live(0.1)
            if before is None:
                before = self._steps_of(trained)
            assert time.monotonic() < killed_at + RECOVERY_SECONDS_MAX, f"no recovery after {kind} was killed"
        took = time.monotonic() - killed_at
        self.story.recovery.setdefault(kind, []).append(took)
        print(f"{self.story.kills}: {kind}, back after {took:.1f} s", flush=True)

    def _live(self, seconds: float) -> None:
        """Let time pass: what ended is started again, and there is always something to do."""
        deadline = time.monotonic() + seconds
        while True:
            self._form.keep()
            if self._waiting() < BACKLOG:
                self._submit()
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)

    def _submit(self) -> None:
        """Send a job until an answer comes; always under the same key, so it makes one job however often it arrives."""
        number = self._random.randrange(len(JOBS))
        key = str(uuid.UUID(int=self._random.getrandbits(128)))
        deadline = time.monotonic() + RECOVERY_SECONDS_MAX
        while time.monotonic() < deadline:
            answer = "nobody answered"
            try:
                response = httpx.post(
                    self._form.url + "/v1/jobs", json=job_of(number), headers={"Idempotency-Key": key}, timeout=30.0)
                if response.status_code in (200, 201):
                    self.story.submitted.append((response.json()["run"]["id"], number))
                    return
                answer = str(response.status_code)
            except httpx.TransportError:
                pass
            self.story.answers[answer] += 1
            self._form.keep()
            time.sleep(RETRY_SECONDS)
        raise AssertionError("a submit never came through")

    # ---- watching --------------------------------------------------------------------------------------------------------------

    def _answers(self) -> bool:
        try:
            return httpx.get(self._form.url + "/healthz", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def _count(self, query: Any) -> int | None:
        """A number from the database; None while it can't be read."""
        try:
            with self._db.read() as tx:
                return int(tx.execute(query).scalar_one())
        except SQLAlchemyError:
            return None

    def _step_count(self) -> int:
        if not self.story.submitted:
            self._live(0.0)
        return self._count(select(func.count()).select_from(step_records)) or 0

    def _training(self) -> list[str]:
        """The runs that train; none while it can't be read."""
        query = select(run_rows.c.id).where(run_rows.c.status == "running", run_rows.c.step.is_not(None))
        try:
            with self._db.read() as tx:
                return list(tx.execute(query).scalars())
        except SQLAlchemyError:
            return []

    def _pids(self) -> set[int]:
        """The processes that execute an attempt; none while it can't be read."""
        query = select(attempts.c.placement).where(attempts.c.running_at.is_not(None), attempts.c.ended_at.is_(None))
        try:
            with self._db.read() as tx:
                return {placement["pid"] for placement in tx.execute(query).scalars()}
        except SQLAlchemyError:
            return set()

    def _steps_of(self, run_ids: Iterable[str]) -> dict[str, int] | None:
        """The last step of each of these runs that has not ended; None while it can't be read."""
        t = run_rows
        query = select(t.c.id, t.c.step).where(t.c.id.in_(run_ids), t.c.ended_at.is_(None))
        try:
            with self._db.read() as tx:
                return {run_id: step for run_id, step in tx.execute(query)}
        except SQLAlchemyError:
            return None

    def _further_than(self, before: dict[str, int]) -> bool:
        """Whether each of these runs has a later step on record, or has ended."""
        t = run_rows
        try:
            with self._db.read() as tx:
                found = tx.execute(select(t.c.id, t.c.step, t.c.ended_at).where(t.c.id.in_(before))).all()
        except SQLAlchemyError:
            return False
        return all(ended_at is not None or step > before[run_id] for run_id, step, ended_at in found)

    def _waiting(self) -> int:
        """Runs that have not ended; while nobody can say, enough of them."""
        found = self._count(select(func.count()).select_from(run_rows).where(run_rows.c.ended_at.is_(None)))
        return BACKLOG if found is None else found

    def _all_ended(self) -> bool:
        self._form.keep()
        return self._count(select(func.count()).select_from(run_rows).where(run_rows.c.ended_at.is_(None))) == 0

    def _judge(self) -> None:
        story = self.story
        for run_id, number in story.submitted:
            run, expected = runs.get_run(self._db, run_id), self._undisturbed[number]
            got = {"status": run.status, "head": str(run.head), "weights": str(run.weights)}
            if got != expected:
                story.faults.append(f"{run_id}: {got} ({run.message}); undisturbed {expected}")
        made = self._count(select(func.count()).select_from(jobs))
        if made != len(story.submitted):
            story.faults.append(f"{len(story.submitted)} submits made {made} jobs")
        with self._db.read() as tx:
            story.attempts.update(str(end) for end in tx.execute(select(attempts.c.end_reason)).scalars())
            said = tx.execute(select(attempts.c.message).where(attempts.c.end_reason == "failed")).scalars()
            story.failures.update(str(message).strip().splitlines()[-1] for message in said)
        story.faults += [f"{fault.of}: {fault.message}" for fault in inspect(self._db, self._form.settings.checkpoints).faults]


def job_of(number: int) -> dict[str, Any]:
    seed, steps = JOBS[number]
    return job(seed, steps=steps, checkpoint_interval=10)


def undisturbed(folder: Path) -> dict[int, dict[str, Any]]:
    """What each job gives with no service at all."""
    found = {}
    for number in range(len(JOBS)):
        spec = folder / f"job-{number}.json"
        spec.write_text(json.dumps(job_of(number)))
        words = [sys.executable, "-m", "mok_service.cli", "train", str(spec), "--json"]
        done = subprocess.run(words, cwd=folder, env=plain_environment(), check=True, capture_output=True, text=True)
        trained = json.loads(done.stdout)
        found[number] = {"status": "succeeded", "head": trained["head"], "weights": trained["weights"]}
    return found


def report(stories: list[Story], seed: int) -> str:
    here = hardware()
    lines = [
        "# Chaos", "",
        "A real service while its processes are killed (SIGKILL) at random moments: `make chaos`. There are always small jobs",
        "that train. After each kill, programs that ended are started again, as a service manager does. The times are those",
        "until every run that was training has a further step on record, or has ended, and the API answers. A kill overlaps when",
        "the next one doesn't wait for that. Steps count from one second after the kill, so no time is shorter.", "",
        "Actors and raylets are killed more often than the rest, and each node keeps an actor that waits for an attempt",
        "(`MOK_ACTORS_READY=1`).", "",
        f"{datetime.now(UTC):%Y-%m-%d}, seed {seed}; {here['cpu']['model']}, {here['cpu'].get('cores', 2)} cores, "
        f"{here['memory_bytes'] / 2**30:.0f} GiB, other work on the machine; Ray {version('ray')}, "
        f"SQLAlchemy {version('sqlalchemy')}, torch {version('torch')}.", "",
    ]
    for story in stories:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(story.attempts.items()))
        met = ", ".join(f"{count} times {answer}" for answer, count in sorted(story.answers.items())) or "nothing else"
        lines += [f"## {story.form}", "",
                  f"{story.kills} kills in {story.seconds / 60:.1f} minutes; {len(story.submitted)} runs.", "",
                  "| killed | times, waited for | median, s | longest, s | overlapping |", "| --- | --- | --- | --- | --- |"]
        for kind in sorted({*story.recovery, *story.overlapping}):
            took = story.recovery.get(kind, [])
            middle, most = (f"{statistics.median(took):.1f}", f"{max(took):.1f}") if took else ("-", "-")
            lines.append(f"| {kind} | {len(took)} | {middle} | {most} | {story.overlapping[kind]} |")
        lines += ["", f"Attempts: {ends}. Submits that had to be sent again met: {met}.", ""]
        if story.failures:
            lines += ["Attempts that failed said:", "", *(f"- {n} times `{said}`" for said, n in story.failures.items()), ""]
        lines += [f"- {fault}" for fault in story.faults] or [
            "Every run succeeded with the digests of the undisturbed job, every submit made one job, and the database kept its "
            "rules."]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="in all; the production form gets 60 %% of them")
    parser.add_argument("--minutes", type=float, default=1e6, help="no further kill after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("embedded", "production"), help="one form; default: both")
    parser.add_argument("--report", type=Path, default=None, help="where the report goes; default: only printed")
    arguments = parser.parse_args()
    stories: list[Story] = []
    forms: list[tuple[Any, float]] = [(embedded, 0.4), (production, 0.6)]
    if arguments.only is not None:
        forms = [({"embedded": embedded, "production": production}[arguments.only], 1.0)]
    for form, share in forms:
        folder = Path(tempfile.mkdtemp(prefix="mok-ch-", dir="/tmp"))
        folder.chmod(0o711)  # PostgreSQL's user goes through it
        try:
            expected = undisturbed(folder)
            opened: AbstractContextManager[Form] = form(folder)
            with opened as service:
                print(service.name, flush=True)
                end = time.monotonic() + arguments.minutes * 60 * share
                stories.append(Chaos(service, arguments.seed, expected).go(round(arguments.kills * share), end))
            if stories[-1].faults:
                kept = ROOT / "build" / f"chaos-{len(stories)}"
                shutil.rmtree(kept, ignore_errors=True)
                others = shutil.ignore_patterns("r", "ray", "data", "embedded_postgres*", ".s.*", "checkpoints")
                shutil.copytree(folder, kept, ignore=others, symlinks=True)
                print(f"logs are in {kept}", flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    text = report(stories, arguments.seed)
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text)
    return 1 if any(story.faults for story in stories) else 0


if __name__ == "__main__":
    sys.exit(main())
