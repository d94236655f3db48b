"""Six repositories as people have them, each run unchanged by `roundhouse submit`.

They take the packages of this machine's index, so these tests are long.  `make test` runs a small
script whose package is in the tests' own environment, from a folder of wheels.
"""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.local.embedded_servers import temporary_home
from app.settings import settings
from tests import command_line
from tests.acceptance.conftest import HOUSE, NETWORK, System, running_fast
from tests.package_index import why_unreachable
from tests.wheels import repack

pytestmark = pytest.mark.acceptance

JSON = dict[str, Any]
Run = Callable[..., str]

REPOSITORIES = Path(__file__).parents[2] / "examples" / "repositories"
END_S = 240.0  # one repository, with the first build of its environment


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root below which the hosts of `indexed` show mounts."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def indexed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system whose index of packages is that of this machine."""
    if why := why_unreachable(tmp_path_factory.mktemp("index")):
        pytest.skip(f"the index of packages of this machine cannot be reached: {why}")
    with (
        temporary_home() as home,
        running_fast(home, env={"ROUNDHOUSE_MOUNT_ROOTS": str(data), **NETWORK}) as handle,
        closing(System(handle)) as system,
    ):
        yield system


@pytest.fixture
def run(indexed: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run the command line for `indexed`; returns what it prints."""
    yield from _command_line(indexed, tmp_path, monkeypatch)


@pytest.fixture
def run_offline(system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run the command line for `system`, whose index is a folder of wheels."""
    yield from _command_line(system, tmp_path, monkeypatch)


def _command_line(system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    for name in ("ROUNDHOUSE_URL", "ROUNDHOUSE_KEY", "ROUNDHOUSE_AS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(system.handle.wanted.home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    settings.cache_clear()

    def told(*words: object, input: str | None = None) -> str:
        result = command_line.invoke(words, input=input)
        assert result.exit_code == 0, result.output
        return result.stdout

    yield told
    settings.cache_clear()


@pytest.fixture
def repository(tmp_path: Path) -> Callable[[str], Path]:
    """Return a copy of a repository: nothing but what a user would have."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(REPOSITORIES / name, tmp_path / name))

    return copied


def submitted(run: Run, system: Any, folder: Path) -> tuple[list[str], JSON]:
    """Submit the folder; return the lines that its task printed, and the task, which is done."""
    return printed(system, json.loads(run("--as", "alpha", "submit", folder, "-o", "json"))["id"])


def printed(system: Any, id: str) -> tuple[list[str], JSON]:
    """Return the lines that the task of a request printed, and the task, which is done."""
    client = system.client("alpha")
    [task] = client.wait(id, timeout_s=END_S)["tasks"]
    lines = client.log_text(task["id"])
    assert task["state"] == "done", (task["message"], task["detail"], lines[-20:])
    return lines, task


SCRIPT = """
import argparse, torch
from rich.progress import track
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
total = sum(float(torch.ones(2).sum()) for _ in track(range(parser.parse_args().steps)))
print("total", total)
"""


def test_small_script_with_requirements_runs_offline(system, run_offline, wheels, tmp_path):
    repack(wheels, "rich")
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "requirements.txt").write_text("rich>=13\ntorch>=2\n")
    words = ("--environment", "requirements.txt", "-o", "json", "--", "--steps", "20")
    id = json.loads(run_offline("--as", "alpha", "submit", folder / "train.py", *words))["id"]
    lines, _ = printed(system, id)
    assert lines[-1] == "total 40.0"
    [shown] = system.client("alpha").get("/v1/environments", limit=1)["items"]
    names = {one["name"] for one in shown["packages"]}
    assert names == {"rich", "markdown-it-py", "mdurl", "pygments"}


@pytest.mark.long
def test_second_use_of_a_large_environment_is_as_early_as_none(indexed, run, repository):
    """A launch is at most 0.3 s later than one without packages."""
    folder = repository("huggingface_trainer")
    (folder / "roundhouse.yaml").unlink()

    def launched_s(*environment: str) -> float:
        words = ("submit", folder, *environment, "-o", "json", "--", "python", "-c", "pass")
        id = json.loads(run("--as", "alpha", *words))["id"]
        _, task = printed(indexed, id)
        waited = "select extract(epoch from started_at - launched_at) from placements"
        [[waited_s]] = indexed.sql(f"{waited} where task_id = %s", task["id"])
        return float(waited_s)

    requirements = ("--environment", "requirements.txt")
    first_s = launched_s(*requirements)
    with_s = min(launched_s(*requirements) for _ in range(5))
    without_s = min(launched_s() for _ in range(5))
    assert with_s - without_s <= 0.3, f"first {first_s} s, then {with_s} s; without {without_s} s"


@pytest.mark.long
def test_script_with_requirements_runs_and_leaves_its_results(indexed, run, repository):
    folder = repository("argparse_script")
    lines, task = submitted(run, indexed, folder)
    assert lines[-4].split() == ["epoch", "loss", "accuracy"]
    assert lines[-1].split()[0] == "19"
    kept = folder / "artifacts.zip"
    indexed.client("alpha").download(f"/v1/tasks/{task['id']}/outputs/artifacts.zip", kept)
    assert set(zipfile.ZipFile(kept).namelist()) == {"history.csv", "model.pt"}


@pytest.mark.long
def test_script_that_writes_to_out_keeps_its_files_and_names_the_rest(indexed, run, repository):
    folder = repository("csv_classifier")
    words = ("--environment", "requirements.txt", "-o", "json", "--", "--epochs", "30")
    id = json.loads(run("--as", "alpha", "submit", folder / "train.py", *words))["id"]
    lines, task = printed(indexed, id)
    assert lines[-1].startswith("accuracy 0.9")
    assert task["dropped"] == {"files": 1, "bytes": 9, "first": ["notes.txt"]}
    run("--as", "alpha", "outputs", id, "--to", folder / "got")
    kept = zipfile.ZipFile(folder / "got" / f"{task['name']}-artifacts.zip")
    assert {*kept.namelist()} == {"out/history.csv", "out/model.pt"}


@pytest.mark.long
def test_hugging_face_trainer_trains_a_local_model(indexed, run, repository):
    lines, _ = submitted(run, indexed, repository("huggingface_trainer"))
    assert lines[-1].startswith("done after 60 steps, loss 2.")


@pytest.mark.long
def test_lightning_module_trains_and_keeps_its_best_checkpoint(indexed, run, repository):
    lines, _ = submitted(run, indexed, repository("lightning_module"))
    assert lines[-1].startswith("best validation loss 0.00")


@pytest.mark.long
def test_script_reads_parquet_files_of_a_mount(indexed, run, repository, data):
    folder = repository("parquet_mount")
    _make_points(folder, data / "points")
    run(
        "--as",
        "platform",
        "mount",
        "add",
        "points",
        data / "points",
        "--read-only",
        "--tenants",
        "alpha",
    )
    admin = indexed.client("platform", "platform_admin")
    assert indexed.until(lambda: admin.get("/v1/mounts/points")["hosts"] == 1)
    lines, _ = submitted(run, indexed, folder)
    assert lines[-1] == "{'rows': 10000, 'slope': 3.0, 'offset': -0.499}"


@pytest.mark.long
def test_script_has_a_secret_and_reaches_one_address(indexed, run, repository):
    folder = repository("secret_and_address")
    run("--as", "alpha", "secret", "set", "SERVICE_TOKEN", input="token-of-the-service-7\n")
    run("--as", "platform", "tenant", "alpha", "--network", "labels.example.org:8473")
    with labels_behind_a_token("token-of-the-service-7"):
        lines, task = submitted(run, indexed, folder)
    assert lines[-1] == "{'cat': 2, 'dog': 1}"
    assert task["network"]["connections"] == 1


def _make_points(folder: Path, target: Path) -> None:
    """Write the data with the packages of the repository, as its owner would."""
    layer = folder / "packages" / "site-packages"
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--target", str(layer)]
    wanted = ["-r", str(folder / "requirements.txt"), "--python", sys.executable]
    subprocess.run([*uv, *wanted], check=True)
    subprocess.run(
        [sys.executable, str(folder / "make_data.py"), str(target)],
        env={"PYTHONPATH": str(layer)},
        check=True,
    )
    shutil.rmtree(folder / "packages")


@contextmanager
def labels_behind_a_token(token: str) -> Iterator[None]:
    """Serve labels at the address of the house to whoever has the token."""

    class Labels(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["Authorization"] == f"Bearer {token}"
            body = json.dumps({"labels": ["cat", "dog", "cat"]}).encode()
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write nothing among the tests' own output."""

    with http.server.ThreadingHTTPServer((HOUSE, 8473), Labels) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(5)
