"""When a task that computes nothing is warned and paused, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

from app.core.device.health_findings import HealthLimits, HealthWatch
from app.core.device.health_readings import Reading
from app.core.device.idleness import Idleness, IdleStep, judge_idleness

BUSY = Reading(utilisation_percent=50)
IDLE = Reading(utilisation_percent=1)


def steps(pause_s, *, until_s, epochs=lambda now_s: 1):
    """What is done when, with a heartbeat each 10 s."""
    found, idle = {}, None
    for now_s in range(0, until_s, 10):
        idle, step = judge_idleness(
            idle, task="t", epoch=epochs(now_s), now_s=float(now_s), pause_s=pause_s
        )
        if step is not None:
            found.setdefault(step, now_s)
    return found


def test_a_task_is_warned_at_half_of_the_time_and_paused_at_all_of_it():
    assert steps(600, until_s=601) == {IdleStep.WARN: 300, IdleStep.PAUSE: 600}
    assert steps(600, until_s=300) == {}


def test_a_task_is_warned_once():
    first = Idleness(task="t", epoch=1, since_s=0.0)
    warned, step = judge_idleness(first, task="t", epoch=1, now_s=300.0, pause_s=600)
    assert (warned, step) == (replace(first, is_warned=True), IdleStep.WARN)
    assert judge_idleness(warned, task="t", epoch=1, now_s=310.0, pause_s=600) == (warned, None)


def test_another_launch_begins_anew():
    found = steps(600, until_s=1101, epochs=lambda now_s: 1 + (now_s >= 500))
    assert found == {IdleStep.WARN: 300, IdleStep.PAUSE: 1100}


def test_a_device_is_idle_after_its_patience_and_busy_at_once():
    watch = HealthWatch(HealthLimits(), 0)
    seen = []
    for second in range(0, 61, 5):
        watch.read(IDLE if second < 50 else BUSY, second * 1_000_000)
        seen.append((second, watch.report(second * 1_000_000).get("idle", False)))
    assert [second for second, idle in seen if idle] == [30, 35, 40, 45]


def test_a_device_that_does_not_tell_its_load_is_never_idle():
    watch = HealthWatch(HealthLimits(), 0)
    for second in range(0, 600, 5):
        watch.read(Reading(temperature_c=50), second * 1_000_000)
    assert "idle" not in watch.report(600_000_000)
