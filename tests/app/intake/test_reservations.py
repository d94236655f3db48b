"""Reservations and maintenance over HTTP and as control puts them in force, by a clock that is
set.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import func, select, update

from app.db import transactions
from app.db.models import (
    AuditEvent,
    Device,
    Reservation,
    ReservationWindow,
    Tenant,
    User,
)
from app.insight import simulations
from app.intake import recurrences, reservations
from app.scheduling import snapshot_reader

HOUR = timedelta(hours=1)
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture
def isle(world, session):
    """The devices of the island, which have just reported."""
    session.execute(update(Device).values(seen_at=func.now()))
    session.commit()
    return session.scalars(select(Device).order_by(Device.id)).all()


@pytest.fixture
def kind(isle):
    return isle[0].kind


@pytest.fixture
def root(as_):
    return as_("root")


def time(at):
    return at.astimezone(UTC).isoformat()


def soon(hours=1.0, lasts=1.0, **more):
    begins_at = datetime.now(UTC) + timedelta(hours=hours)
    ends_at = begins_at + timedelta(hours=lasts)
    given = {"name": "workshop", "begins_at": time(begins_at), "ends_at": time(ends_at), **more}
    return given if "maintenance" in given else {"tenant_id": "ten_red", **given}


def reserve(root, **more):
    answer = root.post("/v1/reservations", json=soon(**more))
    assert answer.status_code == 201, answer.text
    return answer.json()


def let_begin(session, id, *, now_at=0.0):
    """Move the windows of a reservation so that the first began `now_at` hours ago."""
    first = session.scalar(
        select(ReservationWindow.begins_at).where(ReservationWindow.reservation_id == id)
    )
    by = transactions.now(session) - timedelta(hours=now_at) - first
    mine = ReservationWindow.reservation_id == id
    moved = {
        "begins_at": ReservationWindow.begins_at + by,
        "ends_at": ReservationWindow.ends_at + by,
    }
    session.execute(update(ReservationWindow).where(mine).values(moved))
    times = {"begins_at": Reservation.begins_at + by, "ends_at": Reservation.ends_at + by}
    session.execute(update(Reservation).where(Reservation.id == id).values(times))
    session.commit()
    session.expire_all()


def look(session):
    changed = reservations.look(session)
    session.commit()
    session.expire_all()
    return changed


def shown_guarantee(shares, tenant, kind):
    [mine] = [each for each in shares if each["tenant"].endswith(tenant)]
    return next(each["guarantee"] for each in mine["kinds"] if each["kind"] == kind)


# --- rules of repetition --------------------------------------------------------------------------


def windows(rule, *, hour=9, lasts=HOUR, begins=(2027, 3, 21)):
    begins_at = datetime(*begins, hour, 30, tzinfo=BERLIN)
    return recurrences.windows(begins_at, begins_at + lasts, rule=rule, zone=BERLIN)


def test_window_keeps_the_hours_of_its_zone():
    found = windows("FREQ=WEEKLY;COUNT=2")
    assert [begin.astimezone(BERLIN).hour for begin, _ in found] == [9, 9]
    assert [begin.hour for begin, _ in found] == [8, 7]  # summer begins on the 28th


def test_window_in_a_skipped_hour_is_left_out():
    assert [begin.day for begin, _ in windows("FREQ=WEEKLY;COUNT=3", hour=2)] == [21, 4]


def test_window_in_a_doubled_hour_begins_once():
    found = windows("FREQ=WEEKLY;COUNT=2", hour=2, begins=(2026, 10, 25))
    assert [(begin.day, begin.hour) for begin, _ in found] == [(25, 0), (1, 1)]


def test_rule_without_end_ends_after_two_years():
    assert len(windows("FREQ=DAILY")) == 732
    assert windows("freq=monthly;byday=-1FR;until=20270501")[-1][0].day == 30


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("FREQ=SECONDLY", "FREQ must be"),
        ("FREQ=DAILY;BYHOUR=1", "is not known"),
        ("FREQ=DAILY;COUNT=1;UNTIL=20280101", "not both"),
        ("FREQ=DAILY;COUNT=0", "COUNT must be"),
        ("FREQ=DAILY;INTERVAL=1e9", "INTERVAL must be"),
        ("FREQ=DAILY;UNTIL=tomorrow", "UNTIL must be"),
        ("FREQ=WEEKLY;BYDAY=XX", "BYDAY must"),
        ("FREQ=WEEKLY;BYDAY=MO;BYDAY=TU", "twice"),
        ("FREQ=MONTHLY;BYMONTHDAY=31,0", "BYMONTHDAY must be"),
        ("FREQ=MONTHLY;BYDAY=5MO;BYMONTHDAY=1", "no window"),
        ("", None),
    ],
)
def test_rule_that_cannot_be_taken_says_why(rule, told):
    if told is None:
        assert len(windows(rule)) == 1
        return
    with pytest.raises(ValueError, match=told):
        windows(rule)


def test_windows_that_overlap_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        windows("FREQ=DAILY", lasts=timedelta(days=2))


# --- what a call may reserve ----------------------------------------------------------------------


def test_reservation_is_made_shown_and_cancelled(root, kind):
    made = reserve(root, devices={kind: 1}, rule="FREQ=DAILY;COUNT=3", note="the workshop")
    assert (made["state"], made["windows_ahead"], made["tenant_id"]) == ("planned", 3, "ten_red")
    assert root.get(f"/v1/reservations/{made['id']}").json() == made
    assert root.get("/v1/reservations").json()["items"] == [made]
    assert root.delete(f"/v1/reservations/{made['id']}").status_code == 204
    assert root.get(f"/v1/reservations/{made['id']}").status_code == 404


def test_more_than_there_is_is_refused_with_names_and_the_next_free_time(root, isle, kind):
    count = sum(device.kind == kind for device in isle)
    reserve(root, name="first", devices={kind: count}, hours=2, lasts=2)
    answer = root.post(
        "/v1/reservations",
        json=soon(name="second", devices={kind: 1}, hours=1, lasts=2, tenant_id="ten_blue"),
    )
    assert answer.status_code == 409
    detail = answer.json()["detail"]
    assert "reserved then: first" in detail
    assert "next free: from" in detail
    reserve(root, name="before", devices={kind: 1}, hours=1, lasts=0.9)
    reserve(root, name="after", devices={kind: 1}, hours=4.1)


def test_what_is_guaranteed_for_ever_cannot_be_reserved(root, isle, kind, session):
    count = sum(device.kind == kind for device in isle)
    session.get_one(Tenant, "ten_blue").guarantee = {kind: count}
    session.commit()
    answer = root.post("/v1/reservations", json=soon(devices={kind: 1}))
    assert answer.status_code == 409
    assert "only 0 can be reserved" in answer.json()["detail"]


def test_free_times_are_those_in_which_a_call_succeeds(root, isle, kind):
    count = sum(device.kind == kind for device in isle)
    taken = reserve(root, devices={kind: count}, hours=2, lasts=1)["windows"][0]
    asked = {"kind": kind, "devices": 1, "for_s": 1800}
    first, second = root.get("/v1/reservations:free", params=asked).json()["windows"]
    assert (first["ends_at"], second["begins_at"]) == (taken["begins_at"], taken["ends_at"])
    too_many = {**asked, "devices": count + 1}
    assert root.get("/v1/reservations:free", params=too_many).json()["windows"] == []


@pytest.mark.parametrize(
    ("more", "pointer"),
    [
        ({"devices": {}}, "/devices"),
        ({"devices": {"cpu": 1}, "tenant_id": "ten_none"}, "/tenant_id"),
        ({"devices": {"cpu": 1}, "user_id": "usr_none"}, "/user_id"),
        ({"devices": {"cpu": 1}, "user_id": "usr_blue.member"}, "/user_id"),
        ({"devices": {"cpu": 1}, "device_ids": ["h.0"]}, "/device_ids"),
        ({"devices": {"cpu": 1}, "island": "nowhere"}, "/island"),
        ({"device_ids": ["h.0"], "labels": ["fast"]}, "/device_ids"),
        ({"device_ids": ["h.none"]}, "/device_ids/0"),
        ({"labels": ["fast"]}, "/devices"),
        ({"maintenance": True, "device_ids": ["h.0"], "labels": ["fast"]}, "/labels"),
        ({"devices": {"cpu": 1}, "timezone": "Europe/Berlinn"}, "/timezone"),
        ({"devices": {"cpu": 1}, "rule": "FREQ=NEVER"}, "/rule"),
        ({"devices": {"cpu": 1}, "lasts": -1.0}, "/ends_at"),
        ({"devices": {"cpu": 1}, "hours": 20000.0}, "/begins_at"),
        ({"maintenance": True}, "/device_ids"),
        ({"maintenance": True, "device_ids": ["h.none"]}, "/device_ids/0"),
        ({"maintenance": True, "device_ids": ["h.0"], "devices": {"cpu": 1}}, "/devices"),
    ],
)
def test_fault_is_named_at_its_place(root, isle, more, pointer):
    answer = root.post("/v1/reservations", json=soon(**more))
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize(
    ("of", "limits"),
    [
        (Tenant, {"limit": {"*": 0}}),
        (Tenant, {"user_defaults": {"limit": {"*": 0}}}),
        (User, {"limit": {"*": 0}}),
    ],
)
def test_what_a_limit_forbids_is_refused(root, isle, session, kind, of, limits):
    user = "usr_red.member"
    for name, value in limits.items():
        setattr(session.get_one(of, "ten_red" if of is Tenant else user), name, value)
    session.commit()
    answer = root.post("/v1/reservations", json=soon(devices={kind: 1}, user_id=user))
    fault = answer.json()["errors"][0]
    assert (fault["pointer"], fault["code"]) == (f"/devices/{kind}", "limit")


def test_members_see_their_own_and_maintenance_only(root, as_, isle, kind):
    its = reserve(root, devices={kind: 1})
    reserve(root, name="repair", maintenance=True, device_ids=[isle[0].id], hours=5)
    names = [it["name"] for it in as_("blue.member").get("/v1/reservations").json()["items"]]
    assert names == ["repair"]
    assert as_("blue.member").get(f"/v1/reservations/{its['id']}").status_code == 404
    names = [it["name"] for it in as_("red.viewer").get("/v1/reservations").json()["items"]]
    assert names == ["workshop", "repair"]


# --- changes --------------------------------------------------------------------------------------


def at(hours):
    return time(datetime.now(UTC).replace(microsecond=0) + timedelta(hours=hours))


def change(root, which, **more):
    return root.patch(f"/v1/reservations/{which}", json=more)


def audited(session):
    rows = select(AuditEvent).where(AuditEvent.operation == "changeReservation")
    return session.scalars(rows.order_by(AuditEvent.id)).all()


def test_reservation_is_changed_by_name_and_keeps_its_id(root, kind, session):
    made = reserve(root, devices={kind: 1}, note="the workshop")
    moved = {"begins_at": at(3), "ends_at": at(5), "rule": "FREQ=DAILY;COUNT=2"}
    changed = change(root, "workshop", **moved, devices={kind: 2}, note=None).json()
    assert (changed["id"], changed["devices"], changed["note"]) == (made["id"], {kind: 2}, None)
    assert changed["windows_ahead"] == 2
    begins = [datetime.fromisoformat(it["begins_at"]) for it in changed["windows"]]
    assert begins[0].isoformat() == moved["begins_at"]
    assert begins[1] - begins[0] == timedelta(days=1)
    [row] = audited(session)
    assert (row.before["devices"], row.after["devices"]) == ({kind: 1}, {kind: 2})
    assert (row.before["note"], row.after["note"]) == ("the workshop", "")


def test_change_is_refused_with_names_and_the_next_free_time_and_changes_nothing(root, isle, kind):
    count = sum(device.kind == kind for device in isle)
    reserve(root, name="first", devices={kind: count}, hours=4, lasts=2)
    made = reserve(root, devices={kind: 1}, hours=2, lasts=1)
    for more in ({"ends_at": at(5)}, {"devices": {kind: count + 1}}):
        answer = change(root, "workshop", **more)
        assert answer.status_code == 409, answer.text
        assert "can be reserved" in answer.json()["detail"]
        assert "workshop" not in answer.json()["detail"], "it does not stand in its own way"
    named = change(root, "workshop", ends_at=at(5)).json()["detail"]
    assert "reserved then: first; next free: from" in named
    assert root.get("/v1/reservations/workshop").json() == made


def test_all_devices_stay_reserved_while_the_window_moves(root, isle, kind):
    count = sum(device.kind == kind for device in isle)
    reserve(root, devices={kind: count}, hours=2, lasts=2)
    assert change(root, "workshop", begins_at=at(3), ends_at=at(5)).status_code == 200


def test_present_window_of_several_is_made_longer_alone(root, isle, kind, session):
    made = reserve(root, devices={kind: 1}, rule="FREQ=DAILY;COUNT=3")
    let_begin(session, made["id"], now_at=0.5)
    look(session)
    later = root.get(f"/v1/reservations/{made['id']}").json()["windows"][1:]
    ends_at = at(2)
    windows = change(root, made["id"], ends_at=ends_at).json()["windows"]
    assert datetime.fromisoformat(windows[0]["ends_at"]).isoformat() == ends_at
    assert windows[1:] == later
    [row] = audited(session)
    assert row.after["window"].startswith("from ")
    told = select(AuditEvent.after["window"]).where(AuditEvent.user == "control")
    assert session.scalars(told).all() == ["begins"], "it goes on, and does not begin again"


def test_begun_window_stays_when_the_rule_changes(root, isle, kind, session):
    made = reserve(root, devices={kind: 1}, rule="FREQ=DAILY;COUNT=5")
    let_begin(session, made["id"], now_at=0.5)
    look(session)
    present = root.get(f"/v1/reservations/{made['id']}").json()["windows"][0]
    moved = change(root, made["id"], begins_at=at(48), ends_at=at(50), rule="").json()
    assert moved["windows"][0] == present
    assert (moved["state"], moved["windows_ahead"]) == ("active", 2)
    session.expire_all()
    assert session.get_one(Tenant, "ten_red").reserved == {isle[0].island: {kind: 1}}


def test_changed_number_counts_at_once_inside_the_window(root, isle, kind, session):
    reserve(root, devices={kind: 1}, hours=-0.1)
    assert change(root, "workshop", devices={kind: 2}).status_code == 200
    session.expire_all()
    assert session.get_one(Tenant, "ten_red").reserved == {isle[0].island: {kind: 2}}


def test_reservation_that_is_moved_away_waits_again(root, isle, kind, session):
    made = reserve(root, devices={kind: 1}, rule="FREQ=DAILY;COUNT=2")
    let_begin(session, made["id"], now_at=1.5)
    look(session)
    changed = change(root, "workshop", begins_at=at(5), ends_at=at(6), rule="").json()
    assert (changed["state"], changed["windows_ahead"]) == ("planned", 1)


@pytest.mark.parametrize(
    ("begun", "more", "pointer"),
    [
        (False, {"devices": {}}, "/devices"),
        (False, {"device_ids": ["h.none"]}, "/device_ids/0"),
        (False, {"device_ids": ["h.0"], "labels": ["fast"]}, "/device_ids"),
        (False, {"labels": ["no label"]}, "/labels/0"),
        (False, {"ends_at": -1.0}, "/ends_at"),
        (False, {"begins_at": 3.0}, "/ends_at"),
        (False, {"begins_at": 20000.0, "ends_at": 20001.0}, "/begins_at"),
        (False, {"timezone": "Europe/Berlinn"}, "/timezone"),
        (False, {"rule": "FREQ=NEVER"}, "/rule"),
        (True, {"begins_at": 2.0}, "/begins_at"),
        (True, {"begins_at": 2.0, "ends_at": 3.0}, "/begins_at"),
        (True, {"ends_at": -0.1}, "/ends_at"),
        (True, {"ends_at": 40000.0}, "/ends_at"),
        (True, {"ends_at": 3.0, "rule": "FREQ=DAILY"}, "/ends_at"),
    ],
)
def test_fault_of_a_change_is_named_at_its_place(root, isle, kind, session, begun, more, pointer):
    made = reserve(root, devices={kind: 1})
    if begun:
        let_begin(session, made["id"], now_at=0.5)
    given = {name: at(it) if isinstance(it, float) else it for name, it in more.items()}
    answer = change(root, made["id"], **given)
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize(
    ("more", "pointer"),
    [
        ({"begins_at": -1.0, "ends_at": 2.0}, "/begins_at"),
        ({"begins_at": 2.0}, "/ends_at"),
        ({"begins_at": 0.2, "ends_at": 0.8}, "/begins_at"),  # the present window ends later
        ({"ends_at": 40.0}, "/ends_at"),  # the next window has begun by then
    ],
)
def test_fault_of_a_change_of_a_begun_series_is_named(root, isle, kind, session, more, pointer):
    made = reserve(root, devices={kind: 1}, rule="FREQ=DAILY;COUNT=3")
    let_begin(session, made["id"], now_at=0.5)
    given = {name: at(it) for name, it in more.items()}
    answer = change(root, made["id"], **given)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)


def test_end_alone_is_refused_between_windows(root, isle, kind, session):
    made = reserve(root, devices={kind: 1}, rule="FREQ=DAILY;COUNT=3")
    let_begin(session, made["id"], now_at=5)
    answer = change(root, made["id"], ends_at=at(3))
    assert "give begins_at, too" in answer.json()["detail"]
    assert change(root, made["id"], rule="").json()["errors"][0]["pointer"] == "/rule"


def test_maintenance_that_is_changed_drains_other_devices(root, isle, session):
    first, second = isle[0].id, isle[1].id
    reserve(root, name="repair", maintenance=True, device_ids=[first], hours=-0.1)
    assert change(root, "repair", devices={"cpu": 1}).status_code == 422
    assert change(root, "repair", device_ids=[second]).json()["device_ids"] == [second]
    drained = {id: root.get(f"/v1/devices/{id}").json()["cordoned"] for id in (first, second)}
    assert drained == {first: False, second: True}
    assert change(root, "repair", ends_at=at(3)).status_code == 200
    root.delete("/v1/reservations/repair")
    assert not root.get(f"/v1/devices/{second}").json()["cordoned"]


# --- certain devices ------------------------------------------------------------------------------


@pytest.fixture
def fast(isle, session):
    """Let one device of the island have a label."""
    return label(session, isle[1].id, "fast")


def label(session, id, *labels):
    facts = {**session.get_one(Device, id).facts, "labels": [*labels]}
    session.execute(update(Device).where(Device.id == id).values(facts=facts))
    session.commit()
    return id


def refused(root, **more):
    answer = root.post("/v1/reservations", json=soon(name="second", **more))
    assert answer.status_code == 409, answer.text
    return answer.json()["detail"]


def keeps(session, island):
    found = snapshot_reader.devices(session, island)
    return {id: device.reserved_for for id, device in found.items() if device.reserved_for}


def test_certain_device_is_promised_once(root, isle, kind, fast):
    made = reserve(root, device_ids=[fast])
    assert (made["devices"], made["device_ids"], made["labels"]) == ({kind: 1}, [fast], [])
    told = refused(root, device_ids=[fast], tenant_id="ten_blue")
    assert "of 1 named cpu device only 0 can be reserved from" in told
    assert "reserved then: workshop; next free: from" in told
    told = refused(root, devices={kind: 1}, labels=["fast"])
    assert "of 1 cpu device with label fast only 0" in told
    assert "can reserve 1 in all" in refused(root, devices={kind: 2}, labels=["fast"], hours=9)
    reserve(root, name="other", devices={kind: 1})


def test_labels_leave_room_for_a_device_that_is_named(root, isle, kind, session):
    first, second = (label(session, device.id, "fast") for device in isle)
    reserve(root, devices={kind: 1}, labels=["fast"])
    reserve(root, name="named", device_ids=[first])
    assert "only 0" in refused(root, device_ids=[second])


def test_device_in_maintenance_cannot_be_reserved_by_name(root, isle, kind):
    reserve(root, name="repair", maintenance=True, device_ids=[isle[0].id])
    assert "reserved then: repair" in refused(root, device_ids=[isle[0].id])
    reserve(root, device_ids=[isle[1].id])


def test_free_times_of_certain_devices(root, isle, kind, fast):
    taken = reserve(root, device_ids=[fast], hours=2, lasts=1)["windows"][0]
    for which in ({"kind": kind, "label": "fast"}, {"device_id": [fast]}):
        found = root.get("/v1/reservations:free", params={**which, "for_s": 1800}).json()
        assert (found["kind"], found["devices"]) == (kind, 1)
        first, second = found["windows"]
        assert (first["ends_at"], second["begins_at"]) == (taken["begins_at"], taken["ends_at"])
    answer = root.get("/v1/reservations:free", params={"device_id": "h.none"})
    assert answer.json()["errors"][0]["pointer"] == "?device_id"
    [whole] = root.get("/v1/reservations:free", params={"kind": kind}).json()["windows"]
    assert whole["begins_at"] < taken["begins_at"] < taken["ends_at"] < whole["ends_at"]


@pytest.mark.parametrize("user", [None, "usr_red.member"])
def test_inside_its_window_certain_devices_are_kept_for_whom_they_are_reserved(
    root, isle, kind, session, fast, user
):
    island, owner = isle[0].island, user or "ten_red"
    made = reserve(root, devices={kind: 1}, labels=["fast"], user_id=user)
    assert made["kept_device_ids"] == []
    let_begin(session, made["id"])
    assert look(session)
    assert not look(session)
    assert keeps(session, island) == {fast: owner}
    shown = root.get("/v1/reservations/workshop").json()
    assert (shown["kept_device_ids"], shown["available"]) == ([fast], {kind: 1})
    scene = simulations.of_made(session, island, [], durations_known=True)
    assert [one.time.named[kind].among for one in scene.reserved] == [{fast}]
    assert scene.reserved[0].owners[0] == owner
    let_begin(session, made["id"], now_at=1.5)
    assert look(session)
    assert keeps(session, island) == {}


def test_device_that_no_longer_serves_is_replaced_by_one_with_the_label(root, isle, kind, session):
    first, second = (label(session, device.id, "fast") for device in isle)
    reserve(root, devices={kind: 1}, labels=["fast"], hours=-0.1)
    [kept] = keeps(session, isle[0].island)
    session.execute(update(Device).where(Device.id == kept).values(cordoned=True))
    session.commit()
    assert look(session)
    assert keeps(session, isle[0].island) == {({first, second} - {kept}).pop(): "ten_red"}
    root.delete("/v1/reservations/workshop")
    assert keeps(session, isle[0].island) == {}


def test_reservation_changes_between_numbers_labels_and_names(root, isle, kind, session, fast):
    reserve(root, devices={kind: 1}, hours=-0.1)
    island, other = isle[0].island, isle[0].id
    assert keeps(session, island) == {}
    shown = change(root, "workshop", labels=["fast"]).json()
    assert (shown["devices"], shown["labels"]) == ({kind: 1}, ["fast"])
    assert keeps(session, island) == {fast: "ten_red"}
    shown = change(root, "workshop", device_ids=[other]).json()
    assert (shown["device_ids"], shown["labels"]) == ([other], [])
    assert keeps(session, island) == {other: "ten_red"}
    assert change(root, "workshop", labels=["fast"]).status_code == 422  # how many?
    shown = change(root, "workshop", devices={kind: 2}).json()
    assert (shown["device_ids"], shown["labels"]) == ([], [])
    assert keeps(session, island) == {}
    assert [event.after["labels"] for event in audited(session)[:2]] == [["fast"], []]


# --- what is in force -----------------------------------------------------------------------------


@pytest.mark.parametrize("user", [None, "usr_red.member"])
def test_inside_its_window_a_reservation_is_guaranteed(root, isle, kind, session, user):
    island = isle[0].island
    made = reserve(root, devices={kind: 1}, user_id=user)
    assert not look(session)
    assert session.get_one(Tenant, "ten_red").reserved == {}
    let_begin(session, made["id"])
    assert look(session)
    assert not look(session)
    assert snapshot_reader.tenants(session, island)["ten_red"].guarantee == {kind: 1}
    assert snapshot_reader.tenants(session, "elsewhere")["ten_red"].guarantee == {}
    found = snapshot_reader.users(session, island)["usr_red.member"].guarantee
    assert found == ({kind: 1} if user else {})
    assert root.get(f"/v1/reservations/{made['id']}").json()["state"] == "active"
    shares = root.get("/v1/fair-share").json()["tenants"]
    assert shown_guarantee(shares, "red", kind) == 1
    let_begin(session, made["id"], now_at=1.5)
    assert look(session)
    assert session.get_one(Tenant, "ten_red").reserved == {}
    assert session.get_one(User, "usr_red.member").reserved == {}
    told = session.scalars(
        select(AuditEvent.after)
        .where(AuditEvent.target_kind == "reservation", AuditEvent.action == "changed")
        .order_by(AuditEvent.id)
    ).all()
    assert [one["window"] for one in told] == ["begins", "ends"]


def test_replay_knows_the_windows(root, isle, kind, session):
    reserve(root, devices={kind: 1}, user_id="usr_red.member", rule="FREQ=DAILY;COUNT=2")
    reserve(root, name="repair", maintenance=True, device_ids=[isle[0].id], hours=5)
    scene = simulations.of_made(session, isle[0].island, [], durations_known=True)
    assert [one.owners for one in scene.reserved] == 2 * [("usr_red.member", "ten_red", "ten_root")]
    assert [one.devices for one in scene.maintained] == [(isle[0].id,)]


def test_service_that_was_down_at_the_begin_makes_it_true_at_its_first_look(
    root, isle, kind, session
):
    made = reserve(root, devices={kind: 1}, lasts=3.0)
    let_begin(session, made["id"], now_at=2.0)
    assert look(session)
    assert session.get_one(Tenant, "ten_red").reserved == {isle[0].island: {kind: 1}}


def test_reservation_that_begins_at_once_is_in_force_when_the_call_answers(
    root, isle, kind, session
):
    made = reserve(root, devices={kind: 1}, hours=-0.1)
    assert made["state"] == "active"
    session.expire_all()
    assert session.get_one(Tenant, "ten_red").reserved == {isle[0].island: {kind: 1}}
    root.delete(f"/v1/reservations/{made['id']}")
    session.expire_all()
    assert session.get_one(Tenant, "ten_red").reserved == {}


def test_maintenance_drains_its_devices_early_and_brings_them_back(root, isle, session):
    device = isle[0].id
    made = reserve(root, name="repair", maintenance=True, device_ids=[device])
    assert not look(session)
    let_begin(session, made["id"], now_at=-5 / 3600)  # it begins in five seconds
    assert look(session)
    seen = snapshot_reader.devices(session, isle[0].island)[device]
    assert not seen.takes_work
    assert seen.unfit.startswith("Maintenance repair until ")
    assert root.get(f"/v1/reservations/{made['id']}").json()["state"] == "planned"
    let_begin(session, made["id"], now_at=0.5)
    assert not look(session)


def test_devices_serve_again_when_maintenance_ends_or_is_cancelled(root, isle, session):
    device = isle[0].id
    made = reserve(root, name="repair", maintenance=True, device_ids=[device], hours=-0.1)
    assert root.get(f"/v1/devices/{device}").json()["cordoned"]
    root.delete(f"/v1/reservations/{made['id']}")
    assert not root.get(f"/v1/devices/{device}").json()["cordoned"]


def test_device_serves_again_when_the_last_of_its_maintenances_is_over(root, isle, session):
    device = isle[0].id
    names = ("disks", "fans")
    made = [
        reserve(root, name=name, maintenance=True, device_ids=[device], hours=-0.1)
        for name in names
    ]
    for it in made:
        assert root.get(f"/v1/devices/{device}").json()["cordoned"]
        root.delete(f"/v1/reservations/{it['id']}")
    assert not root.get(f"/v1/devices/{device}").json()["cordoned"]


@pytest.mark.parametrize("cordoned", [True, False])
def test_device_is_as_an_administrator_wants_it_during_maintenance(root, isle, cordoned):
    device = isle[0].id
    made = reserve(root, name="repair", maintenance=True, device_ids=[device], hours=-0.1)
    wish = "cordon" if cordoned else "uncordon"
    assert root.post(f"/v1/devices/{device}/{wish}").json()["cordoned"] is cordoned
    root.delete(f"/v1/reservations/{made['id']}")
    assert root.get(f"/v1/devices/{device}").json()["cordoned"] is cordoned


def test_device_that_somebody_drained_stays_drained(root, isle, session):
    device = isle[0].id
    assert root.post(f"/v1/devices/{device}/cordon").status_code == 200
    made = reserve(root, name="repair", maintenance=True, device_ids=[device], hours=-0.1)
    root.delete(f"/v1/reservations/{made['id']}")
    assert root.get(f"/v1/devices/{device}").json()["cordoned"]


def test_ended_reservation_is_forgotten_after_a_month(root, isle, kind, session):
    old = reserve(root, name="old", devices={kind: 1})
    let_begin(session, old["id"], now_at=24 * 31)
    reserve(root, name="new", devices={kind: 1}, hours=-0.1)
    assert [it["name"] for it in root.get("/v1/reservations").json()["items"]] == ["new"]
    assert session.scalars(select(Reservation.name)).all() == ["new"]
