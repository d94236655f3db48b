"""The life of a lot in the rows: members are made, replaced, retried, held, and end."""

from __future__ import annotations

import itertools
import json
import re
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update

from app.api.access import auth
from app.core.model.protocol import messages
from app.core.model.protocol.messages import Alive, Failed, Finished, ResidentView
from app.db.models import (
    Delivery,
    Device,
    Host,
    Island,
    Lot,
    Need,
    Placement,
    Request,
    RequestEvent,
    Task,
    Tenant,
)
from app.db.transactions import transaction
from app.insight import explain
from app.intake import island_assignment
from app.pages import forms
from app.scheduling import journal, retention
from app.scheduling.board_follower import Follower
from app.scheduling.journal import lots, rungs, task_writer
from app.scheduling.journal.lots import counts_of
from tests.app.conftest import problem

JSON = dict[str, Any]
NOTHING: Any = {"result": None, "outputs": {}}
clock_us = itertools.count(1)
FACTS = {"host": "h", "sandbox": "off", "island": "isle", "kind": "cpu", "offers": ["env"]}


@pytest.fixture
def devices(world, session) -> None:
    """The devices of the island have workers, and the island a scheduler."""
    session.execute(update(Device).values(incarnation="p1", facts=FACTS))
    later = func.now() + timedelta(hours=1)
    session.execute(update(Island).values(leader="a test", leader_until=later))
    session.commit()


@pytest.fixture
def submit(red, devices, session):
    """Submit a request with this lot; return its id."""

    def posted(*more: JSON, **lot: Any) -> str:
        body = {"name": "lot", "run": {"command": ["true"]}, **lot}
        answer = red.post("/v1/requests", json={"tasks": [body, *more]})
        assert answer.status_code == 202, answer.text
        session.commit()
        return answer.json()["id"]

    return posted


def look(session) -> None:
    """Do what control does at a look, until there is nothing more to do."""
    while True:
        more = journal.look_at_lots(session)
        journal.settle(session)
        island_assignment.assign_new(session)
        session.commit()
        if not more:
            return


def members(session, *states: str) -> list[Task]:
    query = select(Task).where(Task.lot_index.is_not(None)).order_by(Task.lot_index)
    if states:
        query = query.where(Task.state.in_(states))
    session.expire_all()
    return list(session.scalars(query))


def run(session, task: Task, device: str) -> None:
    task.state, task.seat, task.epoch = "running", device, task.epoch + 1
    task.first_started_at = task.started_at = func.now()
    session.add(
        Placement(
            task_id=task.id, epoch=task.epoch, device_id=device, tenant_id=task.tenant_id,
            user_id=task.user_id, kind="cpu", cost_milli=1000, incarnation="p1",
        )
    )  # fmt: skip
    session.flush()


def end(session, task: Task, *, fails: bool = False) -> None:
    """Let the task run on a device, and the device report its end."""
    if task.seat is None:
        run(session, task, "h.0")
    which = {"task": task.id, "epoch": task.epoch, "seq": 1, "step": 0, "held_us": 10}
    event = Failed(**which, cause="exit", message="No.") if fails else Finished(**which, **NOTHING)
    view = ResidentView(
        task=task.id, epoch=task.epoch, state="ended", step=0, held_us=10, order_seq=1,
        memory_bytes=0,
    )  # fmt: skip
    alive = Alive(
        device=str(task.seat), incarnation="p1", sent_us=next(clock_us), facts=FACTS,
        residents=[view], events=[event], logs=[],
    )  # fmt: skip
    task.event_seq = 0
    session.flush()
    journal.record(session, alive)
    journal.settle(session)
    session.commit()


def lot_of(session) -> Lot:
    session.expire_all()
    return session.scalars(select(Lot)).one()


def lot_task(session) -> Task:
    return session.scalars(select(Task).where(Task.lot_id == Task.id)).one()


def state_of(session, id: str) -> tuple[str, str]:
    session.expire_all()
    lot = session.scalars(select(Task).where(Task.request_id == id, Task.lot_id == Task.id)).one()
    return lot.state, session.get_one(Request, id).state


class TestMembers:
    def test_only_as_many_as_at_once_become_rows_and_each_end_makes_the_next(self, session, submit):
        id = submit(array={"count": 7, "at_once": 3})
        look(session)
        assert [task.name for task in members(session)] == ["lot.0", "lot.1", "lot.2"]
        assert {task.island for task in members(session)} == {"isle"}
        seen = set()
        for _ in range(7):
            live = members(session, "blocked", "waiting", "running")
            assert len(live) <= 3
            seen.add(live[0].lot_index)
            end(session, live[0])
        assert seen == set(range(7))
        assert state_of(session, id) == ("blocked", "running")
        look(session)
        assert state_of(session, id) == ("done", "done")
        assert counts_of(lot_of(session)).done == 7

    def test_members_of_a_search_have_the_values_that_their_index_draws(self, session, submit):
        search = {"trials": 5, "seed": 3, "space": {"lr": {"log": [1e-5, 1e-2]}, "n": [1, 2]}}
        submit(search=search, array={"at_once": 2})
        look(session)
        drawn = [*lot_task(session).spec.search.combinations()]
        end(session, members(session)[1])
        assert [task.lot_values for task in members(session)] == drawn[:3]
        assert [task.spec.params for task in members(session)] == drawn[:3]

    def test_one_transaction_makes_a_limited_number_of_members(self, session, submit, monkeypatch):
        monkeypatch.setattr(lots, "MEMBERS_AT_ONCE", 4)
        submit(array={"count": 9, "at_once": 3})
        submit(array={"count": 9, "at_once": 3})
        assert journal.look_at_lots(session)
        assert len(members(session)) == 4
        look(session)
        assert len(members(session)) == 6
        assert not journal.look_at_lots(session)

    def test_member_takes_the_island_of_the_one_that_ended(self, session, submit):
        submit(array={"count": 2, "at_once": 1})
        look(session)
        end(session, members(session)[0])
        assert [task.island for task in members(session)] == ["isle", "isle"]

    def test_member_has_its_values_and_the_needs_of_its_lot(self, session, submit):
        prep = {"name": "prep", "run": {"command": ["true"]}}
        submit(prep, matrix={"lr": [0.1, 0.2]}, start={"after": ["prep"]})
        look(session)
        assert members(session) == []
        first = session.scalars(select(Task).where(Task.name == "prep")).one()
        end(session, first)
        look(session)
        made = members(session)
        assert [task.lot_values for task in made] == [{"lr": 0.1}, {"lr": 0.2}]
        assert [task.descriptor["params"] for task in made] == [{"lr": 0.1}, {"lr": 0.2}]
        needs = select(Need.task_id).where(Need.needs_id == first.id, Need.task_id == made[0].id)
        assert session.scalar(needs) == made[0].id

    def test_task_after_a_lot_waits_for_its_end(self, session, submit):
        after = {"name": "sum", "run": {"command": ["true"]}, "start": {"after": ["lot"]}}
        submit(after, array={"count": 1})
        look(session)
        last = session.scalars(select(Task).where(Task.name == "sum")).one()
        follower = Follower("isle")
        assert last.id not in follower.look(session, now_s=1e9).tasks
        follower.board.memory.written_down()
        end(session, members(session)[0])
        look(session)
        assert last.id in follower.look(session, now_s=1e9).tasks

    def test_board_holds_the_members_but_not_the_lot(self, session, submit):
        submit(array={"count": 9, "at_once": 2})
        look(session)
        board = Follower("isle").look(session, now_s=1e9)
        assert sorted(board.tasks) == sorted(task.id for task in members(session))

    def test_lot_whose_need_fails_makes_no_member(self, session, submit):
        prep = {"name": "prep", "run": {"command": ["true"]}}
        id = submit(prep, array={"count": 9}, start={"after": ["prep"]})
        look(session)
        end(session, session.scalars(select(Task).where(Task.name == "prep")).one(), fails=True)
        look(session)
        assert (state_of(session, id), members(session)) == (("failed", "failed"), [])


class TestBounds:
    def test_at_once_changes_while_it_runs_and_zero_holds(self, session, submit, red):
        id = submit(array={"count": 9, "at_once": 2})
        look(session)
        assert red.patch(f"/v1/requests/{id}", json={"at_once": 0}).status_code == 200
        end(session, members(session)[0])
        look(session)
        assert len(members(session)) == 2
        red.patch(f"/v1/requests/{id}", json={"at_once": 4})
        look(session)
        assert len(members(session, "blocked", "waiting", "running")) == 4

    def test_at_once_of_a_request_without_lots_is_a_conflict(self, red, devices, session):
        session.commit()
        body = {"tasks": [{"name": "a", "run": {"command": ["true"]}}]}
        id = red.post("/v1/requests", json=body).json()["id"]
        problem(red.patch(f"/v1/requests/{id}", json={"at_once": 2}), 409, "conflict-state")

    def test_too_many_failures_hold_the_lot_until_it_is_resumed(self, session, submit, red):
        id = submit(array={"count": 10, "at_once": 2, "max_failures": 0.1})
        look(session)
        for _ in range(2):
            end(session, members(session, "blocked")[0], fails=True)
        assert counts_of(lot_of(session)).has_failed_too_often
        held = select(RequestEvent.message).where(RequestEvent.type == "task.held")
        [told] = session.scalars(held)
        assert told.startswith("2 members failed, more than max_failures allows (1)")
        assert len(members(session, "blocked")) == 1
        shown = red.get(f"/v1/requests/{id}").json()["tasks"][0]
        assert shown["lot"]["is_held"]
        told = red.get(f"/v1/tasks/{shown['id']}/explain").json()
        assert [reason["code"] for reason in told["reasons"]] == ["LOT_FAILURES"]
        red.post(f"/v1/requests/{id}/release")
        look(session)
        assert len(members(session, "blocked")) == 2

    def test_lot_that_is_held_is_told_to_its_webhook_once(self, session, submit, red):
        red_body = {"webhook": "https://hooks.example.org/", "on": ["held"]}
        lot = {"name": "lot", "run": {"command": ["true"]}}
        lot["array"] = {"count": 9, "at_once": 3, "max_failures": 1}
        answer = red.post("/v1/requests", json={"tasks": [lot], "notify": red_body})
        assert answer.status_code == 202, answer.text
        look(session)
        for _ in range(3):
            end(session, members(session, "blocked")[0], fails=True)
        [sent] = session.scalars(select(Delivery)).all()
        assert sent.type == "request.held"
        data = json.loads(sent.body)["data"]
        assert (data["id"], data["state"], data["ended_at"]) == (
            answer.json()["id"], "running", None,
        )  # fmt: skip
        assert data["message"].startswith(
            "lot: 2 members failed, more than max_failures allows (1)"
        )

    def test_paused_lot_makes_no_member_and_pauses_those_that_it_has(self, session, submit, red):
        id = submit(array={"count": 9, "at_once": 2})
        look(session)
        red.post(f"/v1/requests/{id}/hold")
        session.expire_all()
        assert {task.hold for task in members(session)} == {"user"}
        session.execute(update(Lot).values(at_once=5))
        look(session)
        assert len(members(session)) == 2
        red.post(f"/v1/requests/{id}/release")
        look(session)
        assert [task.hold for task in members(session)] == [""] * 5

    def test_cancelled_lot_ends_when_its_members_have(self, session, submit, red):
        id = submit(array={"count": 9, "at_once": 2})
        look(session)
        red.post(f"/v1/requests/{id}/cancel")
        for task in members(session):
            board = task_writer.locked_tasks(session, Task.id == task.id)[task.id]
            task_writer.move_task(session, board, "Cancel")
            task_writer.end_task(session, board, "task.cancelled", "Cancelled.")
        journal.settle(session)
        session.commit()
        look(session)
        assert state_of(session, id) == ("cancelled", "cancelled")
        assert len(members(session)) == 2

    def test_lot_counts_once_for_the_queue(self, session, submit, red, world):
        session.execute(update(Tenant).where(Tenant.name == "red").values(max_queued=2))
        submit(array={"count": 50})
        look(session)
        submit(array={"count": 50})
        body = {"tasks": [{"name": "a", "run": {"command": ["true"]}, "array": {"count": 1}}]}
        problem(red.post("/v1/requests", json=body), 409, "queue-full")


class TestRetry:
    def test_failed_members_start_again_within_at_once(self, session, submit, red):
        id = submit(array={"count": 4, "at_once": 2})
        look(session)
        for n in range(4):
            end(session, members(session, "blocked")[0], fails=n != 1)
        look(session)
        assert state_of(session, id) == ("failed", "failed")
        answer = red.post(f"/v1/requests/{id}/retry", json={"states": ["failed"]})
        assert answer.status_code == 202, answer.text
        look(session)
        again = members(session, "blocked")
        assert [task.lot_index for task in again] == [0, 2]
        assert state_of(session, id) == ("blocked", "running")
        shown = red.get(f"/v1/requests/{id}").json()
        assert shown["task_phases"] == {"done": 1, "queued": 3}
        assert {(task.message, task.ended_at, task.attempts) for task in again} == {(None, None, 0)}
        for _ in range(3):
            end(session, members(session, "blocked")[0])
        look(session)
        assert state_of(session, id) == ("done", "done")
        assert len(members(session)) == 4
        assert counts_of(lot_of(session)).done == 4

    def test_failed_task_and_what_it_broke_start_again_together(self, session, submit, red):
        after = {"name": "sum", "run": {"command": ["true"]}, "start": {"after": ["lot"]}}
        id = submit(after, array={"count": 1})
        look(session)
        end(session, members(session)[0], fails=True)
        look(session)
        last = session.scalars(select(Task).where(Task.name == "sum")).one()
        rows = task_writer.locked_tasks(session, Task.id == last.id)
        task_writer.move_task(session, rows[last.id], "GaveUp")
        task_writer.end_task(session, rows[last.id], "task.failed", "No.")
        journal.settle(session)
        session.commit()
        assert state_of(session, id)[1] == "failed"
        red.post(f"/v1/requests/{id}/retry")
        look(session)
        session.expire_all()
        assert session.get_one(Task, last.id).state == "blocked"
        assert session.get_one(Request, id).ended_at is None
        assert members(session)[0].state == "blocked"

    def test_retry_without_a_failure_is_a_conflict(self, session, submit, red):
        id = submit(array={"count": 4, "at_once": 2})
        look(session)
        problem(red.post(f"/v1/requests/{id}/retry"), 409, "conflict-state")

    def test_late_event_of_the_first_life_changes_nothing(self, session, submit, red):
        id = submit(array={"count": 1})
        look(session)
        task = members(session)[0]
        end(session, task, fails=True)
        look(session)
        red.post(f"/v1/requests/{id}/retry")
        look(session)
        event = Finished(task=task.id, epoch=1, seq=2, step=9, held_us=10, **NOTHING)
        alive = Alive(
            device="h.0", incarnation="p1", sent_us=next(clock_us), facts=FACTS, residents=[],
            events=[event], logs=[],
        )  # fmt: skip
        journal.record(session, alive)
        journal.settle(session)
        assert members(session)[0].state == "blocked"


class TestAnswers:
    def test_request_counts_members_and_lists_its_lot_alone(self, session, submit, red):
        id = submit(array={"count": 100, "at_once": 2})
        look(session)
        end(session, members(session)[0])
        end(session, members(session, "blocked")[0], fails=True)
        shown = red.get(f"/v1/requests/{id}").json()
        assert shown["task_phases"] == {"done": 1, "failed": 1, "queued": 98}
        assert shown["task_states"] == {"done": 1, "failed": 1, "blocked": 98}
        [lot] = shown["tasks"]
        assert lot["lot"]["phases"] == {"done": 1, "failed": 1, "queued": 98}
        assert (lot["lot"]["left"], lot["lot"]["at_once"], lot["lot_id"]) == (96, 2, None)
        listed = red.get("/v1/requests").json()["items"][0]
        assert listed["task_phases"] == shown["task_phases"]
        page = red.get("/v1/tasks", params={"lot": lot["id"], "limit": 3}).json()
        assert [task["lot_index"] for task in page["items"]] == [3, 2, 1]
        assert page["items"][0]["lot_id"] == lot["id"]
        assert page["next_cursor"]

    def test_lot_says_that_at_once_members_live(self, session, submit, red):
        id = submit(array={"count": 100, "at_once": 2})
        look(session)
        [lot] = session.scalars(select(Task).where(Task.request_id == id, Task.lot_index.is_(None)))
        [reason] = explain.explain(session, [lot])[lot.id].reasons
        assert reason["code"] == "LOT_MEMBERS"
        assert reason["message"].startswith("2 of 100 members are queued or running")

    def test_members_are_listed_by_a_metric_page_by_page(self, session, submit, red):
        submit(array={"count": 5})
        look(session)
        said = (0.5, 10**400, -1, "text", None)
        for task, loss in zip(members(session), said, strict=True):
            task.metrics = {} if loss is None else {"loss": loss}
        session.commit()
        asked = {"lot": lot_of(session).id, "limit": 2}
        for sort, order in (("metric:loss", [2, 0, 1]), ("-metric:loss", [1, 0, 2])):
            first = red.get("/v1/tasks", params={**asked, "sort": sort}).json()
            more = {**asked, "sort": sort, "cursor": first["next_cursor"]}
            rest = red.get("/v1/tasks", params=more).json()
            assert [task["lot_index"] for task in first["items"] + rest["items"]] == order
            assert rest["next_cursor"] is None
            assert red.get(f"/ui/requests?sort={sort}").status_code != 500
        problem(red.get("/v1/tasks?sort=metric:loss"), 422, "validation-error", "?sort")
        wrong = red.get("/v1/tasks", params={**asked, "sort": "metric:loss", "cursor": "x"})
        problem(wrong, 422, "validation-error", "?cursor")

    def test_other_tenants_see_no_member(self, session, submit, as_):
        submit(array={"count": 3})
        look(session)
        lot = members(session)[0].lot_id
        assert as_("blue.viewer").get("/v1/tasks", params={"lot": lot}).json()["items"] == []

    def test_page_lists_members_by_their_values_and_offers_to_retry_the_failed(
        self, session, submit, app, world
    ):
        id = submit(matrix={"lr": [0.5, 0.25], "seed": "0-29"}, array={"at_once": 3})
        look(session)
        end(session, members(session)[0], fails=True)
        done = members(session, "blocked")[0]
        done.metrics = {"loss": 0.125}
        end(session, done)
        with transaction() as its:
            _, cookie = auth.sign_in(its, world.keys["red.member"])
        browser = TestClient(app, cookies={auth.COOKIE: cookie})
        page = browser.get(f"/ui/requests/{id}").text
        words = " ".join(re.sub("<[^>]+>", " ", page).split())
        assert "58 queued" in words
        assert "1 done" in words
        assert "1 failed" in words
        assert "Retry failed" in words
        assert "Index lr seed State" in words
        assert "0 0.5 0 failed" in words
        assert "1 0.5 1 done" in words
        assert "3 of 60 members are queued or running" in words
        for of_single_tasks in ("Time breakdown", "Without a device", "Look inside"):
            assert of_single_tasks not in words
        sent = {"do": "retry", "token": forms.token(cookie)}
        same = {"Sec-Fetch-Site": "same-origin"}
        assert browser.post(f"/ui/requests/{id}", data=sent, headers=same).status_code == 200
        assert (lot_of(session).again, lot_of(session).failed) == (1, 0)
        failed = browser.get(f"/ui/requests/{id}?members=failed").text
        assert "0.5 1 done" not in " ".join(re.sub("<[^>]+>", " ", failed).split())
        by_loss = browser.get(f"/ui/requests/{id}?sort=loss").text
        assert "1 0.5 1 done 0 0.125" in " ".join(re.sub("<[^>]+>", " ", by_loss).split())
        assert browser.get(f"/ui/requests/{id}?after=2").status_code == 200

    def test_request_with_a_lot_is_deleted_with_all_its_members(self, session, submit, red):
        id = submit(array={"count": 4, "at_once": 4})
        look(session)
        for task in members(session):
            end(session, task)
        look(session)
        session.execute(update(Request).values(ended_at=func.now() - timedelta(days=1)))
        session.execute(update(Placement).values(ended_at=func.now()))
        session.commit()
        assert red.delete(f"/v1/requests/{id}").status_code == 202
        session.commit()
        with mock.patch.object(retention, "TASKS_AT_ONCE", 3):
            while retention.delete_some(session):
                session.commit()
        assert session.scalars(select(Request)).all() == []
        assert session.scalars(select(Lot)).all() == []

    def test_logs_of_a_member_are_found_by_its_name(self, session, submit, red):
        id = submit(array={"count": 3})
        look(session)
        assert red.get(f"/v1/requests/{id}/logs", params={"task": "lot.2"}).status_code == 200
        problem(red.get(f"/v1/requests/{id}/logs?task=lot.3"), 404, "not-found")
        assert red.get(f"/v1/requests/{id}/logs").status_code == 200
        [place] = red.get(f"/v1/requests/{id}/plan").json()["tasks"]
        assert "each of its members" in place["because"]

    def test_lost_island_gives_its_members_to_another_but_not_the_lot(self, session, submit):
        submit(array={"count": 9, "at_once": 2})
        look(session)
        session.add(Island(name="other", leader="a", leader_until=func.now() + timedelta(hours=1)))
        session.flush()
        session.add(Host(name="o", island="other"))
        session.flush()
        lease = func.now() + timedelta(hours=1)
        device = {"host": "o", "island": "other", "kind": "cpu", "memory_bytes": 2**30}
        session.add(Device(id="o.0", lease_until=lease, facts=FACTS, incarnation="p1", **device))
        past = func.now() - timedelta(hours=1)
        session.execute(update(Island).where(Island.name == "isle").values(leader_until=past))
        session.execute(update(Device).where(Device.island == "isle").values(lease_until=past))
        session.commit()
        island_assignment.take_over(session, "isle")
        session.commit()
        assert {task.island for task in members(session)} == {"other"}
        assert session.get_one(Task, lot_of(session).id).island is None


STOP = {"metric": "loss", "rungs": [10, 30], "keep": 0.5}


def reach(session, task: Task, *rows: tuple[int, Any], rests: bool = False) -> None:
    """Let the task run on a device and report losses by step, and control decide.

    With `rests`, the device then pauses it.
    """
    if task.seat is None:
        run(session, task, "h.0")
    record(session, task, points=[[step, {"loss": loss}] for step, loss in rows])
    look(session)
    if rests:
        session.refresh(task)
        assert task.hold == "rung", task.hold
        pause(session, task)
        look(session)


def pause(session, task: Task) -> None:
    record(session, task, messages.Paused(**stay(task)))


def stay(task: Task) -> JSON:
    return {"task": task.id, "epoch": task.epoch, "seq": 1, "step": 0, "held_us": 10}


def record(session, task: Task, *events: Any, points: list[Any] | None = None) -> None:
    view = ResidentView(
        task=task.id, epoch=task.epoch, state="paused" if events else "running", step=0,
        held_us=10, order_seq=1, memory_bytes=0, points=points or [],
    )  # fmt: skip
    alive = Alive(
        device=str(task.seat), incarnation="p1", sent_us=next(clock_us), facts=FACTS,
        residents=[view], events=[*events], logs=[],
    )  # fmt: skip
    task.event_seq = 0
    session.flush()
    journal.record(session, alive)
    journal.settle(session)
    session.commit()


def holds(session) -> dict[int, str]:
    return {task.lot_index: task.hold for task in members(session)}


def cancel_asked(session) -> None:
    """End the resting members whose end was asked for, as their island does."""
    for task in members(session, "blocked", "waiting"):
        if task.cancel_asked_at is not None:
            board = task_writer.locked_tasks(session, Task.id == task.id)[task.id]
            task_writer.move_task(session, board, "Cancel")
            task_writer.end_task(session, board, "task.cancelled", "Cancelled.")
    journal.settle(session)
    session.commit()
    look(session)


def first_done(session, submit, array):
    """Submit a lot whose first member reaches the first rung with 0.1, and ends; return its id."""
    id = submit(array=array, stop=STOP)
    look(session)
    first = members(session)[0]
    reach(session, first, (10, 0.1))
    end(session, first)
    look(session)
    return id


class TestRungs:
    def test_loser_rests_and_another_member_takes_its_place(self, session, submit):
        submit(array={"count": 4, "at_once": 1}, stop=STOP)
        look(session)
        reach(session, members(session)[0], (9, 0.3), (10, 0.5))
        assert holds(session) == {0: ""}
        end(session, members(session)[0])
        look(session)
        reach(session, members(session)[1], (10, 0.7), rests=True)
        assert holds(session) == {0: "", 1: "rung", 2: ""}
        counts = counts_of(lot_of(session))
        assert (counts.live, counts.resting, counts.room) == (2, 1, 0)

    def test_loser_goes_on_when_it_is_among_the_best_and_there_is_room(self, session, submit):
        submit(array={"count": 5, "at_once": 1}, stop=STOP)
        look(session)
        reach(session, members(session)[0], (10, 0.1))
        end(session, members(session)[0])
        look(session)
        reach(session, members(session)[1], (10, 0.4), rests=True)
        reach(session, members(session)[2], (10, 0.9), rests=True)
        assert holds(session) == {0: "", 1: "rung", 2: "rung", 3: ""}
        reach(session, members(session)[3], (10, 0.8))  # the fourth: now two pass
        assert holds(session) == {0: "", 1: "promoted", 2: "rung", 3: "rung"}
        pause(session, members(session)[3])
        look(session)  # its place is free, for the promoted before a new one
        assert holds(session) == {0: "", 1: "", 2: "rung", 3: "rung"}
        assert len(members(session)) == 4
        told = session.scalars(select(RequestEvent.message).order_by(RequestEvent.id)).all()
        assert "Pauses at step 10, with loss 0.4: place 2 of 2, of which the best 1 go on." in told
        assert "Goes on at step 10, with loss 0.4: place 2 of 4, of which the best 2 go on." in told

    def test_lot_is_done_when_only_losers_are_left_and_these_are_cancelled(self, session, submit):
        id = first_done(session, submit, {"count": 3, "at_once": 1})
        for n in (1, 2):
            reach(session, members(session)[n], (10, 0.1 + n), rests=True)
        assert [task.cancel_asked_at is None for task in members(session)] == [True, False, False]
        cancel_asked(session)
        assert state_of(session, id) == ("done", "done")
        counts = counts_of(lot_of(session))
        assert (counts.done, counts.cancelled, counts.stopped) == (1, 2, 2)
        told = session.scalars(select(RequestEvent.message)).all()
        assert "1 member done, 0 failed, 2 stopped early." in told

    def test_loser_that_a_person_resumes_goes_on_when_there_is_room(self, session, submit, red):
        submit(array={"count": 3, "at_once": 1}, stop=STOP)
        look(session)
        reach(session, members(session)[0], (10, 0.1))
        end(session, members(session)[0])
        look(session)
        reach(session, members(session)[1], (10, 0.5), rests=True)
        loser = members(session)[1]
        reason = explain.explain(session, [loser])[loser.id].reasons[0]
        assert reason["code"] == "LOST_AT_RUNG"
        assert reason["message"].startswith("Paused at step 10, with loss 0.5: place 2 of 2")
        red.post(f"/v1/tasks/{loser.id}/resume")
        look(session)
        assert holds(session) == {0: "", 1: "promoted", 2: ""}
        loser = members(session)[1]
        reason = explain.explain(session, [loser])[loser.id].reasons[0]
        assert reason["code"] == "LOT_ROOM"
        end(session, members(session)[2])
        assert holds(session) == {0: "", 1: "", 2: ""}
        reach(session, members(session)[1], (12, 0.5), (30, 0.4))
        assert holds(session)[1] == ""  # the first at the second rung: it counts there

    def test_higher_share_lets_losers_go_on(self, session, submit, red):
        id = first_done(session, submit, {"count": 4, "at_once": 2})
        for n, loss in ((1, 0.5), (2, 0.9)):
            reach(session, members(session)[n], (10, loss), rests=True)
        assert holds(session) == {0: "", 1: "rung", 2: "rung", 3: ""}
        problem(red.patch(f"/v1/requests/{id}", json={"keep_best": 1}), 422, "validation-error")
        assert red.patch(f"/v1/requests/{id}", json={"keep_best": 0.7}).status_code == 200
        look(session)
        assert holds(session) == {0: "", 1: "", 2: "rung", 3: ""}

    def test_share_of_a_lot_without_rungs_cannot_change(self, submit, red):
        id = submit(array={"count": 4})
        problem(red.patch(f"/v1/requests/{id}", json={"keep_best": 0.5}), 409, "conflict-state")

    def test_pause_and_resume_of_the_request_wake_no_loser(self, session, submit, red):
        id = first_done(session, submit, {"count": 3, "at_once": 1})
        reach(session, members(session)[1], (10, 0.5), rests=True)
        red.post(f"/v1/requests/{id}/hold")
        assert holds(session) == {0: "", 1: "rung", 2: "user"}
        red.post(f"/v1/requests/{id}/release")
        assert holds(session) == {0: "", 1: "rung", 2: ""}

    def test_cancelled_sweep_ends_with_its_losers(self, session, submit, red):
        id = first_done(session, submit, {"count": 9, "at_once": 1})
        reach(session, members(session)[1], (10, 0.5), rests=True)
        red.post(f"/v1/requests/{id}/cancel")
        cancel_asked(session)
        assert state_of(session, id) == ("cancelled", "cancelled")

    def test_no_number_loses_and_a_member_without_the_metric_never_pauses(self, session, submit):
        id = first_done(session, submit, {"count": 3, "at_once": 1})
        reach(session, members(session)[1], (10, "nan"), rests=True)
        silent = members(session)[2]
        run(session, silent, "h.0")
        record(session, silent, points=[[99, {"other": 1.0}]])
        look(session)
        assert holds(session)[2] == ""
        end(session, members(session)[2])
        look(session)
        cancel_asked(session)
        assert state_of(session, id) == ("done", "done")
        told = session.scalars(select(RequestEvent.message)).all()
        assert any("with loss no finite number" in each for each in told)
        said = "2 members done, 0 failed, 1 stopped early. 1 member ended without loss at step 10"
        assert any(each.startswith(said) for each in told)

    def test_member_that_fails_at_a_rung_counts_there_and_is_no_loser(self, session, submit):
        id = submit(array={"count": 2, "at_once": 1}, stop=STOP)
        look(session)
        first = members(session)[0]
        run(session, first, "h.0")
        record(session, first, points=[[10, {"loss": 0.5}]])
        end(session, members(session)[0], fails=True)
        look(session)
        reach(session, members(session)[1], (10, 0.1))
        assert holds(session) == {0: "", 1: ""}
        end(session, members(session)[1])
        look(session)
        assert state_of(session, id) == ("failed", "failed")

    def test_member_whose_row_is_locked_is_decided_about_later(self, session, submit):
        submit(array={"count": 3, "at_once": 2}, stop=STOP)
        look(session)
        reach(session, members(session)[0], (10, 0.1))
        loser = members(session)[1]
        run(session, loser, "h.1")
        record(session, loser, points=[[10, {"loss": 0.5}]])
        with mock.patch.object(rungs.task_writer, "locked_tasks", return_value={}):
            assert not rungs.decide(session)
            session.commit()
        assert holds(session)[1] == ""
        look(session)
        assert holds(session)[1] == "rung"

    def test_decisions_do_not_depend_on_when_control_looks(self, session, submit):
        """Control that was away for a while, or killed, decides what it would have decided."""
        losses = [0.5, 0.1, 0.7, 0.3, 0.9, 0.2]
        passed = []
        for late in (False, True):
            id = submit(array={"count": 6, "at_once": 6}, stop=STOP)
            look(session)
            mine = [task for task in members(session) if task.request_id == id]
            for task, loss in zip(mine, losses, strict=True):
                run(session, task, "h.0")
                record(session, task, points=[[10, {"loss": loss}]])
                if not late:
                    look(session)
                pause(session, task)
            look(session)
            session.expire_all()
            passed.append({task.lot_index for task in mine if task.hold != "rung"})
        assert passed[0] == passed[1] == {0, 1, 3, 5}

    def test_stopped_members_start_again_if_a_user_wants(self, session, submit, red):
        id = first_done(session, submit, {"count": 2, "at_once": 1})
        reach(session, members(session)[1], (10, 0.5), rests=True)
        cancel_asked(session)
        assert state_of(session, id) == ("done", "done")
        red.post(f"/v1/requests/{id}/retry", json={"states": ["cancelled"]})
        look(session)
        assert holds(session) == {0: "", 1: ""}
        reach(session, members(session)[1], (10, 0.5), (11, 0.5))
        assert holds(session) == {0: "", 1: ""}
        end(session, members(session)[1])
        look(session)
        assert state_of(session, id) == ("done", "done")

    def test_answer_and_page_count_the_members_at_each_rung(self, session, submit, red, app, world):
        id = submit(array={"count": 9, "at_once": 1}, stop=STOP)
        look(session)
        reach(session, members(session)[0], (10, 0.125))
        end(session, members(session)[0])
        look(session)
        reach(session, members(session)[1], (10, 0.5), rests=True)
        lot = red.get(f"/v1/requests/{id}").json()["tasks"][0]["lot"]
        assert lot["phases"] == {"done": 1, "paused": 1, "queued": 7}
        assert lot["rungs"] == [
            {"step": 10, "reached": 2, "passed": 1, "best": 0.125},
            {"step": 30, "reached": 0, "passed": 0, "best": None},
        ]
        with transaction() as its:
            _, cookie = auth.sign_in(its, world.keys["red.member"])
        page = TestClient(app, cookies={auth.COOKIE: cookie}).get(f"/ui/requests/{id}").text
        words = " ".join(re.sub("<[^>]+>", " ", page).split())
        assert "Rung Reached Went on Best loss step 10 2 1 0.125 step 30 0 0" in words
        assert "Paused at step 10, with loss 0.5: place 2 of 2" in words
