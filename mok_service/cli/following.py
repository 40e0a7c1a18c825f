"""Following a run to its end, and the exit status that its outcome means."""

from __future__ import annotations

from typing import Any, Final

import typer

from mok_service.client import Client
from mok_service.render import StepProgress, coloured, print_json, report_lines, show

EXIT_STATUS: Final = {"INTACT": 0, "AUDITED": 0, "REPRODUCED": 0, "DIVERGED": 3, "TAMPERED": 4, "INCONCLUSIVE": 5}


def follow(client: Client, run: dict[str, Any], *, label: str | None = None, quiet: bool = False) -> dict[str, Any]:
    """Show a run's progress until it has ended; the run as it then is."""
    with StepProgress(label or run["id"], run["steps"], quiet=quiet) as progress:
        progress.state(run["status"])
        for event in client.events(run["id"]):
            payload = event["payload"]
            if event["type"] == "run.status":
                progress.state(payload["status"])
            elif event["type"] == "step":
                progress.step(payload["step"], payload["loss"], payload["tokens"], payload["seconds"])
    return client.run(run["id"])


def exit_for_run(run: dict[str, Any], as_json: bool) -> None:
    """Say how a run ended. Exits 1 unless it succeeded; a reproduction exits by its verdict."""
    if as_json:
        print_json(run)
    else:
        show(coloured(run["status"]), f"{run['id']}" + (f": {run['message']}" if run["message"] else ""))
        if run["weights"]:
            show(f"weights {run['weights']}")
    if run["status"] != "succeeded":
        raise typer.Exit(1)


def exit_for_verdict(client: Client, run: dict[str, Any], as_json: bool) -> None:
    """Say what a reproduction showed, and exit as `verify` does."""
    verdict = newest_verdict(client, run)
    if verdict is None:
        exit_for_run(run, as_json)
        return
    tell_verdict(verdict, as_json)


def newest_verdict(client: Client, run: dict[str, Any]) -> dict[str, Any] | None:
    """The verification that a reproduction stored, or None when it ended without one."""
    return next((v for v in client.verifications(run["id"]) if v["executed_by"] == run["id"] and v["verdict"]), None)


def follow_verification(client: Client, verification: dict[str, Any], *, quiet: bool = False) -> dict[str, Any]:
    """Show the progress of an audit, a rerun or a bisect until it has ended; the verification as it then is."""
    if verification["executed_by"] is None:  # it needed no run to come to its verdict
        return verification
    progress = verification["progress"]
    with StepProgress(f"{verification['level']} of {verification['run']}", progress["of"], quiet=quiet) as bar:
        bar.state(verification["status"])
        done = 0
        for event in client.events(verification["executed_by"]):
            payload = event["payload"]
            if event["type"] == "run.status":
                bar.state(payload["status"])
            elif event["type"] == "progress":
                bar.of(payload["of"])
                bar.step(max(0, payload["step"] - 1), None, None, None)
                bar.state(f"{payload['what']} {payload['step']}")
            elif event["type"] == "step" and payload["step"] > 0:
                done += 1
                bar.step(done, payload["loss"], payload["tokens"], payload["seconds"])
    return client.verification(verification["id"])


def exit_for_verification(verification: dict[str, Any], as_json: bool) -> None:
    """Say what an audit, a rerun or a bisect showed, and exit by its verdict; 1 when it failed or was cancelled."""
    if verification["status"] == "done":
        tell_verdict(verification, as_json)
    if as_json:
        print_json(verification)
    else:
        show(coloured(verification["status"]), verification["message"] or verification["id"])
    raise typer.Exit(1)


def tell_verdict(verification: dict[str, Any], as_json: bool, *, quiet: bool = False) -> None:
    """Print a verdict, unless it's `quiet`, and exit with its status."""
    if as_json and not quiet:
        print_json(verification)
    elif not quiet:
        show(coloured(verification["verdict"]), verification["message"])
        report = verification.get("report")
        for line in report_lines(report):
            show(line)
        if report is None and (verification["expected"] is not None or verification["got"] is not None):
            show(f"  step {verification['step']}, {verification['field']}: expected {verification['expected']}, "
                 f"got {verification['got']}")
    raise typer.Exit(EXIT_STATUS[verification["verdict"]])
