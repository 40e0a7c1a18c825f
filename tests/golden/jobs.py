"""Whole jobs whose digests are stored: they hold on every machine and every backend of the arithmetic they name.

`python -m tests.golden.jobs --write` stores them anew; do so only together with a new version of the arithmetic.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mok_service.kernels import load_backend
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.digest import canonical_digest
from mok_service.spec import JobSpec
from tests.training.jobs import job, run

STORED = Path(__file__).with_name("jobs.json")

_TINY: dict[str, Any] = {
    "hidden_size": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_size": 32, "experts": 8, "expert_intermediate_size": 512,
    "vocabulary_size": 512,
}  # fmt: skip
_RAGGED: dict[str, Any] = {
    "hidden_size": 45, "heads": 3, "kv_heads": 1, "head_size": 10, "experts": 7, "top_k": 3, "expert_intermediate_size": 29,
    "vocabulary_size": 301, "qk_norm": "full",
}  # fmt: skip
_TWO_WAVES = {"sequences": 4, "group_sequences": 1, "shards": 2}

JOBS: dict[str, dict[str, Any]] = {
    "tiny": {"model": _TINY, "sequence_length": 64, "batch": _TWO_WAVES},
    "shared expert and auxiliary losses": {
        "model": {"shared_expert_intermediate_size": 24, "aux_loss_coefficient": 0.01, "z_loss_coefficient": 0.001},
        "optimizer": {"clipping": "previous", "max_norm": 0.7},
    },
    "ragged": {"model": _RAGGED, "sequence_length": 37, "batch": {"sequences": 5, "group_sequences": 2}},
    "an expert without tokens": {"model": {"experts": 50, "top_k": 1}, "sequence_length": 21, "batch": {"sequences": 2}},
    "every token to one expert": {"model": {"experts": 1, "top_k": 1}, "sequence_length": 33},
}


def golden_job(name: str, precision: str) -> JobSpec:
    return job(**JOBS[name], precision=precision, steps=20, digest_interval=10)


def summary(spec: JobSpec, backend: NativeBackend) -> dict[str, str]:
    """What is stored of a job: every loss, the last norm, the final state, the head of the chain."""
    records = list(run(spec, backend))
    last = records[-1]
    assert last.state is not None and last.grad_norm_bits is not None
    return {
        "losses": str(canonical_digest({"type": "mok.losses", "bits": [r.loss_bits for r in records]})),
        "grad_norm": last.grad_norm_bits,
        **last.state.as_dict(),
        "head": str(last.head()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="JOB", help=f"by default all: {', '.join(JOBS)}")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--backend", default="cpu")
    arguments = parser.parse_args()
    backend = load_backend(arguments.backend)
    names = arguments.names or list(JOBS)
    got = {f"{name}, {p}": summary(golden_job(name, p), backend) for name in names for p in ("fp32", "bf16")}
    info = backend.info()
    if arguments.write:
        STORED.write_text(json.dumps({"arithmetic": info["arithmetic"], "jobs": got}, indent=2) + "\n")
    print(json.dumps({"arithmetic": info["arithmetic"], "build": info["build"], "jobs": got}, indent=2))


if __name__ == "__main__":
    main()
