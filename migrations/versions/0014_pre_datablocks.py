"""pre: keep named datablocks, the tasks that need them, their uploads, and the bytes of inputs."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

PLACEMENTS = ("input_bytes", "fetched_bytes")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    op.create_table(
        "datablocks",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("tensors", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("tensor_count", sa.Integer(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=True),
        sa.Column("output", sa.Text(), server_default="", nullable=False),
        _time("created_at", server_default=sa.func.now(), nullable=False),
        _time("deleted_at", nullable=True),
        _time("freed_at", nullable=True),
        sa.CheckConstraint("version > 0", name=op.f("ck_datablocks_version")),
        sa.CheckConstraint("format in ('safetensors', 'npy')", name=op.f("ck_datablocks_format")),
        _foreign("datablocks", "tenant_id", "tenants"),
        _foreign("datablocks", "user_id", "users"),
        _foreign("datablocks", "task_id", "tasks"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_datablocks")),
        sa.UniqueConstraint(
            "tenant_id", "name", "version", name=op.f("uq_datablocks_tenant_id_name_version")
        ),
    )
    op.create_index("ix_datablocks_tenant_id_id", "datablocks", ["tenant_id", "id"])
    op.create_index("ix_datablocks_sha256", "datablocks", ["sha256"])
    op.create_index(
        "uq_datablocks_published",
        "datablocks",
        ["task_id", "output"],
        unique=True,
        postgresql_where=sa.text("task_id is not null"),
    )
    op.create_index(
        "ix_datablocks_deleted",
        "datablocks",
        ["id"],
        postgresql_where=sa.text("deleted_at is not null and freed_at is null"),
    )

    op.create_table(
        "datablock_uses",
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("port", sa.Text(), nullable=False),
        sa.Column("datablock_id", sa.Text(), nullable=False),
        _foreign("datablock_uses", "task_id", "tasks"),
        _foreign("datablock_uses", "datablock_id", "datablocks"),
        sa.PrimaryKeyConstraint("task_id", "port", name=op.f("pk_datablock_uses")),
    )
    op.create_index("ix_datablock_uses_datablock_id", "datablock_uses", ["datablock_id"])

    op.create_table(
        "uploads",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        _time("touched_at", server_default=sa.func.now(), nullable=False),
        _foreign("uploads", "tenant_id", "tenants"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
        sa.UniqueConstraint(
            "tenant_id",
            "name",
            "sha256",
            "size_bytes",
            name=op.f("uq_uploads_tenant_id_name_sha256_size_bytes"),
        ),
    )
    op.create_table(
        "upload_parts",
        sa.Column("upload_id", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        _foreign("upload_parts", "upload_id", "uploads", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("upload_id", "at", name=op.f("pk_upload_parts")),
    )
    op.create_index("ix_upload_parts_place", "upload_parts", ["place"])

    for name in PLACEMENTS:
        column = sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
        op.add_column("placements", column)


def downgrade() -> None:
    for name in PLACEMENTS:
        op.drop_column("placements", name)
    for name in ("upload_parts", "uploads", "datablock_uses", "datablocks"):
        op.drop_table(name)


def _time(name: str, **how: object) -> sa.Column:
    return sa.Column(name, sa.DateTime(timezone=True), **how)


def _foreign(table: str, column: str, to: str, **how: str) -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_{table}_{column}_{to}")
    return sa.ForeignKeyConstraint([column], [f"{to}.id"], name=name, **how)
