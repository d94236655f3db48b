"""Measure what many devices cost their island, by unchanged heartbeats and by ends of tasks.

    python -m benchmarks.devices [--quick] [--alone]

The island is a scheduler in a process of its own, as in service. Its devices are played. They
consist of heartbeats, sealed and sent through Redis every 2 s or at the pace of the island, and
they obey Launch orders that come back through Redis. A host has 8 devices, which share messages, or
one device with `--alone`. Each device has one running task, whose held
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
    HostPulses,
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
HOST_DEVICES = 8
TICKS = 20  # number of parts of a beat, in each of which the hosts send and read what is due
LISTENS_AFTER_S = 0.5  # after it has sent heartbeats, a host reads its queue
LISTENS_AGAIN_S = 0.25  # until all of them are answered
FIRST_LIMIT_S = 600.0  # until all first tasks run

FILL = """
insert into islands (name) values ('isle') on conflict do nothing;
insert into tenants (id, name) values ('root', 'platform');
insert into tenants (id, name, parent_id) select 't' || n, 'tenant ' || n, 'root'
  from generate_series(1, {tenants}) n;
insert into users (id, tenant_id, name) select 'u' || n, 't' || n, 'user'
  from generate_series(1, {tenants}) n;
insert into enrolments (device_id, key, enrolled_by) select 'h' || n, '{key}', 'benchmark'
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
                each = 1 if "--alone" in sys.argv else HOST_DEVICES
                return _watched(island, Fleet(devices, keys, at, each=each), watch_s)
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
    fleet.sent = fleet.messages = fleet.pulses = 0
    fleet.play(watch_s)
    cpu_s, answers, middle = own_s(island) - before_s, max(1, fleet.answers), tally_of(ISLAND)
    figures = {
        "first_s": round(first_s, 1),
        "cpu_ms": round(1e3 * cpu_s / answers, 3),
        "answered": answers,
        "answered of sent": round(answers / max(1, fleet.sent), 3),
        "pulses of sent": round(fleet.pulses / max(1, fleet.sent), 3),
        "messages of sent": round(fleet.messages / max(1, fleet.sent), 3),
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
    rhythm: Rhythm
    task: str = ""
    epoch: int = 0
    state: str = ""
    began_s: float = 0.0
    answered_us: int = 0  # when it sent the newest heartbeat that was answered
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


@dataclass
class HostPlayer:
    """Plays a host, whose devices share their messages if there are several."""

    name: str
    devices: list[DevicePlayer]
    listens_s: float = 0.0  # when it reads its queue
    signs_from_s: float = -math.inf

    @property
    def queues(self) -> list[str]:
        """What it reads: its own queue if its devices share messages, and those of its devices."""
        names = [device.id for device in self.devices]
        return [broker.device_queue(name) for name in ([self.name, *names] if names[1:] else names)]


class Fleet:
    """Plays all hosts. A host sends its heartbeats in the times of its beat."""

    def __init__(self, devices: int, keys: MessageKeys, at: str, *, each: int = 1) -> None:
        """Play `devices` devices, on hosts that have `each` of them."""
        facts = {
            "island": ISLAND,
            "kind": "cpu",
            "threads": 1,
            "spec": True,
            "paced": True,
            "pulses": True,
            "host_news": each > 1,
            "memory_bytes": 2**30,
            "key": keys.public,
            "exchange_key": keys.announced,
        }
        self.hosts = []
        for first in range(0, devices, each):
            name = f"h{first // each}"
            players = [
                DevicePlayer(
                    id=f"{name}.{n}",
                    facts={**facts, "host": name},
                    rhythm=Rhythm(int(BEAT_S * 1e6), host=name),
                )
                for n in range(min(each, devices - first))
            ]
            self.hosts.append(HostPlayer(name, players))
        self.devices = [device for host in self.hosts for device in host.devices]
        self.keys, self.client = keys, redis.Redis.from_url(at)
        self.island = ""  # its public key, once a device has learned its exchange key
        self.due_s, self.answers = time.monotonic(), 0
        self.sent = 0  # heartbeats since they were counted last
        self.messages = 0  # messages with them
        self.pulses, self.asked = 0, 0  # pulses of them, and requests for whole reports

    def running(self) -> int:
        """Return how many devices run a task whose start the island has acknowledged."""
        return sum(bool(d.task) and d.state == "running" and not d.events for d in self.devices)

    def end_all(self) -> None:
        for device in self.devices:
            device.end()
        self._send({host.name: host.devices for host in self.hosts})

    def play(self, for_s: float) -> None:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            urgent = self._hear()
            self._send({host.name: self._due(host, urgent) for host in self.hosts})
            self.due_s = max(self.due_s + BEAT_S / TICKS, time.monotonic() - BEAT_S)
            time.sleep(max(0.0, self.due_s - time.monotonic()))

    def _hear(self) -> set[str]:
        """Read the queues of which it is time; return the devices that have something to report."""
        now_s = time.monotonic()
        hosts = [host for host in self.hosts if host.listens_s <= now_s]
        pipeline, read = self.client.pipeline(transaction=False), list[HostPlayer]()
        for host in hosts:
            for queue in host.queues:
                pipeline.rpop(queue, 100)
                read.append(host)
        urgent = set()
        for host, items in zip(read, pipeline.execute(), strict=True):
            for item in items or ():
                for device, news in self._news(host, item):
                    if self._obey(host, device, news):
                        urgent.add(device.id)
        for host in hosts:
            waits = any(d.answered_us < d.rhythm.sent_us for d in host.devices)
            host.listens_s = now_s + (LISTENS_AGAIN_S if waits else BEAT_S)
        return urgent

    def _obey(self, host: HostPlayer, device: DevicePlayer, news: list[Any]) -> bool:
        for one in news:
            self.asked += one["is"] == "ReportWanted"
            if one["is"] in ("Answer", "LeaseRenewal"):
                self.answers += 1
                self._learn(host, device, one)
        return device.hear(news)

    def _learn(self, host: HostPlayer, device: DevicePlayer, answer: dict[str, Any]) -> None:
        if answer["is"] == "Answer":
            device.reports.answered(decode(answer))
            device.rhythm.set_pace(answer.get("beat_us", 0))
        else:
            device.reports.renewed()
        device.answered_us = answer["sent_us"]
        beat_s = device.rhythm.beat_us / 1e6
        host.signs_from_s = time.monotonic() + max(beat_s, USUAL_BEAT_S) + SIGNS_AFTER_S

    def _due(self, host: HostPlayer, urgent: set[str]) -> list[DevicePlayer]:
        """Return the devices of which a heartbeat is due within the tick."""
        until_us = time.monotonic_ns() // 1000 + int(BEAT_S / TICKS * 1e6)
        return [
            d for d in host.devices if d.id in urgent or d.rhythm.due_us(d.answered_us) <= until_us
        ]

    def _send(self, devices: dict[str, list[DevicePlayer]]) -> None:
        queue, texts = broker.island_queue(ISLAND), list[tuple[str, str]]()
        for host in self.hosts:
            if due := devices[host.name]:
                texts += [(queue, text) for text in self._sealed(host, due)]
                host.listens_s = min(host.listens_s, time.monotonic() + LISTENS_AFTER_S)
                self.sent += len(due)
        self.messages += len(texts)
        broker.send_all(outbox.celery(), broker.ISLAND_ALIVE, texts)

    def _sealed(self, host: HostPlayer, devices: list[DevicePlayer]) -> Iterator[str]:
        """Seal their heartbeats as a host's worker does, which signs them if no answer has come."""
        to = self.island if time.monotonic() < host.signs_from_s else ""
        heartbeats = [device.reports.heartbeat(device.alive()) for device in devices]
        pulses = [said for said in heartbeats if isinstance(said, Pulse)]
        self.pulses += len(pulses)
        for said in heartbeats:
            if not isinstance(said, Pulse):
                yield sealed_heartbeat(self.keys, said, to=to)
        if pulses:
            together = HostPulses.of(pulses) if len(pulses) > 1 else pulses[0]
            yield sealed_heartbeat(self.keys, together, to=to)

    def _news(self, host: HostPlayer, item: bytes) -> Iterator[tuple[DevicePlayer, list[Any]]]:
        """Read a message of the island, for each device; only the first one's proof is checked."""
        sealed = base64.b64decode(json.loads(item)["body"]).decode()
        island, _, body = sealed.split("\n", 2)
        if not self.island:
            self.keys.opened(sealed, NEWS, known=(island,))
            self.island = island
        said = json.loads(body)
        news = said["news"] if isinstance(said["news"], dict) else {said["device"]: said["news"]}
        for device in host.devices:
            if device.id in news:
                yield device, news[device.id]


if __name__ == "__main__":
    sys.exit(main())
