"""A task asks for limits and takes all it can: it is ended and told which limit, with its peak.

A neighbour on another device of the host has its steps timed, before the attack and during it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.core.model.protocol.messages import Failed, Finished, Stopped
from tests.workers.conftest import DeviceRig
from workers.device.processes.resident import Resident
from workers.process.isolation import cgroups

pytestmark = pytest.mark.security

SIZES = {"memory_bytes": 2**30, "host_memory_bytes": 2**28, "overhead_bytes": 2**28}
LIMITS = {"cpus": 0.5, "memory_bytes": 2**28, "disk_bytes": 2**28, "processes": 64}
NEIGHBOUR = """
import json, os, time
x, out = 0, open(os.environ["ROUNDHOUSE_METRICS"], "a", buffering=1)
while True:
    began = time.perf_counter()
    for n in range(100_000):
        x = (x * 31 + n) % 1_000_003
    time.sleep(0.01)
    out.write(json.dumps({"step_ms": 1000 * (time.perf_counter() - began)}) + "\\n")
"""
FORKS = """
import os, time
while True:
    if not os.fork():
        time.sleep(60)
"""
SPINS = """
import os
for _ in range(40):
    if not os.fork():
        while True: pass
import time; time.sleep(4); print("spun", flush=True); os._exit(3)
"""
EATS = """
held = []
for n in range(10 * 64):
    held.append(bytes([n % 256]) * 2**24)
print("10 GB")
"""
FILLS = """
with open("big", "wb", buffering=0) as file:
    for _ in range(10 * 1024):
        file.write(b"1" * 2**20)
print("10 GB")
"""
MANY = """
for n in range(10**6):
    open(str(n), "w").close()
print("a million")
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DeviceRig, DeviceRig]]:
    """Two devices of one host: of the attacker, and of its neighbour."""
    made = [
        DeviceRig(tmp_path_factory.mktemp(name), device=f"h.{n}", **SIZES)
        for n, name in enumerate(("attacker", "neighbour"))
    ]
    for one in made:
        one.open()
    yield made[0], made[1]
    for one in made:
        one.close()


def _needs(rig: DeviceRig, *resources: str) -> None:
    gives = rig.reports[-1].facts["gives"]
    for name in resources:
        if name not in gives:
            pytest.skip(f"this host keeps no limit of {name}: {rig.reports[-1].facts['unlimited']}")


def _running(rig: DeviceRig, task: str) -> Resident:
    """Wait until the task runs; return its process, beside which an earlier one may still end."""
    rig.until(lambda: rig.view(task) and rig.view(task).state == "running")
    (found,) = (r for r in list(rig.supervisor.stays.residents.values()) if r.task == task)
    return found


def _python(text: str) -> list[str]:
    return ["python", "-c", text]


def _times(rig: DeviceRig, task: str, seconds: float) -> list[float]:
    """Return the lengths of the neighbour's steps in milliseconds, over some time."""
    found, until_s = {}, time.monotonic() + seconds
    while time.monotonic() < until_s:
        view = rig.view(task)
        found[view.step] = view.metrics.get("step_ms", 0.0)
        time.sleep(0.05)
    return list(found.values())


class Steps:
    """The neighbour's steps, timed before an attack, during it and after it.

    Other work of this machine may come and go: the slower quiet time counts.
    """

    def __init__(self, rig: DeviceRig, task: str) -> None:
        self.rig, self.task = rig, task
        self.quiet_ms = self.during_ms = 0.0

    def quiet(self) -> None:
        self.quiet_ms = max(self.quiet_ms, statistics.median(_times(self.rig, self.task, 0.5)))

    def during(self, seconds: float) -> None:
        self.during_ms = statistics.median(_times(self.rig, self.task, seconds))

    def is_right(self) -> bool:
        return self.during_ms < 3 * self.quiet_ms + 5

    def went_on(self) -> str:
        """Assert that the attack did not hold up the neighbour; returns what was seen."""
        until_s = time.monotonic() + 30  # other work that was there meanwhile shows itself again
        while not self.is_right() and time.monotonic() < until_s:
            self.quiet()
        assert self.is_right(), f"{self.quiet_ms:.1f} -> {self.during_ms:.1f} ms"
        return f"Neighbour: {self.quiet_ms:.1f} -> {self.during_ms:.1f} ms"


@pytest.fixture
def neighbour(both: tuple[DeviceRig, DeviceRig], request: Any) -> Iterator[Steps]:
    """Time the neighbour's steps; `during` times them while an attack runs, `quiet` without one."""
    _, rig = both
    task = f"good-{request.node.callspec.id}" if hasattr(request.node, "callspec") else "good"
    rig.launch(task, _python(NEIGHBOUR))
    rig.steps(task, 20)
    steps = Steps(rig, task)
    steps.quiet()
    yield steps
    step = rig.view(task).step
    rig.steps(task, step + 5)  # it goes on, in the same process
    rig.cancel(task)
    rig.event(Stopped, task)


@pytest.mark.parametrize(
    ("name", "attack", "resource", "told"),
    [
        ("forks", FORKS, "processes", "It reached 64 processes and threads (its limit, resources."),
        ("eats", EATS, "memory", "of 256.0 MiB of host memory (its limit, resources."),
        ("fills", FILLS, "disk", "of 256.0 MiB of disk (its limit, resources.disk_bytes)."),
        ("many", MANY, "disk", "files, as many as its disk takes (resources.disk_bytes)."),
    ],
    ids=["forks", "eats", "fills", "many"],
)
def test_attack_ends_with_the_limit_that_it_reached_and_its_neighbour_goes_on(
    both: tuple[DeviceRig, DeviceRig], neighbour: Steps, name: str, attack: str, resource: str,
    told: str, record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    rig, _ = both
    _needs(rig, *LIMITS.keys() & {"cpus", "processes"}, "memory", "disk", resource)
    rig.launch(name, _python(attack), resources=LIMITS)
    neighbour.during(2.0)
    failed = rig.event(Failed, name)
    assert told in failed.message
    assert (failed.cause == "memory") == (resource == "memory")
    record_property("seen", f"{failed.message} {neighbour.went_on()}")


def test_task_gets_no_more_processor_time_than_it_asked_for(
    both: tuple[DeviceRig, DeviceRig],
    neighbour: Steps,
    record_property: Callable[[str, object], None],
) -> None:
    rig, _ = both
    _needs(rig, "cpus", "processes")
    rig.launch("spins", _python(SPINS), resources={"cpus": 0.5, "processes": 64})
    resident = _running(rig, "spins")
    neighbour.during(3.0)
    failed = rig.event(Failed, "spins")
    assert failed.message == "It ended with exit status 3."
    assert 100 < resident.peaks["cpus"] < 800  # thousandths, of 40 processes that never rest
    seen = f"{resident.peaks['cpus'] / 1000} processors"
    record_property("seen", f"{seen} {neighbour.went_on()}")


def test_task_within_its_limits_runs_to_its_end_and_its_peaks_are_known(
    both: tuple[DeviceRig, DeviceRig],
) -> None:
    rig, _ = both
    _needs(rig, "memory", "disk", "processes")
    text = (
        "import os, threading\n"
        "held, over = b'1' * (100 * 2**20), threading.Event()\n"
        "open('file', 'wb').write(b'1' * (50 * 2**20))\n"
        "[threading.Thread(target=over.wait).start() for _ in range(9)]\n"
        "while not os.path.exists('end'): pass\n"
        "over.set()\n"
    )
    rig.launch("fits", _python(text), resources={**LIMITS, "cpus": 2})
    resident = _running(rig, "fits")
    least = {"memory": 2**20 * 100, "disk": 2**20 * 50, "processes": 11, "cpus": 101}
    rig.until(lambda: all(resident.peaks.get(name, 0) >= least[name] for name in least))
    rig.let_end("fits")
    rig.event(Finished, "fits")
    assert 2**20 * 100 < resident.peaks["memory"] < 2**28
    assert 2**20 * 50 <= resident.peaks["disk"] < 2**20 * 80
    assert 11 <= resident.peaks["processes"] <= 20
    assert resident.peaks["cpus"] > 100


def test_task_that_asks_for_more_than_its_device_gives_is_not_begun(
    both: tuple[DeviceRig, DeviceRig],
) -> None:
    rig, _ = both
    rig.launch("much", _python("print(1)"), resources={"memory_bytes": 2**40})
    failed = rig.event(Failed, "much")
    assert failed.message == "This device cannot keep its limits: memory."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceRig]:
    """A device on a host without control groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroups, "hierarchies", lambda mountinfo, own: [])
        made = DeviceRig(tmp_path_factory.mktemp("plain"), **SIZES)
        made.open()
        yield made
        made.close()


@pytest.mark.parametrize(
    ("name", "attack", "resource", "told"),
    [
        ("eats", EATS, "memory", "of 256.0 MiB of host memory (its limit, resources."),
        ("forks", FORKS, "processes", "BlockingIOError: [Errno 11] Resource temporarily unavail"),
    ],
    ids=["eats", "forks"],
)
def test_limits_are_kept_without_control_groups(
    plain: DeviceRig, name: str, attack: str, resource: str, told: str
) -> None:
    facts = plain.reports[-1].facts
    assert "cpus" not in facts["gives"]
    _needs(plain, resource)
    assert facts["watched"] == ["memory"]
    plain.launch(name, _python(attack), resources={"memory_bytes": 2**28, "processes": 64})
    failed = plain.event(Failed, name)
    assert told in f"{failed.message} {failed.detail}"
    assert (failed.cause == "memory") == (resource == "memory")


def test_memory_that_processes_share_counts_once_without_control_groups(plain: DeviceRig) -> None:
    _needs(plain, "memory")
    text = (
        "import os, time\n"
        "held = b'1' * (100 * 2**20)\n"
        "for _ in range(3): os.fork()\n"
        "time.sleep(3)\n"
    )
    plain.launch("shares", _python(text), resources={"memory_bytes": 2**28})
    plain.event(Finished, "shares")  # eight processes with 100 MiB each
