"""/v1/requests against real Postgres: what is accepted, shown, listed, changed.

Who may is in test_roles.py, what is refused in test_bad_input.py.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, func, select, text, update
from sqlalchemy.orm import ORMExecuteState, Session

from app.api.routes import requests
from app.db.models import (
    Bundle,
    Device,
    Idempotency,
    Need,
    Preset,
    Request,
    RequestEvent,
    Task,
    Tenant,
    User,
)
from app.db.transactions import transaction
from app.errors import QueueFull
from app.intake import actions, intake
from app.scheduling import retention
from app.settings import settings
from tests.app.conftest import BUNDLE, descriptor, people, problem, sha256
from tests.scenery import until_somebody_waits_for


def count(session, table):
    return session.scalar(select(func.count()).select_from(table))


def event_types(session):
    return list(session.scalars(select(RequestEvent.type).order_by(RequestEvent.id)))


class TestSubmit:
    def test_a_request_is_accepted_with_all_its_tasks(self, red):
        answer = red.post("/v1/requests", json=descriptor(name="first", priority=3))
        assert answer.status_code == 202, answer.text
        body = answer.json()
        assert answer.headers["location"] == f"/v1/requests/{body['id']}"
        assert (body["name"], body["state"], body["priority"]) == ("first", "queued", 3)
        assert (body["tenant"], body["user"]) == ("red", "red.member")
        assert [(task["name"], task["state"], task["island"]) for task in body["tasks"]] == [
            ("train", "blocked", None)
        ]
        assert red.get(answer.headers["location"]).json() == body

    def test_choice_that_no_device_suits_is_refused_with_what_there_is(self, red, session):
        facts = {"model": "NVIDIA H100 80GB HBM3", "labels": ["fast"]}
        with transaction() as its:
            its.execute(update(Device).values(facts=facts))

        def submitted(**devices):
            run = {"job": "train:Train"}
            tasks = [{"name": "t", "run": run, "devices": devices}]
            return red.post("/v1/requests", json=descriptor(tasks=tasks))

        assert submitted(model="h100", labels=["fast"]).status_code == 202
        fault = problem(submitted(model="a100"), 422, "unsatisfiable", "/tasks/0/devices/model")
        assert fault["errors"][0]["detail"] == (
            "there is no cpu device of model a100; there are NVIDIA H100 80GB HBM3"
        )

    def test_submission_writes_tasks_dependencies_and_one_event(self, red, session):
        tasks = [
            {"name": "prep", "run": {"function": "train:encode"}, "outputs": ["h"]},
            {
                "name": "train",
                "type": "training",
                "run": {"job": "train:Train"},
                "params": {"steps": 5},
                "inputs": {"x": "prep.h"},
                "start": {"after": ["prep"], "hold": True, "not_before": "2030-01-01T00:00:00Z"},
                "devices": {"memory_bytes": 9, "avoid_labels": ["spot", "old"]},
                "retry": {"max": 2},
            },
        ]
        body = red.post("/v1/requests", json=descriptor(tasks=tasks, priority=-5)).json()
        prep, train = session.scalars(select(Task).order_by(Task.ordinal))
        assert (prep.ordinal, train.ordinal, train.type, train.kind) == (0, 1, "training", "cpu")
        assert (train.memory_bytes, train.retry_max, train.priority) == (9, 2, -5)
        assert (prep.device_choice, train.device_choice) == ("", "-old,-spot")
        assert (train.hold, train.not_before) == ("user", datetime(2030, 1, 1, tzinfo=UTC))
        assert train.descriptor["max_duration_s"] == 86400.0
        needs = session.scalars(select(Need).order_by(Need.port)).all()
        assert [(n.task_id, n.needs_id, n.port, n.output) for n in needs] == [
            (train.id, prep.id, "", ""),
            (train.id, prep.id, "x", "h"),
        ]
        assert body["tasks"][1]["needs"] == [
            {"task": "prep", "port": "", "output": "", "request_id": ""},
            {"task": "prep", "port": "x", "output": "h", "request_id": ""},
        ]
        assert event_types(session) == ["request.submitted"]
        assert red.get(f"/v1/requests/{body['id']}").json() == body  # it was not read back

    def test_request_without_a_name_is_named_after_its_first_task(self, submitted):
        assert submitted["name"] == f"train-{submitted['id'][-6:]}"

    def test_root_tenant_without_a_share_cannot_submit(self, as_):
        answer = as_("root").post("/v1/requests", json=descriptor())
        assert "has no share" in problem(answer, 403, "insufficient-scope")["detail"]


class TestTier:
    def tier_of(self, session, tenant_id, tier):
        session.get_one(Tenant, tenant_id).tier = tier
        session.flush()

    def test_tier_and_devices_are_written_to_the_tasks(self, red, session):
        self.tier_of(session, "ten_red", "premium")
        body = red.post("/v1/requests", json=descriptor(tier="premium")).json()
        task = session.scalars(select(Task)).one()
        assert (task.tier, task.devices_min, task.devices_max) == ("premium", 1, 1)
        shown = body["tasks"][0]
        assert (shown["tier"], shown["devices_min"], shown["devices_max"]) == ("premium", 1, 1)

    @pytest.mark.parametrize("route", ["/v1/requests", "/v1/requests:validate"])
    def test_better_tier_than_the_tenants_is_refused(self, route, red, session, rows):
        self.tier_of(session, "ten_red", "standard")
        before = rows()
        answer = red.post(route, json=descriptor(tier="premium"))
        found = problem(answer, 422, "validation-error", "/tier")
        assert "requests of red may ask for standard or basic, not for premium" in found["detail"]
        assert rows() == before
        assert red.post(route, json=descriptor(tier="standard")).is_success

    def test_lowest_tier_up_to_the_root_counts(self, red, session):
        self.tier_of(session, "ten_root", "basic")
        answer = red.post("/v1/requests", json=descriptor(tier="standard"))
        found = problem(answer, 422, "validation-error", "/tier")
        assert "may ask for basic, not" in found["detail"]

    def test_task_without_a_tier_gets_standard_or_the_best_allowed(self, red, session):
        assert red.post("/v1/requests", json=descriptor()).json()["tier"] == "standard"
        self.tier_of(session, "ten_red", "basic")
        assert red.post("/v1/requests:validate", json=descriptor()).json()["tier"] == "basic"
        body = red.post("/v1/requests", json=descriptor(tier=None)).json()
        assert (body["tier"], body["tasks"][0]["tier"]) == ("basic", "basic")


class TestTypeWithoutPreset:
    """A type may be any name, but one that is spelled like a preset's type is refused."""

    @pytest.fixture(autouse=True)
    def preset(self, session):
        session.add_all(Preset(task_type=name, kind="cpu", params={}) for name in ("train", "eval"))
        session.flush()

    @pytest.mark.parametrize("task_type", ["train", "eval", "default", "preprocess"])
    def test_known_or_quite_different_type_is_accepted(self, task_type, red):
        body = descriptor()
        body["tasks"][0]["type"] = task_type
        assert red.post("/v1/requests", json=body).status_code == 202

    @pytest.mark.parametrize("route", ["/v1/requests:validate", "/v1/requests"])
    def test_type_similar_to_a_known_one_is_refused_with_it(self, route, red):
        body = descriptor()
        body["tasks"][0]["type"] = "trian"
        errors = problem(red.post(route, json=body), 422, "validation-error")["errors"]
        assert errors == [
            {
                "pointer": "/tasks/0/type",
                "detail": "no preset has the type 'trian'; did you mean 'train'?",
                "code": "unknown-type",
            }
        ]


def test_launcher_on_one_device_is_noted_with_the_ranks_to_ask_for(red):
    body = descriptor()
    body["tasks"][0]["run"] = {"command": ["torchrun", "--nproc-per-node", "2", "train.py"]}
    body["tasks"][0].pop("params", None)
    answer = red.post("/v1/requests:validate", json=body)
    assert answer.status_code == 200, answer.text
    [note] = answer.json()["notes"]
    assert "--devices 2" in note
    assert "--ranks 2 -- python train.py" in note


def test_process_with_several_devices_is_noted_unless_it_starts_ranks(red, session):
    body = descriptor()
    for argv, noted in ((["torchrun", "train.py"], False), (["python", "train.py"], True)):
        run = {"command": argv}
        body["tasks"] = [{"name": "a", "run": run, "devices": {"min": 2}}]
        answer = red.post("/v1/requests:validate", json=body)
        assert answer.status_code == 200, answer.text
        told = [
            "a: it is one process with 2 devices. To have a rank started on each, set"
            " world_size (--ranks 2)"
        ]
        assert answer.json()["notes"] == (told if noted else [])


@pytest.mark.parametrize("collectives", ["exact", "native"])
def test_ranks_with_a_gpu_each_are_told_of_native_collectives(red, session, collectives):
    facts = {"offers": ["native"]}
    session.execute(update(Device).values(kind="cuda", facts=facts))
    session.commit()
    body = descriptor()
    gang = {"world_size": 2, "devices": {"kind": "cuda", "min": 2}, "collectives": collectives}
    body["tasks"] = [{"name": "a", "run": {"command": ["python", "train.py"]}, **gang}]
    answer = red.post("/v1/requests:validate", json=body)
    assert answer.status_code == 200, answer.text
    told = "a: its ranks have a GPU each, and their sums go through host memory"
    assert [note[: len(told)] for note in answer.json()["notes"]] == (
        [told] if collectives == "exact" else []
    )


class TestLimitsOfUser:
    @pytest.fixture
    def bound(self, session):
        """Give the member of red these limits, or all users of red."""

        def give(*, by_tenant=False, **limits):
            if by_tenant:
                session.get_one(Tenant, "ten_red").user_defaults = limits
            else:
                user = session.get_one(User, "usr_red.member")
                for name, most in limits.items():
                    setattr(user, name, most)
            session.flush()

        return give

    @pytest.mark.parametrize("by_tenant", [False, True])
    @pytest.mark.parametrize("kind", ["cpu", "*"])
    def test_gang_above_the_limit_is_refused_with_the_limit(self, red, bound, kind, by_tenant):
        bound(limit={kind: 1}, by_tenant=by_tenant)
        wide = {"name": "a", "run": {"job": "train:Train"}, "world_size": 2, "devices": {"min": 2}}
        answer = red.post("/v1/requests", json=descriptor(tasks=[wide]))
        found = problem(answer, 422, "validation-error", "/tasks/0/devices/min")
        assert "your own limit is 1" in found["detail"]
        assert red.post("/v1/requests", json=descriptor()).status_code == 202

    def test_own_limit_goes_before_that_of_the_tenant(self, red, bound):
        bound(max_queued=0, by_tenant=True)
        problem(red.post("/v1/requests", json=descriptor()), 409, "queue-full")
        bound(max_queued=1)
        assert red.post("/v1/requests", json=descriptor()).status_code == 202
        found = problem(red.post("/v1/requests", json=descriptor()), 409, "queue-full")
        assert "you have 1 queued task of at most 1; this request has 1" in found["detail"]

    def test_queue_of_a_user_does_not_count_that_of_others(self, red, as_, bound):
        bound(max_queued=1)
        assert as_("red.other").post("/v1/requests", json=descriptor()).status_code == 202
        assert red.post("/v1/requests", json=descriptor()).status_code == 202

    def test_longer_task_is_refused_and_the_default_is_the_longest(self, red, bound, session):
        bound(max_duration_s=3600.0)
        task = {"name": "a", "run": {"job": "train:Train"}, "max_duration_s": 7200}
        answer = red.post("/v1/requests", json=descriptor(tasks=[task]))
        problem(answer, 422, "validation-error", "/tasks/0/max_duration_s")
        made = red.post("/v1/requests", json=descriptor())
        assert made.status_code == 202
        rows = session.scalars(select(Task).where(Task.request_id == made.json()["id"])).all()
        assert {task.spec.max_duration_s for task in rows} == {3600.0}

    def test_session_beyond_the_limit_is_refused_until_one_has_ended(self, red, bound, session):
        session.execute(update(Device).values(facts={"offers": ["session"]}))
        bound(max_sessions=1)
        shell = {"tasks": [{"name": "a", "run": {"command": ["bash"]}, "session": {"idle_s": 60}}]}
        assert red.post("/v1/requests", json=shell).status_code == 202
        found = problem(red.post("/v1/requests", json=shell), 409, "quota-exceeded")
        assert "you have 1 session of at most 1" in found["detail"]
        session.execute(update(Task).values(state="done"))
        assert red.post("/v1/requests", json=shell).status_code == 202


class TestMaxQueued:
    def bound(self, session, tenant_id, most):
        session.get_one(Tenant, tenant_id).max_queued = most
        session.flush()

    def test_task_beyond_max_queued_is_refused_with_the_numbers(self, red, session, rows):
        self.bound(session, "ten_red", 2)
        for _ in range(2):
            assert red.post("/v1/requests", json=descriptor()).status_code == 202
        before = rows()
        answer = red.post("/v1/requests", json=descriptor(), headers={"Idempotency-Key": "k"})
        found = problem(answer, 409, "queue-full")
        assert "red has 2 queued tasks of at most 2; this request has 1" in found["detail"]
        assert rows() == before

    def test_running_and_ended_tasks_do_not_count_as_queued(self, red, session):
        self.bound(session, "ten_red", 1)
        for state in ("running", "done", "cancelled"):
            assert red.post("/v1/requests", json=descriptor()).status_code == 202
            session.execute(update(Task).values(state=state))
        assert red.post("/v1/requests", json=descriptor()).status_code == 202
        session.execute(update(Task).values(state="waiting"))
        problem(red.post("/v1/requests", json=descriptor()), 409, "queue-full")

    def test_max_queued_of_a_tenant_counts_the_tenants_below(self, red, as_, session):
        session.get_one(Tenant, "ten_blue").parent_id = "ten_red"
        self.bound(session, "ten_red", 1)
        blue = as_("blue.member")
        blue.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE)
        assert blue.post("/v1/requests", json=descriptor()).status_code == 202
        for client in (red, blue):
            found = problem(client.post("/v1/requests", json=descriptor()), 409, "queue-full")
            assert "red has 1 queued tasks" in found["detail"]

    def test_request_larger_than_max_queued_is_refused_with_advice(self, red, session):
        self.bound(session, "ten_red", 1)
        tasks = [{"name": name, "run": {"job": "train:Train"}} for name in ("a", "b")]
        answer = red.post("/v1/requests", json=descriptor(tasks=tasks))
        assert "split the request" in problem(answer, 409, "queue-full")["detail"]

    def test_only_one_of_two_simultaneous_requests_gets_the_last_place(self, committed):
        """1. The first has passed the check and is not committed.  2. The second comes and waits
        for it.  3. The first commits.  4. The second sees that the place is taken.
        """
        owner = intake.Owner("ten_red", "usr_red.member", "red.member")
        with transaction() as session:
            people(session)
            session.add(_bundle())
            session.get_one(Tenant, "ten_red").max_queued = 1
        with ThreadPoolExecutor() as threads:
            with transaction() as first:
                _taken_in(first, owner)
                second = threads.submit(_submit, owner)
                until_somebody_waits_for(first)
                assert not second.done()
            with pytest.raises(QueueFull):
                second.result(timeout=90)
        with transaction() as session:
            assert count(session, Task) == 1


def _ended_request(id, **more):
    at = func.now() - timedelta(minutes=11)
    whose = {"tenant_id": "ten_red", "user_id": "usr_red.member"}
    return Request(id=id, name=id, state="done", ended_at=at, **whose, **more)


def _bundle():
    return Bundle(
        tenant_id="ten_red",
        sha256=sha256(BUNDLE),
        size_bytes=len(BUNDLE),
        entry_points={"train:Train": "class"},
    )


def _submit(owner):
    with transaction() as session:
        _taken_in(session, owner)


def _taken_in(session, owner):
    once = intake.Once(None, "", descriptor())
    facts = intake.request_facts(session, owner, once)
    accepted = intake.accept(session, owner, once.body, facts)
    intake.write(session, accepted, once, intake.IntakeResponse(202, "{}", ""))


class TestIdempotencyKey:
    HEADERS = {"Idempotency-Key": "a-1"}

    def test_the_same_key_and_body_give_the_first_answer_again(self, red, session):
        first = red.post("/v1/requests", json=descriptor(), headers=self.HEADERS)
        again = red.post("/v1/requests", json=descriptor(), headers=self.HEADERS)
        assert (again.status_code, again.json()) == (202, first.json())
        assert again.headers["location"] == first.headers["location"]
        assert again.headers["idempotency-replayed"] == "true"
        assert "idempotency-replayed" not in first.headers
        assert count(session, Request) == count(session, Task) == count(session, Idempotency) == 1

    def test_first_answer_is_repeated_whatever_happened_since(self, red, session):
        first = red.post("/v1/requests", json=descriptor(), headers=self.HEADERS)
        red.post(f"/v1/requests/{first.json()['id']}/hold")
        again = red.post("/v1/requests", json=descriptor(), headers=self.HEADERS)
        assert again.json() == first.json()

    def test_the_same_key_with_another_body_is_refused(self, red, rows):
        red.post("/v1/requests", json=descriptor(), headers=self.HEADERS)
        before = rows()
        answer = red.post("/v1/requests", json=descriptor(priority=1), headers=self.HEADERS)
        problem(answer, 422, "idempotency-key-reused", "Idempotency-Key:")
        assert rows() == before

    def test_a_refused_request_does_not_use_the_key_up(self, red):
        bad = red.post("/v1/requests", json=descriptor(priority=999), headers=self.HEADERS)
        problem(bad, 422, "validation-error")
        assert red.post("/v1/requests", json=descriptor(), headers=self.HEADERS).is_success

    def test_idempotency_keys_of_two_users_are_independent(self, red, as_, session):
        red.post("/v1/requests", json=descriptor(), headers=self.HEADERS)
        other = as_("red.other").post("/v1/requests", json=descriptor(), headers=self.HEADERS)
        assert "idempotency-replayed" not in other.headers
        assert count(session, Request) == 2

    def test_each_call_without_a_key_submits(self, red, session):
        for _ in range(2):
            red.post("/v1/requests", json=descriptor())
        assert count(session, Request) == 2


class TestValidate:
    def test_validation_shows_tasks_with_defaults_and_writes_nothing(self, red, rows):
        before = rows()
        body = red.post("/v1/requests:validate", json=descriptor(name="x")).json()
        assert body["name"] == "x"
        assert body["tasks"][0]["kind"] == "cpu"
        assert body["tasks"][0]["descriptor"]["checkpoint"] == {
            "every_s": 60.0,
            "keep": 3,
            "best": None,
        }
        assert rows() == before


class TestList:
    @pytest.fixture
    def ids(self, red):
        """Newest first."""
        made = [red.post("/v1/requests", json=descriptor(name=f"n{n}")).json() for n in range(5)]
        return [body["id"] for body in reversed(made)]

    def listed(self, client, **params):
        return [item["id"] for item in client.get("/v1/requests", params=params).json()["items"]]

    def test_newest_first(self, red, ids):
        assert self.listed(red) == ids

    def test_each_request_is_seen_once_page_by_page(self, red, ids):
        seen, url = [], "/v1/requests?limit=2&state=queued"
        while url:
            answer = red.get(url)
            seen += [item["id"] for item in answer.json()["items"]]
            url = answer.links.get("next", {}).get("url")
            assert bool(url) == (answer.json()["next_cursor"] is not None)
        assert seen == ids

    def test_new_requests_do_not_shift_the_next_page(self, red, ids):
        first = red.get("/v1/requests?limit=2").json()
        red.post("/v1/requests", json=descriptor())
        assert self.listed(red, limit=2, cursor=first["next_cursor"]) == ids[2:4]

    def test_by_state(self, red, ids, session):
        session.execute(update(Request).where(Request.id == ids[0]).values(state="done"))
        session.commit()
        assert self.listed(red, state="done") == ids[:1]
        assert self.listed(red, state="done,queued") == ids
        assert self.listed(red, state="failed") == []

    def test_by_label_and_name(self, red, ids):
        red.patch(f"/v1/requests/{ids[1]}", json={"labels": {"exp": "a", "who": "me"}})
        red.patch(f"/v1/requests/{ids[2]}", json={"labels": {"exp": "a"}})
        assert self.listed(red, label="exp:a") == ids[1:3]
        assert self.listed(red, label=["exp:a", "who:me"]) == ids[1:2]
        assert self.listed(red, name="n4") == ids[:1]

    def test_by_whether_they_are_kept(self, red, ids):
        for id in ids[1:3]:
            assert red.patch(f"/v1/requests/{id}", json={"keep": True}).status_code == 200
        assert self.listed(red, keep="true") == ids[1:3]
        assert self.listed(red, keep="false") == [ids[0], *ids[3:]]

    def test_by_time(self, red, ids, session):
        old = datetime(2020, 1, 1, tzinfo=UTC)
        session.execute(update(Request).where(Request.id == ids[4]).values(submitted_at=old))
        session.commit()
        assert self.listed(red, submitted_after="2020-01-01T00:00:01Z") == ids[:4]

    def test_requests_of_other_tenants_are_not_listed(self, as_, ids):
        assert self.listed(as_("blue.tenant_admin")) == []
        assert self.listed(as_("blue.tenant_admin"), tenant_id="ten_red") == []
        assert self.listed(as_("root"), tenant_id="ten_red") == ids


class TestChange:
    def test_new_priority_reaches_the_tasks_and_leaves_one_event(self, red, submitted, session):
        for _ in range(2):  # the second changes nothing more
            body = red.patch(f"/v1/requests/{submitted['id']}", json={"priority": 7}).json()
        assert body["priority"] == 7
        assert session.scalar(select(Task.priority)) == 7
        assert event_types(session) == ["request.submitted", "request.priority_set"]

    def test_ended_request_keeps_its_priority_but_takes_labels(self, red, submitted, session):
        session.execute(update(Request).values(state="done"))
        session.commit()
        url = f"/v1/requests/{submitted['id']}"
        problem(red.patch(url, json={"priority": 7}), 409, "conflict-state")
        assert red.patch(url, json={"labels": {"good": "yes"}}).json()["labels"] == {"good": "yes"}

    def test_all_changes_of_one_call_are_made(self, red, submitted, session):
        asked = {"priority": 7, "labels": {"exp": "a"}, "keep": True}
        body = red.patch(f"/v1/requests/{submitted['id']}", json=asked).json()
        assert {name: body[name] for name in asked} == asked
        columns = (Request.priority, Request.labels, Request.keep)
        assert session.execute(select(*columns)).one() == (*asked.values(),)

    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({"priority": 101}, "/priority"),
            ({"priority": "7"}, "/priority"),
            ({"state": "done"}, "/state"),
            ({"labels": {"a": 1}}, "/labels/a"),
        ],
    )
    def test_other_fields_cannot_be_changed(self, body, pointer, red, submitted, rows):
        before = rows()
        answer = red.patch(f"/v1/requests/{submitted['id']}", json=body)
        problem(answer, 422, "validation-error", pointer)
        assert rows() == before


class TestDelete:
    @pytest.fixture
    def ended(self, submitted, session) -> str:
        at = func.now() - timedelta(minutes=11)
        session.execute(update(Task).values(state="done", ended_at=at))
        session.execute(update(Request).values(state="done", ended_at=at))
        session.commit()
        return f"/v1/requests/{submitted['id']}"

    def test_ended_request_is_shown_as_deleted_until_it_is_gone(self, red, ended, session):
        answer = red.delete(ended)
        assert answer.status_code == 202, answer.text
        asked_at = answer.json()["delete_asked_at"]
        assert asked_at
        assert red.delete(ended).json()["delete_asked_at"] == asked_at
        assert event_types(session) == ["request.submitted", "request.delete_asked"]
        with transaction() as its:
            assert retention.delete_some(its)
        problem(red.get(ended), 404, "not-found")
        problem(red.delete(ended), 404, "not-found")
        assert count(session, Task) == count(session, RequestEvent) == 0

    @pytest.mark.parametrize("state", ["queued", "running"])
    def test_request_that_goes_on_is_refused_with_the_way_to_end_it(
        self, red, submitted, session, rows, state
    ):
        session.execute(update(Request).values(state=state))
        session.commit()
        before = rows()
        told = problem(red.delete(f"/v1/requests/{submitted['id']}"), 409, "conflict-state")
        assert f"POST /v1/requests/{submitted['id']}/cancel" in told["detail"]
        assert rows() == before

    def test_failed_request_of_which_a_task_stops_is_refused(self, red, ended, session):
        session.execute(update(Task).values(state="stopping"))
        session.commit()
        problem(red.delete(ended), 409, "conflict-state")

    def test_kept_request_is_let_go_before_it_is_deleted(self, red, ended, session):
        assert red.patch(ended, json={"keep": True}).json()["keep"] is True
        problem(red.delete(ended), 409, "conflict-state")
        assert red.patch(ended, json={"keep": False}).json()["keep"] is False
        assert red.delete(ended).status_code == 202
        for change in ({"keep": True}, {"labels": {"exp": "a"}}):
            problem(red.patch(ended, json=change), 409, "conflict-state")
        told = ["request.kept", "request.let_go", "request.delete_asked"]
        assert event_types(session) == ["request.submitted", *told]

    @pytest.mark.parametrize("change", [{"labels": {"exp": "a"}}, {"keep": True}])
    def test_change_of_a_request_that_is_deleted_meanwhile_is_not_found(
        self, app, committed, change
    ):
        """1. Control has deleted the request and is not committed.  2. The change waits for it.  3.
        Control commits.  4. The change finds no request.
        """
        with transaction() as session:
            key = people(session).keys["red.member"]
            session.add(_ended_request("req_a", delete_asked_at=func.now()))
        client = TestClient(app, headers={"Authorization": f"Bearer {key}"})
        with ThreadPoolExecutor() as threads:
            with transaction() as control:
                assert retention.delete_some(control)
                changed = threads.submit(client.patch, "/v1/requests/req_a", json=change)
                until_somebody_waits_for(control)
                assert not changed.done()
            problem(changed.result(timeout=90), 404, "not-found")

    @pytest.fixture
    def deleted_when_read(self, committed):
        """Control deletes req_a after a call has read its row, before the call reads its names."""
        with transaction() as session:
            key = people(session).keys["red.member"]
            session.add(_ended_request("req_a", delete_asked_at=func.now()))
            session.add(_ended_request("req_b"))

        def delete(call: ORMExecuteState) -> None:
            if call.statement is requests._NAMES:
                with transaction() as control:
                    assert retention.delete_some(control)

        event.listen(Session, "do_orm_execute", delete)
        yield {"Authorization": f"Bearer {key}"}
        event.remove(Session, "do_orm_execute", delete)

    def test_list_leaves_out_a_request_that_is_deleted_meanwhile(self, app, deleted_when_read):
        listed = TestClient(app, headers=deleted_when_read).get("/v1/requests").json()
        assert [item["id"] for item in listed["items"]] == ["req_b"]

    def test_request_that_is_deleted_meanwhile_is_not_found(self, app, deleted_when_read):
        answer = TestClient(app, headers=deleted_when_read).get("/v1/requests/req_a")
        problem(answer, 404, "not-found")


class TestMostKept:
    """A tenant may keep two requests."""

    @pytest.fixture(autouse=True)
    def two(self, environment, monkeypatch):
        there = settings().model_copy(update={"kept_requests_max": 2})
        monkeypatch.setattr("app.intake.actions.settings", lambda: there)

    @pytest.fixture
    def kept(self, red, session) -> list[str]:
        """Requests of red: all but the last are kept."""
        session.add_all(_ended_request(f"req_{name}") for name in "abc")
        session.commit()
        urls = [f"/v1/requests/req_{name}" for name in "abc"]
        for url in urls[:2]:
            assert red.patch(url, json={"keep": True}).status_code == 200
        return urls

    def test_request_beyond_the_limit_is_refused_with_the_numbers_and_advice(self, red, kept, rows):
        before = rows()
        answer = red.patch(kept[2], json={"keep": True, "labels": {"exp": "a"}})
        told = problem(answer, 409, "quota-exceeded")["detail"]
        assert "red keeps 2 requests of at most 2" in told
        for advice in ("GET /v1/requests?keep=true", '{"keep": false}', "KEPT_REQUESTS_MAX"):
            assert advice in told
        assert rows() == before

    def test_released_request_gives_its_place_to_another(self, red, kept):
        red.patch(kept[0], json={"keep": False})
        assert red.patch(kept[2], json={"keep": True}).status_code == 200
        problem(red.patch(kept[0], json={"keep": True}), 409, "quota-exceeded")

    def test_kept_request_is_kept_again_and_changed_at_the_limit(self, red, kept):
        asked = {"keep": True, "labels": {"exp": "a"}}
        assert red.patch(kept[0], json=asked).json()["labels"] == {"exp": "a"}

    def test_requests_of_another_tenant_do_not_count(self, as_, kept, session):
        whose = {"tenant_id": "ten_blue", "user_id": "usr_blue.member"}
        session.execute(update(Request).where(Request.id == "req_c").values(**whose))
        session.commit()
        assert as_("blue.member").patch(kept[2], json={"keep": True}).status_code == 200

    def test_limit_counts_for_the_tenant_of_the_request_whoever_asks(self, as_, kept):
        problem(as_("root").patch(kept[2], json={"keep": True}), 409, "quota-exceeded")

    def test_limit_of_0_is_none(self, red, kept, monkeypatch):
        there = settings().model_copy(update={"kept_requests_max": 0})
        monkeypatch.setattr("app.intake.actions.settings", lambda: there)
        assert red.patch(kept[2], json={"keep": True}).status_code == 200

    @pytest.mark.parametrize(("id", "refused"), [("req_b", False), ("req_c", True)])
    def test_only_one_of_two_simultaneous_requests_gets_the_last_place(
        self, app, committed, id, refused
    ):
        """1. A call keeps req_b, in the last place, and is not committed.  2. Another keeps req_b
        too, or req_c, and waits for it.  3. The first commits.  4. The second sees it.
        """
        with transaction() as session:
            key = people(session).keys["red.member"]
            session.add_all(_ended_request(f"req_{name}", keep=name == "a") for name in "abc")
        client = TestClient(app, headers={"Authorization": f"Bearer {key}"})
        with ThreadPoolExecutor() as threads:
            with transaction() as first:
                request = first.get_one(Request, "req_b")
                actions.change_request(
                    first, request, priority=None, labels=None, keep=True, by="red.member"
                )
                first.flush()
                url = f"/v1/requests/{id}"
                second = threads.submit(client.patch, url, json={"keep": True})
                until_somebody_waits_for(first)
                assert not second.done()
            answer = second.result(timeout=90)
        if refused:
            problem(answer, 409, "quota-exceeded")
        else:
            assert answer.json()["keep"] is True
        with transaction() as session:
            assert session.scalar(select(func.count()).where(Request.keep)) == 2


class TestWishes:
    def test_cancel_is_noted_and_the_island_changes_the_state(self, red, submitted, session):
        url = f"/v1/requests/{submitted['id']}/cancel"
        body = red.post(url).json()
        assert (body["state"], body["tasks"][0]["state"]) == ("queued", "blocked")
        assert body["tasks"][0]["cancel_asked"]
        asked_at = session.scalar(select(Task.cancel_asked_at))
        assert red.post(url).status_code == 202
        assert session.scalar(select(Task.cancel_asked_at)) == asked_at
        assert event_types(session) == ["request.submitted", "request.cancel_asked"]

    def test_cancelling_an_ended_request_changes_nothing(self, red, submitted, session, rows):
        session.execute(update(Task).values(state="done"))
        session.commit()
        before = rows()
        assert red.post(f"/v1/requests/{submitted['id']}/cancel").status_code == 202
        assert rows() == before

    def test_hold_and_release(self, red, submitted, session):
        url = f"/v1/requests/{submitted['id']}"
        for _ in range(2):
            assert red.post(f"{url}/hold").json()["tasks"][0]["hold"] == "user"
        for _ in range(2):
            assert red.post(f"{url}/release").json()["tasks"][0]["hold"] == ""
        asked = ["request.hold_asked", "request.release_asked"]
        assert event_types(session) == ["request.submitted", *asked]

    def test_hold_of_a_platform_admin_is_released_only_by_one(self, red, as_, submitted):
        url = f"/v1/requests/{submitted['id']}"
        assert as_("root").post(f"{url}/hold").json()["tasks"][0]["hold"] == "admin"
        problem(red.post(f"{url}/release"), 403, "insufficient-scope")
        assert red.post(f"{url}/hold").json()["tasks"][0]["hold"] == "admin"
        assert as_("root").post(f"{url}/release").json()["tasks"][0]["hold"] == ""

    @pytest.mark.parametrize("wish", ["hold", "release"])
    def test_action_on_an_ended_request_is_refused(self, wish, red, submitted, session, rows):
        session.execute(update(Task).values(state="done"))
        session.execute(update(Request).values(state="done"))
        session.commit()
        before = rows()
        answer = red.post(f"/v1/requests/{submitted['id']}/{wish}")
        said = problem(answer, 409, "conflict-state")["detail"]
        assert said == "the task is already done; nothing was changed"
        assert rows() == before

    def test_request_is_held_if_all_its_live_tasks_are_held(self, red, session):
        tasks = [{"name": name, "run": {"job": "train:Train"}} for name in ("a", "b", "c")]
        first = red.post("/v1/requests", json=descriptor(tasks=tasks)).json()
        ended, held, _ = (task["id"] for task in first["tasks"])
        session.execute(update(Task).where(Task.id == ended).values(state="done"))
        session.execute(update(Task).where(Task.id == held).values(hold="user"))
        session.commit()
        url = f"/v1/requests/{first['id']}"
        assert red.get(url).json()["hold"] == ""
        assert red.post(f"{url}/hold").json()["hold"] == "user"
        held = red.get(url).json()
        assert held["task_states"] == {"blocked": 2, "done": 1}
        assert (held["phase"], held["task_phases"]) == ("paused", {"paused": 2, "done": 1})

    def test_requests_are_found_by_phase(self, red, session):
        running, paused, preempted, queued = (
            red.post("/v1/requests", json=descriptor()).json()["id"] for _ in range(4)
        )
        stand = {
            running: {"state": "running"},
            paused: {"state": "blocked", "hold": "user", "first_started_at": func.now()},
            preempted: {"state": "waiting", "first_started_at": func.now()},
        }
        for id, values in stand.items():
            session.execute(update(Task).where(Task.request_id == id).values(**values))
            session.execute(update(Request).where(Request.id == id).values(state="running"))
        session.commit()
        for phase, id in {
            "running": running,
            "paused": paused,
            "preempted": preempted,
            "queued": queued,
        }.items():
            (found,) = red.get(f"/v1/requests?phase={phase}").json()["items"]
            assert (found["id"], found["phase"]) == (id, phase)
        both = red.get("/v1/requests?phase=paused,done,running").json()["items"]
        assert [found["id"] for found in both] == [paused, running]
        problem(red.get("/v1/requests?phase=held"), 422, "validation-error", "?phase")


INDEX_OF_FILTER = {
    "requests?state=queued,running": "ix_requests_live",
    "requests?phase=queued": "ix_requests_live",
    "requests?phase=preempted,paused": "ix_requests_live",
    "requests?keep=true": "ix_requests_kept",
    "requests?name=none": "ix_requests_name",
    "requests?id_ends=0123456789": "ix_requests_id_ends",
    "requests?label=exp:none": "ix_requests_labels",
    "requests?submitted_after=2100-01-01T00:00:00Z": "ix_requests_submitted_at",
}


def test_lists_of_many_rows_are_read_from_an_index_whatever_the_filter(as_, session, subtests):
    """One world of 10,000 rows serves all filters, since it takes seconds to write."""
    write_many(session)
    for asked, index in INDEX_OF_FILTER.items():
        with subtests.test(asked):
            query, given = query_of_page(as_("red.member"), session, asked)
            assert index in explained(session, query, given)
    for user in ("red.member", "red.tenant_admin", "root"):
        for asked in ("state=splicing", "state=done,failed", "phase=preempted", ""):
            with subtests.test(asked, user=user):
                _check_tasks_are_read_from_an_index(as_(user), session, asked, user)
    with subtests.test("the count of kept requests"):
        _check_kept_requests_are_counted_by_an_index(as_("red.member"), session)


def _check_tasks_are_read_from_an_index(client, session, asked, user):
    query, given = query_of_page(client, session, f"tasks?{asked}")
    numbers = {name: n for n, name in enumerate(given, 1)}
    for_any_values = re.sub(r"%\((\w+)\)s", lambda name: f"${numbers[name[1]]}", query)
    plan = explained(session, for_any_values, options="(generic_plan)")
    is_whole = user == "root" and not asked
    indexes = ("pk_tasks",) if is_whole else ("ix_tasks_tenant_id_state_id", "ix_tasks_live")
    assert any(index in plan for index in indexes), plan
    assert "Seq Scan on tasks" not in plan, plan


def _check_kept_requests_are_counted_by_an_index(client, session):
    with sent_statements(session) as sent:
        assert client.patch("/v1/requests/req_1", json={"keep": True}).status_code == 200
    [(query, given)] = [one for one in sent if "count(" in one[0] and "requests.keep" in one[0]]
    assert "ix_requests_kept" in explained(session, query, given)


def explained(session, query, given=None, options=""):
    """Return the plan by which Postgres would run `query`."""
    rows = session.connection().exec_driver_sql(f"explain {options} {query}", given)
    return "\n".join(rows.scalars())


def write_many(session):
    for statement in (
        "insert into requests (id, tenant_id, user_id, name, state, labels)"
        " select 'req_' || n, 'ten_red', 'usr_red.member', 'r' || n, 'done',"
        " jsonb_build_object('exp', 'a' || n) from generate_series(1, 5000) n",
        "insert into tasks (id, request_id, tenant_id, user_id, island, ordinal, name, type, kind,"
        " state) select 'tsk_' || n, 'req_' || n, 'ten_red', 'usr_red.member', 'isle', 0, 't', 't',"
        " 'cpu', 'done' from generate_series(1, 5000) n",
        "analyze requests, tasks",
    ):
        session.execute(text(statement))


@contextmanager
def sent_statements(session):
    """Yield a list that gets each statement, with its values, while the block runs."""
    sent = []
    at = (session.get_bind().engine, "before_cursor_execute", lambda *told: sent.append(told[2:4]))
    event.listen(*at)
    yield sent
    event.remove(*at)


def query_of_page(client, session, asked):
    """Return the statement that reads the rows of a page, and its values."""
    with sent_statements(session) as sent:
        assert client.get(f"/v1/{asked}").status_code == 200
    [found] = [one for one in sent if "ORDER BY" in one[0] and "LIMIT" in one[0]]
    return found
