"""Why a task waits, on real rows; each reason is ended by the change that it names (rule F10)."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import func, select, text, update

from app.core.explanation import waiting_reasons
from app.core.model import codec
from app.core.model.checkpoints.migration import Moving
from app.core.model.device_choice import with_packages
from app.core.scheduling import blockers
from app.core.scheduling.board import Board
from app.db import transactions
from app.db.models import (
    Account,
    Island,
    Lot,
    Need,
    Placement,
    RequestNeed,
    Reservation,
    ReservationWindow,
    Task,
    User,
)
from app.insight import explain, forecast
from app.intake import reserved_tasks
from app.scheduling import snapshot_reader
from tests.scenery import Scenery

SECOND = 10**6


@pytest.fixture
def scenery(session):
    return Scenery(session)


@pytest.fixture
def told(session):
    """Reasons by code."""

    def told(task):
        session.flush()
        session.expire_all()
        found = explain.explain(session, [session.get_one(Task, task.id)])[task.id]
        return {reason["code"]: reason for reason in found.reasons}

    return told


def change(reasons, code):
    found = reasons[code]["change"]
    assert found["action"] in waiting_reasons.ACTIONS
    assert reasons[code]["unblocked_by"]
    return found


class Scene:
    """A waiting task with one reason to look at, and how to make the change that it names."""

    def __init__(self, session, scenery):
        self.session, self.scenery = session, scenery
        self.a, self.b = scenery.tenant("a"), scenery.tenant("b")
        self.d0 = scenery.device("d0", memory_bytes=8 * 10**9)

    def use(self, tenant, seconds):
        """Booked long ago by someone who is not there any more."""
        user = self.scenery.user(f"old {next(self.scenery.numbers)}", tenant)
        faded = int(seconds * SECOND) << 40
        self.scenery.add(Account(user_id=user.id, tenant_id=tenant.id, faded=faded))

    def held(self, tenant, device="d0", *, for_s=30.0, **more):
        started = func.now() - timedelta(seconds=for_s)
        return self.scenery.task(tenant, "running", seat=device, started_at=started, **more)

    def let_go(self, task):
        ended = {"ended_at": datetime.now(UTC), "end": "finished"}
        placement = self.session.scalars(
            select(Placement).where(Placement.task_id == task.id)
        ).one()
        for name, value in ended.items():
            setattr(placement, name, value)
        self.scenery.move(task, "done", seat=None)

    # Each returns the task, and what makes the change.

    def held_by_user(self):
        task = self.scenery.task(self.a, "blocked", hold="user")
        return task, lambda _: setattr(task, "hold", "")

    def held_by_rule(self):
        task = self.scenery.task(self.a, "blocked", hold="rule")
        return task, lambda _: setattr(task, "hold", "")

    def lost_at_rung(self):
        lot = self.scenery.task(self.a, "blocked", island=None)
        stop = {"metric": "loss", "goal": "min", "rungs": [10], "keep": 0.5}
        lot.lot_id, lot.descriptor = lot.id, {**lot.descriptor, "stop": stop}
        task = self.scenery.task(self.a, "blocked", hold="rung")
        task.lot_id, task.lot_index = lot.id, 0
        return task, lambda _: setattr(task, "hold", "")

    def lot_room(self):
        task = self.scenery.task(self.a, "blocked", hold="promoted")

        def do(change):
            assert change["value"] == 1
            task.hold = ""

        return task, do

    def idle_session(self):
        task = self.scenery.task(self.a, "blocked", hold="idle")
        return task, lambda _: setattr(task, "hold", "")

    def held_by_admin(self):
        task = self.scenery.task(self.a, "blocked", hold="admin")
        return task, lambda _: setattr(task, "hold", "")

    def lot(self, name, **counts):
        """A lot, and how to set the column of this name to the value of a change."""
        task = self.scenery.task(self.a, "blocked", island=None)
        task.lot_id = task.id
        lot = self.scenery.add(Lot(id=task.id, count=10, **counts))
        return task, lambda change: setattr(lot, name, change["value"])

    def lot_held(self):
        return self.lot("at_once", at_once=0)

    def lot_failures(self):
        return self.lot("failures_allowed", at_once=2, made=4, failed=2, failures_allowed=1)

    def lot_members(self):
        return self.lot("at_once", at_once=2, made=2, live=2)

    def dependency(self):
        first = self.scenery.task(self.a)
        task = self.scenery.task(self.a, "blocked")
        self.scenery.add(Need(task_id=task.id, needs_id=first.id))

        def do(change):
            assert change["value"] == [first.id]
            self.scenery.move(first, "done")

        return task, do

    def awaiting(self, standing, outcome):
        first = self.scenery.task(self.a)
        task = self.scenery.task(self.a, "blocked", standing=standing)
        need = RequestNeed(
            task_id=task.id, needs_request_id=first.request_id, name="first", awaited="done",
            otherwise="hold", outcome=outcome,
        )  # fmt: skip
        self.scenery.add(need)

        def do(change):
            assert change["of"] == first.request_id
            need.outcome, task.standing = "met", ""

        return task, do

    def after_request(self):
        return self.awaiting("waits", "")

    def request_missed(self):
        return self.awaiting("held", "hold")

    def reserved(self, begins_at):
        """A task that names a reservation with this window, and the window."""
        task = self.scenery.task(self.a, "blocked")
        times = {"begins_at": begins_at, "ends_at": begins_at + timedelta(hours=2)}
        mine = {"island": task.island, "tenant_id": self.a.id, "devices": {"cpu": 1}}
        it = self.scenery.add(Reservation(id="rsv_1", name="workshop", **mine, **times))
        self.session.flush()
        window = self.scenery.add(ReservationWindow(reservation_id=it.id, **times))
        task.descriptor = {**task.descriptor, "reservation": it.name}
        task.reservation_id = it.id
        self.session.flush()
        reserved_tasks.mark(self.session)
        return task, window

    def outside_reservation(self):
        at = datetime.now(UTC) + timedelta(hours=1)
        task, window = self.reserved(at)

        def do(change):
            assert change["value"] == pytest.approx(at.timestamp(), abs=1e-3)
            window.in_force = True  # as if it were that late
            self.session.flush()
            reserved_tasks.mark(self.session)

        return task, do

    def reservation_over(self):
        past = datetime.now(UTC) - timedelta(hours=3)
        task, window = self.reserved(past)

        def do(change):
            assert (change["action"], change["of"]) == ("extend_reservation", "workshop")
            window.ends_at = past + timedelta(hours=9)
            self.session.flush()
            reserved_tasks.mark(self.session)

        return task, do

    def not_before(self):
        at = datetime.now(UTC) + timedelta(hours=1)
        task = self.scenery.task(self.a, "blocked", not_before=at)

        def do(change):
            assert change["value"] == pytest.approx(at.timestamp(), abs=1e-3)
            task.not_before = at - timedelta(hours=2)  # as if it were that late

        return task, do

    def gang_that_spans(self):
        """Its home is isle; its ticket is on another island."""
        self.scenery.add(Island(name="east"))
        gang = self.scenery.task(self.a, "blocked")
        gang.gang_id = gang.id
        ticket = self.scenery.task(self.a, "blocked", gang_id=gang.id)
        ticket.island = "east"
        return gang, ticket

    def tickets(self):
        gang, ticket = self.gang_that_spans()

        def do(change):
            assert change["value"] == ["east"]
            ticket.state, ticket.good_for = "running", gang.epoch + 1

        return gang, do

    def gang_wants_none(self):
        gang, ticket = self.gang_that_spans()
        gang.hold = "user"
        return ticket, lambda _: setattr(gang, "hold", "")

    def retry_backoff(self):
        at = datetime.now(UTC) + timedelta(hours=1)
        task = self.scenery.task(self.a, retry_at=at, attempts=1, retry_max=2)

        def do(change):
            assert change["value"] == pytest.approx(at.timestamp(), abs=1e-3)
            task.retry_at = at - timedelta(hours=2)

        return task, do

    def store_refuses(self):
        at = datetime.now(UTC) + timedelta(hours=1)
        task = self.scenery.task(self.a, retry_at=at, unstored="it is full.")

        def do(change):
            assert change["value"] == pytest.approx(at.timestamp(), abs=1e-3)
            task.retry_at = at - timedelta(hours=2)

        return task, do

    def environment_pending(self):
        pending = {"environment": {"python": "3.11", "lock": "", "own_python": False}}
        task = self.scenery.task(self.a, "blocked", island=None, descriptor=pending)
        locked = {"environment": {**pending["environment"], "lock": "5" * 64}}
        return task, lambda _: setattr(task, "descriptor", locked)

    def packages_installing(self):
        lock, facts = "5" * 64, {"offers": ["environment:3.11"]}
        self.d0.facts = {**facts, "builds": {lock: ["building", ""]}}
        task = self.scenery.task(self.a, device_choice=with_packages("!environment:3.11", lock))

        def do(change):
            assert change == {"action": "wait_for_packages", "value": None, "of": "host"}
            self.d0.facts = {**facts, "builds": {}, "environments": {lock: [1, 1]}}

        return task, do

    def not_looked_at(self):
        task = self.scenery.task(self.a, "blocked")
        return task, lambda _: self.scenery.move(task, "waiting")

    def no_scheduler(self):
        island = self.session.get_one(Island, "isle")
        island.leader_until = datetime.now(UTC) - timedelta(minutes=1)
        task = self.scenery.task(self.a)
        later = datetime.now(UTC) + timedelta(hours=1)
        return task, lambda _: setattr(island, "leader_until", later)

    def no_device_up(self):
        task = self.scenery.task(self.a, kind="cuda")
        return task, lambda change: self.scenery.device("g0", kind=change["of"])

    def device_drained(self):
        self.d0.cordoned = True
        return self.scenery.task(self.a), lambda _: setattr(self.d0, "cordoned", False)

    def too_few_devices(self):
        task = self.scenery.task(self.a, devices_min=4, devices_max=4)
        return task, lambda change: self.ask_for(task, change["value"])

    def gang_needs_more_devices(self):
        self.scenery.device("d1"), self.scenery.device("d2")
        self.held(self.b)
        task = self.scenery.task(self.a, devices_min=3, devices_max=3)
        return task, lambda change: self.ask_for(task, change["value"])

    def ask_for(self, task, devices):
        self.scenery.line(task, -1)
        task.devices_min = devices
        self.session.flush()
        self.scenery.line(task, 1)

    def devices_kept_for_a_gang(self):
        self.scenery.device("d1")
        self.held(self.b)
        gang = self.scenery.task(self.b, devices_min=2, devices_max=2)
        return self.scenery.task(self.a), lambda _: self.scenery.move(gang, "done")

    def frozen_on_device(self):
        self.scenery.device("d1")
        held = self.held(self.b, device="d0")
        can = ["pause", "restart"]
        task = self.scenery.task(self.a, epoch=1, image_on="d0", saved=True, capabilities=can)

        def do(change):
            assert change["of"] == "d0"
            self.let_go(held)

        return task, do

    def moving(self):
        self.scenery.device("d1")
        moving = Moving(to="d1", source="d0", epoch=1, until_s=2e9, stopping=True)
        on_the_way = {"move_to": "d1", "moving": codec.to_json(moving, whole=True)}
        task = self.scenery.task(self.a, epoch=1, image_on="d0", **on_the_way)

        def do(change):
            assert change["of"] == "d1"
            task.move_to = task.moving = None
            self.scenery.move(task, "starting", seat="d1")

        return task, do

    def image_being_saved(self):
        task = self.scenery.task(self.a, epoch=1, image_on="d0", saved=False)
        return task, lambda _: setattr(task, "saved", True)

    def tenant_limit(self):
        self.scenery.device("d1")
        self.a.limit = {"cpu": 1}
        self.held(self.a)

        def do(change):
            assert change["action"] == "raise_limit"
            self.a.limit = {change["of"]: change["value"]}

        return self.scenery.task(self.a), do

    def budget_exhausted(self, action="pause"):
        ends_at = datetime.now(UTC) + timedelta(hours=1)
        self.a.exhausted, self.a.budget_ends_at = {"cpu": action}, ends_at

        def do(change):
            assert change["action"] == "wait_until"
            assert change["value"] == pytest.approx(ends_at.timestamp(), abs=1e-3)
            self.a.exhausted = {}  # control begins the next period

        return self.scenery.task(self.a), do

    def budget_demoted(self):
        self.held(self.b)
        return self.budget_exhausted("demote")

    def user_limit(self):
        self.scenery.device("d1")
        self.held(self.a)
        task = self.scenery.task(self.a)
        user = self.session.get_one(User, task.user_id)
        user.limit = {"cpu": 1}

        def do(change):
            assert change == {"action": "raise_user_limit", "value": 2, "of": "cpu"}
            user.limit = {change["of"]: change["value"]}

        return task, do

    def user_running_limit(self):
        self.scenery.device("d1")
        self.held(self.a)
        self.a.user_defaults = {"max_running": 1}
        task = self.scenery.task(self.a)
        user = self.session.get_one(User, task.user_id)
        return task, lambda change: setattr(user, "max_running", change["value"])

    def tenant_running_limit(self):
        self.scenery.device("d1")
        self.a.max_running = 1
        self.held(self.a)
        return self.scenery.task(self.a), lambda c: setattr(self.a, "max_running", c["value"])

    def tenant_over_fair_share(self):
        self.use(self.a, 100)
        self.held(self.b)
        return self.scenery.task(self.a), lambda change: self.use(self.b, change["value"])

    def user_over_fair_share(self):
        other = self.scenery.user("other", self.a)
        held = self.held(self.a, user=other)
        task = self.scenery.task(self.a)
        self.scenery.add(
            Account(user_id=task.user_id, tenant_id=self.a.id, faded=100 * SECOND << 40)
        )

        def do(change):
            faded = int(change["value"] * SECOND) << 40
            self.scenery.add(Account(user_id=held.user_id, tenant_id=self.a.id, faded=faded))

        return task, do

    def higher_priority_ahead(self):
        self.held(self.a)
        self.scenery.task(self.a, priority=7)
        task = self.scenery.task(self.a)
        return task, lambda change: setattr(task, "priority", change["value"])

    def earlier_task_ahead(self):
        self.held(self.b)
        self.scenery.task(self.a)
        task = self.scenery.task(self.a)
        return task, lambda change: setattr(task, "priority", change["value"])

    def guaranteed_to_others(self):
        self.b.guarantee = {"cpu": 1}
        self.use(self.b, 1000)
        held = self.held(self.b)
        return self.scenery.task(self.a), lambda _: self.let_go(held)

    def holders_protected(self):
        self.use(self.b, 1000)
        away = datetime.now(UTC).timestamp()
        held = self.held(self.b, tier="premium", away=[[away - 1200, away - 100]])
        return self.scenery.task(self.a), lambda _: self.let_go(held)

    def tier_shed(self):
        for _ in range(2):
            self.scenery.task(self.b, epoch=1, image_on="d0", tier="premium")
        long_ago = func.now() - timedelta(hours=2)
        task = self.scenery.task(self.a, epoch=1, image_on="d0", waiting_since=long_ago)

        def do(change):
            for n in range(5):  # one alone would not be enough: it says at least how much more
                self.scenery.device(f"more{n}", kind=change["of"])

        return task, do

    def waiting_for_device(self):
        held = self.held(self.b)
        return self.scenery.task(self.a), lambda _: self.let_go(held)

    def device_stopping(self):
        self.held(self.b)
        stopping = self.scenery.device("d1", facts={"stopping": True})

        def do(change):
            assert change == {"action": "wait_for_workers", "value": 1, "of": "cpu"}
            stopping.facts = {}

        return self.scenery.task(self.a), do

    def avoids_device(self):
        self.scenery.device("d1")
        self.held(self.b, device="d1")
        until_s = datetime.now(UTC).timestamp() + 60.0
        task = self.scenery.task(self.a, avoids=[["d0", until_s, False]])

        def do(change):
            assert (change["action"], change["value"]) == ("wait_until", pytest.approx(until_s))
            task.avoids = [["d0", until_s - 3600.0, False]]  # as if it were that late

        return task, do

    def some_devices_drained(self):
        self.held(self.b)
        drained = [self.scenery.device(f"d{n}", cordoned=True) for n in (1, 2)]

        def do(change):
            assert change == {"action": "open_devices", "value": 1, "of": "cpu"}
            drained[0].cordoned = False

        return self.scenery.task(self.a), do

    def device_free(self):
        task = self.scenery.task(self.a)
        return task, lambda _: self.scenery.move(task, "done")

    def rank_behind(self):
        task = self.scenery.task(self.a, "running", seat="d0")
        task.behind = "Rank 0 waits in all_reduce, to which rank 1 has not come: rank 1 runs."

        def do(change):
            task.behind = ""

        return task, do

    def device_lacks_room(self):
        task = self.scenery.task(self.a, "starting", seat="d0")
        query = select(Placement).where(Placement.task_id == task.id)
        placement = self.session.scalars(query).one()
        placement.waits_for = "bytes"

        def do(change):
            assert change["of"] == "d0"
            placement.waits_for = ""

        return task, do


def test_a_task_is_told_why_rules_have_cordoned_its_devices(session, scenery, told):
    scene = Scene(session, scenery)
    for n, code in enumerate((48, 64, 79, 95)):
        why = {"rule": "xid", "reason": f"Xid {code}.", "effect": "move", "at_s": 0.0}
        cordon = {"cordon": {**why, "returns": False}}
        scenery.device(f"g{n}", kind="cuda", cordoned=True, fitness=cordon)
    message = told(scenery.task(scene.a, kind="cuda"))["DEVICE_DRAINED"]["message"]
    assert message == (
        "Every cuda device that is up is drained (4 of 4). g0: Xid 48. g1: Xid 64. g2: Xid 79. "
        "1 more are faulty too."
    )
    scenery.device("g9", kind="cuda")
    gang = scenery.task(scene.a, kind="cuda", devices_min=2, devices_max=2)
    assert "g0: Xid 48." in told(gang)["SOME_DEVICES_DRAINED"]["message"]


@pytest.mark.parametrize(
    ("others", "cordoned", "codes"),
    [
        ("none", False, {"DEVICE_STOPPING"}),
        ("none", True, {"DEVICE_DRAINED"}),  # it takes no work either once its worker is back
        ("down", False, {"NO_DEVICE_UP"}),  # it has stopped
        ("free", False, {"DEVICE_FREE"}),
        ("held", False, {"DEVICE_STOPPING", "WAITING_FOR_DEVICE"}),
        ("drained", False, {"DEVICE_STOPPING", "SOME_DEVICES_DRAINED"}),
    ],
)
def test_task_is_told_of_a_stopping_device_if_none_is_free(
    session, scenery, told, others, cordoned, codes
):
    scene = Scene(session, scenery)
    scene.d0.facts, scene.d0.cordoned = {"stopping": True}, cordoned
    if others == "down":
        scene.d0.lease_until = func.now() - timedelta(seconds=1)
    elif others != "none":
        scenery.device("d1", cordoned=others == "drained")
    if others == "held":
        scene.held(scene.b, "d1")
    reasons = told(scenery.task(scene.a))
    assert {
        "DEVICE_STOPPING",
        "DEVICE_DRAINED",
        "SOME_DEVICES_DRAINED",
        "NO_DEVICE_UP",
        "DEVICE_FREE",
        "WAITING_FOR_DEVICE",
    } & set(reasons) == codes
    if "DEVICE_STOPPING" in codes:
        said = reasons["DEVICE_STOPPING"]
        assert said["message"] == "Device d0 is stopping: no new work starts there."
        assert said["unblocked_by"] == "its worker is back or another device becomes free"
    if "SOME_DEVICES_DRAINED" in codes:
        assert reasons["SOME_DEVICES_DRAINED"]["message"].startswith("1 of 2 cpu devices is ")


@pytest.mark.parametrize("code", waiting_reasons.CODES)
def test_change_named_by_a_reason_ends_that_reason(session, scenery, told, code):
    task, do = getattr(Scene(session, scenery), code.lower())()
    reasons = told(task)
    assert code in reasons, reasons
    do(change(reasons, code))
    assert code not in told(task)


def test_launched_task_without_room_on_its_device_is_told_for_what_it_waits(session, scenery, told):
    scene = Scene(session, scenery)
    task, _ = scene.device_lacks_room()
    assert told(task)["DEVICE_LACKS_ROOM"]["message"] == (
        "It was given d0 and waits there for device memory: paused and frozen tasks hold it until "
        "they have left it."
    )


def test_every_code_and_action_is_in_the_docs():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "waiting.md").read_text()
    documented = set(re.findall(r"`([A-Z_]{6,})`", page))
    assert documented - {"NO_HISTORY", "BLOCKED", "TOO_WIDE", "TOO_FAR"} == set(
        waiting_reasons.CODES
    )
    actions = set(re.findall(r"`([a-z]+(?:_[a-z]+)*)`", page))
    assert set(waiting_reasons.ACTIONS) <= actions


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_task_is_told_until_when_a_reservation_holds_the_devices(session, scenery, told, where):
    scene = Scene(session, scenery)
    task = scene.guaranteed_to_others()[0]
    island = task.island if where == "here" else scenery.add(Island(name=where)).name
    scene.b.guarantee, scene.b.reserved = {}, {island: {"cpu": 1}}
    times = {"begins_at": datetime.now(UTC), "ends_at": datetime(2100, 1, 2, 3, 4, tzinfo=UTC)}
    mine = {"island": island, "tenant_id": scene.b.id, "devices": {"cpu": 1}}
    made = scenery.add(Reservation(id="res_1", name="workshop", **mine, **times))
    session.flush()
    scenery.add(ReservationWindow(reservation_id=made.id, in_force=True, **times))
    why = told(task).get("GUARANTEED_TO_OTHERS")
    if where == "elsewhere":
        assert why is None
    else:
        assert why["message"].endswith("A reservation for them ends at 2100-01-02 03:04 UTC.")
        assert why["unblocked_by"] == "those tasks finish, or the reservation ends"


def test_task_is_told_why_the_worker_cannot_serve_a_device(session, scenery, told):
    scene = Scene(session, scenery)
    scene.d0.lease_until, scene.d0.facts = None, {"failed": "the GPU fell off the bus."}
    assert told(scenery.task(scene.a))["NO_DEVICE_UP"]["message"] == (
        "No cpu device is up (known: 1). d0: the GPU fell off the bus."
    )


def test_a_task_that_avoids_a_label_is_told_of_devices_without_it(session, scenery, told):
    scene = Scene(session, scenery)
    scene.d0.facts = {"labels": ["spot"]}
    task = scenery.task(scene.a, device_choice="-spot")
    assert told(task)["NO_DEVICE_UP"]["message"] == (
        "No cpu device without label spot is up (known: 0)."
    )
    h100 = scenery.task(scene.a, device_choice="=h100,>9.0")
    assert told(h100)["NO_DEVICE_UP"]["message"] == (
        "No cpu device of model h100 of compute capability 9.0 is up (known: 0)."
    )
    scene.d0.facts = {}
    assert "NO_DEVICE_UP" not in told(task)


def test_a_fraction_is_told_that_no_device_has_enough_left(session, scenery, told):
    scene = Scene(session, scenery)
    scene.held(scene.b, device_choice="%600")
    task = scenery.task(scene.a, device_choice="%500")
    [said] = [told(task)["WAITING_FOR_DEVICE"]]
    assert said["message"].startswith("No cpu device has 0.5 of it left; ")
    assert "too full; a time slice lasts at least" in said["message"]
    assert said["unblocked_by"] == "0.5 of a cpu device becomes free"


class TestLimits:
    def test_tenant_above_is_mentioned_without_its_name(self, session, scenery, told):
        lab = scenery.tenant("lab", limit={"*": 2})
        mine, other = (
            scenery.tenant("mine", parent_id=lab.id),
            scenery.tenant("x", parent_id=lab.id),
        )
        for n in range(4):
            scenery.device(f"d{n}")
        scenery.task(other, "running", seat="d0")
        scenery.task(other, "running", seat="d1")
        task = scenery.task(mine)
        reason = told(task)["TENANT_LIMIT"]
        assert reason["message"] == "A tenant above yours is at its limit of devices."
        assert reason["change"] == {"action": "raise_limit_above", "value": 1, "of": "*"}
        lab.limit = {"*": 3}
        assert "TENANT_LIMIT" not in told(task)

    def test_every_full_level_is_reported(self, session, scenery, told):
        lab = scenery.tenant("lab", limit={"cpu": 1}, max_running=1)
        mine = scenery.tenant("mine", parent_id=lab.id, limit={"cpu": 1})
        scenery.device("d0")
        scenery.task(mine, "running", seat="d0")
        found = explain.explain(session, [task := scenery.task(mine)])[task.id]
        limits = [reason["code"] for reason in found.reasons if "LIMIT" in reason["code"]]
        assert limits == ["TENANT_LIMIT", "TENANT_LIMIT", "TENANT_RUNNING_LIMIT"]
        assert found.nearest["message"] == "one of its tasks ends, or the limit is raised to 2."
        assert (found.estimate, found.no_estimate["code"]) == (None, "BLOCKED")


class TestPlace:
    def test_place_counts_all_tasks_that_go_first(self, session, scenery):
        a, b = scenery.tenant("a"), scenery.tenant("b", 2000)
        scenery.device("d0")
        scenery.charge(scenery.task(a, "running", seat="d0"), 10**6)
        ann = scenery.user("ann", a)
        for _ in range(5):
            scenery.task(b)
        first = scenery.task(a, user=ann)
        tasks = [scenery.task(a) for _ in range(2)]
        # a has used 1 s and is charged 1 s more for what it holds: 2, 3, 4 with each turn.  b goes
        # at 0, 0.5, 1, 1.5 and, with an equal score but a later name, at 2.  In a, ann goes first.
        places = explain.explain(session, [first, *tasks])
        assert [places[task.id].place for task in (first, *tasks)] == [5, 7, 8]

    def test_each_kind_of_device_has_its_own_line(self, session, scenery):
        a = scenery.tenant("a")
        scenery.task(a), scenery.task(a, kind="cuda")
        task = scenery.task(a, kind="cuda")
        assert explain.explain(session, [task])[task.id].place == 2

    def test_usage_of_all_users_of_a_tenant_counts(self, session, scenery, told):
        scene = Scene(session, scenery)
        scene.held(scene.b)
        task = scenery.task(scene.a)
        assert "TENANT_OVER_FAIR_SHARE" not in told(task)
        scene.use(scene.a, 500)
        assert "TENANT_OVER_FAIR_SHARE" in told(task)

    def test_tenant_moved_in_the_tree_is_followed(self, session, scenery):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        kept = explain._Kept()
        task = scenery.task(b)
        kept.picture(session, "isle", know={b.id})
        b.parent_id = a.id
        session.flush()
        kept.pictures.clear()
        picture = kept.picture(session, "isle", know={b.id})
        assert list(kept.path(b.id)) == [b.id, a.id]
        assert picture.line.waiting["cpu"] == {a.id: 1, b.id: 1}
        assert task.tenant_id == b.id


class TestEstimate:
    def ended(self, scenery, tenant, held_s):
        task = scenery.task(tenant, "done", total_held_us=int(held_s * SECOND))
        task.seat = "d0"
        ended = {"ended_at": datetime.now(UTC), "end": "finished"}
        scenery.seat(task, **ended)

    def test_first_end_of_a_task_is_known_at_once(self, session, scenery, monkeypatch):
        clock = SimpleNamespace(monotonic=lambda: clock.now_s, now_s=100.0)
        monkeypatch.setattr(forecast, "time", clock)
        learned = forecast.Learned().refreshed(session)
        scenery.device("d0")
        self.ended(scenery, scenery.tenant("red"), 100)
        clock.now_s += 2.0
        assert learned.refreshed(session).history.remaining(((),)) is not None

    def test_no_estimate_is_given_without_history(self, session, scenery):
        a = scenery.tenant("a")
        scenery.device("d0")
        scenery.task(a, "running", seat="d0")
        found = explain.explain(session, [task := scenery.task(a)])[task.id]
        assert found.estimate is None
        assert found.no_estimate == {
            "code": "NO_HISTORY",
            "message": "No task has ended by itself here yet to learn from.",
        }

    def test_estimate_is_an_interval_around_the_median(self, session, scenery):
        a = scenery.tenant("a")
        scenery.device("d0")
        for _ in range(30):
            self.ended(scenery, a, 100)
        running = scenery.task(
            a, "running", seat="d0", started_at=func.now() - timedelta(seconds=40)
        )
        [first, second] = [scenery.task(a) for _ in range(2)]
        found = explain.explain(session, [first, second])
        one, two = found[first.id].estimate, found[second.id].estimate
        assert one.p10_s < one.p50_s < one.p90_s
        assert one.earliest_at < one.starts_at < one.latest_at
        # A fresh task takes the place of one that has had its minute (rule F8): the first in 20 s,
        # and the second a minute later.
        assert 15 < one.p50_s < 25
        assert 70 < two.p50_s < 90
        assert running.seat == "d0"

    @pytest.mark.parametrize(
        ("of", "begins_s", "starts_s"),
        [
            ("", 30, 5000),  # maintenance begins before the running task ends
            ("", -100, 5000),  # in force: its device serves again before the other is free
            ("b", 30, 5000),
            ("b", 7000, 60),  # it starts before the window
            ("b", -100, 60),  # it is lent, since b has no work
            ("a", 30, 30),
            ("a.y", 30, 5000),
        ],
    )
    def test_windows_of_reservations_and_maintenance_are_foreseen(
        self, session, scenery, of, begins_s, starts_s
    ):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        whose = {"a": a, "b": b, "a.y": scenery.tenant("y", parent_id=a.id)}.get(of)
        device = scenery.device("d0")
        if of or begins_s > 0:
            seat, lasts_s = "d0", 100
        else:
            device.maintenance, device.cordoned = "until soon", True
            seat, lasts_s = scenery.device("d1").id, 50_000
        for _ in range(30):
            self.ended(scenery, b, lasts_s)
        used = scenery.task(a, "running", seat=seat)
        scenery.charge(used, 10**6 * SECOND)  # so that b's task runs to its end
        scenery.move(used, "done")
        session.execute(update(Placement).values(ended_at=func.now()))
        started_at = func.now() - timedelta(seconds=40)
        scenery.task(b, "running", seat=seat, started_at=started_at)
        now = datetime.now(UTC)
        times = {
            "begins_at": now + timedelta(seconds=begins_s),
            "ends_at": now + timedelta(seconds=max(5000, begins_s + 1000)),
        }
        given = {"devices": {"cpu": 1}} if whose else {"devices": {}, "device_ids": ["d0"]}
        mine = {"island": "isle", "tenant_id": whose.id if whose else None}
        scenery.add(Reservation(id="res_1", name="it", **mine, **given, **times))
        session.flush()
        scenery.add(ReservationWindow(reservation_id="res_1", in_force=begins_s < 0, **times))
        task = scenery.task(scenery.tenant("x", parent_id=a.id) if of == "a.y" else a)
        found = explain.explain(session, [task])[task.id].estimate
        assert found.p50_s == pytest.approx(starts_s, rel=0.15, abs=3)

    def test_start_beyond_a_month_is_unknown_and_spoils_no_other(self, session, scenery):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        scenery.device("d0")
        scenery.device("d1", kind="sim")
        for _ in range(30):
            self.ended(scenery, a, 200 * 86_400)
        used = scenery.task(b, "running", seat="d0", kind="cpu")
        scenery.charge(used, 1000 * 86_400 * SECOND)
        scenery.move(used, "done")
        session.execute(update(Placement).values(ended_at=func.now()))
        scenery.task(a, "running", seat="d0")
        far, now = scenery.task(b), scenery.task(b, kind="sim")
        found = explain.explain(session, [far, now])
        assert found[far.id].estimate is None
        assert found[far.id].no_estimate == {
            "code": "TOO_FAR",
            "message": "Expected to wait longer than 30 days.",
        }
        assert found[now.id].estimate.p50_s < 2

    @pytest.mark.parametrize(
        ("steps", "left_s"), [({"steps": 10_000}, 9_000), ({"steps": 1_000}, 0), ({}, None)]
    )
    def test_holder_that_tells_its_steps_is_expected_to_make_them(
        self, session, scenery, steps, left_s
    ):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        scenery.device("d0")
        for _ in range(30):
            self.ended(scenery, a, 100)
        used = scenery.task(b, "running", seat="d0")
        scenery.charge(used, 10**6 * SECOND)
        scenery.move(used, "done")
        session.execute(update(Placement).values(ended_at=func.now()))
        scenery.task(
            a, "running", seat="d0", step=1_000, total_held_us=1_000 * SECOND,
            descriptor={"run": {"job": "train:Train"}, "params": steps},
        )  # fmt: skip
        other = scenery.task(b)
        told = explain.explain(session, [other])[other.id].estimate
        if left_s is not None:
            assert told.p50_s == pytest.approx(max(1, left_s), rel=0.01)
        else:
            assert 100 < told.p50_s < 5_000

    def test_no_start_is_later_than_one_of_a_worse_place(self, session, scenery):
        tenants = [scenery.tenant(name) for name in "abc"]
        scenery.device("d0")
        scenery.device("d1")
        for tenant, held_s in zip(tenants, (3, 300, 30_000), strict=True):
            for _ in range(10):
                self.ended(scenery, tenant, held_s)
        for n in range(2):
            scenery.task(tenants[n], "running", seat=f"d{n}")
        queue = [
            scenery.task(tenants[n % 3], devices_min=1 + n % 2, devices_max=1 + n % 2)
            for n in range(12)
        ]
        told = sorted(explain.explain(session, queue).values(), key=lambda why: why.place)
        starts = [why.estimate for why in told if why.estimate is not None]
        assert len(starts) > 6
        for one, other in pairwise(starts):
            assert one.starts_at <= other.starts_at
            assert one.p10_s <= one.p50_s <= one.p90_s

    def test_task_of_a_less_served_tenant_does_not_wait_for_others_to_end(self, session, scenery):
        a, b = scenery.tenant("a"), scenery.tenant("b")
        scenery.device("d0")
        for _ in range(30):
            self.ended(scenery, a, 100)
        started_at = func.now() - timedelta(seconds=40)
        scenery.task(a, "running", seat="d0", started_at=started_at)
        own, other = scenery.task(a), scenery.task(b)
        found = explain.explain(session, [own, other])
        assert (found[own.id].place, found[other.id].place) == (2, 1)
        assert found[other.id].estimate.p90_s < 5  # its turn is over
        assert found[own.id].estimate.p50_s > 30


def test_task_is_told_the_names_of_the_tasks_that_it_needs(session, scenery):
    a = scenery.tenant("a")
    needed = scenery.task(a, name="prep")
    task = scenery.task(a, "blocked", name="train")
    scenery.add(Need(task_id=task.id, needs_id=needed.id))
    [reason] = explain.explain(session, [task])[task.id].reasons
    assert reason["message"] == "Needs prep of request of prep to be done first."
    assert reason["change"]["value"] == [needed.id]
    needed.request_id = task.request_id
    needed.ordinal = 1
    session.flush()
    [reason] = explain.explain(session, [task])[task.id].reasons
    assert reason["message"] == "Needs prep to be done first."


def test_all_tasks_of_a_page_are_explained_with_one_board(session, scenery):
    a = scenery.tenant("a")
    scenery.device("d0")
    tasks = [scenery.task(a, priority=n % 2) for n in range(20)]
    found = explain.explain(session, tasks)
    order = sorted(tasks, key=lambda task: (-task.priority, task.submitted_at, task.id))
    assert [found[task.id].place for task in order] == list(range(1, 21))


def test_tasks_of_others_are_counted_without_reading_their_rows(session, scenery):
    """The counts come from `lines`: a million of another tenant need no rows."""
    a, b = scenery.tenant("a"), scenery.tenant("b")
    task = scenery.task(a)
    scenery.task(b)
    session.execute(text("update lines set waiting = 1000000 where tenant_id = :b"), {"b": b.id})
    # a has used 1,000 s, and b, who used nothing, is charged 1 s for each turn: 0, 1, ... 999.
    session.add(Account(user_id=task.user_id, tenant_id=a.id, faded=1000 * SECOND << 40))
    session.flush()
    assert explain.explain(session, [task])[task.id].place in (1001, 1002)  # b may tie at 1,000


@pytest.mark.parametrize("seed", range(8))
def test_place_is_counted_on_the_whole_board(session, scenery, seed):
    """Tenants below tenants, users in any of them, limits and guarantees; some hold devices."""
    chance = random.Random(seed)
    tenants, users = [], []
    for n in range(6):
        parent = chance.choice([scenery.root, *tenants])
        limit = chance.choice([{}, {}, {"cpu": 2}])
        owed = {"guarantee": {"cpu": chance.choice([0, 0, 1])}, "limit": limit}
        owed["carried"] = chance.choice([0, 10**7 << 40])
        weight = chance.choice([500, 1000, 1700])
        tenants.append(scenery.tenant(f"t{n}", weight, parent_id=parent.id, **owed))
    for n in range(9):
        users.append(scenery.user(f"u{n}", chance.choice(tenants)))
        users[-1].carried = chance.choice([0, 0, 10**7 << 40])
    owner = {tenant.id: tenant for tenant in tenants}
    for n, user in enumerate(users[:5]):
        scenery.device(f"d{n}")
        task = scenery.task(owner[user.tenant_id], "running", seat=f"d{n}", user=user)
        scenery.charge(task, chance.randint(0, 10**8))
    tasks = [
        scenery.task(owner[user.tenant_id], user=user, priority=chance.choice([0, 0, 1]))
        for user in chance.choices(users, k=25)
    ]
    told = explain.explain(session, tasks)
    now_s = transactions.now_s(session)
    whole = snapshot_reader.load(session, "isle", now_s=now_s)
    board = Board.of(whole, now_s=now_s)
    places = {id: blockers.place(board, task)[0] for id, task in whole.tasks.items() if id in told}
    assert {id: why.place for id, why in told.items()} == places


def test_a_device_that_is_kept_for_a_moving_task_is_not_free(session, scenery, told):
    scene = Scene(session, scenery)
    scenery.device("d1")
    scene.held(scene.b)
    moving = Moving(to="d1", source="d0", epoch=1, until_s=2e9, stopping=True)
    scenery.task(
        scene.b, epoch=1, image_on="d0", move_to="d1", moving=codec.to_json(moving, whole=True)
    )
    task = scenery.task(scene.a)
    reasons = told(task)
    assert "DEVICE_FREE" not in reasons, reasons
    assert "WAITING_FOR_DEVICE" in reasons


def test_task_waits_for_a_host_that_shows_its_mount_until_one_does(session, scenery, told):
    a = scenery.tenant("a")
    device = scenery.device("d0", memory_bytes=8 * 10**9)
    task = scenery.task(a, device_choice="!mount:pictures")
    unmet = "No cpu device that offers mount:pictures is up (known: 0)."
    assert unmet in [reason["message"] for reason in told(task).values()]
    device.facts = {**device.facts, "offers": ["mount:pictures"]}
    assert unmet not in [reason["message"] for reason in told(task).values()]
