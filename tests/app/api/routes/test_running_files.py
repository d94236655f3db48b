"""Files of running commands: who reads them, when, which paths, and within which bounds.

The device worker's side is the real one: its links, its server of tunnels and its inner ends, which
here run without walls (`test_tunnels.Host`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import zipfile

import httpx2
import pytest

from app.api import running_files
from app.core.model.provisions.tunnel import FrameKind, frame_of
from app.db.models import Task
from app.db.transactions import transaction
from tests import command_line
from tests.app.api.routes.test_tunnels import host, running, set_task, task_id  # noqa: F401
from tests.serving import server  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(running, host, tmp_path):  # noqa: F811
    """The working folder of the running command."""
    host.folder = str(tmp_path)
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "model.pt").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "out" / "deep" / "log ü.txt").write_text("seen\n")
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / ".roundhouse").mkdir()
    (tmp_path / ".roundhouse" / "ours").write_text("no part of it")
    (tmp_path / "link").symlink_to("/etc/hostname")
    (tmp_path / "up").symlink_to("/etc")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def asked(running, path="", *, content=False, who="red.member"):  # noqa: F811
    address = f"/v1/tasks/{task_id()}/files" + ("/content" if content else "")
    with running.client(who) as client:
        return client.get(address, params={"path": path} if path else {})


def test_files_are_listed_and_read(running, folder):  # noqa: F811
    listed = asked(running).json()
    assert listed["task_id"] == task_id()
    assert not listed["is_cut"]
    sizes = {file["path"]: file["size_bytes"] for file in listed["files"]}
    assert sizes == {"train.py": 8, "out/model.pt": 256000, "out/deep/log ü.txt": 5}
    assert [file["path"] for file in asked(running, "out/deep").json()["files"]] == [
        "out/deep/log ü.txt"
    ]
    whole = asked(running, "out/model.pt", content=True)
    assert whole.content == (folder / "out" / "model.pt").read_bytes()
    assert whole.headers["content-type"] == "application/octet-stream"
    assert whole.headers["content-disposition"] == "attachment; filename*=UTF-8''model.pt"


def test_folder_is_read_as_a_zip(running, folder):  # noqa: F811
    answer = asked(running, "out", content=True)
    assert answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        assert sorted(archive.namelist()) == ["deep/log ü.txt", "model.pt"]
        assert archive.read("model.pt") == (folder / "out" / "model.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(asked(running, content=True).content)) as archive:
        assert "out/model.pt" in archive.namelist()
        assert not any("roundhouse" in name or "link" in name for name in archive.namelist())


@pytest.mark.parametrize("path", ["..", "/etc/passwd", "out/../..", "./out", "out//a", "a\nb"])
@pytest.mark.parametrize("content", [False, True])
def test_path_that_leaves_the_folder_is_refused(running, folder, path, content):  # noqa: F811
    answer = asked(running, path, content=content)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "?path"


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("nothing", 404, "no file with id nothing"),
        ("train.py/x", 409, "Not a directory"),
        (".roundhouse/ours", 404, ""),
        ("link", 409, "link is a link, and links are not followed"),
        ("up/hostname", 409, "up is a link, and links are not followed"),
        ("pipe", 409, "neither a file nor a folder"),
    ],
)
def test_what_is_no_plain_file_is_refused(running, folder, path, status, told):  # noqa: F811
    for content in (False, True):
        answer = asked(running, path, content=content)
        assert answer.status_code == status
        assert told in answer.json()["detail"]


def test_owner_and_administrators_read_and_others_do_not(running, folder):  # noqa: F811
    who = ("red.tenant_admin", "root", "red.other", "red.viewer", "blue.tenant_admin")
    found = [asked(running, who=each).status_code for each in who]
    assert found == [200, 200, 403, 403, 404]
    with transaction() as session:
        task = session.get_one(Task, task_id())
        task.descriptor = {**task.descriptor, "secrets": ["HF_TOKEN"]}
    assert asked(running, who="red.tenant_admin").status_code == 403
    assert asked(running).status_code == 200


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"state": "waiting", "hold": "user"}, "is paused, so nothing reads its folder; resume it"),
        ({"state": "waiting", "seat": None}, "the task is preempted"),
        ({"state": "starting"}, "the task is starting; ask again in some seconds"),
        ({"state": "done", "seat": None}, "what was kept of it is in its outputs"),
        ({"seat": None}, "device does not answer now"),
        ({"epoch": 2}, "h.0: the task is not on this device any more; ask again"),
    ],
)
def test_task_that_cannot_be_read_now_says_what_to_do(running, folder, values, told):  # noqa: F811
    set_task(**{"image_on": "h.0"} | values if values.get("state") == "waiting" else values)
    for content in (False, True):
        answer = asked(running, content=content)
        assert answer.status_code == 409
        assert told in answer.json()["detail"]


def test_list_is_cut_at_its_bound(running, folder):  # noqa: F811
    for number in range(2100):
        (folder / "out" / "deep" / f"{number:04}").touch()
    listed = asked(running).json()
    assert listed["is_cut"]
    assert len(listed["files"]) == 2000


# --- a command that does not play by the rules ----------------------------------------------------


@pytest.fixture
def sends(folder, host, monkeypatch):  # noqa: F811
    """Let the task's side send these bytes; it leaves the connection open unless `ends`."""
    kept, senders = [], []

    def send(*frames, ends=True):
        def say(theirs):
            with contextlib.suppress(ConnectionError):
                theirs.sendall(b"".join(frames))
            if ends:
                theirs.close()
            else:
                kept.append(theirs)

        def open_with(ticket, theirs):
            senders.append(threading.Thread(target=say, args=[theirs.dup()]))
            senders[-1].start()
            return ""

        monkeypatch.setattr(host.tunnels, "_opener", open_with)

    yield send
    for each in senders:
        each.join()
    for each in kept:
        each.close()


def data(body):
    return frame_of(FrameKind.DATA, 0, body)


END = frame_of(FrameKind.END)


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([data(b"{}"), END], "the list of its files is malformed"),
        ([data(b"[" * 30000), END], "not JSON"),
        ([data(json.dumps({"files": [[1, 2, 3]], "is_cut": False}).encode()), END], "a path"),
        ([data(b'{"files":[["\\ud800",2,3]],"is_cut":false}'), END], "malformed"),
        ([data(b'{"files":[["a",-2,3]],"is_cut":false}'), END], "a number"),
        ([data(b" " * 2**15)] * 40, "longer than"),
        ([b"\xff" * 7], "a frame of kind 255"),
        ([data(b"{")], "stopped while its files were read"),
    ],
)
def test_list_that_is_none_is_refused(running, sends, frames, told):  # noqa: F811
    sends(*frames)
    answer = asked(running)
    assert answer.status_code == 409, answer.text
    assert told in answer.json()["detail"]


def test_silent_command_does_not_hold_up_the_call(running, sends, monkeypatch):  # noqa: F811
    monkeypatch.setattr(running_files, "FIRST_S", 0.2)
    sends(ends=False)
    for content in (False, True):
        answer = asked(running, content=content)
        assert answer.status_code == 409
        assert "did not answer in time" in answer.json()["detail"]


def test_content_that_is_cut_off_is_no_whole_answer(running, sends, monkeypatch):  # noqa: F811
    monkeypatch.setattr(running_files, "SILENCE_S", 0.2)
    for said, ends in (
        (b'{"is_folder": false, "size_bytes": 100}\nabc', True),
        (b'{"is_folder": false, "size_bytes": 100}\nabc', False),
        (b'{"is_folder": true, "size_bytes": 0}\nPK', False),
    ):
        sends(data(said), *([END] if ends else []), ends=ends)
        with pytest.raises(httpx2.RemoteProtocolError):
            asked(running, "out/model.pt", content=True)


def test_content_beyond_its_size_is_left_out(running, sends):  # noqa: F811
    sends(data(b'{"is_folder": false, "size_bytes": 2}\nabc'), data(b"def"), END)
    assert asked(running, "out/model.pt", content=True).content == b"ab"


# --- the command line -----------------------------------------------------------------------------


def test_command_lists_and_downloads_files(running, folder, tmp_path_factory, monkeypatch):  # noqa: F811
    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    monkeypatch.setenv("ROUNDHOUSE_URL", running.url)
    monkeypatch.setenv("ROUNDHOUSE_KEY", running.world.keys["red.member"])
    (folder / "out" / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "out" / "tool.sh").chmod(0o700)
    listed = command_line.invoke(("files", task_id(), "out", "-o", "json"))
    paths = [file["path"] for file in json.loads(listed.stdout)["files"]]
    assert paths == ["out/model.pt", "out/tool.sh", "out/deep/log ü.txt"]
    assert "out/deep/log ü.txt" in command_line.invoke(("files", task_id())).stdout
    one = command_line.invoke(("files", task_id(), "out/model.pt", "--to", "got"))
    assert (one.exit_code, one.stderr) == (0, "got/out/model.pt: 256000 bytes\n")
    assert (here / "got/out/model.pt").stat().st_size == 256000
    whole = command_line.invoke(("files", task_id(), "out/", "--to", "all"))
    assert whole.exit_code == 0, whole.output
    got = {str(file.relative_to(here)) for file in (here / "all").rglob("*") if file.is_file()}
    assert got == {"all/out/model.pt", "all/out/tool.sh", "all/out/deep/log ü.txt"}
    assert (here / "all/out/tool.sh").stat().st_mode & 0o100
    absent = command_line.invoke(("files", task_id(), "nothing"))
    assert absent.exit_code == 5
    set_task(state="done", seat=None)
    ended = command_line.invoke(("files", task_id()))
    assert ended.exit_code != 0
    assert "what was kept of it is in its outputs" in ended.stderr
