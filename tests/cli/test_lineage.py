"""The verbs find, lineage, diff and the filters of runs, with a service and on the bare data folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mok_service import jobs
from mok_service.cli.lineage import dot_lines, mermaid_lines
from mok_service.db.session import Database
from mok_service.spec import parse_job
from tests.cli.conftest import Mok
from tests.services import Worker, spec


@pytest.fixture(params=["service", "folder"])
def where(request: pytest.FixtureRequest) -> str:
    if request.param == "service":
        request.getfixturevalue("service")
    return str(request.param)


@pytest.fixture
def runs(database: Database, worker: Worker) -> list[str]:
    """An original, its reproduction, and a run that started from its weights."""
    submitted = jobs.submit(database, parse_job(spec(name='a "name" <b>')))
    found = [worker.work()]
    jobs.create_run(database, submitted.job.id)
    found.append(worker.work())
    child = spec(name="child", seed=8)
    child["training"]["init_from"] = {"source": f"{found[0]}@3"}
    jobs.submit(database, parse_job(child))
    return [*found, worker.work()]


def test_a_digest_is_found(mok: Mok, runs: list[str], where: str) -> None:
    weights = mok("show", runs[0], "--json").json["run"]["weights"]
    found = mok("find", weights, "--json")
    assert found.status == 0 and {use["run"] for use in found.json["items"]} == set(runs)
    assert mok("find", weights.removeprefix("sha256:"), "--json").json == found.json
    lines = mok("find", weights).out.splitlines()
    assert len(lines) == len(found.json["items"]) and re.match(rf"produced +final-weights +{runs[1]}  step 3$", lines[0])
    assert lines[-1].split() == ["used", "initial-weights", runs[2]]
    nothing = mok("find", "sha256:" + "0" * 64)
    assert nothing.status == 6 and "neither produced nor used" in nothing.out
    refused = mok("find", "blake3:" + "0" * 64)
    assert refused.status == 2 and "aren't indexed" in refused.err


def test_a_graph_is_printed_in_every_form(mok: Mok, runs: list[str], where: str) -> None:
    graph = mok("lineage", "latest", "--json").json
    assert graph["run"] == runs[2] and mok("lineage", "latest", "--format", "json").json == graph
    told = mok("lineage", runs[0]).out
    assert f"* {runs[0]}  original  succeeded  a \"name\" <b>" in told and f"continues {runs[0]} at step 3" in told
    assert f"    reproduces {runs[0]}\n" in told and "rerun: REPRODUCED" in told
    dot = mok("lineage", runs[0], "--format", "dot").out
    assert dot.startswith("digraph lineage {") and f'"{runs[2]}" -> "{runs[0]}" [label="continues at step 3"];' in dot
    assert r"a \"name\" <b>" in dot and dot.count(" -> ") == len(graph["edges"])
    mermaid = mok("lineage", runs[0], "--format", "mermaid").out
    assert mermaid.startswith("flowchart RL\n") and "a #34;name#34; #60;b#62;" in mermaid
    assert mermaid.count(" -->|") == len(graph["edges"])
    assert mok("lineage", runs[2], "--depth", "0").out.endswith("and more: see --depth\n")
    assert mok("lineage", "run_x").status == 6 and mok("lineage", runs[0], "--format", "png").status == 2


def test_a_name_from_outside_is_no_syntax() -> None:
    name = 'x"]; evil [label="\n\x1b[31m\\'
    graph = {"run": "run_1", "truncated": False, "edges": [],
             "nodes": [{"id": "run_1", "kind": "run", "label": name, "facts": {"run_kind": "original", "status": "queued"}}]}
    dot = list(dot_lines(graph))
    assert len(dot) == 4 and "\x1b" not in dot[2]
    assert re.fullmatch(r'  "run_1" \[shape=box, label="(?:[^"\\]|\\.)*", style=bold\];', dot[2])
    assert re.fullmatch(r'  n0\["[^"\[\];\\]*(?:#\d+;[^"\[\];\\]*)*"\]', list(mermaid_lines(graph))[1])


def test_runs_are_filtered(mok: Mok, runs: list[str], where: str) -> None:
    def ids(*options: str) -> list[str]:
        return [run["id"] for run in mok("runs", "--json", *options).json["items"]]

    assert ids("--seed", "8") == [runs[2]] and ids("--kind", "reproduction") == [runs[1]]
    assert ids("--parent", runs[0]) == [runs[2], runs[1]] and ids("--model", "tiny") == runs[::-1]
    assert ids("--name", "child", "--since", "1h") == [runs[2]] and ids("--until", "2020-01-01") == []
    assert ids("--since", "2020-01-01T10:00:00+02:00", "--limit", "1") == [runs[2]]
    for wrong in (("--kind", "copy"), ("--model", "gpt"), ("--since", "yesterday"), ("--seed", "-1"), ("--since", "9" * 6 + "x")):
        assert mok("runs", *wrong).status == 2, wrong


def test_exports_and_records_are_compared_without_a_service(mok: Mok, runs: list[str], worker: Worker, tmp_path: Path) -> None:
    worker.sign()
    assert mok("export", runs[0], "--to", tmp_path / "first").status == 0
    record = tmp_path / "second.json"
    record.write_text(mok("provenance", runs[1], "--json").out)
    same = mok("diff", tmp_path / "first", record)
    assert same.status == 0 and "equal: every step record, 3 steps" in same.out
    assert mok("diff", tmp_path / "first", runs[1], "--json").json == mok("diff", runs[0], runs[1], "--json").json
    other = mok("diff", record, runs[2])
    assert other.status == 3 and "training.seed: 7 / 8" in other.out
    record.write_text(json.dumps({"type": "mok.record/v2"}))
    assert mok("diff", record, runs[0]).status == 2
    record.write_text(json.dumps({"type": "mok.record/v1"}))
    assert mok("diff", record, runs[0]).status == 4


def test_a_run_is_exported_for_other_tools(mok: Mok, runs: list[str], tmp_path: Path) -> None:
    written = mok("export", runs[0], "--format", "model-card", "--to", tmp_path / "card.md", "--json")
    assert written.json == {"run": runs[0], "format": "model-card", "to": str(tmp_path / "card.md")}
    assert "model-card to" in mok("export", runs[0], "--format", "model-card", "--to", tmp_path / "other.md").out
    assert mok("export", runs[0], "--format", "model-card", "--to", tmp_path / "card.md").status == 1
    assert mok("export", runs[0], "--format", "pdf", "--to", tmp_path / "x").status == 2
