"""Results of commands: which files are kept, however a command ends, and when the store refuses."""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path

import pytest

from app.core.model.protocol.messages import ARTIFACTS, Failed, Finished, Paused, Stopped
from app.storage.s3_backend import BucketAway
from tests.workers.conftest import DeviceRig, bundled
from workers.commands.results import Results, Zipped

WAIT = "while :; do sleep 0.02; done"
REFUSALS = [
    *(OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)),
    OSError(errno.EIO, os.strerror(errno.EIO)),
    BucketAway("the store s3://b failed a call for blobs/1: 507 Insufficient Storage"),
    RuntimeError("a fault of the library"),
]


def shell(text: str) -> list[str]:
    return ["bash", "-c", text]


def unzipped(rig: DeviceRig, event: Finished | Failed | Stopped) -> dict[str, str]:
    kept = event.outputs[ARTIFACTS]
    with rig.store.open(kept["sha256"]) as body, zipfile.ZipFile(body) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


def begun(rig: DeviceRig, task: str, text: str, **more: object) -> None:
    """Start a command that runs until it is stopped, and wait until it has begun."""
    rig.launch(task, shell(f"{text}; echo up; {WAIT}"), **more)
    rig.until(lambda: "up" in rig.printed(task))


# --- which files ----------------------------------------------------------------------------------


def test_usual_folders_are_kept_without_a_word_in_the_descriptor(rig):
    wrote = "for d in out runs/a artifacts; do mkdir -p $d; echo $d > $d/f; done"
    rig.launch("t1", shell(wrote))
    kept = unzipped(rig, rig.event(Finished, "t1"))
    assert kept == {"f": "artifacts\n", "out/f": "out\n", "runs/a/f": "runs/a\n"}


def test_files_of_the_bundle_are_kept_only_if_the_command_changed_them(rig):
    code = {"out/same": "1", "out/changed": "1", "results/same": "1"}
    bundle, _ = rig.store.put([bundled(code)])
    rig.launch("t1", shell("echo 2 > out/changed; touch out/same"), bundle=bundle)
    assert unzipped(rig, rig.event(Finished, "t1")) == {"out/changed": "2\n"}
    rig.launch("t2", shell("true"), bundle=bundle)
    finished = rig.event(Finished, "t2")
    assert (finished.outputs, finished.dropped) == ({}, {})


def test_named_paths_are_kept_as_a_whole_and_the_rest_is_told(rig):
    bundle, _ = rig.store.put([bundled({"mine/old": "1", "train.py": ""})])
    wrote = "echo 2 > mine/new; mkdir out .cache __pycache__; touch .cache/a __pycache__/b"
    wrote += (
        "; echo abc > model.pt; echo last > kept.txt; for i in 1 2 3 4 5; do echo > out/$i; done"
    )
    wrote += "; echo > state"
    spec = {"artifacts": ["mine", "kept.txt"], "outputs": ["state"]}
    rig.launch("t1", shell(wrote), bundle=bundle, **spec)
    finished = rig.event(Finished, "t1")
    assert unzipped(rig, finished) == {"mine/old": "1", "mine/new": "2\n", "kept.txt": "last\n"}
    first = ["model.pt", "out/1", "out/2", "out/3", "out/4"]
    assert finished.dropped == {"files": 6, "bytes": 9, "first": first}


def test_zip_of_large_odd_and_unreadable_files_has_the_promised_size(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/large").write_bytes(os.urandom(3 * 2**20 + 1))
    (tmp_path / "out/é\udcff").write_bytes(b"odd")
    (tmp_path / "out/empty").touch()
    (tmp_path / "out/secret").write_bytes(b"mine")
    (tmp_path / "out/secret").chmod(0)
    (tmp_path / "artifacts/out").write_bytes(b"a file named as a folder")
    (tmp_path / "out/link").symlink_to("/etc/passwd")
    os.utime(tmp_path / "out/empty", (0, 0))  # a time before the first of the format
    results = Results.of(tmp_path, tmp_path / "none", (), ())
    zipped = Zipped(tmp_path, results.kept)
    body = b"".join(zipped.pieces())
    assert len(body) == zipped.size_bytes
    (tmp_path / "whole.zip").write_bytes(body)
    with zipfile.ZipFile(tmp_path / "whole.zip") as archive:
        assert archive.testzip() is None
        names = {"out", "out/large", "out/é\\udcff", "out/empty", "out/secret"}
        assert {*archive.namelist()} == names
        assert archive.read("out/secret") == b"mine"


# --- however it ends ------------------------------------------------------------------------------

SAVES = "mkdir out; trap 'echo saved > out/last; exit 0' TERM"


def test_cancelled_command_keeps_what_it_saved(rigs):
    rig = rigs(stop_grace_s=30.0)
    begun(rig, "t1", f"{SAVES}; touch dropped")
    rig.cancel("t1")
    stopped = rig.event(Stopped, "t1")
    assert unzipped(rig, stopped) == {"out/last": "saved\n"}
    assert stopped.dropped == {"files": 1, "bytes": 0, "first": ["dropped"]}


def test_cancelled_command_that_does_not_end_keeps_what_it_wrote(rig):
    begun(rig, "t1", "mkdir out; echo 1 > out/a; trap '' TERM")
    rig.cancel("t1")
    assert unzipped(rig, rig.event(Stopped, "t1")) == {"out/a": "1\n"}


def test_cancelled_paused_command_keeps_what_it_wrote(rig):
    begun(rig, "t1", "mkdir out; echo 1 > out/a")
    rig.pause("t1")
    rig.event(Paused, "t1")
    rig.cancel("t1")
    assert unzipped(rig, rig.event(Stopped, "t1")) == {"out/a": "1\n"}


@pytest.mark.parametrize("ignores", [False, True])
def test_command_at_its_time_limit_keeps_what_it_wrote(rigs, ignores):
    rig = rigs() if ignores else rigs(stop_grace_s=30.0)
    saves = "mkdir out; echo saved > out/last; trap '' TERM" if ignores else SAVES
    rig.launch("t1", shell(f"{saves}; {WAIT}"), budget_us=1_500_000)
    failed = rig.event(Failed, "t1")
    assert (failed.cause, unzipped(rig, failed)) == ("max_duration", {"out/last": "saved\n"})
    assert failed.message == "It held its device for max_duration_s and was ended."


def test_command_beyond_its_memory_keeps_what_it_wrote(rig):
    grow = "x = bytearray(300_000_000); import time; time.sleep(60)"
    resources = {"memory_bytes": 100_000_000}
    text = f'mkdir out; echo 1 > out/a; python -c "{grow}"; {WAIT}'
    rig.launch("t1", shell(text), resources=resources)
    failed = rig.event(Failed, "t1")
    assert "memory" in failed.message
    assert unzipped(rig, failed) == {"out/a": "1\n"}


def test_failed_and_killed_commands_keep_what_they_wrote(rig):
    for task, end in (("t1", "exit 3"), ("t2", "kill -9 $$")):
        rig.launch(task, shell(f"mkdir out; echo 1 > out/a; touch b; {end}"))
        failed = rig.event(Failed, task)
        assert unzipped(rig, failed) == {"out/a": "1\n"}
        assert failed.dropped["first"] == ["b"]


# --- the store refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", REFUSALS, ids=lambda error: type(error).__name__ + str(error)[:12]
)
def test_ended_command_waits_without_the_slot_until_the_store_takes_its_files(rig, refuse, error):
    refuse(error)
    rig.launch("t1", shell("mkdir out; echo 1 > out/a; echo 2 > state"), outputs=["state"])
    paused = rig.event(Paused, "t1")
    assert paused.unstored
    assert "blobs/1" not in paused.unstored
    assert rig.view("t1").unstored == paused.unstored
    rig.launch("t2", shell("exit 0"))  # the device is free
    rig.event(Finished, "t2")
    rig.launch("t1", shell(""), epoch=2, outputs=["state"])
    again = rig.event(Paused, "t1", 2)
    assert again.wait_us == 2 * paused.wait_us
    refuse(None)
    rig.launch("t1", shell(""), epoch=3, outputs=["state"])
    finished = rig.event(Finished, "t1", 3)
    assert unzipped(rig, finished) == {"out/a": "1\n"}
    assert finished.outputs["state"]["size_bytes"] > 0


def test_failed_command_waits_for_the_store_too(rig, refuse):
    refuse(REFUSALS[0])
    rig.launch("t1", shell("mkdir out; echo 1 > out/a; exit 3"))
    rig.event(Paused, "t1")
    refuse(None)
    rig.launch("t1", shell(""), epoch=2)
    failed = rig.event(Failed, "t1", 2)
    assert (failed.message, unzipped(rig, failed)) == (
        "It ended with exit status 3.",
        {"out/a": "1\n"},
    )


def test_command_at_its_time_limit_waits_for_the_store_too(rig, refuse):
    refuse(REFUSALS[0])
    rig.launch("t1", shell(f"mkdir out; echo 1 > out/a; {WAIT}"), budget_us=1_500_000)
    rig.event(Paused, "t1")
    refuse(None)
    rig.launch("t1", shell(""), epoch=2, budget_us=1)
    failed = rig.event(Failed, "t1", 2)
    assert (failed.cause, unzipped(rig, failed)) == ("max_duration", {"out/a": "1\n"})


def test_ended_command_that_moves_does_not_run_again(rig, refuse):
    refuse(REFUSALS[0])
    rig.launch("t1", shell("mkdir out; echo run >> out/a"))
    rig.event(Paused, "t1")
    refuse(None)
    rig.save("t1")
    image = rig.until(lambda: rig.supervisor.storing.kept.get("t1"))[1]
    rig.drop = [["t1", 1]]
    rig.until(lambda: not rig.supervisor.stays.residents)
    rig.drop = []
    rig.launch("t1", shell("mkdir out; echo run >> out/a"), epoch=2, images=[image])
    assert unzipped(rig, rig.event(Finished, "t1", 2)) == {"out/a": "run\n"}


def test_refused_checkpoint_is_told_until_one_is_stored(rig, refuse):
    rig.launch("t1", ["python", "count.py", "1000000", "0.01"], checkpoint_every_s=0.1)
    rig.steps("t1", 2)
    refuse(REFUSALS[0])
    rig.until(lambda: rig.view("t1").unstored == "No space left on device.")
    refuse(None)
    rig.until(lambda: not rig.view("t1").unstored)
