"""What is decided about a driver: played, as its documentation says it answers; real on `gpu`."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from workers.hardware import cuda_checkpoint
from workers.hardware.cuda_checkpoint import (
    CHECKPOINTED,
    FAILED,
    LOCKED,
    RUNNING,
    NotDone,
    StillHeld,
    TreeMemory,
)

ALLOWED = {  # call -> (from which state, to which), as the driver's manual says
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, CHECKPOINTED),
    "restore": (CHECKPOINTED, LOCKED),
    "unlock": (LOCKED, RUNNING),
}


class Played:
    """A driver of so many processes; `refuses` and `hangs` name (call, process)."""

    def __init__(self, pids, *, refuses=(), hangs=()):
        self.states = dict.fromkeys(pids, RUNNING)
        self.refuses, self.hangs, self.calls, self.left = refuses, hangs, [], []
        self.released = threading.Event()  # then what hangs goes on

    def state(self, pid):
        return self.states[pid]

    def lock(self, pid, timeout_ms):
        assert timeout_ms == 10_000
        self.do("lock", pid)

    def checkpoint(self, pid):
        self.do("checkpoint", pid)

    def restore(self, pid, left):
        self.left.append(left)
        self.do("restore", pid)

    def unlock(self, pid):
        self.do("unlock", pid)

    def do(self, what, pid):
        self.calls.append((what, pid))
        if (what, pid) in self.hangs:
            self.released.wait(60)
        before, after = ALLOWED[what]
        if (what, pid) in self.refuses or self.states[pid] != before:
            raise NotDone("the driver says CUDA_ERROR_ILLEGAL_STATE")
        self.states[pid] = after


def devices(driver, **more):
    return TreeMemory(driver=driver, is_of=lambda pid: pid in driver.states, **more)


def test_all_processes_are_locked_before_any_saves_and_restored_before_any_runs():
    driver = Played([7, 8])
    held = devices(driver)
    held.leave([6, 7, 8])
    assert driver.states == {7: CHECKPOINTED, 8: CHECKPOINTED}
    held.come_back()
    assert driver.states == {7: RUNNING, 8: RUNNING}
    assert [what for what, _ in driver.calls] == [
        *("lock", "lock", "checkpoint", "checkpoint"),
        *("restore", "restore", "unlock", "unlock"),
    ]
    held.come_back()  # nobody is away any more
    assert len(driver.calls) == 8


def test_process_that_cannot_be_locked_leaves_no_other_locked():
    driver = Played([7, 8], refuses=[("lock", 8)])
    with pytest.raises(StillHeld, match="lock of process 8: the driver says"):
        devices(driver).leave([7, 8])
    assert driver.states == {7: RUNNING, 8: RUNNING}


def test_restored_processes_come_back_to_the_gpu_that_is_there():
    driver = Played([7])
    for left in ("GPU-here", "GPU-there"):
        driver.states[7] = CHECKPOINTED
        held = devices(driver, here="GPU-here")
        held.adopt([7], left)
        held.come_back()
        assert driver.states == {7: RUNNING}
    assert driver.left == ["", "GPU-there"]  # "" where nothing is to be told


def test_restored_processes_cannot_come_back_without_a_driver():
    held = TreeMemory.found("cpu")
    held.adopt([7], "")
    with pytest.raises(NotDone, match="no driver here"):
        held.come_back()


def test_process_that_failed_before_is_not_touched():
    driver = Played([7])
    driver.states[7] = FAILED
    with pytest.raises(NotDone, match="the driver reports process 7 as failed"):
        devices(driver).leave([7])
    assert driver.calls == []


def test_call_that_does_not_return_is_given_up(monkeypatch):
    monkeypatch.setattr(cuda_checkpoint, "MOVE_WITHIN_S", 0.2)
    driver = Played([7], hangs=[("checkpoint", 7)])
    with pytest.raises(NotDone, match=r"checkpoint of process 7 was not done within 0\.2 s"):
        devices(driver).leave([7])
    assert driver.states == {7: LOCKED}  # the call has not returned
    driver.released.set()


def test_a_call_that_outlasts_the_lease_is_given_up():
    driver = Played([7], hangs=[("lock", 7)])
    with pytest.raises(NotDone, match="outlasted the device's lease"):
        devices(driver, may_go_on=lambda: False).leave([7])
    driver.released.set()


def test_missing_driver_is_known_before_any_process_saves():
    held = TreeMemory.found("cpu")
    assert not held.can_leave
    held.leave([1])
    held.come_back()


@pytest.mark.gpu
def test_real_driver_saves_and_restores_a_real_process():
    """Is it permitted here at all?  A process of its own goes off the device, and back."""
    held = TreeMemory.found("cuda")
    if not held.can_leave:
        pytest.skip("the driver has no checkpoint API, or does not let us use it")
    said = (
        "import torch; x = torch.arange(2**26, device='cuda'); print('up', flush=True);"
        " input(); print(int(x.sum()), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", said], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        held.leave([process.pid])
        assert held.away == [process.pid]
        held.come_back()
        process.stdin.write("\n")
        process.stdin.flush()
        assert int(process.stdout.readline()) == 2**25 * (2**26 - 1)
