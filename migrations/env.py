"""How Alembic reaches the database: by the connection that the service hands over, or by MOK_DATABASE_URL."""

from __future__ import annotations

import os
from typing import Any, Literal

from alembic import context
from sqlalchemy import Connection

from mok_service.db.session import Database
from mok_service.db.tables import DigestText, Json, Sentence, UtcTime, metadata


def render_item(kind: str, item: Any, _context: Any) -> str | Literal[False]:
    """Migrations name plain types: they must not change when ours do."""
    if kind == "type":
        if isinstance(item, UtcTime):
            return "sa.DateTime(timezone=True)"
        if isinstance(item, Json | Sentence):
            return "sa.Text()"
        if isinstance(item, DigestText):
            return "sa.String(71)"
    return False


def run(connection: Connection) -> None:
    context.configure(
        connection=connection, target_metadata=metadata, render_item=render_item, render_as_batch=True, transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    database = Database(os.environ["MOK_DATABASE_URL"])
    with database.write() as connection:
        run(connection)
    database.close()
