"""Folders and container images in a task, through HTTP alone: of a host, granted and taken away,
and as datablocks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.cli.bundling import bundle_folder
from app.cli.client import ApiProblem
from app.cli.folders import get_folder, put_folder
from app.settings import settings
from tests import command_line
from tests.workers.image_files import oci_layout, root_file_system, tar_of, tar_of_folder

pytestmark = pytest.mark.acceptance

#: Reads the folder until a file `stop` comes into it, and tries to leave one there itself.
SCRIPT = """
import os, time
print("read", open("/data/words.txt").read(), flush=True)
print("link", os.path.exists("/data/out/words.txt"), flush=True)
try:
    open("/data/mine", "w")
except OSError as error:
    print("write", error.strerror, flush=True)
while not os.path.exists("/data/stop"):
    time.sleep(0.05)
print("stopped", flush=True)
"""


@pytest.fixture
def cli(system, monkeypatch):
    """Run a verb of the platform's administrator; returns what it prints."""
    for name in ("ROUNDHOUSE_URL", "ROUNDHOUSE_KEY", "ROUNDHOUSE_AS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(system.handle.wanted.home))
    settings.cache_clear()
    yield lambda *words: _run("--as", "platform", *words)
    settings.cache_clear()


def _run(*words):
    result = command_line.invoke(words)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def words(shared):
    """A folder below the allowed root, with a link out of it."""
    folder = shared / "words"
    folder.mkdir()
    (folder / "words.txt").write_text("alpha beta")
    (shared / "other").mkdir()
    (shared / "other" / "words.txt").write_text("secret")
    (folder / "out").symlink_to(shared / "other")
    return folder


def request(name):
    task = {"name": "read", "run": {"command": ["python", "-c", SCRIPT]}}
    return {"name": name, "tasks": [{**task, "mounts": {"/data": "words"}}]}


def refusal(client, name):
    with pytest.raises(ApiProblem) as refused:
        client.submit(request(name))
    [fault] = refused.value.errors
    return fault["pointer"], fault["code"], fault["detail"]


@pytest.fixture
def gates(system):
    """The mount of all tenants, which the system has from its first gate on."""
    with system.gate():
        yield


@pytest.mark.usefixtures("gates")
def test_task_reads_a_folder_that_its_tenant_may_use_as_long_as_it_runs(system, cli, words):
    alpha, beta = system.client("alpha"), system.client("beta")
    where = "/tasks/0/mounts/~1data"
    unknown = (where, "unknown-mount", "your tenant has no mount 'words'; it may use gates")
    assert refusal(alpha, "before") == unknown

    cli("mount", "add", "words", str(words), "--read-only", "--tenants", "alpha")
    admin = system.client("platform", "platform_admin")
    assert system.until(lambda: admin.get("/v1/mounts/words")["hosts"] == 1)
    assert refusal(beta, "not-ours") == unknown
    id = alpha.submit(request("reads"))["id"]
    task_id = alpha.request(id)["tasks"][0]["id"]
    assert system.until(lambda: len(alpha.log_text(task_id)) == 3)

    cli("mount", "remove", "words")
    assert refusal(alpha, "after") == unknown
    (words / "stop").touch()  # what the host writes there is seen at once
    assert alpha.wait(id)["state"] == "done"
    lines = ["read alpha beta", "link False", "write Read-only file system", "stopped"]
    assert alpha.log_text(task_id) == lines
    assert [mount["name"] for mount in alpha.items("/v1/mounts")] == ["gates"]


READS = """
import os
root = os.path.join(os.environ["ROUNDHOUSE_INPUTS"], "corpus")
print(open(os.path.join(root, "deep", "words.txt")).read(), sorted(os.listdir(root)))
"""


def test_changed_folder_sends_what_changed_and_two_tasks_see_it_once_on_the_host(system, tmp_path):
    client, tree = system.client("alpha"), tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "words.txt").write_text("one")
    (tree / "large.bin").write_bytes(os.urandom(300_000))
    row, sent = put_folder(client, "tree", tree)
    assert (row["version"], sent) == (1, 300_003)
    (tree / "deep" / "words.txt").write_text("three")
    row, sent = put_folder(client, "tree", tree)
    assert (row["version"], sent) == (2, 5)

    ids = []
    for version, text in ((1, "one"), (2, "three"), (2, "three")):
        task = {"name": "read", "run": {"command": ["python", "-c", READS]}}
        task["inputs"] = {"corpus": f"datablock:tree@{version}"}
        id = client.submit({"name": f"reads-{version}", "tasks": [task]})["id"]
        done = client.wait(id)["tasks"][0]
        assert client.log_text(done["id"]) == [f"{text} ['deep', 'large.bin']"]
        ids.append(done["id"])
    placed = [next(client.items(f"/v1/tasks/{id}/placements")) for id in ids]
    # the second version read only the file that had changed, and its list; the third task nothing
    assert placed[0]["fetched_bytes"] > 300_000 > placed[1]["fetched_bytes"] > 0
    assert placed[2]["fetched_bytes"] == 0
    large = list(Path(system.handle.wanted.home).glob("run/cache/*.tree/content/large.bin"))
    assert len(large) == 2
    assert len({path.stat().st_ino for path in large}) == 1
    assert get_folder(client, "tree@1", tmp_path / "back")[1] == 300_003
    assert (tmp_path / "back" / "deep" / "words.txt").read_text() == "one"


IN_IMAGE = """
cat /etc/os-release words.txt
test -e /usr/bin/python3 && echo python
touch /bin/mine 2>/dev/null || echo refused
"""


def test_command_runs_in_a_container_image_that_its_tenant_may_use(system, cli, shared, tmp_path):
    root = root_file_system(tmp_path / "small", ("sh", "cat", "touch"))
    oci_layout(shared / "small", tar_of_folder(root), tar_of())
    alpha, beta = system.client("alpha"), system.client("beta")
    task = {"name": "look", "run": {"command": ["sh", "-c", IN_IMAGE]}, "image": "small"}
    body = {"name": "in-image", "tasks": [task], "bundle": bundle_of(alpha, tmp_path)}

    cli("image", "add", "small", str(shared / "small"), "--tenants", "alpha")
    admin = system.client("platform", "platform_admin")
    assert system.until(lambda: admin.get("/v1/mounts/small")["hosts"] == 1)
    for name, client in (("small", beta), ("nobodys", alpha)):
        with pytest.raises(ApiProblem) as refused:
            client.submit({"name": "not-ours", "tasks": [{**task, "image": name}]})
        assert refused.value.errors[0]["code"] == "unknown-mount"

    for _ in range(2):
        done = alpha.wait(alpha.submit(body)["id"])
        assert done["state"] == "done"
        said = alpha.log_text(done["tasks"][0]["id"])
        assert said[:2] == ["NAME=small", "words of the bundle"]
        assert said[-1] == "refused"
        assert "python" not in said
    assert system.until(lambda: admin.get("/v1/mounts/small")["unpacked"])
    [there] = admin.get("/v1/mounts/small")["unpacked"]
    named = json.loads((shared / "small" / "index.json").read_text())["manifests"][0]["digest"]
    assert there["digest"] == named
    assert named[7:19] in cli("image", "list")
    cli("image", "remove", "small")


def bundle_of(client, tmp_path):
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "words.txt").write_text("words of the bundle\n")
    found = bundle_folder(folder)
    client.upload(found.sha256, found.body)
    return f"sha256:{found.sha256}"
