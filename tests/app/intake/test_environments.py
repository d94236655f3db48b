"""A request's environment is checked when it is submitted, and locked before an island gets it."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from app.core.model.device_choice import choice_in
from app.core.model.provisions.package_lock import read_lock
from app.db.models import Bundle, Device, Environment, Request, RequestEvent, Task
from app.db.transactions import transaction
from app.intake import environments, island_assignment
from app.scheduling import housekeeping
from app.settings import settings
from app.storage.store import Store, blob
from tests.app.conftest import JOB, Speaker, World, problem, sha256, zipped_as
from tests.wheels import add_wheel
from workers.control import package_locker
from workers.control.package_locker import PackageLocker, installed

JSON = dict[str, Any]
PYTHON = environments.PYTHON
HASH = "sha256:" + "5" * 64


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of wheels, which is the index of the administrator."""
    folder = tmp_path / "wheels"
    add_wheel(folder, "blocks")
    add_wheel(folder, "towers", requires=["blocks>=1"])
    add_wheel(folder, "modern", requires=["torch>=99"])
    add_wheel(folder, "ordinary", requires=["torch>=2", "numpy"])
    add_wheel(folder, "torch", "99.0")
    monkeypatch.setenv("ROUNDHOUSE_WHEELS", str(folder))
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(tmp_path / "home"))
    settings.cache_clear()
    yield folder
    settings.cache_clear()


@pytest.fixture(autouse=True)
def able_devices(world: World, session: Session) -> None:
    with transaction() as its:
        for device in its.scalars(select(Device)):
            device.facts = {**device.facts, "offers": [f"environment:{PYTHON}", "python:3.13"]}


def upload(client: TestClient, **files: str | bytes) -> str:
    """Upload a bundle with a job and these files; `__` in a name stands for a dot."""
    named = {name.replace("__", "."): body for name, body in files.items()}
    body = zipped_as({"train.py": JOB, **named})
    assert client.put(f"/v1/bundles/{sha256(body)}", content=body).status_code in (200, 201)
    return f"sha256:{sha256(body)}"


def request(bundle: str, environment: JSON, *runs: JSON) -> JSON:
    tasks = [
        {"name": f"t{n}", "run": run} for n, run in enumerate(runs or [{"job": "train:Train"}])
    ]
    return {"tasks": tasks, "bundle": bundle, "environment": environment}


COMMAND: JSON = {"command": ["python", "train.py"]}
REQUIREMENTS: JSON = {"requirements": "requirements.txt"}


def submit(client: TestClient, text: str, *runs: JSON, **more: str) -> JSON:
    """Submit a request with this requirements.txt; returns the answer."""
    bundle = upload(client, requirements__txt=text)
    answer = client.post("/v1/requests", json=request(bundle, {**REQUIREMENTS, **more}, *runs))
    assert answer.status_code == 202, answer.text
    found: JSON = answer.json()
    return found


def locked_now() -> None:
    """Lock all that is to be locked."""
    locker = PackageLocker()
    while not locker.look():
        pass


def the_environment(session: Session) -> Environment:
    session.expire_all()
    return session.scalars(select(Environment).order_by(Environment.id.desc()).limit(1)).one()


def tasks(session: Session, shown: JSON) -> list[Task]:
    session.expire_all()
    query = select(Task).where(Task.request_id == shown["id"]).order_by(Task.ordinal)
    return list(session.scalars(query))


# --- at the submission ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("./blocks", "local path"),
        ("blocks @ https://example.org/blocks.whl", "an address"),
        ("-r /etc/passwd", "write the lines"),
        ("--index-url https://example.org", "administrator sets the index"),
    ],
)
def test_hostile_requirement_is_refused_with_its_line(
    red: TestClient, rows: Any, line: str, told: str
) -> None:
    bundle = upload(red, requirements__txt=f"# mine\ntowers\n{line}\n")
    before = rows()
    answer = red.post("/v1/requests", json=request(bundle, REQUIREMENTS))
    body = problem(answer, 422, "validation-error", "/environment/requirements")
    assert "requirements.txt, line 3: " in body["errors"][0]["detail"]
    assert told in body["errors"][0]["detail"]
    assert rows() == before


def test_lock_without_hashes_is_refused_with_its_line(red: TestClient) -> None:
    text = f"towers==1.0 --hash={HASH}\nblocks==1.0\n"
    bundle = upload(red, requirements__lock=text)
    answer = red.post("/v1/requests", json=request(bundle, {"lock": "requirements.lock"}))
    body = problem(answer, 422, "validation-error", "/environment/lock")
    assert body["errors"][0]["detail"].startswith("requirements.lock, line 2: blocks has no --hash")


def test_file_that_the_bundle_lacks_is_refused_with_those_that_it_has(red: TestClient) -> None:
    bundle = upload(red, requirements__txt="towers\n")
    body = request(bundle, {"requirements": "requirement-requirements.txt"})
    told = problem(red.post("/v1/requests", json=body), 422, "validation-error")
    assert "requirements.txt" in told["errors"][0]["detail"]


def test_other_python_is_for_commands_only(red: TestClient, wheels: Path) -> None:
    bundle = upload(red, requirements__txt="towers\n")
    wanted = {**REQUIREMENTS, "python": "3.13"}
    answer = red.post("/v1/requests", json=request(bundle, wanted))
    problem(answer, 422, "validation-error", "/environment/python")
    answer = red.post("/v1/requests", json=request(bundle, wanted, COMMAND))
    assert answer.status_code == 202


def test_command_with_ranks_has_the_platforms_python(red: TestClient) -> None:
    bundle = upload(red, requirements__txt="towers\n")
    body = request(bundle, {**REQUIREMENTS, "python": "3.13"}, COMMAND)
    body["tasks"][0]["world_size"] = 2
    answer = red.post("/v1/requests", json=body)
    told = problem(answer, 422, "validation-error", "/environment/python")
    assert "commands of one rank" in told["errors"][0]["detail"]


def test_python_that_no_host_has_is_refused(red: TestClient) -> None:
    bundle = upload(red, requirements__txt="towers\n")
    wanted = request(bundle, {**REQUIREMENTS, "python": "3.99"}, COMMAND)
    answer = red.post("/v1/requests", json=wanted)
    body = problem(answer, 422, "unsatisfiable", "/tasks/0/environment")
    assert "python:3.99" in body["errors"][0]["detail"]


def test_deployment_without_environments_refuses_them(red: TestClient, session: Session) -> None:
    with transaction() as its:
        for device in its.scalars(select(Device)):
            device.facts = {"sandbox": "off"}
    bundle = upload(red, requirements__txt="towers\n")
    answer = red.post("/v1/requests", json=request(bundle, REQUIREMENTS))
    body = problem(answer, 422, "unsatisfiable", "/tasks/0/environment")
    assert f"environment:{PYTHON}" in body["errors"][0]["detail"]


def test_environment_belongs_to_the_request(red: TestClient) -> None:
    bundle = upload(red, requirements__txt="towers\n")
    body = request(bundle, REQUIREMENTS)
    body["tasks"][0]["environment"] = {"python": PYTHON, "lock": "5" * 64}
    told = problem(red.post("/v1/requests", json=body), 422, "validation-error")
    assert told["errors"][0]["pointer"] == "/tasks/0/environment"
    assert "beside tasks" in told["errors"][0]["detail"]


def test_bundle_of_before_environments_is_looked_through_now(
    red: TestClient, session: Session
) -> None:
    bundle = upload(red, requirements__txt="towers\n")
    session.execute(func.pg_sleep(0).select())
    with transaction() as its:
        its.execute(update(Bundle).values(package_files=None))
    answer = red.post("/v1/requests", json=request(bundle, REQUIREMENTS))
    assert answer.status_code == 202, answer.text


# --- the lock -----------------------------------------------------------------------------------


def test_tasks_wait_for_the_lock_and_get_it(
    red: TestClient, session: Session, wheels: Path
) -> None:
    shown = submit(red, "towers\n", {"job": "train:Train"}, COMMAND)
    island_assignment.assign_new(session)
    session.commit()
    assert [task.island for task in tasks(session, shown)] == [None, None]
    (reason,) = red.get(f"/v1/tasks/{shown['tasks'][0]['id']}/explain").json()["reasons"]
    assert reason["code"] == "ENVIRONMENT_PENDING"
    locked_now()
    row = the_environment(session)
    assert (row.state, row.packages) == ("locked", [["blocks", "1.0"], ["towers", "1.0"]])
    assert [task.spec.environment.lock for task in tasks(session, shown) if task.spec.environment]
    with Store.at(settings().store_address).open(row.lock_sha256 or "") as file:
        lock = read_lock(file.read().decode())
    assert lock.over == installed()
    name = blob(row.lock_sha256 or "")
    assert housekeeping.named(session, [name]) == {name}  # so the store keeps it
    island_assignment.assign_new(session)
    session.commit()
    assert [task.island for task in tasks(session, shown)] == ["isle", "isle"]


def test_refresh_has_the_next_request_locked_anew(
    as_: Speaker, red: TestClient, session: Session, wheels: Path
) -> None:
    before = submit(red, "towers\n")
    locked_now()
    add_wheel(wheels, "towers", "2.0", requires=["blocks>=1"])
    again = submit(red, "towers\n")
    env, old = the_environment(session).id, the_environment(session).lock_sha256
    assert locks(session, before) == locks(session, again) == [old]

    answer = as_("red.other").post(f"/v1/environments/{env}/refresh")
    assert (answer.status_code, answer.json()["state"]) == (200, "stale")
    assert answer.json()["lock_sha256"] == old, "the requests of before have it"
    (noted,) = as_("red.tenant_admin").get("/v1/audit-events").json()["items"]
    assert (noted["target_kind"], noted["target_id"], noted["action"]) == (
        "environment", env, "asked"
    )  # fmt: skip
    assert (noted["before"]["state"], noted["after"]["state"]) == ("locked", "stale")

    newer = submit(red, "towers\n")
    assert locks(session, newer) == [""]
    locked_now()
    row = the_environment(session)
    assert (row.id, row.packages) == (env, [["blocks", "1.0"], ["towers", "2.0"]])
    assert locks(session, newer) == [row.lock_sha256] != [old]
    assert locks(session, before) == [old]


def locks(session: Session, shown: JSON) -> list[str]:
    """The lock of each task of a request; its device has the packages of that lock ready."""
    rows = tasks(session, shown)
    found = [task.spec.environment.lock for task in rows if task.spec.environment]
    assert [choice_in(task.device_choice).lock for task in rows] == found
    return found


def test_hosts_tell_how_far_they_are(red: TestClient, session: Session, wheels: Path) -> None:
    submit(red, "towers\n")
    locked_now()
    lock = the_environment(session).lock_sha256
    with transaction() as its:
        its.get_one(Device, "h.0").facts = {"builds": {lock: ["waiting", ""]}}
        its.get_one(Device, "h.1").facts = {"builds": {lock: ["failed", "no"]}}
    (shown,) = red.get("/v1/environments").json()["items"]
    assert shown["installing"] == [{"host": "h", "state": "failed", "message": "no"}]
    assert shown["hosts"] == []
    with transaction() as its:
        its.get_one(Device, "h.0").facts = {"builds": {}, "environments": {lock: [5, 7]}}
        its.get_one(Device, "h.1").facts = {"builds": {}, "environments": {lock: [5, 7]}}
    (shown,) = red.get("/v1/environments").json()["items"]
    assert shown["hosts"] == [{"host": "h", "size_bytes": 5, "build_us": 7}]
    assert shown["installing"] == []


def test_refresh_leaves_what_is_not_locked(red: TestClient, session: Session, wheels: Path) -> None:
    submit(red, "towers\n")
    env = the_environment(session).id
    assert red.post(f"/v1/environments/{env}/refresh").json()["state"] == "locking"
    locked_now()
    assert the_environment(session).state == "locked"


def test_same_file_is_locked_once_for_each_tenant(
    as_: Speaker, red: TestClient, session: Session, wheels: Path
) -> None:
    for _ in range(10):
        submit(red, "towers\n")
    submit(as_("blue.member"), "towers\n")
    locked_now()
    rows = session.scalars(select(Environment)).all()
    assert sorted(row.tenant_id for row in rows) == ["ten_blue", "ten_red"]
    assert len({row.lock_sha256 for row in rows}) == 1
    shown = submit(red, "towers\n")
    (task,) = tasks(session, shown)
    assert task.spec.environment is not None
    assert task.spec.environment.lock == rows[0].lock_sha256


def test_package_that_the_index_lacks_fails_the_request_in_uvs_words(
    red: TestClient, session: Session, wheels: Path
) -> None:
    shown = submit(red, "castles>=3\n")
    locked_now()
    (task,) = tasks(session, shown)
    assert (task.state, task.cause, task.island) == ("failed", "environment", None)
    assert "castles" in (task.detail or "")
    assert session.get_one(Request, shown["id"]).state == "failed"
    told = select(func.count()).where(RequestEvent.type == "task.failed")
    assert session.scalar(told) == 1
    add_wheel(wheels, "castles", "3.0")
    shown = submit(red, "castles>=3\n")  # the same file, which is tried again
    locked_now()
    assert the_environment(session).state == "locked"


def test_package_that_would_have_to_be_built_is_refused(
    red: TestClient, session: Session, wheels: Path, tmp_path: Path
) -> None:
    """Its build would read `/`: no build runs at all."""
    seen = tmp_path / "seen"
    setup = f"import os\nopen({str(seen)!r}, 'w').write(str(os.listdir('/')))\n"
    folder = tmp_path / "hostile-1.0"
    folder.mkdir()
    (folder / "setup.py").write_text(f"{setup}from setuptools import setup\nsetup(name='hostile')")
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    with tarfile.open(wheels / "hostile-1.0.tar.gz", "w:gz") as archive:
        archive.add(folder, "hostile-1.0")
    shown = submit(red, "hostile\n")
    locked_now()
    (task,) = tasks(session, shown)
    assert (task.state, task.cause) == ("failed", "environment")
    assert "no usable wheels" in (task.detail or "")
    assert not seen.exists()


def test_another_torch_is_refused_for_jobs_with_the_reason(
    red: TestClient, session: Session, wheels: Path
) -> None:
    for text in ("torch==99.0\n", "modern\n"):
        shown = submit(red, text)
        locked_now()
        (task,) = tasks(session, shown)
        assert task.state == "failed"
        assert "on which saving their state rests" in (task.detail or "")


def test_command_may_bring_its_own_torch(red: TestClient, session: Session, wheels: Path) -> None:
    submit(red, "modern\n", COMMAND)
    locked_now()
    row = the_environment(session)
    assert (row.state, row.packages) == ("locked", [["modern", "1.0"], ["torch", "99.0"]])
    assert row.platform == {}


def test_platforms_packages_are_in_no_lock_over_them(
    red: TestClient, session: Session, wheels: Path
) -> None:
    submit(red, "ordinary\ntorch\n")
    locked_now()
    assert the_environment(session).packages == [["ordinary", "1.0"]]


def test_hashed_lock_is_taken_as_it_is(red: TestClient, session: Session, wheels: Path) -> None:
    digest = add_wheel(wheels, "blocks")
    bundle = upload(red, requirements__lock=f"blocks==1.0 --hash=sha256:{digest}\n")
    answer = red.post("/v1/requests", json=request(bundle, {"lock": "requirements.lock"}))
    assert answer.status_code == 202, answer.text
    locked_now()
    row = the_environment(session)
    assert (row.state, row.packages) == ("locked", [["blocks", "1.0"]])


def test_uv_lock_is_taken_as_it_is(red: TestClient, session: Session, wheels: Path) -> None:
    digest = add_wheel(wheels, "blocks")
    registry = 'source = { registry = "https://example.org/simple" }'
    wheel = (
        f'{{ url = "https://example.org/blocks-1.0-py3-none-any.whl", hash = "sha256:{digest}" }}'
    )
    lock = (
        f'version = 1\nrevision = 3\nrequires-python = ">=3.11"\n'
        f'[[package]]\nname = "blocks"\nversion = "1.0"\n{registry}\nwheels = [{wheel}]\n'
        '[[package]]\nname = "mine"\nversion = "0.1.0"\nsource = { virtual = "." }\n'
        'dependencies = [{ name = "blocks" }]\n'
        '[package.metadata]\nrequires-dist = [{ name = "blocks" }]\n'
    )
    bundle = upload(red, uv__lock=lock)
    answer = red.post("/v1/requests", json=request(bundle, {"lock": "uv.lock"}))
    assert answer.status_code == 202, answer.text
    locked_now()
    row = the_environment(session)
    assert (row.message, row.packages) == ("", [["blocks", "1.0"]])


def test_request_is_cancelled_before_its_environment_is_locked(
    red: TestClient, session: Session, wheels: Path
) -> None:
    shown = submit(red, "towers\n")
    assert red.post(f"/v1/requests/{shown['id']}/cancel").status_code == 202
    locked_now()
    assert [task.state for task in tasks(session, shown)] == ["cancelled"]


def test_lock_over_other_versions_is_made_again(
    red: TestClient, session: Session, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(red, "ordinary\n")
    locked_now()
    before = the_environment(session).lock_sha256
    monkeypatch.setattr(package_locker, "installed", lambda: {"torch": "2.99.0", "numpy": "2.0.0"})
    locked_now()
    assert the_environment(session).state == "stale"
    submit(red, "ordinary\n")
    locked_now()
    row = the_environment(session)
    assert row.state == "locked"
    assert row.lock_sha256 != before


def test_locking_that_takes_too_long_fails(
    red: TestClient, session: Session, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDHOUSE_PACKAGE_LOCK_S", "0.0001")
    settings.cache_clear()
    submit(red, "towers\n")
    locked_now()
    assert "took over" in the_environment(session).message


def test_one_environment_of_a_tenant_is_locked_at_a_time(
    as_: Speaker, red: TestClient, session: Session
) -> None:
    for text in ("blocks\n", "towers\n"):
        submit(red, text)
    submit(as_("blue.member"), "towers\n")
    with transaction() as its:
        first = environments.claim(its, for_s=60)
    with transaction() as its:
        second = environments.claim(its, for_s=60)
    with transaction() as its:
        third = environments.claim(its, for_s=60)
    assert first is not None
    assert second is not None
    assert third is None
    tenants = select(Environment.tenant_id).where(Environment.claimed_until.is_not(None))
    assert sorted(session.scalars(tenants)) == ["ten_blue", "ten_red"]


# --- what is shown --------------------------------------------------------------------------------


def test_environment_is_shown_with_its_lock_and_its_hosts(
    as_: Speaker, red: TestClient, session: Session, wheels: Path
) -> None:
    submit(red, "towers\n")
    (shown,) = red.get("/v1/environments").json()["items"]
    assert (shown["state"], shown["packages"], shown["hosts"]) == ("locking", [], [])
    locked_now()
    row = the_environment(session)
    with transaction() as its:
        for device in its.scalars(select(Device)):
            told = {"environments": {row.lock_sha256: [4096, 1_500_000], "9" * 64: [1, 1]}}
            device.facts = {**device.facts, **told}
    (shown,) = red.get("/v1/environments", params={"state": "locked"}).json()["items"]
    assert shown["packages"] == [
        {"name": "blocks", "version": "1.0"},
        {"name": "towers", "version": "1.0"},
    ]
    assert shown["hosts"] == [{"host": "h", "size_bytes": 4096, "build_us": 1_500_000}]
    assert shown["used_at"]
    whole = red.get(f"/v1/environments/{row.id}").json()
    assert whole["lock"].startswith("# Roundhouse lock 1\n")
    assert "towers==1.0 \\\n    --hash=sha256:" in whole["lock"]
    blue = as_("blue.member")
    assert blue.get("/v1/environments").json()["items"] == []
    assert blue.get(f"/v1/environments/{row.id}").status_code == 404


def test_failed_environment_shows_what_uv_said(
    red: TestClient, session: Session, wheels: Path
) -> None:
    submit(red, "castles\n")
    locked_now()
    (shown,) = red.get("/v1/environments").json()["items"]
    assert shown["state"] == "failed"
    assert "castles" in shown["message"]
    assert red.get(f"/v1/environments/{shown['id']}").json()["lock"] is None


def test_words_of_uv_become_one_line_without_what_it_draws():
    said = (
        "  \u00d7 No solution found:\n  ╰─▶ Because there is no numpy 9\n      it is unsatisfiable."
    )
    told = "No solution found: Because there is no numpy 9 it is unsatisfiable."
    assert environments._gist(said) == told
    assert environments._gist("error: boom") == "boom"
    assert len(environments._gist("long " * 1000)) == environments.GIST_CHARACTERS
