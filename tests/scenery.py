"""Rows for tests of what is shown: tenants, devices and tasks in few words.

States are set as the journal would leave them; usage is booked by the real ledger.
"""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import Any

import uuid_utils
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from app.api.access import auth
from app.core.model.device_choice import choice_in
from app.core.model.lifecycle import ON_A_DEVICE
from app.db import lines
from app.db.models import Device, Host, Island, Line, Placement, Request, Task, Tenant, User
from app.scheduling import ledger


class Scenery:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.numbers = itertools.count()
        led = {"leader": "a test", "leader_until": func.now() + timedelta(hours=1)}
        self.add(Island(name="isle", **led))
        self.add(Host(name="host", island="isle"))
        self.root = self.add(Tenant(id=_id("ten"), name="platform"))

    def add(self, row: Any) -> Any:
        self.session.add(row)
        self.session.flush()
        return row

    def tenant(self, name: str, weight_milli: int = 1000, **more: Any) -> Tenant:
        """A tenant with one user, of the tenant's name."""
        place = {"parent_id": self.root.id, "weight_milli": weight_milli, **more}
        tenant = self.add(Tenant(id=_id("ten"), name=name, **place))
        self.user(name, tenant)
        return tenant

    def user(self, name: str, tenant: Tenant) -> User:
        return self.add(User(id=_id("usr"), tenant_id=tenant.id, name=name))

    def key(self, tenant: Tenant, role: str = "member") -> str:
        user = self.user(f"{role} {next(self.numbers)}", tenant)
        return auth.new_key(self.session, user.id, role, "a test")

    def device(self, id: str, *, kind: str = "cpu", lease_s: float = 3600, **more: Any) -> Device:
        lease = func.now() + timedelta(seconds=lease_s)
        return self.add(
            Device(id=id, host="host", island="isle", kind=kind, lease_until=lease, **more)
        )

    def task(self, tenant: Tenant, state: str = "waiting", **more: Any) -> Task:
        """A task in a request of its own; give it a `seat` if it is on a device."""
        name = more.pop("name", f"task{next(self.numbers)}")
        user = (
            more.pop("user", None)
            or self.session.scalars(
                select(User).where(User.tenant_id == tenant.id).order_by(User.id)
            ).first()
        )
        owner = {"tenant_id": tenant.id, "user_id": user.id}
        given = {"tasks": [{"name": name, "run": {"job": "train:Train"}}]}
        named = {"name": f"request of {name}", "descriptor": given}
        request = self.add(Request(id=_id("req"), **named, **owner))
        task = self.add(
            Task(
                id=_id("tsk"),
                request_id=request.id,
                ordinal=0,
                name=name,
                type="train",
                state=state,
                **{
                    "island": "isle",
                    "kind": "cpu",
                    "epoch": int(state in ON_A_DEVICE),
                    **owner,
                    **more,
                },
            )
        )
        if state in ON_A_DEVICE:
            self.seat(task)
        if state == "waiting":
            self.line(task, 1)
        return task

    def line(self, task: Task, change: int) -> None:
        """So many more wait as this one does; the journal counts them as they come and go."""
        self.session.refresh(task)
        key = lines.key_of(task)
        line = self.session.get(Line, key)
        if line is None:
            owner = {"tenant_id": task.tenant_id, "waiting": 0}
            line = self.add(Line(**key, **owner))
        line.waiting += change
        self.session.flush()

    def move(self, task: Task, state: str, **more: Any) -> None:
        """From one state to another, as the journal would write it."""
        self.line(task, (state == "waiting") - (task.state == "waiting"))
        task.state = state
        for name, value in more.items():
            setattr(task, name, value)
        self.session.flush()

    def seat(self, task: Task, **more: Any) -> Placement:
        """The open placement of a task that sits, or is about to sit, on `task.seat`."""
        device = self.session.get_one(Device, task.seat)
        return self.add(
            Placement(
                task_id=task.id,
                epoch=task.epoch,
                device_id=device.id,
                tenant_id=task.tenant_id,
                user_id=task.user_id,
                kind=device.kind,
                cost_milli=device.cost_milli,
                incarnation="p1",
                fraction_milli=choice_in(task.device_choice or "").fraction_milli,
                leaving=task.state in ("pausing", "stopping"),
                started_at=None if task.state == "starting" else func.now(),
                **more,
            )
        )

    def charge(self, task: Task, held_us: int) -> None:
        """The device says how long the task's newest launch has held its seat."""
        query = select(Placement).where(Placement.task_id == task.id)
        placement = self.session.scalars(query.order_by(Placement.id.desc())).first()
        ledger.charge(self.session, placement, held_us)
        self.session.flush()


def _id(kind: str) -> str:
    return f"{kind}_{uuid_utils.uuid7().hex}"


def until_somebody_waits_for(session: Session) -> None:
    """Wait until another transaction waits for any lock that this one holds."""
    waiting = text(
        "select count(*) from pg_locks"
        " where not granted and pg_backend_pid() = any(pg_blocking_pids(pid))"
    )
    deadline_s = time.monotonic() + 90
    while not session.scalar(waiting):
        assert time.monotonic() < deadline_s, "nobody waits"
        time.sleep(0.01)
