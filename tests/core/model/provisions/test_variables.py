"""A task may set any environment variable but those that are the platform's, each told why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.descriptor import BadDescriptor, as_json, from_json, parse, to_wire
from app.core.model.provisions.variables import (
    MAX_SECRETS,
    MAX_VALUE_BYTES,
    MAX_VARIABLES,
    MAX_VARIABLES_BYTES,
    VARIABLE,
    why_refused,
)
from tests.thoroughness import examples
from workers.commands.gang.ranks import Gang
from workers.process.isolation import sandbox

JOB = {"job": "train:Train"}
COMMAND = {"command": ["python", "train.py"]}
GRAPH = {"graph": f"sha256:{'0' * 64}"}


def read(env: object, run: dict[str, Any] = COMMAND) -> Any:
    body = {"tasks": [{"name": "t", "run": run, "env": env}], "bundle": f"sha256:{'0' * 64}"}
    return parse(body).tasks[0]


def faults(env: object, run: dict[str, Any] = COMMAND) -> list[tuple[str, str]]:
    with pytest.raises(BadDescriptor) as caught:
        read(env, run)
    return [(fault.pointer.removeprefix("/tasks/0/"), fault.code) for fault in caught.value.faults]


@settings(max_examples=examples(50))
@given(
    st.dictionaries(
        st.from_regex(VARIABLE, fullmatch=True).filter(
            lambda name: not why_refused(name, is_command=True)
        ),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50),
        max_size=5,
    )
)
def test_variables_are_read_back_from_both_forms(env: dict[str, str]) -> None:
    task = read(env)
    assert task.env == env
    assert from_json(as_json(task)) == from_json(to_wire(task)) == task
    assert task.devices.choice.needs == (("env",) if env else ())
    assert ("env" in to_wire(task)) == bool(env)


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"A": 1}, [("env/A", "type")]),
        ({"A": None}, [("env/A", "type")]),
        (["A=1"], [("env", "type")]),
        ({"1A": ""}, [("env/1A", "invalid")]),
        ({"A=B": ""}, [("env/A=B", "invalid")]),
        ({"A/B": ""}, [("env/A~1B", "invalid")]),
        ({"": ""}, [("env/", "invalid")]),
        ({"A": "\0"}, [("env/A", "invalid")]),
        ({"A": "x" * (MAX_VALUE_BYTES + 1)}, [("env/A", "range")]),
        ({f"A{n}": "" for n in range(MAX_VARIABLES + 1)}, [("env", "range")]),
        (
            {f"A{n}": "x" * MAX_VALUE_BYTES for n in range(MAX_VARIABLES_BYTES // MAX_VALUE_BYTES)},
            [("env", "range")],
        ),
    ],
)
def test_fault_has_its_place(env: object, told: list[tuple[str, str]]) -> None:
    assert faults(env) == told


@pytest.mark.parametrize("run", [JOB, COMMAND, GRAPH, {"function": "ops:tokenize"}])
@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES"),
        *("HIP_VISIBLE_DEVICES", "ROUNDHOUSE_TASK", "ROUNDHOUSE_ANYTHING", "OMP_NUM_THREADS"),
        *("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"),
    ],
)
def test_variable_of_the_platform_is_refused(name: str, run: dict[str, Any]) -> None:
    assert faults({name: "1"}, run) == [(f"env/{name}", "reserved")]


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "OMP_SCHEDULE"])
def test_variable_that_is_read_at_the_start_is_for_commands(name: str) -> None:
    assert read({name: "x"}).env == {name: "x"}
    assert faults({name: "x"}, JOB) == [(f"env/{name}", "reserved")]


def secrets(names: object, run: dict[str, Any] = COMMAND, **env: str) -> Any:
    task = {"name": "t", "run": run, "secrets": names, "env": env}
    return parse({"tasks": [task], "bundle": f"sha256:{'0' * 64}"}).tasks[0]


def test_names_of_secrets_are_read_back_from_both_forms() -> None:
    task = secrets(["HF_TOKEN", "WANDB_API_KEY"], A="1")
    assert task.secrets == ("HF_TOKEN", "WANDB_API_KEY")
    assert from_json(as_json(task)) == from_json(to_wire(task)) == task
    assert task.devices.choice.needs == ("env", "secrets")
    assert "secrets" not in to_wire(read({}))


@pytest.mark.parametrize(
    ("names", "run", "told"),
    [
        ("HF_TOKEN", COMMAND, [("secrets", "type")]),
        (["HF_TOKEN", 1], COMMAND, [("secrets/1", "type")]),
        (["hf-token"], COMMAND, [("secrets/0", "invalid")]),
        (["HF_TOKEN", "HF_TOKEN"], COMMAND, [("secrets/1", "twice")]),
        (["HF_TOKEN", "PATH"], COMMAND, [("secrets/1", "reserved")]),
        (["LD_PRELOAD"], JOB, [("secrets/0", "reserved")]),
        (["B", "A"], COMMAND, [("secrets/1", "twice")]),
        ([f"A{n}" for n in range(MAX_SECRETS + 1)], COMMAND, [("secrets", "range")]),
    ],
)
def test_faulty_secret_has_its_place(
    names: object, run: dict[str, Any], told: list[tuple[str, str]]
) -> None:
    with pytest.raises(BadDescriptor) as caught:
        secrets(names, run, A="1")
    found = [(fault.pointer.removeprefix("/tasks/0/"), fault.code) for fault in caught.value.faults]
    assert found == told


def test_what_the_platform_sets_is_refused_but_for_a_few(tmp_path: Any) -> None:
    gang = Gang.made(1, 1, "exact", "cpu", is_stored=False)
    ranks = gang.environment(0, 0, "")  # the platform's site folder goes before a PYTHONPATH
    set_by_us = {*sandbox.environment(tmp_path), *sandbox.ENVIRONMENT, *ranks}
    usual = {"LANG", "TZ"}
    assert {name for name in set_by_us if not why_refused(name, is_command=False)} == usual
    own = {"GLIBC_TUNABLES", "OPENBLAS_NUM_THREADS", "PYTHONPATH"}
    assert {name for name in set_by_us if not why_refused(name, is_command=True)} == usual | own
