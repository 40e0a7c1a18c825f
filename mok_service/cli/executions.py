"""RUN|FOLDER arguments: a run of a service or a data folder, or what `mok export` wrote; its record and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mok_service.cli.options import reader, run_id

if TYPE_CHECKING:
    from mok_service.cli.local import Local
    from mok_service.client import Client
    from mok_service.provenance.elements import TensorDifference
    from mok_service.provenance.measure import Read

TENSORS_MAX: Final = 20  # shown, before the rest is counted


@dataclass(frozen=True)
class Execution:
    """A run that can be read: what it is called, its record, and the files of its checkpoints."""

    name: str
    record: dict[str, Any]
    read: Read


@contextmanager
def executions(arguments: Sequence[str], url: str | None, data_dir: Path) -> Iterator[list[Execution]]:
    """The runs that these arguments stand for. A service or data folder is opened only when one of them is a run's id."""
    from mok_service.cli.verify import is_folder

    with ExitStack() as stack:
        source: Client | Local | None = None
        found = []
        for text in arguments:
            if is_folder(text):
                found.append(_exported(Path(text)))
                continue
            if source is None:
                source = stack.enter_context(reader(url, data_dir))
            found.append(_stored(source, run_id(source, text)))
        yield found


def _stored(source: Client | Local, run: str) -> Execution:
    return Execution(run, source.provenance(run), lambda step, name: source.checkpoint_file(run, step, name))


def _exported(folder: Path) -> Execution:
    from mok_service.errors import NotFound
    from mok_service.export import RECORD, checkpoint_reader, load_document

    if not (folder / RECORD).is_file():
        raise NotFound(f"{folder} holds no exported run: there is no {RECORD}", folder=str(folder))
    record = load_document(folder, RECORD)
    return Execution(str(folder), record, checkpoint_reader(folder, record))


@dataclass(frozen=True)
class DifferingTensors:
    """How the first checkpoints of two runs that differ do so; `step` is None where no checkpoint of both does."""

    step: int | None
    tensors: tuple[TensorDifference, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"checkpoint": self.step, "tensors": [tensor.as_dict() for tensor in self.tensors]}

    def lines(self) -> Iterator[str]:
        if self.step is None:
            yield "no checkpoint that both have differs"
            return
        yield f"checkpoint of step {self.step}: {len(self.tensors)} tensors differ"
        yield from (f"  {tensor}" for tensor in self.tensors[:TENSORS_MAX])
        if len(self.tensors) > TENSORS_MAX:
            yield f"  and {len(self.tensors) - TENSORS_MAX} more"


def differing_tensors(first: Execution, second: Execution) -> DifferingTensors:
    """Compare the bytes of the first checkpoint that both have and that differs, by the digests on record."""
    from mok_service.provenance.elements import compare_checkpoints

    states = [{c["step"]: c["state"] for c in one.record["checkpoints"] if not c["deleted_at"]} for one in (first, second)]
    for step in sorted(states[0].keys() & states[1].keys()):
        if states[0][step] != states[1][step]:
            return DifferingTensors(step, tuple(compare_checkpoints(step, first.read, second.read)))
    return DifferingTensors(None, ())
