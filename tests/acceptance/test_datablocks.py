"""Datablocks through HTTP alone: read, published once whatever is killed, private to the tenant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.cli.client import ApiProblem
from app.settings import settings
from tests import command_line

pytestmark = pytest.mark.acceptance

EXAMPLE = Path(__file__).parents[2] / "examples" / "datablocks"
ROWS = torch.from_numpy(numpy.random.default_rng(3).integers(0, 99, (150, 1000)))
SUMS = ROWS.sum(1).cumsum(0)


@pytest.fixture
def client(system, tmp_path):
    """Return a client of a tenant that has the datablock `rows`."""
    client = system.client("alpha")
    save_file({"x": ROWS}, tmp_path / "rows")
    client.put_datablock("rows", tmp_path / "rows")
    return client


def versions(client, name):
    return sorted(row["version"] for row in client.items("/v1/datablocks", name=name))


def submit(client, publish, **more):
    """Submit a job that sums up the rows and publishes the sums."""
    given = {"inputs": {"x": "datablock:rows"}, "outputs": ["sums"], "publish": {"sums": publish}}
    return client.submit_job("blocks:Total", name=publish, **given, **more)


def downloaded(client, name, folder):
    client.get_datablock(name, folder / "down")
    return load_file(folder / "down")["tensor"]


def test_result_is_published_once_although_its_device_is_killed(system, client, tmp_path):
    with system.gate() as gate:
        id = submit(
            client, "killed-sums", checkpoint={"every_s": 0.5}, params={"step_s": 0.2}, gate=gate
        )
        task = client.wait_until(id, is_past(client, 10))["tasks"][0]
        assert task["inputs"] == {"x": f"datablock:rows@{versions(client, 'rows')[-1]}"}
        system.kill("device." + client.get(f"/v1/tasks/{task['id']}")["seat"].rpartition(".")[2])

    done = client.wait(id)["tasks"][0]
    assert (done["state"], done["result"]) == ("done", {"total": int(SUMS[-1])})
    assert done["outputs"]["sums"]["datablock"] == "killed-sums@1"
    after, before = client.items(f"/v1/tasks/{task['id']}/placements")
    assert (before["end"], after["end"]) == ("lost", "finished")
    # The first read was from the store; then the block was on the host, for any device.
    assert after["input_bytes"] == before["input_bytes"] > ROWS.nbytes
    assert after["fetched_bytes"] == 0
    assert versions(client, "killed-sums") == [1]
    assert torch.equal(downloaded(client, "killed-sums", tmp_path), SUMS)
    [row] = client.items("/v1/datablocks", name="killed-sums")
    assert (row["task_id"], row["output"]) == (task["id"], "sums")
    system.check_ledger()


VICTIMS = ("island", "device.0", "redis")


def is_past(client, step):
    def has_come(request):
        task = request["tasks"][0]
        saved = [item["step"] for item in client.items(f"/v1/tasks/{task['id']}/checkpoints")]
        return saved and task["step"] > step

    return has_come


@pytest.mark.parametrize(
    "victim",
    ["postgres", *(pytest.param(each, marks=pytest.mark.long) for each in VICTIMS)],
)
def test_result_is_published_once_whichever_process_is_killed(system, client, victim):
    name = f"ends-{victim.replace('.', '-')}"
    ids = [submit(client, name, params={"step_s": 0.001}) for _ in range(6)]
    client.wait_until(ids[0], lambda request: request["state"] == "done")

    system.kill(victim)

    tasks = [client.wait(id)["tasks"][0] for id in ids]
    assert [task["state"] for task in tasks] == ["done"] * 6
    published = {task["outputs"]["sums"]["datablock"] for task in tasks}
    assert published == {f"{name}@{version}" for version in range(1, 7)}
    assert versions(client, name) == list(range(1, 7))
    assert len({row["sha256"] for row in client.items("/v1/datablocks", name=name)}) == 1


def test_upload_continues_after_the_api_was_killed(system, client, tmp_path, monkeypatch):
    monkeypatch.setattr("app.cli.client.PART_BYTES", 4 * 2**20)
    large = torch.from_numpy(numpy.random.default_rng(4).integers(0, 2**62, 3 * 2**20))
    save_file({"x": large}, tmp_path / "large")
    parts = []

    def sent(size):
        parts.append(size)
        if len(parts) == 3:
            system.kill("api")

    row = client.put_datablock("large", tmp_path / "large", sent=sent)
    assert row["size_bytes"] == sum(parts) == (tmp_path / "large").stat().st_size
    client.get_datablock("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()


def test_functions_and_commands_read_and_publish_too(client, tmp_path):
    double = {"run": {"function": "blocks:double"}, "outputs": ["y"]}
    copy = ["bash", "-c", "cp $ROUNDHOUSE_INPUTS/y.safetensors z.safetensors"]
    tasks = [
        {**double, "name": "twice", "inputs": {"x": "datablock:rows"}, "publish": {"y": "twice"}},
        {
            "name": "copy",
            "run": {"command": copy},
            "inputs": {"y": "twice.y"},
            "outputs": ["z"],
            "publish": {"z": "copied"},
        },
        {**double, "name": "again", "inputs": {"x": "copy.z"}, "publish": {"y": "four-times"}},
    ]
    id = client.submit({"name": "chain", "bundle": client.bundle, "tasks": tasks})["id"]
    request = client.wait(id)
    assert request["state"] == "done", request
    assert torch.equal(downloaded(client, "copied", tmp_path), 2 * ROWS)
    assert torch.equal(downloaded(client, "four-times", tmp_path), 4 * ROWS)


def test_other_tenant_learns_and_gets_nothing(system, client):
    beta = system.client("beta")
    with pytest.raises(ApiProblem) as refused:
        submit(beta, "stolen")
    assert refused.value.errors[0]["pointer"] == "/tasks/0/inputs/x"
    for call in (
        lambda: beta.get("/v1/datablocks/rows"),
        lambda: beta.get("/v1/datablocks/rows@1"),
        lambda: beta.delete("/v1/datablocks/rows@1"),
    ):
        with pytest.raises(ApiProblem) as missing:
            call()
        assert missing.value.status == 404
    assert list(beta.items("/v1/datablocks", name="rows")) == []


def test_deleted_version_is_there_for_a_task_that_needs_it(client, tmp_path):
    save_file({"x": ROWS[:60]}, tmp_path / "short")
    version = client.put_datablock("rows", tmp_path / "short")["version"]
    later = {"start": {"hold": True}}
    id = submit(client, "after-delete", **later)
    assert client.delete(f"/v1/datablocks/rows@{version}")["holders"] == 1
    client.post(f"/v1/requests/{id}/release")
    task = client.wait(id)["tasks"][0]
    assert task["result"] == {"total": int(SUMS[59])}


# --- the example ----------------------------------------------------------------------------------


def test_example_runs_as_its_file_says(system, tmp_path, monkeypatch):
    """Run each line that the file shows; compare the parameters with a plain run."""
    for name in ("ROUNDHOUSE_URL", "ROUNDHOUSE_KEY", "ROUNDHOUSE_AS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(system.handle.wanted.home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    settings.cache_clear()
    text = (EXAMPLE / "roundhouse.yaml").read_text()
    lines = [line.removeprefix("#     ") for line in text.splitlines() if line[:6] == "#     "]
    assert len(lines) == 4
    for line in lines:
        program, *words = line.replace("examples/datablocks", str(EXAMPLE)).split()
        if program == "python":
            subprocess.run([sys.executable, *words], check=True)
        else:
            result = command_line.invoke(words)
            assert result.exit_code == 0, result.output
    settings.cache_clear()
    learned, alone = load_file(tmp_path / "model.safetensors"), _alone(tmp_path)
    assert learned.keys() == alone.keys()
    assert all(torch.equal(learned[name], alone[name]) for name in alone)


ALONE = """
import sys, types, torch
from safetensors.torch import load_file, save_file
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
import prepare, train
examples = prepare.split(None, load_file("digits.safetensors"))["examples"]
ended = []
ctx = types.SimpleNamespace(device="cpu", inputs={"examples": examples}, finish=ended.append)
job, ctx.step = train.Train(ctx), 0
while not ended:
    ctx.step += 1
    job.step(ctx)
assert ended[0]["accuracy"] > 0.95, ended
save_file(ended[0]["model"], "alone.safetensors")
"""


def _alone(folder):
    words = [sys.executable, "-c", ALONE, str(EXAMPLE)]
    subprocess.run(words, cwd=folder, env={"OMP_NUM_THREADS": "1"}, check=True)
    return load_file(folder / "alone.safetensors")
