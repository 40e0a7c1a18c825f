"""Exports are read back by the libraries that they are for."""

from __future__ import annotations

import importlib
import json
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from mok_service import exporters
from mok_service.cli.local import Local
from mok_service.errors import Conflict, InvalidSpec
from mok_service.export import verify_export
from mok_service.exporters import MissingExtra, described, export_as
from mok_service.provenance.chain import float_from_bits
from mok_service.provenance.keys import public_keys_of


class TestMLflow:
    @pytest.fixture
    def uri(self, tmp_path: Path) -> str:
        pytest.importorskip("mlflow")
        return f"sqlite:///{tmp_path}/mlflow.db"

    def test_parameters_metrics_and_digests_arrive(self, local: Local, succeeded: str, failed: str, uri: str) -> None:
        import mlflow

        written = export_as(local, succeeded, "mlflow", uri)
        client = mlflow.MlflowClient(tracking_uri=uri)
        run, record = client.get_run(written["mlflow_run"]), local.provenance(succeeded)
        assert (run.info.status, run.info.run_name) == ("FINISHED", "a|b <tiny>")
        assert run.data.params["training.seed"] == "7" and run.data.params["execution.checkpoint_interval"] == "1"
        assert run.data.tags["mok.weights_digest"] == record["final"]["weights"]
        assert run.data.tags["mok.attestation_digest"] == local.attestation(succeeded)["digest"]
        loss = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}
        bits = {int(row["body"]["step"]): row["body"]["loss"] for row in record["chain"]["records"] if row["body"]["loss"]}
        assert bits[2] == "7f800000" and loss == {s: float_from_bits(b) for s, b in bits.items() if s != 2}
        assert "loss at step 2" in run.data.tags["mok.non_finite"] and "aux_loss at step 1" in run.data.tags["mok.non_finite"]
        with pytest.raises(Conflict, match=written["mlflow_run"]):
            export_as(local, succeeded, "mlflow", uri)
        other = client.get_run(export_as(local, failed, "mlflow", uri)["mlflow_run"])
        assert (other.info.status, other.data.tags["mok.message"]) == ("FAILED", "step 1: the loss is not finite")

    def test_half_an_export_is_taken_back(self, local: Local, succeeded: str, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
        import mlflow

        def fail(*_: object, **__: object) -> None:
            raise OSError("the connection broke")

        with monkeypatch.context() as patched:
            patched.setattr(mlflow.MlflowClient, "set_terminated", fail)
            with pytest.raises(OSError, match="broke"):
                export_as(local, succeeded, "mlflow", uri)
        export_as(local, succeeded, "mlflow", uri)


class TestOpenLineage:
    @pytest.fixture(autouse=True)
    def needed(self) -> None:
        pytest.importorskip("openlineage.client")

    def lines(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def test_a_run_is_told_from_start_to_end(self, local: Local, succeeded: str, to: Path) -> None:
        assert export_as(local, succeeded, "openlineage", str(to))["events"] == 2
        record, (start, end) = local.provenance(succeeded), self.lines(to)
        assert (start["eventType"], end["eventType"]) == ("START", "COMPLETE")
        assert uuid.UUID(end["run"]["runId"]).hex == succeeded.removeprefix("run_")
        assert start["run"]["runId"] == end["run"]["runId"]
        assert end["eventTime"] == record["identity"]["ended_at"]
        assert end["inputs"][0]["facets"]["version"]["datasetVersion"] == record["data"]["digest"]
        assert [(o["name"], o["facets"]["version"]["datasetVersion"]) for o in end["outputs"]] == [
            (f"{succeeded}@{c['step']}", c["state"]["weights"]) for c in record["checkpoints"]]
        tags = {tag["key"]: tag["value"] for tag in end["run"]["facets"]["tags"]["tags"]}
        assert tags["mok.weights_digest"] == record["final"]["weights"]
        with pytest.raises(Conflict, match="is there already"):
            export_as(local, succeeded, "openlineage", str(to))

    def test_a_failure_says_why(self, local: Local, failed: str, to: Path) -> None:
        export_as(local, failed, "openlineage", str(to))
        end = self.lines(to)[-1]
        assert end["eventType"] == "FAIL" and end["run"]["facets"]["errorMessage"]["message"] == "step 1: the loss is not finite"

    def test_events_are_sent(self, local: Local, succeeded: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from openlineage.client import OpenLineageClient

        sent: list[Any] = []
        monkeypatch.setattr(OpenLineageClient, "emit", lambda _, event: sent.append(event))
        export_as(local, succeeded, "openlineage", "http://127.0.0.1:9/")
        assert [event.eventType.value for event in sent] == ["START", "COMPLETE"]


class TestCrate:
    @pytest.fixture(autouse=True)
    def needed(self) -> None:
        pytest.importorskip("rocrate")

    def test_the_crate_is_read_and_the_folder_still_verifies(self, local: Local, succeeded: str, to: Path) -> None:
        from rocrate.rocrate import ROCrate

        export_as(local, succeeded, "ro-crate", str(to))
        crate, record = ROCrate(to), local.provenance(succeeded)
        assert succeeded in crate.name and crate.root_dataset["datePublished"]
        named = {unquote(entity.id): entity for entity in crate.data_entities}
        on_disk = {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()} - {"ro-crate-metadata.json"}
        assert named.keys() == on_disk
        listed = json.loads((to / "export.json").read_text())["files"]
        assert {file["name"]: file["sha256"] for file in listed} == {
            name: entity["sha256"] for name, entity in named.items() if name != "export.json"}
        (action,) = crate.get_by_type("CreateAction")
        assert f"weights {record['final']['weights']}" in action["identifier"]
        assert action["actionStatus"] == "http://schema.org/CompletedActionStatus" and action["object"] and action["result"]
        keys = public_keys_of((to / "key.pem").read_text(), "the export")
        assert verify_export(to, keys).verdict == "INTACT"

    def test_a_folder_with_something_in_it_is_left_alone(self, local: Local, succeeded: str, to: Path) -> None:
        to.mkdir()
        (to / "mine").touch()
        with pytest.raises(Conflict, match="isn't empty"):
            export_as(local, succeeded, "ro-crate", str(to))
        assert [path.name for path in to.iterdir()] == ["mine"]


class TestModelCard:
    @pytest.fixture(autouse=True)
    def needed(self) -> None:
        pytest.importorskip("huggingface_hub")

    def test_the_front_matter_and_the_text_tell_the_same(self, local: Local, succeeded: str, to: Path) -> None:
        from huggingface_hub import ModelCard

        export_as(local, succeeded, "model-card", str(to))
        card, record = ModelCard.load(to), local.provenance(succeeded)
        data = card.data.to_dict()
        assert data["library_name"] == "mok-service" and data["mok"]["seed"] == "7"
        assert data["mok"]["weights_digest"] == record["final"]["weights"] and record["final"]["weights"] in card.text
        assert r"# a\|b \<tiny\>" in card.text, "a name is no markup"
        with pytest.raises(Conflict, match="is there already"):
            export_as(local, succeeded, "model-card", str(to))

    def test_in_a_folder_it_is_the_readme(self, local: Local, succeeded: str, tmp_path: Path) -> None:
        assert export_as(local, succeeded, "model-card", str(tmp_path))["to"] == str(tmp_path / "README.md")

    def test_a_run_that_failed_has_no_card(self, local: Local, failed: str, to: Path) -> None:
        with pytest.raises(Conflict, match="only a run that succeeded"):
            export_as(local, failed, "model-card", str(to))
        assert not to.exists()


@pytest.mark.parametrize("form", ["mlflow", "openlineage", "ro-crate", "model-card"])
def test_without_its_library_an_export_names_the_command(form: str, local: Local, succeeded: str, to: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingExtra, match=rf"pip install 'mok-service\[{form}\]'"):
        export_as(local, succeeded, form, str(to))
    assert not to.exists()


def test_another_form_is_refused(local: Local, succeeded: str) -> None:
    with pytest.raises(InvalidSpec, match="allowed: mlflow, openlineage, ro-crate, model-card"):
        export_as(local, succeeded, "pdf", "x")


def test_digests_of_a_run_that_failed_are_those_it_has(local: Local, failed: str) -> None:
    assert exporters.digests_of(described(local, failed)).keys() == {"record", "training", "data", "attestation"}
