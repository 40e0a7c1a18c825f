"""A bisect of runs on record, on this machine: opens data, kernels and checkpoints, and hands them to `bisect.bisect`.

    from mok_service.training.bisect_records import Machine, Recorded, bisect_records

    other = Machine(library=Path("other/libmok.so"))
    report = bisect_records(Recorded("A", record, read), None, Machine(), other, [Path("data")])
    print(report.verdict, report.message)

The command `mok bisect` calls this; nothing here knows a database.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mok_service.errors import InvalidSpec
from mok_service.export import inside
from mok_service.kernels import load_backend
from mok_service.kernels.library import library_path
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.digest import sha256_file
from mok_service.provenance.measure import Read
from mok_service.spec import JobSpec, job_of_record, override_execution
from mok_service.training.bisect import Executor, Progress, Side, bisect, require_same_training, side_of
from mok_service.training.bisect_report import Counts, Report
from mok_service.training.checkpoint import CheckpointStore, State
from mok_service.training.data import open_corpus
from mok_service.training.hugging_face import initial_weights
from mok_service.training.sources import Sources


@dataclass(frozen=True)
class Recorded:
    """A run on record: what it is called, its record, and how to read the files of its checkpoints."""

    name: str
    record: Mapping[str, Any]
    read: Read


@dataclass(frozen=True)
class Machine:
    """What computes one side again. None is what the run's execution spec says, or for the library the installed one."""

    device: str | None = None
    threads: int | None = None
    isa: str = "auto"
    library: Path | None = None

    def executor(self, job: JobSpec) -> Executor:
        """Raises InvalidSpec for a device or threads that aren't allowed."""
        wish = {"device": self.device, "threads": self.threads}
        job = override_execution(job, {name: value for name, value in wish.items() if value is not None})
        execution = job.execution

        def opened() -> NativeBackend:
            return load_backend(execution.device, threads=execution.threads, isa=self.isa, library=self.library)

        name = f"{execution.device}, {self.isa}" + ("" if self.library is None else f", {self.library}")
        return Executor(name, opened, execution)


def bisect_records(
    first: Recorded,
    second: Recorded | None,
    first_machine: Machine,
    second_machine: Machine,
    data_roots: Sequence[Path],
    *,
    sources: Sources | None = None,
    progress: Progress = lambda *_: None,
) -> Report:
    """Bisect two runs of one job, or (`second` None) a run and a replay of it by `second_machine`.

    `sources` reads remote data. `progress` is called before each step, with what is done, the step and the last; an exception
    from it ends the bisect, and nothing is left behind. Raises InvalidSpec for runs of different jobs (naming the first field)
    or data that aren't there, Tampered for a chain that contradicts itself, KernelError.
    """
    recorded = [first, second or first]
    require_same_training(*(one.record for one in recorded))
    jobs = [job_of_record(one.record) for one in recorded]
    executors = [machine.executor(job) for machine, job in zip((first_machine, second_machine), jobs, strict=True)]
    names = [first.name, f"replay of {first.name} ({executors[1].name})" if second is None else second.name]
    training = jobs[0].training
    with tempfile.TemporaryDirectory(prefix="mok-bisect-") as folder:
        sides = list[Side]()
        for name, one, executor in zip(names, recorded, executors, strict=True):
            if second is None and sides:
                sides.append(Side(name, executor))
            else:
                sides.append(side_of(name, one.record, executor, _loader(one.read, Path(folder) / str(len(sides)))))
        corpus = open_corpus(training.data, data_roots, training.model.vocabulary_size, sources=sources)
        try:
            weights = initial_weights(jobs[0], data_roots, None)
        except InvalidSpec as missing:
            message = f"the weights that the job starts from aren't at hand: {missing.message}"
            return Report("INCONCLUSIVE", message, names[0], names[1], None, None, None, (), Counts())
        report = bisect(training, corpus, sides[0], sides[1], initial_weights=weights, progress=progress)
        if report.verdict != "INCONCLUSIVE":
            return report
        other = _made_by_others([first] if second is None else [first, second], executors, (first_machine, second_machine))
        return replace(report, notes=(*report.notes, *other))


def _made_by_others(recorded: Sequence[Recorded], executors: Sequence[Executor], machines: Sequence[Machine]) -> Iterator[str]:
    """Of each run that another library made than the one that computed it again here, a sentence: that may be why it doesn't
    recur."""
    for one, executor, machine, option in zip(recorded, executors, machines, ("--library", "--against-library"), strict=False):
        device = executor.execution.device
        own = str(sha256_file(machine.library or library_path(device)))
        made_by = ((one.record["code"] or {}).get("native") or {}).get(device)
        if made_by is not None and made_by != own:
            yield (f"{one.name} was made by the library {made_by}, and here {own} computed: give that one by {option}"
                   if machine.library is None else f"{one.name} was made by the library {made_by}, not by {machine.library}")


def _loader(read: Read, folder: Path) -> Callable[[CheckpointInfo], State]:
    """Brings the files of a checkpoint into a folder, and loads and checks them there."""

    def load(info: CheckpointInfo) -> State:
        for file in info.files:
            path = inside(folder, f"{info.folder}/{file.name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                out.writelines(read(info.step, file.name))
        return CheckpointStore(folder).load(info)

    return load
