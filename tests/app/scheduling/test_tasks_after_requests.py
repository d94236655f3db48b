"""Tasks that come after other requests: from the submission to the decision, on real rows."""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from sqlalchemy import func, select, update

from app.core.model.request_needs import AWAITED, OTHERWISE, NeededState, NeedOutcome, decide
from app.core.scheduling.cycle import cycle
from app.db.models import Device, Island, Need, Request, RequestEvent, RequestNeed, Task
from app.insight import explain
from app.intake import island_assignment
from app.scheduling import journal, retention
from app.scheduling.board_follower import Follower
from tests.app.conftest import problem

JSON = dict[str, Any]
FACTS = {"host": "h", "sandbox": "off", "island": "isle", "kind": "cpu"}
NOW_S = 1e9


@pytest.fixture(autouse=True)
def devices(world, session) -> None:
    """The island has a scheduler; its devices are drained, so that tasks stay in the queue."""
    session.execute(update(Device).values(incarnation="p1", facts=FACTS, cordoned=True))
    later = func.now() + timedelta(hours=1)
    session.execute(update(Island).values(leader="a test", leader_until=later))
    session.commit()


def command(name: str, **more: Any) -> JSON:
    return {"name": name, "run": {"command": ["true"]}, **more}


def after(*needed: JSON, name: str = "next", **more: Any) -> JSON:
    return command(name, start={"after_requests": [*needed]}, **more)


@pytest.fixture
def submit(red, session):
    """Submit a request of these tasks; return its answer."""

    def posted(*tasks: JSON, name: str = "prep") -> JSON:
        answer = red.post("/v1/requests", json={"name": name, "tasks": [*tasks]})
        assert answer.status_code == 202, answer.text
        session.commit()
        answered: JSON = answer.json()
        shown = red.get(f"/v1/requests/{answered['id']}").json()
        assert answered["tasks"] == shown["tasks"]
        return answered

    return posted


def become(session, request: str, state: str, *, started: bool) -> None:
    """Let the only task of the request, and so the request, be in this state."""
    tasks = update(Task).where(Task.request_id == request)
    first = func.now() if started else None
    session.execute(tasks.values(state=state, first_started_at=first))
    ended_at = func.now() if state in ("done", "failed", "cancelled") else None
    word = "queued" if state == "blocked" else state
    of_it = update(Request).where(Request.id == request)
    session.execute(of_it.values(state=word, ended_at=ended_at))
    session.commit()


def look(session) -> None:
    """Do what control does at a look, and then a round of the island."""
    while journal.decide_needs(session):
        pass
    journal.settle(session)
    while journal.look_at_lots(session):
        pass
    journal.settle(session)
    island_assignment.assign_new(session)
    session.commit()
    follower = Follower("isle")
    board = follower.look(session, now_s=NOW_S)
    plan = cycle(board)
    journal.store(session, plan)
    journal.settle(session)
    session.commit()
    session.expire_all()


def task_of(session, request: str, name: str = "next") -> Task:
    session.expire_all()
    mine = Task.request_id == request, Task.name == name
    return session.scalars(select(Task).where(*mine)).one()


def told(session, request: str, type_: str = "task.after_request") -> list[str]:
    query = select(RequestEvent.message).where(RequestEvent.request_id == request)
    return [*session.scalars(query.where(RequestEvent.type == type_).order_by(RequestEvent.id))]


def codes(session, task: Task) -> dict[str, str]:
    why = explain.explain(session, [task])[task.id]
    return {reason["code"]: reason["message"] for reason in why.reasons}


#: How a needed request may be when the other one is submitted, and how it may end.
BEFORE = [("blocked", False), ("running", True)]
ENDS = [
    ("done", True),
    ("failed", True),
    ("failed", False),
    ("cancelled", True),
    ("cancelled", False),
]
BECOMES = {
    NeedOutcome.met: ("", False),
    NeedOutcome.run: ("", False),
    NeedOutcome.hold: ("held", False),
    NeedOutcome.fail: ("never", True),
}


class TestTable:
    @pytest.mark.parametrize(
        ("before", "end"),
        [
            (before, end)
            for before in (*BEFORE, None)
            for end in ENDS
            if before is None or end[1] or not before[1]  # what has started has started
        ],
    )
    def test_every_condition_is_decided_as_the_end_says(self, session, submit, before, end):
        """One request has a task for each condition and `else`."""
        needed = submit(command("a"))["id"]
        become(session, needed, *(before or end)[:1], started=(before or end)[1])
        cases = [*product(AWAITED, OTHERWISE)]
        rules = [{"request": "prep", "on": on, "else": otherwise} for on, otherwise in cases]
        tasks = [after(rule, name=f"t{n}") for n, rule in enumerate(rules)]
        waits = submit(*tasks, name="all")["id"]
        look(session)
        if before is not None:
            become(session, needed, end[0], started=end[1])
            look(session)
        for n, (on, otherwise) in enumerate(cases):
            task = task_of(session, waits, f"t{n}")
            outcome = decide(on, otherwise, NeededState(*end))
            standing, fails = BECOMES[outcome]
            need = session.scalars(select(RequestNeed).where(RequestNeed.task_id == task.id)).one()
            assert (need.outcome, task.standing) == (outcome, standing), (on, otherwise)
            assert (task.state == "failed") == fails
            if fails:
                assert needed in str(task.message)
                assert task.cause == "needs"
            assert (task.state == "blocked") == (standing == "held")

    @pytest.mark.parametrize("before", BEFORE)
    def test_while_it_may_still_happen_the_task_waits(self, session, submit, before):
        needed = submit(command("a"))["id"]
        become(session, needed, before[0], started=before[1])
        tasks = [after({"request": needed, "on": on}, name=on) for on in AWAITED]
        waits = submit(*tasks, name="all")["id"]
        look(session)
        states = {on: task_of(session, waits, on).state for on in AWAITED}
        free = "blocked" if not before[1] else states["started"]
        assert states == {**dict.fromkeys(AWAITED, "blocked"), "started": free}
        assert (states["started"] != "blocked") == before[1]


class TestSubmit:
    def test_name_means_the_newest_request_of_the_tenant_and_the_answer_says_which(
        self, session, submit, as_
    ):
        submit(command("a"))
        newest = submit(command("a"))["id"]
        blue = as_("blue.member")
        body = {"name": "prep", "tasks": [command("a")]}
        assert blue.post("/v1/requests", json=body).status_code == 202
        shown = submit(after({"request": "prep"}), name="b")["tasks"][0]["after_requests"]
        expected = {"request_id": newest, "request": "prep", "task": "", "on": "done"}
        assert shown == [{**expected, "else": "fail", "outcome": "waits"}]

    def test_unknown_deleted_and_foreign_requests_are_refused(self, session, submit, red, as_):
        mine, other = submit(command("a"))["id"], submit(command("a"), name="gone")["id"]
        become(session, other, "done", started=True)
        assert red.delete(f"/v1/requests/{other}").status_code == 202
        pointer = "/tasks/0/start/after_requests/0/request"
        for name, hint in (("pre", "did you mean 'prep'"), ("gone", "deleted"), (other, "")):
            body = {"tasks": [after({"request": name})]}
            answered = problem(
                red.post("/v1/requests", json=body), 422, "validation-error", pointer
            )
            assert hint in str(answered)
        blue = as_("blue.member")
        body = {"tasks": [after({"request": mine})]}
        problem(blue.post("/v1/requests", json=body), 422, "validation-error", pointer)

    def test_request_may_be_named_once_only_by_name_or_id(self, session, submit, red):
        id = submit(command("a"))["id"]
        body = {"tasks": [after({"request": "prep"}, {"request": id, "on": "started"})]}
        answer = red.post("/v1/requests", json=body)
        problem(answer, 422, "validation-error", "/tasks/0/start/after_requests/1/request")

    def test_validate_shows_the_id(self, session, submit, red):
        id = submit(command("a"))["id"]
        body = {"tasks": [after({"request": "prep"})]}
        shown = red.post("/v1/requests:validate", json=body).json()["tasks"][0]
        assert shown["after_requests"][0]["request_id"] == id
        assert shown["descriptor"]["start"]["after_requests"][0]["request"] == id


class TestInputs:
    @pytest.fixture
    def maker(self, submit) -> str:
        return submit(command("train", outputs=["model"]), command("rest"))["id"]

    def take(self, source: str, **more: Any) -> JSON:
        return command("next", inputs={"m": source}, **more)

    def test_input_of_another_request_waits_for_its_task_only(self, session, submit, maker):
        answer = submit(self.take("prep/train.model"), name="b")
        [task] = answer["tasks"]
        assert task["inputs"] == {"m": f"{maker}/train.model"}
        assert task["needs"][0]["request_id"] == maker
        look(session)
        assert task_of(session, answer["id"]).state == "blocked"
        assert codes(session, task_of(session, answer["id"])).keys() == {"AFTER_REQUEST"}
        made = update(Task).where(Task.request_id == maker, Task.name == "train")
        session.execute(made.values(state="done", first_started_at=func.now()))
        session.commit()
        look(session)
        assert task_of(session, answer["id"]).state != "blocked"
        assert session.scalars(select(Need)).one().port == "m"

    def test_output_of_a_lots_member_is_awaited_of_this_member_alone(self, session, submit, red):
        lot = command("train", outputs=["model"], array={"count": 5, "at_once": 2})
        many = submit(lot, name="sweep")["id"]
        look(session)
        answer = submit(self.take("sweep/train.1.model"), name="b")
        assert answer["tasks"][0]["inputs"] == {"m": f"{many}/train.1.model"}
        assert answer["tasks"][0]["after_requests"][0]["task"] == "train.1"
        member = task_of(session, many, "train.1")
        for state, is_free in (("running", False), ("done", True)):
            session.execute(update(Task).where(Task.id == member.id).values(state=state))
            session.commit()
            look(session)
            assert (task_of(session, answer["id"]).state != "blocked") == is_free
        need = session.scalars(select(Need).where(Need.task_id == answer["tasks"][0]["id"])).one()
        assert (need.needs_id, need.output) == (member.id, "model")
        for source, why in (("train.4.model", "may start"), ("train.model", "such as train.0")):
            body = {"tasks": [self.take(f"sweep/{source}")]}
            refused = red.post("/v1/requests", json=body)
            assert why in str(problem(refused, 422, "validation-error", "/tasks/0/inputs/m"))

    def test_input_of_the_best_member_waits_for_the_lot_and_then_takes_from_it(
        self, session, submit, red
    ):
        lot, values = self.sweep(session, submit, goal="max"), [0.5, None, 0.75, 0.75, "nan"]
        answer = submit(self.take("sweep/train@best.model"), name="b")
        waits = answer["id"]
        [task] = answer["tasks"]
        assert task["inputs"] == {"m": f"{lot.request_id}/train@best.model"}
        assert [each["task"] for each in task["after_requests"]] == ["train@best"]
        look(session)
        assert "sweep/train@best" in codes(session, task_of(session, waits))["AFTER_REQUEST"]
        self.end(session, lot, values, failed=9)
        look(session)
        assert task_of(session, waits).state != "blocked"
        need = session.scalars(select(Need).where(Need.task_id == task["id"])).one()
        best = task_of(session, lot.request_id, "train.2")
        assert (need.needs_id, need.output) == (best.id, "model")
        assert "is train.2, with acc 0.75." in told(session, waits)[0]
        # the lot is done: a later request takes the same at once, and a lot's members do
        more = {"array": {"count": 2, "at_once": 2}, "checkpoint": {"best": {"metric": "acc"}}}
        later = submit(self.take("sweep/train@best.model", **more), name="later")["id"]
        look(session)
        look(session)
        for name in ("next.0", "next.1"):
            member = task_of(session, later, name)
            need = session.scalars(select(Need).where(Need.task_id == member.id)).one()
            assert need.needs_id == best.id

    @pytest.mark.parametrize(("otherwise", "state"), [("fail", "failed"), ("hold", "blocked")])
    def test_lot_without_a_best_member_leaves_it_to_else(
        self, session, submit, red, otherwise, state
    ):
        lot = self.sweep(session, submit)
        start = {"after_requests": [{"request": "sweep", "on": "ended", "else": otherwise}]}
        take = self.take("sweep/train@best.model", start=start)
        waits = submit(take, name="b")["id"]
        self.end(session, lot, [None, "nan"])
        look(session)
        look(session)
        assert task_of(session, waits).state == state
        why = "none of its members has a number as its metric"
        assert [why in each for each in told(session, waits)] == [False, True]
        if state == "failed":
            assert why in str(task_of(session, waits).message)
            return
        assert why in codes(session, task_of(session, waits))["REQUEST_MISSED"]
        member = task_of(session, lot.request_id, "train.1")
        member.metrics = {"acc": 0.5}
        again = func.now() + timedelta(seconds=1)
        session.get_one(Task, lot.id).ended_at = again  # it was retried, and has ended
        session.commit()
        look(session)
        assert task_of(session, waits).state != "blocked"
        assert session.scalars(select(Need).where(Need.port == "m")).one().needs_id == member.id

    def test_resumed_task_without_the_output_of_a_best_member_fails(self, session, submit, red):
        lot = self.sweep(session, submit)
        start = {"after_requests": [{"request": "sweep", "else": "hold"}]}
        waits = submit(self.take("sweep/train@best.model", start=start), name="b")["id"]
        self.end(session, lot, [None])
        look(session)
        assert red.post(f"/v1/requests/{waits}/release").status_code == 202
        session.commit()
        look(session)
        assert task_of(session, waits).state == "failed"

    def sweep(self, session, submit, goal: str = "min") -> Task:
        """Submit a lot with an objective, and make its members; return its task."""
        best = {"metric": "acc", "goal": goal}
        array = {"count": 5, "at_once": 5}
        lot = command("train", outputs=["model"], array=array, checkpoint={"best": best})
        many = submit(lot, name="sweep")["id"]
        look(session)
        return task_of(session, many, "train")

    def end(self, session, lot: Task, values: list[Any], *, failed: int | None = None) -> None:
        """Let the lot be done, with these last values of its members; one more member failed."""
        members = select(Task).where(Task.lot_id == lot.id, Task.lot_index.is_not(None))
        for member in session.scalars(members):
            at = member.lot_index
            value = values[at] if at < len(values) else None
            member.metrics = {} if value is None else {"acc": value}
            member.state, member.ended_at = "done", func.now()
        if failed is not None:
            first = session.scalars(members.where(Task.lot_index == 0)).one()
            first.state, first.metrics = "failed", {"acc": failed}
        become(session, lot.request_id, "done", started=True)
        lot = session.get_one(Task, lot.id)
        lot.ended_at = func.now()
        if failed is not None:
            session.execute(update(Task).where(Task.id == first.id).values(state="failed"))
        session.commit()

    def test_input_that_will_never_come_obeys_else_of_its_request(self, session, submit, maker):
        rule = {"request": maker, "on": "started", "else": "hold"}
        start = {"after_requests": [rule]}
        held = submit(self.take("prep/train.model", start=start), name="b")["id"]
        ends = submit(self.take("prep/train.model"), name="c")["id"]
        look(session)
        become(session, maker, "failed", started=True)
        look(session)
        assert task_of(session, held).state == "blocked"
        assert "REQUEST_MISSED" in codes(session, task_of(session, held))
        assert task_of(session, ends).state == "failed"

    def test_bad_inputs_are_refused(self, session, submit, maker, red):
        submit(command("lot", outputs=["model"], array={"count": 3}), name="many")
        best = {"checkpoint": {"best": {"metric": "loss"}}}
        submit(command("lot", outputs=["model"], array={"count": 3}, **best), name="ranked")
        rule = {"after_requests": [{"request": "prep", "else": "run"}]}
        cases = [
            (self.take("prep/trai.model"), "no task"),
            (self.take("prep/train.modl"), "no 'modl'"),
            (self.take("many/lot.model"), "or the best, lot@best"),
            (self.take("many/lot@best.model"), "neither `stop` nor `checkpoint.best`"),
            (self.take("many/none@best.model"), "no task 'none'"),
            (self.take("prep/train@best.model"), "is not a lot"),
            (self.take("ranked/lot@best.modl"), "no 'modl'"),
            (self.take("next@best.model"), '"REQUEST/next@best.model"'),
            (self.take("prep/train.model", start=rule), "cannot run without"),
            (self.take("none/train.model"), "no request"),
        ]
        for task, why in cases:
            answer = red.post("/v1/requests", json={"tasks": [task]})
            assert why in str(problem(answer, 422, "validation-error", "/tasks/0/inputs/m"))


class TestAfterwards:
    def test_retry_of_the_needed_request_arms_the_held_one_again(self, session, submit, red):
        needed = submit(command("a"))["id"]
        waits = submit(after({"request": "prep", "else": "hold"}), name="b")["id"]
        look(session)
        become(session, needed, "failed", started=True)
        look(session)
        assert task_of(session, waits).standing == "held"
        assert red.post(f"/v1/requests/{needed}/retry", json={}).status_code == 202
        session.commit()
        look(session)
        assert session.get_one(Request, needed).state not in ("failed", "done")
        look(session)
        assert task_of(session, waits).standing == "waits"
        become(session, needed, "done", started=True)
        look(session)
        assert task_of(session, waits).state != "blocked"
        assert len(told(session, waits)) == 3
        assert all(needed in message for message in told(session, waits))

    def test_resume_lets_the_held_task_go_whatever_the_other_does(self, session, submit, red):
        needed = submit(command("a"))["id"]
        waits = submit(after({"request": "prep", "else": "hold"}), name="b")["id"]
        become(session, needed, "cancelled", started=False)
        look(session)
        assert "REQUEST_MISSED" in codes(session, task_of(session, waits))
        assert red.post(f"/v1/requests/{waits}/release").status_code == 202
        session.commit()
        look(session)
        assert task_of(session, waits).state != "blocked"
        shown = red.get(f"/v1/requests/{waits}").json()["tasks"][0]["after_requests"]
        assert shown[0]["outcome"] == "waived"

    def test_retry_of_what_failed_for_another_looks_again(self, session, submit, red):
        needed = submit(command("a"))["id"]
        waits = submit(after({"request": "prep"}), name="b")["id"]
        become(session, needed, "failed", started=True)
        look(session)
        assert task_of(session, waits).state == "failed"
        become(session, needed, "done", started=True)
        assert red.post(f"/v1/requests/{waits}/retry", json={}).status_code == 202
        session.commit()
        look(session)
        look(session)
        assert task_of(session, waits).state not in ("failed", "blocked")

    def test_needed_request_is_kept_until_the_other_has_ended(self, session, submit, red):
        needed = submit(command("a"))["id"]
        waits = submit(after({"request": "prep", "else": "hold"}), name="b")["id"]
        become(session, needed, "failed", started=True)
        look(session)
        long_ago = update(Request).where(Request.id == needed)
        session.execute(long_ago.values(ended_at=func.now() - timedelta(days=1000)))
        session.commit()
        assert waits in str(problem(red.delete(f"/v1/requests/{needed}"), 409, "conflict-state"))
        session.execute(long_ago.values(delete_asked_at=func.now()))  # before the other was there
        session.commit()
        assert not retention.delete_some(session)
        become(session, waits, "cancelled", started=False)
        while retention.delete_some(session):
            session.commit()
        session.expire_all()
        assert session.get(Request, needed) is None

    def test_what_starts_again_after_the_needed_request_was_deleted_never_waits(
        self, session, submit, red
    ):
        needed = submit(command("a", outputs=["x"]))["id"]
        waits = submit(after({"request": "prep"}), name="b")["id"]
        takes = submit(command("next", inputs={"m": "prep/a.x"}), name="c")["id"]
        for id in (waits, takes, needed):
            become(session, id, "cancelled", started=False)
        assert red.delete(f"/v1/requests/{needed}").status_code == 202
        long_ago = update(Request).where(Request.id == needed)
        session.execute(long_ago.values(ended_at=func.now() - timedelta(days=1)))
        session.commit()
        while retention.delete_some(session):
            session.commit()
        again = {"states": ["cancelled"]}
        assert red.post(f"/v1/requests/{waits}/retry", json=again).status_code == 202
        session.commit()
        look(session)
        look(session)
        assert task_of(session, waits).state == "failed"
        refused = red.post(f"/v1/requests/{takes}/retry", json=again)
        assert "deleted since" in str(problem(refused, 409, "conflict-state"))

    def test_nothing_is_lost_if_nobody_looks_between_end_and_release(self, session, submit):
        """A killed control looks again later; a round that failed is undone as a whole."""
        needed = submit(command("a"))["id"]
        waits = submit(after({"request": "prep"}), name="b")["id"]
        look(session)
        become(session, needed, "done", started=True)
        journal.decide_needs(session)
        session.rollback()
        assert task_of(session, waits).standing == "waits"
        look(session)
        assert task_of(session, waits).state != "blocked"

    def test_lot_waits_and_fails_as_a_task_does(self, session, submit):
        needed = submit(command("a"))["id"]
        lot = {"array": {"count": 5, "at_once": 2}}
        good = submit(after({"request": "prep"}, **lot), name="b")["id"]
        bad = submit(after({"request": "prep", "on": "failed"}, **lot), name="c")["id"]
        look(session)
        assert "AFTER_REQUEST" in codes(session, task_of(session, good))
        members = select(func.count()).where(Task.lot_index.is_not(None))
        assert session.scalar(members) == 0
        become(session, needed, "done", started=True)
        look(session)
        assert session.scalar(members) == 2
        failed = task_of(session, bad)
        assert (failed.state, needed in str(failed.message)) == ("failed", True)

    def test_reason_names_the_request_and_its_forecast(self, session, submit):
        needed = submit(command("a"))["id"]
        waits = submit(after({"request": "prep", "on": "ended"}), name="b")["id"]
        look(session)
        said = codes(session, task_of(session, waits))["AFTER_REQUEST"]
        assert f"prep ({needed})" in said
        assert "forecast" in said
