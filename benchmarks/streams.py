"""Measure how the API answers others while one key opens very many event streams.

python -m benchmarks.streams [--quick]

One API process as `make up` starts it. A viewer of alpha opens 100, 500 and then 1,000 streams of
one request at once (--quick: 100) and holds them for some seconds. Meanwhile two callers read all
the time: one `/livez` without a key, one `/v1/me` with the key of beta's viewer. A call without an
answer within 10 s counts as 10 s. The streams are held by a process of their own, but all share the
machine.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from app.cli.client import Client
from app.local.embedded_servers import embedded_postgres, embedded_redis, temporary_home
from benchmarks import Target, quick, report
from benchmarks.api_load import Service, described, p99, serving

STREAMS = (100,) if quick() else (100, 500, 1000)
HELD_S = 10.0
ALONE = 200  # reads
PAUSE_S = 0.02  # between two reads
LONGEST_S = 10.0  # a read
NORMAL_S = 0.5  # `/v1/me` is back to normal once three reads in a row took less
GIVEN_UP_S = 60.0


def main() -> int:
    targets: list[Target] = []
    beside: dict[str, object] = {}
    with temporary_home() as home, embedded_postgres(home) as postgres, embedded_redis(home) as url:
        os.environ |= {"DATABASE_URL": postgres, "REDIS_URL": url, "ROUNDHOUSE_HOME": str(home)}
        with serving() as service:
            for streams in STREAMS:
                seen = flooded(service, streams)
                targets += seen.targets(streams)
                beside[f"{streams} streams"] = seen.beside()
                for target in seen.targets(streams):
                    sys.stderr.write(f"{target.name} {target.value:g} {target.unit}\n")
    return report("streams", targets, beside)


@dataclass(slots=True)
class Seen:
    """Holds the milliseconds of each read beside the streams, and how soon all was normal again."""

    alone_ms: list[float] = field(default_factory=list)  # /livez, before the streams
    livez_ms: list[float] = field(default_factory=list)
    me_ms: list[float] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    normal_s: float = GIVEN_UP_S

    def targets(self, streams: int) -> list[Target]:
        figures = (
            ("/livez, p99", p99(self.livez_ms), "ms", 50),
            ("/v1/me, p99", p99(self.me_ms), "ms", 500),
            ("back to normal", round(self.normal_s, 1), "s", 5),
        )
        return [
            Target(name=f"{streams} streams: {name}", value=value, unit=unit, op="<=", bound=bound)
            for name, value, unit, bound in figures
        ]

    def beside(self) -> dict[str, object]:
        return {
            "answers": self.answers,
            "/livez before, p99 ms": p99(self.alone_ms),
            "reads": {"/livez": len(self.livez_ms), "/v1/me": len(self.me_ms)},
            "slowest, ms": {
                "/livez": round(max(self.livez_ms), 1),
                "/v1/me": round(max(self.me_ms), 1),
            },
        }


def flooded(service: Service, streams: int) -> Seen:
    with Client(f"http://127.0.0.1:{service.port}", service.key) as client:
        id = str(client.submit(described(service.bundle))["id"])
    key, reader = service.keys["alpha"]["viewer"], service.keys["beta"]["viewer"]
    seen, stop = Seen(), threading.Event()
    read_ms(service.port, "/v1/me", reader)  # warm-up
    seen.alone_ms = [read_ms(service.port, "/livez", "") for _ in range(ALONE)]
    threads = [
        threading.Thread(target=_read_on, args=(service.port, "/livez", "", stop, seen.livez_ms)),
        threading.Thread(target=_read_on, args=(service.port, "/v1/me", reader, stop, seen.me_ms)),
    ]
    opener = ("-m", "benchmarks.streams", "open", str(service.port), key, id, str(streams))
    with subprocess.Popen((sys.executable, *opener), stdout=subprocess.PIPE) as flood:
        assert flood.stdout is not None
        flood.stdout.readline()  # the process is about to begin
        for thread in threads:
            thread.start()
        seen.answers = json.loads(flood.stdout.readline())
    ended_s = time.monotonic()
    stop.set()
    seen.normal_s = _normal_after_s(service.port, reader, ended_s)
    for thread in threads:
        thread.join()
    return seen


def _read_on(port: int, path: str, key: str, stop: threading.Event, took_ms: list[float]) -> None:
    while not stop.is_set():
        took_ms.append(read_ms(port, path, key))
        stop.wait(PAUSE_S)


def read_ms(port: int, path: str, key: str) -> float:
    """Return the milliseconds of a call; LONGEST_S if it was not answered with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST_S)
    began_s = time.perf_counter()
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        answer.read()
        is_good = answer.status == 200
    except (OSError, http.client.HTTPException):
        is_good = False
    finally:
        connection.close()
    return 1e3 * (time.perf_counter() - began_s if is_good else LONGEST_S)


def _normal_after_s(port: int, key: str, ended_s: float) -> float:
    quick_reads = 0
    while quick_reads < 3:
        quick_reads = quick_reads + 1 if read_ms(port, "/v1/me", key) < 1e3 * NORMAL_S else 0
        if time.monotonic() > ended_s + GIVEN_UP_S:
            return GIVEN_UP_S
    return time.monotonic() - ended_s


# --- the process that holds the streams -----------------------------------------------------------


async def open_streams(port: int, key: str, id: str, streams: int) -> Counter[str]:
    """Open and hold the streams; returns counts by status, with "none" for unanswered ones."""
    head = (
        f"GET /v1/requests/{id}/events/stream HTTP/1.1\r\n"
        f"Host: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"
    ).encode()
    found: Counter[str] = Counter()

    async def hold() -> None:
        status = "none"
        try:
            async with asyncio.timeout(HELD_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head)
                status = (await reader.readline()).decode().split(" ")[1]
                while await reader.read(65536):
                    pass
        except (TimeoutError, OSError, IndexError):
            pass
        found[status] += 1

    await asyncio.gather(*(hold() for _ in range(streams)))
    return found


def _open(port: str, key: str, id: str, streams: str) -> int:
    sys.stdout.write("\n")
    sys.stdout.flush()
    found = asyncio.run(open_streams(int(port), key, id, int(streams)))
    sys.stdout.write(f"{json.dumps(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(_open(*sys.argv[2:]) if sys.argv[1:2] == ["open"] else main())
