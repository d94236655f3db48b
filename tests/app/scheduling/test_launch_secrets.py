"""A launch has the secrets that its task names, sealed to its host, and each use is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import delete, select, text

from app.core.model.protocol.messages import about_secrets, decode
from app.core.model.protocol.wellformed import SENTENCE_MOST
from app.core.model.provisions.variables import MAX_SECRETS
from app.db.models import AuditEvent, Enrolment, OutboxOrder, Secret, Task
from app.db.transactions import transaction
from app.identity import secret_store
from app.settings import settings
from app.storage.sealing import CannotOpen, HostKey
from app.storage.signing import Signer
from tests.app.scheduling.test_journal import decide, hear, task

__all__ = ["task"]  # a fixture

MINE, WIDE = "hf_mine-and-nobody-elses", "hf_for-all-of-the-tenant"


@pytest.fixture
def host(session, tmp_path: Path) -> HostKey:
    """The key of the host h, whose device h.0 is enrolled and was heard."""
    signer = Signer.at(tmp_path / "signing.key")
    key = HostKey.at(tmp_path / "sealing.key")
    session.add(Enrolment(device_id="h.0", key=signer.public, enrolled_by="root"))
    hear(session, key=signer.public, sealing_key=key.announced(signer))
    return key


@pytest.fixture
def wants(session, task):
    """The task names two secrets; its user and its tenant have one of one name."""
    put(session, "HF_TOKEN", MINE, "usr_a")
    put(session, "HF_TOKEN", WIDE, None)
    put(session, "OTHER", WIDE, None)
    task.descriptor = {**task.descriptor, "secrets": ["HF_TOKEN", "OTHER"]}
    session.flush()
    return task


def put(session, name: str, value: str, user: str | None) -> Secret:
    return secret_store.put(session, "ten_a", user, name, value, by="usr_a")[0]


def launched(session, task: Task) -> dict:
    session.execute(delete(OutboxOrder))
    decide(session, task, "Launch", devices=("h.0",))
    [order] = session.scalars(select(OutboxOrder))
    return decode(order.body).secrets


def again(session, task: Task) -> dict:
    """The secrets of its next launch."""
    task.state, task.seat = "waiting", None
    session.execute(text("update placements set ended_at = now()"))
    session.expire_all()
    return launched(session, task)


def test_launch_has_the_secrets_sealed_to_its_host(session, wants, host):
    secrets = launched(session, wants)
    values = json.loads(host.opened(secrets["sealed"], about_secrets(wants.id, 1, "h.0")))
    assert values == {"HF_TOKEN": MINE, "OTHER": WIDE}
    assert secrets.keys() == {"sealed", "mark"}
    for other in (("tsk_b", 1, "h.0"), (wants.id, 2, "h.0"), (wants.id, 1, "h.1")):
        with pytest.raises(CannotOpen):
            host.opened(secrets["sealed"], about_secrets(*other))


def test_mark_changes_with_a_value_only(session, wants, host):
    first = launched(session, wants)["mark"]
    assert again(session, wants)["mark"] == first
    put(session, "OTHER", "another value", None)
    second = again(session, wants)["mark"]
    session.delete(session.scalar(select(Secret).where(Secret.user_id == "usr_a")))
    session.flush()
    assert len({first, second, again(session, wants)["mark"]}) == 3


def test_launch_without_one_of_its_secrets_says_so_and_has_none(session, wants, host):
    session.execute(delete(Secret).where(Secret.name == "OTHER"))
    secrets = launched(session, wants)
    assert secrets.keys() == {"mark", "refused"}
    assert secrets["refused"].startswith("neither its user nor its tenant has any more what")
    assert secrets["refused"].endswith(": OTHER")


def test_reason_is_bounded_however_many_secrets_are_missing(session, wants, host):
    names = [f"A{n:02}{'x' * 125}" for n in range(MAX_SECRETS)]
    wants.descriptor = {**wants.descriptor, "secrets": names}
    session.flush()
    assert len(launched(session, wants)["refused"]) == SENTENCE_MOST


def test_nothing_is_sealed_to_a_key_that_the_enrolled_host_did_not_sign(session, wants, tmp_path):
    """A forged heartbeat has the forger's signature; even its row in Postgres is not trusted."""
    enrolled, forger = (Signer.at(tmp_path / f"{name}.key") for name in ("host", "forger"))
    session.add(Enrolment(device_id="h.0", key=enrolled.public, enrolled_by="root"))
    key = HostKey.at(tmp_path / "sealing.key")
    for announced in (key.announced(forger), key.public, None):
        more = {} if announced is None else {"sealing_key": announced}
        hear(session, key=enrolled.public, **more)
        secrets = again(session, wants)
        assert secrets.keys() == {"mark", "refused"}
        assert "could not be sealed to h" in secrets["refused"]


def test_nothing_is_sealed_without_the_key_that_encrypts(session, wants, host, monkeypatch):
    monkeypatch.setenv("ROUNDHOUSE_SECRETS_KEY", "/nowhere/secrets.key")
    settings.cache_clear()
    assert "there is no key for secrets" in launched(session, wants)["refused"]
    settings.cache_clear()


def test_task_without_secrets_has_none_in_its_launch(session, task, host):
    assert launched(session, task) == {}
    assert not session.scalars(select(AuditEvent)).all()


def test_each_use_is_in_the_audit_log(session, wants, host):
    session.commit()
    with transaction() as its:
        launched(its, its.get_one(Task, wants.id))
    rows = session.scalars(select(AuditEvent).order_by(AuditEvent.id)).all()
    said = {"task": wants.id, "epoch": 1, "device": "h.0"}
    assert sorted(row.after["name"] for row in rows) == ["HF_TOKEN", "OTHER"]
    for row in rows:
        assert (row.operation, row.action, row.target_kind) == ("launchTask", "read", "secret")
        assert (row.user_id, row.user, row.tenant_id) == ("usr_a", "ann", "ten_a")
        assert said.items() <= row.after.items()
    used = session.scalars(select(Secret.last_used_at).order_by(Secret.user_id)).all()
    assert len([at for at in used if at is not None]) == 2


def test_no_value_is_in_any_table_after_a_launch(session, wants, host):
    launched(session, wants)
    tables = session.scalars(text("select tablename from pg_tables where schemaname = 'public'"))
    for table in tables.all():
        for row in session.execute(
            text(f'select cast("{table}" as text) from "{table}"')
        ).scalars():
            for value in (MINE, WIDE):
                assert value not in row, table
                assert value.encode().hex() not in row, table
