"""The command `mok`. Each module holds a group of verbs; what is heavy (torch, Ray, FastAPI) is imported by the verb that
needs it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import typer

from mok_service.cli import (
    apikeys,
    auditlog,
    bisect,
    checkpoints,
    db,
    demo,
    find,
    jobs,
    lineage,
    proof,
    quota,
    runs,
    services,
    train,
    verify,
)
from mok_service.errors import MokError

EPILOG = ("Exit status: 0 what was asked is true (INTACT, AUDITED, REPRODUCED, equal, succeeded); 1 failed; 2 usage; 3 DIVERGED "
          "or different; 4 TAMPERED; 5 INCONCLUSIVE; 6 not found; 7 service unreachable or stream lost; 130 interrupted.")

app = typer.Typer(
    name="mok", help="Train Mixture-of-Experts models so that the same job gives the same bits, and prove it.", epilog=EPILOG,
    no_args_is_help=True, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for module in (demo, services, apikeys, auditlog, db, jobs, runs, checkpoints, find, lineage, verify, bisect, proof, quota,
               train):
    module.add_to(app)


def main() -> None:
    """The entry point of the command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line; the exit status."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        app(list(arguments), prog_name="mok")
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 1
    except MokError as error:
        _say(error, as_json="--json" in arguments)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone: as with `mok runs | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends a verb as Ctrl-C does, so that it cleans up."""
    raise KeyboardInterrupt


def _say(error: MokError, *, as_json: bool) -> None:
    if as_json:
        value = {"error": {"code": error.code, "message": error.message, "detail": error.detail}}
        print(json.dumps(value, ensure_ascii=False, default=str), file=sys.stderr)
    else:
        print(f"mok: {error.message}", file=sys.stderr)
