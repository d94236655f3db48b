"""Tasks that name a reservation: they run in its windows alone, and say so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update

from app.core.model.device_choice import with_reservation
from app.core.model.lifecycle import State
from app.core.model.snapshot import Plan
from app.core.scheduling.cycle import decide
from app.db import transactions
from app.db.models import (
    Device,
    Host,
    Island,
    Lot,
    Reservation,
    ReservationWindow,
    Task,
)
from app.insight import explain, simulations
from app.intake import island_assignment, reservations
from app.scheduling import journal, snapshot_reader
from app.scheduling.journal import lots

RUN = {"run": {"command": ["true"]}}
HOUR = timedelta(hours=1)


@pytest.fixture
def isle(world, session) -> str:
    """The island of two devices, which has a scheduler."""
    session.execute(update(Device).values(seen_at=func.now()))
    later = func.now() + HOUR
    session.execute(update(Island).values(leader="a test", leader_until=later))
    session.commit()
    return "isle"


@pytest.fixture
def root(as_, isle):
    return as_("root")


@pytest.fixture
def reserve(root):
    """Reserve from now on, or from `hours` on; return the id."""

    def made(hours: float = 1.0, lasts: float = 1.0, **more: Any) -> str:
        begins_at = datetime.now(UTC) + timedelta(hours=hours)
        ends_at = begins_at + timedelta(hours=lasts)
        times = {"begins_at": begins_at.isoformat(), "ends_at": ends_at.isoformat()}
        body = {"name": "workshop", "tenant_id": "ten_red", "devices": {"cpu": 1}, **times, **more}
        answer = root.post("/v1/reservations", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    return made


@pytest.fixture
def submit(red, session):
    """Submit a task that names the reservation; return its row."""

    def posted(**more: Any) -> Task:
        body = {"name": "a", **RUN, "reservation": "workshop", **more}
        answer = red.post("/v1/requests", json={"tasks": [body]})
        assert answer.status_code == 202, answer.text
        island_assignment.assign_new(session)
        session.commit()
        return session.get_one(Task, answer.json()["tasks"][0]["id"])

    return posted


@pytest.fixture
def standing(session):
    """Do what control does, and return how a task stands to its reservation."""

    def found(task: Task) -> str:
        reservations.look(session)
        session.commit()
        session.refresh(task)
        return task.reservation_state

    return found


@pytest.fixture
def why(session):
    """Return the reasons of a task by code."""

    def found(task: Task) -> dict[str, Any]:
        session.expire_all()
        told = explain.explain(session, [session.get_one(Task, task.id)])[task.id]
        return {reason["code"]: reason for reason in told.reasons}

    return found


def move(session, id: str, *, by: timedelta) -> None:
    """Let the windows of a reservation be earlier or later than they were."""
    window = ReservationWindow
    times = {"begins_at": window.begins_at + by, "ends_at": window.ends_at + by}
    session.execute(update(window).where(window.reservation_id == id).values(times))
    session.commit()
    session.expire_all()


# --- how it stands --------------------------------------------------------------------------------


def test_task_waits_for_each_window_and_is_free_inside(reserve, submit, standing, session):
    id = reserve(rule="FREQ=DAILY;COUNT=2")
    task = submit()
    assert (task.reservation_id, task.reservation_state) == (id, "planned")
    assert standing(task) == "planned"
    move(session, id, by=-1.5 * HOUR)
    assert standing(task) == ""
    move(session, id, by=-HOUR)
    assert standing(task) == "planned"
    move(session, id, by=-48 * HOUR)
    assert standing(task) == "ended"


def test_task_that_is_submitted_inside_a_window_may_start_at_once(reserve, submit, standing):
    reserve(hours=-0.5)
    task = submit()
    assert task.reservation_state == ""
    assert standing(task) == ""


def test_task_without_a_reservation_is_left_alone(reserve, submit, standing):
    reserve()
    task = submit(reservation=None)
    assert (task.reservation_id, standing(task)) == (None, "")


def test_removed_reservation_ends_for_its_tasks_for_good(root, reserve, submit, standing, why):
    reserve(hours=-0.5)
    task = submit()
    root.delete("/v1/reservations/workshop")
    reserve(hours=-0.5)  # another one of that name
    assert standing(task) == "ended"
    reason = why(task)["RESERVATION_OVER"]
    assert reason["message"].startswith("Its reservation workshop was removed, and it runs nowhere")
    assert reason["change"] == {"action": "leave_reservation", "value": None, "of": "workshop"}


def test_ended_reservation_that_gets_another_window_is_waited_for_again(
    root, reserve, submit, standing, session, why
):
    id = reserve()
    task = submit()
    move(session, id, by=-3 * HOUR)
    assert standing(task) == "ended"
    assert "another window" in why(task)["RESERVATION_OVER"]["message"]
    soon = datetime.now(UTC) + HOUR
    times = {"begins_at": soon.isoformat(), "ends_at": (soon + HOUR).isoformat()}
    assert root.patch("/v1/reservations/workshop", json=times).status_code == 200
    assert standing(task) == "planned"
    reason = why(task)["OUTSIDE_RESERVATION"]
    assert f"begins at {soon:%Y-%m-%d %H:%M} UTC" in reason["message"]
    assert reason["change"]["action"] == "wait_until"
    assert reason["change"]["value"] == pytest.approx(soon.timestamp())


def test_island_reads_that_a_task_is_outside_its_window(reserve, submit, session):
    reserve()
    task = submit()
    assert task.island == "isle"
    board = snapshot_reader.load(session, "isle", now_s=0.0)
    assert board.tasks[task.id].conditions.reservation == "planned"


def test_ended_tasks_are_not_marked(reserve, submit, standing, session):
    id = reserve()
    task = submit()
    task.state = State.done
    session.commit()
    move(session, id, by=-1.5 * HOUR)
    assert standing(task) == "planned"


# --- certain devices ------------------------------------------------------------------------------


def planned(session) -> Plan:
    """Return what the island would do now."""
    reservations.look(session)
    session.commit()
    now_s = transactions.now_s(session)
    return decide(snapshot_reader.load(session, "isle", now_s=now_s), now_s=now_s)


def launched(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {one.task: one.devices for one in plan.decisions if one.move == "Launch"}


def test_task_of_a_reservation_of_certain_devices_starts_on_these_alone(reserve, submit, session):
    reserve(hours=-0.5, devices={}, device_ids=["h.1"])
    first, second = submit(), submit()
    assert launched(planned(session)) == {first.id: ("h.1",)}
    session.execute(update(Device).where(Device.id == "h.1").values(cordoned=True))
    session.commit()
    plan = planned(session)
    assert launched(plan) == {}
    assert "cpu device of the reservation that it names" in plan.reasons[second.id][0].message


def test_change_of_a_reservation_changes_where_its_tasks_may_start(root, reserve, submit, session):
    id = reserve(hours=-0.5, devices={}, device_ids=["h.1"])
    task = submit()
    mine = with_reservation(task.device_choice, "")
    assert task.device_choice == with_reservation(mine, id)

    def changed(**body: Any) -> str:
        answer = root.patch("/v1/reservations/workshop", json=body)
        assert answer.status_code == 200, answer.text
        session.refresh(task)
        return task.device_choice

    assert changed(devices={"cpu": 1}) == mine
    assert changed(device_ids=["h.0"]) == with_reservation(mine, id)
    assert changed(note="no devices") == with_reservation(mine, id)


def test_task_cannot_be_moved_from_the_devices_of_its_reservation(red, reserve, submit, session):
    reserve(hours=-0.5, devices={}, device_ids=["h.1"])
    task = submit()
    reservations.look(session)
    session.commit()
    answer = red.post(f"/v1/tasks/{task.id}/migrate", json={"to": "h.0"})
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (422, "choice"), answer.text


# --- what may be submitted ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "asked", "told"),
    [
        ({}, {"reservation": "work"}, "nothing is reserved for you under the name work"),
        ({"tenant_id": "ten_blue"}, {}, "nothing is reserved for you"),
        ({"user_id": "usr_red.viewer"}, {}, "nothing is reserved for you"),
        ({}, {"devices": {"min": 2}, "world_size": 2}, "workshop has 1 cpu device; the task needs"),
        ({}, {"devices": {"kind": "cuda"}}, "workshop has 0 cuda devices"),
    ],
)
def test_reservation_that_cannot_be_used_is_refused(red, reserve, made, asked, told):
    reserve(**made)
    body = {"name": "a", **RUN, "reservation": "workshop", **asked}
    answer = red.post("/v1/requests", json={"tasks": [{"name": "first", **RUN}, body]})
    assert answer.status_code == 422, answer.text
    fault = answer.json()["errors"][0]
    assert fault["pointer"] == "/tasks/1/reservation"
    assert fault["detail"].startswith(told)


def test_maintenance_is_no_reservation_to_run_in(root, red, isle):
    times = {"begins_at": "2027-01-01T00:00:00Z", "ends_at": "2027-01-02T00:00:00Z"}
    body = {"name": "workshop", "maintenance": True, "device_ids": ["h.0"], **times}
    assert root.post("/v1/reservations", json=body).status_code == 201
    named = {"tasks": [{"name": "a", **RUN, "reservation": "workshop"}]}
    assert red.post("/v1/requests", json=named).status_code == 422


def test_reservation_that_is_over_is_refused(red, reserve, session):
    move(session, reserve(), by=-3 * HOUR)
    answer = red.post(
        "/v1/requests", json={"tasks": [{"name": "a", **RUN, "reservation": "workshop"}]}
    )
    assert answer.json()["errors"][0]["detail"].startswith("workshop is over")


def test_reservation_of_a_tenant_above_or_of_the_user_can_be_used(root, reserve, submit):
    reserve(tenant_id="ten_root")
    assert submit().reservation_state == "planned"
    root.delete("/v1/reservations/workshop")
    reserve(user_id="usr_red.member")
    assert submit().reservation_state == "planned"


def test_several_islands_are_refused(red, reserve):
    reserve()
    spread = {"world_size": 2, "devices": {"across_hosts": True}, "islands": 2}
    body = {"name": "a", "run": {"job": "m:J"}, "reservation": "workshop", **spread}
    answer = red.post("/v1/requests", json={"tasks": [body]})
    assert "/tasks/0/reservation" in [fault["pointer"] for fault in answer.json()["errors"]]


# --- where it runs, lots, replays -----------------------------------------------------------------


def test_task_goes_to_the_island_of_its_reservation(reserve, submit, session):
    reserve(devices={"cpu": 2})
    later = func.now() + HOUR
    session.add(Island(name="other", leader="a", leader_until=later))
    session.flush()
    session.add(Host(name="o", island="other"))
    session.flush()
    for n in range(8):  # where a task would go otherwise
        device = {"host": "o", "island": "other", "kind": "cpu", "memory_bytes": 2**30}
        session.add(Device(id=f"o.{n}", lease_until=later, seen_at=func.now(), **device))
    session.commit()
    task = submit(name="b")
    assert (task.island, task.assigned["because"]) == ("isle", "Its reservation is of isle.")
    assert submit(reservation=None).assigned["because"] != task.assigned["because"]


def test_lot_makes_its_members_inside_a_window(reserve, submit, standing, session, why):
    id = reserve()
    lot = submit(array={"count": 3, "at_once": 2})
    journal.look_at_lots(session)
    session.commit()
    members = select(Task).where(Task.lot_id == lot.id, Task.lot_index.is_not(None))
    assert session.scalars(members).all() == []
    assert "OUTSIDE_RESERVATION" in why(lot)
    move(session, id, by=-1.5 * HOUR)
    assert standing(lot) == ""
    journal.look_at_lots(session)
    journal.settle(session)
    session.commit()
    made = session.scalars(members).all()
    assert [(each.reservation_id, each.reservation_state) for each in made] == 2 * [(id, "")]
    assert session.get_one(Lot, lot.id).live == 2
    move(session, id, by=-HOUR)
    assert standing(made[0]) == "ended"


def test_members_of_a_lot_are_confined_as_the_lot_is(reserve, submit, session):
    id = reserve(hours=-0.5, devices={}, device_ids=["h.1"])
    lot = submit(array={"count": 1})
    journal.look_at_lots(session)
    session.commit()
    [member] = session.scalars(select(Task).where(Task.lot_id == lot.id, Task.lot_index == 0))
    assert member.device_choice == lot.device_choice == with_reservation(lot.device_choice, id)


def test_member_that_starts_again_waits_until_control_has_looked(
    reserve, submit, standing, session
):
    id = reserve(hours=-0.5)
    lot = submit(array={"count": 1})
    journal.look_at_lots(session)
    session.commit()
    [member] = session.scalars(select(Task).where(Task.lot_id == lot.id, Task.lot_index == 0))
    member.state, member.ended_at = State.failed, func.now()
    session.flush()
    session.refresh(member)
    lots._restart(session, member, None)
    assert member.reservation_state == "planned"
    session.commit()
    assert standing(member) == ""
    assert session.get_one(Reservation, id).name == "workshop"


def test_replay_knows_which_tasks_run_in_windows_alone(reserve, submit, session):
    id = reserve()
    for more in ({}, {"reservation": None}):
        task = submit(**more)
        task.state, task.total_held_us, task.ended_at = State.done, 10**6, func.now()
    session.commit()
    until = datetime.now(UTC) + HOUR
    scene, _, _ = simulations.of_history(
        session, "isle", since=until - 2 * HOUR, until=until, durations_known=True
    )
    assert sorted(each.reservation for each in scene.arrivals) == ["", id]
    assert [each.reservation for each in scene.reserved] == [id]
