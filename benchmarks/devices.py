"""Measure what many devices cost their island, by unchanged heartbeats and by ends of tasks.

    python -m benchmarks.devices [--quick]

The island is a scheduler in a process of its own, as in service. Its devices are played. They
consist of heartbeats, sealed and sent through Redis every 2 s or at the pace of the island, and
they obey Launch orders that come back through Redis. Each device has one running task, whose held
time and steps grow. So an unchanged heartbeat reports no event, only progress. Then all tasks end
at once, while as many others wait.

Processor time is that of the island's process: it reads, records and answers. The length of a round
is an upper bound, as the island counts its rounds in classes of lengths.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis
from sqlalchemy import text

from app.core.device.sent_reports import SentReports
from app.core.model.protocol.messages import (
    Alive,
    Event,
    Finished,
    LogLines,
    Pulse,
    ResidentView,
    Saved,
    Started,
    decode,
)
from app.db import transactions
from app.db.models import Island
from app.insight.counters import ROUND_BOUNDS_S, ROUNDS, ROUNDS_US, WRITTEN_EVERY_S
from app.local import seed
from app.local.embedded_servers import embedded_postgres, embedded_redis, temporary_home
from app.messaging import broker, outbox
from app.messaging.message_keys import MessageKeys
from app.messaging.signed_messages import SIGNS_AFTER_S, USUAL_BEAT_S, sealed_heartbeat
from app.settings import settings
from app.storage.signing import NEWS, Signer
from benchmarks import Target, quick, report
from benchmarks.idle import own_s
from workers.device.heartbeat import Rhythm

ISLAND, TENANTS = "isle", 1000
BEAT_S = 2.0
TICKS = 20  # number of parts of a beat: in each, the devices of one part send their heartbeats
LISTENS_AFTER = 5  # ticks after its heartbeat in which a device reads its queue
FIRST_LIMIT_S = 600.0  # until all first tasks run

FILL = """
insert into islands (name) values ('isle') on conflict do nothing;
insert into tenants (id, name) values ('root', 'platform');
insert into tenants (id, name, parent_id) select 't' || n, 'tenant ' || n, 'root'
  from generate_series(1, {tenants}) n;
insert into users (id, tenant_id, name) select 'u' || n, 't' || n, 'user'
  from generate_series(1, {tenants}) n;
insert into enrolments (device_id, key, enrolled_by) select 'h.' || n, '{key}', 'benchmark'
  from generate_series(0, {devices} - 1) n;
insert into requests (id, tenant_id, user_id, name, state, descriptor)
  select 'r' || n, 't' || n, 'u' || n, 'request', 'queued', '{{"bundle": "sha256:{zeros}"}}'
  from generate_series(1, {tenants}) n;
insert into tasks (id, request_id, tenant_id, user_id, island, ordinal, name, type, kind, state,
    submitted_at, waiting_since, descriptor)
  select 'k' || n, 'r' || who, 't' || who, 'u' || who, 'isle', n / {tenants}, 'k' || n, 'train',
    'cpu', 'waiting', now(), now(),
    '{{"name": "k", "run": {{"job": "train:Train"}}, "max_duration_s": 100000, "outputs": [],
       "checkpoint": {{"every_s": 60, "keep": 3}}}}'
  from (select n, 1 + n % {tenants} as who from generate_series(1, 2 * {devices}) n) numbered;
insert into lines (island, user_id, kind, memory_bytes, width, tenant_id, waiting)
  select island, user_id, kind, memory_bytes, devices_min, min(tenant_id), count(*) from tasks
  group by 1, 2, 3, 4, 5;
"""


def main() -> int:
    sizes = {64: 20.0, 1_024: 30.0} if quick() else {64: 60.0, 1_024: 60.0, 10_240: 600.0}
    if words := [word for word in sys.argv[1:] if word.isdigit()]:  # other sizes, by hand
        sizes = {int(word): 20.0 for word in words}
    seen = {devices: _measured(devices, watch_s) for devices, watch_s in sizes.items()}
    most = max(seen)
    cpu_ms = {devices: figures["cpu_ms"] for devices, figures in seen.items()}
    targets = [
        Target(
            name=f"unchanged heartbeat of {most}, CPU ms",
            value=cpu_ms[most],
            unit="ms",
            op="<=",
            bound=0.1,
        ),
        Target(name="a round, s", value=seen[most]["longest_s"], unit="s", op="<=", bound=1.0),
        Target(name="leases lost", value=seen[most]["lost"], unit="", op="<=", bound=0),
        Target(
            name="all end, all others are launched, s",
            value=seen[most]["ends_s"],
            unit="s",
            op="<=",
            bound=30.0,
        ),
        Target(
            name="a round while all end, s",
            value=seen[most]["ends_longest_s"],
            unit="s",
            op="<=",
            bound=2.0,
        ),
    ]
    return report("devices", targets, {str(devices): figures for devices, figures in seen.items()})


def _measured(devices: int, watch_s: float) -> dict[str, float]:
    with temporary_home() as home, embedded_postgres(home) as url, embedded_redis(home) as at:
        os.environ |= {"DATABASE_URL": url, "REDIS_URL": at, "ROUNDHOUSE_ISLAND": ISLAND}
        # No task takes turns with another one: played devices obey no Pause.
        os.environ |= {"ROUNDHOUSE_HOME": str(home), "ROUNDHOUSE_SLICE_MIN_S": "1e6"}
        os.environ["ROUNDHOUSE_SLICE_MAX_S"] = "1e6"
        for cached in (settings, transactions.engine, transactions._sessions, outbox.celery):
            cached.cache_clear()
        seed.migrate()
        keys = MessageKeys(Signer.at(home / "host.key"))
        fill_island(devices, keys.public)
        try:
            with island_process(home, ISLAND) as island:
                return _watched(island, Fleet(devices, keys, at), watch_s)
        finally:
            transactions.engine().dispose()


def fill_island(devices: int, key: str) -> None:
    fill = FILL.strip().format(tenants=TENANTS, devices=devices, key=key, zeros="0" * 64)
    with transactions.transaction() as session:
        for statement in fill.rstrip(";").split(";\n"):
            session.execute(text(statement.replace(":", r"\:")))
        session.execute(text("analyze"))


@contextmanager
def island_process(home: Path, name: str) -> Iterator[psutil.Process]:
    log = home / "island.log"
    words = ["-m", "celery", "-A", "workers.control.scheduler", "worker", "--pool", "threads"]
    words += ["-c", "2", "-Q", broker.island_queue(name), "-l", "WARNING"]
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, *words], stdout=out, stderr=subprocess.STDOUT)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)
        sys.stderr.write("".join(log.read_text().splitlines(keepends=True)[-15:]))


def longest_round_s(before: Counter[str], after: Counter[str]) -> float:
    """Return a bound for the longest round between two tallies, which count rounds in classes."""
    new = Counter(after)
    new.subtract(before)
    place = max(
        int(name.removeprefix(ROUNDS)) for name in new if name.startswith(ROUNDS) and new[name]
    )
    return ROUND_BOUNDS_S[place] if place < len(ROUND_BOUNDS_S) else new[ROUNDS_US] / 1e6


def tally_of(island: str) -> Counter[str]:
    with transactions.transaction() as session:
        return Counter(session.get_one(Island, island).tally)


def _watched(island: psutil.Process, fleet: Fleet, watch_s: float) -> dict[str, float]:
    began_s = time.monotonic()
    while fleet.running() < len(fleet.devices):
        if time.monotonic() > began_s + FIRST_LIMIT_S:
            raise RuntimeError(f"only {fleet.running()} tasks run after {FIRST_LIMIT_S:g} s")
        fleet.play(1.0)
    first_s = time.monotonic() - began_s
    fleet.play(3 * BEAT_S)

    before, before_s, fleet.answers = tally_of(ISLAND), own_s(island), 0
    fleet.sent = fleet.pulses = 0
    fleet.play(watch_s)
    cpu_s, answers, middle = own_s(island) - before_s, max(1, fleet.answers), tally_of(ISLAND)
    figures = {
        "first_s": round(first_s, 1),
        "cpu_ms": round(1e3 * cpu_s / answers, 3),
        "answered": answers,
        "answered of sent": round(answers / max(1, fleet.sent), 3),
        "pulses of sent": round(fleet.pulses / max(1, fleet.sent), 3),
        "of a core": round(cpu_s / watch_s, 3),
        "beat_s": max(d.rhythm.beat_us for d in fleet.devices) / 1e6,
        "longest_s": round(longest_round_s(before, middle), 3),
        "load": round(os.getloadavg()[0], 1),
    }
    ended_s = time.monotonic()
    fleet.end_all()
    while fleet.running() < len(fleet.devices) and time.monotonic() < ended_s + FIRST_LIMIT_S:
        fleet.play(0.5)
    figures["ends_s"] = round(time.monotonic() - ended_s, 1)
    fleet.play(2 * WRITTEN_EVERY_S)  # the tally is written now and then
    figures["ends_longest_s"] = round(longest_round_s(middle, tally_of(ISLAND)), 3)
    return {**figures, "lost": _lost()}


def _lost() -> int:
    with transactions.transaction() as session:
        return int(
            session.scalar(text("select count(*) from events where type = 'task.lost'")) or 0
        )


@dataclass
class DevicePlayer:
    """Plays a device's half of the protocol, for one task at a time."""

    id: str
    facts: dict[str, Any]
    task: str = ""
    epoch: int = 0
    state: str = ""
    began_s: float = 0.0
    signs_from_s: float = -math.inf
    answered_us: int = 0  # when it sent the newest heartbeat that was answered
    rhythm: Rhythm = field(default_factory=lambda: Rhythm(int(BEAT_S * 1e6)))
    reports: SentReports = field(default_factory=SentReports)
    order_seq: int = 0
    event_seq: int = 0
    printed: int = 0  # lines of the task's log so far
    events: list[Event] = field(default_factory=list)
    logs: list[LogLines] = field(default_factory=list)

    def alive(self) -> Alive:
        now_us = time.monotonic_ns() // 1000
        self.rhythm.reported(now_us)
        return Alive(
            device=self.id,
            incarnation="p",
            sent_us=now_us,
            facts=self.facts,
            residents=[self._view()] if self.task else [],
            events=self.events,
            logs=self.logs,
        )

    def _held_us(self) -> int:
        return int((time.monotonic() - self.began_s) * 1e6)

    def _view(self) -> ResidentView:
        held_us = self._held_us()
        return ResidentView(
            task=self.task,
            epoch=self.epoch,
            state=self.state,
            step=held_us // 100_000,
            held_us=held_us,
            order_seq=self.order_seq,
            memory_bytes=0,
        )

    def hear(self, news: list[Any]) -> bool:
        """Obey the message; True if there is something to report at once."""
        is_new = False
        for one in news:
            if one["is"] == "Launch":
                is_new |= self._launch(one)
            elif one["is"] == "ReportWanted":
                self.reports.forget()
                is_new = True
            elif one["is"] == "Answer" and self.events:
                name = f"{self.task}/{self.epoch}"
                self.events = [e for e in self.events if e.seq > one["heard"].get(name, 0)]
                next_line = one["logged"].get(name, 0)
                self.logs = [lines for lines in self.logs if lines.first >= next_line]
                if self.state == "ended" and not self.events:
                    self.task = ""
        return is_new

    def _launch(self, launch: dict[str, Any]) -> bool:
        if (launch["task"], launch["epoch"]) == (self.task, self.epoch):
            return False
        self.task, self.epoch, self.order_seq = launch["task"], launch["epoch"], launch["seq"]
        self.state, self.began_s = "running", time.monotonic()
        self.event_seq, self.printed, self.events, self.logs = 0, 0, [], []
        said: dict[str, Any] = {"preset": {}, "capabilities": [], "resumed": "fresh"}
        self._say(Started, step=0, **said)
        return True

    def _say(self, kind: type[Event], **said: Any) -> None:
        self.event_seq += 1
        head: dict[str, Any] = {"task": self.task, "epoch": self.epoch, "seq": self.event_seq}
        self.events.append(kind(**head, held_us=self._held_us(), **said))

    def save(self) -> None:
        step = self._view().step
        sha256 = hashlib.sha256(f"{self.task} {step}".encode()).hexdigest()
        said: dict[str, Any] = {"size_bytes": 10**9, "new_bytes": 10**8, "took_us": 10**6}
        self._say(Saved, step=step, sha256=sha256, **said)

    def print_lines(self, count: int) -> None:
        lines = [["out", f"step {n}: loss 0.123456, 4567 tokens/s"] for n in range(count)]
        head: dict[str, Any] = {"task": self.task, "epoch": self.epoch}
        self.logs.append(LogLines(**head, first=self.printed, lines=lines))
        self.printed += count

    def end(self) -> None:
        self.state = "ended"
        self._say(Finished, step=self._view().step, result={}, outputs={})


class Fleet:
    """Plays all devices, which send and read in turns spread over the beat."""

    def __init__(self, devices: int, keys: MessageKeys, at: str) -> None:
        facts = {
            "host": "h",
            "island": ISLAND,
            "kind": "cpu",
            "threads": 1,
            "spec": True,
            "paced": True,
            "pulses": True,
        }
        facts |= {"memory_bytes": 2**30, "key": keys.public, "exchange_key": keys.announced}
        self.devices = [DevicePlayer(id=f"h.{n}", facts=facts) for n in range(devices)]
        self.keys, self.client = keys, redis.Redis.from_url(at)
        self.island = ""  # its public key, once a device has learned its exchange key
        self.tick, self.due_s, self.answers = 0, time.monotonic(), 0
        self.sent = 0  # heartbeats since they were counted last
        self.pulses, self.asked = 0, 0  # pulses of them, and requests for whole reports

    def running(self) -> int:
        """Return how many devices run a task whose start the island has acknowledged."""
        return sum(bool(d.task) and d.state == "running" and not d.events for d in self.devices)

    def end_all(self) -> None:
        for device in self.devices:
            device.end()
        self._send(self.devices)

    def play(self, for_s: float) -> None:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            at = self.tick % TICKS
            urgent = self._hear(self.devices[(at - LISTENS_AFTER) % TICKS :: TICKS])
            self._send([*urgent, *self._due(self.devices[at::TICKS])])
            self.tick += 1
            self.due_s = max(self.due_s + BEAT_S / TICKS, time.monotonic() - BEAT_S)
            time.sleep(max(0.0, self.due_s - time.monotonic()))

    def _hear(self, devices: list[DevicePlayer]) -> list[DevicePlayer]:
        pipeline = self.client.pipeline(transaction=False)
        for device in devices:
            pipeline.rpop(broker.device_queue(device.id), 100)
        urgent = []
        for device, items in zip(devices, pipeline.execute(), strict=True):
            news = [one for item in items or () for one in self._news(item)]
            for one in news:
                self.asked += one["is"] == "ReportWanted"
                if one["is"] in ("Answer", "LeaseRenewal"):
                    self.answers += 1
                    self._learn(device, one)
            if news and device.hear(news):
                urgent.append(device)
        return urgent

    def _learn(self, device: DevicePlayer, answer: dict[str, Any]) -> None:
        if answer["is"] == "Answer":
            device.reports.answered(decode(answer))
            device.rhythm.set_pace(answer.get("beat_us", 0))
        else:
            device.reports.renewed()
        device.answered_us = answer["sent_us"]
        beat_s = device.rhythm.beat_us / 1e6
        device.signs_from_s = time.monotonic() + max(beat_s, USUAL_BEAT_S) + SIGNS_AFTER_S

    def _due(self, devices: list[DevicePlayer]) -> list[DevicePlayer]:
        """Return those of which a heartbeat is due within the tick."""
        until_us = time.monotonic_ns() // 1000 + int(BEAT_S / TICKS * 1e6)
        return [d for d in devices if d.rhythm.due_us(d.answered_us) <= until_us]

    def _send(self, devices: list[DevicePlayer]) -> None:
        queue = broker.island_queue(ISLAND)
        texts = [(queue, self._sealed(device)) for device in devices]
        broker.send_all(outbox.celery(), broker.ISLAND_ALIVE, texts)
        self.sent += len(texts)

    def _sealed(self, device: DevicePlayer) -> str:
        """Seal its heartbeat as a device worker does, which signs it if no answer has come."""
        is_answered = time.monotonic() < device.signs_from_s
        heartbeat = device.reports.heartbeat(device.alive())
        self.pulses += isinstance(heartbeat, Pulse)
        return sealed_heartbeat(self.keys, heartbeat, to=self.island if is_answered else "")

    def _news(self, item: bytes) -> list[Any]:
        """Return the content of a message of the island; only the first one's proof is checked."""
        sealed = base64.b64decode(json.loads(item)["body"]).decode()
        island, _, body = sealed.split("\n", 2)
        if not self.island:
            self.keys.opened(sealed, NEWS, known=(island,))
            self.island = island
        told: list[Any] = json.loads(body)["news"]
        return told


if __name__ == "__main__":
    sys.exit(main())
