"""Kills CRIU, its helper and a stub at every stage of a move.

The task goes on from its newest image, or begins again and is told why.  Nothing runs twice, and
nothing is left behind.
"""

from __future__ import annotations

import hashlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from app.core.model.protocol.messages import Failed, Finished, Paused, Saved, Started
from tests.workers.criu.criu_processes import STAGES, criu_at, folders_in_memory, helpers, words_of
from tests.workers.criu.moving import END_S, TOLD
from workers.criu.dump_and_restore import CriuFailed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes")

STEPS = 200
#: It does not end before there is a file `end` in its folder.
COUNTS = f"""
import hashlib, os, time
found = "0"
print("begins")
for step in range({STEPS}):
    found = hashlib.sha256(f"{{found}} {{step}}".encode()).hexdigest(); time.sleep(0.01)
while not os.path.exists("end"): time.sleep(0.01)
print("sum", found)
"""


def summed() -> str:
    found = "0"
    for step in range(STEPS):
        found = hashlib.sha256(f"{found} {step}".encode()).hexdigest()
    return f"sum {found}"


def _kill_criu(stage: str, *, is_helper: bool) -> None:
    """Kill CRIU, or the helper that started it, as soon as it runs."""
    helper, criu = criu_at(stage, END_S)
    os.kill(helper if is_helper else criu, signal.SIGKILL)


def _stub_of(rig, task, epoch):
    residents = list(rig.supervisor.stays.residents.values())
    return next(r for r in residents if r.stay.key == (task, epoch))


LONG = pytest.mark.long
VICTIMS = (
    ("dump", "helper"),
    ("restore", "stub"),
    *(
        pytest.param(stage, victim, marks=LONG)
        for stage, victim in (
            ("dump", "criu"),
            ("dump", "stub"),
            ("upload", "stub"),
            ("restore", "criu"),
            ("restore", "helper"),
            ("thaw", "stub"),
        )
    ),
)


@pytest.mark.parametrize(("stage", "victim"), VICTIMS)
def test_killed_part_of_a_move_loses_nothing_but_time(pair, monkeypatch, stage, victim):
    here, there = pair
    task, at = f"{stage}-{victim}", {"epoch": 0}
    killers = ThreadPoolExecutor(1)
    kills = []

    def kill() -> None:
        if victim == "stub":
            _stub_of(here if stage in ("dump", "upload") else there, task, at["epoch"]).kill()
        else:
            kills.append(killers.submit(_kill_criu, stage, is_helper=victim == "helper"))

    failed = _at_stage(monkeypatch, stage, kill)
    here.launch(task, ["python", "-c", COUNTS], 1)
    at["epoch"] = 1
    here.until(lambda: here.printed(task), timeout_s=END_S)
    here.pause(task, 1)
    here.event(Paused, task, 1, timeout_s=END_S)
    here.until(lambda: here.all(Saved, task, 1) or here.view(task, 1) is None, timeout_s=END_S)
    images = [here.image(saved) for saved in here.all(Saved, task, 1)[-1:]]
    _drop(here, task, 1)
    at["epoch"] = 2
    there.launch(task, ["python", "-c", COUNTS], 2, images=images)
    ended = _ended(there, task, 2)
    if isinstance(ended, Failed):  # an island would launch it again, from the same image
        assert ended.cause in ("crash", "lost", "exit"), ended
        _drop(there, task, 2)
        monkeypatch.undo()
        at["epoch"] = 3
        there.launch(task, ["python", "-c", COUNTS], 3, images=images)
        ended = _ended(there, task, 3)
    assert isinstance(ended, Finished)
    killers.shutdown()
    for killed in kills:
        killed.result()  # raises if there was nothing to kill
    if victim != "stub":
        assert (len(kills), failed) == (1, [True])  # of CRIU that was killed
    print(stage, victim, _how(there, task), _told(pair, task))  # noqa: T201
    there.until(lambda: there.view(task, at["epoch"]) is None, timeout_s=END_S)
    assert there.printed(task, at["epoch"])[-1] == summed()
    assert "folder" not in _how(there, task) or _told(pair, task)
    _nothing_is_left(pair, task)


def _at_stage(monkeypatch, stage, kill):
    """Call `kill` once, as the stage begins; return where CRIU failed, and if it was killed."""
    owner, name = STAGES[stage]
    real, killed, failed = getattr(owner, name), [], []

    def killing(*args, **more):
        if not killed:
            killed.append(1)
            kill()
        try:
            return real(*args, **more)
        except CriuFailed as error:
            failed.append(error.is_damaged)
            raise

    monkeypatch.setattr(owner, name, killing)
    return failed


def _ended(rig, task, epoch):
    """Let it end once it has started; return how it ended, perhaps before it started."""

    def found():
        return next(iter(rig.all(Finished, task, epoch) + rig.all(Failed, task, epoch)), None)

    rig.until(lambda: rig.all(Started, task, epoch) or found(), timeout_s=END_S)
    for resident in list(rig.supervisor.stays.residents.values()):
        if resident.stay.key == (task, epoch):
            with suppress(OSError):  # it was killed meanwhile
                Path(f"/proc/{resident.pid}/cwd/end").touch()
    return rig.until(found, timeout_s=END_S)


def _how(rig, task):
    return [
        event.resumed for event in rig.events if isinstance(event, Started) and event.task == task
    ]


def _told(pair, task):
    """Return why it begins, or would begin, again: in its log and in its events."""
    events = [event for rig in pair for event in rig.events if event.task == task]
    lines = [line for rig in pair for epoch in (1, 2, 3) for line in rig.printed(task, epoch)]
    said = [line for line in lines if line.startswith(TOLD)]
    said += [event.bound_because for event in events if isinstance(event, Saved)]
    return [*filter(None, said), *(event.message for event in events if isinstance(event, Failed))]


def _drop(rig, task, epoch):
    rig.drop = [[task, epoch]]
    rig.until(lambda: rig.view(task, epoch) is None, timeout_s=END_S)
    rig.drop = []


def _nothing_is_left(pair, task):
    for rig in pair:
        rig.until(lambda rig=rig: not rig.supervisor.stays.residents, timeout_s=END_S)
    assert not folders_in_memory()
    assert not helpers()
    below = psutil.Process().children(recursive=True)
    assert not [child for child in below if COUNTS in words_of(child.pid)]
