"""Tasks get a device where their packages are ready; the island asks hosts to install them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.core.model.device_choice import DeviceChoice, with_packages
from app.core.model.protocol.messages import Alive, Answer, BadMessage, decode, encode
from app.core.scheduling.cycle import decide
from app.db import transactions
from app.db.models import Device, Host, Line, Placement, Task
from app.insight import explain
from app.scheduling import journal, snapshot_reader
from tests.scenery import Scenery

LOCK, OTHER = "5" * 64, "6" * 64
clock_us = itertools.count(1)


@pytest.fixture
def scenery(session: Session) -> Scenery:
    found = Scenery(session)
    found.add(Host(name="second", island="isle"))
    return found


def hear(session: Session, device: str = "host.0", **facts: Any) -> Answer:
    about = {"host": "host", "island": "isle", "kind": "cpu", "memory_bytes": 2**30}
    usual = {"offers": ["environment:3.11"], "builds": {}}
    recorded = journal.record(
        session,
        Alive(
            device=device,
            incarnation="p1",
            sent_us=next(clock_us),
            facts={**about, **usual, **facts},
            residents=[],
            events=[],
            logs=[],
        ),
    )
    journal.settle(session)
    assert recorded is not None
    return recorded[0]


def waiting(scenery: Scenery, lock: str = LOCK, **more: Any) -> Task:
    tenant = more.pop("tenant", None) or scenery.tenant(f"team{next(scenery.numbers)}")
    choice = with_packages("!environment:3.11", lock)
    found: Task = scenery.task(tenant, device_choice=choice, descriptor={"run": {}}, **more)
    return found


def launched(session: Session) -> set[str]:
    now_s = transactions.now_s(session)
    snapshot = snapshot_reader.load(session, "isle", now_s=now_s)
    return {one.task for one in decide(snapshot, now_s=now_s).decisions if one.move == "Launch"}


def reason(session: Session, task: Task) -> Any:
    session.flush()
    (why,) = explain.explain(session, [task]).values()
    return why.reasons[0]


def test_task_takes_a_device_once_its_packages_are_ready(
    session: Session, scenery: Scenery
) -> None:
    task, plain = waiting(scenery), scenery.task(scenery.tenant("plain"))
    assert hear(session).environments == [LOCK]
    assert launched(session) == {plain.id}
    assert reason(session, task)["code"] == "PACKAGES_INSTALLING"
    assert "host is about to be asked" in reason(session, task)["message"]
    hear(session, builds={LOCK: ["building", ""]})
    assert reason(session, task)["message"] == "Its packages are being installed on host."
    assert reason(session, task)["change"]["of"] == "host"
    plain.state = "done"
    answer = hear(session, environments={LOCK: [1, 2]})
    assert launched(session) == {task.id}
    assert answer.environments == [LOCK], "it stays until the task has it"


def test_device_of_an_older_version_installs_at_the_launch(
    session: Session, scenery: Scenery
) -> None:
    task = waiting(scenery)
    assert hear(session, builds=None).environments == []
    session.get_one(Device, "host.0").facts = {"offers": ["environment:3.11"]}
    session.flush()
    assert launched(session) == {task.id}


def test_failure_on_the_only_host_ends_the_tasks_in_uvs_words(
    session: Session, scenery: Scenery
) -> None:
    task, other = waiting(scenery), waiting(scenery, OTHER)
    hear(session)
    hear(session, builds={LOCK: ["failed", "Hash mismatch for towers"], OTHER: ["waiting", ""]})
    session.refresh(task)
    assert (task.state, task.cause) == ("failed", "environment")
    assert task.message == "Its packages could not be installed on host."
    assert task.detail == "Hash mismatch for towers"
    assert session.scalars(select(Placement)).all() == []
    session.refresh(other)
    assert other.state == "waiting"
    waits = {line.device_choice: line.waiting for line in session.scalars(select(Line))}
    assert sorted(waits.values()) == [0, 1]
    assert hear(session).environments == [OTHER]


def test_failure_on_one_host_sends_the_packages_to_another(
    session: Session, scenery: Scenery
) -> None:
    hear(session)
    hear(session, "second.0", host="second")
    task = waiting(scenery)
    answers = [hear(session), hear(session, "second.0", host="second")]
    (first,) = (n for n, answer in enumerate(answers) if answer.environments)
    names = ["host", "second"]
    if first:
        names.reverse()
    hear(session, f"{names[0]}.0", host=names[0], builds={LOCK: ["failed", "no network"]})
    session.refresh(task)
    assert task.state == "waiting"
    assert hear(session, f"{names[1]}.0", host=names[1]).environments == [LOCK]
    hear(session, f"{names[1]}.0", host=names[1], builds={LOCK: ["failed", "no network"]})
    session.refresh(task)
    assert task.message == "Its packages could not be installed on host and second."


def test_task_with_state_waits_on_and_says_why(session: Session, scenery: Scenery) -> None:
    task = waiting(scenery, epoch=2)
    hear(session)
    hear(session, builds={LOCK: ["failed", "no  network\nhere"]})
    session.refresh(task)
    assert task.state == "waiting"
    told = reason(session, task)["message"]
    assert told.startswith("Its packages could not be installed on host, which tries again later")
    assert "no network here" in told


def test_one_task_is_prepared_on_one_host(session: Session, scenery: Scenery) -> None:
    hear(session)
    hear(session, "second.0", host="second")
    waiting(scenery)
    answers = [hear(session), hear(session, "second.0", host="second")]
    assert sorted(len(answer.environments) for answer in answers) == [0, 1]


@pytest.mark.parametrize("of", [Device, Host])
def test_drained_host_that_is_ready_does_not_keep_the_task_waiting(
    session: Session, scenery: Scenery, of: type[Device] | type[Host]
) -> None:
    hear(session)
    hear(session, "second.0", host="second")
    task = waiting(scenery)
    ready = {"environments": {LOCK: [1, 2]}}
    assert hear(session, **ready).environments == [LOCK]
    assert hear(session, "second.0", host="second").environments == []
    session.get_one(of, "host.0" if of is Device else "host").cordoned = True
    session.flush()
    assert hear(session, "second.0", host="second").environments == [LOCK]
    assert hear(session, **ready).environments == [LOCK], "it may serve again"
    failed = {"builds": {LOCK: ["failed", "no network"]}}
    hear(session, "second.0", host="second", **failed)
    session.refresh(task)
    assert task.state == "waiting", "its packages are on the drained host"


def test_packages_of_a_stored_command_are_asked_of_hosts_where_it_goes_on(
    session: Session, scenery: Scenery
) -> None:
    def asked() -> list[list[str]]:
        heard = [
            hear(
                session,
                "second.0",
                host="second",
                offers=["environment:3.11", "command-images:aa11"],
            )
        ]
        heard.append(hear(session))
        return [answer.environments for answer in heard]

    asked()
    tenant = scenery.tenant("moved")
    for n in range(10):  # each lock has an order of hosts of its own
        lock = f"{n:064x}"
        task = waiting(scenery, lock, tenant=tenant, epoch=1)
        task.capabilities, task.goes_on_with = ["restart", "move"], "command-images:aa11"
        session.flush()
        assert asked() == [[lock], []]
        session.get_one(Device, "second.0").cordoned = True
        session.flush()
        assert asked() == [[], [lock]], "it begins again elsewhere"
        session.get_one(Device, "second.0").cordoned = False
        scenery.move(task, "done")


def test_look_at_many_locks_costs_little(
    session: Session, scenery: Scenery, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = scenery.tenant("greedy")
    for n in range(30):
        waiting(scenery, f"{n:064x}", tenant=tenant)
    compared: list[DeviceChoice] = []
    suits = DeviceChoice.suits

    def counted(choice: DeviceChoice, has: Any) -> bool:
        compared.append(choice)
        return suits(choice, has)

    monkeypatch.setattr(DeviceChoice, "suits", counted)
    assert len(hear(session).environments) == 8
    assert len(compared) == 1, "all locks suit the same devices"


def test_tenant_with_many_locks_does_not_keep_another_waiting(
    session: Session, scenery: Scenery
) -> None:
    greedy = scenery.tenant("greedy")
    for n in range(30):
        waiting(scenery, f"{n:064x}", tenant=greedy)
    waiting(scenery)
    asked = hear(session).environments
    assert LOCK in asked[:2]
    assert len(asked) == 8


def test_garbled_builds_are_refused() -> None:
    about = {"device": "h.0", "incarnation": "p1", "sent_us": 1, "residents": [], "events": []}
    for builds in ({"x": ["failed", ""]}, {LOCK: ["done", ""]}, {LOCK: ["failed"]}, {LOCK: "x"}):
        with pytest.raises(BadMessage):
            decode(encode(Alive(**about, logs=[], facts={"builds": builds})))
