"""The job specification: reading it, resolving it, its digest, its cost. Imports neither torch, Ray nor FastAPI."""

from mok_service.spec.capacity import (
    CudaDevice,
    Estimate,
    Machine,
    Memory,
    ParameterCount,
    check_runnable,
    count_parameters,
    estimate,
)
from mok_service.spec.presets import PRESETS, Preset, preset_of
from mok_service.spec.reading import job_of_record, load_job, parse_job
from mok_service.spec.resolution import (
    draw_seed,
    job_json_schema,
    override_execution,
    resolve,
    training_digest,
    training_document,
)
from mok_service.spec.schema import (
    SEED_MAX,
    BatchSpec,
    DataSpec,
    ExecutionSpec,
    InitFrom,
    JobSpec,
    ModelSpec,
    OptimizerSpec,
    RemoteFile,
    TrainingSpec,
)

__all__ = [
    "PRESETS", "SEED_MAX", "BatchSpec", "CudaDevice", "DataSpec", "Estimate", "ExecutionSpec", "InitFrom", "JobSpec", "Machine",
    "Memory", "ModelSpec", "OptimizerSpec", "ParameterCount", "Preset", "RemoteFile", "TrainingSpec", "check_runnable",
    "count_parameters", "draw_seed", "estimate", "job_json_schema", "job_of_record", "load_job", "override_execution",
    "parse_job", "preset_of", "resolve", "training_digest", "training_document",
]
