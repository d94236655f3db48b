"""No flood of one key takes the API's connections, threads and streams away from others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from contextvars import ContextVar
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import event

from app.api.access.gate import Gate
from app.api.access.gate import gate as gate_of_loop
from app.db import transactions
from app.errors import Unavailable
from app.main import create_app
from app.settings import settings
from tests.app.conftest import BUNDLE, World, descriptor, people, problem, sha256
from tests.serving import Server, server

__all__ = ["server"]  # a fixture

pytestmark = pytest.mark.security

STREAMS = 4
OPENED = 12


# --- one hop --------------------------------------------------------------------------------------

_hop: ContextVar[object] = ContextVar("hop")


@pytest.fixture
def carried(committed: None) -> list[str]:
    """Record statements after which a connection was returned in another hop than it was taken in.

    A hop is a piece of work of a thread, with its own copy of the context.
    """
    found: list[str] = []
    said: dict[int, str] = {}

    def taken(connection: Any, record: Any, proxy: Any) -> None:
        record.info["hop"] = object()
        _hop.set(record.info["hop"])

    def given_back(connection: Any, record: Any) -> None:
        if _hop.get(None) is not record.info.pop("hop", None):
            found.append(said.get(id(connection), "nothing"))

    def note(_: Any, cursor: Any, statement: str, *__: Any) -> None:
        said[id(cursor.connection)] = statement

    engine = transactions.engine()
    event.listen(engine, "checkout", taken)
    event.listen(engine, "checkin", given_back)
    event.listen(engine, "before_cursor_execute", note)
    return found


@pytest.fixture
def people_there(committed: None) -> World:
    with transactions.transaction() as session:
        return people(session)


def _paths(app: FastAPI) -> list[str]:
    """Return the paths of all operations that read and need no id."""
    paths = app.openapi()["paths"]
    return sorted(path for path, known in paths.items() if "get" in known and "{" not in path)


def test_connection_of_every_call_is_given_back_within_the_hop_that_took_it(carried, people_there):
    app = create_app()
    member = {"Authorization": f"Bearer {people_there.keys['red.member']}"}
    root = {"Authorization": f"Bearer {people_there.keys['root']}"}
    with TestClient(app, follow_redirects=False) as client:
        assert client.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE, headers=member)
        made = client.post("/v1/requests", json=descriptor(), headers=member)
        request = f"/v1/requests/{made.json()['id']}"
        for path in _paths(app):
            assert client.get(path, headers=root).status_code < 500 or path == "/readyz", path
        for tail in ("", "?wait=0.1", "/plan", "/events", "/logs", "/logs/text"):
            assert client.get(request + tail, headers=member).status_code == 200, tail
        for refused in ("/v1/requests/req_no", "/v1/tasks/no", "/v1/requests?state=odd"):
            assert client.get(refused, headers=member).status_code in (404, 422)
        assert client.post("/v1/requests", json={}, headers=member).status_code == 422
        assert client.patch(request, json={"priority": 1}, headers=member).status_code == 200
        assert client.post(f"{request}/cancel", headers=member).status_code == 202
        assert client.get("/v1/me", headers={"Authorization": "Bearer rh_x"}).status_code == 401
        origin = {"Sec-Fetch-Site": "same-origin"}
        key = {"key": people_there.keys["red.member"]}
        assert client.post("/ui/login", data=key, headers=origin).status_code == 303
        for page in ("/ui/", "/ui/requests", "/ui/datablocks", f"/ui/requests/{made.json()['id']}"):
            assert client.get(page).status_code == 200, page
    assert carried == []


# --- streams --------------------------------------------------------------------------------------


@pytest.fixture
def few_streams(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDHOUSE_KEY_STREAMS_MAX", str(STREAMS))
    settings.cache_clear()


def test_streams_of_one_key_beyond_the_bound_are_refused_and_others_are_served(
    few_streams: None, server: Server
):
    with server.client() as member:
        member.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE).raise_for_status()
        id = member.post("/v1/requests", json=descriptor()).raise_for_status().json()["id"]
    path = f"/v1/requests/{id}/events/stream"
    with server.client("red.viewer") as viewer, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(viewer.stream("GET", path)) for _ in range(OPENED)]
        assert sorted(one.status_code for one in opened) == [200] * STREAMS + [429] * (
            OPENED - STREAMS
        )
        refused = next(one for one in opened if one.status_code == 429)
        refused.read()
        problem(refused, 429, "rate-limited")
        assert int(refused.headers["retry-after"]) > 0
        with server.client("blue.viewer") as other, server.client() as member:
            assert other.get("/v1/me").status_code == 200
            with member.stream("GET", path) as own:
                assert own.status_code == 200
        _wait_until_idle()
    with server.client("red.viewer") as viewer:
        until_s = time.monotonic() + 60
        while (status := _status(viewer, path)) == 429 and time.monotonic() < until_s:
            pass
        assert status == 200


def _status(client: httpx2.Client, path: str) -> int:
    with client.stream("GET", path) as answer:
        return answer.status_code


def _wait_until_idle() -> None:
    """Wait until no connection is held: open streams hold none once they have read all there is."""
    until_s = time.monotonic() + 60
    while (held := transactions.engine().pool.checkedout()) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert held == 0


# --- when all is taken ----------------------------------------------------------------------------


def test_livez_answers_and_others_are_refused_when_every_connection_is_taken(server: Server):
    taken = [
        transactions.engine().connect()
        for _ in range(transactions.POOL_SIZE + transactions.POOL_EXTRA)
    ]
    try:
        answers: dict[str, httpx2.Response] = {}

        def ask(path: str) -> None:
            with server.client("blue.viewer") as client:
                answers[path] = client.get(path)

        threads = [threading.Thread(target=ask, args=(path,)) for path in ("/v1/me", "/readyz")]
        for thread in threads:
            thread.start()
        while True:  # as long as the others wait
            ask("/livez")
            assert answers["/livez"].status_code == 200
            if not any(thread.is_alive() for thread in threads):
                break
        for thread in threads:
            thread.join()
    finally:
        for connection in taken:
            connection.close()
    problem(answers["/v1/me"], 503, "unavailable")
    assert int(answers["/v1/me"].headers["retry-after"]) > 0
    assert answers["/readyz"].status_code == 503


# --- the gate -------------------------------------------------------------------------------------


def test_gate_with_a_flood_of_one_tenant_admits_another_tenant_next():
    async def scene() -> list[str]:
        gate, order = Gate(width=2, share=2), []

        async def call(whose: str) -> None:
            async with gate.entered(whose, wait_s=60):
                order.append(whose)
                await asyncio.sleep(0)

        flood = [asyncio.create_task(call("red")) for _ in range(50)]
        await asyncio.sleep(0)
        other = asyncio.create_task(call("blue"))
        await asyncio.gather(*flood, other)
        return order

    order = asyncio.run(scene())
    assert len(order) == 51
    assert order.index("blue") < 10


def test_gate_leaves_room_for_others_beyond_the_share_of_one_tenant():
    async def scene() -> None:
        gate = Gate(width=4, share=2)
        async with gate.entered("red"), gate.entered("red"):
            with pytest.raises(Unavailable):
                async with gate.entered("red", wait_s=0.01):
                    pass
            async with gate.entered("blue", wait_s=60), gate.entered("green", wait_s=60):
                pass

    asyncio.run(scene())


def test_gate_forgets_callers_that_went_away():
    async def scene() -> None:
        gate = Gate(width=1, share=1)
        async with gate.entered("red"):
            waiting = [asyncio.create_task(_enter(gate, "blue")) for _ in range(3)]
            await asyncio.sleep(0)
            waiting[0].cancel()
            waiting[1].cancel()
        waiting[2].cancel()  # it was admitted a moment ago
        await asyncio.gather(*waiting, return_exceptions=True)
        async with gate.entered("green", wait_s=60):
            pass
        assert not gate._waiting
        assert not gate._inside

    asyncio.run(scene())


async def _enter(gate: Gate, whose: str) -> None:
    async with gate.entered(whose, wait_s=60):
        pass


def test_gate_is_one_for_each_event_loop():
    async def scene() -> bool:
        return gate_of_loop() is gate_of_loop()

    assert asyncio.run(scene())


# --- calls at once --------------------------------------------------------------------------------


def test_calls_of_one_key_beyond_the_bound_are_refused_while_others_are_under_way(
    environment: None, monkeypatch: pytest.MonkeyPatch, server: Server
):
    with server.client() as member:
        member.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE).raise_for_status()
        id = member.post("/v1/requests", json=descriptor()).raise_for_status().json()["id"]
        monkeypatch.setenv("ROUNDHOUSE_KEY_CALLS_MAX", "2")
        settings.cache_clear()
        path = f"/v1/requests/{id}/events/stream"
        with member.stream("GET", path), member.stream("GET", path):
            answer = member.get("/v1/me")
            problem(answer, 429, "rate-limited")
            assert int(answer.headers["retry-after"]) > 0
            assert answer.headers["x-request-id"]
            assert member.get("/livez").status_code == 200
            with server.client("red.viewer") as other:
                assert other.get("/v1/me").status_code == 200


@pytest.fixture
def stream(server: Server) -> str:
    """Return the path of a stream that does not end, of the tenant red."""
    with server.client() as member:
        member.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE).raise_for_status()
        id = member.post("/v1/requests", json=descriptor()).raise_for_status().json()["id"]
    return f"/v1/requests/{id}/events/stream"


def _bounded(monkeypatch: pytest.MonkeyPatch, **bounds: int) -> None:
    for name, most in bounds.items():
        monkeypatch.setenv(f"ROUNDHOUSE_{name}", str(most))
    settings.cache_clear()


def test_calls_of_all_keys_of_a_tenant_are_bounded_together(
    server: Server, stream: str, monkeypatch: pytest.MonkeyPatch
):
    _bounded(monkeypatch, TENANT_CALLS_MAX=2)
    with server.client() as member, server.client("red.viewer") as viewer:
        with member.stream("GET", stream), viewer.stream("GET", stream):
            for one in (member, viewer):
                answer = one.get("/v1/me")
                problem(answer, 429, "rate-limited")
                assert "your tenant has 2 calls" in answer.json()["detail"]
                assert answer.headers["connection"] == "close"
            with server.client("blue.viewer") as other:
                assert other.get("/v1/me").status_code == 200
        assert _answers_again(member)


def test_calls_whose_keys_were_new_do_not_count_for_their_address(
    server: Server, stream: str, monkeypatch: pytest.MonkeyPatch
):
    """Behind a proxy all callers may have one address."""
    _bounded(monkeypatch, KEY_CALLS_MAX=1)
    with server.client("red.viewer") as viewer, viewer.stream("GET", stream):
        problem(viewer.get("/v1/me"), 429, "rate-limited")
        with server.client("blue.viewer") as other:
            assert other.get("/v1/me").status_code == 200
            assert httpx2.get(f"{server.url}/v1/me").status_code == 401


def test_streams_of_all_keys_of_a_tenant_are_half_of_all_at_most(
    server: Server, stream: str, monkeypatch: pytest.MonkeyPatch
):
    _bounded(monkeypatch, STREAMS_MAX=4)
    with (
        server.client() as member,
        server.client("red.viewer") as viewer,
        member.stream("GET", stream),
        viewer.stream("GET", stream),
    ):
        refused = viewer.get(stream)
        problem(refused, 429, "rate-limited")
        assert "Your tenant has 2 open streams" in refused.json()["detail"]


def _answers_again(client: httpx2.Client) -> bool:
    until_s = time.monotonic() + 60
    while client.get("/v1/me").status_code == 429 and time.monotonic() < until_s:
        time.sleep(0.01)
    return client.get("/v1/me").status_code == 200
