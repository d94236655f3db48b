"""Builds one environment, as a program: a virtual environment with exactly the wheels of a lock.

    device worker -> this, in the layers of the sandbox that stand here -> uv -> proxy -> index

It sees its own folder, the interpreter and what uv needs to reach the index; no store, no secret of
Roundhouse.  Its only network is a proxy that reaches the hosts of the index (`workers.egress`);
with an index in a folder it has none.  If the host reaches the index through a proxy of its own,
the builder uses the network of the host.  `uv` takes wheels only and checks their hashes, so no
code of a package runs.  Messages of uv go to the standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from workers.egress import index_proxy
from workers.process import uv
from workers.process.isolation import sandbox
from workers.process.isolation.sandbox import Room

JSON = dict[str, Any]

_RESOLVER = ("/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/pki", "/etc/uv")
_NAMED_FILES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "UV_CONFIG_FILE")
TMP_BYTES = 2**30
PROXY = f"http://127.0.0.1:{sandbox.PROXY_PORT}"
NICE = 10  # of a build for waiting tasks: running tasks go first
PART = 4  # such a build uses one of so many parts of the processors


def main() -> NoReturn:
    sandbox.die_with_parent()
    order = json.loads(sys.argv[1])
    if order["is_ahead"]:
        os.nice(NICE)
    work = Path(order["work"])
    walls: list[str] = []
    room = _room(order, work)
    if order["is_walled"]:
        standing, _ = sandbox.try_out(room)
        # The environment must belong to our user, so that no resident can change it.
        given_up = {"user", "network"} if order["reach"] is None else {"user"}
        walls = [name for name in standing if name not in given_up]
    if order["reach"] and "network" in walls:
        room = replace(room, egress=index_proxy.start(order["reach"], walls, room.code))
    sandbox.separate(walls)
    if "processes" in walls and (inner := os.fork()):
        _, status = os.waitpid(inner, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    sandbox.die_with_parent()
    sandbox.enclose(room, walls)
    os.umask(0o022)  # residents may read the environment
    _, inside = room.inside(walls)
    os._exit(_build(order, inside, has_proxy=room.egress is not None))


def _room(order: JSON, work: Path) -> Room:
    nothing = work / order["making"] / "nothing"
    nothing.mkdir()
    return Room(
        code=nothing,
        scratch=work,
        uid=os.geteuid(),
        folders=tuple(_needed(order)),
        tmp_bytes=TMP_BYTES,
    )


def _needed(order: JSON) -> Iterator[Path]:
    """Yield the files that uv reads: the interpreter, its configuration, and files for the
    network.
    """
    yield Path(order["python"]).resolve().parents[1]
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


def _build(order: JSON, work: Path, *, has_proxy: bool) -> int:
    """Make the environment and install the packages; return an exit status."""
    making = work / order["making"]
    environment = {
        **uv.variables(work / "downloads", PROXY if has_proxy else ""),
        "TMPDIR": str(making),
    }
    if order["is_ahead"]:
        some = str(max(1, (os.cpu_count() or 1) // PART))
        environment |= {"UV_CONCURRENT_INSTALLS": some, "UV_CONCURRENT_DOWNLOADS": some}
    made = making / "environment"
    steps: list[Sequence[str]] = [
        ["venv", "--quiet", "--relocatable", "--python", order["python"], str(made)]
    ]
    if order["has_packages"]:
        how = ["--quiet", "--require-hashes", "--no-deps", "--compile-bytecode", *uv.ONLY_WHEELS]
        at = ["--python", str(made / "bin" / "python"), "--requirements", str(making / "lock.txt")]
        steps.append(["pip", "install", *how, *order["options"], *at])
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
