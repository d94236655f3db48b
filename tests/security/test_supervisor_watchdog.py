"""A supervisor that hangs is ended, together with everything that it holds."""

from __future__ import annotations

import threading

import psutil
import pytest

from tests.workers.conftest import DeviceRig
from workers.device import hang_report, supervisor_watchdog
from workers.device.supervisor_watchdog import Watchdog

pytestmark = pytest.mark.security


def test_hanging_supervisor_is_ended_with_its_residents(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(supervisor_watchdog, "LEAST_S", 1.0)
    rig, bitten, held_up = DeviceRig(tmp_path, lease_s=5.0), threading.Event(), threading.Event()
    rig.supervisor.on_fatal = bitten.set
    rig.open()
    try:
        rig.launch("t1", "jobs:Stamp", params={"nap_s": 0.01, "path": None})
        rig.steps("t1", 3)
        rig.launch("t2", "jobs:Stamp", params={"nap_s": 0.01, "path": None})
        rig.until(lambda: len(rig.supervisor.stays.residents) == 2)
        zygote = psutil.Process(rig.supervisor.spawner.zygote.process.pid)
        rig.until(lambda: len(zygote.children(recursive=True)) >= 2)  # both are forked
        here = [zygote, *zygote.children(recursive=True)]
        take_said = rig.supervisor.listener.take_said

        def hang_at_t1(resident):
            held_up.wait() if resident.task == "t1" else take_said(resident)

        monkeypatch.setattr(rig.supervisor.listener, "take_said", hang_at_t1)
        assert bitten.wait(60)
        assert "t1  1 SlotDue running GiveSlot" in caplog.text  # what happened to it before
        assert "t2  1 ProcessBegan" not in caplog.text
        _, alive = psutil.wait_procs(here, timeout=60)
        assert not alive
    finally:
        held_up.set()
        rig.close()
    after = DeviceRig(tmp_path)
    after.open()
    try:
        assert after.reports[0].hung == [["t1", 1]]
        after.until(lambda: not after.reports[-1].hung)  # the island has confirmed the report
        assert not after.supervisor.reports.hung_file.exists()
    finally:
        after.close()


@pytest.mark.parametrize(
    ("heard", "there", "named"),
    [
        (("t1", 3), {("t1", 3), ("t2", 1)}, [("t1", 3)]),
        (None, {("t1", 3)}, [("t1", 3)]),
        (None, {("t1", 3), ("t2", 1)}, []),
        (None, set(), []),
    ],
    ids=["its message was taken in", "it was alone", "any of several", "nobody"],
)
def test_task_is_blamed_only_where_no_other_can_be_the_cause(heard, there, named):
    assert hang_report.blamed(heard, there) == named


def test_hang_report_is_read_back_and_garbage_removed(tmp_path):
    file = tmp_path / "hung.json"
    assert hang_report.written_down(file) == []
    hang_report.write_down(file, [("t1", 3)])
    assert hang_report.written_down(file) == [["t1", 3]]
    file.write_text('{"t1')
    assert hang_report.written_down(file) == []
    assert not file.exists()


class Played:
    """Plays what the supervisor does before each look of the watchdog, and then ends it."""

    def __init__(self, acts):
        self.acts = [*acts]

    def wait(self, _):
        if not self.acts:
            return True
        self.acts.pop(0)()
        return False


def test_watchdog_allows_work_that_ends_in_time_and_any_rest(monkeypatch):
    monkeypatch.setattr(supervisor_watchdog, "LEAST_S", 0.0)
    bitten = []
    dog = Watchdog(lambda: bitten.append(1), limit_s=2.5 * supervisor_watchdog.LOOK_S)

    def goes_on():
        pass

    allowed = [dog.works, goes_on, goes_on, dog.rests] * 5 + [goes_on] * 9
    for acts, bites in ((allowed, 0), ([dog.works, goes_on, goes_on, goes_on], 1)):
        monkeypatch.setattr(dog, "_ended", Played(acts))
        dog.run()
        assert len(bitten) == bites
