"""pre: require a device's cost above 0, and its memory not below 0."""

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

CHECKS = (
    ("devices", "cost_milli", "cost_milli > 0"),
    ("devices", "memory_bytes", "memory_bytes >= 0"),
)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    op.execute("UPDATE devices SET cost_milli = 1 WHERE cost_milli <= 0")
    op.execute("UPDATE devices SET memory_bytes = 0 WHERE memory_bytes < 0")
    for table, name, condition in CHECKS:
        op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, condition)


def downgrade() -> None:
    for table, name, _ in CHECKS:
        op.drop_constraint(op.f(f"ck_{table}_{name}"), table, type_="check")
