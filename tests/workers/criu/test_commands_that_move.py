"""Commands whose processes go with their images, from one device worker to another.

Each device worker plays a host of its own: its residents have other namespaces, folders and users.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from zstandard import ZstdDecompressor

from app.core.model.protocol.messages import Failed, Finished, Paused, Saved, Started, Stopped
from app.core.model.provisions.process_images import OFFER
from app.storage.chunk_cipher import ciphers
from app.storage.chunks import ZSTD
from tests.workers.conftest import IMAGE_KEY
from tests.workers.criu.moving import TOLD, skip_without_layers
from tests.workers.device.test_secrets import sealed
from tests.workers.tunnels import FarEnd, ticket_for
from workers.criu import dump_and_restore, process_tree_mover
from workers.criu.dump_and_restore import CriuFailed
from workers.criu.program import CriuProgram
from workers.device import store_io
from workers.device.processes.resident import Resident
from workers.device.stays import command_images
from workers.transfer.checkpoint import BesideImage

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes")

#: It has nothing in its folder to begin again from: only its memory knows how far it is.  It counts
#: until the test lets it end (`DeviceRig.let_end`), and so outlives all that a test does meanwhile.
COUNTS = """
import hashlib, itertools, os, time
found = "0"
print("begins", flush=True)
for step in itertools.count(1):
    found = hashlib.sha256(f"{found} {step}".encode()).hexdigest()
    time.sleep(0.01)
    if step % 10 == 0:
        print(step, flush=True)
        if os.path.exists("end"): break
print("sum", found, flush=True)
"""
COUNT = ["python", "-c", COUNTS]


def counted(printed):
    """Return what an undisturbed run prints that ends after as many steps."""
    found, steps, lines = "0", int(printed[-2]), ["begins"]
    for step in range(1, steps + 1):
        found = hashlib.sha256(f"{found} {step}".encode()).hexdigest()
        lines += [str(step)] if step % 10 == 0 else []
    return [*lines, f"sum {found}"]


def _parted(lines):
    """Return what Roundhouse says in the lines, and what the command printed: in no order."""
    told = [line for line in lines if line.startswith(TOLD)]
    return told, [line for line in lines if line not in told]


def _printed_to_the_end(rig, task, epoch=1):
    rig.let_end(task, epoch)
    rig.event(Finished, task, epoch)
    rig.until(lambda: rig.view(task, epoch) is None)
    return rig.printed(task, epoch)


@pytest.fixture
def hosts(tmp_path, rigs, criu):
    """Makes device workers with one store, each of which stores processes."""
    (tmp_path / "store").mkdir()
    made = []

    def make(**options):
        home = tmp_path / f"host{len(made)}"
        home.mkdir(mode=0o755)
        (home / "store").symlink_to(tmp_path / "store")
        rig = rigs(home=home, device=f"h{len(made)}.0", criu=str(criu), **options)
        made.append(rig)
        skip_without_layers(rig)
        assert rig.until(lambda: OFFER in rig.reports[-1].facts["offers"])
        return rig

    return make


def test_command_goes_on_on_other_devices_where_it_stood(hosts):
    moments = random.Random(int(os.environ.get("MOVES_SEED", "26")))
    rig, images, epoch, printed = hosts(), [], 1, []
    for _ in range(4):
        rig.launch("t1", COUNT, epoch=epoch, images=images)
        started = rig.event(Started, "t1", epoch)
        assert started.resumed == ("image" if images else "fresh"), (
            printed,
            rig.printed("t1", epoch),
        )
        rig.until(lambda rig=rig, epoch=epoch: rig.printed("t1", epoch))
        with rig.changed:
            rig.changed.wait_for(lambda: False, moments.random() * 0.3)
        images = rig.paused_and_saved("t1", epoch)
        assert "move" in started.capabilities
        assert rig.all(Saved, "t1", epoch)[-1].has_processes
        printed += rig.printed("t1", epoch)
        epoch, rig = epoch + 1, hosts()
    rig.launch("t1", COUNT, epoch=epoch, images=images)
    rig.event(Started, "t1", epoch)
    printed += _printed_to_the_end(rig, "t1", epoch)
    assert printed == counted(printed)
    assert not rig.all(Paused, "t1", epoch)


#: Processes, a queue with semaphores and shared memory in /dev/shm, files and a socket in /tmp.  It
#: does not end before the test lets it.
WORKERS = """
import hashlib, multiprocessing, os, socket, sys, tempfile, time
from multiprocessing import shared_memory
def work(asked, given):
    while (step := asked.get()) is not None:
        given.put(hashlib.sha256(str(step).encode()).hexdigest()); turns.release()
#: It has another name than the one by which it was opened.
turns = multiprocessing.get_context("spawn").Semaphore(0)
asked, given = multiprocessing.Queue(), multiprocessing.Queue()
worker = multiprocessing.Process(target=work, args=(asked, given)); worker.start()
shared = shared_memory.SharedMemory(create=True, size=100)
kept, gone = tempfile.NamedTemporaryFile("w+"), tempfile.TemporaryFile("w+")
folder = tempfile.mkdtemp(); os.symlink(kept.name, folder + "/link")
listening = socket.socket(socket.AF_UNIX); listening.bind(folder + "/socket"); listening.listen()
client = socket.socket(socket.AF_UNIX); client.connect(folder + "/socket")
server, _ = listening.accept(); print("begins", flush=True)
for step in range(100):
    asked.put(step); found = given.get(); kept.write(found); gone.write(found)
    shared.buf[step] = step; client.send(b"x"); time.sleep(0.01)
    if step % 20 == 0: print(step, flush=True)
while not os.path.exists("end"): time.sleep(0.01)
asked.put(None); worker.join(); kept.flush()
lines = open(folder + "/link").read(); gone.seek(0)
print(hashlib.sha256((lines + gone.read()).encode()).hexdigest(), sum(shared.buf[:100]))
print(len(server.recv(100, socket.MSG_WAITALL)), worker.exitcode, sorted(os.listdir(folder)))
print(turns.get_value())
shared.close(); shared.unlink()
"""


def test_workers_shared_memory_and_files_in_tmp_go_with_their_command(hosts, tmp_path):
    (tmp_path / "end").touch()
    alone = subprocess.run(
        [sys.executable, "-c", WORKERS], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout.splitlines()
    rig, images, printed = hosts(), [], []
    for epoch in (1, 2):
        rig.launch("t1", ["python", "-c", WORKERS], epoch=epoch, images=images)
        rig.event(Started, "t1", epoch)
        _until_it_runs_on(rig, "t1", epoch, "80" in printed)
        images = rig.paused_and_saved("t1", epoch)
        printed += rig.printed("t1", epoch)
        rig = hosts()
    rig.launch("t1", ["python", "-c", WORKERS], epoch=3, images=images)
    assert rig.event(Started, "t1", 3).resumed == "image"
    assert [*printed, *_printed_to_the_end(rig, "t1", 3)] == alone


DATABASE = """
import sqlite3, time
database = sqlite3.connect("kept.db"); database.execute("create table if not exists t (x)")
database.execute("insert into t values (1)"); print("begins", flush=True); time.sleep(1000)
"""
ORPHAN = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork(): time.sleep(1000)
    os._exit(0)
os.wait(); print("begins", flush=True); time.sleep(1000)
"""
NOT_STORED = {
    "database": (DATABASE, "kept.db is an open database"),
    "orphan": (ORPHAN, "has outlived its parent"),
}


def _until_printed(rig, task, text, epoch=1):
    def is_printed():
        return any(text in line for line in rig.printed(task, epoch))

    rig.until(is_printed)


def _until_it_runs_on(rig, task, epoch, waits_to_end):
    """Wait until it prints on this device too; a slow pause may have let it print all before."""
    rig.until(lambda: waits_to_end or rig.printed(task, epoch))


#: The marker is in its code, its memory, a pipe, a file of its folder, /tmp and /dev/shm.
KEEPS = """
import os, sys, time
told = sys.argv[1].encode() * 100; read, write = os.pipe(); os.write(write, told)
for name in ("/tmp/told", "/dev/shm/told", "told"):
    with open(name, "wb") as file: file.write(told)
print("begins", flush=True)
while os.path.getsize("/tmp/told") < 10**9 and not os.path.exists("end"): time.sleep(0.01)
"""
MARKER = b"marker in memory "
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def test_store_shows_nothing_of_a_stored_command_and_nothing_is_stored_without_a_key(
    hosts, tmp_path
):
    here, there = hosts(), hosts()
    command = ["python", "-c", KEEPS, MARKER.decode()]
    here.launch("t1", command, image_key={})
    _until_printed(here, "t1", "begins")
    plain = here.paused_and_saved("t1", 1)
    assert MARKER in _stored(tmp_path)  # the file of its folder
    assert _image(here, plain).image_key == ""
    assert len(_image(here, plain).ranks) == 1
    here.cancel("t1")
    here.until(lambda: here.view("t1") is None)
    for file in (tmp_path / "store" / "chunks").rglob("*"):
        if file.is_file():
            file.unlink()
    here.launch("t2", command)
    _until_printed(here, "t2", "begins")
    images = here.paused_and_saved("t2", 1)
    assert len(_image(here, images).ranks) == 2
    assert MARKER not in _stored(tmp_path)
    there.launch("t2", command, epoch=2, images=images, image_key={})
    failed = there.event(Failed, "t2", 2)
    assert (failed.cause, failed.message) == (
        "store",
        "Its image cannot be read: the image is encrypted, and its key is not here.",
    )
    there.launch("t2", command, epoch=3, images=images)
    assert there.event(Started, "t2", 3).resumed == "image"
    there.cancel("t2", 3)


TELLS = """
import os, time
token = os.environ["HF_TOKEN"]; print("begins", flush=True)
while not os.path.exists("end"):
    print("has " + token, flush=True); time.sleep(0.01)
"""
TOKEN = "hf_Correct_Horse_Battery"
CHANGED = (
    "Roundhouse: it begins again in its folder, as it could not go on where it was: one of its"
    " secrets has another value now"
)


def test_command_with_secrets_goes_on_elsewhere_while_their_values_are_the_same(hosts, tmp_path):
    rig, images, told = hosts(), [], "has ***"
    for epoch, value in enumerate((TOKEN, TOKEN, "hf_another_value"), 1):
        _launch_with_secret(rig, epoch, value, images)
        resumed = rig.event(Started, "t1", epoch).resumed
        assert resumed == ("fresh", "image", "folder")[epoch - 1]
        _until_printed(rig, "t1", told, epoch)
        _until_printed(rig, "t1", ("begins", told, CHANGED)[epoch - 1], epoch)
        printed = {*rig.printed("t1", epoch)} - {told}
        assert printed == ({"begins"}, set(), {"begins", CHANGED})[epoch - 1]
        images = rig.paused_and_saved("t1", epoch)
        assert value.encode() in _memory(rig, images)
        rig = hosts()
    assert TOKEN.encode() not in _stored(tmp_path)


def _launch_with_secret(rig, epoch, value, images):
    secrets = sealed(rig, "t1", epoch, {"HF_TOKEN": value})
    command = ["python", "-c", TELLS]
    more = {"secret_names": ["HF_TOKEN"], "secrets": secrets, "images": images}
    rig.launch("t1", command, epoch=epoch, **more)


def _memory(rig, images):
    """The processes of an image, for whoever has its key."""
    store, manifest = rig.house.store, _image(rig, images)
    image = BesideImage.of(manifest, store=store, ciphers=ciphers([IMAGE_KEY]))
    return b"".join(map(image.read, range(len(image.sizes))))


def _image(rig, images):
    house = rig.house
    return house.store.manifest("ten", images[0].sha256, key=house.signer.public)


def _files(tmp_path):
    return [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def _stored(tmp_path):
    """All bytes of the store, and what those are that are compressed only."""
    bodies = [path.read_bytes() for path in _files(tmp_path)]
    small = [body[:-1] for body in bodies if body.endswith(ZSTD) and body.startswith(ZSTD_MAGIC)]
    return b"".join([*bodies, *map(ZstdDecompressor().decompress, small)])


#: Each rank adds up what all ranks found, over connections between them.  The last step waits until
#: the test lets it end.
RANKS = """
import hashlib, os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
if rank == 0:
    listening = socket.create_server(place)
    others = [listening.accept()[0] for _ in range(size - 1)]
else:
    while True:
        try: home = socket.create_connection(place); break
        except ConnectionRefusedError: time.sleep(0.01)
found = str(rank)
for step in range(1, (steps := int(sys.argv[1])) + 1):
    while rank == 0 and step == steps and not os.path.exists("end"): time.sleep(0.01)
    found = hashlib.sha256(f"{found} {step}".encode()).hexdigest()
    if rank == 0:
        told = [each.recv(64, socket.MSG_WAITALL).decode() for each in others]
        found = hashlib.sha256("".join(sorted([found, *told])).encode()).hexdigest()
        for each in others: each.sendall(found.encode())
    else:
        home.sendall(found.encode()); found = home.recv(64, socket.MSG_WAITALL).decode()
    time.sleep(0.01)
    if rank == 0 and step % 10 == 0: os.write(1, f"{step}\\n".encode())
os.write(1, f"sum {found[:16]}\\n".encode())  # in one piece, beside the other ranks
sys.exit(3 if len(sys.argv) > 2 and rank == 1 else 0)
"""


def test_ranks_of_a_command_go_on_together_on_other_devices(hosts):
    command, steps = ["python", "-c", RANKS, "120"], [*map(str, range(10, 121, 10))]
    rig, images, printed = hosts(), [], []
    rig.launch("alone", command, world_size=4)
    rig.event(Started, "alone")
    alone = _printed_to_the_end(rig, "alone")
    for epoch in (1, 2, 3):
        rig.launch("t1", command, epoch=epoch, images=images, world_size=4)
        started = rig.event(Started, "t1", epoch)
        assert started.resumed == ("image" if images else "fresh"), rig.printed("t1", epoch)
        _until_it_runs_on(rig, "t1", epoch, "110" in printed)
        images = rig.paused_and_saved("t1", epoch)
        printed += rig.printed("t1", epoch)
        rig = hosts()
    rig.launch("t1", command, epoch=4, images=images, world_size=4)
    assert rig.event(Started, "t1", 4).resumed == "image"
    printed += _printed_to_the_end(rig, "t1", 4)
    assert [line for line in printed if line.isdigit()] == steps
    assert sorted(printed) == sorted(alone)
    assert len({line for line in printed if line.startswith("sum")}) == 1


def test_rank_that_fails_after_a_move_is_named(hosts):
    command = ["python", "-c", RANKS, "60", "and fails"]
    here, there = hosts(), hosts()
    here.launch("t1", command, world_size=2)
    _until_printed(here, "t1", "20")
    images = here.paused_and_saved("t1", 1)
    there.launch("t1", command, epoch=2, images=images, world_size=2)
    assert there.event(Started, "t1", 2).resumed == "image"
    there.let_end("t1", 2)
    failed = there.event(Failed, "t1", 2)
    assert failed.message == "rank 1: It ended with exit status 3."


CLEANS_UP = """
trap 'echo $RANK cleans up; exit 0' TERM
echo begins; sleep 1000 & wait
"""


def test_ranks_that_can_be_stored_begin_and_end_as_others_do(hosts):
    rig = hosts(stop_grace_s=30.0)
    rig.launch("t1", ["no-such-program"], world_size=2)
    failed = rig.event(Failed, "t1")
    assert failed.cause == "bundle"
    assert failed.message.startswith("'no-such-program' was not found.")
    rig.launch("t2", ["bash", "-c", "exit $((RANK * 4))"], world_size=2)
    assert rig.event(Failed, "t2").message == "rank 1: It ended with exit status 4."
    rig.launch("t3", ["bash", "-c", CLEANS_UP], world_size=2)
    rig.until(lambda: rig.printed("t3") == ["begins"] * 2)
    rig.cancel("t3")
    rig.event(Stopped, "t3")
    rig.until(lambda: rig.view("t3") is None)
    assert sorted(rig.printed("t3")[2:]) == ["0 cleans up", "1 cleans up"]


def test_command_that_cannot_be_stored_begins_again_elsewhere_and_is_told_why(hosts):
    here, images = hosts(), {}
    for task, (source, why) in NOT_STORED.items():
        here.launch(task, ["python", "-c", source])
        _until_printed(here, task, "begins")
        images[task] = here.paused_and_saved(task, 1)
        assert why in here.all(Saved, task, 1)[-1].bound_because
        _until_printed(here, task, why)
        here.cancel(task)
    there = hosts()
    for task, (source, _) in NOT_STORED.items():
        there.launch(task, ["python", "-c", source], epoch=2, images=images[task])
        assert there.event(Started, task, 2).resumed == "folder"
        _until_printed(there, task, "begins", 2)
        there.cancel(task, 2)
        there.until(lambda task=task: there.view(task, 2) is None)


def test_command_with_an_open_terminal_stays_on_its_device_and_says_why(hosts):
    rig = hosts()
    rig.launch("t1", COUNT, checkpoint_every_s=0.5)
    _until_printed(rig, "t1", "begins")
    with FarEnd(rig, ticket_for("t1")) as far:
        far.type("echo $((6 * 7))\n")
        far.until("42")
        why = "a terminal or a port is open in it, and would end"
        rig.until(lambda: [saved for saved in rig.all(Saved, "t1") if saved.bound_because == why])
        far.type("exit\n")
        far.to_the_end()
    rig.until(lambda: rig.all(Saved, "t1")[-1].has_processes)
    _printed_to_the_end(rig, "t1")


def test_processes_wait_for_the_trial_of_a_device_that_just_started(hosts, rigs, criu):
    here = hosts()
    here.launch("t1", COUNT)
    _until_printed(here, "t1", "begins")
    images = here.paused_and_saved("t1", 1)
    home = here.house.run.parent
    there = rigs(home=home, device="late.0", criu=str(criu))  # whose trial has just begun
    there.launch("t1", COUNT, epoch=2, images=images)
    assert there.event(Started, "t1", 2).resumed == "image"
    _printed_to_the_end(there, "t1", 2)


def test_processes_go_on_only_in_their_own_task_and_on_a_host_like_theirs(hosts):
    here, there = hosts(), hosts()
    here.launch("t1", COUNT)
    _until_printed(here, "t1", "begins")
    images = here.paused_and_saved("t1", 1)
    there.launch("t2", COUNT, epoch=2, images=images)  # a copy of the task
    assert there.event(Started, "t2", 2).resumed == "folder"
    _printed_to_the_end(there, "t2", 2)
    mover = there.supervisor.images.mover
    mover.traits = replace(mover.traits, kernel="another")
    there.launch("t1", COUNT, epoch=2, images=images)
    assert there.event(Started, "t1", 2).resumed == "folder"
    (told,), printed = _parted(_printed_to_the_end(there, "t1", 2))
    assert told.endswith("as it could not go on where it was: this host has another kernel")
    assert printed == counted(printed)


def test_command_whose_dump_is_killed_runs_no_further_and_begins_again_in_its_folder(
    hosts, monkeypatch
):
    here, there = hosts(), hosts()
    _kill_dumps(monkeypatch, here)
    told, send = [], Resident.send

    def sends(resident, word, *args, **said):
        told.append((word, resident.kill_reason))
        send(resident, word, *args, **said)

    monkeypatch.setattr(Resident, "send", sends)
    here.launch("t1", COUNT)
    _until_printed(here, "t1", "begins")
    images = here.paused_and_saved("t1", 1)
    here.until(lambda: here.view("t1") is None)
    assert not here.supervisor.stays.residents
    assert [reason for word, reason in told if word == "kept"] == ["damaged"]
    monkeypatch.undo()
    there.launch("t1", COUNT, epoch=2, images=images, checkpoint_every_s=0.2)
    assert there.event(Started, "t1", 2).resumed == "folder"
    assert not there.event(Saved, "t1", 2).has_processes  # by time
    there.save("t1", 2)
    there.until(lambda: any(saved.has_processes for saved in there.all(Saved, "t1", 2)))
    printed = _printed_to_the_end(there, "t1", 2)
    assert printed[-1] == counted(printed)[-1]
    assert [saved.has_processes for saved in there.all(Saved, "t1", 2)].count(True) == 1


def test_damaged_command_does_not_run_on_where_the_store_fails_too(hosts, monkeypatch):
    def fails(*args, **more):
        raise OSError("the disk is full")

    here = hosts()
    _kill_dumps(monkeypatch, here)
    monkeypatch.setattr(store_io, "keep", fails)
    here.launch("t1", COUNT)
    _until_printed(here, "t1", "begins")
    here.pause("t1")
    here.until(lambda: here.view("t1") is None)
    assert not here.supervisor.stays.residents
    assert not here.all(Saved, "t1")


@pytest.mark.parametrize("victim", ["stub", "dump"])
def test_command_that_dies_in_a_dump_goes_on_from_the_image_before_with_its_processes(
    hosts, monkeypatch, victim
):
    here, there = hosts(), hosts()
    here.launch("t1", COUNT)
    _until_printed(here, "t1", "begins")
    here.save("t1")
    before = here.event(Saved, "t1")
    here.until(lambda: len(here.printed("t1")) > before.printed[1] + 2)
    answered = _answers_to_images(monkeypatch)
    if victim == "dump":
        _kill_dumps(monkeypatch, here)
    else:
        _silence_stubs_in_dumps(monkeypatch, here)
    here.save("t1")
    here.until(lambda: answered)
    for resident in [*here.supervisor.stays.residents.values()]:
        resident.kill()
    here.until(lambda: here.view("t1") is None and not here.supervisor.stays.residents)
    monkeypatch.undo()
    newest = here.all(Saved, "t1")[-1]
    assert (newest.step, newest.printed) == (before.step, before.printed)
    printed = here.printed("t1")[: newest.printed[1]]
    there.launch("t1", COUNT, epoch=2, images=[here.image(newest)], checkpoint_every_s=0.2)
    assert there.event(Started, "t1", 2).resumed == "image"
    # a dump that damages the processes is not tried again by time
    assert there.event(Saved, "t1", 2).has_processes == (victim != "dump")
    printed += _printed_to_the_end(there, "t1", 2)
    assert printed == counted(printed)


def _answers_to_images(monkeypatch):
    """Return a list that grows with each answer to a stub that announced an image."""
    answered, send = [], Resident.send

    def sends(resident, word, *args, **said):
        send(resident, word, *args, **said)
        answered.extend([word] if word == "kept" or said.get("lost") else [])

    monkeypatch.setattr(Resident, "send", sends)
    return answered


def _silence_stubs_in_dumps(monkeypatch, rig):
    """Let each stub say nothing more from a dump on, as if it had died and nothing noticed yet."""

    def fails(*args, **more):
        for resident in rig.supervisor.stays.residents.values():
            os.kill(resident.pid, signal.SIGSTOP)
        raise CriuFailed("dump: it died")

    monkeypatch.setattr(dump_and_restore, "dump", fails)


def _kill_dumps(monkeypatch, rig):
    """Let each dump of the device take too long: in the place of its CRIU is one that hangs."""
    mover, hangs = rig.supervisor.images.mover, rig.house.run / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 1000\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(mover, "program", CriuProgram(hangs, mover.program.version))
    monkeypatch.setattr(process_tree_mover, "DUMP_S", 0.2)
    monkeypatch.setattr(process_tree_mover, "BYTES_PER_S", float("inf"))


def test_image_of_an_older_worker_goes_on_in_its_own_task(hosts, monkeypatch):
    here, there = hosts(), hosts()
    monkeypatch.setattr(command_images, "_started_as", lambda launch: "")
    here.launch("t1", COUNT)
    _until_printed(here, "t1", "begins")
    images = here.paused_and_saved("t1", 1)
    monkeypatch.undo()
    there.launch("t1", COUNT, epoch=2, images=images)
    assert there.event(Started, "t1", 2).resumed == "image"
    _printed_to_the_end(there, "t1", 2)


PARTIAL = """
import sys, time
sys.stdout.write("begins\\nhalf a line"); sys.stdout.flush()
time.sleep(1000)
"""


def test_last_line_of_a_cancelled_command_is_kept_though_its_image_has_it(hosts):
    here = hosts()
    here.launch("t1", ["python", "-c", PARTIAL])
    _until_printed(here, "t1", "begins")
    here.save("t1")
    assert here.event(Saved, "t1").has_processes
    here.cancel("t1")
    here.event(Stopped, "t1")
    here.until(lambda: here.view("t1") is None)
    assert here.printed("t1") == ["begins", "half a line"]


def test_command_goes_on_from_the_image_of_its_running_processes_when_its_worker_is_lost(hosts):
    here, there = hosts(), hosts()
    here.launch("t1", COUNT, checkpoint_every_s=0.2)
    here.event(Started, "t1")

    here.event(Saved, "t1")
    here.save("t1")  # one by time, and one by order
    here.until(lambda: len(here.all(Saved, "t1")) >= 2)
    assert all(saved.has_processes for saved in here.all(Saved, "t1"))
    assert not here.all(Paused, "t1")
    saved = here.all(Saved, "t1")[-1]
    here.until(lambda: len(here.printed("t1")) > saved.printed[1])  # it runs on
    printed = here.printed("t1")[: saved.printed[1]]
    images = [here.image(saved)]
    here.close()
    there.launch("t1", COUNT, epoch=2, images=images)
    assert there.event(Started, "t1", 2).resumed == "image"
    printed += _printed_to_the_end(there, "t1", 2)
    assert saved.printed[0] == 1
    assert printed == counted(printed)


def test_copy_of_a_command_goes_on_from_its_checkpoint_if_it_is_the_same_program(hosts):
    here = hosts()
    here.launch("t1", COUNT)
    _until_printed(here, "t1", "begins")
    begun = {"images": here.paused_and_saved("t1", 1), "from_checkpoint": f"ckp_{'0' * 32}"}
    here.launch("t2", COUNT, **begun)
    assert here.event(Started, "t2").resumed == "image"
    printed = _printed_to_the_end(here, "t2")
    assert printed[-1] == counted(printed)[-1]
    assert "begins" not in printed
    here.launch("t3", [*COUNT, "more"], **begun)
    assert here.event(Started, "t3").resumed == "folder"
    (told,), printed = _parted(_printed_to_the_end(here, "t3"))
    assert told.endswith("the checkpoint is of another program or other parameters")
    assert printed == counted(printed)
    here.cancel("t1")


@pytest.mark.parametrize(("fails", "is_stored"), [(2, True), (3, False)])
def test_dump_that_fails_by_chance_is_made_again(hosts, monkeypatch, fails, is_stored):
    here, dump, made = hosts(), dump_and_restore.dump, []

    def failing_at_first(program, target, **more):
        made.append(not list(target.images.iterdir()))
        if len(made) <= fails:
            (target.images / "core-1.img").touch()  # what is left of it
            raise CriuFailed("dump: Unexpected 1001 task interruption, aborting")
        dump(program, target, **more)

    monkeypatch.setattr(dump_and_restore, "dump", failing_at_first)
    here.launch("t1", COUNT)
    _until_printed(here, "t1", "begins")
    here.paused_and_saved("t1", 1)
    saved = here.all(Saved, "t1")[-1]
    assert (saved.has_processes, made) == (is_stored, [True] * 3)
    assert ("task interruption" in saved.bound_because) != is_stored
    here.cancel("t1")
