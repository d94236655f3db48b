"""Events and logs, as pages and live, over a real server and with what is really committed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, func, insert, select, update
from sqlalchemy.orm import Session

from app.api.routes import requests
from app.db.models import LogLine, Request, RequestEvent, Task
from app.db.transactions import transaction
from app.messaging.live_updates import CHANNEL, changes
from tests.app.conftest import BUNDLE, descriptor, problem, sha256
from tests.serving import PATIENT_S, Server, server

__all__ = ["server"]  # a fixture


@pytest.fixture
def request_id(server: Server) -> str:
    with server.client() as client:
        client.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE).raise_for_status()
        answer = client.post("/v1/requests", json=descriptor()).raise_for_status()
        return str(answer.json()["id"])


@contextmanager
def stream(server: Server, path: str, who: str = "red.member", **headers: str) -> Iterator[Any]:
    """The events of a stream, each as (name, id, data)."""
    with server.client(who) as client, client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _parsed(answer.iter_lines())


def _parsed(lines: Iterator[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if not line and "data" in fields:
            yield fields.get("event", ""), fields.get("id", ""), json.loads(fields["data"])
        fields = {} if not line else {**fields, name: value}


def tell(request_id: str, message: str, *, notify: bool = True) -> None:
    with transaction() as session:
        _add_event(session, request_id, message)
        if notify:
            session.execute(select(func.pg_notify(CHANNEL, f"ten_red {request_id}")))


def _add_event(session: Session, request_id: str, message: str) -> None:
    row = {"tenant_id": "ten_red", "request_id": request_id, "type": "task.noted"}
    session.execute(insert(RequestEvent).values(message=message, **row))


def end(request_id: str) -> None:
    with transaction() as session:
        session.execute(update(Request).where(Request.id == request_id).values(state="done"))
        session.execute(select(func.pg_notify(CHANNEL, f"ten_red {request_id}")))


def log(request_id: str, *lines: str) -> None:
    with transaction() as session:
        task = session.scalars(select(Task).where(Task.request_id == request_id)).one()
        first = session.scalar(select(func.count()).select_from(LogLine)) or 0
        for n, line in enumerate(lines):
            session.add(
                LogLine(task_id=task.id, epoch=1, line=first + n, stream="stdout", text=line)
            )
        session.execute(select(func.pg_notify(CHANNEL, f"ten_red {request_id}")))


class TestEvents:
    def test_events_are_listed_oldest_first_page_by_page(self, server, request_id):
        for n in range(3):
            tell(request_id, f"note {n}")
        path = f"/v1/requests/{request_id}/events"
        with server.client() as client:
            first = client.get(path, params={"limit": 2})
            second = client.get(first.links["next"]["url"])
            third = client.get(path, params={"cursor": first.json()["next_cursor"], "limit": 2})
        assert [item["type"] for item in first.json()["items"]] == [
            "request.submitted",
            "task.noted",
        ]
        assert [item["message"] for item in second.json()["items"]] == ["note 1", "note 2"]
        assert second.json() == third.json()
        assert second.json()["next_cursor"] is None
        assert "next" not in second.links

    def test_stream_sends_old_and_new_events_and_ends_with_the_request(self, server, request_id):
        with stream(server, f"/v1/requests/{request_id}/events/stream") as events:
            assert next(events)[0] == "request.submitted"
            tell(request_id, "one")
            name, _, data = next(events)
            assert (name, data["message"]) == ("task.noted", "one")
            end(request_id)
            assert next(events)[::2] == ("end", {"state": "done"})
            assert next(events, None) is None

    def test_the_accept_header_makes_a_stream_of_the_page(self, server, request_id):
        end(request_id)
        path = f"/v1/requests/{request_id}/events"
        with stream(server, path, accept="text/event-stream") as events:
            assert [name for name, _, _ in events] == ["request.submitted", "end"]

    def test_a_stream_goes_on_after_the_last_event_id(self, server, request_id):
        path = f"/v1/requests/{request_id}/events/stream"
        tell(request_id, "one")
        with stream(server, path) as events:
            next(events)
            _, last, _ = next(events)
        tell(request_id, "two")
        end(request_id)
        with stream(server, path, **{"last-event-id": last}) as events:
            assert [data.get("message") for _, _, data in events] == ["two", None]

    def test_changes_by_the_api_wake_streams_without_a_notification(self, server, request_id):
        with stream(server, f"/v1/requests/{request_id}/events/stream") as events:
            next(events)
            with server.client() as client:
                client.post(f"/v1/requests/{request_id}/hold").raise_for_status()
            assert next(events)[0] == "request.hold_asked"

    def test_event_of_a_late_commit_is_not_missed(self, server, request_id, engine: Engine):
        """The first to take a transaction id is the last to commit."""
        with stream(server, f"/v1/requests/{request_id}/events/stream") as events:
            next(events)
            with Session(engine) as late, late.begin():
                _add_event(late, request_id, "first by id, last to come")
                tell(request_id, "second by id, first to come")
                time.sleep(0.3)  # the stream looks, and must not tell the second yet
            told = [next(events)[2]["message"] for _ in range(2)]
        assert told == ["first by id, last to come", "second by id, first to come"]

    def test_stream_goes_on_after_postgres_dropped_its_listener(
        self, server, request_id, engine: Engine
    ):
        with stream(server, f"/v1/requests/{request_id}/events/stream") as events:
            next(events)
            _drop_listeners(engine)
            tell(request_id, "meanwhile")
            assert next(events)[2]["message"] == "meanwhile"

    def test_a_bad_last_event_id_is_refused(self, server, request_id):
        with server.client() as client:
            headers = {"Last-Event-ID": "x"}
            path = f"/v1/requests/{request_id}/events/stream"
            problem(client.get(path, headers=headers), 422, "validation-error", "Last-Event-ID:")

    def test_open_streams_end_when_the_server_goes_down(self, server, request_id):
        with stream(server, f"/v1/requests/{request_id}/events/stream") as events:
            next(events)
            changes.close()
            assert next(events, None) is None
            server.uvicorn.should_exit = True
        server.thread.join(60)
        assert not server.thread.is_alive()


def _drop_listeners(engine: Engine) -> None:
    of_us = "select pg_terminate_backend(pid) from pg_stat_activity where query = 'listen {}'"
    query = of_us.format(CHANNEL) + " and datname = current_database()"

    def dropped() -> Any:
        with engine.begin() as connection:
            return connection.exec_driver_sql(query).all()

    _until(dropped, "somebody listens")


def _until(true: Callable[[], Any], what: str) -> None:
    until_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until_s, f"waited in vain until {what}"
        time.sleep(0.02)


def _until_waiting(request_id: str, calls: int) -> None:
    """Wait until so many calls wait for a change of the request."""
    _until(lambda: len(changes._of(request_id)) == calls, f"{calls} calls wait")


class TestLogs:
    def test_log_is_read_by_pages_and_from_its_end(self, server, request_id):
        log(request_id, "a", "b", "c")
        path = f"/v1/requests/{request_id}/logs"

        def texts(**params: Any) -> list[str]:
            with server.client() as client:
                found = client.get(path, params=params).raise_for_status().json()
            return [item["text"] for item in found["items"]]

        assert texts() == ["a", "b", "c"]
        assert texts(tail=2) == ["b", "c"]
        assert texts(tail=9) == ["a", "b", "c"]
        assert texts(task="train", limit=1) == ["a"]
        with server.client() as client:
            problem(client.get(path, params={"task": "other"}), 404, "not-found")

    def test_tail_longer_than_a_page_continues_at_the_next_link(self, server, request_id):
        log(request_id, *(f"line {n}" for n in range(300)))
        with server.client() as client:
            first = client.get(f"/v1/requests/{request_id}/logs", params={"tail": 250})
            rest = client.get(first.links["next"]["url"])
        texts = [item["text"] for page in (first, rest) for item in page.json()["items"]]
        assert texts == [f"line {n}" for n in range(50, 300)]
        assert rest.json()["next_cursor"] is None

    def test_grep_keeps_the_lines_that_contain_the_text(self, server, request_id):
        log(request_id, "loss 0.5", "Loss 0.4", "100% of a_b", "loss 0.3", "100 of axb")
        path = f"/v1/requests/{request_id}/logs"

        def texts(**params: Any) -> list[str]:
            with server.client() as client:
                found = client.get(path, params=params).raise_for_status().json()
            return [item["text"] for item in found["items"]]

        assert texts(grep="loss") == ["loss 0.5", "loss 0.3"]
        assert texts(grep="loss", tail=1) == ["loss 0.3"]
        assert texts(grep="100% of a_b") == ["100% of a_b"]
        assert texts(grep="oss 0.", limit=2) == ["loss 0.5", "Loss 0.4"]

    def test_whole_log_is_downloaded_as_a_file(self, server, request_id):
        log(request_id, *(f"line {n}" for n in range(1200)), "lösung", "")
        path = f"/v1/requests/{request_id}/logs/text"
        with server.client() as client:
            answer = client.get(path).raise_for_status()
            assert answer.text.splitlines() == [f"line {n}" for n in range(1200)] + ["lösung", ""]
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
            assert answer.headers["content-disposition"].endswith('.log"')
            assert client.get(path, params={"grep": "ö"}).text == "lösung\n"
        with server.client("blue.member") as client:
            problem(client.get(path), 404, "not-found")

    def test_stream_with_grep_reads_no_line_twice(self, server, request_id):
        log(request_id, *(["dull"] * 700), "loss 0.5")
        with stream(server, f"/v1/requests/{request_id}/logs/stream?grep=loss") as lines:
            assert next(lines)[2]["text"] == "loss 0.5"
            log(request_id, "dull", "loss 0.4")
            assert next(lines)[2]["text"] == "loss 0.4"
            end(request_id)
            assert [name for name, _, _ in lines] == ["end"]

    def test_stream_sends_new_lines_and_continues_after_the_last_event_id(self, server, request_id):
        log(request_id, "a")
        path = f"/v1/requests/{request_id}/logs/stream"
        with stream(server, path) as lines:
            name, last, data = next(lines)
            assert (name, data["text"], data["task"]) == ("log", "a", "train")
            log(request_id, "b")
            assert next(lines)[2]["text"] == "b"
        end(request_id)
        with stream(server, path, **{"last-event-id": last}) as lines:
            assert [data.get("text") for _, _, data in lines] == ["b", None]
        with stream(server, f"{path}?tail=1") as lines:
            assert [data.get("text") for _, _, data in lines] == ["b", None]


class TestWait:
    def test_wait_answers_when_the_request_changes(self, server, request_id, monkeypatch):
        has_read, read = threading.Event(), requests._read_and_let_go

        def reading(*given: Any) -> dict[str, Any]:
            found = read(*given)
            has_read.set()
            return found

        def change() -> None:
            assert has_read.wait(PATIENT_S)
            with transaction() as session:
                session.execute(update(Task).values(state="waiting"))
                session.execute(select(func.pg_notify(CHANNEL, f"ten_red {request_id}")))

        monkeypatch.setattr(requests, "_read_and_let_go", reading)
        with server.client() as client:
            changing = threading.Thread(target=change)
            changing.start()
            began_s = time.monotonic()
            answer = client.get(f"/v1/requests/{request_id}", params={"wait": "55s"})
            took_s = time.monotonic() - began_s
            changing.join()
        assert answer.json()["tasks"][0]["state"] == "waiting"
        assert took_s < 50.0

    def test_wait_answers_after_its_time_without_a_change(self, server, request_id):
        with server.client() as client:
            began_s = time.monotonic()
            answer = client.get(f"/v1/requests/{request_id}", params={"wait": "0.5"})
            assert answer.json()["state"] == "queued"
            assert time.monotonic() - began_s > 0.4

    def test_wait_for_an_ended_request_answers_at_once(self, server, request_id):
        end(request_id)
        with server.client() as client:
            began_s = time.monotonic()
            client.get(f"/v1/requests/{request_id}", params={"wait": "55s"}).raise_for_status()
            assert time.monotonic() - began_s < 50.0

    def test_many_waiting_calls_do_not_use_up_the_connections(self, server, request_id):
        """More of them than the pool has connections."""
        waiting = [
            threading.Thread(target=self._wait, args=(server, request_id)) for _ in range(20)
        ]
        for thread in waiting:
            thread.start()
        _until_waiting(request_id, len(waiting))
        with server.client() as client:
            client.get("/v1/me").raise_for_status()
        assert all(thread.is_alive() for thread in waiting)
        end(request_id)
        for thread in waiting:
            thread.join()

    def _wait(self, server: Server, request_id: str) -> None:
        with server.client() as client:
            client.get(f"/v1/requests/{request_id}", params={"wait": "55s"}).raise_for_status()


class TestTwins:
    def test_of_two_simultaneous_calls_with_one_key_one_submits(self, server, request_id):
        answers: list[Any] = []

        def submit() -> None:
            with server.client() as client:
                headers = {"Idempotency-Key": "once"}
                answers.append(client.post("/v1/requests", json=descriptor(), headers=headers))

        twins = [threading.Thread(target=submit) for _ in range(6)]
        for twin in twins:
            twin.start()
        for twin in twins:
            twin.join()
        assert [answer.status_code for answer in answers] == [202] * 6
        assert all(answer.json() == answers[0].json() for answer in answers)
        assert sum("idempotency-replayed" in answer.headers for answer in answers) == 5
        with transaction() as session:
            assert session.scalar(select(func.count()).select_from(Request)) == 2
