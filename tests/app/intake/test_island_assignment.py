"""Which island each task of a request goes to, and who goes on when an island is lost."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from app.core.model.protocol.messages import (
    Alive,
    Came,
    Failed,
    Finished,
    Paused,
    ResidentView,
    Saved,
    Started,
    Stored,
)
from app.db import transactions
from app.db.models import (
    Checkpoint,
    Device,
    Host,
    Island,
    Line,
    Need,
    OutboxOrder,
    Placement,
    Request,
    RequestEvent,
    Task,
    Tenant,
    Usage,
    User,
)
from app.intake import actions, island_assignment
from app.settings import settings
from app.storage.signing import block_key
from workers.control.controller import Control
from workers.control.scheduler import Scheduler

DESCRIPTOR = {
    "name": "train",
    "run": {"job": "train:Train"},
    "max_duration_s": 100.0,
    "checkpoint": {"every_s": 60.0, "keep": 3},
}
LEASE = timedelta(minutes=5)


@pytest.fixture
def sent(monkeypatch):
    """Nothing is published: the channel itself is Celery's and Redis'."""
    monkeypatch.setattr("app.messaging.outbox.hint", lambda *_: True)
    monkeypatch.setattr("app.messaging.outbox.post", set)


@pytest.fixture
def people(session, sent):
    """Tenants a and b, each with one user."""
    session.add(Tenant(id="ten_root", name="platform"))
    session.flush()
    for name in "ab":
        session.add(Tenant(id=f"ten_{name}", name=name, parent_id="ten_root"))
        session.flush()
        session.add(User(id=f"usr_{name}", tenant_id=f"ten_{name}", name=name))
    session.flush()


def add_island(session, name, *, led=True, **devices):
    """An island with so many devices of each kind, all heard just now."""
    lease = func.now() + LEASE
    session.add(Island(name=name, leader="x" if led else None, leader_until=lease if led else None))
    session.flush()
    session.add(Host(name=name, island=name))
    session.flush()
    for kind, count in devices.items():
        for n in range(count):
            session.add(
                Device(
                    id=f"{name}.{kind}{n}", host=name, island=name, kind=kind, lease_until=lease,
                    memory_bytes=2**30,
                )
            )  # fmt: skip
    session.flush()


def add_task(session, name, *, request="req_r", tenant="a", needs=(), after=(), **more):
    """A task of a request; `needs` are tasks of which it takes the output x."""
    owner = {"tenant_id": f"ten_{tenant}", "user_id": f"usr_{tenant}"}
    if session.get(Request, request) is None:
        bundle = {"bundle": "sha256:" + "0" * 64}
        session.add(Request(id=request, name=request, descriptor=bundle, **owner))
        session.flush()
    values = {"kind": "cpu", "descriptor": DESCRIPTOR, "ordinal": 0, "type": "train", **owner}
    session.add(Task(id=f"tsk_{name}", request_id=request, name=name, **{**values, **more}))
    session.flush()
    for n, other in enumerate(needs):
        need = {"task_id": f"tsk_{name}", "needs_id": f"tsk_{other}"}
        session.add(Need(**need, port=f"p{n}", output="x"))
    for other in after:
        session.add(Need(task_id=f"tsk_{name}", needs_id=f"tsk_{other}"))
    session.flush()


def assigned(session):
    """Assign the first page of requests; return the islands that got something."""
    touched, _ = island_assignment.assign_new(session)
    return touched


def islands(session):
    query = select(Task.name, Task.island).order_by(Task.name)
    return {name: island for name, island in session.execute(query)}


def told(session, name):
    return session.scalar(select(Task.assigned).where(Task.name == name))


class TestNew:
    def test_task_goes_to_the_island_where_it_ends_first(self, session, people):
        add_island(session, "east", cpu=1)
        add_island(session, "west", cpu=1)
        add_task(session, "a", request="req_a")
        assert assigned(session) == {"east"}  # both are idle
        add_task(session, "b", request="req_b")
        # the other is still blocked, and queued
        assert assigned(session) == {"west"}
        assert islands(session) == {"a": "east", "b": "west"}
        assert "2 islands can run the task" in told(session, "b")["because"]

    def test_several_requests_go_where_they_end_first(self, session, people):
        add_island(session, "east", cpu=1)
        add_island(session, "west", cpu=3)
        for n in range(8):
            add_task(session, f"t{n}", request=f"req_{n}")
        island_assignment.assign_new(session)
        assert sorted(islands(session).values()) == ["east"] * 2 + ["west"] * 6

    def test_idle_islands_share_requests_evenly(self, session, people):
        for name in ("east", "north", "west"):
            add_island(session, name, cpu=50)
        for n in range(30):
            add_task(session, f"t{n:02}", request=f"req_{n:02}")
        island_assignment.assign_new(session)
        assert Counter(islands(session).values()) == {"east": 10, "north": 10, "west": 10}

    def test_requests_are_assigned_page_by_page(self, session, people, monkeypatch):
        monkeypatch.setattr(island_assignment, "NEW_PAGE", 2)
        add_island(session, "east", cpu=1)
        for n in range(5):  # no island has what the first two need
            add_task(session, f"t{n}", request=f"req_{n}", kind="cuda" if n < 2 else "cpu")
        pages, after = list[str | None](), ""
        while after is not None:
            _, after = island_assignment.assign_new(session, after=after)
            pages.append(after)
        assert pages == ["req_1", "req_3", None]
        assert islands(session) == {
            "t0": None,
            "t1": None,
            **dict.fromkeys(("t2", "t3", "t4"), "east"),
        }

    @pytest.mark.parametrize(("leases_ago", "goes_to"), [(0.5, "east"), (2, "west")])
    def test_task_that_comes_while_leaders_change_goes_to_the_island_as_before(
        self, session, people, leases_ago, goes_to
    ):
        """Only east has room for the task now."""
        add_island(session, "east", cpu=2)
        add_island(session, "west", cpu=1)
        ended = func.now() - timedelta(seconds=leases_ago * settings().leader_s)
        session.execute(update(Island).where(Island.name == "east").values(leader_until=ended))
        session.add(_line("west", "b", 9))
        session.flush()
        add_task(session, "new")
        assert assigned(session) == {goes_to}

    def test_hosts_with_equal_devices_count_together(self, session, people):
        """Two hosts with two devices each, one of which is cordoned: three can take work."""
        add_island(session, "east", cpu=1)
        add_island(session, "west", cpu=2)
        session.add(Host(name="west2", island="west"))
        session.flush()
        lease = func.now() + LEASE
        for n, cordoned in enumerate((False, True)):
            device = {"host": "west2", "island": "west", "kind": "cpu", "cordoned": cordoned}
            session.add(Device(id=f"west2.{n}", lease_until=lease, memory_bytes=2**30, **device))
        session.flush()
        scene = island_assignment.AssignmentScene.of(session)
        assert {name: of["cpu"].devices for name, of in scene.up.items()} == {"east": 1, "west": 3}
        assert {name: of["cpu"].devices for name, of in scene.all.items()} == {"east": 1, "west": 4}
        add_task(session, "wide", devices_min=3, devices_max=3)
        add_task(
            session, "spread", request="req_s", devices_min=3, devices_max=3, across_hosts=True
        )
        assert assigned(session) == {"west"}
        assert islands(session) == {"spread": "west", "wide": None}

    def test_gang_on_even_hosts_goes_to_an_island_with_as_many_devices_on_each(
        self, session, people
    ):
        """Both islands have four devices: three and one, and two and two."""
        add_island(session, "east", cpu=3)
        add_island(session, "west", cpu=2)
        for island, count in (("east", 1), ("west", 2)):
            session.add(Host(name=f"{island}2", island=island))
            session.flush()
            for n in range(count):
                device = {"host": f"{island}2", "island": island, "kind": "cpu"}
                lease = {"lease_until": func.now() + LEASE, "memory_bytes": 2**30}
                session.add(Device(id=f"{island}2.{n}", **lease, **device))
        session.flush()
        wide = {"devices_min": 4, "devices_max": 4, "across_hosts": True}
        add_task(session, "even", device_choice="#2", **wide)
        assert assigned(session) == {"west"}

    def test_fair_share_may_send_a_task_to_an_island_with_more_queued(self, session, people):
        """In the queue of one other tenant we have half of the devices, and not its end."""
        add_island(session, "east", cpu=2)
        add_island(session, "west", cpu=2)
        for n in range(9):
            add_task(session, f"b{n}", request="req_b", tenant="b", island="east", state="waiting")
        session.add(_line("east", "b", 9))
        for n in range(6):
            add_task(session, f"a{n}", request="req_a", tenant="a", island="west", state="waiting")
        session.add(_line("west", "a", 6))
        session.flush()
        add_task(session, "new")
        island_assignment.assign_new(session)
        assert islands(session)["new"] == "east"

    def test_tasks_of_one_request_go_where_their_kinds_are(self, session, people):
        add_island(session, "east", cpu=1)
        add_island(session, "west", cuda=1)
        add_task(session, "prep")
        add_task(session, "train", kind="cuda", needs=["prep"])
        assert assigned(session) == {"east", "west"}
        assert islands(session) == {"prep": "east", "train": "west"}
        assert told(session, "train") == {
            "because": "Only west has such devices.",
            "ends_s": pytest.approx(120, abs=0.1),
            "crossing_bytes": island_assignment.USUAL_BYTES,
        }
        place = island_assignment.places(session, "req_r")[1]
        assert (place.task, place.island) == ("train", "west")
        (one,) = island_assignment.crossings(session, "req_r")
        assert (one.block, one.source, one.target) == ("prep.x", "east", "west")
        assert (one.planned_bytes, one.moved_bytes) == (None, None)
        abroad = select(Task.name).where(Task.abroad)
        assert session.scalars(abroad).all() == ["prep"]

    def test_chain_stays_together_and_a_wide_request_is_cut_where_little_crosses(
        self, session, people
    ):
        add_island(session, "east", cpu=1)
        add_island(session, "west", cpu=1)
        for side in "lr":
            add_task(session, f"{side}0")
            add_task(session, f"{side}1", needs=[f"{side}0"])
            add_task(session, f"{side}2", needs=[f"{side}1"])
        island_assignment.assign_new(session)
        found = islands(session)
        assert len({found[name] for name in ("l0", "l1", "l2")}) == 1
        assert len({found[name] for name in ("r0", "r1", "r2")}) == 1
        assert found["l0"] != found["r0"]

    @pytest.mark.parametrize(("after_ms", "number"), [({"x": 500}, 2), ({}, 1)])
    def test_reader_of_a_running_partition_has_another_island(
        self, session, people, after_ms, number
    ):
        add_island(session, "east", cpu=1)
        add_island(session, "west", cpu=1)

        part = {"nodes": ["n"], "ms": 4000, "bytes": {"x": 10**9}, "after_ms": after_ms}
        run = {"graph": "sha256:" + "0" * 64, "part": part}
        add_task(session, "p.0", descriptor={**DESCRIPTOR, "run": run})
        add_task(session, "p.1", descriptor={**DESCRIPTOR, "run": run}, needs=["p.0"])
        island_assignment.assign_new(session)
        assert len({*islands(session).values()}) == number

    def test_partition_does_not_wait_where_another_island_is_free(self, session, people):
        add_island(session, "east", cpu=1)
        add_island(session, "west", cpu=1)
        add_task(session, "before", request="req_before", state="waiting", island="east")
        session.add(_line("east", "a", 1))
        session.flush()
        part = {"nodes": [], "takes": {}, "gives": {}, "ms": 100, "bytes": {}}
        for name in ("p.0", "p.1"):
            descriptor = {**DESCRIPTOR, "run": {"graph": "sha256:" + "0" * 64, "part": part}}
            add_task(session, name, descriptor=descriptor)
        island_assignment.assign_new(session)
        assert {islands(session)[name] for name in ("p.0", "p.1")} == {"west"}

    def test_only_island_gets_everything(self, session, people):
        add_island(session, "only", cpu=1)
        add_task(session, "a")
        add_task(session, "b", after=["a"])
        assert assigned(session) == {"only"}

    def test_memory_of_devices_counts(self, session, people):
        add_island(session, "east", cpu=9)
        add_island(session, "west", cpu=1)
        session.execute(update(Device).where(Device.island == "west").values(memory_bytes=2**40))
        add_task(session, "large", memory_bytes=2**35)
        assert assigned(session) == {"west"}

    def test_task_goes_where_a_device_suits_its_choice(self, session, people):
        h100 = {"model": "NVIDIA H100", "compute_capability": "9.0", "labels": ["a", "spot"]}
        add_island(session, "east", cpu=2)
        add_island(session, "west", cpu=2)
        session.execute(update(Device).where(Device.island == "west").values(facts=h100))
        for name, choice in (("one", "=h100"), ("two", ">9.0,+spot"), ("three", "-spot")):
            add_task(session, name, request=f"req_{name}", device_choice=choice)
        island_assignment.assign_new(session)
        assert islands(session) == {"one": "west", "two": "west", "three": "east"}

    @pytest.mark.parametrize("why", ["not led", "not heard", "cordoned", "drained"])
    def test_islands_that_can_take_the_task_now_come_first(self, session, people, why):
        add_island(session, "east", cpu=9, led=why != "not led")
        add_island(session, "west", cpu=1)
        here = Device.island == "east"
        if why == "not heard":
            session.execute(update(Device).where(here).values(lease_until=func.now()))
        if why == "cordoned":
            session.execute(update(Device).where(here).values(cordoned=True))
        if why == "drained":
            session.execute(update(Host).where(Host.name == "east").values(cordoned=True))
        for n in range(3):
            add_task(session, f"t{n}", request=f"req_{n}")
        assert assigned(session) == {"west"}

    def test_absent_island_gets_what_no_other_can_run(self, session, people):
        add_island(session, "east", cuda=1, led=False)
        add_island(session, "west", cpu=1)
        add_task(session, "t", kind="cuda")
        assert assigned(session) == {"east"}

    def test_request_that_no_island_can_run_waits_whole_until_cancelled(self, session, people):
        add_island(session, "east", cpu=1)
        add_task(session, "a")
        add_task(session, "b", kind="tpu")
        assert assigned(session) == set()
        (a, _) = island_assignment.places(session, "req_r")
        assert (a.island, a.because) == (None, island_assignment.NOWHERE)
        actions.cancel_request(session, session.get_one(Request, "req_r"), by="a")
        session.flush()
        assert assigned(session) == {"east"}


def _line(island, tenant, waiting):
    return Line(
        island=island, user_id=f"usr_{tenant}", tenant_id=f"ten_{tenant}", kind="cpu",
        memory_bytes=0, width=1, waiting=waiting,
    )  # fmt: skip


# --- a request on two islands ---------------------------------------------------------------------


class Played:
    """An island whose scheduler is real and whose one device says what the test wants."""

    def __init__(self, name, kind="cpu"):
        self.scheduler, self.device = Scheduler(name), f"{name}.0"
        self.facts = {"host": name, "island": name, "kind": kind, "memory_bytes": 2**30}
        self.links, self.secret, self.clock_us = [], "", 0

    def hear(self, *said, **more):
        self.tell(*said, **more)
        self.look()

    def tell(self, *said, residents=(), incarnation="p1"):
        self.clock_us += 1
        alive = Alive(
            device=self.device, incarnation=incarnation, sent_us=self.clock_us, facts=self.facts,
            residents=list(residents), events=list(said), logs=[],
            links=self.links, secret=self.secret,
        )  # fmt: skip
        self.scheduler.hear(alive)

    def look(self):
        self.scheduler.nudge()
        self.scheduler.look()


def view(task, state="running", *, epoch=1, step=0, held_us=0):
    return ResidentView(
        task=f"tsk_{task}", epoch=epoch, state=state, step=step, held_us=held_us, order_seq=1,
        memory_bytes=0,
    )  # fmt: skip


def started(task, *, epoch=1, step=0, resumed="fresh"):
    return Started(
        task=f"tsk_{task}", epoch=epoch, seq=1, step=step, held_us=0, preset={}, capabilities=[],
        resumed=resumed, switch_us=0,
    )  # fmt: skip


def paused(task, *, epoch=1):
    return Paused(task=f"tsk_{task}", epoch=epoch, seq=2, step=1, held_us=0)


def saved(task, *, seq, step, epoch=1):
    return Saved(
        task=f"tsk_{task}", epoch=epoch, seq=seq, step=step, held_us=0, sha256="5" * 64,
        size_bytes=9, took_us=1,
    )  # fmt: skip


def finished(task, *, seq=2, epoch=1, held_us=7000, **outputs):
    kept = {name: {"sha256": "6" * 64, "size_bytes": 5, "head_bytes": 2} for name in outputs}
    return Finished(
        task=f"tsk_{task}", epoch=epoch, seq=seq, step=9, held_us=held_us, result={}, outputs=kept
    )


def stored(task, output, *, seq=2, epoch=1, sha256="6" * 64):
    kept = {"sha256": sha256, "size_bytes": 5, "head_bytes": 2}
    return Stored(
        task=f"tsk_{task}", epoch=epoch, seq=seq, step=3, held_us=0, output=output, kept=kept
    )


def states(session):
    session.expire_all()
    query = select(Task.name, Task.state, Task.island, Task.epoch).order_by(Task.name)
    return {name: (state, island, epoch) for name, state, island, epoch in session.execute(query)}


def add_user():
    with transactions.transaction() as session:
        session.add(Tenant(id="ten_a", name="a"))
        session.flush()
        session.add(User(id="usr_a", tenant_id="ten_a", name="a"))


@pytest.fixture
def up(committed, sent):
    """Both islands are, and a user."""
    add_user()
    east, west = Played("east"), Played("west", "cuda")
    east.hear()
    west.hear()
    return east, west


@pytest.fixture
def two(up):
    """A request whose second task takes, on west, what the first one makes on east; both islands
    have read their boards.  Each step is a transaction of its own, as boards go by these.
    """
    east, west = up
    with transactions.transaction() as session:
        add_task(session, "prep", descriptor={**DESCRIPTOR, "outputs": ["x"]})
        taking = {**DESCRIPTOR, "inputs": {"p0": "prep.x"}}
        add_task(session, "train", kind="cuda", needs=["prep"], descriptor=taking)
    with transactions.transaction() as session:
        assert assigned(session) == {"east", "west"}
    west.look()
    east.look()
    west.look()
    assert seen()["train"] == ("blocked", "west", 0)
    return east, west


def seen():
    with transactions.transaction() as session:
        return states(session)


class TestSeveralIslands:
    def test_task_that_ended_on_one_island_unblocks_a_task_on_the_other(self, two):
        east, west = two
        east.hear(started("prep"), finished("prep", x=1))
        assert seen()["prep"][0] == "done"
        west.look()
        assert seen()["train"] == ("starting", "west", 1)
        west.hear(started("train"))
        with transactions.transaction() as session:
            (one,) = island_assignment.crossings(session, "req_r")
        assert (one.moved_bytes, one.head_bytes) == (3, 2)

    @pytest.mark.parametrize("is_up", [True, False])
    def test_launch_names_where_inputs_are_and_the_plan_how_they_came(self, two, is_up):
        east, west = two
        east.links, east.secret = ["10.0.0.1", 9], "ab" * 32
        east.hear(started("prep"), finished("prep", x=1))
        with transactions.transaction() as session:
            if not is_up:
                goes_dark(session, "east")
        west.look()
        key = block_key("ab" * 32, "6" * 64)
        with transactions.transaction() as session:
            order = session.scalars(
                select(OutboxOrder).where(OutboxOrder.task_id == "tsk_train")
            ).one()
            copies = order.body["inputs"]["p0"]["copies"]
            assert copies == ([{"place": ["10.0.0.1", 9], "key": key}] if is_up else [])
            assert island_assignment.crossings(session, "req_r")[0].ways == []
        west.hear(replace(started("train"), ways={"p0": "host" if is_up else "store"}))
        with transactions.transaction() as session:
            assert island_assignment.crossings(session, "req_r")[0].ways == [
                "host" if is_up else "store"
            ]

    def test_island_of_waiting_tasks_is_told_of_the_end_at_once(self, two, monkeypatch):
        told = []
        monkeypatch.setattr("app.messaging.outbox.nudge_island", told.append)
        two[0].hear(started("prep"))
        assert told == []
        two[0].hear(started("prep"), finished("prep", x=1))
        assert told == ["west"]

    def test_island_does_not_wait_for_the_plan_of_the_other(self, two, monkeypatch):
        order, (east, _) = [], two
        cycle = east.scheduler._cycle
        monkeypatch.setattr("app.messaging.outbox.nudge_island", order.append)
        monkeypatch.setattr(
            east.scheduler, "_cycle", lambda session: order.append("plan") or cycle(session)
        )
        east.hear(started("prep"), finished("prep", x=1))
        assert order == ["west", "plan"]
        assert seen()["prep"][0] == "done"

    def test_failed_task_ends_its_dependents_on_the_other_island(self, two):
        east, west = two
        east.hear(started("prep"), finished("prep"))  # without its declared output
        west.look()
        assert {name: state for name, (state, *_) in seen().items()} == {
            "prep": "failed",
            "train": "failed",
        }
        with transactions.transaction() as session:
            assert session.get_one(Request, "req_r").state == "failed"


PARTITION = {"graph": "sha256:" + "1" * 64, "part": {"nodes": ["n"], "bytes": {}}}


@pytest.fixture
def partition(two):
    """The first task is a partition of a graph that gives x, then y; it runs."""
    with transactions.transaction() as session:
        train = session.scalar(select(Task).where(Task.name == "train"))
        train.descriptor = {**train.descriptor, "inputs": {"p0": "prep.x"}}
        prep = session.scalar(select(Task).where(Task.name == "prep"))
        prep.descriptor = {**prep.descriptor, "run": PARTITION, "outputs": ["x", "y"]}

    two[0].hear(started("prep"))
    return two


class TestWhatComesLate:
    """Two partitions that run at the same time on two islands, and take from each other."""

    @pytest.fixture
    def pair(self, up, monkeypatch):
        east, west = up
        east.links, east.secret = ["10.0.0.1", 9], "ab" * 32
        with transactions.transaction() as session:
            for name, kind, other in (("p.0", "cpu", "p.1"), ("p.1", "cuda", "p.0")):
                part = {"nodes": [name], "ms": 9.0, "bytes": {"x": 7}, "late": ["p0"]}
                said = {"run": {**PARTITION, "part": part}, "inputs": {"p0": f"{other}.x"}}
                descriptor = {**DESCRIPTOR, **said, "outputs": ["x"]}
                add_task(session, name, kind=kind, descriptor=descriptor)
            for name, other in (("p.0", "p.1"), ("p.1", "p.0")):
                need = {"task_id": f"tsk_{name}", "needs_id": f"tsk_{other}"}
                session.add(Need(**need, port="p0", output="x", late=True))
        with transactions.transaction() as session:
            assert assigned(session) == {"east", "west"}
        told = []
        monkeypatch.setattr(
            "app.messaging.outbox.tell", lambda device, message: told.append(message)
        )
        for island in (east, west):
            island.look()
            island.hear(started("p.0" if island is east else "p.1"))
        return east, west, told

    def test_both_tasks_run_and_the_launch_leaves_the_late_input_out(self, pair):
        assert {state for state, *_ in seen().values()} == {"running"}
        with transactions.transaction() as session:
            bodies = session.scalars(
                select(OutboxOrder.body).where(OutboxOrder.kind == "Launch")
            ).all()
            assert [body["inputs"] for body in bodies] == [{}, {}]
            places = island_assignment.places(session, "req_r")
            assert [place.crossing_bytes for place in places] == [7, 7]

    def test_device_is_told_of_the_late_input_when_it_is_durable(self, pair):
        east, _, told = pair
        east.hear(stored("p.0", "x"))
        (given,) = told
        key = block_key("ab" * 32, "6" * 64)
        assert (given.task, given.epoch, given.port) == ("tsk_p.1", 1, "p0")
        assert given.source["copies"] == [{"place": ["10.0.0.1", 9], "key": key}]
        east.hear(finished("p.0", seq=3, x=1))
        assert len(told) == 1

    def test_late_input_is_told_at_the_end_of_its_maker(self, pair):
        east, _, told = pair
        east.hear(finished("p.0", x=1))
        assert [given.task for given in told] == ["tsk_p.1"]

    def test_late_input_is_told_in_the_answer_to_a_question(self, pair, monkeypatch):
        east, west, _ = pair
        answers = []
        monkeypatch.setattr(
            "app.messaging.outbox.send", lambda said, *_: answers.extend(said) or []
        )
        asks = [replace(view("p.1"), lacks=["p0"])]
        west.hear(residents=asks)
        assert answers[-1].given == []
        east.hear(stored("p.0", "x"))
        west.hear(residents=asks)
        (given,) = answers[-1].given
        assert (given.task, given.port, given.source["sha256"]) == ("tsk_p.1", "p0", "6" * 64)
        west.hear(residents=[view("p.1")])
        assert answers[-1].given == []

    def test_task_that_gave_up_waiting_is_launched_when_the_input_is_there(self, pair):
        east, west, told = pair
        west.hear(replace(paused("p.1"), lacks="p0"), residents=[view("p.1", "paused")])
        west.look()
        assert seen()["p.1"] == ("blocked", "west", 1)
        east.hear(stored("p.0", "x"))
        assert told == []
        west.look()
        assert seen()["p.1"] == ("starting", "west", 2)
        with transactions.transaction() as session:
            launches = select(OutboxOrder.body).where(
                OutboxOrder.task_id == "tsk_p.1", OutboxOrder.epoch == 2
            )
            (body,) = session.scalars(launches)
            assert set(body["inputs"]) == {"p0"}

    def test_task_without_state_may_run_without_the_input_until_it_was_there(self, pair):
        """What it had given may have been lost with it, and the other may wait for that."""
        _, west, _ = pair
        west.hear(replace(paused("p.1"), lacks="p0"), residents=[view("p.1", "paused")])
        west.look()
        assert seen()["p.1"] == ("blocked", "west", 1)
        west.hear(incarnation="p2")
        west.look()
        assert seen()["p.1"] == ("starting", "west", 2)

    def test_source_of_the_input_is_kept_if_the_task_was_paused_meanwhile(self, pair):
        east, west, _ = pair
        east.hear(stored("p.0", "x"))
        came = {"port": "p0", "way": "host", "size_bytes": 5}
        late = Came(task="tsk_p.1", epoch=1, seq=3, step=1, held_us=0, **came)
        west.hear(paused("p.1"), late, residents=[view("p.1", "paused")])
        with transactions.transaction() as session:
            assert island_assignment.crossings(session, "req_r")[-1].ways == ["host"]

    def test_task_paused_for_others_still_lacks_the_input(self, pair):
        _, west, _ = pair
        west.hear(paused("p.1"), residents=[view("p.1", "paused")])
        west.look()
        assert seen()["p.1"] == ("starting", "west", 2)

    def test_no_task_waits_for_a_failed_maker(self, pair):
        east, west, _ = pair
        east.hear(finished("p.0"))  # without its declared output
        west.hear(replace(paused("p.1"), lacks="p0"))
        west.look()
        assert {state for state, *_ in seen().values()} == {"failed"}

    def test_source_of_the_late_input_is_shown(self, pair):
        east, west, _ = pair
        with transactions.transaction() as session:
            assert {one.moved_bytes for one in island_assignment.crossings(session, "req_r")} == {
                None
            }
        east.hear(stored("p.0", "x"))
        came = {"port": "p0", "way": "host", "size_bytes": 5}
        west.hear(Came(task="tsk_p.1", epoch=1, seq=2, step=1, held_us=0, **came))
        with transactions.transaction() as session:
            of_east = island_assignment.crossings(session, "req_r")[-1]
            assert (of_east.source, of_east.moved_bytes, of_east.ways) == ("east", 3, ["host"])
            taken = session.scalars(select(Placement).where(Placement.task_id == "tsk_p.1")).one()
            assert (taken.input_bytes, taken.fetched_bytes) == (5, 0)


def taken_on_west():
    """The hash of what the second task was launched with."""
    with transactions.transaction() as session:
        bodies = session.scalars(select(OutboxOrder.body).where(OutboxOrder.task_id == "tsk_train"))
        return [taken["sha256"] for body in bodies for taken in body["inputs"].values()]


class TestAnOutputThatIsDurable:
    def test_unblocks_its_reader_while_its_partition_runs(self, partition, monkeypatch):
        told, (east, west) = [], partition
        monkeypatch.setattr("app.messaging.outbox.nudge_island", told.append)
        east.hear(stored("prep", "x"))
        assert told == ["west"]
        west.look()
        assert seen()["prep"][0] == "running"
        assert seen()["train"] == ("starting", "west", 1)
        assert taken_on_west() == ["6" * 64]

    def test_does_not_unblock_a_reader_of_another_output(self, partition, monkeypatch):
        told, (east, west) = [], partition
        monkeypatch.setattr("app.messaging.outbox.nudge_island", told.append)
        east.hear(stored("prep", "y"))
        west.look()
        assert seen()["train"][0] == "blocked"
        assert told == []

    def test_does_not_unblock_a_reader_that_needs_another_task_too(self, partition, monkeypatch):
        told, (east, _) = [], partition
        with transactions.transaction() as session:
            add_task(session, "more", island="east")
            session.add(Need(task_id="tsk_train", needs_id="tsk_more"))
        monkeypatch.setattr("app.messaging.outbox.nudge_island", told.append)
        east.hear(stored("prep", "x"))
        assert told == []

    def test_changes_no_plan_of_its_own_island(self, partition, monkeypatch):
        planned, (east, _) = [], partition
        cycle = east.scheduler._cycle
        monkeypatch.setattr(
            east.scheduler, "_cycle", lambda session: planned.append(1) or cycle(session)
        )
        east.tell(stored("prep", "x"))
        east.scheduler.look()
        assert planned == []
        assert taken_on_west() == []
        east.tell(finished("prep", seq=3, x=1, y=1))
        east.scheduler.look()
        assert planned == [1]

    def test_reported_again_counts_once(self, partition, monkeypatch):
        told, (east, _) = [], partition
        east.hear(stored("prep", "x"))
        monkeypatch.setattr("app.messaging.outbox.nudge_island", told.append)
        east.hear(stored("prep", "x"), stored("prep", "x", seq=3, sha256="7" * 64))
        assert told == []
        with transactions.transaction() as session:
            prep = session.scalar(select(Task).where(Task.name == "prep"))
            assert (prep.event_seq, prep.outputs["x"]["sha256"]) == (3, "6" * 64)

    def test_is_seen_by_a_board_that_is_read_anew(self, partition):
        east, west = partition
        east.hear(stored("prep", "x"))
        west.scheduler.follower.forget()
        west.look()
        assert seen()["train"][0] == "starting"

    def test_counts_although_its_task_was_paused_meanwhile(self, partition):
        east, west = partition
        paused = Paused(task="tsk_prep", epoch=1, seq=2, step=3, held_us=7)
        with transactions.transaction() as session:
            session.scalar(select(Task).where(Task.name == "prep")).hold = "user"
        east.look()
        east.hear(paused, stored("prep", "x", seq=3), residents=[view("prep", "paused")])
        west.look()
        assert seen()["prep"][0] == "blocked"
        assert seen()["train"][0] == "starting"

    def test_stays_when_its_partition_is_killed_and_run_again(self, partition):
        east, west = partition
        east.hear(stored("prep", "x"))
        west.look()
        east.hear(incarnation="p2")  # its process was killed, and what it held
        east.look()
        assert seen()["prep"] == ("starting", "east", 2)
        west.hear(started("train"), finished("train"))
        assert seen()["train"][0] == "done"
        again = {"epoch": 2, "seq": 1}
        run = replace(started("prep", epoch=2), **again)
        east.hear(run, finished("prep", seq=2, epoch=2, x=1, y=1), incarnation="p2")
        assert seen()["prep"][0] == "done"
        with transactions.transaction() as session:
            assert session.get_one(Request, "req_r").state == "done"

    def test_stays_when_its_partition_fails_for_good_and_the_request_with_it(self, partition):
        """Who has begun ends; who waits for what will never come is given up."""
        east, west = partition
        with transactions.transaction() as session:
            add_task(session, "last", kind="cuda", island="west")
            session.add(Need(task_id="tsk_last", needs_id="tsk_prep", port="y", output="y"))
        east.hear(stored("prep", "x"))
        west.look()
        failed = Failed(
            task="tsk_prep", epoch=1, seq=3, step=5, held_us=9, cause="uncapturable", message="no"
        )
        east.hear(failed)
        west.look()
        found = {name: state for name, (state, *_) in seen().items()}
        assert found == {"prep": "failed", "train": "starting", "last": "failed"}
        west.hear(started("train"), finished("train"))
        assert seen()["train"][0] == "done"
        with transactions.transaction() as session:
            assert session.get_one(Request, "req_r").state == "failed"


# --- an island is lost ----------------------------------------------------------------------------


def goes_dark(session, name):
    session.execute(update(Island).where(Island.name == name).values(leader_until=func.now()))
    session.execute(update(Device).where(Device.island == name).values(lease_until=func.now()))


def taken_over(session, lost):
    touched, after = set(), ""
    while after is not None:
        more, after = island_assignment.take_over(session, lost, after=after)
        touched |= more
    return touched


@pytest.fixture
def both(session, people):
    """Two islands with one cpu device each; east runs `run`, `next` waits there."""
    east, west = Played("east"), Played("west")
    east.hear()
    west.hear()
    for name in ("run", "next"):
        add_task(session, name, request=f"req_{name}", island="east")
        east.look()
    east.hear(started("run"), saved("run", seq=2, step=4), residents=[view("run", step=6)])
    east.hear(residents=[view("run", step=7, held_us=5000)])
    assert states(session) == {"next": ("waiting", "east", 0), "run": ("running", "east", 1)}
    return east, west


class TestLost:
    def test_island_with_work_but_without_leader_and_device_is_dark(self, session, both):
        assert island_assignment.dark(session) == set()
        session.execute(update(Island).where(Island.name == "east").values(leader_until=func.now()))
        assert island_assignment.dark(session) == set()  # its device is heard
        goes_dark(session, "east")
        goes_dark(session, "west")  # which has nothing to do
        assert island_assignment.dark(session) == {"east"}

    def test_island_is_not_dark_while_a_long_step_may_run_there(self, session, both):
        goes_dark(session, "east")
        session.execute(update(Device).where(Device.island == "east").values(grace_us=60_000_000))
        assert island_assignment.dark(session) == set()

    def test_waiting_tasks_move_at_once_and_running_tasks_go_on_from_their_image(
        self, session, both
    ):
        _, west = both
        waited_since = session.scalar(select(Task.waiting_since).where(Task.name == "next"))
        goes_dark(session, "east")
        assert taken_over(session, "east") == {"west"}
        assert states(session) == {"next": ("waiting", "west", 0), "run": ("waiting", "west", 1)}
        assert lines(session) == {"west": 2}
        since = select(Task.waiting_since).where(Task.name == "next")
        assert session.scalar(since) == waited_since
        assert "The island east is lost" in said(session, "run", "task.reassigned")
        west.look()
        launched = [name for name, (state, *_) in states(session).items() if state == "starting"]
        assert len(launched) == 1
        west.hear(started(launched[0], epoch=states(session)[launched[0]][2]))
        images = session.scalars(select(Checkpoint.step)).all()
        assert images == [4]

    def test_launch_elsewhere_offers_the_image_under_a_higher_epoch(self, session, both):
        _, west = both
        session.execute(update(Task).where(Task.name == "next").values(state="cancelled"))
        goes_dark(session, "east")
        taken_over(session, "east")
        west.look()
        assert states(session)["run"] == ("starting", "west", 2)
        west.hear(started("run", epoch=2, step=4, resumed="image"))
        session.expire_all()
        assert session.get_one(Task, "tsk_run").lost_steps == 3  # steps 5, 6 and 7

    def test_island_that_comes_back_does_nothing_twice_and_is_charged_once(self, session, both):
        east, _ = both
        goes_dark(session, "east")
        taken_over(session, "east")
        # The same scheduler, with the board that it had, and the device with what it held.
        east.hear(finished("run", seq=3, held_us=9000), residents=[view("run", step=9)])
        east.look()
        found = states(session)
        assert found == {"next": ("waiting", "west", 0), "run": ("waiting", "west", 1)}
        placement = session.scalar(select(Placement).where(Placement.task_id == "tsk_run"))
        assert (placement.end, placement.held_us) == ("lost", 5000)
        assert session.scalar(select(func.sum(Usage.held_us))) == 5000
        add_task(session, "fresh", request="req_f", island="east")
        east.look()
        assert states(session)["fresh"] == ("starting", "east", 1)  # its device is free

    def test_nothing_is_taken_from_an_island_that_came_back_meanwhile(self, session, both):
        east, _ = both
        goes_dark(session, "east")
        east.look()
        assert taken_over(session, "east") == set()
        assert states(session)["run"] == ("running", "east", 1)

    def test_task_that_no_other_island_can_run_stays(self, session, both):
        add_task(session, "cuda", request="req_c", island="east", kind="cuda")
        goes_dark(session, "east")
        taken_over(session, "east")
        assert islands(session) == {"cuda": "east", "next": "west", "run": "west"}

    def test_task_that_was_being_cancelled_is_cancelled(self, session, both):
        east, _ = both
        actions.cancel_request(session, session.get_one(Request, "req_run"), by="a")
        session.flush()
        east.look()
        assert states(session)["run"][0] == "stopping"
        goes_dark(session, "east")
        taken_over(session, "east")
        assert states(session)["run"][0] == "cancelled"

    def test_request_is_taken_over_around_ended_tasks_and_tasks_elsewhere(self, session, both):
        add_task(session, "done", request="req_x", island="east", state="done")
        add_task(session, "here", request="req_x", island="west", needs=["done"])
        add_task(session, "lost", request="req_x", island="east", needs=["done"])
        add_task(session, "last", request="req_x", island="east", needs=["lost", "here"])
        goes_dark(session, "east")
        taken_over(session, "east")
        found = islands(session)
        assert found["done"] == "east"
        assert {found[name] for name in ("here", "lost", "last")} == {"west"}

    def test_more_requests_than_fit_one_transaction_are_taken_over(
        self, session, both, monkeypatch
    ):
        monkeypatch.setattr(island_assignment, "PAGE", 2)
        for n in range(5):
            add_task(session, f"t{n}", request=f"req_{n}", island="east")
        goes_dark(session, "east")
        taken_over(session, "east")
        assert set(islands(session).values()) == {"west"}


class TestWatch:
    """Control, with a clock of the test."""

    @pytest.fixture
    def control(self, monkeypatch):
        control = Control()
        control.now_s = 1000.0
        monkeypatch.setattr("workers.control.controller.time.monotonic", lambda: control.now_s)
        monkeypatch.setattr(control, "_chores", lambda: None)
        return control

    def test_only_island_dark_at_every_look_for_long_enough_is_lost(
        self, session, both, control, monkeypatch
    ):
        lost_after(monkeypatch, 60.0)
        goes_dark(session, "east")
        control.look()
        control.now_s += 59
        control.look()
        assert islands(session) == {"next": "east", "run": "east"}
        control.now_s += 1
        control.look()
        assert islands(session) == {"next": "west", "run": "west"}

    def test_nudge_that_brings_no_island_work_wakes_the_locker(self, session, control):
        control.look()
        assert not control.package_locker.wake.is_set(), "no nudge"
        control.nudge()
        control.look()
        assert control.package_locker.wake.is_set()

    def test_nudge_that_brings_an_island_work_leaves_the_locker_alone(
        self, session, people, control
    ):
        add_island(session, "east", cpu=1)
        add_task(session, "new")
        control.nudge()
        control.look()
        assert islands(session) == {"new": "east"}
        assert not control.package_locker.wake.is_set()

    def test_failed_look_does_not_count(self, session, both, control, monkeypatch):
        lost_after(monkeypatch, 60.0)
        goes_dark(session, "east")
        control.look()
        control.now_s += 60
        with monkeypatch.context() as away:
            away.setattr(island_assignment, "dark", _away)
            with pytest.raises(ConnectionError):
                control.look()
        control.look()
        assert islands(session) == {"next": "east", "run": "east"}

    def test_0_means_that_no_island_is_ever_lost(self, session, both, control, monkeypatch):
        lost_after(monkeypatch, 0.0)
        goes_dark(session, "east")
        control.look()
        control.now_s += 1e9
        control.look()
        assert islands(session) == {"next": "east", "run": "east"}


def lost_after(monkeypatch, seconds):
    changed = settings().model_copy(update={"island_lost_s": seconds})
    monkeypatch.setattr("workers.control.controller.settings", lambda: changed)


def _away(session):
    raise ConnectionError("for the test")


# --- several connections --------------------------------------------------------------------------


@pytest.fixture
def shared(committed, sent):
    """Two islands, each of which runs one task of the request r."""
    with transactions.transaction() as session:
        session.add(Tenant(id="ten_a", name="a"))
        session.flush()
        session.add(User(id="usr_a", tenant_id="ten_a", name="a"))
        for name in ("east", "west"):
            session.add(Island(name=name))
        session.flush()
    there = [Played(name) for name in ("east", "west")]
    for one in there:
        one.hear()
        with transactions.transaction() as session:
            add_task(
                session, one.scheduler.island, island=one.scheduler.island, kind=one.facts["kind"]
            )
        one.look()
        one.hear(started(one.scheduler.island), residents=[view(one.scheduler.island)])
    return there


class TestAtOnce:
    def test_of_two_islands_that_end_a_request_at_once_one_sees_that_it_has_ended(self, shared):
        """The second waits for the first one's commit before it sums up."""
        rounds = [threading.Thread(target=_ends, args=(one,)) for one in shared]
        with transactions.transaction() as session:
            session.execute(select(Request).with_for_update(key_share=True)).all()
            for one in rounds:
                one.start()
                one.join(0.5)  # its task has ended; it waits to see whether the request has
                assert one.is_alive()
            session.rollback()
        for one in rounds:
            one.join(60)
            assert not one.is_alive()
        with transactions.transaction() as session:
            found = states(session)
            assert {state for state, *_ in found.values()} == {"done"}
            assert session.scalar(select(Request.state)) == "done"

    def test_two_control_processes_assign_a_request_once(self, shared):
        with transactions.transaction() as session:
            for name in "cd":
                add_task(session, name, request="req_s")
        with transactions.transaction() as api:
            api.execute(select(Task).where(Task.id == "tsk_c").with_for_update()).all()
            found = []
            control = threading.Thread(target=lambda: found.append(_assign()))
            control.start()
            control.join(0.3)
            assert control.is_alive(), "it waits for the wish, and leaves no task of it out"
            api.rollback()
            control.join(60)
            assert not control.is_alive()
        with transactions.transaction() as session:
            now = islands(session)
        assert None not in now.values()
        assert found == [{now["c"], now["d"]}]


def _ends(one):
    one.hear(finished(one.scheduler.island))


def _assign():
    with transactions.transaction() as session:
        return assigned(session)


def lines(session):
    query = select(Line.island, func.sum(Line.waiting)).group_by(Line.island)
    return {island: int(n) for island, n in session.execute(query) if n}


def said(session, name, type_):
    query = select(RequestEvent.message).where(
        RequestEvent.task_id == f"tsk_{name}", RequestEvent.type == type_
    )
    return " ".join(session.scalars(query))
