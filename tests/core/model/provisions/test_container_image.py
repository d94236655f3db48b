"""The container image of a command: which tasks can have one, and what each fault says."""

from __future__ import annotations

from typing import Any

import pytest

from app.core.model.descriptor import BadDescriptor, from_json, parse, to_wire
from app.core.model.fields import Fault

COMMAND = {"name": "a", "run": {"command": ["sh", "-c", "true"]}, "image": "debian-12.5"}
BUNDLE = "sha256:" + "0a" * 32


def faults(task: dict[str, Any], **request: Any) -> tuple[Fault, ...]:
    with pytest.raises(BadDescriptor) as refused:
        parse({"tasks": [{**COMMAND, **task}], **request})
    return tuple(refused.value.faults)


def test_image_is_read_and_needed_of_a_device() -> None:
    [task] = parse({"tasks": [COMMAND]}).tasks
    assert task.image == "debian-12.5"
    assert task.devices.choice.needs == ("image:debian-12.5",)
    assert from_json(to_wire(task)) == task


def test_task_without_an_image_needs_nothing_and_sends_nothing() -> None:
    [task] = parse({"tasks": [{**COMMAND, "image": None}]}).tasks
    assert task.image is None
    assert task.devices.choice.needs == ()
    assert "image" not in to_wire(task)


@pytest.mark.parametrize("name", ["", "Debian", "../x", "docker.io/library/debian", 7, ["a"]])
def test_name_of_another_form_is_refused(name: Any) -> None:
    [fault] = faults({"image": name})
    assert fault.pointer == "/tasks/0/image"


@pytest.mark.parametrize(
    "run", [{"job": "train:Train"}, {"function": "train:run"}, {"graph": {"nodes": []}}]
)
def test_what_runs_in_the_python_of_the_platform_cannot_have_an_image(run: Any) -> None:
    told = [f for f in faults({"run": run}, bundle=BUNDLE) if f.pointer == "/tasks/0/image"]
    [kind] = run
    why = f"a {kind} runs in the Python of the platform; only a command can have an image"
    assert [fault.detail for fault in told] == [why]


@pytest.mark.parametrize(
    ("field", "told"), [({"world_size": 2}, "2 of them"), ({"session": {}}, "leave out session")]
)
def test_fields_that_need_the_python_of_the_platform_are_refused(field: Any, told: str) -> None:
    [fault] = faults(field)
    assert fault.pointer == "/tasks/0/image"
    assert told in fault.detail


def test_environment_beside_an_image_is_refused() -> None:
    [fault] = faults({}, bundle=BUNDLE, environment={"requirements": "requirements.txt"})
    told = "a container image has its own packages; leave out environment"
    assert (fault.pointer, fault.detail) == ("/tasks/0/image", told)
