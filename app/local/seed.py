"""Create the schema, a platform admin, and (with --tenants) three tenants to try things with.

    python -m app.local.seed [--tenants] [--island] [--secrets-key] [--device NAME=KEY ...]
                             KEYS_FILE

It can be run any number of times: what exists is kept.  Keys are written to KEYS_FILE, readable
only by its owner, as {tenant: {role: key}}.  A key in that file that the database does not know is
replaced.

With --island, this island (ROUNDHOUSE_ISLAND) gets the key in its file (ROUNDHOUSE_ISLAND_KEY).
The key is created if the file does not exist, and the public key is written beside it, for the
devices.  With --secrets-key, the key for secrets is made, unless the database already has secrets
of another one.  With --device, a device is enrolled; KEY is its host's public key, or a file with
it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.api.access import auth
from app.db.ids import new_id
from app.db.models import ApiKey, Tenant, User
from app.db.transactions import transaction
from app.identity import audit, enrolment, secrets_key
from app.messaging import outbox
from app.settings import settings
from app.storage.signing import public_key

Keys = dict[str, dict[str, str]]

ROOT = "platform"
TENANTS = {"alpha": 1000, "beta": 1000, "gamma": 2000}  # weights in thousandths
ROLES = ("tenant_admin", "member", "viewer")


def migrate() -> None:
    """Upgrade the database of DATABASE_URL to the newest schema."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[2] / "migrations"))
    command.upgrade(config, "head")


def seed(session: Session, keys: Keys, *, tenants: bool) -> Keys:
    """Create what is missing; returns all keys, including those of `keys` that still work."""
    root = _tenant(session, ROOT, parent=None, weight_milli=1000)
    seeded = {ROOT: _keys(session, root, ("platform_admin",), keys.get(ROOT, {}))}
    for name, weight_milli in TENANTS.items() if tenants else ():
        tenant = _tenant(session, name, parent=root, weight_milli=weight_milli)
        seeded[name] = _keys(session, tenant, ROLES, keys.get(name, {}))
    return seeded


def read_keys(file: Path) -> Keys:
    keys: Keys = json.loads(file.read_text()) if file.exists() else {}
    return keys


def write_keys(file: Path, keys: Keys) -> None:
    new = file.with_name(file.name + ".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(keys, out, indent=2)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)


def _tenant(session: Session, name: str, *, parent: Tenant | None, weight_milli: int) -> Tenant:
    # Tenants of the same name below other parents are different tenants.
    here = Tenant.parent_id == parent.id if parent else Tenant.parent_id.is_(None)
    tenant = session.scalars(select(Tenant).where(Tenant.name == name, here)).one_or_none()
    if tenant is None:
        tenant = Tenant(
            id=new_id("ten"),
            name=name,
            parent_id=parent.id if parent else None,
            weight_milli=weight_milli,
            tier="standard" if parent else "premium",  # the root's tier limits all others
        )
        session.add(tenant)
        session.flush()
    return tenant


def _keys(
    session: Session, tenant: Tenant, roles: tuple[str, ...], keys: dict[str, str]
) -> dict[str, str]:
    return {role: _key(session, tenant, role, keys.get(role, "")) for role in roles}


def _key(session: Session, tenant: Tenant, role: str, token: str) -> str:
    """Return the token of this role's user if the database still knows it, else a new one."""
    known = auth.id_of(token)
    if known and session.get(ApiKey, known) is not None:
        return token
    return auth.new_key(session, _user(session, tenant, role).id, role, "made at the first start")


def _user(session: Session, tenant: Tenant, name: str) -> User:
    query = select(User).where(User.tenant_id == tenant.id, User.name == name)
    user = session.scalars(query.where(User.deleted_at.is_(None))).one_or_none()
    if user is None:
        user = User(id=new_id("usr"), tenant_id=tenant.id, name=name)
        session.add(user)
        session.flush()
    return user


def _device(written: str) -> tuple[str, str]:
    name, _, key = written.partition("=")
    return name, public_key(key)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m app.local.seed", description=__doc__)
    parser.add_argument("--tenants", action="store_true", help="also alpha, beta and gamma")
    parser.add_argument("--island", action="store_true", help="give this island its key")
    parser.add_argument("--secrets-key", action="store_true", help="make the key for secrets")
    parser.add_argument("--device", action="append", default=[], metavar="NAME=KEY")
    parser.add_argument("keys_file", type=Path)
    asked = parser.parse_args()
    enrolled = [_device(each) for each in asked.device]
    migrate()
    with transaction() as session:
        audit.begin(session, audit.Call(operation="seed", user="app.local.seed"))
        if asked.secrets_key:
            try:
                secrets_key.make(session, settings().secrets_key_file)
            except secrets_key.KeyLost as error:
                parser.exit(1, f"{error}\n")
        if asked.island:
            enrolment.name_key(session, settings().island, outbox.message_keys().public)
        for name, its_key in enrolled:
            enrolment.enrol(session, name, its_key, by="app.local.seed", may_replace=True)
        keys = seed(session, read_keys(asked.keys_file), tenants=asked.tenants)
        write_keys(asked.keys_file, keys)  # before the commit, so that no created key is lost


if __name__ == "__main__":
    main()
