"""An environment names one file of the bundle, and each task of the request carries its lock."""

from __future__ import annotations

import pytest

from app.core.model.fields import Fault, Fields
from app.core.model.provisions.environment import (
    EnvironmentFile,
    TaskEnvironment,
    may_hold,
    read_environment,
    read_task_environment,
)


def read(body: object) -> tuple[EnvironmentFile | None, list[Fault]]:
    faults: list[Fault] = []
    found = read_environment(Fields(body, "/environment", faults))
    return found, faults


@pytest.mark.parametrize(
    "body",
    [
        {"requirements": "requirements.txt"},
        {"requirements": "deps/requirements-train.txt", "python": "3.12"},
        {"lock": "uv.lock"},
        {"lock": "pylock.toml"},
        {"lock": "pylock.train.toml"},
        {"lock": "requirements.lock"},
        {"lock": "requirements_lock.txt"},
    ],
)
def test_file_of_the_bundle_is_taken(body: dict[str, str]) -> None:
    found, faults = read(body)
    assert not faults
    assert found is not None
    python = {"python": found.python} if found.python else {}
    assert {found.sort: found.path, **python} == body
    assert may_hold(found.path)


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/environment"),
        ({"requirements": "requirements.txt", "lock": "uv.lock"}, "/environment"),
        ({"requirements": "../requirements.txt"}, "/environment/requirements"),
        ({"requirements": "/etc/requirements.txt"}, "/environment/requirements"),
        ({"requirements": "setup.py"}, "/environment/requirements"),
        ({"requirements": "requirements" * 100_000}, "/environment/requirements"),
        ({"requirements": ["tqdm"]}, "/environment/requirements"),
        ({"lock": "poetry.toml"}, "/environment/lock"),
        ({"lock": "uv.lock", "python": "2.7"}, "/environment/python"),
        ({"lock": "uv.lock", "python": 3.12}, "/environment/python"),
        ({"lock": "uv.lock", "pythn": "3.12"}, "/environment/pythn"),
        ("uv.lock", "/environment"),
    ],
)
def test_fault_has_its_place(body: object, pointer: str) -> None:
    _, faults = read(body)
    assert [fault.pointer for fault in faults][:1] == [pointer]


def test_request_without_environment_has_none() -> None:
    faults: list[Fault] = []
    assert read_environment(Fields(None, "/environment", faults, False)) is None
    assert not faults


@pytest.mark.parametrize("own_python", [False, True])
@pytest.mark.parametrize("lock", ["", "5" * 64])
def test_environment_of_a_task_is_read_as_it_was_written(lock: str, own_python: bool) -> None:
    environment = TaskEnvironment(python="3.11", lock=lock, own_python=own_python)
    faults: list[Fault] = []
    assert read_task_environment(Fields(environment.as_json(), "", faults)) == environment
    assert not faults
    assert environment.need == ("python:3.11" if own_python else "environment:3.11")
