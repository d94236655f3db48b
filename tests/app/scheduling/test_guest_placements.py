"""What is lent to a task of several ranks, over a channel that loses, doubles and delays messages.

As in `test_protocol`; here two of three tasks can use both devices, and takes them when it may.
While its ranks sit on both, nobody else runs on either, whatever was lost on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from sqlalchemy import func, select, update

from app.core.model.protocol.messages import Resize, Resized, decode, encode
from app.db.models import Account, OutboxOrder, Placement, RequestEvent, Task, Usage
from tests.app.scheduling import test_protocol as protocol
from tests.thoroughness import rest_long


@dataclass
class Ranks(protocol.Resident):
    seats: int = 1
    wished: int = 1


class Home(protocol.DeviceDouble):
    """A device double whose residents are resized at their next step."""

    steps, resident = 30, Ranks

    def alive(self):
        beat = encode(super().alive())
        return decode({**beat, "facts": {**beat["facts"], "splice": True}})

    def take(self, order):
        resident = self.house.get((order.task, order.epoch))
        runs = resident is not None and resident.state == "running"
        if isinstance(order, Resize) and runs and order.seq > resident.order_seq:
            (resident.wished,) = order.seats
        super().take(order)

    def work(self):
        resident = self.running()
        if resident is not None and resident.wished != resident.seats:
            resident.seats = resident.wished
            resident.tell(Resized, seats=[resident.seats])
        super().work()


class Lends(protocol.World):
    """Turns have no length, so that all that can happen happens at one instant."""

    def __init__(self, session, seed):
        super().__init__(session, seed)
        self.devices = {name: Home(name, self.clock) for name in protocol.DEVICES}

    def picture(self):
        picture = super().picture()
        at_once = {"grow_after_s": 0.0, "slice_min_s": 0.0, "slice_max_s": 0.0}
        return replace(picture, policy=replace(picture.policy, **at_once))

    def resize(self):
        """Its owner lets a task hold fewer devices, or more."""
        one = Task.id == self.dice.choice(self.spread)
        most = self.dice.choice([1, 2, 2])
        self.session.execute(update(Task).where(one).values(devices_max=most))

    def leave_one(self):
        """All others are held, for a while: now there is something to be lent."""
        left = Task.id == self.dice.choice(self.spread)
        self.session.execute(update(Task).where(~left).values(hold="user"))
        self.session.execute(update(Task).where(left).values(hold=""))

    def act(self):
        """Fewer faults than elsewhere: to be lent a device takes a dozen messages."""
        dice, name = self.dice, self.dice.choice(list(self.devices))
        wishes = [self.leave_one, self.leave_one, self.wish, self.resize, self.cancel]
        faults = [self.drop, self.lease_ends, self.restart, self.devices[name].lose_one]
        usual = [
            lambda: self.beat(name),
            *[self.deliver_up] * 2,
            *[self.deliver_down] * 3,
            self.devices[name].work,
        ]
        dice.choice(dice.choices([usual, wishes, faults], weights=[40, 2, 1])[0])()
        self.check()

    def check(self):
        super().check()
        running = [r for device in self.devices.values() if (r := device.running())]
        seats = sum(resident.seats for resident in running)
        assert seats <= len(self.devices), running


@pytest.fixture
def lends(session, request):
    world = protocol.furnished(Lends(session, seed=request.param), tasks=1)
    world.spread = world.ids[:2]
    session.execute(update(Task).where(Task.id.in_(world.spread)).values(devices_max=2))
    return world


@pytest.mark.parametrize(
    "lends", rest_long([0, 1, 2, 3, 5, 8], keep=2), indirect=True, ids="seed-{}".format
)
@pytest.mark.slow
def test_no_slot_is_used_twice_and_every_task_ends(lends, session):
    for _ in range(300):
        lends.act()
    lends.calm()
    assert session.scalar(select(func.count()).where(RequestEvent.type == "task.resized"))
    ends = set(session.scalars(select(Task.state).where(Task.cancel_asked_at.is_(None))))
    assert ends <= {"done"}
    booked = session.scalar(select(func.sum(Usage.charged_us)))
    assert booked == session.scalar(select(func.sum(Placement.charged_us)))
    assert booked == session.scalar(select(func.sum(Account.total_us)))
    assert session.scalar(select(func.count()).where(Placement.ended_at.is_(None))) == 0
    assert session.scalar(select(func.count()).where(OutboxOrder.answered_at.is_(None))) == 0
