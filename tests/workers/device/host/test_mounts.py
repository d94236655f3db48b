"""Mounts on a real device: the folders that it offers, and what a task's processes see of them."""

from __future__ import annotations

import errno
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.core.model.graphs import task_graph
from app.core.model.protocol.messages import Failed, Finished, Started
from app.core.model.provisions.folder import FolderFile, encoded, folder_of
from app.core.model.provisions.mounts import digest
from tests.launches import spec_of
from tests.workers.conftest import DeviceRig
from workers.device.host import mounts
from workers.process.isolation import host_mounts
from workers.process.isolation.host_mounts import HostMount

LOOK = """
import json, os, stat
found = {}
for name in ("a.txt", "out", "away", "deep/b.txt", "../other/secret", "out/secret"):
    try:
        found[name] = open("/data/" + name).read()
    except OSError as error:
        found[name] = type(error).__name__
for name, do in {
    "write": lambda: open("/data/new", "w"),
    "append": lambda: open("/data/a.txt", "a"),
    "remove": lambda: os.remove("/data/a.txt"),
    "chmod": lambda: os.chmod("/data/a.txt", 0o777),
}.items():
    try:
        do()
        found[name] = "done"
    except OSError as error:
        found[name] = error.errno
found["listed"] = sorted(os.listdir("/data"))
found["flags"] = next(
    sorted(set(line.split()[5].split(",")) & {"ro", "nosuid", "nodev"})
    for line in open("/proc/self/mountinfo") if line.split()[4] == "/data"
)
print(json.dumps(found))
"""


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a folder `data`, which holds links out of it, and its neighbour `other`."""
    root = tmp_path_factory.mktemp("host") / "shared"
    for name in ("data/deep", "other"):
        (root / name).mkdir(parents=True)
    (root / "data" / "a.txt").write_text("alpha")
    (root / "data" / "deep" / "b.txt").write_text("beta")
    (root / "data").chmod(0o777)  # so that its modes alone would let a task write
    (root / "data" / "a.txt").chmod(0o666)
    (root / "other" / "secret").write_text("secret")
    (root / "data" / "out").symlink_to(root / "other")
    (root / "data" / "away").symlink_to("../other/secret")
    return root


@pytest.fixture
def showing(rigs: Callable[..., DeviceRig], shared: Path) -> DeviceRig:
    """A device that knows the mount `pics` and may show what lies below the root."""
    rig = rigs(mount_roots=(str(shared),))
    if "files" not in rig.reports[-1].facts["sandbox"]:
        pytest.skip("this machine gives no mount namespaces")
    rig.mounts = {"pics": str(shared / "data")}
    return rig


def offered(rig: DeviceRig, report: int = -1) -> list[str]:
    return [each for each in rig.reports[report].facts["offers"] if each.startswith("mount:")]


def launch(rig: DeviceRig, task: str, run: Any, targets: dict[str, str], **more: Any) -> None:
    """Launch a task whose targets show these mounts, with the paths that the island names."""
    known = {target: rig.mounts[name] for target, name in targets.items() if name in rig.mounts}
    sort = "command" if isinstance(run, list) else "job" if run[8].isupper() else "function"
    spec = replace(spec_of({sort: run}, **more), mounts=targets)
    rig.launch(task, run, mounts=known, spec=spec)


def seen(rig: DeviceRig, task: str) -> dict[str, Any]:
    rig.event(Finished, task)
    return dict(json.loads(rig.printed(task)[-1]))


def test_restarted_device_offers_its_mounts_from_its_first_report_on(
    showing: DeviceRig, rigs: Callable[..., DeviceRig]
) -> None:
    showing.until(lambda: offered(showing) == ["mount:pics"])
    showing.close()
    again = rigs(mount_roots=showing.house.mount_roots)
    assert offered(again, 0) == ["mount:pics"]
    assert again.reports[0].facts["mounts"] == digest(showing.mounts)
    again.close()
    file = again.house.folder / "mounts.json"
    file.write_text(json.dumps(showing.mounts))  # as an earlier version wrote it
    upgraded = rigs(mount_roots=showing.house.mount_roots)
    assert offered(upgraded, 0) == ["mount:pics"]
    upgraded.close()
    file.write_text("{torn")
    third = rigs(mount_roots=showing.house.mount_roots)
    assert third.reports[0].facts["mounts"] == digest({})


def test_hanging_file_system_delays_the_first_report_for_a_while_only(
    showing: DeviceRig, rigs: Callable[..., DeviceRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    showing.until(lambda: offered(showing) == ["mount:pics"])
    showing.close()
    over = threading.Event()
    monkeypatch.setattr(mounts, "PATIENCE_US", 300_000)
    monkeypatch.setattr(host_mounts, "trouble", lambda *_: over.wait(60) and "")
    again = rigs(mount_roots=showing.house.mount_roots)
    assert offered(again) == []
    again.launch("t1", ["true"])
    again.event(Finished, "t1")  # all else goes on
    over.set()
    again.until(lambda: offered(again) == ["mount:pics"])


def test_command_reads_its_mount_and_changes_nothing_there(
    showing: DeviceRig, shared: Path
) -> None:
    rig = showing
    rig.until(lambda: offered(rig) == ["mount:pics"])
    launch(rig, "t1", ["python", "-c", LOOK], {"/data": "pics"})
    found = seen(rig, "t1")
    assert found["a.txt"] == "alpha"
    assert found["deep/b.txt"] == "beta"
    assert found["flags"] == ["nodev", "nosuid", "ro"]
    tried = ("write", "append", "remove", "chmod")
    assert {found[name] for name in tried} == {errno.EROFS}
    assert not (shared / "data" / "new").exists()


def test_links_in_a_mount_that_lead_out_of_it_find_nothing(showing: DeviceRig) -> None:
    launch(showing, "t1", ["python", "-c", LOOK], {"/data": "pics"})
    found = seen(showing, "t1")
    assert found["listed"] == ["a.txt", "away", "deep", "out"]
    missing = ("out", "out/secret", "away", "../other/secret")
    assert {name: found[name] for name in missing} == dict.fromkeys(missing, "FileNotFoundError")


def test_jobs_and_functions_see_their_mount(showing: DeviceRig) -> None:
    launch(showing, "t1", "mounted:Reads", {"/data": "pics"})
    assert showing.event(Finished, "t1").result == {"texts": ["alpha", "beta"]}
    launch(
        showing, "t2", "mounted:reads", {"/mnt/deep/pics": "pics"}, params={"at": "/mnt/deep/pics"}
    )
    assert showing.event(Finished, "t2").result == {"texts": ["alpha", "beta"]}


def test_task_without_mounts_sees_none_of_another(showing: DeviceRig) -> None:
    launch(showing, "t1", ["python", "-c", LOOK], {"/data": "pics"})
    seen(showing, "t1")
    showing.launch("t2", ["python", "-c", "import os; print(os.path.exists('/data'))"])
    showing.event(Finished, "t2")
    assert showing.printed("t2") == ["False"]


def test_folder_outside_the_roots_is_never_shown(showing: DeviceRig, shared: Path) -> None:
    """A row of Postgres alone opens nothing: the host's administrator has not allowed the path."""
    rig = showing
    (shared.parent / "mine").mkdir()
    rig.mounts |= {"mine": str(shared.parent / "mine"), "etc": "/etc"}
    rig.until(lambda: offered(rig) == ["mount:pics"])
    launch(rig, "t1", ["python", "-c", LOOK], {"/data": "etc"})
    failed = rig.event(Failed, "t1")
    assert (failed.cause, failed.message) == ("mount", "This host may not show the mount etc.")


def test_link_on_the_way_out_of_the_root_is_refused(showing: DeviceRig, shared: Path) -> None:
    rig = showing
    (shared / "way").symlink_to("/etc")
    (shared / "turn").symlink_to("data/deep")
    rig.mounts |= {"way": str(shared / "way"), "turn": str(shared / "turn")}
    rig.until(lambda: offered(rig) == ["mount:pics", "mount:turn"])  # a link inside is followed
    launch(rig, "t1", ["python", "-c", LOOK], {"/data": "way"})
    failed = rig.event(Failed, "t1")
    assert failed.cause == "device"
    assert "the mount at /data: its path leaves the root" in "\n".join(rig.printed("t1"))
    assert str(shared) not in "\n".join(rig.printed("t1"))


def test_folders_of_roundhouse_itself_are_never_shown(
    rigs: Callable[..., DeviceRig], tmp_path: Path
) -> None:
    rig = rigs(mount_roots=(str(tmp_path),))
    (tmp_path / "free").mkdir()
    paths = {"all": tmp_path, "run": tmp_path / "run", "store": tmp_path / "store" / "blobs"}
    rig.mounts = {name: str(path) for name, path in paths.items()}
    rig.until(lambda: rig.reports[-1].facts["mounts"])
    assert offered(rig) == []


def test_mount_that_the_tenant_lost_fails_the_task_with_that_reason(showing: DeviceRig) -> None:
    launch(showing, "t1", ["python", "-c", LOOK], {"/data": "gone"})
    failed = showing.event(Failed, "t1")
    told = "Its tenant may not use the mount gone any more, or it was removed."
    assert (failed.cause, failed.message) == ("mount", told)


def test_target_over_the_interpreter_is_refused(showing: DeviceRig) -> None:
    above = str(Path(sys.prefix).parent)
    launch(showing, "t1", ["python", "-c", LOOK], {above: "pics"})
    assert showing.event(Failed, "t1").message.startswith(f"Nothing can be shown at {above}: ")


def test_host_without_roots_offers_no_mount_and_asks_for_none(rig: DeviceRig) -> None:
    rig.mounts = {"pics": "/srv"}
    facts = rig.reports[-1].facts
    assert "mounts" not in facts
    assert offered(rig) == []


def test_mounts_without_the_layer_files_are_refused(
    rigs: Callable[..., DeviceRig], shared: Path
) -> None:
    rig = rigs(mount_roots=(str(shared),), sandbox="off")
    rig.mounts = {"pics": str(shared / "data")}
    rig.until(lambda: rig.reports[-1].facts["mounts"])
    launch(rig, "t1", ["python", "-c", LOOK], {"/data": "pics"})
    assert rig.event(Failed, "t1").cause == "mount"
    assert offered(rig) == []


def test_path_replaced_by_a_link_after_it_was_looked_at_opens_nothing(shared: Path) -> None:
    place = host_mounts.place_of(str(shared / "data" / "deep"), [str(shared)])
    assert place is not None
    assert host_mounts.trouble(place, []) == ""
    (shared / "data" / "deep" / "b.txt").unlink()
    (shared / "data" / "deep").rmdir()
    (shared / "data" / "deep").symlink_to("/etc")
    with pytest.raises(OSError, match="leaves the root"):
        host_mounts.opened(place)


@pytest.mark.parametrize(
    "path", ["/shared/../etc", "/shared/./a", "shared/a", "/shared//a", "/sharedx/a", "/", ""]
)
def test_path_that_is_not_plain_and_below_a_root_has_no_place(path: str) -> None:
    assert host_mounts.place_of(path, ["/shared"]) is None


def test_deepest_root_counts() -> None:
    assert host_mounts.place_of("/a/b/c", ["/a", "/a/b"]) == HostMount("/a/b", "c")
    assert host_mounts.place_of("/a/b", ["/a/b"]) == HostMount("/a/b", ".")


# --- inputs that are folders ----------------------------------------------------------------------


FOLDER_LOOK = """
import os
root = os.path.join(os.environ["ROUNDHOUSE_INPUTS"], "corpus")
for name in ("a.txt", "deep/b.txt"):
    print(open(os.path.join(root, name)).read())
try:
    open(os.path.join(root, "a.txt"), "a")
except OSError as error:
    print(error.errno)
print(os.path.realpath(root))
"""


def folder_in(rig: DeviceRig) -> dict[str, Any]:
    """Store a folder of two files; return it as an input of a Launch."""
    files = []
    for path, body in {"a.txt": b"alpha", "deep/b.txt": b"beta"}.items():
        sha256, size_bytes = rig.store.put([body])
        files.append(FolderFile(path=path, size_bytes=size_bytes, sha256=sha256))
    sha256, size_bytes = rig.store.put([encoded(folder_of(files))])
    kept = {"sha256": sha256, "size_bytes": size_bytes}
    return {**kept, "format": "folder", "datablock": "corpus@1"}


@pytest.fixture
def walled(rig: DeviceRig) -> DeviceRig:
    if "files" not in rig.reports[-1].facts["sandbox"]:
        pytest.skip("this machine gives no mount namespaces")
    return rig


def test_command_sees_a_folder_that_it_takes_and_cannot_write_there(walled: DeviceRig) -> None:
    given = folder_in(walled)
    walled.launch("t1", ["python", "-c", FOLDER_LOOK], inputs={"corpus": given})
    walled.event(Finished, "t1")
    lines = ["alpha", "beta", str(errno.EACCES), "/inputs/corpus"]
    assert walled.printed("t1") == lines
    started = walled.event(Started, "t1")
    assert started.input_bytes == 9 + given["size_bytes"]
    assert started.ways == {"corpus": "store"}
    walled.launch("t2", ["python", "-c", FOLDER_LOOK], inputs={"corpus": given})
    assert walled.event(Started, "t2").fetched_bytes == 0
    walled.event(Finished, "t2")
    assert walled.printed("t2") == lines


def test_function_job_and_graph_get_the_path_of_a_folder(walled: DeviceRig) -> None:
    inputs = {"corpus": folder_in(walled)}
    walled.launch("t1", "mounted:words", inputs=inputs)
    assert walled.event(Finished, "t1").result == {"texts": ["alpha", "beta"]}
    walled.launch("t2", "mounted:Words", inputs=inputs)
    assert walled.event(Finished, "t2").result == {"texts": ["alpha", "beta"], "block": True}
    node = {"name": "a", "function": "mounted:words", "inputs": {"corpus": "input:corpus"}}
    graph = {"nodes": [{**node, "outputs": ["texts"]}], "outputs": {"texts": "a.texts"}}
    sha256, _ = walled.store.put([task_graph.canonical(graph)])
    walled.launch("t3", {"graph": f"sha256:{sha256}"}, inputs=inputs)
    assert walled.event(Finished, "t3").result == {"texts": ["alpha", "beta"]}


def test_ranks_of_a_command_see_its_mount_and_its_folder(showing: DeviceRig) -> None:
    rig = showing
    script = (
        "import os; seen = [os.listdir('/data'), os.listdir('/inputs/corpus')];"
        "print(f'{seen}\\n', end='')"  # in one write: the ranks share a stream
    )
    spec = replace(spec_of({"command": ["python", "-c", script]}), mounts={"/data": "pics"})
    spec = replace(spec, world_size=2)
    given = {"corpus": folder_in(rig)}
    rig.launch("t1", ["true"], spec=spec, mounts={"/data": rig.mounts["pics"]}, inputs=given)
    rig.event(Finished, "t1")
    lines = [line for line in rig.printed("t1") if "a.txt" in line]
    assert len(lines) == 2, rig.printed("t1")
    assert all("deep" in line for line in lines)


def test_job_with_a_folder_goes_on_from_its_image_elsewhere(walled: DeviceRig) -> None:
    inputs = {"corpus": folder_in(walled)}
    walled.launch("t1", "mounted:Slow", inputs=inputs)
    walled.steps("t1", 3)
    images = walled.paused_and_saved("t1", 1)
    walled.launch("t1", "mounted:Slow", epoch=2, inputs=inputs, images=images)
    walled.event(Started, "t1", 2)
    walled.let_end("t1", 2)
    assert walled.event(Finished, "t1", 2).result == {"texts": ["alpha", "beta"]}


def test_folder_without_the_layer_files_is_refused(rigs: Callable[..., DeviceRig]) -> None:
    rig = rigs(sandbox="off")
    rig.launch("t1", ["true"], inputs={"corpus": folder_in(rig)})
    failed = rig.event(Failed, "t1")
    assert failed.cause == "mount"
    assert "without the sandbox layer 'files'" in failed.message


def test_mount_that_was_named_during_a_look_is_looked_at_at_once(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Now:
        def __init__(self, *, target: Callable[..., None], args: Any, **_: Any) -> None:
            self.start = lambda: target(*args)

    monkeypatch.setattr(mounts.threading, "Thread", Now)
    house: Any = SimpleNamespace(
        device="h.0", folder=tmp_path, mount_roots=(str(shared),), own_folders=(), skopeo=""
    )
    looked: list[Callable[[], None]] = []
    known = mounts.DeviceMounts(house, looked.append, SimpleNamespace(happened=False))  # type: ignore[arg-type]
    known.told({"pics": str(shared / "data")}, mounts.FOLDER)
    known.look([mounts.LAYER])
    known.told({"pics": str(shared / "data"), "more": str(shared / "other")}, mounts.FOLDER)
    looked.pop()()
    assert known.offers(["files"]) == ["mount:pics"]
    known.look([mounts.LAYER])
    looked.pop()()
    assert known.offers(["files"]) == ["mount:more", "mount:pics"]
    known.look([mounts.LAYER])
    assert looked == []
