"""Islands and devices over a channel that loses, doubles and delays everything.

The island's side is the real one: `snapshot_reader`, `cycle`, `journal` and `outbox` on real
Postgres.  The devices are doubles that keep the device's half of the protocol and nothing else.
Whatever happens on the way: no two devices run one task at once, and once the faults stop every
task ends, with each of its steps done and the ledger closed.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from app.core.model.lifecycle import ENDED
from app.core.model.protocol.messages import (
    Alive,
    Answer,
    Cancel,
    Finished,
    Launch,
    Pause,
    Paused,
    ResidentView,
    Saved,
    Started,
    Stopped,
    decode,
)
from app.core.scheduling.cycle import decide
from app.db import transactions
from app.db.models import (
    Account,
    Device,
    Island,
    OutboxOrder,
    Placement,
    Request,
    Task,
    Tenant,
    Usage,
    User,
)
from app.messaging import outbox
from app.scheduling import journal, snapshot_reader
from app.settings import settings
from tests.thoroughness import rest_long

STEPS = 6
DEVICES = ("h.0", "h.1")
TENANTS = ("a", "b", "c")


class Clock:
    """Microseconds; no two looks at it see the same."""

    def __init__(self):
        self.now_us = 0

    def __next__(self):
        self.now_us += 1
        return self.now_us

    def pass_s(self, seconds):
        self.now_us += int(seconds * 1e6)


@dataclass
class Resident:
    """What a device double holds: one epoch of one task."""

    task: str
    epoch: int
    step: int
    state: str = "seating"
    confirmed: bool = False  # by its fresh order, or by the answer to a heartbeat that named it
    held_us: int = 0
    order_seq: int = 1
    seq: int = 0
    events: list = field(default_factory=list)

    def tell(self, kind, **more):
        self.seq += 1
        common = {"task": self.task, "epoch": self.epoch, "seq": self.seq}
        self.events.append(kind(**common, step=self.step, held_us=self.held_us, **more))


class DeviceDouble:
    steps, capabilities, resident = STEPS, (), Resident

    def __init__(self, name, clock):
        self.name, self.clock = name, clock
        self.restart()

    def restart(self):
        """kill -9 and start again: memory is gone, the store is not."""
        self.incarnation = f"{next(self.clock):020d}"
        self.house: dict[tuple[str, int], Resident] = {}
        self.newest: dict[str, int] = {}  # the highest epoch of each task that was launched here
        self.trusted = False

    def alive(self):
        return Alive(
            device=self.name,
            incarnation=self.incarnation,
            sent_us=next(self.clock),
            facts={"host": "h", "island": "isle", "kind": "cpu", "threads": 1},
            residents=[
                ResidentView(
                    task=r.task,
                    epoch=r.epoch,
                    state=r.state,
                    step=r.step,
                    held_us=r.held_us,
                    order_seq=r.order_seq,
                    memory_bytes=0,
                )
                for r in self.house.values()
            ],
            events=[event for r in self.house.values() for event in r.events],
            logs=[],
        )

    def receive(self, message):
        if isinstance(message, Answer):
            self.hear(message)
        else:
            self.take(message)

    def take(self, order):
        known = self.newest.get(order.task, 0)
        if order.epoch < known:
            return
        if isinstance(order, Launch):
            self._launch(order, known)
        elif (resident := self.house.get((order.task, order.epoch))) is not None:
            resident.order_seq = max(resident.order_seq, order.seq)
            if isinstance(order, Pause) and resident.state == "running":
                self._pause(resident)
            elif isinstance(order, Cancel) and resident.state != "ended":
                resident.state = "ended"
                resident.tell(Stopped)

    def _launch(self, order, known):
        if order.epoch == known:
            return
        self.newest[order.task] = order.epoch
        newest = max((image.step for image in order.images), default=0)
        parked = self.house.pop((order.task, known), None)
        step = parked.step if parked and parked.state == "paused" else newest
        is_sure = order.incarnation == self.incarnation and next(self.clock) < order.surely_until_us
        self.house[order.task, order.epoch] = self.resident(
            order.task, order.epoch, step, confirmed=is_sure
        )

    def _pause(self, resident):
        resident.state = "paused"
        resident.tell(Paused)
        self._saved(resident)

    def _saved(self, resident):
        sha256 = hashlib.sha256(f"{resident.task}@{resident.step}".encode()).hexdigest()
        resident.tell(Saved, sha256=sha256, size_bytes=1, took_us=1)

    def lose_one(self):
        """A process that was only just started dies before anybody heard of it."""
        for place, resident in list(self.house.items()):
            if resident.state == "seating" and not resident.confirmed:
                del self.house[place]

    def hear(self, answer):
        if answer.incarnation != self.incarnation:
            return
        self.trusted = True
        for task, epoch in answer.drop:
            self.house.pop((task, epoch), None)
        for task, epoch in answer.keep:
            if (task, epoch) in self.house:
                self.house[task, epoch].confirmed = True
        for place, resident in list(self.house.items()):
            heard = answer.heard.get(f"{place[0]}/{place[1]}", 0)
            resident.events = [event for event in resident.events if event.seq > heard]
            if resident.state == "ended" and not resident.events:
                del self.house[place]

    def running(self):
        """The task that steps now, if any: one seat, and only while trusted and confirmed."""
        for resident in self.house.values():
            if resident.state == "running" and self.trusted and resident.confirmed:
                return resident
        return None

    def work(self):
        resident = self.running()
        if resident is None and not any(r.state == "running" for r in self.house.values()):
            resident = self._seat()
        if resident is None:
            return
        resident.step += 1
        resident.held_us += 1_500_000
        if resident.step >= self.steps:
            resident.state = "ended"
            resident.tell(Finished, result={"steps": resident.step}, outputs={})

    def _seat(self):
        for resident in self.house.values():
            if resident.state == "seating" and resident.confirmed and self.trusted:
                resident.state = "running"
                can = list(self.capabilities)
                resident.tell(Started, preset={}, capabilities=can, resumed="image")
                return resident
        return None


class World:
    """Two devices, three tenants, an island, and a channel that cannot be relied on."""

    def __init__(self, session, seed):
        self.session, self.dice = session, random.Random(seed)
        self.clock = Clock()
        self.devices = {name: DeviceDouble(name, self.clock) for name in DEVICES}
        self.up: list = []  # heartbeats under way
        self.down: list = []  # orders and answers under way
        self.now_s = transactions.now_s(session)

    def island(self, heard):
        for alive in heard:
            recorded = journal.record(self.session, alive)
            if recorded is not None:
                self.down.append((alive.device, recorded[0]))
        picture = self.picture()
        journal.store(self.session, decide(picture, now_s=self.now_s))
        journal.settle(self.session)
        due = outbox.take_unsent(self.session, list(self.devices), resend_s=-1.0)
        self.down += [(order.device_id, decode(order.body)) for order in due]
        self.clock.pass_s(settings().order_resend_s)  # all of them are due again

    def picture(self):
        """What the island decides by."""
        return snapshot_reader.load(self.session, "isle", now_s=self.now_s)

    def beat(self, name):
        self.up.append(self.devices[name].alive())

    def deliver_up(self):
        if self.up:
            self.island([self._lucky(self.up)])

    def deliver_down(self):
        if not self.down:
            return
        name, message = self._lucky(self.down)
        self.devices[name].receive(message)

    def _lucky(self, messages):
        """Any of those under way, in any order; sometimes it stays and arrives again."""
        at = self.dice.randrange(min(len(messages), 6))
        return messages[at] if self.dice.random() < 0.2 else messages.pop(at)

    def drop(self):
        for messages in (self.up, self.down):
            if messages and self.dice.random() < 0.5:
                messages.pop(self.dice.randrange(len(messages)))

    def lease_ends(self):
        """A device is not heard for a whole lease; it has stopped by itself before that."""
        name = self.dice.choice(DEVICES)
        self.devices[name].trusted = False
        self.clock.pass_s(settings().lease_s)
        past = func.now() - timedelta(seconds=1)
        self.session.execute(update(Device).where(Device.id == name).values(lease_until=past))

    def restart(self):
        self.devices[self.dice.choice(DEVICES)].restart()

    def wish(self):
        hold = self.dice.choice(["", "", "user"])
        id = self.dice.choice(self.ids)
        self.session.execute(update(Task).where(Task.id == id).values(hold=hold))

    def cancel(self):
        if self.dice.random() < 0.1:
            one = Task.id == self.dice.choice(self.ids)
            self.session.execute(update(Task).where(one).values(cancel_asked_at=func.now()))

    def act(self):
        name = self.dice.choice(DEVICES)
        lose_one = self.devices[name].lose_one
        chaos = [self.drop, self.lease_ends, self.restart, self.wish, self.cancel, lose_one]
        usual = [
            lambda: self.beat(name),
            self.deliver_up,
            self.deliver_down,
            self.deliver_down,
            self.devices[name].work,
        ]
        self.dice.choice(usual * 4 + chaos)()
        self.check()

    def check(self):
        running = [r.task for device in self.devices.values() if (r := device.running())]
        twice = [task for task, n in Counter(running).items() if n > 1]
        assert not twice, f"{twice} run twice at once"

    def calm(self, rounds=400):
        """No more faults: everything must end."""
        self.session.execute(update(Task).values(hold=""))
        for _ in range(rounds):
            self.round()
            if self._ended():
                return
        pytest.fail(f"not ended: {self.session.execute(select(Task.id, Task.state)).all()}")

    def round(self):
        """Everybody speaks, is heard and works, in order; nothing is lost."""
        for name in self.devices:
            self.beat(name)
        while self.up:
            self.island([self.up.pop(0)])
        while self.down:
            name, message = self.down.pop(0)
            self.devices[name].receive(message)
            self.check()
        for device in self.devices.values():
            device.work()
        self.check()

    def _ended(self):
        self.session.expire_all()
        return set(self.session.scalars(select(Task.state))) <= ENDED


@pytest.fixture
def world(session, request):
    return furnished(World(session, seed=request.param))


def furnished(world, tasks=2):
    """With its tenants, some tasks of each, and devices that have been heard."""
    session = world.session
    session.add(Island(name="isle"))
    session.add_all(Tenant(id=f"ten_{name}", name=name) for name in TENANTS)
    session.flush()
    session.add_all(User(id=f"usr_{name}", tenant_id=f"ten_{name}", name=name) for name in TENANTS)
    session.flush()
    world.ids = []
    for name in TENANTS:
        for n in range(tasks):
            world.ids.append(_submit(session, name, n))
    for device in DEVICES:
        world.beat(device)
        world.island([world.up.pop()])
    return world


def _submit(session, name, n):
    owner = {"tenant_id": f"ten_{name}", "user_id": f"usr_{name}"}
    bundle = {"bundle": "sha256:" + "0" * 64}
    session.add(Request(id=f"req_{name}{n}", name="r", descriptor=bundle, **owner))
    session.flush()
    descriptor = {
        "name": name,
        "run": {"job": "m:C"},
        "max_duration_s": 1e6,
        "checkpoint": {"every_s": 60.0, "keep": 3},
    }
    id = f"tsk_{name}{n}"
    session.add(
        Task(
            id=id,
            request_id=f"req_{name}{n}",
            island="isle",
            ordinal=0,
            name="t",
            type="train",
            kind="cpu",
            descriptor=descriptor,
            **owner,
        )
    )
    session.flush()
    return id


@pytest.mark.parametrize(
    "world",
    rest_long([0, 1, 2, 24, 31, 34, 43, 44, *range(3, 10)], keep=4),
    indirect=True,
    ids="seed-{}".format,
)
@pytest.mark.slow
def test_nothing_runs_twice_and_everything_ends(world, session):
    for _ in range(250):
        world.act()
    world.calm()
    ends = set(session.scalars(select(Task.state).where(Task.cancel_asked_at.is_(None))))
    assert ends <= {"done"}
    results = session.scalars(select(Task.result).where(Task.state == "done"))
    assert {result["steps"] for result in results} <= {STEPS}
    booked = session.scalar(select(func.sum(Usage.charged_us)))
    assert booked == session.scalar(select(func.sum(Placement.charged_us)))
    assert booked == session.scalar(select(func.sum(Account.total_us)))
    assert session.scalar(select(func.count()).where(Placement.ended_at.is_(None))) == 0
    assert session.scalar(select(func.count()).where(OutboxOrder.answered_at.is_(None))) == 0
