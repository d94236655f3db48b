"""Commands: programs nobody looks into, with real processes, on a real device."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile

import psutil
import pytest

from app.core.model.messages import ARTIFACTS, Failed, Finished, Paused, Saved, Started, Stopped
from tests.workers.conftest import ROOT, Ground
from workers.device.supervision import admission


def summed(steps: int) -> str:
    """What `count.py` prints at its end, however often it was paused or begun again."""
    found = "0"
    for step in range(1, steps + 1):
        found = hashlib.sha256(f"{found} {step}".encode()).hexdigest()
    return found


def shell(text: str) -> list[str]:
    return ["bash", "-c", text]


def ended(ground: Ground, task: str, epoch: int = 1) -> list[str]:
    """All that it printed, once it is over."""
    ground.until(lambda: any(ground.all(end, task, epoch) for end in (Finished, Failed, Stopped)))
    ground.until(lambda: ground.view(task, epoch) is None)
    return ground.printed(task, epoch)


def its_processes(ground: Ground) -> list[psutil.Process]:
    """Those of the one command that lives there, as this host sees them; not the stub's own."""
    (resident,) = ground.supervisor.lives.residents.values()
    below = psutil.Process(resident.pid).children(recursive=True)
    living = [process for process in below if process.status() != psutil.STATUS_ZOMBIE]
    return [process for process in living if "zygote" not in " ".join(process.cmdline())]


def used_s(processes: list[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in processes]


# --- a life ---------------------------------------------------------------------------------------


def test_a_command_runs_to_its_end_in_a_copy_of_its_bundle(ground):
    ground.launch("t1", ["python", "count.py", "20", "0.01"], outputs=["result"])
    finished = ground.event(Finished, "t1")
    assert finished.result == {"exit_status": 0}
    assert ended(ground, "t1") == ["begins after 0 restarts 0", f"sum {summed(20)}"]
    started = ground.event(Started, "t1")
    assert (started.resumed, started.capabilities) == ("fresh", ["pause", "restart"])
    assert finished.outputs["result"]["size_bytes"] > 64


def test_what_it_leaves_in_the_folder_artifacts_is_kept(ground):
    leave = "mkdir -p artifacts/deep; echo 42 > artifacts/deep/a; ln -s /etc/passwd artifacts/no"
    ground.launch("t1", shell(leave))
    kept = ground.event(Finished, "t1").outputs[ARTIFACTS]
    with ground.store.open(kept["sha256"]) as body, zipfile.ZipFile(body) as archive:
        assert {each: archive.read(each) for each in archive.namelist()} == {"deep/a": b"42\n"}
    ground.launch("t2", shell("mkdir artifacts; ln -s / elsewhere"))
    assert ground.event(Finished, "t2").outputs == {}
    ground.launch("t3", shell(f"{leave}; echo no >&2; exit 3"))
    failed = ground.event(Failed, "t3")
    assert (failed.message, failed.detail) == ("It ended with exit status 3.", "no")
    assert failed.outputs[ARTIFACTS]["size_bytes"] > 0


def test_lines_of_progress_are_its_steps_and_its_metrics(ground):
    ground.launch("t1", ["python", "count.py", "500", "0.01"])
    view = ground.steps("t1", 20)
    assert view.metrics["step"] == view.step
    ground.until(lambda: ground.view("t1").memory_bytes > 2**20)


def test_it_is_told_of_its_task_its_device_and_its_parameters(ground):
    said = "echo $ROUNDHOUSE_TASK $ROUNDHOUSE_DEVICE $ROUNDHOUSE_PARAMS $OMP_NUM_THREADS; env"
    ground.launch("t1", shell(said), params={"lr": 0.5, "word": "é"})
    lines = ended(ground, "t1")
    assert lines[0] == 't1 cpu {"lr": 0.5, "word": "\\u00e9"} 1'
    named = {line.partition("=")[0] for line in lines[1:]}
    assert not [name for name in named if "DATABASE" in name or "KEY" in name or "REDIS" in name]


def test_without_a_bundle_its_working_folder_begins_empty(ground):
    ground.launch("t1", shell("ls -A; pwd"), bundle="")
    walls = ground.reports[-1].facts["sandbox"]
    assert ended(ground, "t1") == [".roundhouse", *(["/scratch"] if "files" in walls else [])]


def test_what_others_gave_lies_in_its_inputs_as_files(ground):
    ground.launch("t1", "jobs:tokenize", params={"text": "abc"}, outputs=["tokens"])
    tokens = ground.event(Finished, "t1").outputs["tokens"]
    ground.launch("t2", shell("printf hello > words.txt"), outputs=["words"])
    words = ground.event(Finished, "t2").outputs["words"]
    read = "import torch, os; print(torch.load(os.environ['ROUNDHOUSE_INPUTS'] + '/a.pt').tolist())"
    said = f'cat $ROUNDHOUSE_INPUTS/b; echo; python -c "{read}"'
    ground.launch("t3", shell(said), inputs={"a": tokens, "b": words})
    assert ended(ground, "t3") == ["hello", str(list(b"abc"))]
    ground.launch("t4", "jobs:length", inputs={"words": words})
    assert ground.event(Finished, "t4").result == {"length": 5, "words": "hello"}


FAILURES = [
    (shell("echo first >&2; echo why >&2; exit 3"), "exit", "with exit status 3.", "why"),
    (shell("kill -SEGV $$"), "exit", "It was ended by SIGSEGV.", ""),
    (shell("kill -9 $$"), "exit", "by SIGKILL; perhaps it ran out of memory.", ""),
    (["pyhton", "x.py"], "bundle", "'pyhton' was not found", "No such file"),
    (["./count.py", "1"], "bundle", '["bash", "./count.py"]', "Permission denied"),
    (["/usr"], "bundle", "may not be executed", ""),
]


def test_how_it_failed_is_said(ground):
    for n, (argv, cause, told, detail) in enumerate(FAILURES):
        ground.launch(f"t{n}", argv)
        failed = ground.event(Failed, f"t{n}")
        assert failed.cause == cause
        assert told in failed.message
        assert detail in failed.detail


def test_an_output_is_exactly_one_file(ground):
    for task, files, there in (("t1", "true", "none"), ("t2", "touch m.a m.b", "m.a, m.b")):
        ground.launch(task, shell(files), outputs=["m"])
        failed = ground.event(Failed, task)
        assert failed.cause == "exception"
        assert failed.message.endswith(f"there is: {there}")


def test_what_it_leaves_running_ends_with_it(ground):
    ground.launch("t1", shell("(while :; do date > still; done) & sleep 0.1; echo $!"))
    ground.event(Finished, "t1")
    ground.until(lambda: not ground.supervisor.lives.residents)
    # Of a process of somebody else that has ended and was not reaped there are no words.
    words = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [each for each in words if each[:1] == ["bash"] and "still" in str(each)]


def test_lines_that_are_no_progress_are_left_out_and_told_once(ground):
    said = "for i in 1 2 3; do echo nonsense > $ROUNDHOUSE_METRICS; done; sleep 0.5"
    ground.launch("t1", shell(said))
    assert ground.event(Finished, "t1").step == 1
    assert len([line for line in ended(ground, "t1") if "no JSON object" in line]) == 1


def test_cancel_lets_it_tidy_up(ground):
    ground.launch(
        "t1", shell("trap 'echo tidy; exit 0' TERM; echo up; while :; do sleep 0.02; done")
    )
    ground.until(lambda: "up" in ground.printed("t1"))
    ground.cancel("t1")
    ground.event(Stopped, "t1")
    assert "tidy" in ended(ground, "t1")


def test_cancel_ends_by_force_what_does_not_listen(ground):
    ground.launch("t1", shell("trap '' TERM; echo up; while :; do sleep 0.02; done"))
    ground.until(lambda: "up" in ground.printed("t1"))
    ground.cancel("t1")
    ground.event(Stopped, "t1")


def test_it_cannot_reach_into_the_stub(ground):
    """Else it could speak for it, or keep it from stopping the tree."""
    if "processes" not in ground.reports[-1].facts["sandbox"]:
        pytest.skip("this machine gives no process namespaces")
    said = "head -c 1 /proc/1/mem; ls /proc/1/fd; kill -STOP 1; kill -KILL 1; echo on"
    ground.launch("t1", shell(said))
    ground.event(Finished, "t1")
    lines = ended(ground, "t1")
    assert lines[-1] == "on"
    if "user" in ground.reports[-1].facts["sandbox"]:
        assert len([line for line in lines if "denied" in line or "not permitted" in line]) >= 2


# --- pause and go on ------------------------------------------------------------------------------


def test_a_command_that_is_paused_many_times_computes_the_same(ground):
    chosen, epoch = random.Random(3), 1
    ground.launch("t1", ["python", "count.py", "200", "0.005"])
    while not ground.all(Finished, "t1", epoch):
        time.sleep(chosen.random() * 0.15)
        ground.pause("t1", epoch)
        ground.until(lambda n=epoch: ground.all(Paused, "t1", n) or ground.all(Finished, "t1", n))
        if ground.all(Paused, "t1", epoch):
            epoch += 1
            ground.launch("t1", ["python", "count.py", "200", "0.005"], epoch=epoch)
            assert ground.event(Started, "t1", epoch).resumed == "resident"
    assert epoch > 5
    ended(ground, "t1", epoch)
    said = [line for n in range(1, epoch + 1) for line in ground.printed("t1", n)]
    # One process, from its beginning to its end, which may come a pause after its last word.
    assert said == ["begins after 0 restarts 0", f"sum {summed(200)}"]


def test_two_commands_never_run_at_once(ground):
    tasks, epochs, switches = ["t1", "t2"], {"t1": 0, "t2": 0}, 0
    for task in [*tasks * 6]:
        epochs[task] += 1
        ground.launch(task, ["python", "tick.py", "60"], epoch=epochs[task])
        ground.event(Started, task, epochs[task])
        time.sleep(0.15)
        ground.pause(task, epochs[task])
        ground.event(Paused, task, epochs[task])
        switches += 1
    time.sleep(0.6)  # the last lines are on their way
    ticks = sorted((at, task) for task in tasks for at in _ticks(ground, task, epochs[task]))
    runs = len(list(itertools.groupby(ticks, key=lambda tick: tick[1])))
    assert min(len(_ticks(ground, task, epochs[task])) for task in tasks) > 20
    assert runs <= switches


def _ticks(ground: Ground, task: str, epochs: int) -> list[int]:
    lines = [line for n in range(1, epochs + 1) for line in ground.printed(task, n)]
    return [int(line.split()[1]) for line in lines if line.startswith("tick ") and line[5:]]


@pytest.mark.parametrize("walls", ["preferred", "off"])
def test_a_pause_stops_the_whole_tree_and_nothing_of_it_is_lost(grounds, walls):
    ground = grounds(sandbox=walls)
    ground.launch("t1", ["python", "tree.py", "stay"])
    ground.until(lambda: "grown" in ground.printed("t1"))
    ground.pause("t1")
    ground.event(Paused, "t1")
    processes = its_processes(ground)
    assert len(processes) == 6
    before = used_s(processes)
    time.sleep(0.5)
    assert used_s(processes) == before
    assert {process.status() for process in processes} == {psutil.STATUS_STOPPED}
    ground.launch("t1", ["python", "tree.py", "stay"], epoch=2)
    ground.event(Started, "t1", 2)
    until_s = time.monotonic() + 10
    while not all(now > then for now, then in zip(used_s(processes), before, strict=True)):
        assert time.monotonic() < until_s, "some of it did not go on"
        time.sleep(0.05)
    ground.cancel("t1", 2)
    ground.event(Stopped, "t1", 2)
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


def test_a_tree_that_forks_without_end_is_caught_again_and_again(ground):
    ground.launch("t1", ["python", "forker.py"])
    ground.until(lambda: "forks" in ground.printed("t1"))
    for epoch in range(1, 6):
        time.sleep(0.1)
        began_s = time.monotonic()
        ground.pause("t1", epoch)
        ground.event(Paused, "t1", epoch)
        assert time.monotonic() - began_s < 3
        processes = its_processes(ground)
        before = used_s(processes)
        time.sleep(0.2)
        with contextlib.suppress(psutil.NoSuchProcess):  # none can go: they are stopped
            assert used_s(processes) == before
        assert len(its_processes(ground)) == len(processes)
        ground.launch("t1", ["python", "forker.py"], epoch=epoch + 1)
        ground.event(Started, "t1", epoch + 1)


def test_what_it_had_stopped_itself_stays_stopped(ground):
    said = (
        "(while :; do date +%s%N > beat; sleep 0.01; done) & child=$!; sleep 0.1;"
        " kill -STOP $child; echo stopped; sleep 1; cp beat then; sleep 0.3;"
        " cmp beat then && echo same; kill -9 $child"
    )
    ground.launch("t1", shell(said))
    ground.until(lambda: "stopped" in ground.printed("t1"))
    ground.pause("t1")
    ground.event(Paused, "t1")
    ground.launch("t1", shell(said), epoch=2)
    ground.event(Finished, "t1", 2)
    assert "same" in ended(ground, "t1", 2)


# --- the lease ------------------------------------------------------------------------------------


def test_it_stands_still_when_trust_ends_and_goes_on_with_it(grounds):
    ground = grounds(lease_s=2.0, lease_margin_s=1.0, beat_s=0.3)
    ground.launch("t1", ["python", "tick.py", "60"])
    ground.until(lambda: len(ground.printed("t1")) > 10)
    ground.deaf = True
    time.sleep(2.5)
    answered_us = ground.supervisor.lives.machine.lease.answered_us
    ground.deaf = False
    ground.until(
        lambda: ground.printed("t1") and _ticks(ground, "t1", 1)[-1] > answered_us + 3_000_000
    )
    ticks = _ticks(ground, "t1", 1)
    before = [at for at in ticks if at < answered_us + 2_000_000]
    assert max(before) <= answered_us + 1_100_000, "ran past its trust"
    assert max(b - a for a, b in itertools.pairwise(ticks)) > 1_000_000
    assert not ground.all(Failed, "t1")


@contextlib.contextmanager
def separate(home, *words):
    """A device worker in a process of its own, that runs `count.py`; it says what was saved."""
    argv = [
        sys.executable,
        "-m",
        "tests.workers.separate",
        str(home),
        "--sandbox",
        "preferred",
        *words,
    ]
    device = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield device
    finally:
        device.kill()
        device.wait()
        device.stdout.close()


def test_a_stopped_supervisor_does_not_let_it_run_on(tmp_path):
    """Even SIGSTOP of the whole device worker: the stub reads the deadline itself."""
    with separate(tmp_path, "--command", "python tick.py 60") as device:
        assert device.stdout.readline() == "running\n"
        below = psutil.Process(device.pid).children(recursive=True)
        ticking = [p for p in below if "tick.py" in p.cmdline()]
        os.kill(device.pid, signal.SIGSTOP)
        time.sleep(3.0)  # the lease is 2 s
        before = used_s(ticking)
        time.sleep(0.5)
        assert len(ticking) == 1
        assert used_s(ticking) == before
        assert ticking[0].status() == psutil.STATUS_STOPPED
        os.kill(device.pid, signal.SIGCONT)


# --- its working folder ---------------------------------------------------------------------------


def test_a_device_lost_leads_to_a_restart_in_the_folder_elsewhere_with_the_same_bits(
    tmp_path, grounds
):
    lost, other = tmp_path / "lost", tmp_path / "other"
    (lost / "store").mkdir(parents=True)
    other.mkdir()
    (other / "store").symlink_to(lost / "store")
    with separate(lost, "--command", "python count.py 400 0.01", "--every-s", "0.3") as device:
        assert device.stdout.readline() == "running\n"
        images = [json.loads(device.stdout.readline()) for _ in range(3)]
        below = psutil.Process(device.pid).children(recursive=True)
        device.kill()
        device.wait()
        _, alive = psutil.wait_procs(below, timeout=5)
        assert not alive
    ground = grounds(home=other)
    ground.launch("t1", ["python", "count.py", "400", "0.01"], epoch=2, images=images[::-1])
    started = ground.event(Started, "t1", 2)
    assert (started.resumed, started.step) == ("folder", images[-1]["step"])
    ground.event(Finished, "t1", 2)
    first, last = ended(ground, "t1", 2)
    assert 0 < int(first.split()[2]) < 400
    assert first.endswith("restarts 1")
    assert last == f"sum {summed(400)}"


@pytest.mark.parametrize("how", ["written", "mapped"])
def test_a_folder_is_kept_as_it_was_at_one_moment(ground, how):
    """The two numbers differ by one at most, at any moment; torn they would by hundreds.

    A mapped file changes without any system call, and its times hardly ever.
    """
    ground.launch("t1", ["python", "both.py", how], checkpoint_every_s=0.15)
    ground.until(lambda: "writes" in ground.printed("t1"))
    before = len(ground.all(Saved, "t1")) + 1  # one may be on its way
    ground.until(lambda: len(ground.all(Saved, "t1")) >= before + 4)
    images = [ground.image(saved) for saved in ground.all(Saved, "t1")[before:]]
    assert len({image["step"] for image in images}) == len(images)
    ground.pause("t1")
    ground.event(Paused, "t1")
    for n, image in enumerate(images):
        ground.launch(f"u{n}", ["python", "both.py", how], images=[image])
        ground.event(Finished, f"u{n}")
        first, second = map(int, ended(ground, f"u{n}")[0].split()[1:])
        assert 0 <= first - second <= 1
        assert first > 0


def test_a_restored_folder_is_the_same_in_every_way(ground):
    make = (
        "mkdir -p a/b .hidden; printf x > a/b/file; chmod 640 a/b/file; touch -d @1000 a/b/file;"
        " ln -s b/file a/link; : > empty; truncate -s 100000 hole; chmod 500 .hidden; echo made;"
        " while :; do sleep 0.05; done"
    )
    look = (
        "find . -path ./.roundhouse -prune -o -printf '%p %m %s %l\\n' | sort; date -r a/b/file +%s"
    )
    ground.launch("t1", shell(make), bundle="")
    ground.until(lambda: "made" in ground.printed("t1"))
    ground.pause("t1")
    saved = ground.event(Saved, "t1")
    ground.launch("t2", shell(look), images=[ground.image(saved)], bundle="")
    ground.event(Finished, "t2")
    assert ended(ground, "t2")[1:] == [
        *("./.hidden 500 4096 ", "./a 700 4096 ", "./a/b 700 4096 ", "./a/b/file 640 1 "),
        *("./a/link 777 6 b/file", "./empty 600 0 ", "./hole 600 100000 ", "1000"),
    ]


def test_a_pause_is_told_at_once_and_its_folder_follows(ground):
    ground.launch("t1", ["python", "count.py", "1000", "0.01"])
    ground.steps("t1", 5)
    ground.pause("t1")
    paused, saved = ground.event(Paused, "t1"), ground.event(Saved, "t1")
    assert saved.step == paused.step
    assert ground.events.index(paused) < ground.events.index(saved)


def test_a_stopping_worker_keeps_its_folder_and_it_begins_again_elsewhere(tmp_path, grounds):
    ground = grounds(home=tmp_path)
    ground.launch("t1", ["python", "count.py", "300", "0.01"])
    ground.steps("t1", 20)
    ground.close()
    saved = ground.event(Saved, "t1")
    successor = grounds(home=tmp_path)
    successor.launch(
        "t1", ["python", "count.py", "300", "0.01"], epoch=2, images=[ground.image(saved)]
    )
    assert successor.event(Started, "t1", 2).resumed == "folder"
    successor.event(Finished, "t1", 2)
    first, last = ended(successor, "t1", 2)
    assert int(first.split()[2]) >= 15
    assert last == f"sum {summed(300)}"


def test_a_folder_too_large_to_be_kept_is_said_so_and_it_goes_on(grounds):
    ground = grounds(host_memory_bytes=2**20)
    said = "head -c 3000000 /dev/zero > large; sleep 1; echo on"
    ground.launch("t1", shell(said), bundle="", checkpoint_every_s=0.2)
    ground.event(Finished, "t1")
    lines = ended(ground, "t1")
    assert "on" in lines
    assert any("has 3000000 bytes in 1 files; at most 1048576 bytes" in line for line in lines)


def test_a_folder_that_finds_no_room_on_the_disk_is_not_called_damaged(grounds, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)]
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    try:
        ground = grounds(home=small)
        ground.launch(
            "t1", shell("head -c 20000000 /dev/urandom > a; echo made; sleep 60"), bundle=""
        )
        ground.until(lambda: "made" in ground.printed("t1"))
        ground.pause("t1")
        saved = ground.event(Saved, "t1")
        (small / "filler").write_bytes(b"x" * 15_000_000)
        ground.launch("t2", shell("true"), images=[ground.image(saved)], bundle="")
        failed = ground.event(Failed, "t2")
        assert failed.cause == "exit"
        assert "No space left" in failed.message
        ground.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


# --- room -----------------------------------------------------------------------------------------


def test_a_frozen_command_is_not_ended_for_room_while_anybody_else_can_go(grounds):
    ground = grounds(residents_max=2)
    ground.launch("t1", ["python", "count.py", "1000", "0.01"])
    ground.steps("t1", 3)
    ground.pause("t1")
    ground.event(Saved, "t1")
    for task in ("t2", "t3"):
        ground.launch(task, "jobs:Count")
        ground.steps(task, 2)
        ground.pause(task)
        ground.event(Saved, task)
    assert ground.view("t1").state == "paused"
    ground.until(lambda: ground.view("t2") is None)


def test_only_commands_frozen_make_room_in_the_end_by_beginning_again(grounds, monkeypatch):
    monkeypatch.setattr(admission, "ROOM_WITHIN_US", 1_500_000)
    ground = grounds(residents_max=1)
    ground.launch("t1", ["python", "count.py", "1000", "0.01"])
    ground.steps("t1", 3)
    ground.pause("t1")
    saved = ground.event(Saved, "t1")
    began_s = time.monotonic()
    ground.launch("t2", shell("true"))
    ground.event(Finished, "t2")
    assert time.monotonic() - began_s >= 1.4
    assert ground.view("t1") is None
    ground.launch("t1", ["python", "count.py", "30", "0.01"], epoch=2, images=[ground.image(saved)])
    assert ground.event(Started, "t1", 2).resumed == "folder"
    ground.event(Finished, "t1", 2)
