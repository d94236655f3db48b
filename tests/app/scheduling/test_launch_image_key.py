"""A command's launch has the key of its tenant's images, sealed to its host."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import delete, select, text

from app.core.model.protocol.messages import Launch, about_image_key, decode
from app.core.model.provisions.process_images import OFFER
from app.db.models import Enrolment, ImageKey, OutboxOrder, Tenant
from app.db.transactions import transaction
from app.identity import image_keys
from app.settings import settings
from app.storage.sealing import CannotOpen, HostKey, Keyring
from app.storage.signing import Signer
from tests.app.scheduling.test_journal import decide, hear, task

__all__ = ["task"]  # a fixture


@pytest.fixture
def host(session, tmp_path):
    """Returns a function by which the device h.0 of an enrolled host is heard; it has its key."""
    signer = Signer.at(tmp_path / "signing.key")
    key = HostKey.at(tmp_path / "sealing.key")
    session.add(Enrolment(device_id="h.0", key=signer.public, enrolled_by="root"))

    def heard(**facts) -> HostKey:
        sealing = {"key": signer.public, "sealing_key": key.announced(signer)}
        hear(session, **{**sealing, "image_key": True, "offers": [OFFER], **facts})
        return key

    return heard


@pytest.fixture
def command(session, task):
    task.descriptor = {**task.descriptor, "run": {"command": ["true"]}}
    session.flush()
    return task


def launched(session, task) -> Launch:
    """Its next launch."""
    task.state, task.seat = "waiting", None
    session.execute(text("update placements set ended_at = now()"))
    session.execute(delete(OutboxOrder))
    session.expire_all()
    decide(session, task, "Launch", devices=("h.0",))
    [order] = session.scalars(select(OutboxOrder))
    return decode(order.body)


def test_launch_of_a_command_has_the_key_of_its_tenant_for_this_launch_only(session, command, host):
    key = host()
    first, second = (launched(session, command) for _ in range(2))
    opened = [
        key.opened(launch.image_key["sealed"], about_image_key(command.id, launch.epoch, "h.0"))
        for launch in (first, second)
    ]
    assert opened[0] == opened[1] == image_keys.of_tenant(session, "ten_a")
    assert re.fullmatch(r"[0-9a-f]{64}", opened[0])
    for other in ("tsk_b", 1, "h.0"), (command.id, 2, "h.0"), (command.id, 1, "h.1"):
        with pytest.raises(CannotOpen):
            key.opened(first.image_key["sealed"], about_image_key(*other))


def test_no_key_goes_to_a_job_or_to_a_device_that_cannot_use_it(session, task, host):
    host()
    assert launched(session, task).image_key == {}
    task.descriptor = {**task.descriptor, "run": {"command": ["true"]}}
    for facts in ({"image_key": False}, {"offers": []}):
        host(**facts)
        assert launched(session, task).image_key == {}
    assert session.scalars(select(ImageKey)).all() == []


def test_launch_says_why_it_has_no_key(session, command, host, monkeypatch):
    host(sealing_key="")
    assert launched(session, command).image_key.keys() == {"refused"}
    host()
    session.execute(text("update image_keys set encrypted = '\\x00'"))
    assert "was changed" in launched(session, command).image_key["refused"]
    monkeypatch.setenv("ROUNDHOUSE_SECRETS_KEY", "/nowhere/secrets.key")
    settings.cache_clear()
    assert "there is no key for secrets" in launched(session, command).image_key["refused"]
    settings.cache_clear()


def test_keys_differ_between_tenants_and_no_row_opens_as_that_of_another(session, task):
    session.add(Tenant(id="ten_b", name="b"))
    session.flush()
    one, two = (image_keys.of_tenant(session, tenant) for tenant in ("ten_a", "ten_b"))
    assert one != two
    rows = {row.tenant_id: row for row in session.scalars(select(ImageKey))}
    assert not any(key.encode() in rows[id].encrypted for id in rows for key in (one, two))
    rows["ten_a"].encrypted = rows["ten_b"].encrypted
    session.flush()
    with pytest.raises(CannotOpen):
        image_keys.of_tenant(session, "ten_a")


def test_keys_of_images_stay_when_the_key_of_secrets_is_changed(session, command):
    before = image_keys.of_tenant(session, "ten_a")
    session.commit()
    path = settings().secrets_key_file
    kept = path.read_bytes()
    Keyring.add(path)
    try:
        for expected in (1, 0):
            with transaction() as other:
                assert image_keys.encrypt_again(other) == expected
        path.write_text(path.read_text().splitlines()[0])
        session.expire_all()
        assert image_keys.of_tenant(session, "ten_a") == before
    finally:
        path.write_bytes(kept)
