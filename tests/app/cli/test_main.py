"""The command against the real API and a real Postgres; the test plays island and device."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx2
import numpy
import psycopg
import pytest
import yaml
from mcp import Client as ModelClient
from mcp import StdioServerParameters
from safetensors import safe_open
from safetensors.numpy import save, save_file
from typer.testing import Result

from app.cli import kept_files, root_command, watching
from app.cli.client import Client
from app.cli.verbs import submit as submit_verb
from app.core.model.checkpoints.manifest import About
from app.local.embedded_servers import embedded_postgres, temporary_home
from app.settings import settings
from app.storage.sealing import Keyring
from app.storage.signing import Signer
from app.storage.store import Store
from tests import command_line
from tests.ports import free_port
from tests.workers.slabs import Slab
from workers.transfer import checkpoint
from workers.transfer.checkpoint import Known

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

JOB = """
class Train:
    def __init__(self, ctx, *, steps=10): ...
    def step(self, ctx): ...

def tokenize(ctx): ...
"""


class Service:
    """An API process on a database of its own; `sql` is the hand of island and device."""

    def __init__(self, home: Path, database_url: str) -> None:
        self.home, self.port = home, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {
            **os.environ,
            "DATABASE_URL": database_url,
            "REDIS_URL": f"unix://{home}/nobody-listens.sock",
            "ROUNDHOUSE_HOME": str(home),
            "ROUNDHOUSE_PORT": str(self.port),
            "ROUNDHOUSE_BUNDLE_LIMIT_BYTES": "200000",
        }
        Keyring.make(home / "secrets.key")
        words = ("-m", "app.local.seed", "--tenants", str(home / "keys.json"))
        subprocess.run([sys.executable, *words], env=self.env, cwd=ROOT, check=True)
        self.keys = json.loads((home / "keys.json").read_text())
        self.postgres = psycopg.connect(
            database_url.replace("postgresql+psycopg", "postgresql"), autocommit=True
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ("-m", "uvicorn", "app.main:app", "--port", str(self.port), "--log-level", "error")
        self.process = subprocess.Popen([sys.executable, *words], env=self.env, cwd=ROOT)
        _until(self._answers, "the API answers")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self.postgres.execute(statement, values)
        return cursor.fetchall() if cursor.description else []

    def add_device(self) -> None:
        self.sql(
            "insert into islands (name, leader, leader_until)"
            " values ('local', 'a test', now() + interval '1 day')"
        )
        self.sql("insert into hosts (name, island) values ('local', 'local')")
        self.sql(
            "insert into devices (id, host, island, kind, memory_bytes, seen_at, lease_until)"
            " values ('local.0', 'local', 'local', 'cpu', 4e9, now(), now() + interval '1 day')"
        )

    def task_of(self, request_id: str) -> str:
        [(task_id,)] = self.sql("select id from tasks where request_id = %s", request_id)
        return str(task_id)

    def waits(self, request_id: str, *, hold: str = "") -> None:
        self.sql(
            "update tasks set state = 'waiting', island = 'local', hold = %s where request_id = %s",
            *(hold, request_id),
        )

    def says(self, request_id: str, type_: str, message: str) -> None:
        self.sql(
            "insert into events (tenant_id, request_id, type, message, data)"
            """ select tenant_id, id, %s, %s, '{"task": "train"}' from requests where id = %s""",
            type_,
            message,
            request_id,
        )
        self._notify(request_id)

    def prints(self, request_id: str, *lines: str) -> None:
        task_id = self.task_of(request_id)
        for text in lines:
            self.sql(
                "insert into logs (task_id, epoch, line, stream, text)"
                " select %s, 1, count(*), 'stdout', %s from logs where task_id = %s",
                task_id,
                text,
                task_id,
            )
        self._notify(request_id)

    def ends(self, request_id: str, state: str, **task: Any) -> None:
        sets = "".join(f", {name} = %s" for name in task)
        where = "where request_id = %s"
        self.sql(f"update tasks set state = %s{sets} {where}", state, *task.values(), request_id)
        self.sql(
            "update requests set state = %s, ended_at = now() where id = %s", state, request_id
        )
        self._notify(request_id)

    def _notify(self, request_id: str) -> None:
        self.sql("select pg_notify('roundhouse', tenant_id || ' ' || id) from requests"
                 " where id = %s", request_id)  # fmt: skip

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/livez")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def _until(holds: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Any:
    until_s = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < until_s, f"waited {timeout_s} s in vain until {what}"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with temporary_home() as home, embedded_postgres(home) as url:
        service = Service(home, url)
        service.start()
        service.add_device()
        try:
            yield service
        finally:
            service.kill()
            service.postgres.close()


@pytest.fixture
def run(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """Runs the command as a member of alpha, in an empty folder."""
    monkeypatch.delenv("ROUNDHOUSE_KEY", raising=False)
    monkeypatch.setenv("ROUNDHOUSE_URL", service.url)
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(service.home))
    monkeypatch.setenv("ROUNDHOUSE_PORT", str(service.port))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    settings.cache_clear()
    yield lambda *words, **how: command_line.invoke(words, **how)
    settings.cache_clear()


@pytest.fixture(scope="module")
def operations() -> list[tuple[str, re.Pattern[str], set[str]]]:
    """Of docs/openapi.json: (method, its path, names of its query parameters)."""
    document = json.loads((ROOT / "docs" / "openapi.json").read_text())
    return [
        (
            method.upper(),
            re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))),
            {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"},
        )
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


@pytest.fixture(autouse=True)
def every_call_is_one_that_the_document_declares(
    operations: list[tuple[str, re.Pattern[str], set[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = httpx2.Client.send

    def checked(client: httpx2.Client, request: httpx2.Request, **how: Any) -> httpx2.Response:
        [names] = [
            names
            for method, path, names in operations
            if method == request.method and path.fullmatch(request.url.path)
        ]
        assert set(request.url.params.keys()) <= names, str(request.url)
        return send(client, request, **how)

    monkeypatch.setattr(httpx2.Client, "send", checked)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(JOB)
    return folder


@pytest.fixture
def submitted(run: Callable[..., Result], code: Path) -> str:
    """The id of a request with one task, which waits."""
    result = run("submit", "--job", "train:Train", "--bundle", code, "-o", "json")
    assert result.exit_code == 0, result.output
    return str(json.loads(result.stdout)["id"])


# --- who one is ---


class TestLogin:
    def test_caller_has_a_login_after_make_up(self, run):
        result = run("whoami")
        assert result.exit_code == 0
        assert "member" in result.stdout
        assert "alpha" in result.stdout

    def test_login_is_checked_and_then_stored(self, run, service):
        wrong = run("login", "--url", service.url, "--key", "rh_nonsense")
        assert (wrong.exit_code, wrong.stdout) == (3, "")
        key = service.keys["beta"]["viewer"]
        result = run("login", "--url", service.url, input=f"{key}\n")
        assert result.exit_code == 0, result.output
        assert key not in result.output
        assert "viewer of beta" in result.stderr
        assert json.loads(run("whoami", "-o", "json").stdout)["tenant"] == "beta"

    def test_missing_key_is_reported_with_advice(self, run, monkeypatch):
        monkeypatch.setenv("ROUNDHOUSE_URL", "https://elsewhere.example")
        result = run("ps")
        assert result.exit_code == 3
        assert "roundhouse login" in result.stderr

    def test_login_to_an_invalid_address_is_a_usage_error(self, run, monkeypatch):
        monkeypatch.setenv("ROUNDHOUSE_URL", "notaurl")
        for words in (("ps",), ("login", "--key", "rh_x")):
            result = run(*words)
            assert result.exit_code == 2, result.output
            assert "got 'notaurl'" in result.stderr

    def test_unreachable_service_is_reported_in_words(self, run, monkeypatch):
        monkeypatch.setenv("ROUNDHOUSE_URL", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("ROUNDHOUSE_KEY", "rh_x")
        monkeypatch.setattr("app.cli.client.FIRST_PAUSE_S", 100.0)  # more than its patience
        result = run("ps")
        assert result.exit_code == 6
        assert "does not answer" in result.stderr
        assert "Traceback" not in result.output


# --- submitting ---


class TestSubmit:
    def test_folder_with_one_job_is_submitted(self, run, code, service):
        (code / "train.py").write_text(JOB.replace("*, steps=10", "**params"))
        result = run(
            *("submit", "--job", "train:Train", "--bundle", code, "--name", "mine"),
            *("-p", "steps=200", "-p", "lr=1e-3", "-p", "opt=adamw", "-o", "yaml"),
        )
        assert result.exit_code == 0, result.output
        request = yaml.safe_load(result.stdout)
        assert (request["name"], request["state"]) == ("mine", "queued")
        [(params,)] = service.sql(
            "select descriptor->'params' from tasks where request_id = %s", request["id"]
        )
        assert params == {"steps": 200, "lr": 0.001, "opt": "adamw"}

    def test_folder_and_entry_point_are_submitted(self, run, code, service):
        said = {
            ("--job", "train:Train", "-p", "lr=1"): {"job": "train:Train"},
            ("--ranks", 2, "--", "python", "-u", "train.py", "--lr", "0.1"): {
                "command": ["python", "-u", "train.py", "--lr", "0.1"]
            },
        }
        (code / "train.py").write_text(JOB.replace("steps=10", "lr"))
        for words, wanted in said.items():
            result = run("submit", code, "-o", "json", *words)
            assert result.exit_code == 0, result.output
            [(found,)] = service.sql(
                "select descriptor->'run' from tasks where request_id = %s",
                json.loads(result.stdout)["id"],
            )
            assert found == wanted

    def test_options_of_submit_are_fields_of_its_task_and_request(self, run, code, monkeypatch):
        (code / "main.py").write_text("print('hello')\n")
        (code / "requirements.txt").write_text("einops\n")
        sent: list[dict[str, Any]] = []
        monkeypatch.setattr(Client, "submit", lambda self, body, key: sent.append(body) or body)
        words = (
            *("--env", "A=b=c", "--env", "B=", "--label", "exp=a1", "--cpus", 2, "--memory", "1GB"),
            *("--time", "3600", "--priority", -3, "--tier", "basic", "--retry", 2),
            *("--secret", "HF_TOKEN"),
        )
        result = run("submit", code / "main.py", "-o", "json", *words)
        assert result.exit_code == 0, result.output
        assert "--environment requirements.txt" in result.stderr
        [body] = sent
        [task] = body["tasks"]
        assert (task["env"], task["secrets"]) == ({"A": "b=c", "B": ""}, ["HF_TOKEN"])
        assert task["resources"] == {"cpus": 2, "memory_bytes": "1GB"}
        assert (task["max_duration_s"], task["retry"]) == (3600.0, {"max": 2})
        assert (body["labels"], body["tier"], body["priority"]) == ({"exp": "a1"}, "basic", -3)

    def test_checkpoint_to_begin_from_may_be_the_best_of_a_name(self, run, code, monkeypatch):
        (code / "main.py").write_text("class Train: ...\n")
        sent: list[dict[str, Any]] = []
        monkeypatch.setattr(Client, "submit", lambda self, body, key: sent.append(body) or body)
        given = ("--job", "main:Train", "--from", "sweep@best", "-o", "json")
        assert run("submit", code, *given).exit_code == 0
        assert sent[0]["tasks"][0]["from_checkpoint"] == "sweep@best"

    def test_after_names_other_requests(self, run, code, monkeypatch):
        (code / "main.py").write_text("print('hello')\n")
        sent: list[dict[str, Any]] = []
        monkeypatch.setattr(Client, "submit", lambda self, body, key: sent.append(body) or body)
        given = ("--after", "a", "--after", "b:ended", "--after", "c:failed:hold")
        assert run("submit", code / "main.py", "-o", "json", *given).exit_code == 0
        assert sent[0]["tasks"][0]["start"]["after_requests"] == [
            {"request": "a"},
            {"request": "b", "on": "ended"},
            {"request": "c", "on": "failed", "else": "hold"},
        ]

    @pytest.mark.parametrize(
        ("words", "task"),
        [
            (("--array", "0-99%20"), {"array": {"count": 100, "at_once": 20}}),
            (
                ("--array", "0-9", "--max-failures", 0.1),
                {"array": {"count": 10, "max_failures": 0.1}},
            ),
            (
                ("--matrix", "lr=1e-3,1e-4", "--matrix", "seed=0-9", "--array", "%4"),
                {"matrix": {"lr": [1e-3, 1e-4], "seed": "0-9"}, "array": {"at_once": 4}},
            ),
            (("--matrix", "way=a,b"), {"matrix": {"way": ["a", "b"]}, "array": None}),
            (
                (
                    "--search=lr=log:1e-5,1e-2",
                    "--search=n=2,4",
                    "--trials=9",
                    "--seed=3",
                    "--array=%2",
                ),
                {
                    "search": {
                        "space": {"lr": {"log": [1e-5, 1e-2]}, "n": [2, 4]},
                        "trials": 9,
                        "seed": 3,
                    },
                    "array": {"at_once": 2},
                },
            ),
            (
                ("--array", "0-3", "--stop", "max:acc@10,30", "--keep-best", 0.5),
                {"stop": {"metric": "acc", "goal": "max", "rungs": [10, 30], "keep": 0.5}},
            ),
            (
                ("--array", "0-3", "--stop", "loss@1000"),
                {"stop": {"metric": "loss", "rungs": [1000]}},
            ),
            (
                ("--search", "n=0-9", "--max-failures", 2),
                {"search": {"space": {"n": "0-9"}}, "array": {"max_failures": 2}},
            ),
        ],
    )
    def test_array_matrix_and_search_make_a_lot(self, run, code, words, task, monkeypatch):
        (code / "main.py").write_text("print('hello')\n")
        sent: list[dict[str, Any]] = []
        monkeypatch.setattr(Client, "submit", lambda self, body, key: sent.append(body) or body)
        result = run("submit", code / "main.py", "-o", "json", *words)
        assert result.exit_code == 0, result.output
        [found] = sent[0]["tasks"]
        assert {name: found.get(name) for name in task} == task

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (("--array", "1-9"), "--array must be 0-LAST%N; got 1-9"),
            (("--array", "0-9", "--matrix", "a=1"), "with --matrix only %N"),
            (("--matrix", "a"), "--matrix must be KEY=VALUE,..."),
            (("--search", "a"), "--search must be KEY=VALUE,..."),
            (("--array", "0-3", "--stop", "loss"), "--stop must be METRIC@STEP,STEP"),
            (("--array", "0-3", "--keep-best", 0.5), "--keep-best goes with --stop"),
            (("--trials", 3), "--trials goes with --search"),
            (("--after", "a:b:c:d"), "--after must be NAME, NAME:ON or NAME:ON:ELSE"),
            (("--array", "0-9", "--search", "a=1"), "with --search only %N"),
            (("--max-failures", 1), "--max-failures goes with --array"),
            (("--memory", "16 parsecs"), "16GB"),
            (("--time", "soon"), "4h"),
            (("--env", "NAME"), "--env must be NAME=VALUE"),
            (("-p", "lr=1"), "does not read"),
        ],
    )
    def test_wrong_option_of_submit_is_refused_with_its_form(self, run, code, words, told):
        (code / "main.py").write_text("print('hello')\n")
        result = run("submit", code / "main.py", "--check", *words)
        assert result.exit_code != 0
        assert told in result.output.replace("\n", " ")

    def test_dependencies_of_a_project_are_sent_as_requirements(self, run, code, monkeypatch):
        (code / "main.py").write_text("print('hello')\n")
        project = '[project]\nname = "a"\nversion = "1"\ndependencies = ["einops>=0.7"]\n'
        (code / "pyproject.toml").write_text(project)
        sent = []
        monkeypatch.setattr(submit_verb, "upload", lambda client, packed: sent.append(packed))
        run("submit", code / "main.py", "-e", "pyproject.toml", "--check")
        with zipfile.ZipFile(io.BytesIO(sent[0].body)) as archive:
            assert archive.read("pyproject.requirements.txt") == b"einops>=0.7\n"

    def test_script_runs_in_its_folder_with_the_arguments_after_the_dashes(
        self, run, code, service, tmp_path, monkeypatch
    ):
        (code / "main.py").write_text("print('hello')\n")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        for words, wanted in (
            (("--name", "a", "../code/main.py"), ["python", "main.py"]),
            (("../code/main.py", "--", "--epochs", "2"), ["python", "main.py", "--epochs", "2"]),
        ):
            result = run("submit", "-o", "json", *words)
            assert result.exit_code == 0, result.output
            [(found,)] = service.sql(
                "select descriptor->'run'->'command' from tasks where request_id = %s",
                json.loads(result.stdout)["id"],
            )
            assert found == wanted

    @pytest.mark.parametrize(
        ("source", "name"), [("My_Train 2.py", "my_train-2"), ("", "code"), ("_.py", None)]
    )
    def test_request_is_named_after_its_script_or_folder(self, run, code, source, name):
        (code / source if source else code / "main.py").write_text("print('hello')\n")
        words = ("--", "python", "main.py") if not source else ()
        result = run("submit", code / source, "-o", "json", *words)
        assert result.exit_code == 0, result.output
        request = json.loads(result.stdout)
        assert request["name"] == (name or f"command-{request['id'][-6:]}")

    def test_descriptor_whose_bundle_does_not_exist_is_named(self, run, tmp_path):
        file = tmp_path / "lost.yaml"
        file.write_text(yaml.safe_dump({"bundle": "./cdoe", "tasks": []}))
        result = run("submit", file)
        assert result.exit_code == root_command.USAGE
        told = " ".join(result.stderr.split())
        assert told.startswith(f"{file}: its bundle ./cdoe does not exist")

    def test_option_on_the_wrong_side_of_the_dashes_is_explained(self, run, code):
        (code / "main.py").write_text("print('hello')\n")
        before = run("submit", "code/main.py", "--epochs", "2")
        assert before.exit_code == 2, before.output
        said = " ".join(before.stderr.replace("│", "").split())
        assert "belong after --, as in `roundhouse submit train.py -- --epochs 2`" in said
        behind = run("submit", "code/main.py", "--", "--watch")
        assert "--watch stands after --, so it is passed to the script" in behind.stderr

    def test_file_that_may_be_secret_is_not_sent_and_is_named(self, run, code):
        (code / ".env").write_text("TOKEN=1\n")
        result = run("submit", code, "--job", "train:Train")
        assert result.exit_code == 0, result.output
        assert "not sent, as it may contain secrets: .env" in result.stderr
        assert "1 file" in result.stderr

    def test_descriptor_with_a_bundle_beside_it_is_submitted_from_any_folder(
        self, run, code, tmp_path, monkeypatch
    ):
        descriptor = {
            "name": "two",
            "bundle": "./code",
            "tasks": [
                {"name": "prep", "run": {"function": "train:tokenize"}, "outputs": ["tokens"]},
                {
                    "name": "train",
                    "run": {"job": "train:Train"},
                    "inputs": {"tokens": "prep.tokens"},
                },
            ],
        }
        (tmp_path / "two.yaml").write_text(yaml.safe_dump(descriptor))
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        result = run("submit", "../two.yaml", "-o", "json")
        assert result.exit_code == 0, result.output
        request = json.loads(result.stdout)
        assert request["bundle"].startswith("sha256:")
        assert [need["task"] for need in request["tasks"][1]["needs"]] == ["prep"]
        explained = run("why", "two")
        assert "train: queued" in explained.stdout

    def test_folder_with_a_descriptor_is_submitted_with_it(self, run, code):
        (code / "roundhouse.yaml").write_text(
            "name: whole\ntasks: [{name: t, run: {job: 'train:Train'}}]\n"
        )
        result = run("submit", code)
        assert result.exit_code == 0, result.output
        assert re.match(r"Submitted whole \([0-9a-f]{8}\): queued\.", result.stdout)
        assert "2 files" in result.stderr

    def test_same_code_is_sent_once(self, run, code):
        (code / "unique.py").write_text(f"# {time.time_ns()}\n")
        words = ("submit", "--job", "train:Train", "--bundle", code)
        assert "sent" in run(*words).stderr
        assert "already has it" in run(*words).stderr

    def test_code_that_is_too_large_is_refused_with_its_largest_files(self, run, code):
        (code / "weights.bin").write_bytes(os.urandom(300_000))
        result = run("submit", "--job", "train:Train", "--bundle", code)
        assert result.exit_code == 4, result.output
        assert "must be at most 200000 bytes" in result.stderr
        assert "weights.bin" in result.stderr
        assert ".roundhouseignore" in result.stderr

    def test_same_idempotency_key_gives_the_same_request(self, run, code):
        words = ("submit", "--job", "train:Train", "--bundle", code, "-o", "json")
        first, again, other = (
            json.loads(run(*words, "--idempotency-key", key).stdout)["id"]
            for key in ("k1", "k1", "k2")
        )
        assert first == again != other

    def test_check_option_submits_nothing(self, run, code, service):
        before = service.sql("select count(*) from requests")
        result = run("submit", "--job", "train:Train", "--bundle", code, "--check")
        assert result.exit_code == 0, result.output
        assert "train" in result.stdout
        assert service.sql("select count(*) from requests") == before

    def test_python_with_a_syntax_error_is_reported(self, run, code):
        (code / "other.py").write_text(f"def ({time.time_ns()}:\n")
        result = run("submit", "--job", "train:Train", "--bundle", code)
        assert result.exit_code == 0, result.output
        assert "other.py cannot be parsed" in result.stderr

    @pytest.mark.parametrize(
        ("words", "code_", "said"),
        [
            (("--job", "train:Trian"), 2, "/tasks/0/run/job: "),
            (("--job", "train:Train", "-p", "steps"), 2, "must be name=value"),
            (("--job", "train:Train", "-p", "stepz=3"), 2, "did you mean 'steps'?"),
            (("--job", "train:Train", "-p", "stepz=3"), 2, "(train.py, line 3)"),
            ((), 2, "name what to submit"),
            (("code/train.py", "--job", "a:B"), 2, "--job and a command exclude each other"),
            ((".", "--job", "a:B"), 2, "give only one"),
            (
                (".", "--job", "a:B", "--", "python", "x.py"),
                2,
                "--job and a command exclude each other",
            ),
            (("code",), 2, "--job module:Class"),
            (("nowhere.yaml",), 2, "no such file or folder: nowhere.yaml"),
            (("--job", "train:Train", "--bundle", "nowhere"), 2, "no such folder"),
            (("--job", "train:Train", "--name", "Not A Name"), 2, "/name: "),
            (("python", "code/train.py"), 2, "no such file or folder: python; to run a command"),
        ],
    )
    def test_fault_of_a_descriptor_is_reported_with_its_place(self, run, code, words, code_, said):
        bundle = () if "--bundle" in words else ("--bundle", code)
        result = run("submit", *words, *bundle)
        assert result.exit_code == code_, result.output
        assert said in result.stderr
        assert result.stdout == ""

    def test_request_that_can_never_run_is_refused(self, run, code, tmp_path):
        task = {"name": "t", "run": {"job": "train:Train"}, "devices": {"kind": "tpu"}}
        (tmp_path / "r.json").write_text(json.dumps({"bundle": "code", "tasks": [task]}))
        result = run("submit", "r.json")
        assert result.exit_code == 4, result.output
        assert "/tasks/0/devices/kind" in result.stderr
        assert "roundhouse devices" in result.stderr

    def test_request_is_submitted_once_more_with_what_was_changed(self, run, code, tmp_path):
        (code / "train.py").write_text(JOB)
        words = ("--job", "train:Train", "--bundle", code, "--name", "first", "-p", "steps=7")
        assert run("submit", *words).exit_code == 0
        printed = run("rerun", "first", "--print").stdout
        first = yaml.safe_load(printed)
        assert [*first][:2] == ["name", "tasks"]
        again = json.loads(
            run("rerun", "first", "-p", "steps=8", "--name", "b", "-o", "json").stdout
        )
        assert (again["name"], again["state"]) == ("b", "queued")
        second = yaml.safe_load(run("rerun", "b/train", "--print").stdout)
        first["tasks"][0]["params"] = {"steps": 8}
        assert second == {**first, "name": "b"}
        (tmp_path / "c.yaml").write_text(printed)
        assert run("submit", "c.yaml", "--name", "c").exit_code == 0

    def test_a_viewer_may_not_submit(self, run, code):
        result = run("--as", "alpha:viewer", "submit", "--job", "train:Train", "--bundle", code)
        assert result.exit_code == 3, result.output


# --- looking ---


class TestLooking:
    def test_ps_lists_live_requests_and_with_a_ended_ones_too(self, run, service, submitted):
        assert submitted[-8:] in run("ps").stdout
        assert submitted not in run("ps").stdout
        assert submitted in run("ps", "-o", "wide").stdout
        service.ends(submitted, "done")
        assert submitted[-8:] not in run("ps").stdout
        assert submitted[-8:] in run("ps", "-a").stdout

    def test_request_and_task_are_shown(self, run, service, submitted):
        shown = run("show", submitted)
        assert shown.exit_code == 0, shown.output
        task = service.task_of(submitted)
        assert task in run("show", submitted, "-o", "wide").stdout
        assert submitted in run("show", task).stdout
        assert json.loads(run("show", task, "-o", "json").stdout)["placements"] == []

    def test_end_of_an_id_is_as_good_as_the_id(self, run, service, submitted):
        task = service.task_of(submitted)
        for given in (submitted[-8:], submitted[-12:]):
            assert json.loads(run("show", given, "-o", "json").stdout)["id"] == submitted
        named = f"{submitted[-8:]}/train"
        assert json.loads(run("show", named, "-o", "json").stdout)["id"] == task
        missing = run("show", f"{submitted[-8:]}/trian")
        assert missing.exit_code == 5, missing.output
        assert "no task 'trian'; its tasks are train" in missing.stderr

    def test_ambiguous_end_of_an_id_is_refused(self, run, service, submitted):
        other = "1" if submitted[-9] == "0" else "0"
        twin = f"req_{'0' * 23}{other}{submitted[-8:]}"
        columns = "tenant_id, user_id, name, labels, descriptor"
        service.sql(
            f"insert into requests (id, {columns})"
            f" select %s, {columns} from requests where id = %s",
            *(twin, submitted),
        )
        result = run("show", submitted[-8:])
        assert result.exit_code == 2, result.output
        assert twin in result.stderr.replace("\n", "").replace("│", "").replace(" ", "")
        assert json.loads(run("show", submitted[-9:], "-o", "json").stdout)["id"] == submitted

    def test_failed_task_is_shown_with_the_traceback_of_the_job(self, run, service, submitted):
        service.ends(
            submitted,
            "failed",
            cause="exception",
            message="ValueError: [red]no[/red] \x1b[2Jdata",
            detail='Traceback ...\n  File "train.py", line 3',
        )
        shown = run("show", submitted).stdout
        assert "train: exception: ValueError: [red]no[/red] data" in shown
        assert '  File "train.py", line 3' in shown

    def test_done_task_shows_its_peak_and_what_to_request_next(self, run, service, submitted):
        service.ends(submitted, "done", peak_device_bytes=2**30, peak_host_bytes=2**20)
        task = service.task_of(submitted)
        shown = run("show", task).stdout
        assert "1.0 GiB on the device, 1.0 MiB of the host for images" in shown
        assert "devices.memory_bytes: 1207959552" in shown
        assert json.loads(run("show", task, "-o", "json").stdout)["peak_host_bytes"] == 2**20

    def test_unfinished_task_shows_how_to_look_into_it(self, run, service, submitted):
        task, end = service.task_of(submitted), submitted[-8:]
        assert f"roundhouse shell {end}, or roundhouse forward" in run("show", submitted).stdout
        assert f"roundhouse shell {end}/train, or roundhouse" in run("show", task).stdout
        runs = f'{{"name": "train", "run": {{"graph": "sha256:{"5" * 64}"}}}}'
        service.sql("update tasks set descriptor = %s where request_id = %s", runs, submitted)
        assert "no shell: the task runs a graph; only a" in run("show", submitted).stdout

    def test_done_task_shows_what_it_took_of_its_host(self, run, service, submitted):
        peaks = {"cpus": 1900, "memory": 2**30, "disk": 2**20, "processes": 12}
        service.ends(submitted, "done", peaks=json.dumps(peaks))
        shown = " ".join(run("show", service.task_of(submitted)).stdout.split())
        assert "1.9 processors, 1.0 GiB of memory, 1.0 MiB of disk, 12 processes" in shown
        asked = "cpus: 2.5, memory_bytes: 1207959552, disk_bytes: 67108864, processes: 16"
        assert f"resources: {{{asked}}}" in shown

    def test_result_is_shown_below_the_table(self, run, service, submitted):
        service.ends(submitted, "done", metrics='{"loss": 0.5}', result='{"words": "so many"}')
        shown = run("show", submitted).stdout.splitlines()
        [row] = [line for line in shown if line.startswith("train ")]
        assert "loss=0.5" in row
        assert "so many" not in row
        assert "Result of train: words=so many" in run("show", submitted).stdout

    def test_task_that_failed_without_output_is_shown_with_its_cause(self, run, service, submitted):
        service.ends(submitted, "failed", cause="exception", message="KeyError: 'x'\nmore")
        for verb in ("logs", "why"):
            for id in (submitted, service.task_of(submitted)):
                result = run(verb, id)
                assert result.exit_code == 0, result.output
                [line] = [line for line in result.output.splitlines() if "KeyError" in line]
                assert "exception: KeyError: 'x'  roundhouse show " in line

    def test_state_is_the_word_of_the_api(self, run, service, submitted):
        def shown():
            [row] = [line for line in run("ps").stdout.splitlines() if submitted[-8:] in line]
            [fact] = [
                x for x in run("show", submitted).stdout.splitlines() if x.startswith("state")
            ]
            return row.split()[2], fact.split()[1]

        began = "update tasks set state = %s, hold = %s, first_started_at = now()"
        for state, hold, told in (
            ("running", "", "running"),
            ("waiting", "", "preempted"),
            ("blocked", "user", "paused"),
        ):
            service.sql(f"{began} where request_id = %s", state, hold, submitted)
            assert shown() == (told, told)
        assert json.loads(run("show", submitted, "-o", "json").stdout)["phase"] == "paused"

    def test_why_shows_every_reason_the_place_and_advice(self, run, service, submitted):
        service.waits(submitted, hold="user")
        told = run("why", submitted)
        assert told.exit_code == 0, told.output
        for said in (
            "place 1 in the queue",
            "Paused by a user. Run `roundhouse resume ",
            "1 of 1 cpu device is free",
            "Clears when the scheduler makes its next round. [DEVICE_FREE]",
            "Most likely next: it is resumed.",
            "Start time unknown. First: it is resumed.",
        ):
            assert said in " ".join(told.stdout.split()), said
        [as_json] = json.loads(run("why", service.task_of(submitted), "-o", "json").stdout)
        assert [reason["code"] for reason in as_json["reasons"]] == ["HELD_BY_USER", "DEVICE_FREE"]
        assert as_json["nearest"]["action"] == "release"

    def test_devices_and_usage_are_shown(self, run):
        assert "local.0" in run("devices").stdout
        told = run("usage", "--by", "kind")
        assert told.exit_code == 0, told.output
        assert told.stdout.split() == ["KIND", "HELD", "CHARGED"]
        assert run("usage", "--by", "colour").exit_code == 2

    def test_share_shows_what_the_api_says(self, run):
        fair = json.loads(run("share", "-o", "json").stdout)
        assert [tenant["tenant"] for tenant in fair["tenants"]] == ["alpha"]
        assert fair["verdict"] in run("share").stdout

    def test_a_shell_can_complete_the_verbs(self):
        words = {"COMP_WORDS": "roundhouse wat", "COMP_CWORD": "1"}
        asked = {**os.environ, **words, "_ROUNDHOUSE_COMPLETE": "complete_bash"}
        command = Path(sys.executable).with_name("roundhouse")
        said = subprocess.run([command], env=asked, capture_output=True, text=True, check=True)
        assert said.stdout.split() == ["watch"]

    @pytest.mark.parametrize("verb", ["show", "why", "logs", "cancel", "pause", "resume"])
    @pytest.mark.parametrize("id", ["nobodys", "req_00", "tsk_00"])
    def test_unknown_id_is_not_found(self, run, verb, id):
        result = run(verb, id)
        assert result.exit_code == 5, result.output
        assert "Not found" in result.stderr

    def test_another_tenants_request_is_not_found(self, run, submitted):
        assert run("--as", "beta", "show", submitted).exit_code == 5
        assert run("--as", "platform", "show", submitted).exit_code == 0


# --- logs and events ---


class TestFollowing:
    def test_logs_are_printed_unchanged(self, run, service, submitted):
        lines = [f"step {n}: [bold]loss[/bold] {n / 7:.3f} " + "x" * 300 for n in range(300)]
        service.prints(submitted, *lines)
        assert run("logs", submitted).stdout.splitlines() == lines
        assert run("logs", service.task_of(submitted)).stdout.splitlines() == lines
        as_json = [json.loads(line) for line in run("logs", submitted, "-o", "json").stdout.splitlines()]  # fmt: skip  # noqa: E501
        assert [line["text"] for line in as_json] == lines

    def test_logs_can_be_searched_and_begun_at_their_end(self, run, service, submitted):
        service.prints(submitted, *(f"step {n}" for n in range(300)))
        assert run("logs", submitted, "--grep", "p 29").stdout.splitlines() == [
            f"step {n}" for n in (29, *range(290, 300))
        ]
        last = [f"step {n}" for n in range(60, 300)]
        assert run("logs", "--tail", 240, submitted).stdout.splitlines() == last
        service.ends(submitted, "done")
        told = run("logs", "-f", "-g", "p 29", "-n", 2, service.task_of(submitted))
        assert told.stdout.splitlines() == ["step 298", "step 299"]

    def test_task_without_output_is_reported_as_such(self, run, submitted):
        told = run("logs", submitted)
        assert (told.exit_code, told.stdout) == (0, "")
        assert f"printed nothing yet.  roundhouse why {submitted[-8:]}" in told.stderr

    def test_logs_f_ends_when_the_request_has_ended(self, run, service, submitted):
        def play() -> None:
            for n in range(3):
                time.sleep(0.1)
                service.prints(submitted, f"line {n}")
            service.ends(submitted, "done")

        playing = threading.Thread(target=play)
        playing.start()
        result = run("logs", "-f", submitted)
        playing.join()
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines() == ["line 0", "line 1", "line 2"]

    def test_log_stream_survives_the_death_of_the_api(self, service, submitted):
        seen: list[str] = []

        def follow() -> None:
            with Client(service.url, service.keys["alpha"]["member"], patience_s=90.0) as client:
                for event in client.stream(f"/v1/requests/{submitted}/logs"):
                    seen.append(event.data.get("text", event.type))

        following = threading.Thread(target=follow)
        following.start()
        service.prints(submitted, "before", "just before")
        _until(lambda: len(seen) == 2, "two lines came")
        service.kill()
        service.prints(submitted, "nobody heard this")
        service.start()
        service.prints(submitted, "after")
        service.ends(submitted, "done")
        following.join(timeout=90)
        assert seen == ["before", "just before", "nobody heard this", "after", "end"]

    @pytest.mark.parametrize(("state", "code_"), [("done", 0), ("failed", 1), ("cancelled", 1)])
    def test_watch_prints_events_and_exits_like_the_request(self, run, service, code, state, code_):
        name = f"watched-{state}-{time.time_ns()}"

        def play() -> None:
            found = "select id from requests where name = %s"
            [(id,)] = _until(lambda: service.sql(found, name), "it is submitted")
            service.says(id, "task.started", "Started on local.0.")
            service.says(id, "task.paused", "Paused after step 7 on local.0; no step is lost.")
            service.ends(id, state, pauses=1, total_held_us=2_000_000, guest_held_us=500_000)

        playing = threading.Thread(target=play)
        playing.start()
        result = run("submit", "--job", "train:Train", "--bundle", code, "--name", name, "--watch")
        playing.join()
        assert result.exit_code == code_, result.output
        assert "Started on local.0." in result.stdout
        assert "Paused after step 7" in result.stdout
        assert f"{name}: {state}, 2.5 s of device time, 1 pause, 0 lost steps." in result.stderr
        [(request,)] = service.sql("select id from requests where name = %s", name)
        for id in (request, service.task_of(request)):
            again = run("watch", id)
            assert (again.exit_code, again.stdout) == (code_, result.stdout)

    def test_watch_prints_each_reason_of_a_wait_once(self, run, service, code, monkeypatch):
        monkeypatch.setattr(watching, "SILENT_S", 0.1)
        name, told = f"waits-{time.time_ns()}", list[str]()
        terminal = watching.err

        def show(line: Any) -> None:
            terminal().print(line)
            told.append(str(line))

        monkeypatch.setattr(watching, "err", lambda: SimpleNamespace(print=show))
        paused = "train: paused, place 1 in the queue. Paused by a user."
        queued = (
            "train: queued, place 1 in the queue. 1 of 1 cpu device is free: "
            "the scheduler assigns it in its next round. "
        )

        def play() -> None:
            found = "select id from requests where name = %s"
            [(id,)] = _until(lambda: service.sql(found, name), "it is submitted")
            for hold, line in (("user", paused), ("", queued)):
                service.waits(id, hold=hold)
                _until(lambda line=line: any(each.startswith(line) for each in told), line)
            service.ends(id, "done")

        playing = threading.Thread(target=play)
        playing.start()
        result = run("submit", "--job", "train:Train", "--bundle", code, "--name", name, "--watch")
        playing.join()
        assert result.exit_code == 0, result.output
        shown = [line for line in result.stderr.splitlines() if line.startswith("train: ")]
        if "Not scheduled yet" in shown[0]:
            del shown[0]  # we were slower than the watcher: it was true for a moment
        assert len(shown) == 2
        assert shown[0] == paused
        assert shown[1].startswith(queued)
        assert re.search(r"Start time unknown\.|Expected to start ", shown[1])

    def test_log_of_a_queued_task_that_is_followed_says_why_it_waits_and_goes_on(
        self, run, service, submitted, monkeypatch
    ):
        monkeypatch.setattr(watching, "SILENT_S", 0.1)
        service.waits(submitted)
        terminal, told = watching.err, threading.Event()

        def show(line: Any) -> None:
            terminal().print(line)
            told.set()

        def play() -> None:
            told.wait(60)
            service.prints(submitted, "the first line")
            service.ends(submitted, "done")

        monkeypatch.setattr(watching, "err", lambda: SimpleNamespace(print=show))
        playing = threading.Thread(target=play)
        playing.start()
        result = run("logs", "-f", submitted)
        playing.join()
        assert result.exit_code == 0, result.output
        assert "train: queued, place 1 in the queue. " in result.stderr
        assert "the first line" in result.stdout


@pytest.mark.parametrize("words", [(), ("logs",), ("simulate",), ("key", "add")])
def test_short_option_asks_for_help_everywhere(run, words):
    asked = run(*words, "-h")
    assert asked.exit_code == 0
    assert asked.stdout == run(*words, "--help").stdout


def _lot_of_two(run, service: Service, code: Path, name: str) -> tuple[str, str]:
    """Submit a lot, and make its two members, which are done; return the ids of request and lot."""
    words = ("submit", code, "--name", name, "--array", "0-1", "-o", "json", "--", "true")
    id = json.loads(run(*words).stdout)["id"]
    lot = service.task_of(id)
    kept = json.dumps({"artifacts.zip": {"sha256": "", "size_bytes": 9}})
    for n in range(2):
        service.sql(
            "insert into tasks (id, request_id, tenant_id, user_id, lot_id, lot_index, ordinal,"
            " name, type, kind, descriptor, state, outputs) select id || %s, request_id,"
            " tenant_id, user_id, id, %s, 0, name || %s, type, kind, descriptor, 'done', %s"
            " from tasks where id = %s",
            *(str(n), n, f".{n}", kept, lot),
        )
    return id, lot


def test_shell_completes_names_of_requests_and_of_their_tasks(run, submitted, code, monkeypatch):
    [name] = [r["name"] for r in json.loads(run("ps", "-o", "json").stdout) if r["id"] == submitted]
    monkeypatch.setenv("_ROUNDHOUSE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_CWORD", "2")
    for given, completed in ((name[:3], name), (f"{name}/", f"{name}/train")):
        monkeypatch.setenv("COMP_WORDS", f"roundhouse logs {given}")
        assert completed in run(prog_name="roundhouse").stdout.split()
    monkeypatch.setenv("ROUNDHOUSE_URL", "http://127.0.0.1:9")
    result = run(prog_name="roundhouse")
    assert (result.stdout.split(), result.stderr) == ([], "")


# --- wishes ---


class TestWishes:
    def test_pause_resume_and_cancel_by_request_and_by_task(self, run, service, submitted):
        task = service.task_of(submitted)
        for id in (submitted, task):
            assert "paused." in run("pause", id).stdout
            assert service.sql("select hold from tasks where id = %s", task) == [("user",)]
            assert run("resume", id).exit_code == 0
            assert service.sql("select hold from tasks where id = %s", task) == [("",)]
        assert "cancel" in run("cancel", submitted).stdout
        assert run("cancel", task).exit_code == 0

    def test_several_requests_are_all_tried_and_the_first_problem_is_the_exit_code(
        self, run, service, submitted
    ):
        result = run("pause", "req_00", submitted, "-o", "json")
        assert result.exit_code == 5
        assert "req_00: Not found" in result.stderr
        assert [request["id"] for request in json.loads(result.stdout)] == [submitted]

    def test_action_that_the_state_does_not_allow_is_refused(self, run, service, submitted):
        service.ends(submitted, "done")
        for verb in ("pause", "resume"):
            for id in (submitted, service.task_of(submitted)):
                result = run(verb, id)
                assert result.exit_code == 4, result.output
                assert "the task is already done; nothing was changed" in result.stderr

    def test_lot_is_bounded_counted_and_its_failed_members_start_again(self, run, service, code):
        words = ("submit", code, "--name", "lot", "--array", "0-6%2", "-o", "json", "--")
        result = run(*words, "true", "${array.index}")
        assert result.exit_code == 0, result.output
        id = json.loads(result.stdout)["id"]
        assert "7 queued" in run("ps").stdout
        assert "Members that run go on." in run("at-once", id, 0).stdout
        assert service.sql("select at_once from lots where id = %s", service.task_of(id)) == [(0,)]
        assert run("retry", id).exit_code == 4
        service.sql(
            "update lots set made = 7, failed = 3, done = 4, failures_allowed = 5,"
            " held_us = 3600000000, pauses = 5, lost_steps = 2"
        )
        table = run("show", id).stdout
        assert re.search(r"4\sdone.*1h\s00m\s+5\s+2\s", table), table
        [task] = json.loads(run("show", id, "-o", "json").stdout)["tasks"]
        assert (task["held_us"], task["pauses"], task["lost_steps"]) == (3600000000, 5, 2)
        assert "LOT_HELD" in run("why", id, "-o", "json").stdout
        assert "starts again" in run("retry", id, "--failed").stdout
        [(again, states)] = service.sql("select again, again_states from lots")
        assert (again, states) == (3, ["failed"])

    def test_outputs_of_a_lot_are_unpacked_each_into_a_folder_of_its_member(
        self, run, service, code, tmp_path, monkeypatch
    ):
        id, lot = _lot_of_two(run, service, code, "many")

        class Zip(zipfile.ZipFile):
            def __init__(self, client: Any, path: str) -> None:
                file = io.BytesIO()
                with zipfile.ZipFile(file, "w") as archive:
                    archive.writestr("out/said.txt", path)
                super().__init__(file)

        monkeypatch.setattr(kept_files, "opened_zip", Zip)
        result = run("outputs", id, "--to", tmp_path / "got")
        assert result.exit_code == 0, result.output
        for n in range(2):
            said = (tmp_path / "got" / f"command.{n}" / "out" / "said.txt").read_text()
            assert said == f"/v1/tasks/{lot}{n}/outputs/artifacts.zip"
        assert run("show", "many/command.1").exit_code == 0
        service.sql("""update tasks set metrics = '{"loss": 0.5}' where id = %s""", f"{lot}1")
        shown = run("members", id, "-o", "json").stdout
        assert [each["lot_index"] for each in json.loads(shown)] == [1, 0]
        best = run("members", id, "--sort", "loss", "--highest")
        assert best.exit_code == 0, best.output
        assert "command.1" in best.stdout
        assert "command.0" not in best.stdout
        assert run("members", id, "--state", "failed").exit_code == 0

    def test_members_of_a_lot_are_compared_where_they_differ(self, run, service, code):
        id, lot = _lot_of_two(run, service, code, "grid")
        for n in range(2):
            service.sql(
                "update tasks set metrics = %s, descriptor = jsonb_set(descriptor, '{params}', %s)"
                " where id = %s",
                *(f'{{"loss": 0.{n}}}', f'{{"lr": {n}, "seed": 7}}', f"{lot}{n}"),
            )
        told = json.loads(run("compare", id, "-o", "json").stdout)
        assert [each["id"] for each in told["runs"]] == [f"{lot}0", f"{lot}1"]
        differ = [{"field": "params.lr", "values": [0, 1]}]
        assert told["fields"] == [*differ, {"field": "metrics.loss", "values": [0.0, 0.1]}]
        csv = f"field,{id}/command.0,{id}/command.1\nparams.lr,0,1\nmetrics.loss,0.0,0.1\n"
        assert run("compare", id, "--csv").stdout == csv
        assert re.search(r"params\.seed +7 +7 *\n", run("compare", id, "--alike").stdout)
        alone = run("compare", f"{id}/command.1")
        assert (alone.exit_code, "these are 1" in alone.stderr) == (2, True)

    def test_checkpoints_of_a_lot_are_those_of_its_members_with_the_best_of_all(
        self, run, service, code
    ):
        id, lot = _lot_of_two(run, service, code, "sweep")
        assert "No checkpoints yet." in run("checkpoints", id).stdout
        service.sql(
            "update tasks set descriptor = jsonb_set(descriptor, '{checkpoint}', %s)"
            " where request_id = %s",
            *('{"best": {"metric": "loss", "goal": "min", "keep": 1}}', id),
        )
        for n, member, value in ((0, 0, 0.5), (1, 1, 0.25), (2, 1, 0.75)):
            service.sql(
                "insert into checkpoints (id, task_id, tenant_id, epoch, step, sha256, size_bytes,"
                " took_us, best, ranked_value) select %s, id, tenant_id, 1, %s, '0', 1, 1, %s, %s"
                " from tasks where id = %s",
                *(f"ckp_{n}{lot[5:]}", n, value < 0.7, value, f"{lot}{member}"),
            )
        for given in (id, "sweep", "sweep/command", f"{id}/command", f"{id[-8:]}/command", lot):
            found = json.loads(run("checkpoints", given, "-o", "json").stdout)
            assert [(each["task"], each["step"], each["best_of_lot"]) for each in found] == [
                ("command.1", 2, False), ("command.1", 1, True), ("command.0", 0, False),
            ], given  # fmt: skip
        lines = run("checkpoints", "sweep").stdout.splitlines()
        assert [line for line in lines if "best of all" in line and "0.25" in line]
        [one] = json.loads(run("checkpoints", f"{id}/command.0", "-o", "json").stdout)
        assert (one["task"], one["step"], one["task_id"]) == ("command.0", 0, f"{lot}0")
        assert found[1]["id"] in run("pin", f"{id}/command@best").stdout
        refused = run("pin", "sweep")
        assert refused.exit_code == 2
        assert "command is a lot" in refused.stderr
        service.sql("update checkpoints set damaged_at = now() where best")
        found = json.loads(run("checkpoints", lot, "-o", "json").stdout)
        assert not [each for each in found if each["best_of_lot"]]

    def test_cancelling_an_ended_request_is_no_error_and_is_said(self, run, service, submitted):
        service.ends(submitted, "done")
        for id in (submitted, service.task_of(submitted)):
            result = run("cancel", id)
            assert result.exit_code == 0, result.output
            assert "already done; nothing changed" in result.stdout

    def test_ended_request_is_kept_let_go_and_deleted(self, run, service, submitted):
        refused = run("delete", submitted)
        assert refused.exit_code == 4, refused.output
        assert "Cancel it first" in " ".join(refused.stderr.split())
        service.ends(submitted, "done")
        asked = "select keep, delete_asked_at is not null from requests where id = %s"
        assert "is kept with its checkpoints" in run("keep", submitted).stdout
        assert service.sql(asked, submitted) == [(True, False)]
        assert submitted[-8:] in run("ps", "--kept").stdout
        assert run("delete", submitted).exit_code == 4
        assert "no longer kept" in run("keep", submitted, "--release").stdout
        assert "No request is kept" in run("ps", "--kept").stderr
        assert "gone in some minutes" in run("delete", submitted).stdout
        assert service.sql(asked, submitted) == [(False, True)]
        assert run("delete", service.task_of(submitted)).exit_code == 2

    # --- tenants and users ---

    def test_number_of_devices_of_a_running_task_is_changed(self, run, code, submitted):
        words = ("submit", "--job", "train:Train", "--bundle", code, "-o", "json")
        result = run(*words, "--ranks", "4", "--name", "many")
        assert result.exit_code == 0, result.output
        [task] = json.loads(result.stdout)["tasks"]
        assert task["devices_max"] == 4
        resized = run("resize", "many", "2", "-o", "json")
        assert [each["devices_max"] for each in json.loads(resized.stdout)] == [2]
        told = run("resize", "many/train", "1")
        assert told.stdout.startswith(
            "train: at most 1 device (before: 2). It holds 0 devices now."
        )
        too_many = run("resize", task["id"], "5")
        assert too_many.exit_code == 2
        assert "must be 1 to 4 devices for 4 ranks; got 5" in too_many.stderr
        assert "the task has one rank" in run("resize", submitted, "2").stderr

    def test_checkpoint_is_requested_while_the_task_runs(self, run, service, submitted):
        refused = run("checkpoint", submitted)
        assert refused.exit_code == 4, refused.output
        sql = "update tasks set state = 'running', capabilities = '[\"save\"]' where id = %s"
        service.sql(sql, service.task_of(submitted))
        service.sql("update tasks set step = 4210 where request_id = %s", submitted)
        asked = run("checkpoint", submitted)
        assert asked.exit_code == 0, asked.output
        assert asked.stdout == (
            "train: checkpoint requested at step 4,210."
            f" `roundhouse checkpoints {submitted[-8:]}` shows it when it is durable.\n"
        )
        [(wished,)] = service.sql("select save_asked from tasks where request_id = %s", submitted)
        assert wished

    def test_move_to_a_busy_device_says_that_it_waits(self, run, service, submitted):
        sql = "update tasks set state = 'running', seat = 'local.0', capabilities = '[\"move\"]'"
        service.sql(f"{sql}, island = 'local' where request_id = %s", submitted)
        service.sql(
            "insert into devices (id, host, island, kind, memory_bytes, seen_at, lease_until)"
            " values ('local.1', 'local', 'local', 'cpu', 4e9, now(), now() + interval '1 day')"
            " on conflict do nothing"
        )
        try:
            asked = run("migrate", submitted, "--to", "local.1")
            assert asked.exit_code == 0, asked.output
            assert "train: moves to local.1; it runs until then." in asked.stdout
        finally:
            service.ends(submitted, "done", seat=None, move_to=None)
            service.sql("delete from devices where id = 'local.1'")

    def test_requested_actions_are_shown(self, run, service, submitted):
        task = service.task_of(submitted)
        service.sql("update tasks set move_to = 'local.1' where id = %s", task)
        assert "moves to local.1" in run("show", submitted).stdout

    def test_ranks_and_kind_are_for_what_has_no_descriptor(self, run, code):
        wide = ("--job", "train:Train", "--ranks", "4", "--devices", "3", "--hosts", "2")
        told = run("submit", code, *wide, "--check").stderr
        assert "/devices/min: must be a multiple of hosts" in told
        assert "got min 3 and hosts 2" in told
        assert run("submit", code, "--hosts", "2").exit_code == 2
        assert run("submit", code, "--ranks", "2").exit_code == 2
        assert run("submit", code, "--kind", "cuda").exit_code == 2
        words = ("--ranks", "2", "--kind", "cuda", "--", "python", "train.py")
        assert "no device of kind 'cuda'" in run("submit", code, *words).stderr


def test_help_of_up_lists_its_options_and_help_of_simulate_only_its_own(run):
    shown = run("up", "--help").stdout
    assert all(f"--{name}" in shown for name in ("home", "devices", "hosts", "host", "port"))
    assert run("up", "--devices", "two").exit_code == root_command.USAGE
    assert "completion" not in run("simulate", "--help").stdout


def test_command_imports_only_what_it_needs():
    """Each of these takes as long to import as the rest of a call."""
    ours = "app.settings app.core.simulation.simulator app.core.model.protocol.messages"
    slow = f"{ours} app.core.model.descriptor yaml rich.live"
    told = f"import sys, app.cli.main; print(*(set('{slow}'.split()) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


class TestOperating:
    def test_top_prints_once_when_its_output_is_no_terminal(self, run, service, submitted):
        result = run("top")
        assert result.exit_code == 0
        for told in ("WEIGHT", "alpha", "local.0"):
            assert told in result.stdout
        now = yaml.safe_load(run("top", "-o", "yaml").stdout)
        assert [device["id"] for device in now["devices"]] == ["local.0"]

    def test_drained_device_takes_no_work_until_uncordoned(self, run):
        for place in ("local.0", "local"):
            drained = json.loads(run("--as", "platform", "drain", place, "-o", "json").stdout)
            assert [(d["id"], d["cordoned"]) for d in drained] == [("local.0", True)]
            back = json.loads(run("--as", "platform", "undrain", place, "-o", "json").stdout)
            assert [(d["id"], d["cordoned"]) for d in back] == [("local.0", False)]

    def test_only_an_admin_drains_and_only_existing_devices(self, run):
        assert run("drain", "local").exit_code == root_command.NO_ACCESS
        assert run("--as", "platform", "drain", "gone").exit_code == root_command.NOT_FOUND

    def test_device_is_enrolled_with_its_hosts_key_listed_and_revoked(self, run):
        key = run("device", "key").stdout.strip()
        assert key == run("device", "key").stdout.strip()
        admin = ("--as", "platform", "device")
        assert run("device", "enrol", "gpu7.0", "--key", key).exit_code == root_command.NO_ACCESS
        made = run(*admin, "enrol", "gpu7.0", "gpu7.1", "--key", key, "-o", "json")
        assert [each["key"] for each in json.loads(made.stdout)] == [key, key]
        assert run(*admin, "enrol", "gpu7.0", "--key", "0" * 64).exit_code == root_command.REFUSED
        assert run(*admin, "enrol", "gpu7.0", "--key", "7").exit_code == root_command.USAGE
        assert run(*admin, "revoke", "gpu7.0").exit_code == 0
        found = json.loads(run(*admin, "list", "-o", "json").stdout)
        assert [each["revoked_at"] is None for each in found] == [False, True]
        assert "KEY" in run(*admin, "list").stdout
        assert run(*admin, "island-key").exit_code == root_command.NOT_FOUND, (
            "its scheduler never ran"
        )

    def test_presets_are_listed(self, run):
        assert "No presets" in run("presets").stdout

    def test_doctor_says_what_works_and_what_does_not(self, run):
        result = run("doctor", "-o", "json")
        found = {check["check"]: check for check in json.loads(result.stdout)}
        assert found["service"]["ok"]
        assert "member of alpha" in found["key"]["detail"]
        assert found["postgres"]["ok"]
        assert not found["redis"]["ok"]  # this service has no Redis
        assert result.exit_code == root_command.NO_ANSWER

    def test_doctor_recognises_a_key_of_another_service(self, run, monkeypatch):
        monkeypatch.setenv("ROUNDHOUSE_KEY", "rh_aaaaaaaa_" + "a" * 49)
        found = {check["check"]: check for check in json.loads(run("doctor", "-o", "json").stdout)}
        assert not found["key"]["ok"]
        assert "ROUNDHOUSE_KEY" in found["key"]["detail"]


class TestTenants:
    def test_users_and_service_accounts_are_listed(self, run):
        assert run("--as", "alpha:tenant_admin", "account", "add", "nightly").exit_code == 0
        told = run("--as", "alpha:tenant_admin", "users").stdout
        [row] = [line for line in told.splitlines() if "nightly" in line]
        assert "a program" in row
        assert "a person" in told

    def test_tenants_are_listed_as_a_tree_of_visible_tenants(self, run):
        lines = run("--as", "platform", "tenants").stdout.splitlines()
        assert lines[0].split()[:2] == ["TENANT", "WEIGHT"]
        assert [line.rstrip().split("  ")[0] or line.split()[0] for line in lines[1:]] == [
            "platform",
            "alpha",
            "beta",
            "gamma",
        ]
        assert lines[2].startswith("  alpha")
        assert [item["name"] for item in json.loads(run("tenants", "-o", "json").stdout)] == [
            "alpha"
        ]

    def test_tenants_and_users_are_created(self, run, service):
        words = ("tenant", "delta", "--new", "--under", "gamma", "--weight", "2", "-o", "json")
        made = run("--as", "platform", *words, "--guarantee", "cpu=1")
        assert made.exit_code == 0, made.output
        tenant = json.loads(made.stdout)
        assert (tenant["weight"], tenant["guarantee"]) == (2.0, {"cpu": 1})
        assert (
            tenant["parent_id"] == service.sql("select id from tenants where name = 'gamma'")[0][0]
        )
        twice = run("--as", "platform", "tenant", "delta", "--new", "--under", "gamma")
        assert twice.exit_code == 4, twice.output
        with Client(service.url, service.keys["platform"]["platform_admin"]) as client:
            client.delete(f"/v1/tenants/{tenant['id']}")
        who = ("--as", "alpha:tenant_admin", "user", "grace")
        assert run(*who, "--new", "--weight", "3").exit_code == 0
        assert json.loads(run(*who, "-o", "json").stdout)["weight"] == 3.0
        assert run(*who, "--delete", "--weight", "2").exit_code == 2
        assert run(*who, "--delete").exit_code == 0
        assert run(*who).exit_code == 5
        for option in ("--under", "--tenant"):
            verb = "tenant" if option == "--under" else "user"
            assert run("--as", "platform", verb, "alpha", option, "gamma").exit_code == 2

    def test_budget_of_a_tenant_is_set_shown_added_to_and_removed(self, run):
        def budget(*words):
            return run("--as", "platform", "budget", "gamma", *words)

        terms = ("--period", "14d", "--timezone", "Europe/Berlin", "--carry", "0.5")
        terms = (*terms, "--at", "80=notify", "--at", "100=demote")
        made = budget("--grant", "cpu=100h", "--grant", "*=500", *terms, "-o", "json")
        assert made.exit_code == 0, made.output
        assert json.loads(made.stdout)["budget"] == {
            "device_hours": {"cpu": 100.0, "*": 500.0},
            "period": {"days": 14},
            "timezone": "Europe/Berlin",
            "at": {"80": "notify", "100": "demote"},
            "carry": 0.5,
            "to": [],
        }
        told = budget("--add", "cpu=20", "--why", "a deadline").stdout
        assert "20.0 h" in told
        assert "at 80 % notify, at 100 % demote" in told
        assert budget("--remove").exit_code == 0
        assert "There is no budget" in budget().stdout
        for words in (("--add", "cpu=1"), ("--period", "week"), ("--grant", "cpu"), ("--at", "x")):
            assert budget(*words).exit_code == 2

    def test_budget_of_a_user_is_set(self, run):
        admin = ("--as", "alpha:tenant_admin")
        assert run(*admin, "user", "budgeted", "--new").exit_code == 0
        made = run(*admin, "budget", "--user", "budgeted", "--grant", "cuda=10")
        assert made.exit_code == 0, made.output
        assert "at 100 % pause" in made.stdout

    def test_budget_of_each_user_of_a_tenant_is_set_shown_and_removed(self, run):
        def budget(*words):
            result = run("--as", "platform", "budget", *words)
            assert result.exit_code == 0, result.output
            return result.stdout

        each = ("gamma", "--each-user")
        assert run("--as", "platform", "tenant", "gamma", "--each-user", "max_running=7").stdout
        told = budget(*each, "--grant", "cuda=10", "--period", "week")
        assert re.search(r"each user +cuda 10.0 h", told)
        shown = run("--as", "platform", "tenant", "gamma").stdout
        assert "running 7; budget cuda 10.0 h each week" in " ".join(shown.split())
        assert run("--as", "platform", "tenant", "gamma", "--each-user", "max_running=none").stdout
        assert "at 100 % pause" in budget(*each)
        assert "There is no budget of each user" in budget(*each, "--remove")
        for words in (("--user", "ada"), ("--add", "cuda=1", "--why", "so")):
            assert run("--as", "platform", "budget", "--each-user", *words).exit_code == 2

    def test_only_given_fields_of_a_tenant_are_changed(self, run):
        def tenant(*words):
            result = run("--as", "platform", "tenant", "gamma", *words, "-o", "json")
            assert result.exit_code == 0, result.output
            return json.loads(result.stdout)

        before = tenant()
        words = ("--guarantee", "cpu=1", "--limit", "cpu=2", "--limit", "*=8", "--max-queued", "9")
        changed = tenant("--weight", "3", "--tier", "standard", *words)
        assert changed == before | {
            "weight": 3.0,
            "tier": "standard",
            "guarantee": {"cpu": 1},
            "limit": {"cpu": 2, "*": 8},
            "max_queued": 9,
            "version": before["version"] + 1,
        }
        again = tenant("--limit", "cpu=none", "--limit", "cuda=4", "--max-queued", "none")
        assert (again["limit"], again["max_queued"]) == ({"*": 8, "cuda": 4}, None)
        assert again["guarantee"] == {"cpu": 1}
        assert tenant()["version"] == before["version"] + 2
        shown = run("--as", "platform", "tenant", "gamma").stdout
        for said in ("gamma", "cpu=1", "*=8, cuda=4", "standard"):
            assert said in shown

    def test_limits_of_users_are_set_and_removed(self, run):
        def shown(*words):
            result = run("--as", "platform", *words, "-o", "json")
            assert result.exit_code == 0, result.output
            return json.loads(result.stdout)

        words = ("--each-user", "max_running=8", "--each-user", "limit.cuda=2")
        more = ("--each-user", "max_duration_s=4h")
        defaults = shown("tenant", "gamma", *words, *more)["user_defaults"]
        assert {name: most for name, most in defaults.items() if most is not None} == {
            "max_running": 8,
            "limit": {"cuda": 2},
            "max_duration_s": 14400.0,
        }
        assert "running 8" in run("--as", "platform", "tenant", "gamma").stdout
        words = [("--each-user", f"{name}=none") for name in defaults if name != "limit"]
        gone = shown("tenant", "gamma", *sum(words, ()), "--each-user", "limit.cuda=none")
        assert {*gone["user_defaults"].values()} == {None}
        user = ("user", "hopper", "--new", "--tenant", "gamma", "--limit", "*=3")
        assert shown(*user, "--max-sessions", "1")["limit"] == {"*": 3}
        again = shown("user", "hopper", "--limit", "*=none", "--max-duration", "90m")
        assert (again["limit"], again["max_sessions"], again["max_duration_s"]) == (None, 1, 5400)
        assert "sessions 1; duration 1h 30m" in run("--as", "platform", "user", "hopper").stdout

    @pytest.mark.parametrize(
        ("words", "code_", "said"),
        [
            (("tenant", "alpha", "--each-user", "max_running"), 2, "NAME=VALUE"),
            (("tenant", "alpha", "--each-user", "max_tasks=3"), 2, "max_tasks"),
            (("tenant", "nobody"), 5, "no visible tenant has the name or id 'nobody'"),
            (("tenant", "alpha", "--limit", "8"), 2, "KIND=DEVICES"),
            (("tenant", "alpha", "--max-running", "many"), 2, "a number, or none"),
            (("tenant", "alpha", "--guarantee", "*=1"), 2, "/guarantee/*"),
        ],
    )
    def test_fault_of_a_tenant_is_reported(self, run, words, code_, said):
        result = run("--as", "platform", *words)
        assert result.exit_code == code_, result.output
        assert said in result.stderr

    def test_certain_devices_are_reserved_changed_and_found_free(self, run):
        def reservation(*words, code=0):
            result = run("--as", "platform", "reservation", *words)
            assert result.exit_code == code, result.output
            return result.stdout + result.stderr

        device = json.loads(run("devices", "-o", "json").stdout)[0]
        id, kind = device["id"], device["kind"]
        # what is guaranteed to a tenant cannot be reserved
        run("--as", "platform", "tenant", "gamma", "--guarantee", f"{kind}=none")
        times = ("--from", "2027-03-01T08:00", "--to", "2027-03-01T10:00")
        made = reservation("add", "one", "--for", "gamma", "--device-id", id, *times, "-o", "json")
        assert json.loads(made)["device_ids"] == [id]
        again = ("add", "two", "--for", "beta", "--device-id", id, *times)
        assert "only 0 can be reserved" in reservation(*again, code=4)
        free = json.loads(reservation("free", "--device-id", id, "-o", "json"))
        assert (free["kind"], free["devices"]) == (kind, 1)
        assert "such as cuda=8" in reservation("free", code=2)
        none = json.loads(reservation("free", f"{kind}=1", "--label", "warp", "-o", "json"))
        assert none["windows"] == []
        told = reservation("change", "one", "--devices", f"{kind}=1", "--label", "warp", code=4)
        assert "with label warp only 0" in told
        assert f"{kind}=1" in reservation("change", "one", "--devices", f"{kind}=1")
        assert id not in reservation("show", "one")
        reservation("remove", "one")

    def test_network_of_a_tenant_and_of_a_script(self, run, code, tmp_path):
        def tenant(*words):
            result = run("--as", "platform", "tenant", "alpha", *words, "-o", "json")
            assert result.exit_code == 0, result.output
            return json.loads(result.stdout)["network"]

        words = ("--network", "HuggingFace.co:443", "--network", "*.hf.co:443")
        assert tenant(*words) == ["huggingface.co:443", "*.hf.co:443"]
        shown = run("--as", "platform", "tenant", "alpha").stdout
        assert "huggingface.co:443, *.hf.co:443" in shown
        wish = ("--network", "pypi.org:443", "--", "python", "train.py")
        refused = run("submit", code, "--check", *wish)
        assert refused.exit_code == 2
        told = "".join(refused.stderr.split())
        assert "alphamayreachhuggingface.co:443,*.hf.co:443" in told
        assert tenant("--network", "none") == []
        assert tenant("--network", "inherit") is None
        wrong = run("--as", "platform", "tenant", "alpha", "--network", "huggingface.co")
        assert wrong.exit_code == 2
        assert "/network/0" in wrong.stderr

    def test_mounts_are_added_granted_listed_and_removed(self, run, code):
        def listed(*who):
            return json.loads(run(*who, "mount", "list", "-o", "json").stdout)

        platform = ("--as", "platform")
        added = ("pics", "/data/pics", "--read-only", "--tenants", "beta")
        assert run(*platform, "mount", "add", *added).exit_code == 0
        assert listed() == []
        granted = run(*platform, "mount", "grant", "pics", "--tenants", "alpha,beta").stdout
        assert "/data/pics" in granted
        assert "alpha, beta" in granted
        [mine] = listed()
        assert (mine["name"], mine["path"], mine["hosts"]) == ("pics", None, 0)
        assert "yours" in run("mount", "list").stdout

        wish = ("--mount", "/data=pics", "--", "python", "train.py")
        refused = run("submit", code, "--check", *wish)
        assert "offers mount:pics" in " ".join(refused.stderr.split())
        wrong = run("submit", code, "--check", "--mount", "/data", "--", "python", "train.py")
        assert wrong.exit_code == 2
        assert "TARGET=MOUNT" in wrong.stderr
        assert run(*platform, "mount", "grant", "pics", "--tenants", "*").exit_code == 0
        assert "all" in run(*platform, "mount", "list").stdout
        assert run(*platform, "mount", "remove", "pics").exit_code == 0
        assert listed(*platform) == []

    def test_container_images_are_added_granted_listed_and_removed(self, run, code):
        platform = ("--as", "platform")
        added = run(*platform, "image", "add", "debian", "/images/debian", "--tenants", "beta")
        assert "/images/debian" in added.stdout
        assert "`roundhouse image list` counts" in added.stderr
        assert "No container images" in run("image", "list").stdout
        assert run(*platform, "image", "grant", "debian", "--tenants", "alpha").exit_code == 0
        assert "yours" in run("image", "list").stdout
        assert "debian" not in run("mount", "list").stdout
        wish = ("--image", "debian", "--", "true")
        refused = run("submit", code, "--check", *wish)
        assert "offers image:debian" in " ".join(refused.stderr.split())
        assert run(*platform, "image", "remove", "debian").exit_code == 0
        assert "No container images" in run(*platform, "image", "list").stdout

    def test_folder_is_put_and_got_again(self, run, tmp_path):
        (tmp_path / "tree" / "deep").mkdir(parents=True)
        (tmp_path / "tree" / "deep" / "a.txt").write_text("alpha")
        put = run("datablock", "put", "tree", str(tmp_path / "tree"))
        assert put.exit_code == 0, put.stderr
        assert "1 file" in put.stdout
        assert "5 of 5 bytes were sent" in put.stderr
        assert "0 of 5 bytes" in run("datablock", "put", "tree", str(tmp_path / "tree")).stderr
        got = run("datablock", "get", "tree", str(tmp_path / "back"))
        assert "tree@1, 5 bytes were fetched" in " ".join(got.stderr.split())
        assert (tmp_path / "back" / "deep" / "a.txt").read_text() == "alpha"
        assert "1 file" in run("datablocks").stdout
        missing = run("datablock", "put", "tree", str(tmp_path / "nothing"))
        assert missing.exit_code == 2

    def test_use_of_the_network_is_shown(self, run, service, submitted):
        task = service.task_of(submitted)
        wish = """descriptor || '{"network": {"allow": ["huggingface.co:443"]}}'"""
        service.sql(f"update tasks set descriptor = {wish} where id = %s", task)
        shown = run("show", task).stdout
        assert "huggingface.co:443: 0 connections, 0 B sent, 0 B received" in shown

    def test_all_work_of_a_tenant_is_paused_resumed_and_cancelled(self, run, submitted):
        for action in ("pause", "resume", "cancel"):
            words = ("--as", "alpha:tenant_admin", "tenant", "alpha", "--work", action)
            first, again = (run(*words) for _ in range(2))
            assert first.exit_code == again.exit_code == 0, first.output
            assert f"alpha: {action} requested for " in first.stdout
            assert again.stdout == f"alpha: no request to {action}.\n"
        assert run("tenant", "alpha", "--work", "pause").exit_code == 3

    def test_only_an_admin_changes_a_tenant(self, run):
        result = run("tenant", "alpha", "--weight", "9")
        assert result.exit_code == 3, result.output
        assert run("tenant", "alpha").exit_code == 0

    def test_weights_of_users_can_be_set(self, run):
        words = ("--as", "alpha:tenant_admin", "user", "member")
        assert json.loads(run(*words, "-o", "json").stdout)["weight"] == 1.0
        changed = run(*words, "--weight", "2.5")
        assert changed.exit_code == 0, changed.output
        assert "2.5" in changed.stdout
        assert json.loads(run(*words, "-o", "json").stdout)["weight"] == 2.5

    def test_full_queue_is_refused_with_advice(self, run, submitted, code):
        run("--as", "platform", "tenant", "alpha", "--max-queued", "0")
        try:
            result = run("submit", "--job", "train:Train", "--bundle", code)
            assert result.exit_code == 4, result.output
            assert "roundhouse ps" in result.stderr
        finally:
            run("--as", "platform", "tenant", "alpha", "--max-queued", "none")


# --- what if --------------------------------------------------------------------------------------


class TestSimulate:
    def test_history_is_replayed_by_the_service_and_compared_side_by_side(
        self, run, service, submitted, tmp_path
    ):
        service.ends(submitted, "done", total_held_us=90_000_000)
        service.sql("update tasks set island = 'local', ended_at = now() where request_id = %s",
                    submitted)  # fmt: skip
        words = ("--as", "platform", "simulate", "history", "-d", "cpu=3", "--weights", "alpha=2")
        value = json.loads(run(*words, "-o", "json").stdout)
        as_is, what_if = value["runs"]
        assert value["jobs"] >= 1
        assert (as_is["devices"], what_if["devices"]) == ({"cpu": 1}, {"cpu": 3})
        assert {t["tenant"]: t["weight"] for t in what_if["tenants"]} == {"alpha": 2.0}
        drawn = run(*words, "--plot", tmp_path / "history.svg")
        assert "what if, by tenant" in drawn.stdout
        assert (tmp_path / "history.svg").read_text().startswith("<svg ")

    def test_only_a_platform_admin_may_replay_history(self, run):
        assert run("simulate", "history").exit_code == 3


# --- checkpoints ---


class TestCheckpoints:
    @pytest.fixture
    def saved(self, service: Service, submitted: str, tmp_path: Path) -> tuple[str, str]:
        """(task, checkpoint): two tensors over one storage, at step 12."""
        task_id = service.task_of(submitted)
        [(tenant,)] = service.sql("select tenant_id from tasks where id = %s", task_id)
        slab, signer = Slab([24]), Signer.at(tmp_path / "key")
        slab.fill(0, bytes(range(24)))
        table = {"model.w": [0, "uint8", [2, 12], [12, 1], 0], "tail": [0, "int16", [2], [3], 8]}
        written = checkpoint.write(
            slab.fd, slab.layout, About(tenant=tenant, task=task_id, epoch=1, step=12),
            tensors=table, store=Store.at(service.home / "store"), signer=signer, known=Known(),
        )  # fmt: skip
        id = f"ckp_{task_id[4:]}"
        service.sql(
            "insert into checkpoints (id, task_id, tenant_id, epoch, step, sha256, size_bytes,"
            " took_us, host, key) values (%s, %s, %s, 1, 12, %s, 3024, 1, 'local', %s)",
            *(id, task_id, tenant, written.sha256, signer.public),
        )
        return task_id, id

    def test_checkpoints_are_listed_and_exported(self, run, service, saved, tmp_path):
        task_id, id = saved
        request = json.loads(run("show", task_id, "-o", "json").stdout)["request_id"]
        for given in (task_id, request, f"{request[-8:]}/train"):
            listed = run("checkpoints", given)
            assert listed.exit_code == 0, listed.output
            assert (id in listed.stdout, "kept" in listed.stdout) == (True, True)
            assert "0.0625" not in listed.stdout
        service.sql("update checkpoints set best = true, ranked_value = 0.0625 where id = %s", id)
        [row] = [line for line in run("checkpoints", task_id).stdout.splitlines() if id in line]
        assert ("best" in row, "0.0625" in row) == (True, True)
        service.sql(
            "update tasks set descriptor = jsonb_set(descriptor, '{checkpoint,best}', %s)"
            " where id = %s",
            *('{"metric": "loss", "goal": "min", "keep": 1}', task_id),
        )
        for given in (f"{request[-8:]}@best", f"{request[-8:]}/train@best", f"{task_id}@best"):
            best = run("export", given, "best.safetensors")
            assert best.exit_code == 0, best.output
        assert run("pin", f"{request}@best").stdout.count(id) == 1
        service.sql("update checkpoints set best = false where id = %s", id)
        assert "has a number as its loss yet" in run("export", f"{request}@best", "no").stderr
        assert run("export", request[-8:], "newest.safetensors").exit_code == 0
        assert (tmp_path / "newest.safetensors").exists()
        exported = run("export", id, "model.safetensors")
        assert exported.exit_code == 0, exported.output
        with safe_open(tmp_path / "model.safetensors", "np") as file:
            assert sorted(file.keys()) == ["model.w", "tail"]
            assert file.get_tensor("model.w").tolist() == [[*range(12)], [*range(12, 24)]]
            # Elements 8 and 11 of two bytes each, the low one first.
            assert file.get_tensor("tail").tolist() == [16 + 17 * 256, 22 + 23 * 256]

    def test_newest_checkpoint_of_a_task_is_pinned_until_it_is_unpinned(self, run, saved):
        task_id, id = saved
        for verb, state in (("pin", "pinned"), ("unpin", "kept")):
            done = run(verb, task_id)
            assert done.exit_code == 0, done.output
            assert (id in done.stdout, state in done.stdout) == (True, True)
            assert state in run("checkpoints", task_id).stdout

    def test_one_tensor_is_exported_by_name_and_an_unknown_one_refused(self, run, saved, tmp_path):
        _, id = saved
        assert run("export", id, "one.safetensors", "--name", "tail").exit_code == 0
        with safe_open(tmp_path / "one.safetensors", "np") as file:
            assert list(file.keys()) == ["tail"]
        refused = run("export", id, "none.safetensors", "--name", "head")
        assert refused.exit_code == 2
        assert "head: the checkpoint has no tensor of this name" in refused.stderr
        assert not (tmp_path / "none.safetensors").exists()

    def test_checkpoints_of_another_tenant_are_not_found(self, run, saved):
        assert run("--as", "beta", "checkpoints", saved[0]).exit_code == 5
        assert run("--as", "beta", "export", saved[1], "x").exit_code == 5


class TestKeys:
    def test_service_account_gets_a_key_that_is_rotated_and_revoked(self, run):
        def said(*words):
            result = run("--as", "platform", *words, "-o", "json")
            assert result.exit_code == 0, result.output
            return json.loads(result.stdout)

        [account] = said("account", "add", "ci", "--tenant", "gamma")
        assert account["service"]
        assert account in said("account", "list")
        words = ("--name", "pipeline", "--scope", "work:write", "--expires", "2099-01-01T00:00:00Z")
        made = said("key", "add", "ci", *words)
        assert (made["user_id"], made["scopes"]) == (account["id"], ["work:write"])
        rotated = said("key", "rotate", made["id"], "--overlap-s", "60")
        assert rotated["key"] != made["key"]
        assert run("--as", "platform", "key", "revoke", rotated["id"]).exit_code == 0
        shown = run("--as", "platform", "key", "list").stdout
        for word in ("work:write", "revoked", "until 20", "all"):
            assert word in shown
        assert said("key", "revoke-all", "ci") == {"revoked": 1}
        again = run("--as", "platform", "key", "revoke-all", "ci")
        assert "no other key was valid" in again.stdout

    def test_key_has_the_name_of_its_user_by_default(self, run):
        words = ("--as", "platform", "user", "ada", "--new", "--tenant", "gamma")
        assert run(*words).exit_code == 0
        made = json.loads(run("--as", "platform", "key", "add", "ada", "-o", "json").stdout)
        assert made["name"] == "ada"
        assert "ada" in run("--as", "platform", "key", "list").stdout

    def test_every_user_may_rotate_own_keys(self, run):
        me = json.loads(run("--as", "beta", "whoami", "-o", "json").stdout)
        result = run("--as", "beta", "key", "rotate", me["key_id"])
        assert result.exit_code == 0, result.output
        assert "rh_" in result.stdout


class TestWebhooks:
    @pytest.fixture
    def admin(self, run):
        def said(*words):
            result = run("--as", "platform", "webhook", *words, "-o", "json")
            assert result.exit_code == 0, result.output
            return json.loads(result.stdout)

        return said

    def test_webhook_is_created_tested_and_deleted(self, run, admin):
        made = admin("add", "https://hooks.example.org/", "--on", "failed")
        assert made["events"] == ["request.failed"]
        rotated = admin("rotate", made["id"], "--overlap-s", "60")
        assert rotated["secret"].startswith("whsec_")
        assert rotated["secret"] != made["secret"]
        [sent] = admin("test", made["id"])
        assert admin("deliveries", made["id"]) == [sent]
        assert admin("redeliver", sent["id"])[0]["id"] == sent["id"]
        shown = run("--as", "platform", "webhook", "list").stdout
        assert made["id"] in shown.replace("\n", "")
        assert run("--as", "platform", "webhook", "delete", made["id"]).exit_code == 0
        assert made["id"] not in [each["id"] for each in admin("list")]

    def test_user_without_the_right_to_webhooks_is_refused(self, run):
        result = run("webhook", "add", "https://hooks.example.org/")
        assert result.exit_code == 3
        assert "tenant_admin" in result.stderr


class TestChannels:
    def test_channel_is_added_named_and_removed(self, run):
        words = ("--as", "platform", "channel")
        address = "https://hooks.example.org/services/S3CR3T"
        made = run(
            *words, "add", "ml-alerts", "--kind", "slack", "--tenant", "alpha", input=address
        )
        assert made.exit_code == 0, made.output
        listed = json.loads(run("channel", "list", "-o", "json").stdout)
        assert [each["name"] for each in listed] == ["ml-alerts"]
        assert "ml-alerts" in (table := run("channel", "list").stdout)
        [sent] = json.loads(run(*words, "test", "ml-alerts", "-o", "json").stdout)
        assert sent["url"] == "channel:ml-alerts"
        assert sent["id"] in run(*words, "deliveries", "ml-alerts", "-o", "json").stdout
        assert "S3CR3T" not in made.output + table + json.dumps(listed)
        usual = run("channel", "usual", "ml-alerts:failed,preempted", "-o", "json")
        wish = {"to": "ml-alerts", "on": ["failed", "preempted"]}
        assert json.loads(usual.stdout) == {"notify": [wish]}
        assert "failed, preempted" in run("channel", "usual").stdout
        assert json.loads(run("channel", "usual", "--none", "-o", "json").stdout) == {"notify": []}
        assert run("channel", "remove", "ml-alerts").exit_code == 3
        assert run(*words, "remove", "ml-alerts").exit_code == 0
        assert run(*words, "remove", "ml-alerts").exit_code == 2

    def test_submit_names_channels(self, run, code, monkeypatch):
        (code / "main.py").write_text("print('hello')\n")
        sent: list[dict[str, Any]] = []
        monkeypatch.setattr(Client, "submit", lambda self, body, key: sent.append(body) or body)
        given = ("--notify", "a", "--notify", "b:failed,done")
        assert run("submit", code / "main.py", "-o", "json", *given).exit_code == 0
        assert sent[0]["notify"] == [{"to": "a"}, {"to": "b", "on": ["failed", "done"]}]


class TestSecrets:
    def test_secret_is_set_from_standard_input_listed_and_removed(self, run):
        result = run("secret", "set", "HF_TOKEN", input="hf_correct-horse\n")
        assert result.exit_code == 0, result.output
        assert "set for you" in result.stdout
        listed = json.loads(run("secret", "list", "-o", "json").stdout)
        assert [each["name"] for each in listed] == ["HF_TOKEN"]
        assert "HF_TOKEN" in (table := run("secret", "list").stdout)
        assert "hf_correct-horse" not in result.output + table + json.dumps(listed)
        assert run("secret", "remove", "HF_TOKEN").exit_code == 0
        assert run("secret", "remove", "HF_TOKEN").exit_code == 5

    def test_secret_of_a_tenant_is_for_administrators(self, run):
        assert run("secret", "set", "WIDE", "--tenant-wide", input="a value").exit_code == 3
        words = ("--as", "platform", "secret")
        wide = ("WIDE", "--tenant-wide", "--tenant", "alpha")
        result = run(*words, "set", *wide, input="a value")
        assert result.exit_code == 0, result.output
        assert "WIDE" in run("secret", "list").stdout
        assert "WIDE" not in run("--as", "beta", "secret", "list").stdout
        assert run(*words, "remove", *wide).exit_code == 0

    def test_value_that_could_not_be_kept_out_of_logs_is_refused(self, run):
        result = run("secret", "set", "HF_TOKEN", input="abc\n")
        assert result.exit_code == 2
        assert "at least 6 bytes" in " ".join(result.stderr.split())


# --- datablocks ---


class TestOutputs:
    def test_outputs_are_listed_and_files_downloaded(self, run, service, submitted):
        assert "has no outputs or artifacts" in run("outputs", submitted).stderr
        nothing = run("outputs", submitted, "--to", "nothing")
        assert (nothing.exit_code, nothing.stdout) == (5, "")
        assert not Path("nothing").exists()
        sha256, size = Store.at(service.home / "store").put([os.urandom(3000)])
        kept = {"sha256": sha256, "size_bytes": size}
        named = {**kept, "format": "npy", "datablock": "m@1"}
        given = {"artifacts.zip": kept, "model": named, "state": kept}
        service.ends(submitted, "done", outputs=json.dumps(given))
        listed = run("outputs", submitted)
        assert listed.exit_code == 0, listed.output
        assert "publish the output to get a file" in listed.stdout
        for id in (submitted, service.task_of(submitted)):
            told = run("outputs", id, "--to", "got", "-o", "json")
            assert [each["file"] for each in json.loads(told.stdout)] == [
                *("train-artifacts.zip", "train-model.npy", None)
            ]
        assert {file.name for file in Path("got").iterdir()} == {
            *("train-artifacts.zip", "train-model.npy")
        }
        assert hashlib.sha256(Path("got/train-model.npy").read_bytes()).hexdigest() == sha256
        Path("taken").touch()
        assert run("outputs", submitted, "--to", "taken").exit_code == 2

    def test_kept_files_are_listed_and_downloaded_one_by_one(self, run, service, submitted):
        packed, large = io.BytesIO(), os.urandom(3_000_000)
        with zipfile.ZipFile(packed, "w") as zip:
            zip.writestr("out/large.bin", large)
            zip.writestr("out/answer.txt", b"42")
            zip.writestr("../evil.txt", b"no")
            zip.writestr("history.csv", b"step,loss", zipfile.ZIP_DEFLATED)
            tool = zipfile.ZipInfo("out/tool.sh")
            tool.external_attr = 0o104755 << 16
            zip.writestr(tool, b"#!/bin/sh")
        sha256, size = Store.at(service.home / "store").put([packed.getvalue()])
        given = {"artifacts.zip": {"sha256": sha256, "size_bytes": size}}
        service.ends(submitted, "failed", outputs=json.dumps(given))
        listed = json.loads(run("outputs", submitted, "--files", "-o", "json").stdout)
        assert [(each["file"], each["size_bytes"]) for each in listed] == [
            ("out/large.bin", len(large)),
            ("out/answer.txt", 2),
            ("../evil.txt", 2),
            ("history.csv", 9),
            ("out/tool.sh", 9),
        ]
        with mock.patch.object(Client, "read_part", autospec=True, side_effect=Client.read_part):
            told = run("outputs", submitted, "out/answer.txt", "*.csv", "--to", "got")
            asked = sum(each.args[3] - each.args[2] for each in Client.read_part.mock_calls)
        assert told.exit_code == 0, told.output
        assert {str(each) for each in Path("got").rglob("*") if each.is_file()} == {
            *("got/out/answer.txt", "got/history.csv")
        }
        assert Path("got/history.csv").read_bytes() == b"step,loss"
        assert told.stderr.splitlines() == [
            "got/out/answer.txt: 2 bytes", "got/history.csv: 9 bytes"
        ]  # fmt: skip
        assert asked < size, "the whole zip was transferred"
        assert run("outputs", submitted, "out", "--to", "all").exit_code == 0
        assert Path("all/out/large.bin").read_bytes() == large
        assert Path("all/out/tool.sh").stat().st_mode & 0o7111 == 0o111
        assert not Path("all/out/answer.txt").stat().st_mode & 0o111
        assert run("outputs", submitted, "../evil.txt", "--to", "in").exit_code == 0
        assert Path("in/evil.txt").exists()
        assert not Path("evil.txt").exists()
        nothing = run("outputs", submitted, "nothing.txt")
        assert (nothing.exit_code, nothing.stdout) == (5, "")


class TestDatablocks:
    @pytest.fixture
    def file(self, tmp_path):
        """A file of tensors, another one in each test."""
        path = tmp_path / "corpus.safetensors"
        save_file({"x": numpy.random.default_rng().random(1000)}, path)
        return path

    def test_datablock_is_uploaded_listed_and_downloaded(self, run, file, tmp_path):
        sent = run("cp", file, "datablock:there-and-back")
        assert sent.exit_code == 0, sent.output
        assert "there-and-back@1" in sent.stdout
        size = file.stat().st_size
        assert f"{size} of {size} bytes were sent." in sent.stderr
        again = run("cp", file, "datablock:there-and-back", "-o", "json")
        assert json.loads(again.stdout)["version"] == 1
        assert f"0 of {size} bytes were sent." in again.stderr
        listed = run("datablocks")
        assert "there-and-back@1" in listed.stdout
        assert "x float64[1000]" in listed.stdout
        back = run("cp", "datablock:there-and-back@1", "back")
        assert back.exit_code == 0, back.output
        assert "there-and-back@1" in back.stderr
        assert (tmp_path / "back").read_bytes() == file.read_bytes()

    def test_upload_in_one_piece_gives_the_same_answer(self, service):
        """As curl does, which does not ask before; what is there already is not waited for."""
        body = save({"x": numpy.random.default_rng().random(2 * 10**6)})
        headers = {"Authorization": f"Bearer {service.keys['alpha']['member']}"}
        digest = hashlib.sha256(body).hexdigest()
        with httpx2.Client(base_url=service.url, headers=headers, timeout=60) as client:
            answers = [
                client.put("/v1/datablocks/at-once", params={"sha256": digest}, content=body)
                for _ in range(3)
            ]
        assert [answer.status_code for answer in answers] == [201, 200, 200]
        assert {answer.json()["version"] for answer in answers} == {1}

    def test_versions_of_a_named_datablock_are_listed(self, run, file):
        for _ in range(2):
            save_file({"x": numpy.random.default_rng().random(9)}, file)
            run("cp", file, "datablock:twice")
        assert "twice@1" not in run("datablocks").stdout
        assert "twice@1" in run("datablocks", "twice").stdout
        assert "twice@1" in run("datablocks", "--all").stdout

    def test_upload_continues_after_the_service_was_killed(self, run, file, service, monkeypatch):
        monkeypatch.setattr("app.cli.client.PART_BYTES", 1000)
        whole, parts = file.stat().st_size, []

        def three(size):
            parts.append(size)
            if len(parts) == 3:
                raise KeyboardInterrupt

        keys = service.keys["alpha"]["member"]
        with Client(service.url, keys) as client, pytest.raises(KeyboardInterrupt):
            client.put_datablock("broken", file, sent=three)
        service.kill()
        service.start()
        sent = run("cp", file, "datablock:broken")
        assert sent.exit_code == 0, sent.output
        assert f"{whole - 3000} of {whole} bytes were sent." in sent.stderr
        run("cp", "datablock:broken", "back")
        assert Path("back").read_bytes() == file.read_bytes()

    def test_download_continues_an_incomplete_file(self, run, file, tmp_path):
        run("cp", file, "datablock:half")
        body = file.read_bytes()
        draft = tmp_path / f".back.{hashlib.sha256(body).hexdigest()[:16]}.part"
        draft.write_bytes(body[:5000])
        assert run("cp", "datablock:half", "back").exit_code == 0
        assert (tmp_path / "back").read_bytes() == body
        assert not draft.exists()
        draft.write_bytes(b"damage" + body[6:5000])
        damaged = run("cp", "datablock:half", "other")
        assert damaged.exit_code == 0  # it is kept for the file of that name only
        draft.rename(tmp_path / draft.name.replace("back", "third"))
        damaged = run("cp", "datablock:half", "third")
        assert damaged.exit_code == 6
        assert "hash to" in damaged.stderr
        assert not (tmp_path / "third").exists()
        assert run("cp", "datablock:half", "third").exit_code == 0

    @pytest.mark.parametrize(
        ("words", "code", "told"),
        [
            (("file", "other"), 2, "one of the two arguments must be datablock:NAME"),
            (("datablock:a", "datablock:b"), 2, "one of the two arguments must be datablock:NAME"),
            (("nowhere", "datablock:a"), 2, "cannot read nowhere"),
            (("datablock:nothing", "x"), 5, "no datablock with id nothing"),
            (("cli.txt", "datablock:a"), 2, "must be .safetensors or .npy"),
        ],
    )
    def test_fault_of_an_upload_is_reported(self, words, code, told, run, tmp_path):
        (tmp_path / "cli.txt").write_text("hello, this is no tensor at all")
        result = run("cp", *words)
        assert result.exit_code == code, result.output
        assert told in result.stderr

    def test_datablocks_of_another_tenant_are_not_found(self, run, file):
        run("cp", file, "datablock:mine")
        assert run("--as", "beta", "cp", "datablock:mine", "x").exit_code == 5
        assert "mine@1" not in run("--as", "beta", "datablocks", "--all").stdout


# --- for models ---

LOOKING = {
    *("list_requests", "show_request", "show_descriptor", "why", "read_logs"),
    *("list_devices", "show_shares", "check"),
}
ACTING = {"submit", "pause", "resume", "cancel"}


class TestModels:
    """`roundhouse mcp`, used by the protocol's own client, over stdin and stdout."""

    @pytest.fixture
    def talk(self, service):
        """Start `roundhouse mcp` as a member of alpha, and call its tools one after the other."""

        def talk(*calls: tuple[str, Any], write: bool = False) -> tuple[set[str], list[Any]]:
            words = ["-m", "app.cli.main", "--as", "alpha", "mcp", *(["--write"] if write else [])]
            env = {**service.env, "ROUNDHOUSE_URL": service.url}
            how = StdioServerParameters(command=sys.executable, args=words, env=env)

            async def all_of_them() -> tuple[set[str], list[Any]]:
                async with ModelClient(how) as client:
                    listed = {tool.name for tool in (await client.list_tools()).tools}
                    return listed, [await client.call_tool(name, given) for name, given in calls]

            return asyncio.run(all_of_them())

        return talk

    def test_a_model_looks_at_requests_and_can_change_nothing(self, talk, run, code, service):
        (code / "train.py").write_text(JOB)
        made = json.loads(
            run(
                "submit", "--job", "train:Train", "--bundle", code, "--name", "seen", "-o", "json"
            ).stdout
        )
        service.waits(made["id"])
        service.prints(made["id"], "first line", "second line")
        listed, (found, shown, why, lines, unknown, refused) = talk(
            ("list_requests", {"name": "seen"}),
            ("show_request", {"request": "seen"}),
            ("why", {"request": "seen"}),
            ("read_logs", {"request": "seen", "grep": "second"}),
            ("show_request", {"request": "nothing-like-it"}),
            ("cancel", {"request": "seen"}),
        )
        assert listed == LOOKING
        assert made["id"] in _told(found)
        assert json.loads(_told(shown))["tasks"][0]["name"] == "train"
        assert '"reasons"' in _told(why)
        assert "train: second line" in _told(lines)
        assert "first line" not in _told(lines)
        assert unknown.is_error
        assert "no request has the name 'nothing-like-it'" in _told(unknown)
        assert refused.is_error
        assert service.sql("select state from requests where id = %s", made["id"]) == [("queued",)]

    def test_a_model_that_may_write_submits_again_and_cancels(self, talk, run, code, service):
        (code / "train.py").write_text(JOB)
        words = ("submit", "--job", "train:Train", "--bundle", code, "--name", "one", "-o", "json")
        assert run(*words).exit_code == 0
        listed, (descriptor,) = talk(("show_descriptor", {"request": "one"}), write=True)
        assert listed == LOOKING | ACTING
        again = {**json.loads(_told(descriptor)), "name": "two"}
        wrong = {**again, "nam": "x"}
        _, (bad, made, paused, gone) = talk(
            ("submit", {"descriptor": wrong}),
            ("submit", {"descriptor": again}),
            ("pause", {"request": "two"}),
            ("cancel", {"request": "two"}),
            write=True,
        )
        assert bad.is_error
        assert "/nam" in _told(bad)
        assert json.loads(_told(made))["name"] == "two"
        assert json.loads(_told(paused))["tasks"][0]["hold"] == "user"
        assert json.loads(_told(gone))["tasks"][0]["cancel_asked"]


def _told(answer: Any) -> str:
    return "\n".join(each.text for each in answer.content)
