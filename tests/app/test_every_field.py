"""Every field of a descriptor reaches the row, the launch, the API, the page and the command.

Each reading compares all fields with what was posted; a field that a reading leaves out is named
here with the reason.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from app.api import descriptor_schema
from app.api.access import auth
from app.cli import client as cli_client
from app.cli import main
from app.core.model import descriptor as descriptors
from app.core.model.device_choice import DeviceChoice, choice_in
from app.core.model.protocol import messages
from app.core.model.provisions.environment import EnvironmentFile, TaskEnvironment
from app.db.models import (
    Checkpoint,
    Datablock,
    Device,
    Environment,
    Graph,
    Host,
    Mount,
    Request,
    Reservation,
    ReservationWindow,
    Task,
    Tenant,
)
from app.db.transactions import transaction
from app.identity import secret_store
from app.intake import environments
from app.scheduling import launch_order
from tests.app.conftest import Speaker, World, sha256, zipped_as
from tests.app.every_field import (
    BEGUN_PARAMS,
    CHECKPOINT,
    EARLIER,
    FACTS,
    FIELDS,
    FILES,
    GRAPH,
    GRAPH_FIELDS,
    KIND,
    LOCKED,
    OTHER_PYTHON,
    PACKAGES,
    REQUEST,
    TASK_FIELDS,
    Place,
    at,
    given,
    has_named_fields,
    resolved,
)

JSON = dict[str, Any]
BUNDLE = zipped_as(FILES)
DIGEST = f"sha256:{sha256(BUNDLE)}"
STEP = 23  # of the checkpoint from which a task begins

#: Columns that tell nothing of the descriptor: who sent it, and what has happened since.
OTHER_REQUEST_COLUMNS = {
    "id", "tenant_id", "user_id", "state", "submitted_at", "ended_at", "keep", "delete_asked_at",
}  # fmt: skip
OTHER_TASK_COLUMNS = {
    "abroad", "assigned", "attempts", "avoids", "away", "bound_because", "cancel_asked_at",
    "capabilities",
    "cause", "cost_milli", "detail", "dropped", "ended_at", "epoch", "event_seq",
    "first_started_at", "gang_id", "goes_on_with", "good_for", "guest_held_us", "held_us", "id",
    "again_asked", "behind",
    "image_on", "island", "launched_at", "lost_steps", "lot_id", "lot_index",
    "lot_values", "message", "metrics", "move_asked_at",
    "move_to", "moving", "order_seq", "outputs", "passed", "pauses", "peak_device_bytes",
    "peak_host_bytes", "peaks", "prepared_us", "preset", "request_id", "resized_at", "result",
    "reservation_id", "reservation_state",
    "retry_at", "save_asked", "saved", "seat", "shares", "started_at", "state", "submitted_at",
    "switch_us", "tenant_id", "total_held_us", "txid", "unheard_us", "unstored", "user_id",
    "waited_us", "waiting_since",
}  # fmt: skip


OWNER = {"tenant_id": "ten_red", "user_id": "usr_red.member"}


@dataclass(frozen=True, slots=True)
class Posted:
    """The request with every field, its answer, and its rows."""

    body: JSON
    answer: JSON
    request: Request
    tasks: dict[str, Task]

    def fields(self) -> Iterator[tuple[str, Place, Any]]:
        """Yield each field that a task sets: the name of the task, the field, the value."""
        for task in self.body["tasks"]:
            for path, value in given(task, TASK_FIELDS):
                yield task["name"], path, value


@pytest.fixture
def able(world: World, session: Session) -> None:
    """Devices can do all that the descriptor asks, and the tenant has all that it names."""
    needs = [f"environment:{environments.PYTHON}", f"python:{OTHER_PYTHON}"]
    facts = {**FACTS, "offers": [*FACTS["offers"], *needs]}
    with transaction() as its:
        its.execute(update(Device).values(facts=facts, kind=KIND))
        its.add(Host(name="g", island="isle"))
        its.flush()
        its.add(
            Device(
                id="g.0",
                host="g",
                island="isle",
                kind=KIND,
                memory_bytes=2**30,
                facts=facts,
                lease_until=func.now() + timedelta(hours=1),
            )
        )
        its.execute(
            update(Tenant)
            .where(Tenant.id.in_(["ten_root", "ten_red"]))
            .values(network=["*.example.org:443"])
        )
        island = its.scalars(select(Device.island)).first()
        window = {
            "begins_at": datetime(2099, 1, 1, tzinfo=UTC),
            "ends_at": datetime(2099, 1, 2, tzinfo=UTC),
        }
        its.add_all(
            [
                Request(id=EARLIER, name="earlier", **OWNER),
                Task(
                    id="tsk_earlier", request_id=EARLIER, ordinal=0, name="a", type="default",
                    kind=KIND, **OWNER,
                ),
                Reservation(
                    id="rsv_1", name="workshop", island=island, tenant_id="ten_red",
                    devices={KIND: 1}, **window,
                ),
                Mount(name="pictures", path="/srv/pictures"),
                Mount(name="debian", path="/srv/debian", sort="image"),
                Datablock(
                    id="dbk_1", tenant_id="ten_red", user_id="usr_red.member", name="corpus",
                    version=1, format="safetensors", sha256="1" * 64, size_bytes=1, tensor_count=1,
                ),
            ]
        )  # fmt: skip
        its.flush()
        its.add(ReservationWindow(reservation_id="rsv_1", **window))
        secret_store.put(its, "ten_red", None, "HF_TOKEN", "hf_x", by="usr_red.member")


@pytest.fixture
def member(as_: Speaker, able: None) -> TestClient:
    """A member of red, who has uploaded the bundle and has a checkpoint of an earlier job."""
    client = as_("red.member")
    assert client.put(f"/v1/bundles/{sha256(BUNDLE)}", content=BUNDLE).status_code == 201
    begun = {"name": "a", "run": {"job": "train:Train"}, "params": BEGUN_PARAMS}
    answer = client.post("/v1/requests", json={"tasks": [_on_kind(begun)], "bundle": DIGEST})
    assert answer.status_code == 202, answer.text
    with transaction() as its:
        its.add(
            Checkpoint(
                id=CHECKPOINT, task_id=answer.json()["tasks"][0]["id"], tenant_id="ten_red",
                epoch=1, step=STEP, sha256="2" * 64, size_bytes=1, took_us=1,
            )
        )  # fmt: skip
    return client


@pytest.fixture
def posted(member: TestClient, session: Session) -> Posted:
    body = {**REQUEST, "bundle": DIGEST}
    answer = member.post("/v1/requests", json=body)
    assert answer.status_code == 202, answer.text
    return _read(session, body, answer.json())


def _read(session: Session, body: JSON, answer: JSON) -> Posted:
    session.expire_all()
    tasks = session.scalars(select(Task).where(Task.request_id == answer["id"]))
    by_name = {task.name: task for task in tasks}
    return Posted(body, answer, session.get_one(Request, answer["id"]), by_name)


def _on_kind(task: JSON) -> JSON:
    return {**task, "devices": {"kind": KIND}}


def test_posts_set_every_field_to_a_value_that_is_not_its_default():
    bodies = [{**REQUEST, "bundle": DIGEST}, PACKAGES, LOCKED]
    known = {path for body in bodies for path, _ in given(body, FIELDS)}
    assert FIELDS - known == set()
    assert GRAPH_FIELDS - {path for path, _ in given(GRAPH, GRAPH_FIELDS)} == set()
    usual = descriptors.parse({"tasks": [{"name": "a", "run": {"command": ["true"]}}]})
    for name in ("tier", "priority", "labels", "notify", "name"):
        assert getattr(usual, name) != REQUEST[name], name
    for task in REQUEST["tasks"]:
        least = {name: task[name] for name in ("name", "run")}
        of_least = {"tasks": [least], "bundle": DIGEST}
        written = descriptors.as_json(descriptors.parse(of_least).tasks[0])
        default = dict(given(written, TASK_FIELDS))
        for path, value in given(task, TASK_FIELDS):
            if path not in (("name",), *(("run", kind) for kind in descriptors.RUNS)):
                assert default.get(path) != value, path


class TestRows:
    def test_row_of_the_request_has_every_field(self, posted: Posted):
        wanted = {
            "name": "every-field",
            "tier": "basic",
            "priority": 7,
            "labels": {"exp": "a1"},
            "descriptor": posted.body,
            "environment_id": None,
        }
        assert set(Request.__table__.columns.keys()) == {*wanted, *OTHER_REQUEST_COLUMNS}
        assert {name: getattr(posted.request, name) for name in wanted} == wanted

    def test_columns_of_a_task_have_the_fields_by_which_islands_decide(self, posted: Posted):
        task = posted.tasks["train"]
        choice = DeviceChoice(
            model="h100",
            compute_capability="8.9",
            labels=("fast", "nvlink"),
            avoid_labels=("spot",),
            needs=("egress", "env", "mount:pictures", "secrets"),
            resources=(
                ("cpus", 1500),
                ("disk", 400_000_000),
                ("memory", 300_000_000),
                ("processes", 50),
            ),
        )
        wanted = {
            "ordinal": 1,
            "name": "train",
            "type": "train",
            "kind": KIND,
            "memory_bytes": 5_000_000,
            "devices_min": 2,
            "devices_max": 5,
            "across_hosts": True,
            "tier": "basic",
            "priority": 7,
            "hold": "user",
            "standing": "waits",
            "not_before": datetime.fromisoformat("2099-01-02T03:04:05+00:00"),
            "retry_max": 4,
            "step": 0,
        }
        decided = {*wanted, "descriptor", "device_choice"}
        assert set(Task.__table__.columns.keys()) == decided | OTHER_TASK_COLUMNS
        assert {name: getattr(task, name) for name in wanted} == wanted
        assert choice_in(task.device_choice) == choice
        others = {name: choice_in(row.device_choice) for name, row in posted.tasks.items()}
        assert others["tool"].fraction_milli == 250
        assert others["even"].hosts == 2
        assert {name: others[name].needs for name in ("make", "tool", "shell", "boxed")} == {
            "make": ("isolation",),
            "tool": ("fraction", "notice"),
            "shell": ("session",),
            "boxed": ("image:debian",),
        }
        assert posted.tasks["again"].step == STEP

    def test_stored_descriptor_has_every_field(self, posted: Posted, session: Session):
        for name, path, value in posted.fields():
            found = at(posted.tasks[name].descriptor, path)
            if path == ("run", "graph"):
                sha256 = found.removeprefix("sha256:")
                found = session.get_one(Graph, ("ten_red", sha256)).body
            assert found == value, (name, path)

    @pytest.mark.parametrize(
        ("body", "sort", "path", "python"),
        [
            (PACKAGES, "requirements", "requirements.txt", OTHER_PYTHON),
            (LOCKED, "lock", "pins.lock", environments.PYTHON),
        ],
        ids=["requirements", "lock"],
    )
    def test_rows_have_the_environment(
        self, member: TestClient, session: Session, body: JSON, sort: str, path: str, python: str
    ):
        answer = member.post("/v1/requests", json={**body, "bundle": DIGEST})
        assert answer.status_code == 202, answer.text
        request = session.get_one(Request, answer.json()["id"])
        row = session.get_one(Environment, request.environment_id)
        assert (row.sort, row.path, row.python) == (sort, path, python)
        [task] = session.scalars(select(Task).where(Task.request_id == request.id))
        own = python != environments.PYTHON
        assert task.descriptor["environment"] == {"python": python, "lock": "", "own_python": own}
        read = descriptors.parse(request.descriptor).environment
        asked = body["environment"].get("python", "")
        assert read == EnvironmentFile(sort=sort, path=path, python=asked)


class TestLaunch:
    def test_device_gets_every_field(self, posted: Posted, session: Session):
        device = session.get_one(Device, "h.0")
        facts = launch_order.look_up(session, [(task, device) for task in posted.tasks.values()])
        sent = {
            name: messages.encode(facts.launch(task, device)) for name, task in posted.tasks.items()
        }
        for name, path, value in posted.fields():
            found = at(sent[name]["spec"], path)
            if path != ("run", "graph"):
                assert found == value, (name, path)
        for name, task in posted.tasks.items():
            launch = messages.decode(json.loads(json.dumps(sent[name])))
            assert launch.spec == task.spec, name
            assert (launch.bundle, launch.tenant) == (sha256(BUNDLE), "ten_red")
        read = {name: messages.decode(body) for name, body in sent.items()}
        assert read["train"].mounts == {"/data": "/srv/pictures"}
        assert read["train"].budget_us == 7_200_000_000
        assert read["train"].inputs["corpus"]["datablock"] == "corpus@1"
        assert read["boxed"].root == "/srv/debian"
        assert [image.step for image in read["again"].images] == [STEP]


#: Fields of a task -> where GET has them.
IN_ANSWER: dict[Place, Place] = {
    ("name",): ("name",),
    ("type",): ("type",),
    ("inputs",): ("inputs",),
    ("publish",): ("publish",),
    ("start", "hold"): ("hold",),
    ("devices", "kind"): ("kind",),
    ("devices", "min"): ("devices_min",),
    ("devices", "max"): ("devices_max",),
    ("devices", "across_hosts"): ("across_hosts",),
    ("devices", "hosts"): ("hosts",),
    ("network", "allow"): ("network", "allow"),
    ("start", "after"): ("needs",),
    ("start", "after_requests"): ("after_requests",),
}
#: `requests:validate` answers with the whole descriptor; GET tells what a task is doing.
NOT_IN_ANSWER = TASK_FIELDS - IN_ANSWER.keys()


class TestApi:
    def test_get_has_the_fields_that_it_shows(self, posted: Posted, member: TestClient):
        shown = member.get(f"/v1/requests/{posted.answer['id']}").json()
        assert {name: shown[name] for name in ("name", "tier", "priority", "labels", "bundle")} == {
            **{name: posted.body[name] for name in ("name", "tier", "priority", "labels")},
            "bundle": DIGEST,
        }
        tasks = {task["name"]: task for task in shown["tasks"]}
        for name, path, value in posted.fields():
            if path in IN_ANSWER:
                assert at(tasks[name], IN_ANSWER[path]) == _answered(path, value), (name, path)
        assert {task["tier"] for task in shown["tasks"]} == {"basic"}
        assert shown == {**posted.answer, "notes": shown["notes"]}
        for id, task in ((task["id"], task) for task in shown["tasks"]):
            assert member.get(f"/v1/tasks/{id}").json() == task

    def test_validation_answers_with_every_field(self, member: TestClient):
        body = {**REQUEST, "bundle": DIGEST}
        answer = member.post("/v1/requests:validate", json=body).json()
        assert (answer["name"], answer["tier"]) == ("every-field", "basic")
        for sent, shown in zip(body["tasks"], answer["tasks"], strict=True):
            for path, value in given(sent, TASK_FIELDS):
                if path != ("run", "graph"):
                    assert at(shown["descriptor"], path) == value, (sent["name"], path)


def _answered(path: Place, value: Any) -> Any:
    """Return the form in which GET has the value of a field."""
    if path == ("start", "hold"):
        return "user"
    if path == ("start", "after"):
        mine = {"task": "make", "request_id": ""}
        after = [{**mine, "task": name, "port": "", "output": ""} for name in value]
        return [*after, {**mine, "port": "tokens", "output": "tokens"}]
    if path == ("start", "after_requests"):
        named = {"request_id": EARLIER, "request": "earlier", "task": "", "outcome": "waits"}
        return [{**named, "on": one["on"], "else": one["else"]} for one in value]
    return value


@pytest.fixture
def run(
    app: FastAPI, member: TestClient, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., JSON]:
    """Run the command as the member, against the service in this process; return its JSON."""
    monkeypatch.setenv("ROUNDHOUSE_URL", "http://testserver")
    monkeypatch.setenv("ROUNDHOUSE_KEY", world.keys["red.member"])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)

    def opened(url: str, **how: Any) -> TestClient:
        return TestClient(app, base_url=url, headers=how["headers"])

    monkeypatch.setattr(cli_client, "_opened", opened)

    def shown(*words: str) -> JSON:
        result = CliRunner().invoke(main.app, [*words, "-o", "json"])
        assert result.exit_code == 0, result.output
        found: JSON = json.loads(result.output)
        return found

    return shown


class TestCommand:
    def test_show_has_all_that_the_api_answers(
        self, run: Callable[..., JSON], posted: Posted, member: TestClient
    ):
        id = posted.answer["id"]
        assert run("show", id) == member.get(f"/v1/requests/{id}").json()
        task = posted.tasks["train"].id
        told = run("show", task)
        assert told.pop("placements") == []
        assert told == member.get(f"/v1/tasks/{task}").json()

    def test_submit_sends_every_field_of_a_file(
        self, run: Callable[..., JSON], member: TestClient, tmp_path: Path
    ):
        body = {**REQUEST, "bundle": DIGEST}
        (tmp_path / "request.yaml").write_text(yaml.safe_dump(body))
        checked = member.post("/v1/requests:validate", json=body).json()
        assert run("submit", "request.yaml", "--check") == checked
        sent = run("submit", "request.yaml")
        assert member.get(f"/v1/requests/{sent['id']}").json() == sent


#: Fields of a task that its page does not show, by the reason.
NOT_ON_PAGE: dict[str, set[Place]] = {
    "its list of reasons says what keeps it from starting": {
        ("start", "after"), ("start", "not_before"), ("inputs",), ("start", "after_requests"),
        ("reservation",),
    },
    "the queue's page shows what a waiting task requests": {
        path for path in TASK_FIELDS if path[0] == "devices"
    },
    "whoever wrote them knows them; they change nothing that the page shows": {
        ("world_size",), ("collectives",), ("islands",), ("checkpoint", "every_s"),
        ("checkpoint", "keep"),
        ("retry", "max"), ("retry", "backoff", "first_s"), ("retry", "backoff", "most_s"),
        ("retry", "rules"), ("max_duration_s",), ("from_checkpoint",), ("isolation",),
        ("notice", "signal"), ("notice", "seconds"), ("session", "idle_s"), ("image",),
        ("mounts",), *(path for path in TASK_FIELDS if path[0] == "resources"),
    },
    "counts, and the table of its members, show what became of a lot": {
        ("array", "count"), ("array", "at_once"), ("array", "max_failures"), ("matrix",),
        ("search", "method"), ("search", "trials"), ("search", "seed"), ("search", "space"),
        ("stop", "metric"), ("stop", "goal"), ("stop", "rungs"), ("stop", "keep"),
    },
    "shown with its checkpoints, when there are some": {
        ("checkpoint", "best", "metric"), ("checkpoint", "best", "goal"),
        ("checkpoint", "best", "keep"),
    },
    "shown as results, when there are some": {("outputs",), ("artifacts",), ("publish",)},
}  # fmt: skip


#: Shown above the tasks where there is only one.
OF_ONLY_TASK: set[Place] = {("params",), ("network", "allow")}


class TestPage:
    def test_page_of_a_request_shows_its_fields(self, app: FastAPI, posted: Posted, world: World):
        page = _page(app, world, f"/ui/requests/{posted.answer['id']}")
        for words in ("every-field", "Priority</dt><dd>7<", "exp</dt><dd>a1<", DIGEST[7:19]):
            assert words in page, words
        hidden = set().union(*NOT_ON_PAGE.values())
        assert hidden <= TASK_FIELDS
        shown = set()
        for name, path, value in posted.fields():
            if path not in hidden | OF_ONLY_TASK | {("run", "graph")}:
                shown.add(path)
                words = _words_on_page(path, value)
                assert all(word in page for word in words), (name, path, words)
        assert posted.tasks["graph"].descriptor["run"]["graph"] in page
        assert shown | hidden | OF_ONLY_TASK | {("run", "graph")} == TASK_FIELDS

    def test_page_of_a_request_with_one_task_shows_its_parameters_and_network(
        self, app: FastAPI, member: TestClient, world: World
    ):
        train = {**REQUEST["tasks"][1], "inputs": {}, "start": {}}
        made = member.post("/v1/requests", json={"tasks": [train], "bundle": DIGEST}).json()
        page = _page(app, world, f"/ui/requests/{made['id']}")
        assert "steps</dt><dd><code>8<" in page
        assert '<dd title="data.example.org:443">' in page

    def test_queue_shows_which_devices_a_task_requests(
        self, app: FastAPI, posted: Posted, world: World, session: Session
    ):
        for task in posted.tasks.values():
            task.state, task.island, task.hold = "waiting", "isle", ""
        session.commit()
        page = _page(app, world, "/ui/queue")
        asked = "2 cuda, 4.8 MiB of model h100 of compute capability 8.9 with label fast and nvlink"
        assert f"{asked} without label spot" in page
        assert "0.25 cuda" in page
        assert "2 cuda on 2 hosts" in page
        assert page.count(", priority 7") == len(posted.tasks)


def _page(app: FastAPI, world: World, address: str) -> str:
    with transaction() as its:
        _, cookie = auth.sign_in(its, world.keys["red.member"])
    answer = TestClient(app, cookies={auth.COOKIE: cookie}).get(address)
    assert answer.status_code == 200, answer.text
    return html.unescape(answer.text)


def _words_on_page(path: Place, value: Any) -> list[str]:
    """Return the texts by which a page shows the value of a field."""
    if path == ("start", "hold"):
        return ["by its tenant"]
    if path == ("run", "command"):
        return [shlex.join(value)]
    if isinstance(value, dict):
        return [f"<code>{name}</code></dt><dd><code>{said}<" for name, said in value.items()]
    if path == ("secrets",):
        return [f'<code>{name}</code></dt><dd class="quiet">a secret<' for name in value]
    return value if isinstance(value, list) else [value]


#: What `as_json` writes beside the fields of the schema: what was computed since.
COMPUTED: dict[Place, set[str]] = {(): {"environment"}, ("run",): {"part", "took_ms", "made_bytes"}}
#: Objects that have some of their fields only: one of several, or those that are limited.
PARTIAL: dict[Place, str] = {("run",): "one kind", ("resources",): "limits that were asked for"}


def _objects(schema: JSON, path: Place = ()) -> Iterator[tuple[Place, set[str]]]:
    """Yield each object of a task's schema, with the names of its fields."""
    found = resolved(schema)
    if has_named_fields(found) and path[-1:] != ("graph",):
        yield path, set(found["properties"])
        for name, inner in found["properties"].items():
            yield from _objects(inner, (*path, name))


class TestWritten:
    def test_written_task_has_the_fields_of_the_schema_at_all_levels(self):
        objects = dict(_objects(descriptor_schema.COMPONENTS["DescriptorTask"]))
        seen: dict[Place, set[str]] = {path: set() for path in objects}
        for task in descriptors.parse({**REQUEST, "bundle": DIGEST}).tasks:
            written = descriptors.as_json(task)
            for path, wanted in objects.items():
                found = _object_at(written, path)
                if found is None:
                    continue
                seen[path] |= found.keys()
                assert found.keys() <= wanted | COMPUTED.get(path, set()), (task.name, path)
                if path not in PARTIAL:
                    assert found.keys() >= wanted, (task.name, path)
        assert all(seen[path] >= wanted for path, wanted in objects.items())

    def test_what_was_computed_is_written_and_read_again(self):
        task = descriptors.parse({**REQUEST, "bundle": DIGEST}).tasks[4]
        run = descriptors.RunSpec(
            kind="graph",
            graph="sha256:" + "4" * 64,
            part={"island": "a"},
            took_ms={"first": 1.5},
            made_bytes={"first.h": 16},
        )
        environment = TaskEnvironment(python=OTHER_PYTHON, lock="3" * 64, own_python=True)
        planned = replace(task, run=run, environment=environment)
        written = descriptors.as_json(planned)
        names = {field.name for field in fields(TaskEnvironment)}
        assert written["environment"].keys() == names
        assert written["run"].keys() == {"graph", *COMPUTED[("run",)]}
        read = descriptors.from_json(json.loads(json.dumps(written)))
        assert (read.run, read.environment) == (run, environment)


def _object_at(written: JSON, path: Place) -> JSON | None:
    """Return the object at the path; None if the task has none there."""
    for name in path:
        written = written.get(name) or {}
    return written or None
