"""The island cordons a device by its reports, empties it, and lets it serve again."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event as events
from sqlalchemy import func, select

from app.core.device import health_cordons
from app.core.device.health_cordons import Fitness
from app.core.device.health_findings import HealthLimits, HealthWatch
from app.core.device.health_readings import Reading
from app.core.model.protocol.messages import Alive, Failed, Finished, Paused, ResidentView
from app.core.model.protocol.protocol_version import PROTOCOL
from app.db import transactions
from app.db.models import AuditEvent, Device, RequestEvent
from app.scheduling import journal
from tests.scenery import Scenery

WELL = Reading(temperature_c=60, temperature_limit_c=90, power_w=200.0)
FAULTY = replace(WELL, xids=(48,))
XID_48 = "Xid 48 (double-bit ECC error)."
clock_us = itertools.count(1)


class WatchedDevice:
    """A device whose heartbeats carry what a real watch says."""

    def __init__(self, scenery: Scenery, name: str) -> None:
        self.session = scenery.session
        self.row = scenery.device(name, incarnation="p1")
        self.watch = HealthWatch(HealthLimits(), 0)
        self.now_us = 0
        self.changed = False

    def hear(self, reading=WELL, *, residents=(), events=()):
        """Send a heartbeat after this reading; returns the answer, which the device obeys."""
        self.now_us += 5_000_000
        if reading == "lost":
            self.watch.lose(self.now_us)
        elif reading is not None:
            self.watch.read(reading, self.now_us)
        alive = Alive(
            device=self.row.id,
            incarnation="p1",
            sent_us=next(clock_us),
            facts={"host": "host", "island": "isle", "kind": "cpu", "protocol": PROTOCOL},
            residents=list(residents),
            events=list(events),
            logs=[],
            health=self.watch.report(self.now_us),
        )
        answer, self.changed = journal.record(self.session, alive)
        journal.settle(self.session)
        self.session.flush()
        if answer.check > self.watch.number:
            self.watch.check(answer.check, self.now_us)
        return answer

    @property
    def fitness(self) -> Fitness:
        return Fitness.of(self.row.fitness)


def view(task, state="running", *, order_seq=1, step=0):
    return ResidentView(
        task=task.id,
        epoch=1,
        state=state,
        step=step,
        held_us=0,
        order_seq=order_seq,
        memory_bytes=0,
    )


def event(kind, task, **more):
    return kind(task=task.id, epoch=1, seq=1, step=task.step, held_us=0, **more)


def failed(task, cause="exception"):
    return event(Failed, task, cause=cause, message="wrong")


@pytest.fixture
def scenery(session):
    return Scenery(session)


@pytest.fixture
def device(scenery):
    device = WatchedDevice(scenery, "host.0")
    device.hear()
    return device


@pytest.fixture
def running(scenery, device):
    """A task that runs on the device."""
    return on_device(scenery, scenery.tenant("red"))


def on_device(scenery, tenant):
    run = {"job": "train:Train"}
    descriptor = {"name": "train", "run": run, "checkpoint": {"every_s": 60.0, "keep": 3}}
    return scenery.task(tenant, "running", seat="host.0", descriptor=descriptor)


@pytest.fixture
def admin(app, scenery):
    """A platform administrator, and the device as the API shows it after each call."""
    key = scenery.key(scenery.root, "platform_admin")
    scenery.session.flush()
    client = TestClient(app, headers={"Authorization": f"Bearer {key}"})

    def call(do=""):
        answer = client.post(f"/v1/devices/host.0/{do}") if do else None
        assert answer is None or answer.status_code == 200, answer.text
        scenery.session.expire_all()
        return client.get("/v1/devices/host.0").json()

    return call


def told(session, type_):
    query = select(RequestEvent.message).where(RequestEvent.type == type_).order_by(RequestEvent.id)
    return session.scalars(query).all()


def test_a_faulty_device_is_cordoned_and_its_task_is_to_move(session, device, running):
    version = device.row.version
    device.hear(FAULTY, residents=[view(running)])
    assert device.changed, "the island plans at once"
    assert (device.row.cordoned, device.row.version) == (True, version + 1)
    assert (running.move_to, running.state) == ("*", "running")
    assert told(session, "task.move_asked") == [
        f"host.0 is cordoned. {XID_48} The task moves to another device if one is free."
    ]


def test_a_faulty_device_moves_no_single_rank_of_a_gang(session, scenery, device, running):
    gang = scenery.task(scenery.tenant("blue"), "blocked", devices_min=2, devices_max=2)
    running.gang_id = gang.id
    device.hear(FAULTY, residents=[view(running)])
    assert device.row.cordoned
    assert (running.move_to, told(session, "task.move_asked")) == (None, [])


def test_a_move_that_was_given_up_is_not_asked_for_again(session, device, running):
    device.hear(FAULTY, residents=[view(running)])
    journal.break_off(session, running, "no device is free")
    device.hear(residents=[view(running)])
    assert (running.move_to, device.changed) == (None, False)
    assert device.row.cordoned, "so the island pauses it"


def test_a_task_on_a_lost_device_resumes_from_its_checkpoint(session, device, running):
    answer = device.hear("lost", residents=[view(running)])
    assert (running.state, running.seat, running.attempts) == ("waiting", None, 0)
    assert answer.drop == [[running.id, 1]]
    assert "fell off the bus" in told(session, "task.lost")[0]
    device.hear("lost")
    assert not device.changed


def test_what_ended_in_the_same_report_as_the_loss_counts(device, running):
    done = event(Finished, running, result={}, outputs={})
    device.hear("lost", residents=[view(running, "ended")], events=[done])
    assert running.state == "done"


def test_a_failure_on_a_cordoned_device_uses_up_no_attempt(session, device, running):
    device.hear(FAULTY, residents=[view(running, "ended")], events=[failed(running)])
    assert (running.state, running.attempts) == ("waiting", 0)
    assert "does not count as an attempt" in told(session, "task.retry")[0]


@pytest.mark.parametrize("cause", ["uncapturable", "device_preset"])
def test_a_failure_that_no_device_can_cause_counts_there_too(device, running, cause):
    told = [failed(running, cause)]
    device.hear(FAULTY, residents=[view(running, "ended")], events=told)
    assert running.state == "failed"


def test_a_device_that_is_faulty_at_its_first_report_gets_no_work(scenery):
    device = WatchedDevice(scenery, "host.0")
    device.hear("lost")
    assert device.row.cordoned


def test_a_repaired_device_serves_after_its_check(device, admin):
    device.hear(FAULTY)
    shown = admin("uncordon")
    assert (shown["cordoned"], shown["health"]["is_checking"]) == (True, True)
    asked = select(AuditEvent).where(AuditEvent.operation == "uncordonDevice")
    [record] = device.session.scalars(asked)
    assert (record.target_id, record.after["fitness"]["is_checking"]) == ("host.0", True)
    device.hear(None)
    assert device.row.cordoned, "it had not heard of the check"
    assert device.watch.number == 1
    device.hear(None)
    assert device.row.cordoned
    device.hear()
    assert (device.row.cordoned, device.changed) == (False, True)
    health = admin()["health"]
    assert (health["cordon_reason"], health["is_checking"]) == (None, False)
    assert [note["told"] for note in health["notes"]] == [
        "Takes work again: It passed its check.",
        "platform_admin 0 lets it serve; it is checked first.",
        f"Cordoned: {XID_48}",
    ]


def test_a_device_that_is_still_faulty_stays_cordoned(device, admin):
    device.hear(FAULTY)
    admin("uncordon")
    device.hear(None)
    device.hear("lost")
    shown = admin()
    assert (shown["cordoned"], shown["health"]["is_checking"]) == (True, False)
    assert "did not pass its check" in shown["health"]["cordon_reason"]


def test_a_device_whose_monitor_was_taken_away_serves_at_once(device, admin):
    device.hear(FAULTY)
    device.row.health = {}
    device.session.flush()
    shown = admin("uncordon")
    assert (shown["cordoned"], shown["health"]["is_watched"]) == (False, False)


def test_a_person_keeps_a_device_cordoned_that_would_return(device, admin):
    for _ in range(7):
        device.hear(replace(WELL, temperature_c=95))
    assert admin("cordon")["cordoned"]
    for _ in range(10):
        device.hear()
    assert device.row.cordoned


def test_the_api_shows_why_and_what_was_read(device, admin):
    device.hear(replace(WELL, xids=(94,)))
    shown = admin()
    assert not shown["cordoned"]
    assert shown["health"]["warnings"] == ["Xid 94 (contained ECC error)."]
    device.hear(FAULTY)
    shown = admin()
    assert shown["cordoned"]
    health = shown["health"]
    assert (health["cordon_rule"], health["cordon_reason"]) == ("xid", XID_48)
    figures = {"power_w": 200.0, "temperature_c": 60, "temperature_limit_c": 90}
    assert health["reading"] == figures


def test_a_heartbeat_that_says_nothing_new_writes_no_health(session, device):
    written = []
    connection = session.connection()
    events.listen(
        connection, "before_cursor_execute", lambda _1, _2, statement, *_: written.append(statement)
    )
    device.hear(replace(WELL, power_w=201.0))
    updates = [statement for statement in written if statement.startswith("UPDATE devices")]
    assert updates
    assert not [statement for statement in updates if "health" in statement]
    written.clear()
    device.hear(replace(WELL, power_w=300.0))
    assert [statement for statement in written if "health=" in statement]


# --- failures of several tenants' tasks -----------------------------------------------------------


@pytest.fixture
def fail(scenery, device):
    """Let a new task of a tenant fail on the device; returns the task's state."""
    tenants = {name: scenery.tenant(name) for name in ("red", "blue")}

    def fail(name, cause="exception"):
        task = on_device(scenery, tenants[name])
        device.hear(residents=[view(task, "ended")], events=[failed(task, cause)])
        return task.state

    return fail


@pytest.fixture
def other(scenery):
    """Another device of the kind."""
    return scenery.device("host.1")


@pytest.mark.parametrize("cause", ["exception", "exit", "preset"])
def test_tasks_of_two_tenants_that_fail_one_after_another_cordon(device, other, fail, cause):
    assert [fail("red", cause), fail("blue", cause)] == ["failed", "failed"]
    assert fail("blue", cause) == "waiting", "the device is to blame"
    assert device.fitness.cordon.reason == "3 tasks of 2 tenants failed on it one after another."
    assert (device.row.cordoned, device.changed) == (True, True)


@pytest.mark.parametrize("lacks", ["none", "cordoned", "down", "other kind"])
def test_the_last_device_of_a_kind_is_not_cordoned_because_of_tasks(
    scenery, session, device, fail, lacks
):
    if lacks != "none":
        other = scenery.device("host.1", kind="sim" if lacks == "other kind" else "cpu")
        other.cordoned = lacks == "cordoned"
        if lacks == "down":
            other.lease_until = transactions.now(session) - timedelta(seconds=1)
        session.flush()
    for name in ("red", "blue", "red", "blue"):
        assert fail(name) == "failed"
    assert not device.row.cordoned
    assert "of 2 tenants" in device.fitness.suspicion


@pytest.mark.parametrize("ends", ["done", "paused"])
def test_a_task_that_does_well_between_them_clears_the_device(scenery, device, other, fail, ends):
    for _ in range(3):
        fail("red"), fail("blue")
        task = on_device(scenery, scenery.tenant(f"green {next(clock_us)}"))
        if ends == "done":
            done = event(Finished, task, result={}, outputs={})
            device.hear(residents=[view(task, "ended")], events=[done])
        else:
            scenery.move(task, "pausing")
            device.hear(residents=[view(task, "paused")], events=[event(Paused, task)])
        assert device.fitness.failures == ()
    assert not device.row.cordoned


def test_failures_of_other_causes_are_not_counted(device, other, fail):
    for name in ("red", "blue", "red", "blue"):
        assert fail(name, "bundle") == "failed"
    assert device.row.fitness == {}


def test_failures_on_a_device_without_a_monitor_are_not_counted(scenery, session, other):
    device = WatchedDevice(scenery, "host.0")
    device.watch.report = lambda now_us: {}
    for name in ("red", "blue", "green", "grey"):
        task = on_device(scenery, scenery.tenant(name))
        device.hear(residents=[view(task, "ended")], events=[failed(task)])
    assert session.get_one(Device, "host.0").fitness == {}


# --- tasks that compute nothing -------------------------------------------------------------------

IDLE = replace(WELL, utilisation_percent=0)
BUSY = replace(WELL, utilisation_percent=90)


@pytest.fixture
def pass_time(session, device, monkeypatch):
    """Let the island's clock go on, with a reading and a heartbeat each 10 s."""
    began_s, passed = transactions.now_s(session), {"s": 0}
    monkeypatch.setattr(transactions, "now_s", lambda _: began_s + passed["s"])

    def pass_time(seconds, reading, task, **shown):
        for _ in range(0, seconds, 10):
            passed["s"] += 10
            device.now_us += 5_000_000
            device.hear(reading, residents=[view(task, **shown)])

    return pass_time


@pytest.fixture
def idle_pause(scenery):
    """Set the policy of a tenant."""

    def idle_pause(tenant, pause_s):
        tenant.idle_pause_s = pause_s
        scenery.session.flush()

    return idle_pause


@pytest.mark.parametrize("whose", ["its own", "of the tenant above"])
def test_a_task_that_computes_nothing_is_warned_then_paused(
    scenery, session, device, pass_time, idle_pause, whose
):
    tenant = scenery.tenant("idle")
    task = on_device(scenery, tenant)
    idle_pause(tenant if whose == "its own" else scenery.root, 600)
    pass_time(330, IDLE, task)
    assert told(session, "task.idle_warned") == []
    pass_time(10, IDLE, task)
    assert told(session, "task.idle_warned") == [
        "It has computed nothing on host.0 for 5m 00s. It is paused after 10m 00s."
    ]
    assert task.hold == ""
    pass_time(300, IDLE, task)
    assert (task.hold, device.changed) == ("user", True)
    assert len(told(session, "task.idle_warned")) == 1
    assert told(session, "task.idle_paused") == [
        "It has computed nothing on host.0 for 10m 00s, and is paused as its tenant wants it. "
        "Resume it when it has work."
    ]


@pytest.mark.parametrize(("most_s", "away_at_s"), [(None, 3600), (600, 600), (7200, 3600)])
def test_session_gives_way_after_its_own_time_or_its_tenants_limit(
    scenery, device, idle_pause, most_s, away_at_s
):
    """Also on a device without a monitor."""
    tenant = scenery.tenant("idle")
    task = on_device(scenery, tenant)
    wanted = {"run": {"command": ["sleep", "9"]}, "session": {"idle_s": 3600}}
    task.descriptor = {"name": "desk", **wanted}
    task.first_started_at = func.now() - timedelta(days=1)
    idle_pause(tenant, most_s)
    for idle_s, hold in ((30, ""), (away_at_s - 1, ""), (away_at_s, "idle")):
        device.hear(None, residents=[replace(view(task), idle_us=idle_s * 1_000_000)])
        assert task.hold == hold, idle_s


def test_a_task_that_computes_now_and_then_goes_on(scenery, session, pass_time, idle_pause):
    tenant = scenery.tenant("idle")
    task = on_device(scenery, tenant)
    idle_pause(tenant, 600)
    for _ in range(2):
        pass_time(500, IDLE, task)
        pass_time(10, BUSY, task)
    assert task.hold == ""
    assert len(told(session, "task.idle_warned")) == 2


def test_without_a_policy_an_idle_task_goes_on(scenery, session, device, pass_time):
    task = on_device(scenery, scenery.tenant("idle"))
    pass_time(700, IDLE, task)  # longer than a policy of the tests above
    assert (task.hold, device.row.fitness) == ("", {})


def test_a_gang_is_not_judged_by_one_of_its_devices(scenery, pass_time, idle_pause):
    tenant = scenery.tenant("idle")
    wide = {"devices_min": 2, "devices_max": 2}
    task = scenery.task(tenant, "running", seat="host.0", **wide)
    idle_pause(tenant, 60)
    pass_time(600, IDLE, task)
    assert task.hold == ""


def test_a_tenants_policy_is_set_by_the_api(admin, app, scenery):
    key = scenery.key(scenery.root, "platform_admin")
    tenant = scenery.tenant("idle")
    scenery.session.flush()
    client = TestClient(app, headers={"Authorization": f"Bearer {key}"})
    path = f"/v1/tenants/{tenant.id}"
    for pause_s in (600, None):
        etag = client.get(path).headers["ETag"]
        changed = client.patch(path, json={"idle_pause_s": pause_s}, headers={"If-Match": etag})
        assert changed.json()["idle_pause_s"] == pause_s
    refused = client.patch(path, json={"idle_pause_s": 59}, headers={"If-Match": etag})
    assert refused.status_code == 422


# --- faults of a device ---------------------------------------------------------------------------


def test_task_that_a_device_cannot_set_up_goes_elsewhere_without_an_attempt(
    session, device, running
):
    told_now = [failed(running, "device")]
    device.hear(residents=[view(running, "ended")], events=told_now)
    assert (running.state, running.attempts, running.seat) == ("waiting", 0, None)
    assert device.row.cordoned
    assert device.fitness.cordon.rule == "fault"
    assert device.fitness.cordon.returns


def test_device_at_fault_is_tried_again_and_stays_cordoned_after_three_faults(device):
    now_s = 1_000_000.0
    fitness = health_cordons.Fitness()
    for returns in (True, True, False):
        fitness = health_cordons.device_failed(fitness, now_s=now_s, is_cordoned=False)
        assert fitness.cordon.returns == returns
        soon = health_cordons.heard(fitness, None, now_s=now_s + 59, is_cordoned=True)
        assert soon.cordon is not None
        now_s += health_cordons.FAULT_S
        fitness = health_cordons.heard(fitness, None, now_s=now_s, is_cordoned=True)
        assert (fitness.cordon is None) == returns
    assert fitness.cordon.reason.startswith("Cordoned 3 times within a day")
