"""pre: allow datablocks that are folders of files."""

import sqlalchemy as sa
from alembic import op

revision = "0046"
down_revision = "0045"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    op.create_table(
        "stored_files",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column(
            "touched_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_stored_files_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "sha256", name=op.f("pk_stored_files")),
    )
    op.create_index(op.f("ix_stored_files_sha256"), "stored_files", ["sha256"])
    op.create_table(
        "datablock_files",
        sa.Column("datablock_id", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["datablock_id"],
            ["datablocks.id"],
            name=op.f("fk_datablock_files_datablock_id_datablocks"),
        ),
        sa.PrimaryKeyConstraint("datablock_id", "sha256", name=op.f("pk_datablock_files")),
    )
    op.create_index(op.f("ix_datablock_files_sha256"), "datablock_files", ["sha256"])
    for name, kind in (("file_count", sa.Integer()), ("file_bytes", sa.BigInteger())):
        column = sa.Column(name, kind, server_default="0", nullable=False)
        op.add_column("datablocks", column)
    _allow_formats("'safetensors', 'npy', 'folder'")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.drop_table("datablock_files")
    op.drop_table("stored_files")
    op.execute(
        "delete from datablock_uses where datablock_id in"
        " (select id from datablocks where format = 'folder')"
    )
    op.execute(
        "delete from datablock_places where datablock_id in"
        " (select id from datablocks where format = 'folder')"
    )
    op.execute("delete from datablocks where format = 'folder'")
    for name in ("file_bytes", "file_count"):
        op.drop_column("datablocks", name)
    _allow_formats("'safetensors', 'npy'")


def _allow_formats(listed: str) -> None:
    name = op.f("ck_datablocks_format")
    op.drop_constraint(name, "datablocks", type_="check")
    op.create_check_constraint(name, "datablocks", f"format in ({listed})")
