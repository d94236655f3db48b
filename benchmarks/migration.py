"""Measure how long a job stands still while it moves between two hosts on a slow network.

    python -m benchmarks.migration [--quick]

Each of two device workers has a network namespace of its own. Their links to the rest (the store,
which is a server that speaks S3) have a limited bandwidth in both directions. A job with much state
writes to a part of it in every step, and is moved to and fro while it runs. The job itself reports
how long it stood still: from the end of its last step on one host to the start of its first step on
the other.

State is copied while the job runs. Then the job stops, and what has changed since the last copy is
sent. The bound: the job stands still for at most half a second longer than this difference takes
over one link, at the bandwidth measured in the same run. The peer is a move that stops the job
first, copies all its state, and starts it on the other host.

The program needs root, `ip` and `tc`. Without them the link has no limit, and the result says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from app.cli.bundling import bundle_folder
from app.cli.client import Client
from app.local.embedded_servers import temporary_home
from app.local.up import Handle, running
from benchmarks import Target, quick, report

JSON = dict[str, Any]

ROOT = Path(__file__).parent.parent
RATE_MBIT = 200
COLD_MB, HOT_MB = 48, 8
ADDRESS = "10.77.{}.{}"
STORE = "10.77.9.1"
HOSTS = ("left", "right")
TIMEOUT_S = 120.0
BEYOND_S = 0.5

JOB = """
import time

import torch


class Job:
    def __init__(self, ctx, *, cold_mb, hot_mb):
        self.cold = torch.randn(cold_mb * 2**18)
        self.hot = torch.randn(hot_mb * 2**18)

    def step(self, ctx):
        began = time.monotonic_ns()
        self.hot.add_(1.0)
        time.sleep(0.05)
        print("step", ctx.step, began, time.monotonic_ns(), flush=True)
"""

PROBE = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from app.storage.s3_backend import Bucket
place, body = Bucket(sys.argv[1]), [os.urandom(4 * 2**20) for _ in range(6)]
names = [f"incoming/probe-{n}" for n in range(len(body))]
size = sum(map(len, body))
with ThreadPoolExecutor(place.hands) as hands:
    for n in range(2):
        began = time.monotonic()
        list(hands.map(lambda n: place.keep([body[n]], lambda: names[n]), range(len(body))))
        put = time.monotonic()
        list(hands.map(place.get, names))
        print(size / (put - began), size / (time.monotonic() - put))
for name in names:
    place.delete(name)
"""


def main() -> int:
    times = 3 if quick() else 12
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(_network())
        env = stack.enter_context(_s3(network))
        home = stack.enter_context(temporary_home())
        system = stack.enter_context(running(home, devices=1, env=env))
        for host in HOSTS:
            stack.enter_context(_device(host, home, system, network, env))
        rates = _bandwidths(network, env)
        with Client(system.url, system.keys["alpha"]["member"]) as client:
            root = stack.enter_context(
                Client(system.url, system.keys["platform"]["platform_admin"])
            )
            root.post("/v1/devices/local.0/cordon")  # it only has to exist at the start
            _wait(lambda: len(_up(root)) == 3, "the devices are not up")
            job = _Job(client, root)
            moves = [job.move() for _ in range(times)]
            stops = [job.stop_copy_start() for _ in range(1 if quick() else 3)]
            lost = client.get(f"/v1/tasks/{job.task}")["lost_steps"]
            client.post(f"/v1/tasks/{job.task}/cancel")
    return _report(moves, stops, lost, rates, network)


def _report(
    moves: list[JSON], stops: list[float], lost: int, rates: list[float], network: Network
) -> int:
    rate = min(rates)
    beyond = [move["stood_s"] - move["last_bytes"] / rate for move in moves]
    targets = [
        Target(
            name="stood still beyond last difference / bandwidth, p50",
            value=round(statistics.median(beyond), 3),
            unit="s",
            op="<=",
            bound=BEYOND_S,
        ),
        Target(
            name="stood still beyond last difference / bandwidth, longest",
            value=round(max(beyond), 3),
            unit="s",
            op="<=",
            bound=BEYOND_S,
        ),
        Target(name="steps lost", value=lost, unit="steps", op="<=", bound=0),
    ]
    peers = {
        "moves": len(moves),
        "link": network.told,
        "bandwidth measured (slower way), MB/s": round(rate / 1e6, 1),
        "state, MB": COLD_MB + HOT_MB,
        "last difference, MB": [round(move["last_bytes"] / 1e6, 1) for move in moves],
        "stood still, s": [round(move["stood_s"], 3) for move in moves],
        "until saved, launched, started, s": [move["parts_s"] for move in moves],
        "rounds while it ran": [move["rounds"] for move in moves],
        "from the wish to its first step there, s": [round(move["all_s"], 1) for move in moves],
        "stop, copy all, start, s": [round(stood_s, 3) for stood_s in stops],
        "load (1 min)": round(os.getloadavg()[0], 1),
    }
    return report("migration", targets, peers)


# --- the job --------------------------------------------------------------------------------------


class _Job:
    def __init__(self, client: Client, root: Client) -> None:
        self.client, self.root = client, root
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "job.py").write_text(JOB)
            bundle = bundle_folder(Path(folder))
        client.upload(bundle.sha256, bundle.body)
        job = {
            "name": "job",
            "type": "train",
            "run": {"job": "job:Job"},
            "params": {"cold_mb": COLD_MB, "hot_mb": HOT_MB},
            "checkpoint": {"every_s": 3600, "keep": 2},
            "max_duration_s": 3600,
        }
        request = client.submit(
            {"name": "moving", "bundle": f"sha256:{bundle.sha256}", "tasks": [job]}
        )
        self.request, self.task = request["id"], request["tasks"][0]["id"]
        self._steps(10)

    def look(self) -> JSON:
        return self.client.get(f"/v1/tasks/{self.task}")

    def move(self) -> JSON:
        """Move the job once; return how long it stood still, and how much was left to copy then."""
        began_s, known = time.monotonic(), len(self._told("task.moved"))
        self.client.post(f"/v1/tasks/{self.task}/migrate", {})
        _wait(lambda: self.look()["move_to"] is None, "it did not move")
        all_s, moved = time.monotonic() - began_s, self._told("task.moved")[known:]
        if not moved:
            raise RuntimeError(f"a move failed: {self._told('task.move_failed')}")
        self._steps(20)  # until its log has them
        # Left for the pause: what it writes to in every step, as in the last round.
        data, events = moved[0]["data"], self._told()
        return {
            "parts_s": _parts_s(events),
            "stood_s": self._stood_s(),
            "last_bytes": data["last_bytes"],
            "rounds": data["rounds"],
            "all_s": all_s,
        }

    def stop_copy_start(self) -> float:
        """Move the job without rounds, as the peer: pause, wait for the image, start elsewhere.

        Chunks of earlier images in the store help here, too: only the way back transfers
        everything.
        """
        known, source = len(self._told("task.saved")), self.look()["seat"]
        self.client.post(f"/v1/tasks/{self.task}/pause")
        _wait(lambda: len(self._told("task.saved")) > known, "it was not saved")
        self.root.post(f"/v1/devices/{source}/cordon")
        self.client.post(f"/v1/tasks/{self.task}/resume")
        _wait(lambda: self.look()["state"] == "running", "it did not start again")
        self._steps(20)
        self.root.post(f"/v1/devices/{source}/uncordon")
        return self._stood_s()

    def _steps(self, more: int) -> None:
        upto = self.look()["step"] + more
        _wait(lambda: self.look()["step"] >= upto, "it makes no steps")
        time.sleep(1.0)  # its log comes with the next reports

    def _told(self, type_: str = "") -> list[JSON]:
        events = self.client.items(f"/v1/requests/{self.request}/events")
        return [event for event in events if type_ in ("", event["type"])]

    def _stood_s(self) -> float:
        """Return the longest time between two of the job's last steps."""
        lines = self.client.items(f"/v1/requests/{self.request}/logs", task=self.task, limit=200)
        steps = sorted(
            tuple(int(word) for word in line["text"].split()[1:])
            for line in lines
            if line["text"].startswith("step ")
        )
        last = steps[-60:]
        return max(after[1] - before[2] for before, after in pairwise(last)) / 1e9


def _parts_s(events: list[JSON]) -> list[float]:
    """Return the parts of the last move, by the island's clock: until saved, launched, started."""
    wanted = ["task.paused", "task.saved", "task.launched", "task.started"]
    at = {event["type"]: datetime.fromisoformat(event["at"]) for event in events}
    return [round((at[b] - at[a]).total_seconds(), 3) for a, b in pairwise(wanted)]


def _up(client: Client) -> list[JSON]:
    return [device for device in client.items("/v1/devices") if device["up"]]


def _wait(true: Any, told: str) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not true():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{told} within {TIMEOUT_S} s")
        time.sleep(0.05)


# --- two hosts ------------------------------------------------------------------------------------


@dataclass
class Network:
    """Describes the network: `inside[host]` prefixes commands that run on a host; `here` is our
    address.
    """

    here: str = "127.0.0.1"
    told: str = "none: network namespaces cannot be made here, so nothing limits it"
    inside: dict[str, list[str]] = field(default_factory=lambda: {host: [] for host in HOSTS})


@contextlib.contextmanager
def _network() -> Iterator[Network]:
    """Make two namespaces, each behind a link of its own."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        yield Network()
        return
    try:
        for n, host in enumerate(HOSTS):
            _link(n, host)
        # One address for the store that both can reach, behind the links.
        _run("ip", "addr", "add", f"{STORE}/32", "dev", "lo")
        inside = {host: ["ip", "netns", "exec", f"rh-{host}"] for host in HOSTS}
        told = f"{RATE_MBIT} Mbit/s each way for each host (tc tbf), network namespaces"
        network = Network(here=STORE, told=told, inside=inside)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"no namespaces: {error.cmd}: {error.stderr.decode()}\n")
        network = Network()
    try:
        yield network
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", f"rh-{host}"], capture_output=True)
        subprocess.run(["ip", "addr", "del", f"{STORE}/32", "dev", "lo"], capture_output=True)


def _link(n: int, host: str) -> None:
    name, space = f"rh-{host}", ("ip", "netns", "exec", f"rh-{host}")
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", name, "type", "veth", "peer", "name", "up0", "netns", name)
    _run("ip", "addr", "add", f"{ADDRESS.format(n, 1)}/24", "dev", name)
    _run("ip", "link", "set", name, "up")
    _run(*space, "ip", "addr", "add", f"{ADDRESS.format(n, 2)}/24", "dev", "up0")
    _run(*space, "ip", "link", "set", "up0", "up")
    _run(*space, "ip", "link", "set", "lo", "up")
    _run(*space, "ip", "route", "add", "default", "via", ADDRESS.format(n, 1))
    limit = ("root", "tbf", "rate", f"{RATE_MBIT}mbit", "burst", "256kb", "latency", "50ms")
    _run("tc", "qdisc", "add", "dev", name, *limit)
    _run(*space, "tc", "qdisc", "add", "dev", "up0", *limit)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextlib.contextmanager
def _s3(network: Network) -> Iterator[dict[str, str]]:
    """Run a server that speaks S3, and return the environment to reach it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with _ended(subprocess.Popen(words, env=env, **quiet)):  # type: ignore[call-overload]
        endpoint = f"http://{network.here}:{port}"
        _wait(lambda: _listens(network.here, port), "the S3 server does not answer")
        made = urllib.request.Request(f"{endpoint}/store", method="PUT")
        urllib.request.urlopen(made, timeout=10).close()
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "ROUNDHOUSE_STORE": "s3://store/roundhouse",
        }


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), 1).close()
        return True
    return False


@contextlib.contextmanager
def _device(
    host: str, home: Path, system: Handle, network: Network, env: dict[str, str]
) -> Iterator[None]:
    """Run a device worker on one of the hosts, with a home of its own."""
    own = home / host
    own.mkdir()
    device = f"{host}.0"
    words = [
        "-m",
        "celery",
        "-A",
        "workers.device.worker",
        "worker",
        "--pool",
        "threads",
        "-c",
        "2",
    ]
    words += ["-Q", f"device.{device}", "-n", f"{device}@bench", "-l", "WARNING"]
    words += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    mine = {
        **{name: value for name, value in os.environ.items() if name != "DATABASE_URL"},
        **env,
        "REDIS_URL": system.facts["redis_url"],
        "ROUNDHOUSE_HOME": str(own),
        "ROUNDHOUSE_DEVICE": device,
        "ROUNDHOUSE_SANDBOX": "preferred",
        **system.enrol(device, own, "local"),
    }
    with (own / "log").open("wb") as log:
        started = subprocess.Popen(
            [*network.inside[host], sys.executable, *words],
            cwd=ROOT,
            env=mine,
            stdout=log,
            stderr=log,
        )
        with _ended(started, signal.SIGTERM):
            yield


@contextlib.contextmanager
def _ended(
    process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGKILL
) -> Iterator[None]:
    try:
        yield
    finally:
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _bandwidths(network: Network, env: dict[str, str]) -> list[float]:
    """Return the bytes per second to the store and back for each host, the better of two tries."""
    rates: list[float] = []
    for host in HOSTS:
        words = [*network.inside[host], sys.executable, "-c", PROBE, env["ROUNDHOUSE_STORE"]]
        done = subprocess.run(
            words, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=True
        )
        tries = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
        rates += [max(way) for way in zip(*tries, strict=True)]
    return rates


if __name__ == "__main__":
    sys.exit(main())
