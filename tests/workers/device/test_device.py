"""One device, with real processes: what it does with orders, with jobs, and with what they do."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import psutil
import pytest

from app.core.model.failure_causes import CAUSES
from app.core.model.protocol.messages import (
    CheckpointRef,
    Failed,
    Finished,
    Paused,
    Saved,
    Started,
    Stopped,
)
from tests.launches import image_of
from tests.thoroughness import rest_long
from tests.workers.conftest import (
    PATIENCE_S,
    PRESET,
    QUICK_BEAT_S,
    DeviceRig,
    alone,
    separate_device,
)
from workers.device.processes import resident_records
from workers.device.stays import admission
from workers.process import untrusted
from workers.transfer.host_context import CannotServe, locked

# --- a job's life ---------------------------------------------------------------------------------


def test_a_job_runs_to_its_end(rig):
    rig.launch("t1", "jobs:Count", params={"steps": 5})
    finished = rig.event(Finished, "t1")
    assert finished.result == {"done": 5}
    assert finished.step == 5
    started = rig.event(Started, "t1")
    assert (started.resumed, started.step, started.preset) == ("fresh", 0, PRESET)
    assert finished.held_us >= 5 * 5_000


def test_ended_stay_is_forgotten_once_it_was_acknowledged(rig):
    rig.launch("t1", "jobs:Count", params={"steps": 2})
    rig.event(Finished, "t1")
    rig.until(lambda: rig.view("t1") is None)
    assert not rig.supervisor.stays.by_key


def test_returned_and_logged_values_are_metrics(rig):
    rig.launch("t1", "jobs:Patient", params={"nap_s": 0.05})
    metrics = rig.until(lambda: (v := rig.view("t1")) and v.metrics)
    assert set(metrics) == {"loss", "noise"}
    assert isinstance(metrics["loss"], float)


def test_short_run_tells_the_metrics_of_every_step(rig):
    rig.launch("t1", "jobs:Count", params={"steps": 12, "nap_s": 0.001})
    rig.until(lambda: [view for view in rig.views("t1") if view.state == "ended"])
    seen = dict(point for view in rig.views("t1") for point in view.points)
    assert seen == {step: {"done": step} for step in range(1, 13)}


def test_owner_gets_the_traceback(rig):
    rig.launch("t1", "jobs:Raise")
    failed = rig.event(Failed, "t1")
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
def test_code_that_cannot_be_loaded_is_reported(rig, run, told):
    rig.launch("t1", run)
    failed = rig.event(Failed, "t1")
    assert failed.cause == "bundle"
    assert told in failed.message


def test_bundle_missing_in_the_store_is_reported(rig):
    rig.launch("t1", "jobs:Count", bundle="0" * 64)
    failed = rig.event(Failed, "t1")
    assert failed.cause == "bundle"
    assert "not there" in failed.message


def test_hanging_job_is_ended_at_its_max_duration(rig):
    rig.launch("t1", "jobs:Hang", budget_us=700_000)
    failed = rig.event(Failed, "t1")
    assert failed.cause == "max_duration"
    assert not CAUSES[failed.cause]
    assert 700_000 <= failed.held_us < 20_000_000  # and not after its 1000 s


def test_object_that_cannot_be_captured_is_reported_after_the_first_step(rig):
    rig.launch("t1", "jobs:Uncapturable")
    failed = rig.event(Failed, "t1")
    assert failed.cause == "uncapturable"
    assert failed.step == 1
    assert failed.message.startswith("job.data._it: generator cannot be captured.")
    assert "__next__" in failed.message


def test_preset_that_cannot_be_set_fails_the_task_with_the_difference(rig):
    for number, (name, value) in enumerate((("threads", 0), ("warp", 9))):
        rig.launch(f"t{number}", "jobs:Count", preset={**PRESET, name: value})
        failed = rig.event(Failed, f"t{number}")
        assert failed.cause == "preset"
        assert f"{name}: set to {value}" in failed.message


def test_a_killed_process_is_reported(rig):
    rig.launch("t1", "jobs:Count")
    rig.steps("t1", 3)
    (resident,) = rig.supervisor.stays.residents.values()
    os.kill(resident.pid, signal.SIGKILL)
    failed = rig.event(Failed, "t1")
    assert (failed.cause, failed.exit_status) == ("exit", 137)
    assert "SIGKILL" in failed.message


def test_function_gets_its_inputs_and_returns_its_outputs(rig):
    rig.launch("t1", "jobs:tokenize", params={"text": "abc"}, outputs=["tokens"])
    finished = rig.event(Finished, "t1")
    assert finished.result == {"count": 3}
    tokens = finished.outputs["tokens"]
    assert rig.store.has(tokens["sha256"])
    rig.launch("t2", "jobs:total", inputs={"tokens": tokens}, params={"plus": 1})
    assert rig.event(Finished, "t2").result == {"total": sum(b"abc") + 1}


def test_missing_output_fails_the_task(rig):
    rig.launch("t1", "jobs:tokenize", params={"text": "abc"}, outputs=["words"])
    assert "lacks 'words'" in rig.event(Failed, "t1").message


# --- logs -----------------------------------------------------------------------------------------


def test_logs_are_complete_and_in_order(rig):
    rig.launch("t1", "jobs:Chatty", params={"lines": 5000})
    rig.event(Finished, "t1")
    rig.until(lambda: rig.view("t1") is None)
    lines = rig.lines["t1/1"]
    said = [text for stream, text in lines if stream == "stdout"]
    assert said == [f"line {i}" for i in range(5000)] + ["no end"]
    assert ["stderr", "to stderr"] in lines


def test_flood_of_log_lines_is_cut_and_says_so(rigs):
    rig = rigs(beat_s=QUICK_BEAT_S)
    rig.launch("t1", "jobs:Flood")
    rig.event(Finished, "t1")
    rig.until(lambda: rig.view("t1") is None)
    lines = rig.printed("t1")
    numbers = [int(line.split()[0]) for line in lines if not line.startswith("…")]
    assert numbers == sorted(numbers)
    dropped = sum(int(line.split()[1]) for line in lines if line.startswith("…"))
    assert dropped > 0
    assert len(numbers) + dropped == 60_000


# --- pause and go on ------------------------------------------------------------------------------


def test_paused_job_resumes_in_its_process(rig):
    rig.launch("t1", "jobs:Count")
    rig.steps("t1", 3)
    rig.pause("t1")
    paused = rig.event(Paused, "t1")
    saved = rig.event(Saved, "t1")
    assert saved.step == paused.step >= 3
    kept = rig.store.manifest("ten", saved.sha256, key=rig.house.signer.public)
    assert kept.about.step == saved.step
    held_us = rig.view("t1").held_us
    rig.launch("t1", "jobs:Count", epoch=2, images=[rig.image(saved)])
    started = rig.event(Started, "t1", 2)
    assert (started.resumed, started.step) == ("resident", paused.step)
    assert started.held_us <= started.switch_us, "only what it took to begin"
    assert held_us == paused.held_us
    rig.steps("t1", paused.step + 3, epoch=2)


def test_damaged_image_is_reported(rig):
    rig.launch("t1", "jobs:Count", images=[image_of("1" * 64, 5)])
    assert rig.event(Failed, "t1").cause == "image"
    sha256 = rig.store.put_manifest("ten", b"no manifest, but long enough to be looked at")
    rig.launch("t2", "jobs:Count", images=[image_of(sha256, 5)])
    assert rig.event(Failed, "t2").cause == "image"


# What runs alone, and the same as a job that waits with its result until the test lets it end.
WAITING = {
    "jobs": ("jobs:Everything", "jobs:Patient", {}),
    "large": ("large:Large", "large:Large", {"waits": True}),
}


@pytest.mark.parametrize(
    ("module", "seed"),
    [
        ("jobs", 1),
        pytest.param("jobs", 2, marks=pytest.mark.long),
        pytest.param("large", 3, marks=pytest.mark.long),
    ],
)
def test_job_disturbed_at_random_ends_with_the_same_bits(rig, module, seed):
    """Paused at random moments, resumed in place or in a fresh process, and checkpointed."""
    dice = random.Random(seed)
    params = {"steps": 60, "nap_s": 0.002}
    alone_as, entry, more = WAITING[module]
    undisturbed = alone(alone_as, params)
    params |= more
    assert undisturbed["result"]["whole"]
    images: list[dict[str, object]] = []
    resumed = []
    for epoch in range(1, 8):
        rig.launch(
            *("t1", entry, epoch),
            params=params,
            images=images,
            checkpoint_every_s=0.05,
        )
        resumed.append(rig.event(Started, "t1", epoch).resumed)
        if epoch == 7:
            break
        time.sleep(dice.uniform(0, 0.03))
        images = rig.paused_and_saved("t1", epoch)
        if dice.random() < 0.6:
            rig.drop.append(["t1", epoch])
            rig.until(lambda: not rig.supervisor.stays.residents)
    rig.let_end("t1", 7)
    assert rig.event(Finished, "t1", 7).result == undisturbed["result"], resumed
    assert set(resumed) == {"fresh", "resident", "image"}


def test_checkpoint_is_written_while_the_job_runs(rig):
    rig.launch("t1", "jobs:Count")
    rig.steps("t1", 2)
    rig.save("t1")
    saved = rig.event(Saved, "t1")
    rig.steps("t1", saved.step + 2)
    rig.drop.append(["t1", 1])
    rig.until(lambda: not rig.supervisor.stays.residents)
    rig.launch("t1", "jobs:Count", epoch=2, images=[rig.image(saved)])
    assert rig.event(Started, "t1", 2).step == saved.step
    rig.steps("t1", saved.step + 2, epoch=2)


def test_job_that_runs_while_its_image_is_made_computes_the_same(rig):
    """Launched again as soon as it has paused, many times, each time with its image under way."""
    params = {"steps": 60}
    undisturbed = alone("large:Large", params)
    for epoch in range(1, 12):
        rig.launch("t1", "large:Large", epoch, params=params)
        rig.event(Started, "t1", epoch)
        rig.pause("t1", epoch)
        rig.until(
            lambda epoch=epoch: rig.all(Paused, "t1", epoch) or rig.all(Finished, "t1", epoch)
        )
        if rig.all(Finished, "t1", epoch):
            break
    else:
        rig.launch("t1", "large:Large", 12, params=params)
        epoch = 12
    assert rig.event(Finished, "t1", epoch).result == undisturbed["result"]


def test_memory_of_its_images_counts_for_a_job(rig):
    rig.launch("t1", "jobs:Count", params={"megabytes": 40})
    rig.steps("t1", 2)
    rig.pause("t1")
    rig.event(Saved, "t1")
    (resident,) = rig.supervisor.stays.residents.values()
    rig.until(lambda: resident.slab_bytes >= 40 << 20)
    assert resident.slab_bytes < 42 << 20


def test_image_without_room_is_reported_after_the_first_step(rigs):
    rig = rigs(host_memory_bytes=20 << 20)
    rig.launch("t1", "jobs:Count", params={"megabytes": 40})
    failed = rig.event(Failed, "t1")
    assert (failed.cause, failed.step) == ("uncapturable", 1)
    assert "keep at most 20971520 (ROUNDHOUSE_HOST_MEMORY_BYTES)" in failed.message


def test_image_too_large_for_the_device_is_reported(rigs):
    first = rigs()
    first.launch("t1", "jobs:Count", params={"megabytes": 40})
    first.steps("t1", 2)
    first.pause("t1")
    image = first.image(first.event(Saved, "t1"))
    first.close()
    second = rigs(host_memory_bytes=20 << 20)
    second.launch("t1", "jobs:Count", images=[image])
    failed = second.event(Failed, "t1")
    assert failed.cause == "exit"
    assert "exceeds the 20971520 bytes" in failed.message


def test_checkpoints_are_written_as_often_as_asked_each_with_the_value_of_its_step(rig):
    rig.launch("t1", "jobs:Count", checkpoint_every_s=0.2, best={"metric": "done"})
    rig.until(lambda: len(rig.all(Saved, "t1")) >= 3)
    rig.pause("t1")
    rig.event(Paused, "t1")
    rig.until(lambda: rig.all(Saved, "t1")[-1].step == rig.view("t1").step)
    steps = [saved.step for saved in rig.all(Saved, "t1")]
    assert steps == sorted(set(steps))
    ranks = [saved.ranked for saved in rig.all(Saved, "t1")]
    assert ranks == [{"step": step, "value": float(step)} for step in steps]


def test_value_of_an_image_is_checked():
    for ranked in ({"step": 8, "value": 1.0}, {"step": 1, "value": "low"}, {"value": 1.0}, [1]):
        with pytest.raises(untrusted.Nonsense):
            untrusted.ranked({"ranked": ranked}, 7)
    assert untrusted.ranked({"ranked": {"step": 7, "value": None}}, 7) == {"step": 7, "value": None}
    late = {"ranked": {"step": 8, "value": 1.0}}
    assert untrusted.ranked(late, None) == late["ranked"]
    assert untrusted.ranked({}, 7) == untrusted.ranked({"ranked": {}}, 7) == {}


def test_time_stood_still_for_images_is_reported_per_stay(rig):
    rig.launch("t1", "jobs:Count", checkpoint_every_s=0.1)
    rig.until(lambda: len(rig.all(Saved, "t1")) >= 3)
    rig.pause("t1")
    paused = rig.event(Paused, "t1")
    assert 0 < paused.staged_us < paused.held_us
    assert rig.view("t1").staged_us == paused.staged_us
    rig.launch("t1", "jobs:Count", epoch=2)  # in place, in the same process
    assert rig.event(Started, "t1", 2).staged_us == 0
    rig.steps("t1", paused.step + 3, epoch=2)
    rig.pause("t1", 2)
    again = rig.event(Paused, "t1", 2)
    assert again.staged_us < again.held_us


# --- orders ---------------------------------------------------------------------------------------


def test_cancel_ends_a_job_at_its_safe_point(rig):
    rig.launch("t1", "jobs:Count")
    rig.steps("t1", 2)
    rig.cancel("t1")
    assert rig.event(Stopped, "t1").step >= 2


def test_cancel_kills_a_hanging_job(rig):
    rig.launch("t1", "jobs:Hang")
    rig.until(lambda: rig.printed("t1") == ["hanging"])
    began = time.monotonic()
    rig.cancel("t1")
    rig.event(Stopped, "t1")
    assert 0.9 < time.monotonic() - began < 60.0  # the grace is 1 s, and it hangs for 1000 s


def test_cancel_ends_a_paused_job(rig):
    rig.launch("t1", "jobs:Count")
    rig.steps("t1", 2)
    rig.pause("t1")
    rig.event(Paused, "t1")
    rig.cancel("t1")
    rig.event(Stopped, "t1")
    rig.until(lambda: not rig.supervisor.stays.residents)


def test_successor_prepares_meanwhile_and_gets_the_slot_when_it_is_free(rig):
    rig.launch("t1", "jobs:Stamp", params={"waits_in": 2})
    rig.steps("t1", 1)
    rig.until((rig.folder("t1") / "waits").exists)
    rig.pause("t1")  # in the midst of the second
    rig.launch("t2", "jobs:Stamp", params={"nap_s": 0.01})
    rig.until(
        lambda: any(
            r.task == "t2" and r.is_prepared for r in list(rig.supervisor.stays.residents.values())
        )
    )
    assert not rig.all(Paused, "t1"), "it was prepared while the other still ran"
    rig.let_end("t1")
    rig.steps("t2", 3)
    rig.pause("t2")
    rig.event(Saved, "t2")
    rig.until(lambda: rig.printed("t2"))
    last = max(float(line.split()[1]) for line in rig.printed("t1"))
    first = min(float(line.split()[0]) for line in rig.printed("t2"))
    assert first > last


# --- trust ----------------------------------------------------------------------------------------


def test_device_without_answers_stops_in_time_and_goes_on_with_them(rigs):
    rig = rigs(lease_s=5.0, lease_margin_s=4.0, beat_s=0.3)
    rig.launch("t1", "jobs:Stamp", params={"nap_s": 0.01})
    rig.steps("t1", 5)
    rig.deaf = True
    time.sleep(5.5)
    last_answer_s = (
        rig.supervisor.stays.machine.lease.answered_us / 1e6
    )  # one may have been under way
    rig.deaf = False
    rig.event(Started, "t1")
    stopped_at = rig.supervisor.stays.by_key["t1", 1].step
    rig.steps("t1", stopped_at + 5)
    rig.pause("t1")
    rig.event(Paused, "t1")
    rig.until(lambda: len(rig.printed("t1")) >= stopped_at + 5)
    times = [tuple(map(float, line.split())) for line in rig.printed("t1")]
    gap_s, last_s = max((b[0] - a[1], a[0]) for a, b in itertools.pairwise(times))
    assert gap_s > 1.0
    assert last_s <= last_answer_s + 5.0, "a step began after its lease had ended"


def test_step_longer_than_a_lease_outlasts_an_island_that_is_away(rigs):
    rig = rigs(lease_margin_s=1.0, beat_s=0.3, grace_s=60.0)
    rig.launch("t1", "jobs:Stamp", params={"nap_s": 3.0})
    rig.steps("t1", 1)
    rig.until(lambda: rig.reports[-1].grace_us >= 6_000_000)
    rig.lease_s = 2.0
    asked = len(rig.reports)
    rig.until(lambda: len(rig.reports) > asked + 1)  # the answer to the one before has come
    rig.deaf = True
    time.sleep(6.0)  # three leases; the step in the slot ends within the first two
    rig.deaf = False
    assert rig.steps("t1", 3).state == "running"


def test_job_does_not_run_on_under_a_stopped_supervisor(tmp_path):
    """Even SIGSTOP of the whole device worker: the resident reads the deadline itself."""
    with separate_device(tmp_path, "--nap", "0.02") as device:
        os.kill(device.pid, signal.SIGSTOP)
        time.sleep(3.5)  # it trusts itself for 1 s
        log = tmp_path / "steps"
        before = log.read_text()
        time.sleep(1.0)
        assert log.read_text() == before
        os.kill(device.pid, signal.SIGCONT)


# --- memory ---------------------------------------------------------------------------------------


def test_job_paused_last_is_needed_last_and_leaves_memory_first(rigs):
    rig = rigs(residents_max=2)
    for task in ("t1", "t2", "t3"):
        rig.launch(task, "jobs:Count")
        rig.steps(task, 2)
        rig.pause(task)
        rig.event(Saved, task)
    rig.until(lambda: rig.view("t2") is None and rig.view("t3"))
    assert rig.view("t1").state == "paused"
    rig.launch("t2", "jobs:Count", epoch=2, images=_image_of(rig, "t2"))
    assert rig.event(Started, "t2", 2).resumed == "image"


def test_paused_job_ends_so_that_the_disk_has_room_for_another(rig, monkeypatch):
    """No job fails because paused ones hold the disk, which the test only says to be full."""
    rig.launch("t1", "jobs:Count")
    rig.steps("t1", 2)
    rig.pause("t1")
    residents = rig.supervisor.stays.residents
    monkeypatch.setattr(rig.supervisor.spawner, "has_disk", lambda asked: not residents)
    rig.launch("t2", "jobs:Count")
    rig.event(Started, "t2")
    assert rig.view("t1") is None
    rig.pause("t2")
    rig.launch("t1", "jobs:Count", epoch=2, images=_image_of(rig, "t1"))
    assert rig.event(Started, "t1", 2).resumed == "image"


def test_task_that_waits_for_room_reports_for_what_until_it_starts(rig, monkeypatch):
    room = list[str]()
    monkeypatch.setattr(admission, "ROOM_WITHIN_US", 600_000_000)
    monkeypatch.setattr(rig.supervisor.spawner, "has_disk", lambda asked: bool(room))
    rig.launch("t1", "jobs:Count")
    rig.until(lambda: (view := rig.view("t1")) is not None and view.waits_for == "disk")
    room.append("some")
    rig.event(Started, "t1")
    rig.until(lambda: rig.view("t1").waits_for == "")


def test_job_goes_back_to_its_queue_if_others_hold_the_disk(rig, monkeypatch):
    monkeypatch.setattr(admission, "ROOM_WITHIN_US", 300_000)
    monkeypatch.setattr(rig.supervisor.spawner, "has_disk", lambda asked: False)
    rig.launch("t1", "jobs:Count")
    rig.event(Paused, "t1")
    assert not rig.all(Failed, "t1")
    monkeypatch.undo()
    rig.launch("t1", "jobs:Count", epoch=2)
    rig.event(Started, "t1", 2)


@pytest.mark.parametrize("epoch", [2, 3])
def test_job_launched_before_the_island_knew_its_last_image_loses_nothing(rigs, epoch):
    """It made room when that was durable; what ran elsewhere meanwhile is another story."""
    rig = rigs(residents_max=1)
    rig.launch("t1", "jobs:Count")
    rig.steps("t1", 2)
    rig.save("t1")
    older = _image_of(rig, "t1")
    rig.steps("t1", older[0].step + 2)
    rig.pause("t1")
    newest = rig.event(Paused, "t1").step
    rig.until(lambda: len(rig.all(Saved, "t1")) == 2)
    rig.launch("t2", "jobs:Count")
    rig.steps("t2", 1)
    rig.pause("t2")
    rig.until(lambda: rig.view("t1") is None)
    rig.launch("t1", "jobs:Count", epoch=epoch, images=older)
    started = rig.event(Started, "t1", epoch)
    expected = newest if epoch == 2 else older[0].step
    assert (started.resumed, started.step) == ("image", expected)


def test_memory_is_bounded_by_what_launches_ask_for(rigs):
    rig = rigs(memory_bytes=100 * 2**20)
    for task in ("t1", "t2"):
        rig.launch(task, "jobs:Count", memory_bytes=60 * 2**20)
        rig.steps(task, 2)
        rig.pause(task)
        rig.event(Saved, task)
    assert [rig.view(task).level for task in ("t1", "t2")] == ["host", "device"]


def test_image_that_is_not_durable_is_never_dropped(rigs, monkeypatch):
    monkeypatch.setattr("workers.device.stays.storing.SAVE_AGAIN_US", 1_000_000)
    rig = rigs(residents_max=1)
    folder = rig.house.run.parent / "store"
    rig.launch("t1", "jobs:Count")
    rig.steps("t1", 2)
    hidden = folder.rename(folder.with_name("hidden"))
    folder.write_text("in the way")  # nothing can be stored
    rig.pause("t1")
    rig.event(Paused, "t1")
    (resident,) = rig.supervisor.stays.residents.values()
    rig.until(lambda: resident.save_again_us is not None)
    folder.unlink()
    hidden.rename(folder)
    rig.launch("t2", "jobs:Count")
    time.sleep(0.5)
    began = rig.all(Started, "t2")
    assert not began or rig.all(Saved, "t1")
    rig.event(Saved, "t1")  # tried again
    rig.event(Started, "t2")
    rig.until(lambda: rig.view("t1") is None)


def _image_of(rig: DeviceRig, task: str) -> list[CheckpointRef]:
    return [rig.image(rig.event(Saved, task))]


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_zygotes")
def test_stopping_worker_pauses_and_saves_tasks_and_sends_a_last_report(rigs):
    rig = rigs()
    rig.launch("t1", "jobs:Count")
    rig.steps("t1", 3)
    zygote = psutil.Process(rig.supervisor.spawner.zygote.process.pid)
    family = [zygote, *zygote.children(recursive=True)]
    rig.close()
    assert rig.event(Saved, "t1").step == rig.event(Paused, "t1").step
    first, *_, last = [report for report in rig.reports if report.facts.get("stopping")]
    assert [view.task for view in first.residents] == ["t1"]
    assert last.facts["leaving"]
    assert last.residents == []
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert len(family) >= 2
    assert alive == []


def test_dead_zygote_is_replaced_and_its_residents_are_lost(rigs):
    rig = rigs()
    rig.launch("t1", "jobs:Count")
    rig.steps("t1", 2)
    rig.supervisor.spawner.zygote.process.kill()
    rig.until(lambda: rig.view("t1") is None)
    assert not rig.all(Failed, "t1")
    rig.launch("t1", "jobs:Count", epoch=2, params={"steps": 3})
    rig.event(Finished, "t1", 2)


@pytest.mark.usefixtures("fresh_zygotes")
def test_devices_of_a_worker_share_what_their_zygotes_import_and_nothing_else(rigs, tmp_path):
    other = tmp_path / "other"
    other.mkdir(mode=0o755)
    first, second = rigs(), rigs(home=other)
    for rig in (first, second):
        rig.launch("t1", "jobs:Count")
        rig.steps("t1", 2)
    here, there = (rig.supervisor.spawner.zygote.process for rig in (first, second))
    host = psutil.Process(here.pid).parent()
    assert host == psutil.Process(there.pid).parent()
    for process in (here, there):  # most pages are those of the host zygote
        memory = psutil.Process(process.pid).memory_full_info()
        assert memory.uss < memory.rss / 4
    here.kill()  # ends the residents of its own device only
    first.until(lambda: first.view("t1") is None)
    ran = second.view("t1").step
    second.steps("t1", ran + 2)
    host.kill()  # a new one is started
    second.until(lambda: second.view("t1") is None)
    for rig in (first, second):
        rig.launch("t1", "jobs:Count", epoch=2, params={"steps": 3})
        rig.event(Finished, "t1", 2)


def test_a_zygote_that_dies_before_it_forked_a_resident_is_replaced(rigs):
    rig = rigs()
    zygote = rig.supervisor.spawner.zygote.process
    zygote.send_signal(signal.SIGSTOP)
    rig.launch("t1", "jobs:Count")
    rig.until(lambda: rig.supervisor.stays.residents and rig.view("t1"))
    zygote.kill()
    rig.until(lambda: rig.view("t1") is None)
    rig.launch("t1", "jobs:Count", epoch=2, params={"steps": 3})
    rig.event(Finished, "t1", 2)


@pytest.mark.parametrize("walls", rest_long(["preferred", "off"]))
def test_a_killed_worker_leaves_no_process_and_frees_its_locks(tmp_path, walls):
    with separate_device(tmp_path, "--sandbox", walls) as device:
        children = psutil.Process(device.pid).children(recursive=True)
        assert len(children) >= 2
        device.kill()
        device.wait()
        os.close(locked(tmp_path / "run" / "h.0.lock", PATIENCE_S))
        assert not resident_records.end_recorded(tmp_path / "run" / "h.0" / "residents", PATIENCE_S)
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert not alive


def test_second_worker_of_a_device_is_told_who_holds_it(rig):
    with pytest.raises(CannotServe, match=f"process {os.getpid()}"):
        locked(rig.house.run / "h.0.lock", 0.3)


def test_result_that_is_too_large_or_not_json_is_refused_with_advice(rig):
    rig.launch("t1", "jobs:tokenize", params={"text": "abc"})
    assert "`outputs`" in rig.event(Failed, "t1").message
    rig.launch("t2", "jobs:repeat", params={"times": 300_000})
    assert "`outputs`" in rig.event(Failed, "t2").message


def test_nonsense_of_a_resident_ends_it_and_nothing_else(rig):
    """A tenant can write to the socket of its own process: it only harms itself."""
    for number, word in enumerate(
        ("garbage", "frame", "paused", "saving", "index", "fd", "stopped")
    ):
        rig.launch(f"t{number}", "jobs:Meddle", params={"word": word})
        failed = rig.event(Failed, f"t{number}")
        assert (failed.cause, rig.supervisor.is_alive()) == ("exit", True), word
    rig.launch("t9", "jobs:Count", params={"steps": 2})
    rig.event(Finished, "t9")


@pytest.mark.parametrize("seed", [3])
def test_only_one_task_steps_at_a_time_under_random_orders(rig, seed):
    """A hundred random orders, kills and losses, or more until there are a hundred steps to see.

    The steps of all tasks never overlap.
    """
    dice = random.Random(seed)
    epochs = {f"t{number}": 0 for number in range(5)}
    for number in range(2000):
        if number >= 100 and len(_stamps(rig)) > 100:
            break
        _disturb(rig, dice, epochs)
        time.sleep(dice.uniform(0, 0.1))
    rig.until(lambda: not rig.supervisor.admission.fetched)
    steps = _stamps(rig)
    assert len(steps) > 100
    for (_, ended), (began, _) in itertools.pairwise(steps):
        assert ended <= began
    last = "t9"
    rig.drop += [list(name) for name in rig.orders]
    rig.launch(last, "jobs:Count", params={"steps": 3})
    rig.event(Finished, last)


def _stamps(rig: DeviceRig) -> list[tuple[float, ...]]:
    lines = [line for said in list(rig.lines.values()) for _, line in list(said)]
    return sorted(tuple(map(float, line.split())) for line in lines if line[:1].isdigit())


def _disturb(rig: DeviceRig, dice: random.Random, epochs: dict[str, int]) -> None:
    task = dice.choice(sorted(epochs))
    often = {"launch": 4, "pause": 3, "cancel": 1, "kill": 1, "drop": 1}
    (what,) = dice.choices(list(often), list(often.values()))
    epoch = epochs[task]
    if what == "launch":
        if epoch and not _is_over(rig, task, epoch):
            return
        epochs[task] += 1
        rig.launch(task, "jobs:Stamp", epoch + 1, params={"nap_s": 0.003}, memory_bytes=2**30)
    elif what == "kill":
        for resident in list(rig.supervisor.stays.residents.values())[:1]:
            resident.kill()
    elif not epoch:
        return
    elif what == "drop":
        rig.drop.append([task, epoch])
    else:
        getattr(rig, what)(task, epoch)


def _is_over(rig: DeviceRig, task: str, epoch: int) -> bool:
    ends = (Paused, Finished, Failed, Stopped)
    gone = [task, epoch] in rig.drop
    return gone or any(rig.all(kind, task, epoch) for kind in ends)
