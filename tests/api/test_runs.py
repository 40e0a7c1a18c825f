"""Runs over REST: looking at them, steering them, their verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from mok_service import runs
from mok_service.provenance.digest import sha256
from mok_service.runs.types import Outcome
from tests.services import SPEC, Service, Worker, flip_a_bit, spec


@pytest.fixture
def run(api: httpx.Client) -> dict[str, Any]:
    """A queued run."""
    return dict(api.post("/v1/jobs", json=SPEC).json()["run"])


def test_what_a_run_left_is_shown(api: httpx.Client, worker: Worker, run: dict[str, Any]) -> None:
    worker.work()
    path = f"/v1/runs/{run['id']}"
    ended = api.get(path).json()
    assert (ended["status"], ended["stop_reason"], ended["step"]) == ("succeeded", "finished", 3)
    steps = api.get(f"{path}/steps").json()
    assert [step["step"] for step in steps["items"]] == [0, 1, 2, 3] and steps["next_after"] == 3
    assert [step["loss"] for step in steps["items"]] == [None, 4.0, 3.0, 2.0] and steps["items"][1]["loss_bits"] == "40800000"
    assert steps["items"][-1]["head"] == ended["head"] and steps["items"][-1]["state"]["weights"] == ended["weights"]
    assert api.get(f"{path}/steps", params={"after": 1, "limit": 1}).json() == {"items": [steps["items"][2]], "next_after": 2}
    assert [line["message"] for line in api.get(f"{path}/logs").json()["items"]] == [f"step {s} is done" for s in range(4)]
    assert [c["step"] for c in api.get(f"{path}/checkpoints").json()["items"]] == [0, 1, 2, 3]
    attempts = api.get(f"{path}/attempts").json()["items"]
    assert [(a["attempt"], a["end"], a["environment"]["hardware"]) for a in attempts] == [(1, "finished", {"host": "h"})]


def test_numbers_that_json_cannot_hold_break_nothing(api: httpx.Client, worker: Worker, run: dict[str, Any]) -> None:
    """Case 20: lists and metrics answer, the bits say what the number was."""
    worker.losses = {2: float("nan"), 3: float("inf")}
    worker.work()
    steps = api.get(f"/v1/runs/{run['id']}/steps").json()["items"]
    assert [(s["loss"], s["loss_bits"]) for s in steps[2:]] == [(None, "7fc00000"), (None, "7f800000")]
    assert steps[1]["metrics"] == {"aux_loss": None}
    for path in ("/v1/runs", "/v1/jobs", f"/v1/runs/{run['id']}/events", f"/v1/runs/{run['id']}/provenance", "/metrics"):
        answer = api.get(path)
        assert answer.status_code == 200 and "NaN" not in answer.text and "Infinity" not in answer.text


def test_a_run_that_is_not_finite_says_so(api: httpx.Client, worker: Worker, run: dict[str, Any]) -> None:
    """Case 20."""
    worker.fail("non_finite", "step 1: the loss is not finite")
    ended = api.get(f"/v1/runs/{run['id']}").json()
    assert (ended["status"], ended["stop_reason"], ended["message"]) == ("failed", "non_finite", "step 1: the loss is not finite")
    assert api.get("/v1/runs", params={"status": "failed"}).json()["items"] == [ended]
    assert 'mok_runs{status="failed"} 1\n' in api.get("/metrics").text


def test_cancelling_pausing_and_resuming(api: httpx.Client, worker: Worker, run: dict[str, Any]) -> None:
    path = f"/v1/runs/{run['id']}"
    assert api.post(f"{path}/pause").json()["status"] == "paused"
    assert api.post(f"{path}/pause").json()["status"] == "paused"
    assert api.post(f"{path}/resume").json()["status"] == "queued"
    lease = worker.start()
    stopping = api.post(f"{path}/cancel", json={}).json()
    assert (stopping["status"], stopping["stop_reason"]) == ("stopping", "user_cancelled")
    runs.finish(worker.db, lease, Outcome("succeeded", "finished"), worker.now())
    assert api.post(f"{path}/cancel").json()["status"] == "cancelled"
    answer = api.post(f"{path}/resume")
    assert answer.status_code == 409 and answer.json()["error"]["detail"]["status"] == "cancelled"


def test_lists_are_filtered(api: httpx.Client, worker: Worker, run: dict[str, Any]) -> None:
    other = api.post("/v1/jobs", json=spec(name="other", seed=8)).json()
    worker.work()
    ended = api.get(f"/v1/runs/{run['id']}").json()
    assert [r["id"] for r in api.get("/v1/runs").json()["items"]] == [other["run"]["id"], run["id"]]
    assert api.get("/v1/runs", params={"status": "succeeded"}).json()["items"] == [ended]
    assert api.get("/v1/runs", params={"job": run["job"]}).json()["items"] == [ended]
    assert api.get("/v1/runs", params={"job": "job_none"}).json()["items"] == []
    assert api.get("/v1/jobs", params={"name": "other"}).json()["items"] == [other["job"]]
    for digest in (ended["weights"], ended["head"]):
        uses = api.get(f"/v1/digests/{digest}").json()
        assert {use["run"] for use in uses["items"]} == {ended["id"]} and not uses["truncated"]
    assert [use["job"] for use in api.get(f"/v1/digests/{other['job']['digest']}").json()["items"]] == [other["job"]["id"]]


def test_every_filter_is_a_parameter(api: httpx.Client, worker: Worker, run: dict[str, Any]) -> None:
    other = api.post("/v1/jobs", json=spec(name="other", seed=2**63 - 1)).json()["run"]["id"]
    for wanted in ({"seed": 2**63 - 1}, {"name": "other"}, {"seed": 2**63 - 1, "model": "tiny", "kind": "original"}):
        assert [r["id"] for r in api.get("/v1/runs", params=wanted).json()["items"]] == [other], wanted
    at = api.get(f"/v1/runs/{other}").json()["created_at"]
    assert [r["id"] for r in api.get("/v1/runs", params={"since": at}).json()["items"]] == [other]
    assert [r["id"] for r in api.get("/v1/runs", params={"until": at}).json()["items"]] == [run["id"]]
    assert api.get("/v1/runs", params={"parent": run["id"]}).json()["items"] == []
    for wrong in ("seed=-1", f"seed={2**63}", "since=2026-12-01T10:00:00", "since=x", "model=gpt", "kind=copy", "sed=7"):
        assert api.get(f"/v1/runs?{wrong}").status_code == 422, wrong


def test_a_digest_and_a_lineage_are_described(api: httpx.Client, worker: Worker, run: dict[str, Any]) -> None:
    worker.work()
    api.post(f"/v1/jobs/{run['job']}/runs", json={})
    again = worker.work()
    weights = api.get(f"/v1/runs/{run['id']}").json()["weights"]
    found = api.get(f"/v1/digests/{weights}").json()
    assert api.get(f"/v1/digests/{weights.removeprefix('sha256:')}").json() == found
    assert {use["run"] for use in found["items"]} == {run["id"], again}
    for use in found["items"]:
        assert api.get(use["place"]).status_code == 200, use
    graph = api.get(f"/v1/runs/{again}/lineage").json()
    assert {node["kind"] for node in graph["nodes"]} == {"run", "job", "data", "verification"} and not graph["truncated"]
    assert api.get(f"/v1/runs/{again}/lineage", params={"depth": 21}).status_code == 422
    refused = api.get("/v1/digests/blake3:" + "0" * 64)
    assert refused.status_code == 422 and "aren't indexed" in refused.json()["error"]["message"]


def test_a_reproduction_is_compared_and_its_verdict_stored(api: httpx.Client, worker: Worker, run: dict[str, Any]) -> None:
    early = api.post(f"/v1/jobs/{run['job']}/runs", json={})
    assert early.status_code == 409 and run["id"] in early.json()["error"]["message"]
    worker.work()
    again = api.post(f"/v1/jobs/{run['job']}/runs", json={"execution": {"threads": 3}})
    assert again.status_code == 201 and again.headers["Location"] == f"/v1/runs/{again.json()['id']}"
    assert again.json()["reproduces"] == run["id"] and again.json()["execution"]["threads"] == 3
    assert again.json()["execution"]["checkpoint_interval"] == 1, "what isn't replaced stays"
    worker.work()
    ended = api.get(f"/v1/runs/{again.json()['id']}").json()
    assert ended["verdict"] == "REPRODUCED" and ended["weights"] == api.get(f"/v1/runs/{run['id']}").json()["weights"]
    verdicts = api.get(f"/v1/runs/{ended['id']}/verifications").json()["items"]
    assert [(v["verdict"], v["run"]) for v in verdicts] == [("REPRODUCED", run["id"])]
    assert api.get(f"/v1/verifications/{verdicts[0]['id']}").json() == verdicts[0]
    assert api.get(f"/v1/runs/{run['id']}/verifications").json()["items"] == verdicts


def test_a_reproduction_that_differs_in_one_bit_says_where(api: httpx.Client, worker: Worker, run: dict[str, Any]) -> None:
    """Case 10, over REST."""
    worker.work()
    again = api.post(f"/v1/jobs/{run['job']}/runs", json={}).json()
    worker.losses = {2: 3.0000002384185791015625}  # one bit
    worker.work()
    ended = api.get(f"/v1/runs/{again['id']}").json()
    assert (ended["status"], ended["stop_reason"], ended["verdict"]) == ("failed", "diverged", "DIVERGED")
    verdict = api.get(f"/v1/runs/{again['id']}/verifications").json()["items"][0]
    assert (verdict["step"], verdict["field"], verdict["expected"], verdict["got"]) == (2, "loss", "40400000", "40400001")


class TestCheck:
    """Level check by the service."""

    def verdict(self, api: httpx.Client, run: str) -> dict[str, Any]:
        answer = api.post("/v1/verifications", json={"run": run})
        assert answer.status_code == 201
        body = dict(answer.json())
        assert answer.headers["Location"] == f"/v1/verifications/{body['id']}"
        assert api.get(f"/v1/runs/{run}/verifications").json()["items"][-1] == body
        return body

    def checkpoint(self, service: Service, run: str, step: int = 2) -> Path:
        return service.settings.checkpoints(run) / f"step-{step:08d}"

    def test_an_untouched_run_is_intact(self, api: httpx.Client, worker: Worker, run: dict[str, Any]) -> None:
        worker.work()
        verdict = self.verdict(api, run["id"])
        assert (verdict["verdict"], verdict["level"], verdict["executed_by"]) == ("INTACT", "check", None)

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "报告-🚀.txt"])
    def test_one_bit_of_a_checkpoint_is_tampered(
        self, api: httpx.Client, service: Service, worker: Worker, run: dict[str, Any], name: str
    ) -> None:
        worker.work()
        flip_a_bit(self.checkpoint(service, run["id"]) / name)
        verdict = self.verdict(api, run["id"])
        assert (verdict["verdict"], verdict["step"], verdict["field"]) == ("TAMPERED", 2, name)

    def test_a_missing_file_is_tampered(self, api: httpx.Client, service: Service, worker: Worker, run: dict[str, Any]) -> None:
        worker.work()
        (self.checkpoint(service, run["id"]) / "model.safetensors").unlink()
        assert self.verdict(api, run["id"])["verdict"] == "TAMPERED"

    def test_a_deleted_checkpoint_is_no_fault(
        self, api: httpx.Client, service: Service, worker: Worker, run: dict[str, Any]
    ) -> None:
        worker.work()
        runs.checkpoint_deleted(service.db, run["id"], 2)
        assert self.verdict(api, run["id"])["verdict"] == "INTACT"
        answer = api.get(f"/v1/runs/{run['id']}/checkpoints/2/files/model.safetensors")
        assert answer.status_code == 410 and answer.json()["error"]["code"] == "gone"

    def test_a_file_with_the_digest_on_record_but_another_state_is_tampered(
        self, api: httpx.Client, service: Service, worker: Worker, run: dict[str, Any]
    ) -> None:
        """Somebody who changes both a checkpoint and its row is found out by the chain."""
        from sqlalchemy import update

        from mok_service.db.tables import checkpoints

        worker.work()
        path = self.checkpoint(service, run["id"]) / "model.safetensors"
        flip_a_bit(path)
        found = next(c for c in runs.checkpoints(service.db, run["id"]) if c.info.step == 2)
        files = [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in found.info.files]
        next(f for f in files if f["name"] == path.name)["sha256"] = sha256(path.read_bytes()).hex
        with service.db.write() as tx:
            row = (checkpoints.c.run_id == run["id"]) & (checkpoints.c.step == 2)
            tx.execute(update(checkpoints).where(row).values(files=files))
        verdict = self.verdict(api, run["id"])
        assert (verdict["verdict"], verdict["step"], verdict["field"]) == ("TAMPERED", 2, "weights")

    def test_of_a_run_that_is_not_there_nothing_is_said(self, api: httpx.Client) -> None:
        for run in ("run_0198c0de5e1f7000800000000000c0de", "x"):
            for level in ("check", "audit", "rerun"):
                assert api.post("/v1/verifications", json={"run": run, "level": level}).status_code == 404
        assert api.post("/v1/verifications", json={"run": "x", "level": "glance"}).status_code == 422
