"""Moves: what may be wished, what the rows go through, and a channel that cannot be relied on."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from app.core.model.protocol.messages import Save, decode, encode
from app.core.scheduling.board import Board
from app.db import transactions
from app.db.models import (
    Device,
    Host,
    Island,
    OutboxOrder,
    Placement,
    RequestEvent,
    Task,
    Tenant,
    Usage,
    User,
)
from app.db.transactions import transaction
from app.scheduling import snapshot_reader, task_migration
from tests.app.conftest import descriptor, problem
from tests.app.scheduling import test_protocol as protocol
from tests.thoroughness import rest_long

# --- the wish -----------------------------------------------------------------------------------


@pytest.fixture
def task_id(submitted, session):
    """The task of red's member runs on h.0 and can be moved."""
    id = submitted["tasks"][0]["id"]
    change(id, state="running", seat="h.0", epoch=1, capabilities=["pause", "move"], island="isle")
    return id


def change(id, **values):
    with transaction() as its:
        its.execute(update(Task).where(Task.id == id).values(**values))


def change_device(id, **values):
    with transaction() as its:
        its.execute(update(Device).where(Device.id == id).values(**values))


class TestWish:
    def test_member_moves_a_task_to_a_device_or_anywhere(self, red, task_id, session):
        answer = red.post(f"/v1/tasks/{task_id}/migrate", json={"to": "h.1"})
        assert (answer.status_code, answer.json()["move_to"]) == (202, "h.1")
        # Whoever is on the way somewhere is on the way elsewhere already.
        assert red.post(f"/v1/tasks/{task_id}/migrate").json()["move_to"] == "h.1"
        events = session.scalars(
            select(RequestEvent.message).where(RequestEvent.type == "task.move_asked")
        )
        assert events.all() == ["Move to h.1 requested by red.member."]

    def test_without_a_device_any_will_do(self, red, task_id):
        for body in ({}, {"json": {}}, {"json": {"to": None}}):
            assert red.post(f"/v1/tasks/{task_id}/migrate", **body).json()["move_to"] == "*"

    @pytest.mark.parametrize(
        ("to", "code"), [("h.9", "unknown"), ("h.0", "there"), ("*", "unknown")]
    )
    def test_impossible_target_is_refused_with_its_pointer(self, red, task_id, to, code):
        answer = red.post(f"/v1/tasks/{task_id}/migrate", json={"to": to})
        [fault] = problem(answer, 422, "validation-error", "/to")["errors"]
        assert fault["code"] == code
        assert code != "unknown" or "such as h.0, h.1" in fault["detail"]

    @pytest.mark.parametrize(
        ("device", "code"),
        [
            ({"kind": "cuda"}, "kind"),
            ({"memory_bytes": 9}, "memory"),
            ({"cordoned": True}, "cordoned"),
            ({"facts": {"labels": ["old", "spot"]}}, "choice"),
        ],
    )
    def test_unsuitable_device_is_refused_with_its_pointer(self, red, task_id, device, code):
        change(task_id, memory_bytes=10, device_choice="-spot")
        change_device("h.1", **device)
        answer = red.post(f"/v1/tasks/{task_id}/migrate", json={"to": "h.1"})
        assert problem(answer, 422, "validation-error", "/to")["errors"][0]["code"] == code

    def test_device_of_a_drained_host_or_another_island_is_refused(self, red, task_id, session):
        with transaction() as its:
            its.add(Island(name="far"))
            its.flush()
            its.add_all(
                [Host(name="d", island="isle", cordoned=True), Host(name="f", island="far")]
            )
            its.flush()
            for id, island in (("d.0", "isle"), ("f.0", "far")):
                its.add(Device(id=id, host=id[0], island=island, kind="cpu"))
        for to, code in (("d.0", "cordoned"), ("f.0", "island")):
            answer = red.post(f"/v1/tasks/{task_id}/migrate", json={"to": to})
            assert problem(answer, 422, "validation-error", "/to")["errors"][0]["code"] == code

    @pytest.mark.parametrize(
        "values",
        [
            {"state": "waiting", "seat": None},
            {"state": "stopping"},
            {"state": "done", "seat": None},
            {"capabilities": []},
            {"devices_min": 2, "devices_max": 2},
        ],
    )
    def test_task_that_cannot_be_moved_stays_and_the_call_is_a_conflict(self, red, task_id, values):
        change(task_id, **values)
        problem(red.post(f"/v1/tasks/{task_id}/migrate"), 409, "conflict-state")
        assert red.get(f"/v1/tasks/{task_id}").json()["move_to"] is None

    def test_task_of_another_tenant_is_not_found_and_a_viewer_may_not_move(self, as_, task_id):
        problem(as_("blue.member").post(f"/v1/tasks/{task_id}/migrate"), 404, "not-found")
        problem(as_("red.viewer").post(f"/v1/tasks/{task_id}/migrate"), 403, "insufficient-scope")

    @pytest.mark.parametrize("path", ["/v1/devices/h.0/cordon", "/v1/hosts/h/drain"])
    def test_drain_asks_every_task_on_the_device_to_move(self, as_, task_id, path):
        assert as_("root").post(path).status_code == 200
        assert as_("red.member").get(f"/v1/tasks/{task_id}").json()["move_to"] == "*"

    @pytest.mark.parametrize(
        ("drain", "open_"),
        [
            ("/v1/devices/h.0/cordon", "/v1/devices/h.0/uncordon"),
            ("/v1/hosts/h/drain", "/v1/hosts/h/uncordon"),
        ],
    )
    def test_uncordon_withdraws_the_moves_of_the_drain(self, as_, task_id, drain, open_):
        root, red = as_("root"), as_("red.member")
        root.post(drain)
        assert root.post(open_).status_code == 200
        assert red.get(f"/v1/tasks/{task_id}").json()["move_to"] is None
        with transaction() as session:
            last = session.scalars(
                select(RequestEvent).order_by(RequestEvent.id.desc()).limit(1)
            ).one()
        assert (last.type, last.task_id) == ("task.move_withdrawn", task_id)

    def test_uncordon_keeps_moves_where_host_or_device_is_still_cordoned(self, as_, task_id):
        root, red = as_("root"), as_("red.member")
        root.post("/v1/hosts/h/drain")
        root.post("/v1/devices/h.0/cordon")
        for path in ("/v1/devices/h.0/uncordon", "/v1/devices/h.0/cordon", "/v1/hosts/h/uncordon"):
            root.post(path)
            assert red.get(f"/v1/tasks/{task_id}").json()["move_to"] == "*", path

    def test_uncordon_keeps_moves_asked_by_others_or_begun(self, as_, red, task_id):
        root = as_("root")
        red.post(f"/v1/tasks/{task_id}/migrate")
        root.post("/v1/hosts/h/drain")
        root.post("/v1/hosts/h/uncordon")
        assert red.get(f"/v1/tasks/{task_id}").json()["move_to"] == "*"
        change(task_id, move_to=None)
        root.post("/v1/hosts/h/drain")
        begun = {"to": "h.1", "source": "h.0", "epoch": 1, "until_s": 9e9, "asked": 1}
        change(task_id, move_to="h.1", moving={**begun, "stopping": False, "rounds": []})
        root.post("/v1/hosts/h/uncordon")
        assert red.get(f"/v1/tasks/{task_id}").json()["move_to"] == "h.1"

    def test_explanation_says_how_far_the_move_is(self, red, task_id):
        red.post(f"/v1/tasks/{task_id}/migrate")
        told = red.get(f"/v1/tasks/{task_id}/explain").json()["message"]
        assert told.endswith("on h.0; it moves to another device when that is free.")
        begun = {"to": "h.1", "source": "h.0", "epoch": 1, "until_s": 9e9, "asked": 1}
        change(task_id, move_to="h.1", moving={**begun, "stopping": False, "rounds": []})
        told = red.get(f"/v1/tasks/{task_id}/explain").json()["message"]
        assert told == ("Running on h.0; moving to h.1: its first checkpoint is being written.")

    def test_explanation_says_that_the_task_stands_still_for_its_move(self, red, task_id):
        begun = {"to": "h.1", "source": "h.0", "epoch": 1, "until_s": 9e9, "asked": 1}
        change(task_id, state="waiting", seat=None, image_on="h.0", saved=False, move_to="h.1")
        change(task_id, moving={**begun, "stopping": True, "rounds": []})
        (reason,) = [
            reason
            for reason in red.get(f"/v1/tasks/{task_id}/explain").json()["reasons"]
            if reason["code"] != "NO_SCHEDULER"
        ]
        assert (reason["code"], reason["change"]["of"]) == ("MOVING", "h.1")


def test_island_moves_a_small_task_away_from_a_device_that_another_needs(red, task_id):
    other = red.post("/v1/requests", json=descriptor()).json()["tasks"][0]["id"]
    now = func.now() - timedelta(seconds=100)
    change(task_id, started_at=now, launched_at=now)
    change(other, state="waiting", island="isle", memory_bytes=2**29, capabilities=[])
    change_device("h.1", memory_bytes=2**28)

    def look():
        with transaction() as its:
            now_s = transactions.now_s(its)
            task_migration.make_fit(
                its, Board.of(snapshot_reader.load(its, "isle", now_s=now_s), now_s=now_s)
            )
        return red.get(f"/v1/tasks/{task_id}").json()["move_to"]

    assert look() == "h.1"
    # If that comes to nothing it is not tried again at once.
    change(task_id, move_to=None)
    assert look() is None


# --- an unreliable channel ----------------------------------------------------------------------


STEPS = 60  # so that there is time to move


class Mover(protocol.DeviceDouble):
    """A device double that also writes rounds, and fetches ahead, sooner or later."""

    steps, capabilities = STEPS, ("move",)

    def restart(self):
        super().restart()
        self.expected, self.here = {}, {}

    def alive(self):
        beat = super().alive()
        ahead = [
            {"task": task, "sha256": sha256, "bytes": 10, "us": 1000}
            for task, sha256 in self.here.items()
        ]
        return decode({**encode(beat), "ahead": ahead})

    def take(self, order):
        resident = self.house.get((order.task, order.epoch))
        runs = resident is not None and resident.state == "running"
        if isinstance(order, Save) and runs and order.seq > resident.order_seq:
            self._saved(resident)
        super().take(order)

    def hear(self, answer):
        super().hear(answer)
        if answer.incarnation != self.incarnation:
            return
        self.expected = {one.task: one.image.sha256 for one in answer.expect if one.image}
        self.here = {task: sha for task, sha in self.here.items() if task in self.expected}

    def work(self):
        self.here.update(self.expected)
        super().work()


class Moves(protocol.World):
    """Three devices and two tasks: mostly there is one to move to."""

    def __init__(self, session, seed):
        super().__init__(session, seed)
        self.devices = {name: Mover(name, self.clock) for name in protocol.DEVICES}

    def told(self, type_):
        """How many events of this type there are."""
        return self.session.scalar(select(func.count()).where(RequestEvent.type == type_))

    def picture(self):
        self.now_s = transactions.now_s(self.session)
        picture = super().picture()
        board = Board.of(picture, now_s=self.now_s)
        return (
            super().picture()
            if task_migration.advance(self.session, board, island="isle")
            else picture
        )

    def move(self):
        """Somebody wishes a task elsewhere, as the API would write it."""
        running = select(Task.id).where(Task.state == "running").order_by(Task.id)
        if self.dice.random() < 0.8:  # else perhaps one that is on its way already
            running = running.where(Task.move_to.is_(None))
        ids = self.session.scalars(running).all()
        if ids:
            to = self.dice.choice([*self.devices, "*", "*", "*"])
            wish = update(Task).where(Task.id == self.dice.choice(ids))
            self.session.execute(wish.values(move_to=to, move_asked_at=func.now()))

    def drain(self):
        """A device is cordoned, or takes work again."""
        name = self.dice.choice(list(self.devices))
        cordoned = self.dice.random() < 0.3
        self.session.execute(update(Device).where(Device.id == name).values(cordoned=cordoned))

    def act(self):
        """Fewer faults than elsewhere: a move takes a dozen messages, and most shall get far."""
        dice, name = self.dice, self.dice.choice(list(self.devices))
        wishes = [*[self.move] * 8, self.drain, self.wish, self.cancel]
        faults = [self.drop, self.lease_ends, self.restart, self.devices[name].lose_one]
        usual = [
            lambda: self.beat(name),
            self.deliver_up,
            self.deliver_up,
            self.deliver_down,
            self.deliver_down,
            self.deliver_down,
            self.devices[name].work,
        ]
        kind = dice.choices([usual, wishes, faults], weights=[40, 1, 1])[0]
        dice.choice(kind)()
        self.check()

    def calm(self, rounds=400):
        self.session.execute(update(Device).values(cordoned=False))
        super().calm(rounds)


@pytest.fixture
def moves(session, request, monkeypatch):
    monkeypatch.setattr(protocol, "DEVICES", ("h.0", "h.1", "h.2"))
    world = Moves(session, getattr(request, "param", 0))
    session.add(Island(name="isle"))
    session.add_all(Tenant(id=f"ten_{name}", name=name) for name in "ab")
    session.flush()
    session.add_all(User(id=f"usr_{name}", tenant_id=f"ten_{name}", name=name) for name in "ab")
    session.flush()
    world.ids = [protocol._submit(session, name, n) for name, n in (("a", 0), ("b", 0))]
    for device in world.devices:
        world.beat(device)
        world.island([world.up.pop()])
    return world


@pytest.mark.parametrize("moves", rest_long(range(8), keep=2), indirect=True, ids="seed-{}".format)
@pytest.mark.slow
def test_no_task_runs_twice_and_every_task_ends_whatever_happens_to_a_move(moves, session):
    for _ in range(500):
        moves.act()
    moves.calm()

    ends = set(session.scalars(select(Task.state).where(Task.cancel_asked_at.is_(None))))
    assert ends <= {"done"}
    wishes = session.execute(select(Task.move_to, Task.moving)).all()
    assert {tuple(wish) for wish in wishes} == {(None, None)}
    booked = session.scalar(select(func.sum(Usage.charged_us)))
    assert booked == session.scalar(select(func.sum(Placement.charged_us)))
    assert session.scalar(select(func.count()).where(Placement.ended_at.is_(None))) == 0
    assert session.scalar(select(func.count()).where(OutboxOrder.answered_at.is_(None))) == 0


@pytest.mark.slow
def test_move_goes_from_stage_to_stage_and_loses_no_step(moves, session):
    task = session.get_one(Task, "tsk_a0")
    session.execute(update(Task).where(Task.id == "tsk_b0").values(hold="user"))

    def rounds(n):
        for _ in range(n):
            moves.round()
        session.refresh(task)

    rounds(3)
    began_on = task.seat
    to = next(name for name in moves.devices if name != began_on)
    session.execute(update(Task).where(Task.id == task.id).values(move_to=to))
    rounds(12)
    assert (task.seat, task.epoch, task.move_to, task.moving) == (to, 2, None, None)
    assert (task.pauses, task.lost_steps) == (1, 0)
    mine = (
        select(RequestEvent.type).where(RequestEvent.task_id == task.id).order_by(RequestEvent.id)
    )
    told = [type_ for type_ in session.scalars(mine) if type_ != "task.saved"]
    assert told == [
        "task.launched",
        "task.started",
        "task.moving",
        "task.pausing",
        "task.paused",
        "task.launched",
        "task.started",
        "task.moved",
    ]
    moved = session.scalars(select(RequestEvent).where(RequestEvent.type == "task.moved")).one()
    # A round of this double is one of 10 bytes, which pass in no time: one is enough.
    assert (moved.data["rounds"], moved.data["last_bytes"]) == (1, 10)
    assert (moved.data["source"], moved.data["to"], moved.data["lost_steps"]) == (began_on, to, 0)
    stays = select(Placement.device_id, Placement.end).where(Placement.task_id == task.id)
    stays = session.execute(stays.order_by(Placement.epoch))
    assert stays.all() == [(began_on, "moved"), (to, None)]
    moves.calm()
