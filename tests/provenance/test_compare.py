"""Two records beside each other: everything that differs is named, on the right side of the line."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mok_service import runs
from mok_service.db.session import Database
from mok_service.provenance.compare import RecordDifference, compare_records
from mok_service.render import difference_lines
from tests.databases import Clock
from tests.service import play


@pytest.fixture
def kind() -> str:
    return "sqlite"


@pytest.fixture
def record(db: Database, clock: Clock) -> dict[str, Any]:
    return runs.provenance(db, play.trained(db, clock)[1].id)


def compare(record: dict[str, Any], other: dict[str, Any]) -> tuple[RecordDifference, str]:
    found = compare_records(record, other)
    return found, "\n".join(difference_lines(found))


def test_a_record_equals_itself(record: dict[str, Any]) -> None:
    found, told = compare(record, copy.deepcopy(record))
    assert (found.outcome, found.step, found.change) == ("equal", 4, None)
    assert told == "equal: every step record, 4 steps"


@pytest.mark.parametrize(("path", "value", "line"), [
    (("spec", "training", "seed"), 8, "  training.seed: 7 / 8"),
    (("spec", "training", "model", "experts"), 2, "  training.model.experts: 4 / 2"),
    (("data", "manifest", "files", 1, "sha256"), "e" * 64,
     f"  data.files.ast.py: 64260 bytes, sha256:{'b' * 64} / 64260 bytes, sha256:{'e' * 64}"),
    (("data", "manifest", "files", 0, "name"), "new.py", f"  data.files.new.py: - / 6522 bytes, sha256:{'a' * 64}"),
    (("data", "digest"), "sha256:" + "f" * 64, f"  data.digest: {play.MANIFEST.digest()} / sha256:{'f' * 64}"),
    (("code", "version"), "0.2.0", "  code: version 0.1.0 -> 0.2.0"),
    (("code", "git", "dirty"), True, "  code: source commit " + "d" * 40 + " -> commit " + "d" * 40 + " with changes (None)"),
])
def test_what_may_show_in_the_bits(record: dict[str, Any], path: tuple[Any, ...], value: Any, line: str) -> None:
    found, told = compare(record, changed(record, path, value))
    assert found.outcome == "equal", "the steps are"
    first, *lines, last = told.splitlines()
    assert first == "what differs and may show in the bits:" and line in lines and last.startswith("equal:")
    assert "may not" not in told


@pytest.mark.parametrize(("path", "value", "line"), [
    (("spec", "execution", "threads"), 3, "  execution.threads: 0 / 3"),
    (("environment", "software", "torch"), "2.14.0", "  environment.software.torch: 2.13.0 / 2.14.0"),
    (("environment", "packages", "numpy"), "2.0", "  environment.packages.numpy: - / 2.0"),
    (("environment", "variables", "OMP_NUM_THREADS"), "2", "  environment.variables.OMP_NUM_THREADS: - / 2"),
    (("environment", "hardware", "host"), "worker-2", "  environment.hardware.host: worker-1 / worker-2"),
    (("environment", "hardware", "cpu"), {"flags": ["avx2"]}, "  environment.hardware.cpu: - / {'flags': {'avx2': True}}"),
    (("layout", "physical", "ranks", 0, "node"), "worker-2", "  layout.ranks[0].node: worker-1 / worker-2"),
    (("attempts", 0, "end"), "worker_lost", "  attempts.1.end: finished / worker_lost"),
])
def test_what_may_not_show_in_the_bits(record: dict[str, Any], path: tuple[Any, ...], value: Any, line: str) -> None:
    found, told = compare(record, changed(record, path, value))
    assert found.outcome == "equal"
    assert told.splitlines()[:2] == ["what differs and may not show in the bits:", line]
    kinds = found.as_dict()
    assert sum(len(kinds[name]) for name in ("training", "data", "code", "execution", "environment", "layout", "attempts")) == 1


def test_flags_of_processors_differ_one_by_one(record: dict[str, Any]) -> None:
    first = changed(record, ("environment", "hardware", "cpu"), {"flags": ["avx2", "fma", "sse2"]})
    second = changed(record, ("environment", "hardware", "cpu"), {"flags": ["avx2", "avx512f", "fma"]})
    assert {c.field: (c.first, c.second) for c in compare_records(first, second).environment} == {
        "environment.hardware.cpu.flags.sse2": (True, None), "environment.hardware.cpu.flags.avx512f": (None, True)}


def test_the_first_step_that_differs_is_shown_with_both_values(db: Database, clock: Clock, record: dict[str, Any]) -> None:
    job = play.submit(db, name="other").job
    other = play.succeed(db, play.start(db, clock), clock, play.records(job, change={3: {"loss_bits": "3fd55556"}}))
    found, told = compare(record, runs.provenance(db, other.id))
    assert (found.outcome, found.step) == ("different", 3)
    assert told.splitlines()[-3:] == ["different: step 3, loss", "  3fd55555  (1.6666666269302368)",
                                      "  3fd55556  (1.6666667461395264)"]
    assert "  training.name: play / other" in told


def test_a_run_that_is_shorter_is_equal_as_far_as_it_goes(record: dict[str, Any]) -> None:
    shorter = copy.deepcopy(record)
    shorter["chain"]["records"] = shorter["chain"]["records"][:3]
    assert compare(record, shorter)[1] == "equal through step 2, where the shorter one ends"
    shorter["chain"]["records"], shorter["environment"], shorter["code"] = [], None, None
    found, told = compare(record, shorter)
    assert (found.outcome, found.step, found.code) == ("equal_so_far", None, ())
    assert told.splitlines()[-1] == "nothing to compare: one of them has no step records"


def changed(record: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at the path."""
    other = copy.deepcopy(record)
    place = other
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return other
