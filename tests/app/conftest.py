"""A world with two tenants, and clients that speak as the people in it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import func, text
from sqlalchemy.orm import Session

from app.api import probes
from app.api.access import auth
from app.core.security.grants import ROLES
from app.db import gc_freeze
from app.db.models import ApiKey, Base, Device, Host, Island, Tenant, User
from app.db.transactions import transaction
from app.identity import rate_limits
from app.main import create_app
from tests.app import answer_keys

JOB = """
class Train:
    def __init__(self, ctx, *, steps=3):
        self.steps = steps

    def step(self, ctx):
        if ctx.step == self.steps:
            ctx.finish({"steps": ctx.step})


def encode(ctx, x):
    return {"h": x}


class NoJob:
    pass
"""


def zipped(**files: str | bytes) -> bytes:
    """A zip of files; `__` in a name stands for `/`, and `.py` is added."""
    return zipped_as({f"{name.replace('__', '/')}.py": body for name, body in files.items()})


def zipped_as(files: dict[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return out.getvalue()


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


BUNDLE = zipped(train=JOB)


def descriptor(**more: Any) -> dict[str, Any]:
    """One task that runs `train:Train` of BUNDLE."""
    tasks = [{"name": "train", "run": {"job": "train:Train"}}]
    return {"tasks": tasks, "bundle": f"sha256:{sha256(BUNDLE)}", **more}


@dataclass
class World:
    """Keys and users by name: `root`, and `<tenant>.<role>` of the tenants red and blue."""

    keys: dict[str, str] = field(default_factory=dict)
    users: dict[str, str] = field(default_factory=dict)
    tenants: dict[str, str] = field(default_factory=dict)


_ROLE_OF = {
    "root": "platform_admin",
    **{f"{tenant}.{role}": role for tenant in ("red", "blue") for role in ROLES[1:]},
    "red.other": "member",
}


def people(session: Session) -> World:
    """Fill an empty database, each table by one statement: most tests of the API begin with it."""
    world = World()
    for name, parent, tier in (
        ("platform", None, "premium"),
        ("red", "ten_root", "standard"),
        ("blue", "ten_root", "standard"),
    ):
        id = world.tenants[name] = f"ten_{name}" if parent else "ten_root"
        session.add(Tenant(id=id, name=name, parent_id=parent, tier=tier))
    session.flush()
    for name in _ROLE_OF:
        id = world.users[name] = f"usr_{name}"
        session.add(User(id=id, tenant_id=f"ten_{name.partition('.')[0]}", name=name))
    session.flush()
    made = _Gathered()
    for name, role in _ROLE_OF.items():
        world.keys[name] = auth.new_key(made, world.users[name], role, "a test")
    session.add_all(ApiKey(**_columns(key)) for key in made.new)
    session.add(Island(name="isle"))
    session.flush()
    session.add(Host(name="h", island="isle"))
    session.flush()
    lease = func.now() + timedelta(hours=1)
    for n in (0, 1):
        facts = {"sandbox": "off"}
        session.add(
            Device(
                id=f"h.{n}", host="h", island="isle", kind="cpu", memory_bytes=2**30,
                lease_until=lease, facts=facts,
            )
        )  # fmt: skip
    return world


def _columns(key: ApiKey) -> dict[str, Any]:
    return {name: getattr(key, name) for name in ("id", "user_id", "role", "name", "secret_sha256")}


class _Gathered(Session):
    """Holds what is added to it, and writes nothing."""

    def flush(self, objects: Any = None) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def what_is_spared_stays_spared() -> Iterator[None]:
    """A scheduler spares its board from garbage collection, and no object of an earlier test anew.

    To scan them all again would take most of the time of a test that starts one.
    """
    with mock.patch.object(gc_freeze, "spare_anew", gc_freeze.spare):
        yield


@pytest.fixture(scope="session", autouse=True)
def answers_have_the_fields_of_their_models() -> Iterator[None]:
    with answer_keys.checked():
        yield


@pytest.fixture(autouse=True)
def calls_of_a_test_share_an_event_loop() -> Iterator[None]:
    """Each call of a `TestClient` would start a thread, an event loop and a pool of threads."""
    started, lock = list[BlockingPortal](), threading.Lock()

    @contextlib.contextmanager
    def portal_of_the_test(client: TestClient) -> Iterator[BlockingPortal]:
        with lock:
            if not started:
                started.append(loop.enter_context(start_blocking_portal()))
        yield client.portal or started[0]

    with (
        contextlib.ExitStack() as loop,
        mock.patch.object(TestClient, "_portal_factory", portal_of_the_test),
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def servers_may_be_late() -> Iterator[None]:
    """A call waits for Postgres and Redis as long as a busy machine needs."""
    with (
        mock.patch.object(probes, "READY_S", 60.0),
        mock.patch.object(probes, "REDIS_TIMEOUT_S", 60.0),
        mock.patch.object(rate_limits, "TIMEOUT_S", 30.0),
    ):
        yield


@pytest.fixture
def world(session: Session) -> World:
    with transaction() as its:
        return people(its)


@pytest.fixture(scope="session")
def app() -> FastAPI:
    return create_app()


Speaker = Callable[[str], TestClient]


@pytest.fixture
def as_(app: FastAPI, world: World) -> Speaker:
    """`as_("red.member").get(...)`; `as_("")` is anonymous."""

    def speaker(name: str) -> TestClient:
        headers = {"Authorization": f"Bearer {world.keys[name]}"} if name else {}
        return TestClient(app, headers=headers, follow_redirects=False)

    return speaker


@pytest.fixture
def red(as_: Speaker) -> TestClient:
    """A member of red, who has uploaded BUNDLE."""
    client = as_("red.member")
    assert client.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE).status_code == 201
    return client


@pytest.fixture
def submitted(red: TestClient) -> dict[str, Any]:
    """A request of red's member."""
    answer = red.post("/v1/requests", json=descriptor())
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def rows(session: Session) -> Callable[[], dict[str, str]]:
    """A fingerprint of every table, to compare before and after."""
    return lambda: fingerprints(session)


def fingerprints(session: Session) -> dict[str, str]:
    digest = "count(*) || ' ' || md5(coalesce(string_agg(t::text, ',' order by t::text), ''))"
    tables = (table.name for table in Base.metadata.sorted_tables)
    found = session.execute(
        text(" union all ".join(f"select '{name}', {digest} from {name} t" for name in tables))
    )
    return {name: told for name, told in found}


def problem(answer: Any, status: int, type_: str, pointer: str | None = None) -> dict[str, Any]:
    """Checks that the answer is this problem, pointing there; returns its body."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["type"] == f"/problems/{type_}"
    assert body["status"] == status
    assert body["request_id"] == answer.headers["x-request-id"]
    if pointer is not None:
        assert pointer in [error["pointer"] for error in body.get("errors", [])], body
    return body


def broken(app: FastAPI, key: str, url: str, body: bytes, start: int, upto: int) -> None:
    """PUT the bytes from `start` on, and break off after `upto`; as a server would tell it."""
    path, _, query = url.partition("?")
    headers = {
        "host": "testserver",
        "authorization": f"Bearer {key}",
        "content-length": str(len(body) - start),
        "content-range": f"bytes {start}-{len(body) - 1}/{len(body)}",
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "PUT",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("testclient", 1),
        "server": ("testserver", 80),
        "state": {},
    }
    pieces = [body[at : min(at + 65_536, upto)] for at in range(start, upto, 65_536)]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.disconnect"})

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        pass

    asyncio.run(app(scope, receive, send))
