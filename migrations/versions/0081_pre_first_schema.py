"""pre: make the schema, to which 81 migrations had come before the first release.

The number is that of the last of them, so a database that they made goes on from here.
`migrations/env.py` refuses an older one, and names the commit that brings it here.
"""

from pathlib import Path

from alembic import op

revision = "0081"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(Path(__file__).with_suffix(".sql").read_text())


def downgrade() -> None:
    raise NotImplementedError("nothing lies before the first schema: drop the database instead")
