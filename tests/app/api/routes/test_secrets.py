"""/v1/secrets: set, listed and removed, never shown; who may is in test_roles.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select, text

from app.db.models import AuditEvent, Secret, User
from app.db.transactions import transaction
from app.identity import secret_store
from app.settings import settings
from app.storage.sealing import CannotOpen, Keyring
from tests.app.conftest import BUNDLE, descriptor, problem, sha256

VALUE = "hf_correct-horse-battery"
KEY_VARIABLE = "ROUNDHOUSE_SECRETS_KEY"


@pytest.fixture(autouse=True)
def key_file(environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "secrets.key"
    Keyring.make(path)
    monkeypatch.setenv(KEY_VARIABLE, str(path))
    settings.cache_clear()
    yield path
    settings.cache_clear()


@pytest.fixture
def red(as_):
    return as_("red.member")


def put(client, name="HF_TOKEN", value=VALUE, **params):
    return client.put(f"/v1/secrets/{name}", json={"value": value}, params=params)


def names(client) -> list[tuple[str, str | None]]:
    items = client.get("/v1/secrets").json()["items"]
    return sorted(
        ((each["name"], each["user_id"]) for each in items), key=lambda pair: str(pair[1])
    )


def test_secret_is_set_changed_listed_and_removed(red, session):
    first, second = put(red), put(red, value="another value")
    assert (first.status_code, second.status_code) == (201, 200)
    assert (first.json()["version"], second.json()["version"]) == (1, 2)
    [listed] = red.get("/v1/secrets").json()["items"]
    assert listed == second.json()
    assert (listed["name"], listed["set_by"]) == ("HF_TOKEN", "usr_red.member")
    assert listed["last_used_at"] is None
    for answer in (first, second, red.get("/v1/secrets")):
        assert VALUE not in answer.text
        assert "another value" not in answer.text
    assert red.delete("/v1/secrets/HF_TOKEN").status_code == 204
    problem(red.delete("/v1/secrets/HF_TOKEN"), 404, "not-found")
    assert names(red) == []


def test_value_lies_encrypted_and_opens_for_its_row_only(red, session, key_file):
    put(red)
    put(red, "OTHER", "another value")
    token, other = session.scalars(select(Secret).order_by(Secret.name))
    keys = Keyring.read(key_file)
    assert secret_store.decrypted(token, keys) == VALUE
    with session.no_autoflush:
        kept = token.encrypted
        token.encrypted = other.encrypted
        with pytest.raises(CannotOpen):
            secret_store.decrypted(token, keys)
        token.encrypted, token.name = kept, "OTHER"
        with pytest.raises(CannotOpen):
            secret_store.decrypted(token, keys)
    session.rollback()


def test_no_value_is_in_any_table(red, as_, session):
    put(red)
    put(as_("red.tenant_admin"), tenant_wide=True)
    red.delete("/v1/secrets/HF_TOKEN")
    tables = session.scalars(text("select tablename from pg_tables where schemaname = 'public'"))
    for table in tables.all():
        rows = session.execute(text(f'select cast("{table}" as text) from "{table}"')).scalars()
        assert not [row for row in rows if VALUE in row or VALUE.encode().hex() in row], table


@pytest.mark.parametrize(
    ("name", "value", "pointer"),
    [
        ("1A", VALUE, "{name}"),
        ("A-B", VALUE, "{name}"),
        ("PATH", VALUE, "{name}"),
        ("ROUNDHOUSE_TASK", VALUE, "{name}"),
        ("HF_TOKEN", "q7$zz", "/value"),
        ("HF_TOKEN", "x" * 40_000, "/value"),
        ("HF_TOKEN", 12345678, "/value"),
    ],
)
def test_bad_secret_is_refused_without_its_value(name, value, pointer, red, rows):
    before = rows()
    answer = put(red, name, value)
    problem(answer, 422, "validation-error", pointer)
    assert str(value) not in answer.text
    assert rows() == before


def test_own_and_tenant_wide_secrets_of_one_name_are_two(red, as_, session):
    admin = as_("red.tenant_admin")
    put(admin, value="for all of red", tenant_wide=True)
    put(red, value="for me only")
    assert [user for _, user in names(red)] == [None, "usr_red.member"]
    assert [user for _, user in names(admin)] == [None]
    found = secret_store.find(session, "ten_red", "usr_red.member", ["HF_TOKEN", "NONE"])
    assert {name: row.user_id for name, row in found.items()} == {"HF_TOKEN": "usr_red.member"}
    found = secret_store.find(session, "ten_red", "usr_red.tenant_admin", ["HF_TOKEN"])
    assert {name: row.user_id for name, row in found.items()} == {"HF_TOKEN": None}
    assert not secret_store.find(session, "ten_blue", "usr_blue.member", ["HF_TOKEN"])


def test_secrets_of_others_are_not_seen_changed_or_removed(red, as_, session):
    put(red)
    put(as_("red.tenant_admin"), "WIDE", tenant_wide=True)
    for who in ("blue.member", "blue.tenant_admin"):
        assert names(as_(who)) == []
        problem(as_(who).delete("/v1/secrets/HF_TOKEN"), 404, "not-found")
    blue = as_("blue.tenant_admin")
    foreign, made_up = (
        [
            put(blue, "WIDE", tenant_wide=True, tenant_id=tenant),
            blue.delete("/v1/secrets/WIDE", params={"tenant_wide": True, "tenant_id": tenant}),
            blue.get("/v1/secrets", params={"tenant_id": tenant}),
        ]
        for tenant in ("ten_red", "ten_fed")
    )
    assert [answer.status_code for answer in foreign] == [422, 404, 200]
    for one, other in zip(foreign, made_up, strict=True):
        told = [each.text.replace(each.headers["x-request-id"], "") for each in (one, other)]
        assert told[0].replace("ten_red", "X") == told[1].replace("ten_fed", "X")
    assert session.scalar(select(Secret.version).where(Secret.name == "WIDE")) == 1


def test_task_names_secrets_of_its_user_or_tenant_only(red, as_):
    red.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE)
    put(red)
    put(as_("red.tenant_admin"), "WIDE", tenant_wide=True)
    put(as_("blue.member"), "BLUE")
    put(as_("red.tenant_admin"), "ADMINS")
    task = {"name": "t", "run": {"job": "train:Train"}}
    names = ["HF_TOKEN", "WIDE", "BLUE", "ADMINS", "MADE_UP"]
    body = descriptor(tasks=[task, {**task, "name": "u", "secrets": names}])
    told = problem(red.post("/v1/requests", json=body), 422, "validation-error")["errors"]
    assert [each["pointer"] for each in told] == [f"/tasks/1/secrets/{n}" for n in (2, 3, 4)]
    expected = "neither you nor your tenant has a secret X; set it with `roundhouse secret set X`"
    for each, name in zip(told, names[2:], strict=True):  # another's is told as a made-up one
        assert each["detail"].replace(name, "X") == expected


def test_member_may_not_set_a_secret_of_the_tenant(red):
    problem(put(red, tenant_wide=True), 403, "insufficient-scope")
    problem(put(red, tenant_id="ten_red"), 422, "validation-error", "?tenant_id")


def test_without_a_key_no_secret_is_stored(red, key_file):
    key_file.unlink()
    assert "cannot store secrets" in problem(put(red), 503, "unavailable")["detail"]
    assert names(red) == []


def test_each_change_is_in_the_audit_log_without_the_value(red, session):
    put(red)
    put(red, value="another value")
    red.delete("/v1/secrets/HF_TOKEN")
    rows = session.scalars(select(AuditEvent).where(AuditEvent.target_kind == "secret")).all()
    assert [(row.operation, row.action, row.user_id) for row in rows] == [
        ("setSecret", "made", "usr_red.member"),
        ("setSecret", "changed", "usr_red.member"),
        ("removeSecret", "removed", "usr_red.member"),
    ]
    assert [row.after.get("name") for row in rows] == ["HF_TOKEN", None, None]
    assert rows[1].after["set_at"] > rows[1].before["set_at"]
    assert rows[2].before["name"] == "HF_TOKEN"


def test_users_secrets_are_bounded_in_number(red, session, monkeypatch):
    monkeypatch.setattr(secret_store, "MOST", 2)
    assert [put(red, f"A{n}").status_code for n in range(3)] == [201, 201, 409]
    assert put(red, "A1").status_code == 200


def test_secrets_are_encrypted_again_with_a_new_key(red, session, key_file):
    put(red)
    Keyring.add(key_file)
    newest = Keyring.read(key_file).newest
    with transaction() as other:
        assert secret_store.encrypt_again(other) == 1
    with transaction() as other:
        assert secret_store.encrypt_again(other) == 0
    key_file.write_text(key_file.read_text().splitlines()[0])
    row = session.scalars(select(Secret)).one()
    session.refresh(row)
    assert row.key_id == newest
    assert secret_store.decrypted(row, Keyring.read(key_file)) == VALUE


def test_tenant_with_secrets_is_not_empty(as_, session):
    root = as_("root")
    made = root.post("/v1/tenants", json={"name": "green"}).json()
    put(root, tenant_wide=True, tenant_id=made["id"])
    answer = root.delete(f"/v1/tenants/{made['id']}")
    assert "secrets" in problem(answer, 409, "conflict-state")["detail"]
    assert session.scalar(select(User.id).where(User.tenant_id == made["id"])) is None
