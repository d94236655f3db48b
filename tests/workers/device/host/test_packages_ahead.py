"""Packages that are installed on a host before the tasks that wait for them have a device."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.core.model.protocol.messages import Alive, Finished
from tests.processes import children, runs
from tests.workers.conftest import PATIENCE_S, DeviceRig
from tests.workers.device.conftest import PackagedRig
from workers.process import uv
from workers.transfer.installs import builds_ahead, environments


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No build of this process gets to its builder before the test sets it."""
    environments.interpreters()  # it asks for uv, too, and once
    program, opened = uv.program(), threading.Event()

    def once_open() -> str:
        assert opened.wait(PATIENCE_S)
        return program

    monkeypatch.setattr(uv, "program", once_open)
    yield opened
    opened.set()


class HangingUv:
    """Stands for uv in the first builders of this process, which do not end by themselves."""

    def __init__(self, folder: Path, builders: int) -> None:
        self.file, self.left, self.program = folder / "uv", builders, uv.program()
        self.file.write_text(f"#!/bin/sh\nexec sleep {PATIENCE_S}\n")
        self.file.chmod(0o755)
        self.asked = 0  # number of builders so far

    def __call__(self) -> str:
        self.asked += 1
        return str(self.file) if self.asked <= self.left else self.program


def facts(rig: DeviceRig) -> dict[str, Any]:
    return dict(rig.reports[-1].facts)


def state(report: Alive, lock: str) -> str:
    return "ready" if lock in report.facts.get("environments", {}) else _told(report, lock)[0]


def _told(report: Alive, lock: str) -> list[str]:
    return list(report.facts.get("builds", {}).get(lock, ["", ""]))


def builder() -> psutil.Process | None:
    """The process that builds now, a child of this one."""
    here = children(os.getpid())
    return next((child for child in here if runs(child, "environment_builder")), None)


def test_wanted_packages_are_installed_while_a_task_has_the_device(
    packaged: PackagedRig, gate: threading.Event
) -> None:
    rig, environment = packaged.rig, packaged.environment()
    rig.launch("t1", "jobs:Count", params={"steps": 100_000, "nap_s": 0.01})
    rig.steps("t1", 2)
    rig.environments = [environment["lock"]]
    rig.until(lambda: state(rig.reports[-1], environment["lock"]) == "building")
    gate.set()
    rig.until(lambda: state(rig.reports[-1], environment["lock"]) == "ready")
    assert facts(rig)["builds"] == {}
    assert rig.reports[-1].residents[0].task == "t1"
    rig.cancel("t1")
    rig.until(lambda: not rig.supervisor.stays.residents)
    rig.launch("t2", "packaged:Tower", environment=environment)
    assert rig.event(Finished, "t2").result["file"].startswith("/environment/")


def test_failure_is_told_in_uvs_words_until_nobody_waits(packaged: PackagedRig) -> None:
    rig = packaged.rig
    wrong = replace(packaged.pin, hashes=("sha256:" + "5" * 64,))
    lock = packaged.environment(packages=(wrong,))["lock"]
    good = packaged.environment()["lock"]
    rig.environments = [lock, good]
    rig.until(lambda: state(rig.reports[-1], lock) == "failed")
    assert "Hash mismatch" in _told(rig.reports[-1], lock)[1]
    rig.until(lambda: state(rig.reports[-1], good) == "ready")
    assert state(rig.reports[-1], lock) == "failed"
    rig.environments = []
    rig.until(lambda: facts(rig)["builds"] == {})


def test_killed_builder_is_begun_again(
    packaged: PackagedRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, lock = packaged.rig, packaged.environment()["lock"]
    environments.interpreters()
    monkeypatch.setattr(uv, "program", hanging := HangingUv(tmp_path, builders=1))
    rig.environments = [lock]

    def is_killed() -> bool:
        if (found := builder()) is not None:
            os.kill(found.pid, signal.SIGKILL)
        return found is not None

    rig.until(is_killed)
    rig.until(lambda: state(rig.reports[-1], lock) == "ready")
    assert hanging.asked == 2, "one builder was killed, and another one built"


def test_builder_that_is_always_killed_is_a_failure(
    packaged: PackagedRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, lock, seen = packaged.rig, packaged.environment()["lock"], set[int]()
    environments.interpreters()
    monkeypatch.setattr(uv, "program", HangingUv(tmp_path, builders=builds_ahead.KILLED_MOST))

    def killed() -> bool:
        found = builder()
        if found is not None and found.pid not in seen:
            seen.add(found.pid)
            os.kill(found.pid, signal.SIGKILL)
        return state(rig.reports[-1], lock) == "failed"

    rig.environments = [lock]
    rig.until(killed)
    assert "ended by signal 9" in _told(rig.reports[-1], lock)[1]
    assert len(seen) == builds_ahead.KILLED_MOST


def test_two_workers_of_a_host_build_once(packaged: PackagedRig, gate: threading.Event) -> None:
    """The second one shares the folder of the first, and waits for its turn."""
    first, lock = packaged.rig, packaged.environment()["lock"]
    kept = first.house.environments
    begun: list[str] = []
    other = builds_ahead.BuildsAhead(kept, first.store, lambda: begun.append(other.state(lock)[0]))
    other.start()
    first.environments = [lock]
    first.until(lambda: state(first.reports[-1], lock) == "building")
    other.want([lock])
    gate.set()
    first.until(lambda: state(first.reports[-1], lock) == "ready")
    other.end()
    other.join()
    assert begun == []


def test_failure_of_one_worker_counts_for_the_other(packaged: PackagedRig) -> None:
    first = packaged.rig
    wrong = replace(packaged.pin, hashes=("sha256:" + "5" * 64,))
    lock = packaged.environment(packages=(wrong,))["lock"]
    seen: list[str] = []
    other = builds_ahead.BuildsAhead(
        first.house.environments, first.store, lambda: seen.append(other.state(lock)[0])
    )
    other.want([lock])
    first.environments = [lock]
    first.until(lambda: state(first.reports[-1], lock) == "failed")
    other.start()
    first.until(lambda: bool(seen))
    other.end()
    other.join()
    assert seen == ["failed"], "it did not build"


def test_disk_that_is_full_of_wanted_packages_is_told(packaged: PackagedRig) -> None:
    rig = packaged.rig
    first, second = packaged.environment(), packaged.environment(over={})
    kept = replace(rig.house.environments, limit_bytes=1)
    told: list[list[str]] = []
    builds = builds_ahead.BuildsAhead(
        kept, rig.store, lambda: told.append(builds.state(second["lock"]))
    )
    builds.want([first["lock"], second["lock"]])
    builds.start()
    rig.until(lambda: ["waiting", builds_ahead.FULL] in told)
    assert kept.has(first["lock"])
    builds.want([second["lock"], first["lock"]])  # its turn is after now, so it makes room
    rig.until(lambda: kept.has(second["lock"]))
    rig.until(lambda: builds.state(first["lock"]) == ["waiting", builds_ahead.FULL])
    assert not kept.has(first["lock"])
    builds.want([first["lock"]])  # the second is not waited for any more
    rig.until(lambda: kept.has(first["lock"]))
    builds.end()
    builds.join()
    assert not kept.has(second["lock"])
