"""Environments of a host: built once from wheels, read-only, and removed when nothing uses them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.model.provisions.package_lock import PackageLock
from app.core.model.provisions.requirements import PinnedPackage
from app.storage.store import Damaged, Store
from tests.wheels import add_wheel
from workers.control.package_locker import installed
from workers.process import uv
from workers.transfer.installs.environments import (
    PLATFORM_PYTHON,
    Environments,
    HeldEnvironment,
    NotBuilt,
    site_packages,
)


class Host:
    """A host with a folder of wheels and a store."""

    def __init__(self, folder: Path) -> None:
        self.wheels, self.store = folder / "wheels", Store.at(folder / "store")
        self.wheels.mkdir()
        self.environments = Environments(
            folder=folder / "environments",
            limit_bytes=2**30,
            build_s=60.0,
            options=("--no-index", "--find-links", str(self.wheels)),
            wheels=self.wheels,
        )

    def lock(self, *names: str, over: dict[str, str] | None = None, **more: str) -> str:
        """Make wheels of these names, and a lock with them in the store; return its hash."""
        pins = [self._pin(name, more.get(name, "1.0")) for name in names]
        has = dict(installed()) if over is None else over
        lock = PackageLock(python=PLATFORM_PYTHON, packages=tuple(pins), over=has)
        return self.store.put([lock.text.encode()])[0]

    def _pin(self, name: str, version: str) -> PinnedPackage:
        digest = add_wheel(self.wheels, name, version)
        return PinnedPackage(name=name, version=version, hashes=(f"sha256:{digest}",))

    def opened(self, sha256: str) -> HeldEnvironment:
        return self.environments.opened(sha256, self.store)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    tmp_path.chmod(0o755)
    return Host(tmp_path)


def run(held: HeldEnvironment, code: str, *more: str) -> str:
    done = subprocess.run(
        [held.folder / "bin" / "python", *more, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
        cwd="/",
    )
    return done.stdout.strip()


def test_interpreter_finds_its_packages_and_then_the_platforms(host: Host) -> None:
    held = host.opened(host.lock("towers", "numpy-tools"))
    code = "import towers, numpy_tools, numpy, sys; print(numpy.__file__.startswith(sys.prefix))"
    assert run(held, code) == "False"
    assert run(held, "import towers; print(towers.VERSION)", "-I") == "1.0"
    held.close()


def test_environment_that_is_alone_sees_nothing_of_the_platform(host: Host) -> None:
    held = host.opened(host.lock("towers", over={}))
    code = "import importlib.util as u, towers; print(u.find_spec('numpy'), u.find_spec('app'))"
    assert run(held, code) == "None None"
    held.close()


def test_environment_without_packages_is_one_too(host: Host) -> None:
    held = host.opened(host.lock())
    assert run(held, "import numpy; print('here')") == "here"
    held.close()


def test_ten_that_want_a_new_environment_build_it_once(host: Host, tmp_path: Path) -> None:
    sha256 = host.lock("towers")
    found: list[HeldEnvironment] = []
    threads = [
        threading.Thread(target=lambda: found.append(host.opened(sha256))) for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    inodes = {site_packages(one.folder, PLATFORM_PYTHON).stat().st_ino for one in found}
    assert len(found) == 10
    assert len(inodes) == 1
    assert len(list((tmp_path / "environments" / "built").iterdir())) == 1
    for one in found:
        one.close()


def test_who_waits_to_build_takes_what_others_have_built_and_use(
    host: Host, tmp_path: Path
) -> None:
    sha256, elsewhere = host.lock("towers"), replace(host.environments, folder=tmp_path / "else")
    elsewhere.opened(sha256, host.store).close()
    used = host.environments.lock_file(sha256)  # as by a resident that lives on
    fcntl.flock(used, fcntl.LOCK_SH)
    found: list[HeldEnvironment] = []
    thread = threading.Thread(target=lambda: found.append(host.opened(sha256)))
    thread.start()
    host.environments.built(sha256).parent.mkdir(parents=True, exist_ok=True)
    elsewhere.built(sha256).chmod(0o755)
    elsewhere.built(sha256).rename(host.environments.built(sha256))
    thread.join(60)
    has_it = not thread.is_alive()
    os.close(used)
    thread.join()
    found[0].close()
    assert has_it, "it waited for the other to end"


def test_three_device_workers_of_a_host_build_it_once(host: Host, tmp_path: Path) -> None:
    sha256 = host.lock("towers")
    code = (
        "import logging, sys; logging.basicConfig(level='INFO')\n"
        "from pathlib import Path\n"
        "from app.storage.store import Store\n"
        "from workers.transfer.installs.environments import Environments\n"
        "home, wheels, lock = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]\n"
        "options = ('--no-index', '--find-links', str(wheels))\n"
        "made = Environments(folder=home / 'environments', limit_bytes=2**30, build_s=60.0,\n"
        "                    options=options, wheels=wheels)\n"
        "made.opened(lock, Store.at(home / 'store')).close()\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path), str(host.wheels), sha256]
    root = Path(__file__).parents[4]
    workers = [
        subprocess.Popen(words, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], said
    assert sum("built environment" in one for one in said) == 1


def test_second_use_builds_nothing_and_takes_no_time(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = host.lock("towers")
    host.opened(sha256).close()
    monkeypatch.setattr(Environments, "_build", None)  # would fail

    def took_s() -> float:
        began_s = time.monotonic()
        host.opened(sha256).close()
        return time.monotonic() - began_s

    assert any(took_s() < 0.3 for _ in range(50))  # the machine may have other work


def test_nobody_may_write_to_it(host: Host) -> None:
    held = host.opened(host.lock("towers"))
    for path, folders, files in os.walk(held.folder):
        for name in (".", *folders, *files):
            at = Path(path, name)
            assert at.is_symlink() or not at.stat().st_mode & 0o222, at
            assert at.lstat().st_uid == os.geteuid()
            assert at.is_symlink() or at.stat().st_mode & 0o004, at
    held.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_it_and_cannot_write_to_it(host: Host) -> None:
    held = host.opened(host.lock("towers"))
    host.environments.folder.chmod(0o755)
    (host.environments.folder / "built").chmod(0o755)
    module = site_packages(held.folder, PLATFORM_PYTHON) / "towers.py"
    for path in (module, module.parent / "more.py", held.folder / "bin" / "python3.99"):
        code = (
            f"import os; os.setuid(65534); open({str(module)!r}).close(); open({str(path)!r}, 'a')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert b"PermissionError" in done.stderr
    held.close()


def test_wheel_of_another_hash_is_refused_in_uvs_words(host: Host, tmp_path: Path) -> None:
    sha256 = host.lock("towers")
    add_wheel(host.wheels, "towers", files={"towers.py": "VERSION = 'another'\n"})
    with pytest.raises(NotBuilt) as told:
        host.opened(sha256)
    assert "Hash mismatch" in str(told.value)
    assert not list((tmp_path / "environments").glob("work/making-*"))
    add_wheel(host.wheels, "towers")
    host.opened(sha256).close()  # a failure is not kept


def test_lock_over_another_torch_is_refused(host: Host) -> None:
    sha256 = host.lock("towers", over={**installed(), "torch": "9.9.9"})
    with pytest.raises(NotBuilt, match=r"locked for torch 9\.9\.9"):
        host.opened(sha256)


def test_lock_that_the_store_lost_is_told(host: Host) -> None:
    with pytest.raises(Damaged):
        host.opened("5" * 64)


def test_python_that_the_host_lacks_is_told(host: Host) -> None:
    lock = PackageLock(python="3.99", packages=())
    sha256, _ = host.store.put([lock.text.encode()])
    with pytest.raises(NotBuilt, match=r"no Python 3\.99"):
        host.opened(sha256)


def test_build_that_takes_too_long_is_ended(host: Host) -> None:
    sha256 = host.lock("towers")
    host.environments = replace(host.environments, build_s=0.001)
    with pytest.raises(NotBuilt, match="took over"):
        host.opened(sha256)


def built(host: Host, names: Sequence[str]) -> dict[str, str]:
    """Build an environment for each name, in this order."""
    locks = {name: host.lock(name) for name in names}
    for sha256 in locks.values():
        host.opened(sha256).close()
        time.sleep(0.01)  # so that their times of use differ
    return locks


def test_least_recently_used_goes_first_and_never_one_in_use(host: Host) -> None:
    locks = built(host, ("first", "second"))
    used = host.opened(locks["first"])
    assert {*host.environments.shown()} == {*locks.values()}
    host.environments = replace(host.environments, limit_bytes=0)
    third = host.opened(host.lock("third"))
    here = host.environments.shown()
    assert locks["first"] in here
    assert locks["second"] not in here
    assert run(used, "import first; print(first.VERSION)") == "1.0"
    used.close()
    third.close()
    host.opened(host.lock("fourth")).close()
    assert len(host.environments.shown()) == 1


def test_size_and_build_time_are_shown(host: Host) -> None:
    sha256 = host.lock("towers")
    before_ns = host.environments.changed_ns
    host.opened(sha256).close()
    ((size_bytes, took_us),) = host.environments.shown().values()
    assert size_bytes > 1000
    assert took_us > 1000
    assert host.environments.changed_ns != before_ns


def test_build_sees_neither_home_nor_secrets(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs in place of uv looks around: no build comes nearer to the host."""
    spy = tmp_path / "spy"
    looks = f"ls -a / /root {tmp_path}; env; touch /usr/mine {tmp_path}/mine"
    spy.write_text(f"#!/bin/sh\n({looks}) >&2; exit 3\n")
    spy.chmod(0o755)
    monkeypatch.setattr(uv, "program", lambda: str(spy))
    monkeypatch.setenv("UV_SPY", "named for uv")
    monkeypatch.setenv("DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(NotBuilt) as told:
        host.opened(host.lock("towers"))
    said = str(told.value)
    assert "UV_SPY=named for uv" in said
    assert "secret" not in said
    assert "store" not in said.split()
    assert "environments" not in said.split()
    assert "cannot touch '/usr/mine': Read-only file system" in said
    assert not (tmp_path / "mine").exists()
