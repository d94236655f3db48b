"""A supervisor that hangs is ended, together with everything that it holds."""

from __future__ import annotations

import threading

import psutil
import pytest

from tests.workers.conftest import Ground
from workers.device import hung, watchdog
from workers.device.watchdog import Watchdog

pytestmark = pytest.mark.security


def test_hanging_supervisor_is_ended_with_its_residents(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LEAST_S", 1.0)
    ground, bitten, held_up = Ground(tmp_path, lease_s=2.0), threading.Event(), threading.Event()
    ground.supervisor.on_fatal = bitten.set
    before = psutil.Process().children(recursive=True)
    ground.open()
    try:
        ground.launch("t1", "jobs:Stamp", params={"nap_s": 0.01, "path": None})
        ground.steps("t1", 3)
        ground.launch("t2", "jobs:Stamp", params={"nap_s": 0.01, "path": None})
        ground.until(lambda: len(ground.supervisor.lives.residents) == 2)
        here = [p for p in psutil.Process().children(recursive=True) if p not in before]
        take_said = ground.supervisor.listener.take_said

        def hang_at_t1(resident):
            held_up.wait() if resident.task == "t1" else take_said(resident)

        monkeypatch.setattr(ground.supervisor.listener, "take_said", hang_at_t1)
        assert bitten.wait(20)
        _, alive = psutil.wait_procs(here, timeout=10)
        assert not alive
    finally:
        held_up.set()
        ground.close()
    after = Ground(tmp_path)
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
def test_task_is_blamed_only_where_no_other_can_have_done_it(heard, there, named):
    assert hung.blamed(heard, there) == named


def test_what_hung_is_read_as_it_was_written_and_garbage_is_removed(tmp_path):
    file = tmp_path / "hung.json"
    assert hung.written_down(file) == []
    hung.write_down(file, [("t1", 3)])
    assert hung.written_down(file) == [["t1", 3]]
    file.write_text('{"t1')
    assert hung.written_down(file) == []
    assert not file.exists()


def test_watchdog_lets_work_that_ends_in_time_and_rest_without_end_be(monkeypatch):
    monkeypatch.setattr(watchdog, "LEAST_S", 0.0)
    bitten = threading.Event()
    dog = Watchdog(bitten.set, limit_s=0.6)
    dog.start()
    for _ in range(5):
        dog.works()
        assert not bitten.wait(0.3)
        dog.rests()
    assert not bitten.wait(1.5)
    dog.works()
    assert bitten.wait(10)
    dog.end()
    dog.join()
