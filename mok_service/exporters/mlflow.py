"""A run as a run of MLflow: parameters, metrics by step, digests as tags."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from mok_service.errors import Conflict
from mok_service.exporters import digests_of, library
from mok_service.provenance.chain import float_from_bits

EXPERIMENT: Final = "mok"
METRICS_MAX, PARAMS_MAX, TAGS_MAX = 1000, 100, 100  # of one request
VALUE_LENGTH_MAX: Final = 5000
_STATUS: Final = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


def write_mlflow(record: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """Make a run in the experiment `mok` of a tracking server, e.g. `sqlite:////absolute/mlflow.db` or `http://host:5000`.

    Numbers that aren't finite are left out of the metrics (MLflow would store infinity as the largest number); the tag
    `mok.non_finite` names them. Raises Conflict when the run is there already.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # exporting a run tells nobody else of it
    entities = library("mlflow.entities")
    client = library("mlflow").MlflowClient(tracking_uri=uri)
    run_id = record["identity"]["run"]
    experiment = client.get_experiment_by_name(EXPERIMENT)
    experiment_id = client.create_experiment(EXPERIMENT) if experiment is None else experiment.experiment_id
    there = client.search_runs([experiment_id], filter_string=f"tags.\"mok.run\" = '{run_id}'", max_results=1)
    if there:
        known = there[0].info.run_id
        raise Conflict(f"{run_id} is in that experiment already, as {known}", run=run_id, mlflow_run=known)
    points, left_out = metrics(record)
    identity = record["identity"]
    made = client.create_run(experiment_id, start_time=_milliseconds(identity["created_at"]),
                             run_name=record["spec"]["training"]["name"])
    mlflow_run = made.info.run_id
    try:
        for batch in _batches([entities.Param(*pair) for pair in parameters(record).items()], PARAMS_MAX):
            client.log_batch(mlflow_run, params=batch)
        for batch in _batches([entities.Metric(name, value, at, step) for name, value, at, step in points], METRICS_MAX):
            client.log_batch(mlflow_run, metrics=batch)
        for batch in _batches([entities.RunTag(*pair) for pair in tags(record, left_out).items()], TAGS_MAX):
            client.log_batch(mlflow_run, tags=batch)
        if identity["status"] in _STATUS:
            client.set_terminated(mlflow_run, _STATUS[identity["status"]], end_time=_milliseconds(identity["ended_at"]))
    except BaseException:
        client.delete_run(mlflow_run)  # half a run would pass for a whole one
        raise
    return {"run": run_id, "format": "mlflow", "to": uri, "mlflow_run": mlflow_run, "metrics": len(points)}


def parameters(record: Mapping[str, Any]) -> dict[str, str]:
    """Every value of the two specs by its path, as text. MLflow cuts what is longer than it stores."""
    values = {"training": record["spec"]["training"], "execution": record["spec"]["execution"]}
    return {path: str(value)[:VALUE_LENGTH_MAX] for path, value in _leaves("", values)}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item)
    else:
        yield path, value


def metrics(record: Mapping[str, Any]) -> tuple[list[tuple[str, float, int, int]], list[str]]:
    """(name, value, milliseconds, step) of all that is finite, and "name at step s" of what isn't."""
    points: list[tuple[str, float, int, int]] = []
    left_out = []
    for row in record["chain"]["records"]:
        body, at = row["body"], _milliseconds(row["at"])
        step = int(body["step"])
        values: dict[str, float | None] = {
            "loss": None if body["loss"] is None else float_from_bits(body["loss"]),
            "grad_norm": None if body["grad_norm"] is None else float_from_bits(body["grad_norm"]),
        }
        if step:
            values |= {"learning_rate": row["learning_rate"], "seconds": row["seconds"],
                       **{name: math.nan if value is None else value for name, value in row["metrics"].items()}}
        if body["tokens"] is not None and row["seconds"]:
            values |= {"tokens": float(body["tokens"]), "tokens_per_second": int(body["tokens"]) / row["seconds"]}
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                points.append((name, value, at, step))
            elif value is not None:
                left_out.append(f"{name} at step {step}")
    return points, left_out


def tags(record: Mapping[str, Any], left_out: list[str]) -> dict[str, str]:
    """What the run is, and the digests that prove it."""
    identity, attestation = record["identity"], record["attestation"] or {}
    same = {f"mok.{name}": identity[name] for name in ("run", "job", "kind", "reproduces", "status", "verdict", "message")}
    found = {**same, **{f"mok.{name}_digest": digest for name, digest in digests_of(record).items()},
             "mok.arithmetic": record["arithmetic"]["name"], "mok.seed": record["seeds"]["seed"],
             "mok.log_index": attestation.get("log_index"), "mok.non_finite": ", ".join(left_out) or None,
             "mlflow.source.name": "mok-service"}
    return {name: str(value)[:VALUE_LENGTH_MAX] for name, value in found.items() if value is not None}


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), size):
        yield items[first:first + size]


def _milliseconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)
