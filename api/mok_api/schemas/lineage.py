"""Where a digest occurs, and what a run depends on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mok_api.schemas.base import DIGEST, JOB, RUN, Answer
from mok_service.runs.lineage import Relation


class Use(Answer):
    """A place where a digest occurs."""

    role: str = Field(examples=["final-weights"])
    """final-weights, step-record, step-weights, step-optimizer, checkpoint-weights, checkpoint-optimizer, checkpoint-file,
    attestation; initial-weights, training-spec, data-manifest, data-file, native-library."""
    relation: Relation
    run: str | None = Field(examples=[RUN])
    job: str | None
    step: int | None = Field(examples=[40])
    name: str | None
    """Of the file or library."""
    place: str = Field(examples=[f"/v1/runs/{RUN}"])
    """The path of what shows it."""


class Uses(Answer):
    """Where a digest occurs: what produced it first, of each role the newest first."""

    digest: str = Field(examples=[DIGEST])
    items: list[Use]
    truncated: bool
    """Whether of some role there are more than are shown."""


class LineageNode(Answer):
    id: str = Field(examples=[RUN])
    kind: Literal["run", "job", "data", "code", "weights", "verification"]
    label: str = Field(examples=["tiny"])
    facts: dict[str, str | int | None]


class LineageEdge(Answer):
    source: str = Field(examples=[RUN])
    target: str = Field(examples=[JOB])
    relation: Literal["reproduces", "audits", "bisects", "continues", "executes", "reads", "starts from", "computed with",
                      "verifies", "executed by", "compares with"]
    step: int | None
    """Of the checkpoint whose weights a run started from."""


class Lineage(Answer):
    """A graph. Edges lead from what came later to what it depends on."""

    run: str = Field(examples=[RUN])
    depth: int = Field(examples=[5])
    nodes: list[LineageNode]
    edges: list[LineageEdge]
    truncated: bool
    """Whether there is more beyond `depth`, or more than a graph holds."""
