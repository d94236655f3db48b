"""Commands: programs nobody looks into, with real processes, on a real device."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
import zipfile
from collections import Counter
from dataclasses import asdict
from typing import Any

import psutil
import pytest

from app.core.model.protocol.messages import (
    ARTIFACTS,
    CheckpointRef,
    Failed,
    Finished,
    Paused,
    Saved,
    Started,
    Stopped,
)
from tests.processes import children, is_living, runs, status_of, used_s
from tests.workers.conftest import PATIENCE_S, QUICK_BEAT_S, ROOT, DeviceRig
from workers.commands.inputs_outputs import OwnSteps
from workers.device.stays import admission


def summed(steps: int) -> str:
    """What `count.py` prints at its end, however often it was paused or begun again."""
    found = "0"
    for step in range(1, steps + 1):
        found = hashlib.sha256(f"{found} {step}".encode()).hexdigest()
    return found


def shell(text: str) -> list[str]:
    return ["bash", "-c", text]


def ended(rig: DeviceRig, task: str, epoch: int = 1) -> list[str]:
    """All that it printed, once it is over."""
    rig.until(lambda: any(rig.all(end, task, epoch) for end in (Finished, Failed, Stopped)))
    rig.until(lambda: rig.view(task, epoch) is None)
    return rig.printed(task, epoch)


def its_processes(rig: DeviceRig) -> list[psutil.Process]:
    """Those of the one command that lives there, as this host sees them; not the stub's own."""
    (resident,) = rig.supervisor.stays.residents.values()
    living = filter(is_living, children(resident.pid, recursive=True))
    return [process for process in living if not runs(process, "zygote")]


def all_used_s(processes: list[psutil.Process]) -> list[float]:
    return [*map(used_s, processes)]


# --- a life ---------------------------------------------------------------------------------------


def test_a_command_runs_to_its_end_in_a_copy_of_its_bundle(rig):
    rig.launch("t1", ["python", "count.py", "20", "0.01"], outputs=["result"])
    finished = rig.event(Finished, "t1")
    assert finished.result == {"exit_status": 0}
    assert ended(rig, "t1") == ["begins after 0 restarts 0", f"sum {summed(20)}"]
    started = rig.event(Started, "t1")
    assert (started.resumed, started.capabilities) == ("fresh", ["pause", "restart"])
    assert finished.outputs["result"]["size_bytes"] > 64


def test_files_left_in_artifacts_are_kept(rig):
    leave = "mkdir -p artifacts/deep; echo 42 > artifacts/deep/a; ln -s /etc/passwd artifacts/no"
    rig.launch("t1", shell(leave))
    kept = rig.event(Finished, "t1").outputs[ARTIFACTS]
    with rig.store.open(kept["sha256"]) as body, zipfile.ZipFile(body) as archive:
        assert {each: archive.read(each) for each in archive.namelist()} == {"deep/a": b"42\n"}
    rig.launch("t2", shell("mkdir artifacts; ln -s / elsewhere"))
    assert rig.event(Finished, "t2").outputs == {}
    rig.launch("t3", shell(f"{leave}; echo no >&2; exit 3"))
    failed = rig.event(Failed, "t3")
    assert (failed.message, failed.detail) == ("It ended with exit status 3.", "no")
    assert failed.outputs[ARTIFACTS]["size_bytes"] > 0


def test_progress_lines_give_steps_and_metrics(rig):
    rig.launch("t1", ["python", "count.py", "1000000", "0.01"])
    view = rig.steps("t1", 20)
    assert view.metrics["step"] == view.step
    rig.until(lambda: rig.view("t1").memory_bytes > 2**20)


def metric_rows(rig, task: str) -> dict[int, dict[str, Any]]:
    """Return the rows of all reports, as the island merges them."""
    rows: dict[int, dict[str, Any]] = {}
    for view in rig.views(task):
        for step, values in view.points:
            rows[step] = {**rows.get(step, {}), **values}
    return rows


def test_rows_of_metrics_written_at_once_are_all_reported(rig):
    write = (
        "import json, os, sys\n"
        "with open(os.environ['ROUNDHOUSE_METRICS'], 'w') as file:\n"
        "    for n in range(3000): file.write(json.dumps({'loss': n, f'k{n % 2}': n}) + '\\n')\n"
        "    file.write('{\"acc\": 0.5}')\n"  # has no end of line
        "sys.exit(3)\n"
    )
    rig.launch("t1", ["python", "-c", write])
    rig.event(Failed, "t1")
    rig.until(lambda: len(metric_rows(rig, "t1")) >= 3001)
    rows = metric_rows(rig, "t1")
    assert [rows[n + 1].get("loss") for n in range(3000)] == [*range(3000)]
    assert rows[3001] == {"acc": 0.5}


EPOCHS = """
import json, os
with open(os.environ["ROUNDHOUSE_METRICS"], "w") as file:
    for epoch in range(3):
        for step in range(10):
            file.write(json.dumps({"step": step, "loss": 10 * epoch + step}) + "\\n")
        file.write(json.dumps({"step": step, "acc": epoch}) + "\\n")
"""


def test_all_rows_of_steps_that_restart_with_each_epoch_are_reported_in_order(rig):
    rig.launch("t1", ["python", "-c", EPOCHS])
    rig.event(Finished, "t1")
    rig.until(lambda: len(metric_rows(rig, "t1")) >= 30)
    rows = sorted(metric_rows(rig, "t1").items())
    assert [row["loss"] for _, row in rows] == [*range(30)]
    assert [row["step"] for _, row in rows] == [*range(10)] * 3
    assert [row["acc"] for _, row in rows if "acc" in row] == [0, 1, 2]


def places(rows: list[dict[str, Any]], steps: OwnSteps | None = None) -> list[int]:
    steps = steps or OwnSteps()
    return [steps.place(row, counted) for counted, row in enumerate(rows, 1)]


def test_rows_have_the_places_of_their_steps_while_these_replace_nothing():
    assert places([{"loss": 1}, {"loss": 2}]) == [1, 2]
    assert places([{"step": 7, "loss": 1}, {"step": 7, "acc": 1}, {"lr": 1}]) == [7, 7, 7]
    train = [{"step": n, "loss": n} for n in range(100)]
    valid = [{"step": epoch, "acc": epoch} for epoch in range(3)]
    assert places([*train, *valid]) == [*range(100), 0, 1, 2]


def test_rows_that_would_replace_others_have_places_behind_them():
    assert places([{"step": 3, "loss": 1}] * 3) == [3, 4, 5]
    assert places([{"step": 3, "loss": 1}, {"loss": 2}, {"step": 4, "loss": 3}]) == [3, 4, 5]
    steps = OwnSteps()
    most = [{"step": 2**53 - 1, "loss": 1}, {"step": 0, "loss": 1}] * 3
    assert all(0 <= place < 2**53 for place in places(most, steps))


def test_places_go_on_where_the_processes_of_a_command_do():
    epoch = [{"step": n, "loss": n} for n in range(10)]
    steps = OwnSteps()
    before = places([*epoch, *epoch[:5]], steps)
    moved = OwnSteps(**json.loads(json.dumps(asdict(steps))))
    assert before + places(epoch[5:], moved) == [*range(20)]


@pytest.mark.parametrize(
    ("end", "last"), [("raise ValueError(7)", "ValueError: 7"), ("os.kill(0, 9)", "going")]
)
def test_last_words_after_a_flood_are_in_log_and_detail(rigs, end, last):
    rig = rigs(beat_s=QUICK_BEAT_S)
    flood = (
        "import os, sys\n"
        "for n in range(400_000):\n"
        "    print('a line of a flood', n, file=(sys.stdout, sys.stderr)[n % 2])\n"
        f"sys.stdout.flush(); print('going', file=sys.stderr, flush=True); {end}\n"
    )
    rig.launch("t1", ["python", "-c", flood])
    failed = rig.event(Failed, "t1")
    assert failed.detail.splitlines()[-1] == last
    rig.until(lambda: any(line == ["stderr", last] for line in rig.lines["t1/1"]))
    printed = rig.printed("t1")
    assert "a line of a flood 399998" in printed
    assert any("lines dropped" in line for line in printed)


def test_rows_of_a_cancelled_command_are_reported(rig):
    write = 'trap \'echo "{\\"saved\\": 1}" >>$ROUNDHOUSE_METRICS; exit 0\' TERM; echo up'
    rig.launch("t1", shell(f"{write}; while :; do sleep 0.05; done"))
    rig.until(lambda: rig.printed("t1") == ["up"])
    rig.cancel("t1")
    rig.event(Stopped, "t1")
    rig.until(lambda: {"saved": 1} in metric_rows(rig, "t1").values())


def test_own_step_of_a_row_is_its_place(rig):
    lines = ['{"step": 100, "loss": 2}', '{"step": 100, "acc": 1}', '{"step": 200.0, "loss": 1}']
    write = "; ".join(f"echo '{line}' >>$ROUNDHOUSE_METRICS" for line in (*lines, '{"end": 7}'))
    rig.launch("t1", shell(write))
    rig.event(Finished, "t1")
    rig.until(lambda: 200 in metric_rows(rig, "t1"))
    assert metric_rows(rig, "t1") == {
        100: {"step": 100, "loss": 2, "acc": 1},
        200: {"step": 200.0, "loss": 1, "end": 7},
    }


def test_command_gets_its_task_device_and_parameters(rig):
    said = "echo $ROUNDHOUSE_TASK $ROUNDHOUSE_DEVICE $ROUNDHOUSE_PARAMS $OMP_NUM_THREADS; env"
    rig.launch("t1", shell(said), params={"lr": 0.5, "word": "é"})
    lines = ended(rig, "t1")
    assert lines[0] == 't1 cpu {"lr": 0.5, "word": "\\u00e9"} 1'
    named = {line.partition("=")[0] for line in lines[1:]}
    assert not [name for name in named if "DATABASE" in name or "KEY" in name or "REDIS" in name]


def test_working_folder_without_a_bundle_begins_empty(rig):
    rig.launch("t1", shell("ls -A; pwd"), bundle="")
    walls = rig.reports[-1].facts["sandbox"]
    assert ended(rig, "t1") == [".roundhouse", *(["/scratch"] if "files" in walls else [])]


def test_outputs_of_other_tasks_are_files_in_inputs(rig):
    rig.launch("t1", "jobs:tokenize", params={"text": "abc"}, outputs=["tokens"])
    tokens = rig.event(Finished, "t1").outputs["tokens"]
    rig.launch("t2", shell("printf hello > words.txt"), outputs=["words"])
    words = rig.event(Finished, "t2").outputs["words"]
    read = "import torch, os; print(torch.load(os.environ['ROUNDHOUSE_INPUTS'] + '/a.pt').tolist())"
    said = f'cat $ROUNDHOUSE_INPUTS/b; echo; python -c "{read}"'
    rig.launch("t3", shell(said), inputs={"a": tokens, "b": words})
    assert ended(rig, "t3") == ["hello", str(list(b"abc"))]
    rig.launch("t4", "jobs:length", inputs={"words": words})
    assert rig.event(Finished, "t4").result == {"length": 5, "words": "hello"}


FAILURES = [
    (shell("echo first >&2; echo why >&2; exit 3"), "exit", 3, "with exit status 3.", "why"),
    (shell("kill -SEGV $$"), "exit", 139, "It was ended by SIGSEGV.", ""),
    (shell("kill -9 $$"), "exit", 137, "by SIGKILL; perhaps it ran out of memory.", ""),
    (["pyhton", "x.py"], "bundle", None, "'pyhton' was not found", "No such file"),
    (["./count.py", "1"], "bundle", None, '["bash", "./count.py"]', "Permission denied"),
    (["/usr"], "bundle", None, "may not be executed", ""),
]


def test_failure_of_a_command_is_described(rig):
    for n, (argv, cause, exit_status, told, detail) in enumerate(FAILURES):
        rig.launch(f"t{n}", argv)
        failed = rig.event(Failed, f"t{n}")
        assert (failed.cause, failed.exit_status) == (cause, exit_status)
        assert told in failed.message
        assert detail in failed.detail


def test_lines_that_patterns_of_rules_match_come_with_the_failure(rig):
    rules = [{"log": "NCCL.*timeout", "do": "fail"}, {"log": "never printed", "do": "fail"}]
    argv = shell("echo old NCCL timeout; echo NCCL: a timeout; echo why >&2; exit 3")
    rig.launch("t1", argv, retry={"rules": rules})
    assert rig.event(Failed, "t1").matched == {"NCCL.*timeout": "NCCL: a timeout"}


def test_output_of_a_command_is_exactly_one_file(rig):
    for task, files, there in (("t1", "true", "none"), ("t2", "touch m.a m.b", "m.a, m.b")):
        rig.launch(task, shell(files), outputs=["m"])
        failed = rig.event(Failed, task)
        assert failed.cause == "exception"
        assert failed.message.endswith(f"there is: {there}")


def test_processes_left_running_end_with_the_command(rig):
    mark = f"still-{uuid.uuid4().hex}"  # the same test may run beside this one
    rig.launch("t1", shell(f"(while :; do date > {mark}; done) & sleep 0.1; echo $!"))
    rig.event(Finished, "t1")
    rig.until(lambda: not rig.supervisor.stays.residents)
    # Of a process of somebody else that has ended and was not reaped there are no words.
    words = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [each for each in words if each[:1] == ["bash"] and mark in str(each)]


def test_malformed_progress_lines_are_skipped_and_reported_once(rig):
    said = "for i in 1 2 3; do echo nonsense > $ROUNDHOUSE_METRICS; done"
    rig.launch("t1", shell(f"{said}; until test -e end; do sleep 0.02; done"))
    rig.until(lambda: any("must be a JSON object" in line for line in rig.printed("t1")))
    rig.let_end("t1")
    assert rig.event(Finished, "t1").step == 1
    assert len([line for line in ended(rig, "t1") if "must be a JSON object" in line]) == 1


def test_cancelled_command_may_clean_up(rigs):
    rig = rigs(stop_grace_s=30.0)
    rig.launch("t1", shell("trap 'echo tidy; exit 0' TERM; echo up; while :; do sleep 0.02; done"))
    rig.until(lambda: "up" in rig.printed("t1"))
    rig.cancel("t1")
    rig.event(Stopped, "t1")
    assert "tidy" in ended(rig, "t1")


def test_cancel_kills_a_command_that_ignores_it(rig):
    rig.launch("t1", shell("trap '' TERM; echo up; while :; do sleep 0.02; done"))
    rig.until(lambda: "up" in rig.printed("t1"))
    rig.cancel("t1")
    rig.event(Stopped, "t1")


def test_command_cannot_reach_into_its_stub(rig):
    """Else it could speak for it, or keep it from stopping the tree."""
    if "processes" not in rig.reports[-1].facts["sandbox"]:
        pytest.skip("this machine gives no process namespaces")
    said = "head -c 1 /proc/1/mem; ls /proc/1/fd; kill -STOP 1; kill -KILL 1; echo on"
    rig.launch("t1", shell(said))
    rig.event(Finished, "t1")
    lines = ended(rig, "t1")
    assert lines[-1] == "on"
    if "user" in rig.reports[-1].facts["sandbox"]:
        assert len([line for line in lines if "denied" in line or "not permitted" in line]) >= 2


# --- pause and go on ------------------------------------------------------------------------------


#: In one write: `print` makes several, between which another process may write.
TELL = """
import os
def tell(line): os.write(1, f"{line}\\n".encode())
"""
GLOO = f"""{TELL}
import torch, torch.distributed as dist
dist.init_process_group("gloo"); ones = torch.ones(4) * (dist.get_rank() + 1)
dist.all_reduce(ones); tell(f"reduced {{ones.tolist()}}"); dist.destroy_process_group()
"""
#: Without DistributedDataParallel, for which each process would import torch's compiler.
SPAWNS = f"""{TELL}
import torch, torch.distributed as dist, torch.multiprocessing as mp
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, at): return torch.tensor([float(at)])
def train(rank, size):
    dist.init_process_group("gloo", init_method="tcp://localhost:29511", rank=rank, world_size=size)
    for rows in torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1):
        total = rows.sum(); dist.all_reduce(total); tell(f"{{size}} ranks: {{total.item()}}")
    dist.destroy_process_group()
if __name__ == "__main__":
    spawned = mp.spawn(train, (2,), join=False)
    train(1, 2); spawned.join()
    train(0, 1)
"""


def test_command_may_start_ranks_of_its_own_that_meet_by_gloo(rig):
    rig.launch("t1", shell(f"cat > t.py <<'E'\n{GLOO}\nE\ntorchrun --nproc-per-node 2 t.py"))
    rig.event(Finished, "t1", timeout_s=120)
    assert (
        sorted(line for line in rig.printed("t1") if line.startswith("reduced"))
        == ["reduced [3.0, 3.0, 3.0, 3.0]"] * 2
    )
    rig.launch("t2", shell(f"cat > t.py <<'E'\n{SPAWNS}\nE\npython t.py"))
    rig.event(Finished, "t2", timeout_s=120)
    said = Counter(line for line in rig.printed("t2") if "ranks:" in line)
    assert said == {"1 ranks: 6.0": 1, "1 ranks: 22.0": 1, "2 ranks: 12.0": 2, "2 ranks: 44.0": 2}


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "-c", "import psutil; print([*psutil.net_if_addrs()])"],
        ["python", "-c", "import socket; print([name for _, name in socket.if_nameindex()])"],
        ["ip", "-brief", "address"],
        ["node", "-e", "console.log(Object.keys(require('os').networkInterfaces()))"],
    ],
    ids=lambda argv: argv[0],
)
def test_command_lists_its_interfaces(rig, argv):
    if argv[0] != "python" and shutil.which(argv[0]) is None:
        pytest.skip(f"this machine has no {argv[0]}")
    rig.launch("t1", argv)
    rig.event(Finished, "t1")
    assert "lo" in " ".join(rig.printed("t1"))


def test_command_paused_many_times_computes_the_same(rig):
    chosen, command = random.Random(3), ["python", "count.py", "200", "0.005", "waits"]
    rig.launch("t1", command)
    rig.event(Started, "t1")  # paused before, it would begin afresh
    for epoch in range(1, 8):
        time.sleep(chosen.random() * 0.15)
        rig.pause("t1", epoch)
        rig.event(Paused, "t1", epoch)
        rig.launch("t1", command, epoch=epoch + 1)
        assert rig.event(Started, "t1", epoch + 1).resumed == "resident"
    rig.let_end("t1", 8)
    ended(rig, "t1", 8)
    said = [line for n in range(1, 9) for line in rig.printed("t1", n)]
    # One process, from its beginning to its end.
    assert said == ["begins after 0 restarts 0", f"sum {summed(200)}"]


TICK = ["python", "tick.py", "600"]


def test_two_commands_never_run_at_once(rig):
    tasks, epochs, switches = ["t1", "t2"], {"t1": 0, "t2": 0}, 0
    for task in [*tasks * 6]:
        epochs[task] += 1
        rig.launch(task, TICK, epoch=epochs[task])
        rig.event(Started, task, epochs[task])
        rig.until(lambda task=task: len(_ticks_of(rig.printed(task, epochs[task]))) >= 4)
        rig.pause(task, epochs[task])
        rig.event(Paused, task, epochs[task])
        switches += 1
    ticks = sorted((at, task) for task in tasks for at in _ticks(rig, task, epochs[task]))
    runs = len(list(itertools.groupby(ticks, key=lambda tick: tick[1])))
    assert min(len(_ticks(rig, task, epochs[task])) for task in tasks) > 20
    assert runs <= switches


def _ticks(rig: DeviceRig, task: str, epochs: int) -> list[int]:
    return _ticks_of([line for n in range(1, epochs + 1) for line in rig.printed(task, n)])


def _ticks_of(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("tick ") and line[5:]]


@pytest.mark.parametrize("walls", ["preferred", "off"])
def test_pause_stops_the_whole_process_tree_and_loses_nothing(rigs, walls):
    rig = rigs(sandbox=walls)
    rig.launch("t1", ["python", "tree.py", "stay"])
    rig.until(lambda: "grown" in rig.printed("t1"))
    rig.pause("t1")
    rig.event(Paused, "t1")
    processes = its_processes(rig)
    assert len(processes) == 6
    # one that waits in the kernel, for a disk perhaps, comes to its stop a little later
    rig.until(lambda: {*map(status_of, processes)} == {psutil.STATUS_STOPPED})
    before = all_used_s(processes)
    time.sleep(0.5)
    assert all_used_s(processes) == before
    assert {*map(status_of, processes)} == {psutil.STATUS_STOPPED}
    rig.launch("t1", ["python", "tree.py", "stay"], epoch=2)
    rig.event(Started, "t1", 2)
    until_s = time.monotonic() + PATIENCE_S
    while not all(now > then for now, then in zip(all_used_s(processes), before, strict=True)):
        assert time.monotonic() < until_s, "some of it did not go on"
        time.sleep(0.05)
    rig.cancel("t1", 2)
    rig.event(Stopped, "t1", 2)
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert not alive


def test_process_tree_that_forks_without_end_is_stopped_each_time(rig):
    rig.launch("t1", ["python", "forker.py"])
    rig.until(lambda: "forks" in rig.printed("t1"))
    for epoch in range(1, 6):
        time.sleep(0.1)
        rig.pause("t1", epoch)
        rig.event(Paused, "t1", epoch)
        processes = its_processes(rig)
        rig.until(lambda them=processes: {*map(status_of, them)} == {psutil.STATUS_STOPPED})
        before = all_used_s(processes)
        time.sleep(0.2)
        assert all_used_s(processes) == before  # none can go: they are stopped
        assert len(its_processes(rig)) == len(processes)
        rig.launch("t1", ["python", "forker.py"], epoch=epoch + 1)
        rig.event(Started, "t1", epoch + 1)


def test_processes_that_the_command_had_stopped_stay_stopped(rig):
    said = (
        # the child writes by itself: a program that it had begun would not stop with it
        "(n=0; while :; do echo $((n += 1)) > beat; sleep 0.01; done) & child=$!;"
        " until test -e beat; do sleep 0.02; done; kill -STOP $child; echo stopped;"
        " until test -e end; do sleep 0.02; done; cp beat then;"
        " sleep 0.3; cmp beat then && echo same; kill -9 $child"
    )
    rig.launch("t1", shell(said))
    rig.until(lambda: "stopped" in rig.printed("t1"))
    rig.until(lambda: psutil.STATUS_STOPPED in map(status_of, its_processes(rig)))
    rig.pause("t1")
    rig.event(Paused, "t1")
    rig.launch("t1", shell(said), epoch=2)
    rig.event(Started, "t1", 2)
    rig.let_end("t1", 2)
    rig.event(Finished, "t1", 2)
    assert "same" in ended(rig, "t1", 2)


# --- the lease ------------------------------------------------------------------------------------


def test_command_stands_still_from_the_end_of_trust_until_its_renewal(rigs):
    rig = rigs(lease_s=12.0, lease_margin_s=10.0, beat_s=0.3)
    rig.launch("t1", TICK)
    rig.until(lambda: len(rig.printed("t1")) > 10)
    rig.deaf = True
    until_s = time.monotonic() + 11.0
    while not rig.supervisor.stays.holder.is_still:
        assert time.monotonic() < until_s, "ran past its trust"
        time.sleep(0.05)
    still_us = time.monotonic_ns() // 1000
    time.sleep(1.5)
    renewed_us = time.monotonic_ns() // 1000
    answered_us = rig.supervisor.stays.machine.lease.answered_us
    rig.deaf = False
    rig.until(lambda: _ticks(rig, "t1", 1)[-1] > renewed_us)
    before = [at for at in _ticks(rig, "t1", 1) if at < renewed_us]
    assert max(before) < still_us
    # Its stub stops it within half of the margin of 10 s.
    assert max(before) <= answered_us + 7_000_000, "ran past its trust"
    assert not rig.all(Failed, "t1")


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


def test_command_does_not_run_on_under_a_stopped_supervisor(tmp_path):
    """Even SIGSTOP of the whole device worker: the stub reads the deadline itself."""
    with separate(tmp_path, "--command", "python tick.py 600") as device:
        assert device.stdout.readline() == "running\n"
        below = children(device.pid, recursive=True)
        ticking = [process for process in below if runs(process, "tick.py")]
        assert len(ticking) == 1
        os.kill(device.pid, signal.SIGSTOP)
        until_s = time.monotonic() + PATIENCE_S
        while ticking[0].status() != psutil.STATUS_STOPPED:  # soon after its lease of 2 s
            assert time.monotonic() < until_s
            time.sleep(0.05)
        before = all_used_s(ticking)
        time.sleep(0.5)
        assert all_used_s(ticking) == before
        os.kill(device.pid, signal.SIGCONT)


# --- its working folder ---------------------------------------------------------------------------


def test_command_on_a_lost_device_restarts_in_its_folder_elsewhere(tmp_path, rigs):
    lost, other = tmp_path / "lost", tmp_path / "other"
    (lost / "store").mkdir(parents=True)
    other.mkdir()
    (other / "store").symlink_to(lost / "store")
    with separate(
        lost, "--command", "python count.py 400 0.01 waits", "--every-s", "0.3"
    ) as device:
        assert device.stdout.readline() == "running\n"
        images = [CheckpointRef(**json.loads(device.stdout.readline())) for _ in range(3)]
        below = children(device.pid, recursive=True)
        device.kill()
        device.wait()
        _, alive = psutil.wait_procs(below, timeout=PATIENCE_S)
        assert not alive
    rig = rigs(home=other)
    words = ["python", "count.py", "400", "0.01", "waits"]
    rig.launch("t1", words, epoch=2, images=images[::-1])
    started = rig.event(Started, "t1", 2)
    rig.let_end("t1", 2)
    assert (started.resumed, started.step) == ("folder", images[-1].step)
    rig.event(Finished, "t1", 2)
    first, last = ended(rig, "t1", 2)
    assert 0 < int(first.split()[2]) <= 400
    assert first.endswith("restarts 1")
    assert last == f"sum {summed(400)}"


@pytest.mark.parametrize("how", ["written", "mapped"])
def test_folder_is_kept_as_it_was_at_one_moment(rig, how):
    """The two numbers differ by one at most, at any moment; torn they would by hundreds.

    A mapped file changes without any system call, and its times hardly ever.
    """
    rig.launch("t1", ["python", "both.py", how], checkpoint_every_s=0.15)
    rig.until(lambda: "writes" in rig.printed("t1"))
    before = len(rig.all(Saved, "t1")) + 1  # one may be on its way
    rig.until(lambda: len(rig.all(Saved, "t1")) >= before + 4)
    images = [rig.image(saved) for saved in rig.all(Saved, "t1")[before:]]
    assert len({image.step for image in images}) == len(images)
    rig.pause("t1")
    rig.event(Paused, "t1")
    for n, image in enumerate(images):
        rig.launch(f"u{n}", ["python", "both.py", how], images=[image])
        rig.event(Finished, f"u{n}")
        first, second = map(int, ended(rig, f"u{n}")[0].split()[1:])
        assert 0 <= first - second <= 1
        assert first > 0


VALLEY = """
import json, os, time
for n in range(1, 10**6):
    with open("value", "w") as file:
        print(n, file=file)
    with open(os.environ["ROUNDHOUSE_METRICS"], "w") as file:
        file.write(json.dumps({"step": 1000 * n, "loss": abs(n - 9)}) + "\\n")
        file.write(json.dumps({"step": 1000 * n, "other": n}) + "\\n")
    time.sleep(0.02)
"""


def test_image_has_the_value_that_was_written_last_before_its_files_were_copied(rig):
    best = {"metric": "loss"}
    rig.launch("t1", ["python", "-c", VALLEY], bundle="", checkpoint_every_s=0.15, best=best)
    rig.until(lambda: len(rig.all(Saved, "t1")) >= 3)
    rig.pause("t1")
    rig.event(Paused, "t1")
    saved = rig.all(Saved, "t1")
    for each in saved:
        assert each.ranked["value"] == abs(each.ranked["step"] // 1000 - 9)
        assert each.ranked["step"] > 100 * each.step, "the step is the command's own"
    rig.launch("u", shell("cat value"), images=[rig.image(saved[1])], bundle="")
    rig.event(Finished, "u")
    assert int(ended(rig, "u")[0]) - saved[1].ranked["step"] // 1000 in (0, 1)


def test_restored_folder_is_the_same_in_every_way(rig):
    make = (
        "mkdir -p a/b .hidden; printf x > a/b/file; chmod 640 a/b/file; touch -d @1000 a/b/file;"
        " ln -s b/file a/link; : > empty; truncate -s 100000 hole; chmod 500 .hidden; echo made;"
        " while :; do sleep 0.05; done"
    )
    look = (
        "find . -path ./.roundhouse -prune -o -printf '%p %m %s %l\\n' | sort; date -r a/b/file +%s"
    )
    rig.launch("t1", shell(make), bundle="")
    rig.until(lambda: "made" in rig.printed("t1"))
    rig.pause("t1")
    saved = rig.event(Saved, "t1")
    rig.launch("t2", shell(look), images=[rig.image(saved)], bundle="")
    rig.event(Finished, "t2")
    assert ended(rig, "t2")[1:] == [
        *("./.hidden 500 4096 ", "./a 700 4096 ", "./a/b 700 4096 ", "./a/b/file 640 1 "),
        *("./a/link 777 6 b/file", "./empty 600 0 ", "./hole 600 100000 ", "1000"),
    ]


def test_pause_is_reported_at_once_and_the_folder_is_saved_after_it(rig):
    rig.launch("t1", ["python", "count.py", "100000", "0.01"])
    rig.steps("t1", 5)
    rig.pause("t1")
    paused, saved = rig.event(Paused, "t1"), rig.event(Saved, "t1")
    assert saved.step == paused.step
    assert rig.events.index(paused) < rig.events.index(saved)


def test_stopping_worker_saves_the_folder_and_the_command_restarts_elsewhere(tmp_path, rigs):
    rig, words = rigs(home=tmp_path, drain_s=60.0), ["python", "count.py", "100", "0.01", "waits"]
    rig.launch("t1", words)
    rig.steps("t1", 20)
    rig.close()
    saved = rig.event(Saved, "t1")
    successor = rigs(home=tmp_path)
    successor.launch("t1", words, epoch=2, images=[rig.image(saved)])
    assert successor.event(Started, "t1", 2).resumed == "folder"
    successor.let_end("t1", 2)
    successor.event(Finished, "t1", 2)
    first, last = ended(successor, "t1", 2)
    assert int(first.split()[2]) >= 15
    assert last == f"sum {summed(100)}"


def test_folder_too_large_to_be_kept_is_reported_and_the_command_goes_on(rigs):
    rig = rigs(host_memory_bytes=2**20)
    said = "head -c 3000000 /dev/zero > large; until test -e end; do sleep 0.02; done; echo on"
    told = "has 3000000 bytes in 1 files; at most 1048576 bytes"
    rig.launch("t1", shell(said), bundle="", checkpoint_every_s=0.2)
    rig.until(lambda: any(told in line for line in rig.printed("t1")))
    rig.let_end("t1")
    rig.event(Finished, "t1")
    assert "on" in ended(rig, "t1")


def test_folder_without_room_on_the_disk_is_not_called_damaged(rigs, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)]
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    try:
        rig = rigs(home=small)
        rig.launch("t1", shell("head -c 20000000 /dev/urandom > a; echo made; sleep 60"), bundle="")
        rig.until(lambda: "made" in rig.printed("t1"))
        rig.pause("t1")
        saved = rig.event(Saved, "t1")
        (small / "filler").write_bytes(b"x" * 15_000_000)
        rig.launch("t2", shell("true"), images=[rig.image(saved)], bundle="")
        failed = rig.event(Failed, "t2")
        assert failed.cause == "exit"
        assert "No space left" in failed.message
        rig.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


# --- room -----------------------------------------------------------------------------------------


def test_frozen_command_is_not_ended_for_memory_while_others_can_leave(rigs):
    rig = rigs(residents_max=2)
    rig.launch("t1", ["python", "count.py", "100000", "0.01"])
    rig.steps("t1", 3)
    rig.pause("t1")
    rig.event(Saved, "t1")
    for task in ("t2", "t3"):
        rig.launch(task, "jobs:Count")
        rig.steps(task, 2)
        rig.pause(task)
        rig.event(Saved, task)
    assert rig.view("t1").state == "paused"
    rig.until(lambda: rig.view("t2") is None)


def test_frozen_commands_give_up_memory_last_and_begin_again(rigs, monkeypatch):
    monkeypatch.setattr(admission, "ROOM_WITHIN_US", 1_500_000)
    rig = rigs(residents_max=1)
    rig.launch("t1", ["python", "count.py", "100000", "0.01"])
    rig.steps("t1", 3)
    rig.pause("t1")
    saved = rig.event(Saved, "t1")
    began_s = time.monotonic()
    rig.launch("t2", shell("true"))
    rig.event(Finished, "t2")
    assert time.monotonic() - began_s >= 1.4
    assert rig.view("t1") is None
    rig.launch("t1", ["python", "count.py", "30", "0.01"], epoch=2, images=[rig.image(saved)])
    assert rig.event(Started, "t1", 2).resumed == "folder"
    rig.event(Finished, "t1", 2)
