"""No code of a package runs while its environment is built, and a build keeps to its bounds."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from app.core.model.provisions.package_lock import PackageLock
from app.core.model.provisions.requirements import PinnedPackage
from tests.wheels import add_wheel
from tests.workers.conftest import PATIENCE_S
from tests.workers.transfer.installs.test_environments import Host
from workers.process import uv
from workers.process.isolation.helper_groups import HelperGroups
from workers.transfer.installs import environments
from workers.transfer.installs.builds_ahead import AT_ONCE, BuildsAhead
from workers.transfer.installs.environments import (
    PLATFORM_PYTHON,
    AheadBuild,
    NotBuilt,
    NotWanted,
)

# Leaves a mark in the first folder of the environment that it may write to.
PLANT = (
    "import os, sys; "
    "[open(os.path.join(at, 'RAN-{name}'), 'w').close() for at in (sys.prefix, os.getcwd(), "
    "os.environ.get('TMPDIR', '/tmp')) if os.access(at, os.W_OK)]"
)


def planted(name: str) -> str:
    return PLANT.format(name=name) + "\n"


def lock_of(host: Host, name: str, files: dict[str, str]) -> str:
    digest = add_wheel(host.wheels, name, files=files)
    pin = PinnedPackage(name=name, version="1.0", hashes=(f"sha256:{digest}",))
    text = PackageLock(python=PLATFORM_PYTHON, packages=(pin,), over={}).text
    return host.store.put([text.encode()])[0]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    tmp_path.chmod(0o755)
    return Host(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "evil.pth",
        "sitecustomize.py",
        "usercustomize.py",
        "compileall.py",
        "encodings/__init__.py",
        "evil-1.0.data/scripts/python",
        "evil-1.0.data/scripts/python3",
        f"evil-1.0.data/data/lib/python{PLATFORM_PYTHON}/site-packages/also.pth",
        "evil-1.0.data/data/pyvenv.cfg",
    ],
)
def test_build_runs_no_code_of_a_package(host: Host, tmp_path: Path, path: str) -> None:
    body = planted("it")
    if "scripts/" in path:
        body = '#!/bin/sh\n: > "$(dirname "$0")/../RAN-it"\n'
    if path.endswith("pyvenv.cfg"):
        body = "home = /scratch\ninclude-system-site-packages = true\n"
    lock = lock_of(host, "evil", {path: body, "evil.py": "ONE = 1\n"})
    with contextlib.suppress(NotBuilt):  # a refused package has not run either
        host.opened(lock).close()
    assert [str(at) for at in tmp_path.rglob("RAN-*")] == []


def test_packages_are_compiled_and_belong_to_us(host: Host) -> None:
    lock = lock_of(host, "good", {"good/__init__.py": "ONE = 1\n", "good/old.py": "print 1\n"})
    held = host.opened(lock)
    site = environments.site_packages(held.folder, PLATFORM_PYTHON)
    compiled = list((site / "good" / "__pycache__").iterdir())
    assert [one.name.split(".")[0] for one in compiled] == ["__init__"], "the other is no Python 3"
    ours = held.folder.stat().st_uid
    for path in held.folder.rglob("*"):
        assert path.lstat().st_uid == ours, path
        assert path.is_symlink() or not path.lstat().st_mode & 0o222, path
    held.close()


def test_archive_is_checked_against_its_hash_in_each_build(host: Host, tmp_path: Path) -> None:
    host.opened(host.lock("towers")).close()
    assert list((tmp_path / "environments" / "work").iterdir()) == [], "no download is kept"
    second = host.lock("towers", "more")
    wheel = next(host.wheels.glob("towers-*.whl"))
    about = wheel.stat()
    add_wheel(host.wheels, "towers", files={"towers.py": "VERSION = 'bad'\n"})
    os.utime(wheel, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(NotBuilt, match="Hash mismatch"):
        host.opened(second)


class BusyUv:
    """Stands for a uv that does not end by itself; `processes` are those that run it."""

    def __init__(self, folder: Path, first: str = "") -> None:
        self.file, self.seconds = folder / "uv", f"{PATIENCE_S + folder.stat().st_ino % 1000:g}"
        self.file.write_text(f"#!/bin/sh\n{first}\nexec sleep {self.seconds}\n")
        self.file.chmod(0o755)

    def __call__(self) -> str:
        return str(self.file)

    @property
    def processes(self) -> list[psutil.Process]:
        wanted = ["sleep", self.seconds]
        return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == wanted]


@pytest.fixture
def busy(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BusyUv]:
    environments.interpreters()  # it asks for uv, too, and once

    def make(first: str = "") -> BusyUv:
        made = BusyUv(tmp_path, first)
        monkeypatch.setattr(uv, "program", made)
        return made

    return make


def test_build_ends_with_the_last_task_that_waits_for_it(
    host: Host, busy: Callable[..., BusyUv]
) -> None:
    program = busy()
    ahead = AheadBuild(before=(), is_wanted=lambda: not program.processes)
    with pytest.raises(NotWanted):
        host.environments.opened(host.lock("towers"), host.store, ahead=ahead)
    psutil.wait_procs(program.processes, timeout=PATIENCE_S)
    assert program.processes == []


def test_build_that_fills_the_disk_is_ended(host: Host, busy: Callable[..., BusyUv]) -> None:
    program = busy(first="head -c 3000000 /dev/urandom > much")
    host.environments = replace(host.environments, build_bytes=2 * 2**20)
    with pytest.raises(NotBuilt, match=r"need more than 2.0 MiB of disk"):
        host.opened(host.lock("towers"))
    psutil.wait_procs(program.processes, timeout=PATIENCE_S)
    assert program.processes == []


def test_build_has_control_groups_of_its_own(
    host: Host, busy: Callable[..., BusyUv], tmp_path: Path
) -> None:
    helpers = HelperGroups()
    helpers.open("h.0", tmp_path)
    with helpers.of_helper() as groups:
        if not groups:
            helpers.close()
            pytest.skip("no limit of control groups works on this machine")
    program, seen = busy(), set[str]()

    def is_wanted() -> bool:
        for process in program.processes:
            seen.add(Path(f"/proc/{process.pid}/cgroup").read_text())
        return not seen

    host.environments = replace(host.environments, helpers=helpers)
    with pytest.raises(NotWanted):
        host.environments.opened(
            host.lock("towers"), host.store, ahead=AheadBuild(before=(), is_wanted=is_wanted)
        )
    helpers.close()
    assert "h.0-helpers" in seen.pop()
    assert program.processes == [], "nothing of a build outlives its group"


def test_host_builds_several_at_once(host: Host, busy: Callable[..., BusyUv]) -> None:
    program, locks = busy(), [host.lock(name) for name in ("one", "two", "three")]
    changed = threading.Event()
    workers = [BuildsAhead(host.environments, host.store, changed.set) for _ in range(2)]
    for worker in workers:
        worker.want(locks)
        worker.start()

    def building() -> list[str]:
        return sorted(one for one in locks for w in workers if w.state(one)[0] == "building")

    while len(program.processes) < AT_ONCE:
        assert changed.wait(PATIENCE_S)
    assert len(building()) == AT_ONCE
    assert len({*building()}) == AT_ONCE, "no two workers build the same"
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.join()
    psutil.wait_procs(program.processes, timeout=PATIENCE_S)
    assert program.processes == []
