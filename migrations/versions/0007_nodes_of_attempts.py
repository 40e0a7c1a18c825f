"""The node that an attempt was claimed for. Attempts of before have none, and count as being wherever there is room for them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("node", sa.String(200)))


def downgrade() -> None:
    op.drop_column("attempts", "node")
