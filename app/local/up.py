"""Run the whole system on one machine, with one command, until Ctrl-C.

    python -m app.local.up [--home FOLDER] [--devices N | --device KIND[:WHICH] ...] [--hosts N]
                           [--port PORT]

It starts embedded Postgres and Redis (`app.local.embedded_servers`; DATABASE_URL and REDIS_URL
replace them), the schema and the first keys (`app.local.seed`), then the API, control, one island
scheduler and N CPU devices, or a worker for each `--device` (`--device cpu --device cuda:0`).  Each
is a process that is restarted when it dies and ends with this one
(`app.local.process_supervisor`).

HOME/run/up.json has the address, the process ids, and the places of keys and logs.  `running` does
the same for tests, the demo and benchmarks, in a separate process.
"""

from __future__ import annotations

import argparse
import errno
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from app.cli.client import Client
from app.core.security.sandbox_layers import Sandbox, warning
from app.core.units import counted
from app.home import default_home
from app.local import embedded_servers, process_supervisor
from app.local.embedded_servers import CannotStart
from app.local.process_supervisor import NotReady, ProcessSupervisor, Spec, StopAsked
from app.settings import settings
from app.storage.signing import Signer

ROOT = Path(__file__).parents[2]  # where the packages `app` and `workers` lie
HOST_NAME = "local"  # host name of the devices that we start
DEVICE_GRACE_S = 15.0  # time for devices to pause and save their tasks
SEED_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 180.0
HANDLE_TIMEOUT_S = 300.0  # for a whole start, on a slow machine beside other tests
STOP_TIMEOUT_S = 180.0  # for a whole stop; what its processes are given adds up to a minute
LOOK_S = 0.05

Env = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedDevice:
    """A device of this machine: its kind, as torch names it, and which of this kind it is.

    `which` is a UUID or an index, as in ROUNDHOUSE_ACCELERATOR.
    """

    kind: str
    which: str = ""

    @classmethod
    def read(cls, text: str) -> WantedDevice:
        """Read `KIND` or `KIND:WHICH`."""
        kind, _, which = text.partition(":")
        return cls(kind=kind, which=which)

    def __str__(self) -> str:
        return f"{self.kind}:{self.which}" if self.which else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedSystem:
    home: Path
    devices: tuple[WantedDevice, ...]
    hosts: int = 1  # number of hosts that these devices claim to belong to
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one

    @property
    def up_file(self) -> Path:
        return self.home / "run" / "up.json"

    @property
    def keys_file(self) -> Path:
        return self.home / "keys.json"

    @property
    def device_names(self) -> list[str]:
        hosts = [HOST_NAME, *(f"{HOST_NAME}-{n}" for n in range(2, self.hosts + 1))]
        count = len(self.devices)
        return [f"{hosts[n * self.hosts // count]}.{n}" for n in range(count)]

    @property
    def host_workers(self) -> list[str]:
        """The processes that serve the devices, one for each host."""
        return list(dict.fromkeys(map(self.worker_of, self.device_names)))

    def worker_of(self, device: str) -> str:
        """Return the name of the process that serves a device."""
        return f"host.{device.rpartition('.')[0]}"


# --- running the system ---------------------------------------------------------------------------


def up(wanted: WantedSystem, say: Callable[[str], None]) -> None:
    """Run the system until SIGINT, SIGTERM or SIGHUP; raises CannotStart or NotReady."""
    embedded_servers.prepare(wanted.home)
    with (
        embedded_servers.locked(wanted.home),
        _asked_port(wanted) if wanted.port else _usual_port(wanted) as reserved,
    ):
        port: int = reserved.getsockname()[1]
        state = _State(wanted, f"http://{wanted.host}:{port}")
        supervisor = ProcessSupervisor(wanted.home / "logs", changed=state.write, say=say)
        state.supervisor = supervisor
        stop_on_signals(supervisor.ask_to_stop)
        try:
            _start(wanted, state, port)
            say(_welcome(wanted, state))
            supervisor.watch()
        except StopAsked:
            pass  # during the start; the processes started so far are stopped below
        finally:
            say("stopping")
            supervisor.stop()
            wanted.up_file.unlink(missing_ok=True)
            embedded_servers.leave_sockets(wanted.home)


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Stop on Ctrl-C, SIGTERM, and the end of the terminal, unless that was to be ignored
    (`nohup`).
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: stop())


def _start(wanted: WantedSystem, state: _State, port: int) -> None:
    supervisor = state.supervisor
    # 1. Start the two servers, unless the environment names others.
    state.database_url = settings().database_url.get_secret_value()
    state.redis_url = settings().redis_url.get_secret_value()
    if not state.database_url:
        supervisor.start(embedded_servers.postgres(wanted.home))
        state.database_url = embedded_servers.postgres_url(wanted.home)
    if not state.redis_url:
        supervisor.start(embedded_servers.redis_server(wanted.home))
        state.redis_url = embedded_servers.redis_url(wanted.home)
    # 2. Create the schema, three tenants and their keys, and the key for their secrets.
    env = _env(wanted, state, port)
    _seed(wanted, env)
    # 3. Start our processes. At the end, devices stop first, so that the island still hears which
    # tasks they paused.
    supervisor.start(_api(wanted, env, port), *_schedulers(wanted, env))
    supervisor.start(*(_host(env, wanted, name) for name in wanted.host_workers))
    why = f"{state.url}/readyz and {supervisor.logs} say why"
    supervisor.wait_until(
        lambda: answers(state.url, "/readyz" if wanted.devices else "/livez"),
        lambda: f"the system is not ready after {READY_TIMEOUT_S:g} s: {why}",
        timeout_s=READY_TIMEOUT_S,
    )
    state.ready = True
    state.write()


class _State:
    """The content of HOME/run/up.json."""

    def __init__(self, wanted: WantedSystem, url: str) -> None:
        self.wanted, self.url, self.began_s = wanted, url, time.monotonic()
        self.supervisor: ProcessSupervisor
        self.database_url = self.redis_url = ""
        self.ready = False

    def write(self) -> None:
        file = self.wanted.up_file
        file.parent.mkdir(mode=0o700, exist_ok=True)
        new = file.with_suffix(".new")
        with _own_file(new) as out:
            out.write(json.dumps(self._facts(), indent=2).encode())
        new.replace(file)

    def _facts(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "ready": self.ready,
            "url": self.url,
            "home": str(self.wanted.home),
            "keys": str(self.wanted.keys_file),
            "logs": str(self.supervisor.logs),
            "database_url": self.database_url,
            "redis_url": self.redis_url,
            "devices": self.wanted.device_names,
            "pids": self.supervisor.pids(),
        }


# --- processes ------------------------------------------------------------------------------------


def _env(wanted: WantedSystem, state: _State, port: int) -> Env:
    return {
        **os.environ,
        "DATABASE_URL": state.database_url,
        "REDIS_URL": state.redis_url,
        "ROUNDHOUSE_HOME": str(wanted.home),
        "ROUNDHOUSE_HOST": wanted.host,
        "ROUNDHOUSE_PORT": str(port),
        # On a private machine, on loopback, a weaker sandbox is accepted, with a warning.
        "ROUNDHOUSE_SANDBOX": os.environ.get("ROUNDHOUSE_SANDBOX", "preferred"),
        "PYTHONUNBUFFERED": "1",
    }


def _seed(wanted: WantedSystem, env: Env) -> None:
    host_key = Signer.at(wanted.home / "run" / "signing.key").public
    ours = [word for name in wanted.device_names for word in ("--device", f"{name}={host_key}")]
    words = (
        "-m",
        "app.local.seed",
        "--tenants",
        "--island",
        "--secrets-key",
        *ours,
        str(wanted.keys_file),
    )
    spec = Spec(name="seed", command=(sys.executable, *words), env=env, folder=ROOT)
    with tempfile.TemporaryFile() as output:
        run = process_supervisor.start_leashed(spec, output)
        if run.wait(SEED_TIMEOUT_S) != 0:
            output.seek(0)
            said = output.read().decode(errors="replace")
            raise CannotStart(f"the database could not be prepared:\n{said}")


def _api(wanted: WantedSystem, env: Env, port: int) -> Spec:
    # Without the timeout, a browser that follows a stream would prevent the end of the server.
    options = ("--timeout-graceful-shutdown", "3", "--no-access-log", "--no-server-header")
    bounded = ("--http", "app.api.http_protocol:BoundedProtocol", "--log-level", "warning")
    words = ["-m", "uvicorn", "app.main:app", "--host", wanted.host, "--port", str(port)]
    if (processes := settings().api_processes) > 1:
        words += ["--workers", str(processes)]
        env = {**env, "PROMETHEUS_MULTIPROC_DIR": str(_emptied(wanted.home / "run" / "metrics"))}
    return Spec(
        name="api",
        command=(sys.executable, *words, *bounded, *options),
        env=env,
        folder=ROOT,
        answers=lambda: answers(f"http://{wanted.host}:{port}", "/livez"),
    )


def _emptied(folder: Path) -> Path:
    """Return the folder, new: figures of an earlier start would count again."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    return folder


def _schedulers(wanted: WantedSystem, env: Env) -> list[Spec]:
    island = settings().island
    return [
        _celery("control", "workers.control.controller", "control", wanted, env),
        _celery("island", "workers.control.scheduler", f"island.{island}", wanted, env),
    ]


_PASSWORDS = {
    "DATABASE_URL",
    "ROUNDHOUSE_OIDC_CLIENT_SECRET",
    "ROUNDHOUSE_SECRETS_KEY",
    "ROUNDHOUSE_SMTP_URL",
}


def _host(env: Env, wanted: WantedSystem, name: str) -> Spec:
    """Return the worker of a host, which serves all devices of the host."""
    served = [
        (device, asked)
        for device, asked in zip(wanted.device_names, wanted.devices, strict=True)
        if wanted.worker_of(device) == name
    ]
    without_password = {k: v for k, v in env.items() if k not in _PASSWORDS}
    told = ",".join(f"{device}={asked}" for device, asked in served)
    return _celery(
        name,
        "workers.device.worker",
        ",".join(f"device.{reads}" for reads in (name.partition(".")[2], *dict(served))),
        wanted,
        {**without_password, "ROUNDHOUSE_DEVICES": told},
        grace_s=DEVICE_GRACE_S,
    )


def _celery(
    name: str, module: str, queue: str, wanted: WantedSystem, env: Env, *, grace_s: float = 8.0
) -> Spec:
    node = f"{name}@{embedded_servers.name_of(wanted.home)}"
    words = ("-m", "celery", "-A", module, "worker", "--pool", "threads", "-c", "2", "-Q", queue)
    return Spec(
        name=name,
        command=(sys.executable, *words, "-n", node, "-l", "WARNING"),
        env=env,
        folder=ROOT,
        grace_s=grace_s,
    )


def answers(url: str, path: str) -> bool:
    """True if the API answers with status 200."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):  # starting or ending
        return False
    finally:
        connection.close()


def _asked_port(wanted: WantedSystem) -> socket.socket:
    """Reserve the port that was asked for; raises CannotStart if another program has it."""
    try:
        return reserve_port(wanted.host, wanted.port)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise CannotStart(
            f"cannot listen on port {wanted.port} of {wanted.host}: {why}. Name another one with"
            " --port, or none to get a free one"
        ) from error


def _usual_port(wanted: WantedSystem) -> socket.socket:
    """Reserve the port of the last run, if it is free, so that addresses in use remain valid."""
    kept = wanted.home / "port"
    try:
        reserved = reserve_port(wanted.host, int(kept.read_text()) if kept.exists() else 0)
    except OSError:
        reserved = reserve_port(wanted.host, 0)
    with _own_file(kept) as out:
        out.write(f"{reserved.getsockname()[1]}\n".encode())
    return reserved


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind the port, or a free one for 0, without listening; raises OSError if it is in use.

    While the socket is open the kernel gives the port to no program that asks for any free one. A
    program that names the port can listen there, as the API does, each time it starts.
    """
    reserved = socket.socket()
    try:
        reserved.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # else the API could not bind
        reserved.bind((host, port))
    except OSError:
        reserved.close()
        raise
    return reserved


def _own_file(path: Path) -> IO[bytes]:
    """Open the file, emptied, for writing; no other account may read it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(fd, 0o600)
    return os.fdopen(fd, "wb")


def _welcome(wanted: WantedSystem, state: _State) -> str:
    took_s = time.monotonic() - state.began_s
    lines = [
        f"Roundhouse is up after {took_s:.1f} s, with {_counted_by_kind(wanted.devices)}",
        f"  pages  {state.url}/ui/",
        f"  API    {state.url}/docs",
        f"  logs   {state.supervisor.logs}",
        f"  keys   {wanted.keys_file}",
    ]
    for tenant, keys in json.loads(wanted.keys_file.read_text()).items():
        lines += [f"    {tenant:9} {role:15} {key}" for role, key in keys.items()]
    if wanted.home != default_home():
        lines.append(f"For `roundhouse` in another terminal: export ROUNDHOUSE_HOME={wanted.home}")
    return "\n".join([*lines, *warning(_sandboxes(state)), "Ctrl-C stops everything."])


def _counted_by_kind(devices: Iterable[WantedDevice]) -> str:
    """Return "1 CPU device, 2 CUDA devices"."""
    kinds = Counter(device.kind.upper() for device in devices)
    return ", ".join(counted(n, f"{kind} device") for kind, n in kinds.items()) or "no device"


def _sandboxes(state: _State) -> list[tuple[str, Sandbox]]:
    """The sandbox of tenants' code on each device that is up."""
    key = json.loads(state.wanted.keys_file.read_text())["platform"]["platform_admin"]
    with Client(state.url, key) as client:
        found = [*client.items("/v1/devices")]
    return [(device["id"], Sandbox.told_as(device["sandbox"])) for device in found if device["up"]]


# --- for tests, the demo and benchmarks -----------------------------------------------------------


class Handle:
    """A system that runs in a process of its own."""

    def __init__(
        self, wanted: WantedSystem, process: subprocess.Popen[bytes], output: Path
    ) -> None:
        self.wanted, self.process, self.output = wanted, process, output

    @property
    def facts(self) -> dict[str, Any]:
        """The present content of up.json; empty before it exists."""
        try:
            facts: dict[str, Any] = json.loads(self.wanted.up_file.read_text())
        except FileNotFoundError:
            return {}
        return facts if facts["pid"] == self.process.pid else {}  # left by an earlier run

    @property
    def url(self) -> str:
        return str(self.facts["url"])

    @property
    def keys(self) -> dict[str, dict[str, str]]:
        """{tenant: {role: key}}"""
        keys: dict[str, dict[str, str]] = json.loads(self.wanted.keys_file.read_text())
        return keys

    def pids(self) -> dict[str, int]:
        return dict(self.facts["pids"])

    def enrol(self, device: str, home: Path, island: str) -> Env:
        """Enrol a device with a worker that has its own home; returns the environment for that
        worker.
        """
        host = Signer.at(home / "run" / "signing.key")
        with Client(self.url, self.keys["platform"]["platform_admin"]) as admin:
            admin.post("/v1/enrolments", {"device_id": device, "key": host.public})
        its_island = Signer.at(self.wanted.home / "islands" / f"{island}.key")
        return {"ROUNDHOUSE_ISLAND_PUBLIC_KEY": its_island.public}

    def kill(self, name: str) -> int:
        """Kill a process with SIGKILL; returns its process id.

        The name "device.N" stands for the worker that serves the device of this number.
        """
        pid = self.pids()[self.process_of(name)]
        os.kill(pid, signal.SIGKILL)
        return pid

    def process_of(self, name: str) -> str:
        """Return the name in up.json of the process that serves "device.N"; other names stay."""
        kind, _, number = name.partition(".")
        if kind != "device":
            return name
        return self.wanted.worker_of(self.wanted.device_names[int(number)])

    def wait_ready(self, timeout_s: float = HANDLE_TIMEOUT_S) -> None:
        """Wait until the API says that it is ready and each device is up; raises CannotStart."""
        until_s = time.monotonic() + timeout_s
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > until_s:
                said = self.output.read_text(errors="replace")
                raise CannotStart(
                    f"Roundhouse on {self.wanted.home} is not ready; it said:\n{said}"
                )
            time.sleep(LOOK_S)

    def wait_restarted(self, name: str, old_pid: int, timeout_s: float = HANDLE_TIMEOUT_S) -> int:
        """Wait for another process of this name; returns its id."""
        until_s, name = time.monotonic() + timeout_s, self.process_of(name)
        while (pid := self.pids().get(name, old_pid)) == old_pid:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{name} was not started again within {timeout_s} s")
            time.sleep(LOOK_S)
        return pid

    def stop(
        self, number: signal.Signals = signal.SIGINT, timeout_s: float = STOP_TIMEOUT_S
    ) -> int:
        """Ask the system to stop, as Ctrl-C does; returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def _is_ready(self) -> bool:
        facts = self.facts
        is_ready = bool(facts.get("ready")) and answers(facts["url"], "/readyz")
        return is_ready and self._devices_up() >= len(self.wanted.devices)

    def _devices_up(self) -> int:
        with Client(self.url, self.keys["platform"]["platform_admin"]) as admin:
            return sum(device["up"] for device in admin.items("/v1/devices"))


@contextmanager
def running(
    home: Path,
    *,
    devices: int | Sequence[WantedDevice] = 2,
    hosts: int = 1,
    env: Mapping[str, str] | None = None,
) -> Iterator[Handle]:
    """Run the system on `home` until the context ends; it is ready when the context begins.  Call
    it from a long-lived thread.

    `devices` are the devices, or the number of CPU devices if the settings name no other kind.
    """
    each = _alike(devices) if isinstance(devices, int) else tuple(devices)
    wanted = WantedSystem(home=home, devices=each, hosts=hosts)
    embedded_servers.prepare(home)
    output = home / "up.log"
    asked = [word for one in each for word in ("--device", str(one))] or ["--devices", "0"]
    words = ("-m", "app.local.up", "--home", home, "--hosts", hosts, *asked)
    spec = Spec(
        name="up",
        command=(sys.executable, *map(str, words)),
        env={**os.environ, **(env or {})},
        folder=ROOT,
        death=signal.SIGTERM,
    )
    with _own_file(output) as log:
        process = process_supervisor.start_leashed(spec, log)
    handle = Handle(wanted, process, output)
    try:
        handle.wait_ready()
        yield handle
    finally:
        try:
            handle.stop()
        finally:
            process.kill()  # its children die with it; no effect if it has ended


_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)


# --- the command ----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    asked = _arguments(arguments)
    wanted = WantedSystem(
        home=asked.home.absolute(),
        devices=tuple(asked.device) or _alike(asked.devices),
        hosts=asked.hosts,
        host=asked.host,
        port=asked.port,
    )
    try:
        up(wanted, _say)
    except (CannotStart, NotReady) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        sys.stderr.write(
            f"{error.filename or wanted.home} cannot be written: {error.strerror}. Make it"
            " writable, or set ROUNDHOUSE_HOME to another folder\n"
        )
        return 1
    return 0


def _alike(count: int) -> tuple[WantedDevice, ...]:
    """Return so many devices of the kind in the settings."""
    return (WantedDevice(kind=settings().device_kind, which=settings().accelerator),) * count


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m app.local.up", description=__doc__)
    home, port = settings().home, int(os.environ.get("ROUNDHOUSE_PORT", "0"))
    parser.add_argument("--home", type=Path, default=home, help=f"data folder ({home})")
    parser.add_argument("--devices", type=int, default=2, help="how many CPU devices (2)")
    parser.add_argument(
        "--device",
        type=WantedDevice.read,
        action="append",
        default=[],
        metavar="KIND[:WHICH]",
        help="a device, instead of --devices: cpu, or as torch names its kind, with its UUID or"
        " index: cuda:0; may be repeated",
    )
    parser.add_argument(
        "--hosts", type=int, default=1, help="so many hosts are played on this machine (1)"
    )
    parser.add_argument("--host", default=settings().host, help="address to listen on")
    parser.add_argument("--port", type=int, default=port, help="port of the API (any free one)")
    return parser.parse_args(arguments)


def _say(sentence: str) -> None:
    with suppress(OSError):  # a closed output is no reason to end
        sys.stdout.write(f"{sentence}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
