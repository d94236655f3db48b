"""pre: keep files that name packages, and the locks of these packages."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None

JSONB = postgresql.JSONB(astext_type=sa.Text())
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    op.add_column("bundles", sa.Column("package_files", JSONB, nullable=True))
    op.create_table(
        "package_files",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_package_files_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "sha256", name=op.f("pk_package_files")),
    )
    op.create_table(
        "environments",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("sort", sa.Text(), nullable=False),
        sa.Column("source_sha256", sa.Text(), nullable=False),
        sa.Column("python", sa.Text(), nullable=False),
        sa.Column("alone", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), server_default="locking", nullable=False),
        sa.Column("platform", JSONB, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("lock_sha256", sa.Text(), nullable=True),
        sa.Column("packages", JSONB, server_default=sa.text("'[]'"), nullable=False),
        sa.Column("message", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column("claimed_until", TIME, nullable=True),
        sa.Column("tried_at", TIME, nullable=True),
        sa.Column("locked_at", TIME, nullable=True),
        sa.Column("took_us", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint(
            "state in ('locking', 'locked', 'failed', 'stale')",
            name=op.f("ck_environments_state"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_environments_tenant_id_tenants")
        ),
        sa.ForeignKeyConstraint(
            ["user_id"], ["users.id"], name=op.f("fk_environments_user_id_users")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environments")),
        sa.UniqueConstraint(
            "tenant_id",
            "source_sha256",
            "sort",
            "python",
            "alone",
            name=op.f("uq_environments_tenant_id_source_sha256_sort_python_alone"),
        ),
    )
    op.create_index(
        "ix_environments_locking",
        "environments",
        ["id"],
        postgresql_where=sa.text("state = 'locking'"),
    )
    op.create_index(
        "ix_environments_lock_sha256",
        "environments",
        ["lock_sha256"],
        postgresql_where=sa.text("lock_sha256 is not null"),
    )
    op.create_index("ix_environments_tenant_id_id", "environments", ["tenant_id", "id"])
    op.add_column("requests", sa.Column("environment_id", sa.Text(), nullable=True))
    op.create_foreign_key(
        op.f("fk_requests_environment_id_environments"),
        "requests",
        "environments",
        ["environment_id"],
        ["id"],
    )
    op.create_index(
        "ix_requests_environment_id",
        "requests",
        ["environment_id", "submitted_at"],
        postgresql_where=sa.text("environment_id is not null"),
    )


def downgrade() -> None:
    op.drop_index("ix_requests_environment_id", "requests")
    op.drop_column("requests", "environment_id")
    op.drop_table("environments")
    op.drop_table("package_files")
    op.drop_column("bundles", "package_files")
