"""The verb bisect: where two executions of a job come apart, down to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, Url, data_roots, one_of

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
    from mok_service.training.sources import Sources

    one_of(isa, ISAS, "instruction set", "--isa")
    one_of(against_isa, ISAS, "instruction set", "--against-isa")
    settings = load_settings()
    roots = data_roots(data, settings)
    machines = [Machine(device, threads, isa, library), Machine(against_device, against_threads, against_isa, against_library)]
    arguments = [first] if second is None else [first, second]
    with executions(arguments, url, data_dir) as opened, render.StepProgress("bisect", 1, quiet=as_json) as bar:
        def progress(what: str, step: int, last: int) -> None:
            bar.of(last)
            bar.state(f"{what} {step}")

        sides = [Recorded(one.name, one.record, one.read) for one in opened]
        report = bisect_records(sides[0], sides[1] if second else None, machines[0], machines[1], roots,
                                sources=Sources.of(settings), progress=progress)
    if as_json:
        render.print_json(report.as_dict())
    else:
        render.show(render.coloured(report.verdict), report.message)
        for line in render.bisect_lines(report.as_dict()):
            render.show(line)
    raise typer.Exit(EXIT_STATUS[report.verdict])
