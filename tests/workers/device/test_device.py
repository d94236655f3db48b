"""One device, with real processes: what it does with orders, with jobs, and with what they do."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from app.core.model.messages import (
    CAUSES,
    Failed,
    Finished,
    Paused,
    Saved,
    Started,
    Stopped,
)
from tests.workers.conftest import PRESET, ROOT, Ground, alone
from workers.device import births
from workers.transfer.host_context import CannotServe, locked

# --- a job's life ---------------------------------------------------------------------------------


def test_a_job_runs_to_its_end(ground):
    ground.launch("t1", "jobs:Count", params={"steps": 5})
    finished = ground.event(Finished, "t1")
    assert finished.result == {"done": 5}
    assert finished.step == 5
    started = ground.event(Started, "t1")
    assert (started.resumed, started.step, started.preset) == ("fresh", 0, PRESET)
    assert finished.held_us >= 5 * 5_000


def test_an_ended_stay_is_forgotten_once_it_was_heard(ground):
    ground.launch("t1", "jobs:Count", params={"steps": 2})
    ground.event(Finished, "t1")
    ground.until(lambda: ground.view("t1") is None)
    assert not ground.supervisor.lives.stays


def test_what_a_job_returns_and_logs_are_its_metrics(ground):
    ground.launch("t1", "jobs:Everything", params={"nap_s": 0.05, "steps": 30})
    ground.until(lambda: (v := ground.view("t1")) and v.metrics)
    assert set(ground.view("t1").metrics) == {"loss", "noise"}
    assert isinstance(ground.view("t1").metrics["loss"], float)


def test_short_run_tells_the_metrics_of_every_step(ground):
    seen = {}

    def is_over():
        view = ground.view("t1")
        if view is not None:
            seen.update(view.points)
        return view is not None and view.state == "ended"

    ground.launch("t1", "jobs:Count", params={"steps": 12, "nap_s": 0.001})
    ground.until(is_over)
    assert seen == {step: {"done": step} for step in range(1, 13)}


def test_a_traceback_goes_to_its_owner(ground):
    ground.launch("t1", "jobs:Raise")
    failed = ground.event(Failed, "t1")
    assert failed.cause == "exception"
    assert failed.message == "ValueError: no good at 3"
    assert "in deeper" in failed.detail
    assert "jobs.py" in failed.detail
    assert "workers/residents" not in failed.detail
    assert failed.step == 2


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ("jobs:Nowhere", "has no 'Nowhere'"),
        ("nowhere:Job", "No module named 'nowhere'"),
        ("broken:Job", "SyntaxError"),
        ("queue:Queue", "is not a module of your code"),
        (
            "workers:Job",
            "'workers' is not a module of your code, but of Python or Roundhouse; rename",
        ),
    ],
)
def test_code_that_cannot_be_loaded_is_said_to_be_so(ground, run, told):
    ground.launch("t1", run)
    failed = ground.event(Failed, "t1")
    assert failed.cause == "bundle"
    assert told in failed.message


def test_a_bundle_that_is_not_in_the_store_is_said_to_be_so(ground):
    ground.launch("t1", "jobs:Count", bundle="0" * 64)
    failed = ground.event(Failed, "t1")
    assert failed.cause == "bundle"
    assert "not there" in failed.message


def test_a_hanging_job_is_ended_by_its_budget(ground):
    ground.launch("t1", "jobs:Hang", budget_us=700_000)
    failed = ground.event(Failed, "t1")
    assert failed.cause == "max_duration"
    assert not CAUSES[failed.cause]
    assert 700_000 <= failed.held_us < 2_000_000


def test_what_cannot_be_captured_is_told_after_the_first_step(ground):
    ground.launch("t1", "jobs:Uncapturable")
    failed = ground.event(Failed, "t1")
    assert failed.cause == "uncapturable"
    assert failed.step == 1
    assert failed.message.startswith("job.data._it: generator cannot be captured.")
    assert "__next__" in failed.message


def test_a_preset_that_is_not_taken_fails_the_task_with_the_difference(ground):
    for number, (name, value) in enumerate((("threads", 0), ("warp", 9))):
        ground.launch(f"t{number}", "jobs:Count", preset={**PRESET, name: value})
        failed = ground.event(Failed, f"t{number}")
        assert failed.cause == "preset"
        assert f"{name}: set to {value}" in failed.message


def test_a_killed_process_is_reported(ground):
    ground.launch("t1", "jobs:Count")
    ground.steps("t1", 3)
    (resident,) = ground.supervisor.lives.residents.values()
    os.kill(resident.pid, signal.SIGKILL)
    failed = ground.event(Failed, "t1")
    assert failed.cause == "exit"
    assert "SIGKILL" in failed.message


def test_a_function_gets_its_inputs_and_gives_its_outputs(ground):
    ground.launch("t1", "jobs:tokenize", params={"text": "abc"}, outputs=["tokens"])
    finished = ground.event(Finished, "t1")
    assert finished.result == {"count": 3}
    tokens = finished.outputs["tokens"]
    assert ground.store.has(tokens["sha256"])
    ground.launch("t2", "jobs:total", inputs={"tokens": tokens}, params={"plus": 1})
    assert ground.event(Finished, "t2").result == {"total": sum(b"abc") + 1}


def test_an_output_that_was_not_given_fails_the_task(ground):
    ground.launch("t1", "jobs:tokenize", params={"text": "abc"}, outputs=["words"])
    assert "lacks 'words'" in ground.event(Failed, "t1").message


# --- logs -----------------------------------------------------------------------------------------


def test_logs_are_complete_and_in_order(ground):
    ground.launch("t1", "jobs:Chatty", params={"lines": 5000})
    ground.event(Finished, "t1")
    ground.until(lambda: ground.view("t1") is None)
    lines = ground.lines["t1/1"]
    said = [text for stream, text in lines if stream == "stdout"]
    assert said == [f"line {i}" for i in range(5000)] + ["no end"]
    assert ["stderr", "to stderr"] in lines


def test_a_flood_is_cut_and_says_so(ground):
    ground.launch("t1", "jobs:Flood")
    ground.event(Finished, "t1")
    ground.until(lambda: ground.view("t1") is None)
    lines = ground.printed("t1")
    numbers = [int(line.split()[0]) for line in lines if not line.startswith("…")]
    assert numbers == sorted(numbers)
    dropped = sum(int(line.split()[1]) for line in lines if line.startswith("…"))
    assert dropped > 0
    assert len(numbers) + dropped == 60_000


# --- pause and go on ------------------------------------------------------------------------------


def test_a_paused_job_goes_on_in_place(ground):
    ground.launch("t1", "jobs:Count")
    ground.steps("t1", 3)
    ground.pause("t1")
    paused = ground.event(Paused, "t1")
    saved = ground.event(Saved, "t1")
    assert saved.step == paused.step >= 3
    kept = ground.store.manifest("ten", saved.sha256, key=ground.house.signer.public)
    assert kept.about.step == saved.step
    held_us = ground.view("t1").held_us
    ground.launch("t1", "jobs:Count", epoch=2, images=[ground.image(saved)])
    started = ground.event(Started, "t1", 2)
    assert (started.resumed, started.step) == ("resident", paused.step)
    assert started.held_us == 0
    assert held_us == paused.held_us
    ground.steps("t1", paused.step + 3, epoch=2)


def test_a_damaged_image_is_said_to_be_so(ground):
    ground.launch("t1", "jobs:Count", images=[{"sha256": "1" * 64, "step": 5, "key": ""}])
    assert ground.event(Failed, "t1").cause == "image"
    sha256 = ground.store.put_manifest("ten", b"no manifest, but long enough to be looked at")
    ground.launch("t2", "jobs:Count", images=[{"sha256": sha256, "step": 5, "key": ""}])
    assert ground.event(Failed, "t2").cause == "image"


@pytest.mark.parametrize(
    ("entry", "seed"),
    [
        ("jobs:Everything", 1),
        pytest.param("jobs:Everything", 2, marks=pytest.mark.long),
        ("large:Large", 3),
    ],
)
def test_a_disturbed_job_ends_with_the_same_bits(ground, entry, seed):
    """Paused at random moments, resumed in place or in a fresh process, and checkpointed."""
    dice = random.Random(seed)
    params = {"steps": 60, "nap_s": 0.002}
    undisturbed = alone(entry, params)
    assert undisturbed["result"]["whole"]
    images: list[dict[str, object]] = []
    resumed = []
    for epoch in range(1, 8):
        ground.launch(
            *("t1", entry, epoch),
            params=params,
            images=images,
            checkpoint_every_s=0.05,
        )
        resumed.append(ground.event(Started, "t1", epoch).resumed)
        if epoch == 7:
            break
        time.sleep(dice.uniform(0, 0.03))
        images = _paused_and_saved(ground, "t1", epoch)
        if dice.random() < 0.6:
            ground.drop.append(["t1", epoch])
            ground.until(lambda: not ground.supervisor.lives.residents)
    assert ground.event(Finished, "t1", 7).result == undisturbed["result"], resumed
    assert set(resumed) == {"fresh", "resident", "image"}


def _paused_and_saved(ground: Ground, task: str, epoch: int) -> list[dict[str, object]]:
    ground.pause(task, epoch)
    paused = ground.event(Paused, task, epoch)

    def saved() -> object:
        there = ground.all(Saved, task, epoch)
        return next((saved for saved in there if saved.step == paused.step), None)

    return [ground.image(ground.until(saved))]


def test_a_checkpoint_is_written_while_the_job_goes_on(ground):
    ground.launch("t1", "jobs:Count")
    ground.steps("t1", 2)
    ground.save("t1")
    saved = ground.event(Saved, "t1")
    ground.steps("t1", saved.step + 2)
    ground.drop.append(["t1", 1])
    ground.until(lambda: not ground.supervisor.lives.residents)
    ground.launch("t1", "jobs:Count", epoch=2, images=[ground.image(saved)])
    assert ground.event(Started, "t1", 2).step == saved.step
    ground.steps("t1", saved.step + 2, epoch=2)


def test_a_job_that_goes_on_while_its_image_is_made_computes_the_same(ground):
    """Launched again as soon as it has paused, many times, each time with its image under way."""
    params = {"steps": 60}
    undisturbed = alone("large:Large", params)
    for epoch in range(1, 12):
        ground.launch("t1", "large:Large", epoch, params=params)
        ground.event(Started, "t1", epoch)
        ground.pause("t1", epoch)
        ground.until(
            lambda epoch=epoch: ground.all(Paused, "t1", epoch) or ground.all(Finished, "t1", epoch)
        )
        if ground.all(Finished, "t1", epoch):
            break
    else:
        ground.launch("t1", "large:Large", 12, params=params)
        epoch = 12
    assert ground.event(Finished, "t1", epoch).result == undisturbed["result"]


def test_what_its_images_take_counts_as_its_memory(ground):
    ground.launch("t1", "jobs:Count", params={"megabytes": 40})
    ground.steps("t1", 2)
    ground.pause("t1")
    ground.event(Saved, "t1")
    (resident,) = ground.supervisor.lives.residents.values()
    ground.until(lambda: resident.slab_bytes >= 40 << 20)
    assert resident.slab_bytes < 42 << 20


def test_a_job_whose_image_finds_no_room_is_told_so_after_its_first_step(grounds):
    ground = grounds(host_memory_bytes=20 << 20)
    ground.launch("t1", "jobs:Count", params={"megabytes": 40})
    failed = ground.event(Failed, "t1")
    assert (failed.cause, failed.step) == ("uncapturable", 1)
    assert "keep at most 20971520 (ROUNDHOUSE_HOST_MEMORY_BYTES)" in failed.message


def test_an_image_too_large_for_this_device_is_said_to_be_so(grounds):
    first = grounds()
    first.launch("t1", "jobs:Count", params={"megabytes": 40})
    first.steps("t1", 2)
    first.pause("t1")
    image = first.image(first.event(Saved, "t1"))
    first.close()
    second = grounds(host_memory_bytes=20 << 20)
    second.launch("t1", "jobs:Count", images=[image])
    failed = second.event(Failed, "t1")
    assert failed.cause == "exit"
    assert "exceeds the 20971520 bytes" in failed.message


def test_checkpoints_are_written_as_often_as_asked(ground):
    ground.launch("t1", "jobs:Count", checkpoint_every_s=0.2)
    ground.until(lambda: len(ground.all(Saved, "t1")) >= 3)
    steps = [saved.step for saved in ground.all(Saved, "t1")]
    assert steps == sorted(set(steps))


def test_how_long_a_job_stood_still_for_its_images_is_told_of_each_stay_apart(ground):
    ground.launch("t1", "jobs:Count", checkpoint_every_s=0.1)
    ground.until(lambda: len(ground.all(Saved, "t1")) >= 3)
    ground.pause("t1")
    paused = ground.event(Paused, "t1")
    assert 0 < paused.staged_us < paused.held_us
    assert ground.view("t1").staged_us == paused.staged_us
    ground.launch("t1", "jobs:Count", epoch=2)  # in place, in the same process
    assert ground.event(Started, "t1", 2).staged_us == 0
    ground.steps("t1", paused.step + 3, epoch=2)
    ground.pause("t1", 2)
    again = ground.event(Paused, "t1", 2)
    assert again.staged_us < again.held_us


# --- orders ---------------------------------------------------------------------------------------


def test_cancel_ends_a_job_at_its_safe_point(ground):
    ground.launch("t1", "jobs:Count")
    ground.steps("t1", 2)
    ground.cancel("t1")
    assert ground.event(Stopped, "t1").step >= 2


def test_cancel_ends_a_hanging_job_by_force(ground):
    ground.launch("t1", "jobs:Hang")
    ground.until(lambda: ground.printed("t1") == ["hanging"])
    began = time.monotonic()
    ground.cancel("t1")
    ground.event(Stopped, "t1")
    assert 0.9 < time.monotonic() - began < 5.0  # the grace is 1 s


def test_cancel_ends_a_paused_job(ground):
    ground.launch("t1", "jobs:Count")
    ground.steps("t1", 2)
    ground.pause("t1")
    ground.event(Paused, "t1")
    ground.cancel("t1")
    ground.event(Stopped, "t1")
    ground.until(lambda: not ground.supervisor.lives.residents)


def test_a_successor_prepares_meanwhile_and_sits_when_the_other_has_let_go(ground):
    ground.launch("t1", "jobs:Stamp", params={"nap_s": 6.0})
    ground.steps("t1", 1)
    ground.pause("t1")  # in the midst of the second
    ground.launch("t2", "jobs:Stamp", params={"nap_s": 0.01})
    ground.until(
        lambda: any(
            r.task == "t2" and r.is_prepared
            for r in list(ground.supervisor.lives.residents.values())
        )
    )
    assert not ground.all(Paused, "t1"), "it was prepared while the other still ran"
    ground.steps("t2", 3)
    ground.pause("t2")
    ground.event(Saved, "t2")
    ground.until(lambda: ground.printed("t2"))
    last = max(float(line.split()[1]) for line in ground.printed("t1"))
    first = min(float(line.split()[0]) for line in ground.printed("t2"))
    assert first > last


# --- trust ----------------------------------------------------------------------------------------


def test_without_answers_it_stops_stepping_in_time_and_goes_on_with_them(grounds):
    ground = grounds(lease_s=2.0, lease_margin_s=1.0, beat_s=0.3)
    ground.launch("t1", "jobs:Stamp", params={"nap_s": 0.01})
    ground.steps("t1", 5)
    ground.deaf = True
    time.sleep(2.5)
    last_answer_s = (
        ground.supervisor.lives.machine.lease.answered_us / 1e6
    )  # one may have been under way
    ground.deaf = False
    ground.event(Started, "t1")
    stopped_at = ground.supervisor.lives.stays["t1", 1].step
    ground.steps("t1", stopped_at + 5)
    ground.pause("t1")
    ground.event(Paused, "t1")
    ground.until(lambda: len(ground.printed("t1")) >= stopped_at + 5)
    times = [tuple(map(float, line.split())) for line in ground.printed("t1")]
    gap = max(b[0] - a[1] for a, b in itertools.pairwise(times))
    assert gap > 1.0
    before = [began for began, _ in times if began < last_answer_s + 2.2]
    assert max(before) <= last_answer_s + 1.0 + 0.5, "stepped past its trust"


def test_a_stopped_supervisor_does_not_let_its_job_run_on(tmp_path):
    """Even SIGSTOP of the whole device worker: the resident reads the deadline itself."""
    with _separate_device(tmp_path, "--nap", "0.02") as device:
        os.kill(device.pid, signal.SIGSTOP)
        time.sleep(3.5)  # the lease is 2 s
        log = tmp_path / "steps"
        before = log.read_text()
        time.sleep(1.0)
        assert log.read_text() == before
        os.kill(device.pid, signal.SIGCONT)


# --- memory ---------------------------------------------------------------------------------------


def test_who_was_paused_last_is_needed_last_and_makes_room(grounds):
    ground = grounds(residents_max=2)
    for task in ("t1", "t2", "t3"):
        ground.launch(task, "jobs:Count")
        ground.steps(task, 2)
        ground.pause(task)
        ground.event(Saved, task)
    ground.until(lambda: ground.view("t2") is None and ground.view("t3"))
    assert ground.view("t1").state == "paused"
    ground.launch("t2", "jobs:Count", epoch=2, images=_image_of(ground, "t2"))
    assert ground.event(Started, "t2", 2).resumed == "image"


@pytest.mark.parametrize("epoch", [2, 3])
def test_who_is_launched_before_the_island_heard_of_its_last_image_loses_nothing(grounds, epoch):
    """It made room when that was durable; what ran elsewhere meanwhile is another story."""
    ground = grounds(residents_max=1)
    ground.launch("t1", "jobs:Count")
    ground.steps("t1", 2)
    ground.save("t1")
    older = _image_of(ground, "t1")
    ground.steps("t1", older[0]["step"] + 2)
    ground.pause("t1")
    newest = ground.event(Paused, "t1").step
    ground.until(lambda: len(ground.all(Saved, "t1")) == 2)
    ground.launch("t2", "jobs:Count")
    ground.steps("t2", 1)
    ground.pause("t2")
    ground.until(lambda: ground.view("t1") is None)
    ground.launch("t1", "jobs:Count", epoch=epoch, images=older)
    started = ground.event(Started, "t1", epoch)
    expected = newest if epoch == 2 else older[0]["step"]
    assert (started.resumed, started.step) == ("image", expected)


def test_memory_is_bounded_by_what_launches_ask_for(grounds):
    ground = grounds(memory_bytes=100 * 2**20)
    for task in ("t1", "t2"):
        ground.launch(task, "jobs:Count", memory_bytes=60 * 2**20)
        ground.steps(task, 2)
        ground.pause(task)
        ground.event(Saved, task)
    assert [ground.view(task).level for task in ("t1", "t2")] == ["host", "device"]


def test_what_is_not_durable_is_never_dropped(grounds):
    ground = grounds(residents_max=1)
    folder = ground.house.run.parent / "store"
    ground.launch("t1", "jobs:Count")
    ground.steps("t1", 2)
    hidden = folder.rename(folder.with_name("hidden"))
    folder.write_text("in the way")  # nothing can be stored
    ground.pause("t1")
    ground.event(Paused, "t1")
    (resident,) = ground.supervisor.lives.residents.values()
    ground.until(lambda: resident.save_again_us is not None)
    folder.unlink()
    hidden.rename(folder)
    ground.launch("t2", "jobs:Count")
    time.sleep(0.5)
    assert ground.view("t1").state == "paused"
    assert not ground.all(Started, "t2")
    ground.event(Saved, "t1")  # tried again
    ground.event(Started, "t2")
    assert ground.view("t1") is None


def _image_of(ground: Ground, task: str) -> list[dict[str, object]]:
    return [ground.image(ground.event(Saved, task))]


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_zygotes")
def test_a_stopping_worker_pauses_saves_and_says_goodbye(grounds):
    ground = grounds()
    ground.launch("t1", "jobs:Count")
    ground.steps("t1", 3)
    zygote = psutil.Process(ground.supervisor.spawner.zygote.process.pid)
    family = [zygote, *zygote.children(recursive=True)]
    began = time.monotonic()
    ground.close()
    assert time.monotonic() - began < 10
    assert ground.event(Saved, "t1").step == ground.event(Paused, "t1").step
    last = ground.reports[-1]
    assert last.facts["leaving"]
    assert last.residents == []
    _, alive = psutil.wait_procs(family, timeout=5)
    assert len(family) >= 2
    assert alive == []


def test_a_dead_zygote_is_replaced_and_what_it_held_is_lost(grounds):
    ground = grounds()
    ground.launch("t1", "jobs:Count")
    ground.steps("t1", 2)
    ground.supervisor.spawner.zygote.process.kill()
    ground.until(lambda: ground.view("t1") is None)
    assert not ground.all(Failed, "t1")
    ground.launch("t1", "jobs:Count", epoch=2, params={"steps": 3})
    ground.event(Finished, "t1", 2)


def test_a_zygote_that_dies_before_it_forked_a_resident_is_replaced(grounds):
    ground = grounds()
    zygote = ground.supervisor.spawner.zygote.process
    zygote.send_signal(signal.SIGSTOP)
    ground.launch("t1", "jobs:Count")
    ground.until(lambda: ground.supervisor.lives.residents)
    zygote.kill()
    ground.until(lambda: ground.view("t1") is None)
    ground.launch("t1", "jobs:Count", epoch=2, params={"steps": 3})
    ground.event(Finished, "t1", 2)


@pytest.mark.parametrize("walls", ["preferred", "off"])
def test_a_killed_worker_leaves_no_process_and_frees_its_locks(tmp_path, walls):
    with _separate_device(tmp_path, "--sandbox", walls) as device:
        children = psutil.Process(device.pid).children(recursive=True)
        assert len(children) >= 2
        device.kill()
        device.wait()
        os.close(locked(tmp_path / "run" / "h.0.lock", 5.0))
        assert not births.end_recorded(tmp_path / "run" / "h.0" / "residents", 5.0)
        _, alive = psutil.wait_procs(children, timeout=2)
        assert not alive


def test_a_second_worker_of_the_same_device_is_told_who_holds_it(ground):
    with pytest.raises(CannotServe, match=f"process {os.getpid()}"):
        locked(ground.house.run / "h.0.lock", 0.3)


@contextlib.contextmanager
def _separate_device(home, *options):
    """A device in a process of its own, with one job that steps."""
    device = subprocess.Popen(
        [sys.executable, "-m", "tests.workers.separate", str(home), *options],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert device.stdout.readline() == b"running\n"
        yield device
    finally:
        device.kill()
        device.wait()
        device.stdout.close()


def test_a_result_that_is_too_large_or_no_json_says_what_to_do(ground):
    ground.launch("t1", "jobs:tokenize", params={"text": "abc"})
    assert "`outputs`" in ground.event(Failed, "t1").message
    ground.launch("t2", "jobs:repeat", params={"times": 300_000})
    assert "`outputs`" in ground.event(Failed, "t2").message


def test_nonsense_ends_a_resident_and_nothing_else(ground):
    """A tenant can write to the socket of its own process: it only harms itself."""
    for number, word in enumerate(
        ("garbage", "frame", "paused", "saving", "index", "fd", "stopped")
    ):
        ground.launch(f"t{number}", "jobs:Meddle", params={"word": word})
        failed = ground.event(Failed, f"t{number}")
        assert (failed.cause, ground.supervisor.is_alive()) == ("exit", True), word
    ground.launch("t9", "jobs:Count", params={"steps": 2})
    ground.event(Finished, "t9")


@pytest.mark.parametrize("seed", [3])
def test_whatever_is_ordered_only_one_steps_at_a_time(ground, seed):
    """A hundred random orders, kills and losses; the steps of all tasks never overlap."""
    dice = random.Random(seed)
    epochs = {f"t{number}": 0 for number in range(5)}
    for _ in range(100):
        _disturb(ground, dice, epochs)
        time.sleep(dice.uniform(0, 0.1))
    ground.until(lambda: not ground.supervisor.admission.fetched)
    lines = [line for said in list(ground.lines.values()) for _, line in said]
    steps = sorted(tuple(map(float, line.split())) for line in lines if line[0].isdigit())
    assert len(steps) > 100
    for (_, ended), (began, _) in itertools.pairwise(steps):
        assert ended <= began
    last = "t9"
    ground.drop += [list(name) for name in ground.orders]
    ground.launch(last, "jobs:Count", params={"steps": 3})
    ground.event(Finished, last)


def _disturb(ground: Ground, dice: random.Random, epochs: dict[str, int]) -> None:
    task = dice.choice(sorted(epochs))
    often = {"launch": 4, "pause": 3, "cancel": 1, "kill": 1, "drop": 1}
    (what,) = dice.choices(list(often), list(often.values()))
    epoch = epochs[task]
    if what == "launch":
        if epoch and not _is_over(ground, task, epoch):
            return
        epochs[task] += 1
        ground.launch(task, "jobs:Stamp", epoch + 1, params={"nap_s": 0.003}, memory_bytes=2**30)
    elif what == "kill":
        for resident in list(ground.supervisor.lives.residents.values())[:1]:
            resident.kill()
    elif not epoch:
        return
    elif what == "drop":
        ground.drop.append([task, epoch])
    else:
        getattr(ground, what)(task, epoch)


def _is_over(ground: Ground, task: str, epoch: int) -> bool:
    ends = (Paused, Finished, Failed, Stopped)
    gone = [task, epoch] in ground.drop
    return gone or any(ground.all(kind, task, epoch) for kind in ends)
