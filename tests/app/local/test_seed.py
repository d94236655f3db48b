"""First keys are made once, and made again only where the database does not know them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from sqlalchemy import func, select

from app.db.models import Tenant, User
from app.db.transactions import transaction
from app.local.embedded_servers import embedded_postgres, temporary_home
from app.local.seed import seed as seed_rows

pytestmark = pytest.mark.slow


@pytest.fixture
def seed(tmp_path):
    with temporary_home() as home, embedded_postgres(home) as url:

        def run(*options):
            file = tmp_path / "keys.json"
            command = [sys.executable, "-m", "app.local.seed", *options, str(file)]
            env = {**os.environ, "DATABASE_URL": url}
            subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            assert file.stat().st_mode & 0o777 == 0o600
            return json.loads(file.read_text())

        run.file = tmp_path / "keys.json"
        yield run


def test_tenant_with_the_name_of_a_seeded_one_is_not_taken_for_it(session):
    with transaction() as its:
        keys = seed_rows(its, {}, tenants=True)
    with transaction() as its:
        alpha = its.scalars(select(Tenant).where(Tenant.name == "alpha")).one()
        for name in ("platform", "beta"):
            its.add(Tenant(id=f"ten_{name}", name=name, parent_id=alpha.id))
    with transaction() as its:
        assert seed_rows(its, keys, tenants=True) == keys
        assert its.scalar(select(func.count()).select_from(User)) == 10


def test_seeding_again_adds_only_what_is_missing(seed):
    first = seed()
    assert list(first) == ["platform"]
    more = seed("--tenants")
    assert more["platform"] == first["platform"]
    assert {tenant: list(keys) for tenant, keys in more.items() if tenant != "platform"} == {
        tenant: ["tenant_admin", "member", "viewer"] for tenant in ("alpha", "beta", "gamma")
    }
    assert seed("--tenants") == more
    lost = {**more, "beta": {**more["beta"], "viewer": "rh_lost"}}
    seed.file.write_text(json.dumps(lost))
    again = seed("--tenants")
    assert again["beta"].pop("viewer") != more["beta"].pop("viewer")
    assert again == more
