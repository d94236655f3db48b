"""Faults of a host that builds environments ahead: they are told, and the builds go on."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.core.model.provisions.package_lock import PackageLock
from app.core.model.provisions.requirements import PinnedPackage
from tests.workers.transfer.installs.test_environments import Host
from workers.transfer.installs.builds_ahead import BuildsAhead
from workers.transfer.installs.environments import PLATFORM_PYTHON, Environments

LIMIT_S = 60.0


class Builds:
    """The thread, and what it told."""

    def __init__(self, host: Host) -> None:
        self.host, self.news = host, threading.Condition()
        self.thread = BuildsAhead(host.environments, host.store, self._happened)
        self.thread.start()

    def _happened(self) -> None:
        with self.news:
            self.news.notify_all()

    def until(self, test: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(test, LIMIT_S)


@pytest.fixture
def builds(tmp_path: Path) -> Iterator[Builds]:
    tmp_path.chmod(0o755)
    found = Builds(Host(tmp_path))
    yield found
    found.thread.end()
    found.thread.join()


@pytest.mark.parametrize("where", ["turn", "look"])
def test_fault_of_the_host_puts_a_lock_off(builds: Builds, where: str) -> None:
    host = builds.host
    lock, kept = host.lock("towers"), host.environments
    wrong = kept.folder / "locks" if where == "turn" else kept.built(lock) / "about.json"
    if where == "turn":
        wrong.parent.mkdir(parents=True)
        wrong.touch()
    else:
        wrong.mkdir(parents=True)
    builds.thread.want([lock])
    builds.until(lambda: "the host cannot build" in builds.thread.state(lock)[1])
    assert builds.thread.state(lock)[0] == "waiting"
    assert str(kept.folder) not in builds.thread.state(lock)[1]
    if where == "turn":
        wrong.unlink()
    else:
        shutil.rmtree(wrong.parent)
    builds.until(lambda: builds.thread.state(lock)[0] == "building" or kept.has(lock))
    builds.until(lambda: kept.has(lock))


def test_failure_that_cannot_be_written_down_is_one_nevertheless(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Environments, "note_failure", full)
    good = builds.host.lock("towers")
    pin = PinnedPackage(name="towers", version="1.0", hashes=("sha256:" + "5" * 64,))
    lock = PackageLock(python=PLATFORM_PYTHON, packages=(pin,), over={})
    wrong, _ = builds.host.store.put([lock.text.encode()])
    builds.thread.want([wrong, good])
    # two are built at a time, and either may be done first
    builds.until(lambda: builds.host.environments.has(good))
    builds.until(lambda: builds.thread.state(wrong)[0] == "failed")
    assert "Hash mismatch" in builds.thread.state(wrong)[1]
