"""What stands around tenants' code is told by /readyz and the API."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select, update

from app.core.model.protocol.messages import Alive
from app.core.model.protocol.protocol_version import PROTOCOL
from app.core.security.sandbox_layers import LAYERS, Sandbox, summary, warning
from app.db.models import Device
from app.scheduling import journal

ALL = list(LAYERS)
SOME = ["limits", "capabilities", "privileges", "syscalls"]


def _hear(session, device="h.0", **facts):
    told = {
        "host": "h", "island": "isle", "kind": "cpu", "threads": 1, "memory_bytes": 1,
        "sandbox": ALL, "sandbox_mode": "required", "protocol": PROTOCOL, **facts,
    }  # fmt: skip
    alive = Alive(
        device=device, incarnation="1", sent_us=1, facts=told, residents=[], events=[], logs=[]
    )
    is_answered = journal.record(session, alive) is not None
    assert is_answered == ("failed" not in facts)
    session.commit()


def _check(as_):
    return as_("").get("/readyz").json()["checks"]["sandbox"]


REFUSAL = {"sandbox": SOME, "refuses": "its sandbox is required, and files is not there"}


def test_device_without_a_sandbox_is_named_by_readyz_and_never_up(as_, session):
    _hear(session, "h.0")
    _hear(session, "h.1", leaving=True, **REFUSAL)
    found = _check(as_)
    assert not found["ok"]
    assert "h.1: takes no work: its sandbox is required" in found["detail"]
    assert "h.0: its sandbox is complete (required)" in found["detail"]
    shown = as_("root").get("/v1/devices/h.1").json()
    assert not shown["up"]
    assert shown["sandbox"]["refuses"] == REFUSAL["refuses"]
    assert "files" in shown["sandbox"]["missing"]
    assert session.scalar(select(Device.lease_until <= func.now()).where(Device.id == "h.1"))


def test_device_that_failed_is_named_with_its_reason(as_, session):
    _hear(session, "h.0")
    _hear(session, "h.9", failed="the GPU fell off the bus.", leaving=True)
    found = as_("").get("/readyz").json()["checks"]["devices"]
    assert found["ok"]
    assert found["detail"] == "2 of 3 are up; h.9: the GPU fell off the bus"
    shown = {one["id"]: one for one in as_("root").get("/v1/devices").json()["items"]}
    assert (shown["h.0"]["up"], shown["h.0"]["failure"]) == (True, "")
    assert (shown["h.9"]["up"], shown["h.9"]["failure"]) == (False, "the GPU fell off the bus.")


def test_old_refusal_is_not_reported_any_more(as_, session):
    _hear(session, "h.0")
    _hear(session, "h.1", leaving=True, **REFUSAL)
    long_ago = func.now() - func.make_interval(0, 0, 0, 0, 1)
    session.execute(update(Device).where(Device.id == "h.1").values(seen_at=long_ago))
    session.commit()
    assert _check(as_)["ok"]


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"sandbox_mode": "preferred"}, "its sandbox is complete (preferred)"),
        ({"sandbox_mode": "preferred", "sandbox": SOME}, "without the layers processes, ipc"),
        ({"sandbox_mode": "off", "sandbox": []}, "without a sandbox (ROUNDHOUSE_SANDBOX=off)"),
    ],
)
def test_device_with_a_partial_sandbox_is_reported_and_the_service_ready(facts, told, as_, session):
    _hear(session, "h.0", **facts)
    _hear(session, "h.1")
    found = _check(as_)
    assert found["ok"]
    assert told in found["detail"]
    shown = as_("root").get("/v1/devices/h.0").json()["sandbox"]
    assert shown["mode"] == facts["sandbox_mode"]


def test_malformed_facts_of_a_device_are_ignored():
    odd = Sandbox.of({"sandbox": "bwrap", "sandbox_mode": 7, "refuses": None})
    assert (odd.mode, odd.standing, odd.refuses) == ("unknown", (), "")
    assert summary([("h.0", Sandbox.of({}))]).startswith("h.0: runs tenants' code without")


def test_warning_names_devices_and_what_a_tenant_can_do():
    weak = Sandbox.of({"sandbox": SOME, "sandbox_mode": "preferred"})
    whole = Sandbox.of({"sandbox": ALL, "sandbox_mode": "preferred"})
    assert warning([("h.0", whole)]) == []
    said = "\n".join(warning([(f"h.{n}", weak) for n in range(7)] + [("i.0", whole)]))
    assert "h.4 and 2 more" in said
    assert "i.0" not in said
    assert "reach the network, Postgres and Redis" in said
