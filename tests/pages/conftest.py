"""A database of its own, the real service on a real port, and a real browser."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from sqlalchemy import URL, Engine, create_engine, func, make_url, select, text, update
from sqlalchemy.orm import Session

from app.core.webhooks.message_bodies import TYPES
from app.data import datablocks
from app.db.ids import new_id
from app.db.models import (
    Cycle,
    Decision,
    Device,
    Environment,
    LogLine,
    Metric,
    Mount,
    RequestNeed,
    Reservation,
    ReservationWindow,
    Secret,
    Task,
    Usage,
    Webhook,
)
from app.insight import reports
from app.messaging import webhooks
from app.scheduling import journal
from tests.conftest import Servers, migrate
from tests.scenery import Scenery

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 60_000  # of every wait: long, as only a test that fails waits so long
expect.set_options(timeout=PATIENCE_MS)
HEAR = """window.heard = new Promise(heard => document.getElementById("stream")
    .addEventListener("changed", () => heard("changed"), { once: true })); null"""
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True, kw_only=True)
class Service:
    """The running service and what was put into it.

    a holds d0 and has three tasks waiting; b holds d1; c has no work.  `tracked` is the task of a
    that runs, with metrics, log lines and usage; `foreign` is the one of b.  `member` is the user
    of a, and `hook` its webhook.
    """

    url: str
    engine: Engine
    keys: dict[str, str]
    tracked: Task
    foreign: Task
    waiting: tuple[Task, ...]
    member: str
    hook: str

    @contextmanager
    def change(self) -> Iterator[Session]:
        """A transaction as the island makes them: open pages are told at its commit."""
        with Session(self.engine) as session, session.begin():
            yield session
            journal.settle(session)

    @property
    def pages(self) -> tuple[str, ...]:
        request = f"/ui/requests/{self.tracked.request_id}"
        lists = ("/ui/requests", "/ui/queue", "/ui/datablocks", "/ui/environments", "/ui/secrets")
        runs = f"/ui/compare?run={self.tracked.id}&run={self.waiting[0].id}"
        again, log = f"{request}/again", f"{request}/log?times=yes"
        more = ("/ui/reservations", runs, again, log, "/ui/requests/none", "/docs")
        return ("/ui/", "/ui/?window=1h", *lists, request, *more)

    @property
    def admins_pages(self) -> tuple[str, ...]:
        member, hook = f"/ui/members/{self.member}", f"/ui/webhooks/{self.hook}"
        return (
            "/ui/tenants",
            f"/ui/tenants/{self.tracked.tenant_id}",
            "/ui/members",
            member,
            "/ui/channels",
            "/ui/webhooks",
            hook,
            "/ui/audit",
            "/ui/decisions",
        )

    @property
    def platform_pages(self) -> tuple[str, ...]:
        return (*self.admins_pages, "/ui/devices", "/ui/reservations")


@pytest.fixture(scope="module")
def service(servers: Servers) -> Iterator[Service]:
    with _database(servers.database_url) as engine, _listening() as listener:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            scene = _fill(session)
        host, port = listener.getsockname()
        with _running(engine.url, listener):
            yield Service(url=f"http://{host}:{port}", engine=engine, **scene)


@contextmanager
def _database(beside: str) -> Iterator[Engine]:
    """An empty database on the same server, with the newest schema."""
    server = make_url(beside)
    url = server.set(database=f"rh_pages_{os.getpid()}")
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f'create database "{url.database}"'))
    engine = create_engine(url)
    try:
        migrate(url.render_as_string(hide_password=False))
        yield engine
    finally:
        engine.dispose()
        with admin.connect() as connection:
            connection.execute(text(f'drop database "{url.database}" with (force)'))
        admin.dispose()


@contextmanager
def _listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@contextmanager
def _running(url: URL, listener: socket.socket) -> Iterator[None]:
    number = str(listener.fileno())
    command = [sys.executable, "-m", "uvicorn", "app.main:app", "--fd", number]
    quiet = ["--log-level", "warning", "--timeout-graceful-shutdown", "3"]
    process = subprocess.Popen(
        command + quiet, cwd=ROOT, env=_environment(url), pass_fds=[listener.fileno()]
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _environment(url: URL) -> dict[str, str]:
    return {**os.environ, "DATABASE_URL": url.render_as_string(hide_password=False)}


def _fill(session: Session) -> dict[str, Any]:
    scenery = Scenery(session)
    a, b = scenery.tenant("a"), scenery.tenant("b")
    scenery.tenant("c", 2000)
    scenery.device("d0"), scenery.device("d1")
    tracked = scenery.task(a, "running", seat="d0", name="train", step=40, metrics={"loss": 0.25})
    foreign = scenery.task(b, "running", seat="d1", name="secret")
    waiting = tuple(scenery.task(a, name=f"next{n}") for n in (1, 2, 3))
    for n, awaited in enumerate(("done", "started")):  # two requests come after the first
        whose = {"task_id": waiting[n].id, "needs_request_id": tracked.request_id}
        need = {"name": "train", "awaited": awaited, "otherwise": "hold", "outcome": "met"}
        session.add(RequestNeed(**whose, **need))
    scenery.charge(tracked, 30 * 10**6)
    scenery.charge(foreign, 70 * 10**6)
    for step in range(0, 40, 2):
        session.add(Metric(task_id=tracked.id, step=step, values={"loss": 1 / (1 + step)}))
        line = {"task_id": tracked.id, "epoch": 1, "line": step, "stream": "stdout"}
        session.add(LogLine(**line, text=f"step {step} " + "x" * 200))
    session.add(Mount(name="pictures", path="/data/pictures", tenants=[a.id]))
    session.add(Mount(name="hidden", path="/data/hidden", tenants=[b.id]))
    session.add(Mount(name="debian", path="/images/debian", sort="image", tenants=[a.id]))
    session.add(Mount(name="hidden-too", path="/images/x", sort="image", tenants=[b.id]))
    _folder(session, tracked)
    for task, name in ((tracked, "faces"), (foreign, "theirs")):
        _datablocks(session, task, name)
        _environments(session, task, name)
    now = reports.clock(session)
    for back in range(1, 60):
        held = {"held_us": 4 * 10**6, "charged_us": 4 * 10**6, "bucket_s": 10, "kind": "cpu"}
        at = (now - timedelta(seconds=10 * back)).replace(microsecond=0)
        whole = at - timedelta(seconds=at.second % 10)
        owner = {"tenant_id": a.id, "user_id": tracked.user_id}
        session.merge(Usage(bucket=whole, **owner, **held))
    keys = {
        "a": scenery.key(a, "member"),
        "a admin": scenery.key(a, "tenant_admin"),
        "b": scenery.key(b, "viewer"),
        "admin": scenery.key(scenery.root, "platform_admin"),
        "root": scenery.key(scenery.root, "member"),
    }
    cycle = scenery.add(Cycle(island="isle", now_s=0.0, snapshot={}))
    what = {"move": "launch", "rule": "F3", "because": "It was next, by its tenant's score."}
    whose = {"cycle_id": cycle.id, "task_id": tracked.id, "tenant_id": a.id}
    scenery.add(Decision(**whose, **what, devices=["d0"]))
    hook = _webhook(session, a.id, tracked.request_id)
    _channels(session, a.id, b.id)
    _reservations(session, a.id, b.id)
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        whose = {"tenant_id": tracked.tenant_id, "key_id": "k", "encrypted": b"", "set_by": ""}
        session.add(Secret(id=new_id("sct"), name=name, **whose))
    made = {"tracked": tracked, "foreign": foreign, "waiting": waiting}
    return {"keys": keys, "member": tracked.user_id, "hook": hook, **made}


def _webhook(session: Session, tenant_id: str, request_id: str) -> str:
    """One of the tenant, to which three messages were written, each with another end."""
    url = "https://hooks.example.org/roundhouse"
    whose = {"id": new_id("whk"), "tenant_id": tenant_id, "url": url}
    hook = Webhook(**whose, events=list(TYPES), secret=webhooks.new_secret())
    session.add(hook)
    session.flush()
    tried = {"at": "2026-11-21T12:00:00+00:00", "error": "", "took_us": 41_000}
    refused = {**tried, "status": None, "error": "there was no answer within 15 s"}
    for state, status in (("delivered", 204), ("given_up", 503), ("pending", 500)):
        delivery = webhooks.try_out(session, hook)
        delivery.request_id, delivery.state = request_id, state
        delivery.attempts = [refused, {**tried, "status": status}]
        delivery.due_at = func.now() + timedelta(hours=1)
    session.flush()
    return hook.id


def _channels(session: Session, tenant_id: str, other_id: str) -> None:
    """Channels with each end of their last message, one that nothing was sent to, one refused."""
    tried = {"at": "2026-11-21T12:00:00+00:00", "status": 503, "error": "", "took_us": 41_000}
    ends = ("delivered", "given_up", "pending", "", "refused")
    sealed = {"key_id": "k", "encrypted": b"", "secret": webhooks.new_secret()}
    for kind, end in zip(("slack", "teams", "mail", "webhook", "slack"), ends, strict=True):
        name = f"{kind}-{end or 'unused'}"
        channel = Webhook(id=new_id("chn"), tenant_id=tenant_id, name=name, kind=kind, **sealed)
        channel.url = f"channel:{name}"
        session.add(channel)
        session.flush()
        if end == "refused":
            channel.disabled_at = func.now()
        elif end:
            delivery = webhooks.try_out(session, channel)
            delivery.state, delivery.attempts = end, [tried]
    whose = {"id": new_id("chn"), "tenant_id": other_id, "name": "theirs", "kind": "slack"}
    session.add(Webhook(**whose, url="channel:theirs", **sealed))
    session.flush()


def _reservations(session: Session, tenant_id: str, other_id: str) -> None:
    """A reservation that repeats, one of another tenant, and maintenance."""
    session.execute(update(Device).values(seen_at=func.now()))
    device = session.scalars(select(Device).order_by(Device.id)).first()
    assert device is not None
    now = session.scalar(select(func.now()))
    assert now is not None
    long = "a-workshop-with-a-long-name"
    for owner, name, windows in ((tenant_id, long, 3), (other_id, "theirs", 1), (None, "disks", 1)):
        first = now + timedelta(days=2)
        it = Reservation(
            id=new_id("rsv"),
            name=name,
            island=device.island,
            tenant_id=owner,
            devices={device.kind: 1},
            device_ids=[] if owner else [device.id],
            begins_at=first,
            ends_at=first + timedelta(hours=8),
            note="Before the deadline",
        )
        session.add(it)
        session.flush()
        for n in range(windows):
            at = first + n * timedelta(days=7)
            times = {"begins_at": at, "ends_at": at + timedelta(hours=8)}
            session.add(ReservationWindow(reservation_id=it.id, **times))
    session.flush()


def _environments(session: Session, task: Task, name: str) -> None:
    """Two environments: one that is locked and lies on a host, and one that failed."""
    whose = {"tenant_id": task.tenant_id, "user_id": task.user_id, "sort": "requirements"}
    packages = [[f"package-{n}", f"1.{n}"] for n in range(6)]
    locked = {"state": "locked", "lock_sha256": "5" * 64, "platform": {"torch": "2.13.0"}}
    failed = {"state": "failed", "message": "castles was not found\nhint: none"}
    for n, more in enumerate(({**locked, "packages": packages}, failed)):
        path = f"{name}/requirements.txt"
        more = {**whose, **more, "python": "3.11", "alone": False, "source_sha256": str(n)}
        session.add(Environment(id=new_id("env"), path=path, **more))
    for device in session.scalars(select(Device)):
        device.facts = {**device.facts, "environments": {"5" * 64: [4096, 1_500_000]}}


def _folder(session: Session, task: Task) -> None:
    summary = {"format": "folder", "tensors": [], "tensor_count": 0}
    whose = {"tenant_id": task.tenant_id, "user_id": task.user_id, "name": "corpus"}
    new = datablocks.New(**whose, sha256="2" * 64, size_bytes=300, summary=summary)
    row = datablocks.added(session, new)
    row.file_count, row.file_bytes = 1200, 5000


def _datablocks(session: Session, task: Task, name: str) -> None:
    """Two versions: one that was uploaded, and one that this task published."""
    listed = [{"name": f"t{n}", "dtype": "float32", "shape": [64, n]} for n in range(5)]
    summary = {"format": "safetensors", "tensors": listed, "tensor_count": 5}
    whose = {"tenant_id": task.tenant_id, "user_id": task.user_id, "name": name}
    for n, more in enumerate(({}, {"task_id": task.id, "output": "y"})):
        kept = {"sha256": f"{n}" * 64, "size_bytes": 4000 + n, "summary": summary}
        row = datablocks.added(session, datablocks.New(**whose, **kept, **more))
        datablocks.use(session, task.id, {f"x{n}": row})


# --- the browser --------------------------------------------------------------------------------


def _chromium() -> str | None:
    """One that is on the PATH; None stands for playwright's own."""
    return next(filter(None, map(shutil.which, CHROMIUMS)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page in a browser of its own; keeps what it asked for and what it complained of."""

    def __init__(self, page: Page, service: Service) -> None:
        self.page, self.service = page, service
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._hear)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def go(self, path: str) -> None:
        self.page.goto(self.service.url + path)

    def documented(self) -> None:
        """Wait until the page of the API has read and drawn the document."""
        self.page.locator(".opblock-tag").first.wait_for()

    def type_key(self, who: str) -> None:
        """Sign in without a mouse: the field has the focus once the page was drawn."""
        expect(self.page.get_by_label("API key")).to_be_focused()
        self.page.keyboard.type(self.service.keys[who])
        self.page.keyboard.press("Enter")

    def sign_in(self, who: str) -> None:
        self.go("/ui/login")
        self.page.get_by_label("API key").fill(self.service.keys[who])
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url("**/ui/")

    def live(self) -> None:
        """Wait until the page listens."""
        self.page.locator("#stream[data-state=live]").wait_for()
        self.page.evaluate(HEAR)

    def hear(self) -> None:
        """Wait until the stream, and not only the fetch of each 10 s, tells of a change."""
        late = f"new Promise(late => setTimeout(late, {PATIENCE_MS}, 'late'))"
        assert self.page.evaluate(f"Promise.race([window.heard, {late}])") != "late"

    def api(self, path: str) -> Any:
        """What the API says to this browser's session."""
        answer = self.page.request.get(self.service.url + path)
        assert answer.ok, answer.text()
        return answer.json()


@pytest.fixture
def visit(browser: Browser, service: Service, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """An indirect parameter gives options of the browser context, such as its size."""
    context = browser.new_context(**getattr(request, "param", {}))
    context.set_default_timeout(PATIENCE_MS)
    yield Visit(context.new_page(), service)
    context.close()
