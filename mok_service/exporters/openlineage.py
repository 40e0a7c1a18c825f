"""A run as events of OpenLineage: what it read, what it wrote, how it ended."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mok_service.errors import Conflict, ServiceUnreachable
from mok_service.exporters import digests_of, library

PRODUCER: Final = "urn:mok-service"
_ENDS: Final = {"succeeded": "COMPLETE", "failed": "FAIL", "cancelled": "ABORT"}


def write_events(record: Mapping[str, Any], to: str) -> dict[str, Any]:
    """Write the run's events into a new file, one JSON a line, or send them to an http or https URL.

    Raises Conflict for a run that hasn't started, or a file that is there; ServiceUnreachable when the URL takes no events.
    """
    made = events(record)
    if to.startswith(("http://", "https://")):
        _send(made, to)
    else:
        text = "".join(library("openlineage.client.serde").Serde.to_json(event) + "\n" for event in made)
        try:
            with Path(to).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise Conflict(f"{to} is there already; choose another file", file=to) from None
    return {"run": record["identity"]["run"], "format": "openlineage", "to": to, "events": len(made)}


def _send(made: list[Any], url: str) -> None:
    http = library("openlineage.client.transport.http")
    client = library("openlineage.client").OpenLineageClient(transport=http.HttpTransport(http.HttpConfig(url=url)))
    try:
        for event in made:
            client.emit(event)
        client.close()
    except OSError as error:  # what requests raises is one
        raise ServiceUnreachable(f"{url} took no events: {error}", url=url) from None


def events(record: Mapping[str, Any]) -> list[Any]:
    """START, and once the run has ended COMPLETE, FAIL or ABORT, as OpenLineage's own objects."""
    identity = record["identity"]
    if identity["started_at"] is None:
        raise Conflict(f"{identity['run']} hasn't started: there is nothing to tell", run=identity["run"])
    event = library("openlineage.client.event_v2")
    same = {"producer": PRODUCER, "job": _job(record), "inputs": _inputs(record)}
    made = [event.RunEvent(eventType=event.RunState.START, eventTime=identity["started_at"], run=_run(record), **same)]
    if identity["status"] in _ENDS:
        kind = getattr(event.RunState, _ENDS[identity["status"]])
        made.append(event.RunEvent(eventType=kind, eventTime=identity["ended_at"], run=_run(record, ended=True),
                                   outputs=_outputs(record), **same))
    return made


def _run(record: Mapping[str, Any], *, ended: bool = False) -> Any:
    """The id of a run is a UUID already. Its digests are a facet of ours, and tags that every reader shows."""
    identity, facets = record["identity"], {}
    tag = library("openlineage.client.generated.tags_run")
    found = {"mok.run": identity["run"], "mok.job": identity["job"], "mok.kind": identity["kind"],
             "mok.seed": record["seeds"]["seed"]}
    if identity["reproduces"] is not None:
        found["mok.reproduces"] = identity["reproduces"]
    if ended:
        found |= {f"mok.{name}_digest": digest for name, digest in digests_of(record).items()}
        if identity["message"] is not None:
            error = library("openlineage.client.generated.error_message_run")
            facets["errorMessage"] = error.ErrorMessageRunFacet(message=identity["message"], programmingLanguage="Python")
    facets["tags"] = tag.TagsRunFacet(tags=[tag.TagsRunFacetFields(key=key, value=value, source="MOK")
                                            for key, value in found.items()])
    return library("openlineage.client.event_v2").Run(runId=str(uuid.UUID(identity["run"].partition("_")[2])), facets=facets)


def _job(record: Mapping[str, Any]) -> Any:
    job_type = library("openlineage.client.generated.job_type_job")
    facets = {"jobType": job_type.JobTypeJobFacet(processingType="BATCH", integration="MOK", jobType="TRAINING")}
    return library("openlineage.client.event_v2").Job(
        namespace=f"mok-service/{record['identity']['tenant']}", name=record["spec"]["training"]["name"], facets=facets)


def _version(digest: str) -> dict[str, Any]:
    return {"version": library("openlineage.client.generated.dataset_version_dataset").DatasetVersionDatasetFacet(
        datasetVersion=digest)}


def _inputs(record: Mapping[str, Any]) -> list[Any]:
    """The data, at the version that their manifest is; and the weights that the run started from."""
    dataset, found = library("openlineage.client.event_v2").InputDataset, []
    data, start = record["data"], record["spec"]["training"]["init_from"]
    if data is not None:
        found.append(dataset(namespace="mok-service/data", name=data["manifest"]["source"], facets=_version(data["digest"])))
    if start is not None:
        facets = {} if start["weights"] is None else _version(start["weights"])
        found.append(dataset(namespace="mok-service/weights", name=start["source"], facets=facets))
    return found


def _outputs(record: Mapping[str, Any]) -> list[Any]:
    """Every checkpoint, named as `init_from` names it, at the version that its weights are."""
    dataset, run = library("openlineage.client.event_v2").OutputDataset, record["identity"]["run"]
    return [dataset(namespace="mok-service/weights", name=f"{run}@{checkpoint['step']}",
                    facets=_version(checkpoint["state"]["weights"])) for checkpoint in record["checkpoints"]]
