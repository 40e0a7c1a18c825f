"""Verbs about the audit log of writes."""

from __future__ import annotations

import hashlib
from typing import Annotated

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, Url, reader

Tenant = Annotated[str | None, typer.Option(metavar="TENANT", help="Whose log; default: that of the key, or local.")]

audit_app = typer.Typer(help="The audit log of writes.", no_args_is_help=True, rich_markup_mode=None)


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    audit_app.command("list", epilog="Example: mok audit-log list")(list_entries)
    audit_app.command(epilog="Example: mok audit-log verify --tenant research")(verify)
    app.add_typer(audit_app, name="audit-log", epilog="Example: mok audit-log verify")


def list_entries(
    after: Annotated[int, typer.Option(min=-1, metavar="NUMBER", help="Only entries after this one.")] = -1,
    tenant: Tenant = None, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Print who wrote what, in order."""
    from mok_service.render import print_json, show

    with reader(url, data_dir) as source:
        found = source.audit_entries(after, tenant=tenant)
    if as_json:
        print_json({"items": found})
        return
    for entry in found:
        ids = " ".join(f"{name}={value}" for name, value in entry["ids"].items())
        show(f"{entry['number']}  {entry['at']}  {entry['actor']}  {entry['action']}  {entry['outcome']}  {ids}")


def verify(tenant: Tenant = None, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Check a tenant's whole audit log.

    Every entry, their order, and that the log seen last by this user is its beginning. Exits 0 for INTACT, 4 for TAMPERED.
    """
    from mok_service.cli.following import tell_verdict
    from mok_service.cli.seen import remember, seen_at, seen_file
    from mok_service.provenance.auditlog import check_audit_log

    with reader(url, data_dir) as source:
        head = source.audit_head(tenant=tenant)
        # What is appended while the entries are read isn't what the head is of.
        found = [entry for entry in source.audit_entries(tenant=tenant) if entry["number"] < head["length"]]
    name = hashlib.sha256(head["tenant"].encode()).hexdigest()[:16]
    place = seen_file(url, data_dir).with_suffix(f".audit-{name}.json")
    finding = check_audit_log(head["tenant"], head, found, seen_at(place))
    if finding.verdict == "INTACT":
        remember(place, head)
    tell_verdict(finding.as_dict(), as_json)
