"""A command is told before its processes are stopped for good, with real processes on a device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.core.model.protocol.messages import Failed, Finished, Paused, Saved, Started, Stopped
from tests.workers.commands.test_runner import ended, shell
from tests.workers.conftest import ROOT, DeviceRig

NOTICE = {"signal": "SIGUSR1", "seconds": 100}
TRAIN = ["python", "told.py", "100000"]


def trains(rig: DeviceRig, run: list[str] = TRAIN, **more: Any) -> None:
    """Launch the script, and wait until it has done some steps, none of which it has saved."""
    rig.launch("t1", run, notice=NOTICE, checkpoint_every_s=3600.0, **more)
    rig.steps("t1", 5)


def begins_again(rig: DeviceRig, failed: Failed, *, at: DeviceRig | None = None) -> None:
    """Launch it again as the island would; it must go on at the step that it saved."""
    (saved,) = rig.all(Saved, "t1")
    assert failed.cause == "again"
    (step,) = [line.split()[2] for line in rig.printed("t1") if line.startswith("saved at")]
    other = at or rig
    run = ["python", "told.py", str(int(step) + 5)]
    other.launch("t1", run, epoch=2, images=[rig.image(saved)], notice=NOTICE)
    assert other.event(Started, "t1", 2).resumed == "folder"
    other.event(Finished, "t1", 2)
    first, last = ended(other, "t1", 2)
    assert (first, last) == (f"begins at {step} restarts 1", f"done at {int(step) + 5}")


def told_s(rig: DeviceRig) -> int:
    """Return how long before its limit the script was told of it."""
    (line,) = [line for line in ended(rig, "t1") if line.startswith("told max_duration ")]
    return int(line.split()[2])


@pytest.mark.parametrize("why", ["drain", "move", "reclaim"])
def test_command_that_is_told_saves_ends_and_continues_at_the_saved_step(rig, why):
    trains(rig)
    asked_s = time.monotonic()
    rig.pause("t1", notice_us=60_000_000, why=why, moves=why == "move")
    failed = rig.event(Failed, "t1")
    assert time.monotonic() - asked_s < 40  # it did not use up its time
    assert (failed.noticed, failed.message) == (why, "It asked to begin again (exit status 85).")
    lines = ended(rig, "t1")
    assert f"told {why} 60 True" in lines
    assert any(f"it will be stopped in 60.0 s ({why})" in line for line in lines)
    begins_again(rig, failed)


def test_command_that_ignores_its_notice_is_frozen_when_the_time_is_up(rig):
    trains(rig, ["python", "told.py", "100000", "ignores"])
    asked_s = time.monotonic()
    rig.pause("t1", notice_us=5_000_000, why="drain")
    at = rig.until(lambda: [v.step for v in rig.views("t1") if v.state == "noticed"])[0]
    paused = rig.event(Paused, "t1")
    assert 4.9 < time.monotonic() - asked_s < 60  # and not after the 100 s of its notice
    assert paused.step > at  # it went on, and was charged for it
    assert paused.held_us > 4_900_000
    rig.launch("t1", TRAIN, epoch=2, notice=NOTICE)
    assert rig.event(Started, "t1", 2).resumed == "resident"
    rig.steps("t1", paused.step + 5, epoch=2)


def test_notice_is_never_longer_than_the_task_asked_for(rig):
    rig.launch("t1", TRAIN, notice={"signal": "none", "seconds": 1})
    rig.steps("t1", 5)
    asked_s = time.monotonic()
    rig.pause("t1", notice_us=60_000_000, why="drain")
    rig.event(Paused, "t1")
    assert time.monotonic() - asked_s < 40


def test_command_gets_its_notice_before_max_duration_s(rig):
    rig.launch("t1", TRAIN, notice={"seconds": 20}, budget_us=22_000_000, checkpoint_every_s=3600.0)
    failed = rig.event(Failed, "t1")
    assert (failed.cause, failed.noticed) == ("again", "max_duration")
    assert 1_900_000 < failed.held_us < 22_000_000
    assert 1 <= told_s(rig) <= 20  # less where the device looked at its limit late
    begins_again(rig, failed)


def test_command_that_ignores_the_limit_of_its_time_is_ended(rig):
    run = ["python", "told.py", "100000", "ignores"]
    rig.launch("t1", run, notice={"seconds": 6}, budget_us=10_000_000)
    failed = rig.event(Failed, "t1")
    assert (failed.cause, failed.noticed) == ("max_duration", "")
    assert 1 <= told_s(rig) <= 6


def test_stopping_worker_gives_a_notice_and_saves_what_it_left(
    tmp_path: Path, rigs: Callable[..., DeviceRig]
):
    rig = rigs(home=tmp_path, stop_grace_s=40.0, drain_s=80.0)
    trains(rig)
    rig.close()
    failed = rig.event(Failed, "t1")
    assert (failed.cause, failed.noticed) == ("again", "shutdown")
    begins_again(rig, failed, at=rigs(home=tmp_path))


def test_script_that_just_begins_gets_the_signal_when_it_handles_it(rig):
    text = (
        "import signal, sys, time\n"
        "print('begins', flush=True)\n"
        "time.sleep(2)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))\n"
        "time.sleep(60)\n"
    )
    rig.launch("t1", ["python", "-c", text], notice=NOTICE)
    rig.until(lambda: "begins" in rig.printed("t1"))
    rig.pause("t1", notice_us=60_000_000, why="drain")
    assert rig.event(Failed, "t1").cause == "again"  # and not that it died of the signal


def test_program_without_a_handler_goes_on_until_it_is_frozen(rig):
    rig.launch("t1", shell("echo begins; while :; do sleep 0.1; done"), notice=NOTICE)
    rig.until(lambda: "begins" in rig.printed("t1"))
    rig.pause("t1", notice_us=1_500_000, why="drain")
    rig.event(Paused, "t1")
    rig.launch("t1", shell("exit"), epoch=2, notice=NOTICE)
    assert rig.event(Started, "t1", 2).resumed == "resident"


def test_cancel_waits_for_no_notice(rig):
    trains(rig, ["python", "told.py", "100000", "ignores"])
    rig.pause("t1", notice_us=60_000_000, why="drain")
    rig.until(lambda: rig.view("t1").state == "noticed")
    asked_s = time.monotonic()
    rig.cancel("t1")
    rig.event(Stopped, "t1")
    assert time.monotonic() - asked_s < 40


def test_exit_status_85_is_a_plain_failure_without_a_notice(rig):
    rig.launch("t1", shell("exit 85"))
    failed = rig.event(Failed, "t1")
    assert (failed.cause, failed.message) == ("exit", "It ended with exit status 85.")


def test_command_that_begins_again_by_itself_was_not_told(rig):
    rig.launch("t1", shell("echo kept > file; exit 85"), notice=NOTICE)
    failed = rig.event(Failed, "t1")
    assert (failed.cause, failed.noticed) == ("again", "")
    image = rig.image(rig.event(Saved, "t1"))
    rig.launch("t1", shell("cat file; ls $ROUNDHOUSE_NOTICE"), epoch=2, images=[image])
    rig.event(Failed, "t1", 2)
    assert ended(rig, "t1", 2)[0] == "kept"  # and there is no file of a notice


def test_all_ranks_may_save_before_their_command_begins_again(rig):
    text = (
        "import os, signal, sys, time, pathlib\n"
        "rank = int(os.environ['RANK'])\n"
        "def save(*_):\n"
        "    time.sleep(1.5 * rank)\n"
        "    pathlib.Path(f'rank{rank}').write_text('saved')\n"
        "    os._exit(85)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "os.write(1, b'ready\\n')\n"  # at once: the ranks write into one log
        "while True: time.sleep(0.01)\n"
    )
    run = [Path(sys.executable).name, "-c", text]
    rig.launch("t1", run, notice=NOTICE, world_size=2)
    rig.until(lambda: rig.printed("t1").count("ready") == 2)
    rig.pause("t1", notice_us=60_000_000, why="drain")
    assert rig.event(Failed, "t1").cause == "again"
    image = rig.image(rig.all(Saved, "t1")[-1])
    rig.launch("t2", shell("cat rank0 rank1"), images=[image])
    rig.event(Finished, "t2")
    assert ended(rig, "t2")[-1] == "savedsaved"


def test_shell_turns_the_end_of_an_interrupted_script_into_85(rig):
    """As docs/howto/notice_before_a_stop.md gives it, around a script that ends with status 0."""
    page = (ROOT / "docs/howto/notice_before_a_stop.md").read_text()
    (wrapper,) = [part for part in page.split("```bash\n") if part.startswith("python train.py &")]
    script = (
        "import signal, sys, time\n"
        "def save(*_): open('saved', 'w').write('x'); sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    text = f"cat > train.py <<'END'\n{script}END\n{wrapper.partition('```')[0]}"
    rig.launch("t1", shell(text), notice=NOTICE)
    rig.until(lambda: "ready" in rig.printed("t1"))
    rig.pause("t1", notice_us=60_000_000, why="drain")
    assert rig.event(Failed, "t1").cause == "again"
    image = rig.image(rig.all(Saved, "t1")[-1])
    rig.launch("t2", shell("cat saved"), images=[image])
    rig.event(Finished, "t2")
    assert ended(rig, "t2") == ["x"]
