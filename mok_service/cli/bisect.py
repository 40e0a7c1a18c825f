"""The verb bisect: where two executions of a job come apart, down to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, Url

if TYPE_CHECKING:
    from mok_service.training.bisect_report import OperationFinding, Report, TensorFinding

Device = Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Computes the first again; default: as in its spec.")]
Threads = Annotated[int | None, typer.Option(min=0, help="CPU threads for the first; 0 for all.")]
Isa = Annotated[str, typer.Option(metavar="ISA", help="Instruction set for the first: auto, portable, avx2, avx512.")]
Library = Annotated[Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False,
                                              help="Native library for the first; default: the installed one.")]
AgainstDevice = Annotated[str | None, typer.Option(metavar="cpu|cuda", help="The same for the second, or for the replay.")]
AgainstThreads = Annotated[int | None, typer.Option(min=0, help="The same for the second.")]
AgainstIsa = Annotated[str, typer.Option(metavar="ISA", help="The same for the second.")]
AgainstLibrary = Annotated[Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False,
                                                     help="The same for the second.")]


def add_to(app: typer.Typer) -> None:
    """Add this verb to the command."""
    app.command(epilog="Example: mok bisect RUN1 RUN2; or mok bisect RUN --against-library build/libmok.so")(bisect)


def bisect(
    first: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="Id of a run; latest for the newest; or a folder that "
                                                                    "`mok export` wrote.")],
    second: Annotated[str | None, typer.Argument(metavar="RUN|FOLDER", help="The other one; without it, a replay of the "
                                                                            "first.")] = None,
    device: Device = None, threads: Threads = None, isa: Isa = "auto", library: Library = None,
    against_device: AgainstDevice = None, against_threads: AgainstThreads = None, against_isa: AgainstIsa = "auto",
    against_library: AgainstLibrary = None,
    data: Annotated[list[Path] | None, typer.Option("--data", metavar="FOLDER", help="Where data files lie; default: "
                                                    "MOK_DATA_ROOTS, else the working folder.")] = None,
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Find where two executions of a job come apart.

    The first step, the first operation in it, the first tensor and element, and both bit patterns. Computes on this machine,
    from the newest checkpoint that both have in common. Exits 0 for REPRODUCED (nothing differs), 3 for DIVERGED, 5 for
    INCONCLUSIVE.
    """
    from mok_service import render
    from mok_service.cli.executions import executions
    from mok_service.cli.following import EXIT_STATUS
    from mok_service.kernels.abi import ISAS
    from mok_service.settings import load_settings
    from mok_service.training.bisect_records import Machine, Recorded, bisect_records

    for value, option in ((isa, "--isa"), (against_isa, "--against-isa")):
        if value not in ISAS:
            raise typer.BadParameter(f"{value!r}; allowed: {', '.join(ISAS)}", param_hint=option)
    roots = data or list(load_settings().data_roots) or [Path.cwd()]
    machines = [Machine(device, threads, isa, library), Machine(against_device, against_threads, against_isa, against_library)]
    arguments = [first] if second is None else [first, second]
    with executions(arguments, url, data_dir) as opened, render.StepProgress("bisect", 1, quiet=as_json) as bar:
        def progress(what: str, step: int, last: int) -> None:
            bar.of(last)
            bar.state(f"{what} {step}")

        sides = [Recorded(one.name, one.record, one.read) for one in opened]
        report = bisect_records(sides[0], sides[1] if second else None, machines[0], machines[1], roots, progress=progress)
    if as_json:
        render.print_json(report.as_dict())
    else:
        render.show(render.coloured(report.verdict), report.message)
        for line in _lines(report):
            render.show(line)
    raise typer.Exit(EXIT_STATUS[report.verdict])


def _lines(report: Report) -> Iterator[str]:
    if report.operation is not None:
        yield from _operation_lines(report.operation)
    if report.state is not None:
        yield from _tensor_lines(f"state after step {report.step}: {report.state.argument}", report.state)
    yield from (f"  note        {note}" for note in report.notes)
    counts = report.counts
    yield (f"  it took     {counts.heads} heads compared, {counts.steps} steps computed, {counts.operation_digests} operation "
           f"digests, {counts.prefixes} of their prefixes compared")


def _operation_lines(found: OperationFinding) -> Iterator[str]:
    yield f"  operation   {found.operation}, number {found.number} of {found.of}: {found.place}"
    yield "  inputs      " + ("equal, so it is this operation itself" if not found.inputs else "differ:")
    for tensor in found.inputs:
        yield from _tensor_lines(f"input {tensor.argument}", tensor)
    for tensor in found.outputs:
        yield from _tensor_lines(f"output {tensor.argument}", tensor)


def _tensor_lines(what: str, found: TensorFinding) -> Iterator[str]:
    name = f", {found.name}" if found.name else ""
    element = found.element
    at = ", ".join(map(str, element.index))
    yield f"  {what}{name}: {found.differing:,} of {found.elements:,} elements differ, the first is [{at}]"
    yield f"    first     {element.first_bits}  {element.first!r}"
    yield f"    second    {element.second_bits}  {element.second!r}"
