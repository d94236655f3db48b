"""Builds one environment, as a program: a virtual environment with exactly the wheels of a lock.

    device worker -> this -> installation: uv -> proxy -> index
                          -> compilation:  Python's own compiler

No code of a package runs in a build.  Each of the two stages has a sandbox of its own, of the
layers that work here, and the control groups of this build.

The installation sees the draft folder of this build, the interpreter, and what uv needs to reach
the index, with the credentials for it; no store, no secret of Roundhouse.  Its only network is a
proxy that reaches the hosts of the index (`workers.egress`); with an index in a folder it has none.
If the host reaches the index through a proxy of its own, the installation uses the network of the
host.  `uv` takes wheels only and starts no program of the environment.  Its cache is in the draft
folder, so each archive is downloaded, and checked against its hashes, for each build.

The compilation writes the `__pycache__` folders, without which each import would compile again.  It
runs the base interpreter with `-I -S`, which reads no `.pth` file and imports nothing of the
environment, as a user of its own that may add files to the environment and to nothing else.

Messages of uv go to the standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from workers.egress import index_proxy
from workers.process import uv
from workers.process.isolation import cgroups, sandbox, uids
from workers.process.isolation.sandbox import Room

JSON = dict[str, Any]

_RESOLVER = ("/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/pki", "/etc/uv")
_NAMED_FILES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "UV_CONFIG_FILE")
TMP_BYTES = 2**30
MADE, NOTHING = "environment", "nothing"  # folders of the draft
PROXY = f"http://127.0.0.1:{sandbox.PROXY_PORT}"
NICE = 10  # of a build for waiting tasks: running tasks go first
PART = 4  # such a build uses one of so many parts of the processors


def main() -> NoReturn:
    sandbox.die_with_parent()
    order = json.loads(sys.argv[1])
    cgroups.join(order["groups"])
    if order["is_ahead"]:
        os.nice(NICE)
    making = Path(order["making"])
    (making / NOTHING).mkdir()
    room = _room(making, making, os.geteuid(), _needed(order))
    # The user stays: the archives and the credentials may be readable for our user only.
    without = {"user", "network"} if order["reach"] is None else {"user"}
    status = _in_sandbox(order, room, without, lambda at, room: _install(order, at, room))
    if not status and order["has_packages"]:
        made = making / MADE
        _give_folders(made, uids.BUILDER)
        room = _room(making, made, uids.BUILDER, [_base(order)])
        # Without its result the environment is complete, and slower to import.
        _in_sandbox(order, room, set(), lambda at, _: _compile(order, at))
    os._exit(status)


def _room(making: Path, scratch: Path, uid: int, folders: Iterable[Path]) -> Room:
    return Room(
        code=making / NOTHING, scratch=scratch, uid=uid, folders=tuple(folders), tmp_bytes=TMP_BYTES
    )


def _in_sandbox(
    order: JSON, room: Room, without: Collection[str], stage: Callable[[Path, Room], int]
) -> int:
    """Run a stage in a child process with all layers that work here, `without` some; return its
    exit status.
    """
    standing = sandbox.try_out(room)[0] if order["is_walled"] else []
    walls = [name for name in standing if name not in without]
    if child := os.fork():
        return _status_of(child)
    sandbox.die_with_parent()
    if order["reach"] and "network" in walls and "network" not in without:
        room = replace(room, egress=index_proxy.start(order["reach"], walls, room.code))
    sandbox.separate(walls)
    if "processes" in walls and (inner := os.fork()):
        os._exit(_status_of(inner))
    sandbox.die_with_parent()
    sandbox.enclose(room, walls)
    sandbox.die_with_parent()  # a change of user has undone it
    os.umask(0o022)  # residents may read the environment
    _, inside = room.inside(walls)
    os._exit(stage(inside, room))


def _status_of(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _give_folders(made: Path, uid: int) -> None:
    """Let a user add files to all folders of the environment (`make_read_only` takes them back)."""
    if os.geteuid() == 0:
        for path, _, _ in os.walk(made):
            os.chown(path, uid, uid, follow_symlinks=False)


def _base(order: JSON) -> Path:
    """Return the installation of Python to which the environment's interpreter belongs."""
    return Path(order["python"]).resolve().parents[1]


def _needed(order: JSON) -> Iterator[Path]:
    """Yield the files that uv reads: the interpreter, its configuration, and files for the
    network.
    """
    yield _base(order)
    yield Path(order["uv"])
    if order["wheels"]:
        yield Path(order["wheels"])
        return
    home = Path(os.environ.get("HOME", "/nonexistent"))
    named = (os.environ[name] for name in _NAMED_FILES if name in os.environ)
    configured = (home / ".config" / "uv", home / ".netrc")
    for path in (*map(Path, _RESOLVER), *map(Path, named), *configured):
        yield path
        if path.is_symlink():
            yield path.resolve()


def _install(order: JSON, making: Path, room: Room) -> int:
    """Make the environment and install the packages; return an exit status."""
    environment = {
        **uv.variables(making / "downloads", PROXY if room.egress is not None else ""),
        "TMPDIR": str(making),
        "UV_LINK_MODE": "hardlink",  # the downloads are removed after the build
    }
    if order["is_ahead"]:
        some = str(_some_threads())
        environment |= {"UV_CONCURRENT_INSTALLS": some, "UV_CONCURRENT_DOWNLOADS": some}
    made = making / MADE
    steps: list[Sequence[str]] = [
        ["venv", "--quiet", "--relocatable", "--python", order["python"], str(made)]
    ]
    if order["has_packages"]:
        how = ["--quiet", "--require-hashes", "--no-deps", "--no-compile-bytecode"]
        how += [*uv.ONLY_WHEELS, *order["options"]]
        at = ["--python", str(made / "bin" / "python"), "--requirements", str(making / "lock.txt")]
        steps.append(["pip", "install", *how, *at])
    for step in steps:
        done = uv.limited(
            [order["uv"], *step],
            folder=making,
            environment=environment,
            limit_s=order["limit_s"],
        )
        if done.status:
            sys.stderr.write(done.said or f"uv ended with status {done.status}")
            sys.stderr.flush()
            return 1
    return 0


def _compile(order: JSON, made: Path) -> int:
    """Write the compiled modules of the packages; return an exit status."""
    threads = _some_threads() if order["is_ahead"] else os.cpu_count() or 1
    program = Path(order["python"]).resolve()
    words = [program, "-I", "-S", "-m", "compileall", "-qq", "-j", threads, made / "lib"]
    done = uv.limited(
        [*map(str, words)],
        folder=made,
        environment={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        limit_s=order["limit_s"],
    )
    return 1 if done.status else 0


def _some_threads() -> int:
    """Return the number of threads of a build that no task on a device waits for."""
    return max(1, (os.cpu_count() or 1) // PART)
